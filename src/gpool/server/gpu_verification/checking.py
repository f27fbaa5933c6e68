"""Checks of the opened tiles of a GPU verification. Trusts no size and no order; pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpool.core.trust.gpu_verification import (
    PROBE_BITS,
    PRODUCT_BYTES,
    TILE,
    GpuVerdict,
    Opening,
    Size,
    VerificationKeys,
    leads_to,
    round_key,
)
from gpool.server.gpu_verification.streams import Floats, SomeRows, Sums, digest_of, kept, tile_rows


@dataclass(frozen=True, slots=True)
class Claimed:
    size: Size
    keys: VerificationKeys
    nonce: bytes
    root: bytes
    answer: tuple[bytes, ...]


def check_openings(
    claimed: Claimed, asked: Sequence[int], openings: Sequence[Opening], dice: bytes
) -> GpuVerdict:
    """Judge the opened tiles. `dice`: fresh secret from which the vectors of Freivalds' check are drawn."""
    if tuple(asked) != tuple(opening.tile for opening in openings):
        return GpuVerdict.MALFORMED
    size, roots = claimed.size, (claimed.root, *claimed.answer)
    keys = (claimed.keys.digest, *(round_key(claimed.nonce, root) for root in roots[:-1]))
    rows = SomeRows(size.length)
    for place, opening in enumerate(openings):
        if len(opening.product) != PRODUCT_BYTES or len(opening.paths) != len(roots):
            return GpuVerdict.MALFORMED
        product: Sums = np.frombuffer(opening.product, dtype="<i4").reshape(TILE, TILE)
        words = kept(product.reshape(-1))
        for root, key, path in zip(roots, keys, opening.paths, strict=True):
            digest = digest_of(words, key, opening.tile)
            if not leads_to(root, opening.tile, digest, path, size.depth):
                first = root is claimed.root
                return GpuVerdict.WRONG_COMMIT if first else GpuVerdict.WRONG_ANSWER
        if not is_product(
            product, size, claimed.keys.stream, opening.tile, probe_from(dice, place), rows
        ):
            return GpuVerdict.WRONG_PRODUCT
    return GpuVerdict.PASSED


def is_product(
    product: Sums, size: Size, key: tuple[int, int], tile: int, probe: Floats, rows: SomeRows
) -> bool:
    """Freivalds: C·r = A·(B·r), over the integers: doubles hold every sum exactly.

    `einsum` stays on one core; the library behind `@` would wake them all for every tile.
    """
    block, row, column = tile_rows(tile, size.tiles_across)
    if np.abs(product, dtype=np.int64).max(initial=0) > size.length << 14:
        return False  # no such sum, and too large to multiply exactly
    across, expected = np.zeros(size.length), np.empty(TILE)
    for at in range(0, TILE, rows.AT_ONCE):
        some = slice(at, at + rows.AT_ONCE)
        across += np.einsum("i,ij->j", probe[some], rows.floats(key, 1, block, column + at))
    for at in range(0, TILE, rows.AT_ONCE):
        some = slice(at, at + rows.AT_ONCE)
        expected[some] = np.einsum("ij,j->i", rows.floats(key, 0, block, row + at), across)
    return bool((np.einsum("ij,j->i", product.astype(np.float64), probe) == expected).all())


def probe_from(dice: bytes, place: int) -> Floats:
    drawn = hashlib.shake_256(dice + place.to_bytes(4, "little")).digest(TILE * 2)
    return (np.frombuffer(drawn, dtype="<u2") >> (16 - PROBE_BITS)).astype(np.float64)

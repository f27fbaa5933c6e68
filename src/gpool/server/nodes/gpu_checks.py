"""Arithmetic of GPU verification in numpy, and checks of the opened tiles. Trusts no size and no order; pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpool.core.gpu_verification import (
    MASK,
    PROBE_BITS,
    PRODUCT_BYTES,
    TILE,
    TILE_BYTES,
    GpuVerdict,
    Opening,
    Size,
    VerificationKeys,
    leads_to,
    round_key,
)

Words = NDArray[np.uint64]
Bytes = NDArray[np.int8]
Sums = NDArray[np.int32]
Floats = NDArray[np.float64]

GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BY30, _BY27, _BY31 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix(words: Words, shifted: Words | None = None) -> Words:
    shifted = np.right_shift(words, _BY30, out=shifted)
    words ^= shifted
    words *= _FIRST
    np.right_shift(words, _BY27, out=shifted)
    words ^= shifted
    words *= _SECOND
    np.right_shift(words, _BY31, out=shifted)
    words ^= shifted
    return words


def steps(count: int, first: int = 1) -> Words:
    words = np.arange(first, first + count, dtype=np.uint64)
    words *= np.uint64(GOLDEN)
    return words


def rows_of(
    key: tuple[int, int], side: int, block: int, first: int, rows: int, length: int
) -> Bytes:
    """Rows of A (side 0) or of B's transpose (side 1), `length` bytes each."""
    keys = _row_keys(key, side, block, first, rows)
    return mix(keys[:, None] + steps(length // 8)[None, :]).view(np.int8)


def _row_keys(key: tuple[int, int], side: int, block: int, first: int, rows: int) -> Words:
    start = ((side << 62) | (block << 32) | first) & MASK
    return mix(steps(rows, start) + np.uint64(key[0])) ^ np.uint64(key[1])


class SomeRows:
    """Computes `AT_ONCE` rows in the same memory: fresh pages cost more than the arithmetic."""

    AT_ONCE = 16

    def __init__(self, length: int) -> None:
        self._steps = steps(length // 8)[None, :]
        self._words = np.empty((self.AT_ONCE, length // 8), dtype=np.uint64)
        self._shifted = np.empty_like(self._words)
        self._floats = np.empty((self.AT_ONCE, length), dtype=np.float64)

    def floats(self, key: tuple[int, int], side: int, block: int, first: int) -> Floats:
        keys = _row_keys(key, side, block, first, self.AT_ONCE)
        np.add(keys[:, None], self._steps, out=self._words)
        self._floats[...] = mix(self._words, self._shifted).view(np.int8)
        return self._floats


def kept(product: Sums) -> Words:
    """X of a tile: bits 8..11 of each element, two to a byte, as the words of its digest."""
    nibbles = ((product >> 8) & 15).astype(np.uint8).reshape(-1, 2)
    return (nibbles[:, 0] | nibbles[:, 1] << 4).view(np.uint64)


def digest_of(words: Words, key: tuple[int, int], tile: int) -> int:
    return int(digests_of(words.reshape(1, -1), key, tile)[0])


def digests_of(tiles: Words, key: tuple[int, int], first: int) -> Words:
    keys = mix(steps(len(tiles), first + 1) + np.uint64(key[0])) ^ np.uint64(key[1])
    places = mix(keys[:, None] + steps(TILE_BYTES // 8)[None, :])
    places ^= tiles
    return mix(mix(places).sum(axis=1, dtype=np.uint64) ^ keys)


def tile_rows(tile: int, across: int) -> tuple[int, int, int]:
    block, within = divmod(tile, across * across)
    row, column = divmod(within, across)
    return block, row * TILE, column * TILE


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

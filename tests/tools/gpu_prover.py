"""A prover of GPUs that computes in numpy: honest and far too slow for any real one's terms, and the cheats' workbench."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from gpool.core.gpu_verification import (
    GROUP,
    TILE,
    TILE_BYTES,
    Opening,
    Path,
    Size,
    VerificationKeys,
    parent,
    round_key,
)
from gpool.server.nodes.gpu_checks import Sums, Words, digests_of, kept, rows_of, tile_rows

Tree = list[list[bytes]]
"""Level by level, the leaves first."""


def product_of(size: Size, key: tuple[int, int], tile: int) -> Sums:
    """C of a tile, exactly."""
    block, row, column = tile_rows(tile, size.tiles_across)
    a = rows_of(key, 0, block, row, TILE, size.length).astype(np.float64)
    b = rows_of(key, 1, block, column, TILE, size.length).astype(np.float64)
    return (a @ b.T).astype("<i4")


def all_kept(size: Size, key: tuple[int, int]) -> Words:
    """X: one row of words for each tile. A block is multiplied whole."""
    out = np.empty((size.tiles, TILE_BYTES // 8), dtype=np.uint64)
    across = size.tiles_across
    for block in range(size.blocks):
        a = rows_of(key, 0, block, 0, size.side, size.length).astype(np.float32)
        b = rows_of(key, 1, block, 0, size.side, size.length).astype(np.float32)
        whole = _exact(a, b)
        for within in range(size.tiles_per_block):
            row, column = (part * TILE for part in divmod(within, across))
            tile = whole[row : row + TILE, column : column + TILE]
            out[block * size.tiles_per_block + within] = kept(
                np.ascontiguousarray(tile).reshape(-1)
            )
    return out


def _exact(a: np.ndarray, b: np.ndarray) -> Sums:
    """Floats of 24 bits hold the sums of a thousand products of bytes."""
    total = np.zeros((len(a), len(b)), dtype=np.int32)
    for first in range(0, a.shape[1], 1024):
        total += (a[:, first : first + 1024] @ b[:, first : first + 1024].T).astype(np.int32)
    return total


def tree_over(digests: Words, size: Size) -> Tree:
    padded = np.zeros(size.leaves * GROUP, dtype="<u8")
    padded[: len(digests)] = digests
    raw = padded.tobytes()
    levels = [[hashlib.sha256(raw[i : i + 64]).digest() for i in range(0, len(raw), 64)]]
    while len(levels[-1]) > 1:
        below = levels[-1]
        levels.append([parent(below[i], below[i + 1]) for i in range(0, len(below), 2)])
    return levels


def path_in(tree: Tree, digests: Words, tile: int) -> Path:
    index = tile // GROUP
    group = np.zeros(GROUP, dtype="<u8")
    these = digests[index * GROUP : (index + 1) * GROUP]
    group[: len(these)] = these
    siblings = []
    for level in tree[:-1]:
        siblings.append(level[index ^ 1])
        index //= 2
    return Path(group.tobytes(), tuple(siblings))


class NumpyProver:
    """The same steps as the device's prover. `words` is what it keeps; a cheat keeps something else."""

    def __init__(self, size: Size, keys: VerificationKeys, words: Words | None = None) -> None:
        self.size, self.keys = size, keys
        self.words = words if words is not None else all_kept(size, keys.stream)

    def commit(self) -> bytes:
        self._trees: list[tuple[Tree, Words]] = []
        return self._root(self.keys.digest)

    def answer(self, nonce: bytes, root: bytes, rounds: int) -> tuple[bytes, ...]:
        roots: list[bytes] = []
        for _ in range(rounds):
            root = self._root(round_key(nonce, root))
            roots.append(root)
        return tuple(roots)

    def open(self, tiles: Sequence[int]) -> tuple[Opening, ...]:
        return tuple(
            Opening(
                tile,
                self.product(tile).tobytes(),
                tuple(path_in(tree, digests, tile) for tree, digests in self._trees),
            )
            for tile in tiles
        )

    def _root(self, key: tuple[int, int]) -> bytes:
        digests = digests_of(self.words, key, 0)
        tree = tree_over(digests, self.size)
        self._trees.append((tree, digests))
        return tree[-1][0]

    def product(self, tile: int) -> Sums:
        return product_of(self.size, self.keys.stream, tile)

"""Arithmetic of GPU verification in numpy: keyed stream, X from C, tile digests. Reference for the CUDA kernels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpool.core.trust.gpu_verification import MASK, TILE, TILE_BYTES

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

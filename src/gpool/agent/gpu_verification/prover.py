"""Prover of GPU verification on a CUDA device. Theory: `core.gpu_verification`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from gpool.agent.gpu_verification.cuda import Device
from gpool.core.gpu_verification import (
    GROUP,
    HASH_BYTES,
    PRODUCT_BYTES,
    TILE,
    TILE_BYTES,
    Opening,
    Path,
    Size,
    VerificationKeys,
    round_key,
)

_ROWS, _COLS, _STAGE = 128, 256, (128 + 256) * 64
_AT_ONCE = 16
"""Tiles opened at once: 128 rows of `length` bytes each."""

_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64


class DeviceProver:
    def __init__(self, device: Device, size: Size, keys: VerificationKeys) -> None:
        self._device, self._size, self._keys = device, size, keys
        self._shared = _STAGE * (4 if device.capability >= (8, 0) else 2)
        self._kept = device.take(size.result_bytes)
        self._digests = device.take(size.leaves * GROUP * 8)
        self._nodes = device.take(2 * size.leaves * HASH_BYTES)
        rows = max(size.side, _AT_ONCE * TILE)
        self._a = device.take(rows * size.length)
        self._b = device.take(rows * size.length)
        device.zero(self._digests, size.leaves * GROUP * 8)
        self._round_keys: list[tuple[int, int]] = []

    def commit(self) -> bytes:
        """Step 1: compute everything; return the root over it."""
        for block in range(self._size.blocks):
            self._multiply(block)
            if block % 16 == 15:
                self._device.finish()
        return self._root(self._keys.digest)

    def answer(self, nonce: bytes, root: bytes, rounds: int) -> tuple[bytes, ...]:
        """Step 2: roots over the kept data, keyed by the nonce and the previous root."""
        self._round_keys, roots = [self._keys.digest], []
        for _ in range(rounds):
            self._round_keys.append(round_key(nonce, root))
            root = self._root(self._round_keys[-1])
            roots.append(root)
        return tuple(roots)

    def open(self, tiles: Sequence[int]) -> tuple[Opening, ...]:
        """Step 3: rebuild the trees one after the other in one buffer."""
        assert self._round_keys, "answer comes first"
        paths: list[list[Path]] = [[] for _ in tiles]
        for key in self._round_keys:
            self._root(key)
            for tile, its in zip(tiles, paths, strict=True):
                its.append(self._path(tile))
        products = self._products(tiles)
        return tuple(map(Opening, tiles, products, map(tuple, paths)))

    def close(self) -> None:
        for at in (self._kept, self._digests, self._nodes, self._a, self._b):
            self._device.give_back(at)

    def _fill(self, at: int, side: int, block: int, first: int, rows: int) -> None:
        words = self._size.length // 8
        self._device.launch(
            "fill_rows", (-(-words // 256), rows), 256,
            _u64(at), _u64(self._keys.stream[0]), _u64(self._keys.stream[1]),
            _u32(side), _u32(block), _u32(first), _u32(rows), _u32(words),
        )  # fmt: skip

    def _multiply(self, block: int) -> None:
        side = self._size.side
        self._fill(self._a, 0, block, 0, side)
        self._fill(self._b, 1, block, 0, side)
        self._device.launch(
            "multiply_block", ((side // _ROWS) * (side // _COLS), 1), 256,
            _u64(self._kept + block * self._size.tiles_per_block * TILE_BYTES),
            _u64(self._a), _u64(self._b), _u32(side), _u32(self._size.length), shared=self._shared,
        )  # fmt: skip

    def _root(self, key: tuple[int, int]) -> bytes:
        tiles, leaves = self._size.tiles, self._size.leaves
        self._device.launch(
            "digest_tiles", (-(-tiles // 8), 1), 256,
            _u64(self._digests), _u64(self._kept), _u64(key[0]), _u64(key[1]), _u64(0), _u64(tiles),
        )  # fmt: skip
        self._hash(self._nodes + leaves * HASH_BYTES, self._digests, leaves)
        width = leaves // 2
        while width:
            self._hash(
                self._nodes + width * HASH_BYTES, self._nodes + 2 * width * HASH_BYTES, width
            )
            width //= 2
        return self._device.read(self._nodes + HASH_BYTES, HASH_BYTES)

    def _hash(self, to: int, of: int, count: int) -> None:
        self._device.launch(
            "hash_pairs", (-(-count // 128), 1), 128, _u64(to), _u64(of), _u64(count)
        )

    def _path(self, tile: int) -> Path:
        leaf = tile // GROUP
        group = self._device.read(self._digests + leaf * GROUP * 8, GROUP * 8)
        siblings, index = [], self._size.leaves + leaf
        while index > 1:
            siblings.append(self._device.read(self._nodes + (index ^ 1) * HASH_BYTES, HASH_BYTES))
            index //= 2
        return Path(group, tuple(siblings))

    def _products(self, tiles: Sequence[int]) -> list[bytes]:
        products = []
        out = self._device.take(_AT_ONCE * PRODUCT_BYTES)
        across, length = self._size.tiles_across, self._size.length
        for start in range(0, len(tiles), _AT_ONCE):
            these = tiles[start : start + _AT_ONCE]
            for place, tile in enumerate(these):
                block, within = divmod(tile, self._size.tiles_per_block)
                row, column = divmod(within, across)
                self._fill(self._a + place * TILE * length, 0, block, row * TILE, TILE)
                self._fill(self._b + place * TILE * length, 1, block, column * TILE, TILE)
            self._device.launch(
                "multiply_exactly", (TILE, len(these)), TILE,
                _u64(out), _u64(self._a), _u64(self._b), _u32(length),
            )  # fmt: skip
            read = self._device.read(out, len(these) * PRODUCT_BYTES)
            products += [read[i : i + PRODUCT_BYTES] for i in range(0, len(read), PRODUCT_BYTES)]
        self._device.give_back(out)
        return products

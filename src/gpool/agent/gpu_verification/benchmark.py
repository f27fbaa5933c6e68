"""Benchmark of a CUDA device: matrix products, memory, host transfer; about a second."""

from __future__ import annotations

import ctypes

from gpool.agent.gpu_verification.cuda import Device, Value
from gpool.core.model import MIB
from gpool.core.trust.gpu_verification import MeasuredSpeed

_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64
_STAGE = (128 + 256) * 64
_SIDE, _LENGTH = 8192, 8192
"""Of the products; `_LENGTH` in bytes, whatever the width of an element."""
_COPIED = 2048 * MIB
_SENT = 256 * MIB


def measure(device: Device) -> MeasuredSpeed:
    """Takes 4 GiB of device memory for at most a second."""
    scale = 1 if device.free_and_total[0] > 6 << 30 else 4
    side, length = _SIDE // scale, _LENGTH
    copied = _COPIED // scale
    into, source = device.take(copied), device.take(copied)
    try:
        device.launch(
            "fill_floats", (1024, 1), 256, _u64(source), _u64(1), _u64(copied // 4), _u32(4)
        )
        device.finish()
        tensor = device.capability >= (8, 0)
        stages = 4 if tensor else 2
        floats: dict[str, int] = {}
        for name, width in (("multiply_bf16", 2), ("multiply_tf32", 4)):
            if tensor:
                half = side * length
                device.launch(
                    "fill_floats", (1024, 1), 256,
                    _u64(source), _u64(2), _u64(2 * half // width), _u32(width),
                )  # fmt: skip
            floats[name] = (
                _product(device, name, into, source, side, length, length // width, stages)
                if tensor
                else 0
            )
        int8 = _product(device, "multiply_block", into, source, side, length, length, stages)
        plain = side // 2
        fp32 = _rate(
            device, 2 * plain**3, "multiply_fp32", (plain // 128, plain // 128),
            (_u64(into), _u64(source), _u64(source + plain * plain * 4), _u32(plain)), 0,
        )  # fmt: skip
        moved = _rate(
            device, 2 * copied * 1_000_000_000, "copy_words", (device.multiprocessors * 16, 1),
            (_u64(into), _u64(source), _u64(copied // 16)), 0,
        )  # fmt: skip
        sent = int(device.send_pinned(into, _SENT // scale, 4))
    finally:
        device.give_back(into)
        device.give_back(source)
    return MeasuredSpeed(fp32, floats["multiply_tf32"], floats["multiply_bf16"], int8, moved, sent)


def _product(
    device: Device,
    name: str,
    into: int,
    source: int,
    side: int,
    length: int,
    depth: int,
    stages: int,
) -> int:
    return _rate(
        device, 2 * side * side * depth, name, ((side // 128) * (side // 256), 1),
        (_u64(into), _u64(source), _u64(source + side * length), _u32(side), _u32(length)), _STAGE * stages,
    )  # fmt: skip


def _rate(
    device: Device,
    work: int,
    name: str,
    grid: tuple[int, int],
    arguments: tuple[Value, ...],
    shared: int,
) -> int:
    """Return billions of `work` per second: best of three runs of three, after one warm-up."""
    device.launch(name, grid, 256, *arguments, shared=shared)
    best = 0.0
    for _ in range(3):
        with device.timed() as spent:
            for _ in range(3):
                device.launch(name, grid, 256, *arguments, shared=shared)
        best = max(best, 3 * work / spent[0])
    return int(best / 1e9)

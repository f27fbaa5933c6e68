"""CUDA device through the driver API, and its benchmark. Needs only `libcuda`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import Final

from gpool.core.gpu_verification import MeasuredSpeed
from gpool.core.model import MIB

_MAX_DYNAMIC_SHARED: Final = 8
_MULTIPROCESSORS: Final = 16
_MAJOR, _MINOR = 75, 76


class CudaFailed(Exception):
    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} ({code})")
        self.call, self.code = call, code


class NoCuda(Exception):
    """No CUDA driver, no such device, or one too old for the kernels."""


Value = ctypes.c_uint32 | ctypes.c_uint64


def _arguments(values: Sequence[Value]) -> ctypes.Array[ctypes.c_void_p]:
    pointers = [ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values]
    return (ctypes.c_void_p * len(pointers))(*pointers)


class Device:
    def __init__(self, index: int = 0, *, ptx: bytes | None = None) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NoCuda("no NVIDIA driver here (libcuda.so.1)") from error
        self._must("cuInit", 0)
        device = ctypes.c_int()
        self._must("cuDeviceGet", ctypes.byref(device), index)
        self._device = device
        self.capability = (self._attribute(_MAJOR), self._attribute(_MINOR))
        if self.capability < (7, 5):
            raise NoCuda(f"compute capability {self.capability}: 7.5 or later is needed")
        self.multiprocessors = self._attribute(_MULTIPROCESSORS)
        self._context = ctypes.c_void_p()
        self._must("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._must("cuCtxSetCurrent", self._context)
        self._taken: list[int] = []
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._ptx = ptx
        self._module: ctypes.c_void_p | None = None  # loaded with the first kernel

    def _must(self, call: str, *arguments: object) -> None:
        code = getattr(self._driver, call)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            said = text.value.decode() if text.value else "unknown error"
            if call in ("cuInit", "cuDeviceGet"):
                raise NoCuda(f"{call}: {said}")
            raise CudaFailed(call, code, said)

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._must("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self._must("cuDeviceGetName", text, len(text), self._device)
        return text.value.decode()

    @property
    def uuid(self) -> str:
        raw = (ctypes.c_ubyte * 16)()
        self._must("cuDeviceGetUuid", raw, self._device)
        hexes = bytes(raw).hex()
        parts = (hexes[:8], hexes[8:12], hexes[12:16], hexes[16:20], hexes[20:])
        return "GPU-" + "-".join(parts)

    @property
    def free_and_total(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._must("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def take(self, size: int) -> int:
        at = ctypes.c_uint64()
        self._must("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
        self._taken.append(at.value)
        return at.value

    def give_back(self, at: int) -> None:
        self._taken.remove(at)
        self._must("cuMemFree_v2", ctypes.c_uint64(at))

    def zero(self, at: int, size: int) -> None:
        self._must("cuMemsetD8_v2", ctypes.c_uint64(at), ctypes.c_ubyte(0), ctypes.c_size_t(size))

    def read(self, at: int, size: int) -> bytes:
        into = ctypes.create_string_buffer(size)
        self._must("cuMemcpyDtoH_v2", into, ctypes.c_uint64(at), ctypes.c_size_t(size))
        return into.raw

    def launch(
        self, name: str, grid: tuple[int, int], threads: int, *arguments: Value, shared: int = 0
    ) -> None:
        function = self._function(name, shared)
        self._must(
            "cuLaunchKernel", function, *(ctypes.c_uint(n) for n in (*grid, 1, threads, 1, 1, shared)),
            None, _arguments(arguments), None,
        )  # fmt: skip

    def _function(self, name: str, shared: int) -> ctypes.c_void_p:
        if self._module is None:
            source = self._ptx if self._ptx is not None else kernels_for(self.capability)
            self._module = ctypes.c_void_p()
            self._must("cuModuleLoadData", ctypes.byref(self._module), ctypes.c_char_p(source))
        if name not in self._functions:
            found = ctypes.c_void_p()
            self._must("cuModuleGetFunction", ctypes.byref(found), self._module, name.encode())
            if shared > 48 * 1024:
                self._must("cuFuncSetAttribute", found, _MAX_DYNAMIC_SHARED, shared)
            self._functions[name] = found
        return self._functions[name]

    def finish(self) -> None:
        self._must("cuCtxSynchronize")

    @contextmanager
    def timed(self) -> Iterator[list[float]]:
        """Device seconds of the block, one value in the list afterwards."""
        first, last = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (first, last):
            self._must("cuEventCreate", ctypes.byref(event), 0)
        seconds: list[float] = []
        self._must("cuEventRecord", first, None)
        yield seconds
        self._must("cuEventRecord", last, None)
        self._must("cuEventSynchronize", last)
        spent = ctypes.c_float()
        self._must("cuEventElapsedTime", ctypes.byref(spent), first, last)
        for event in (first, last):
            self._must("cuEventDestroy_v2", event)
        seconds.append(spent.value / 1e3)

    def send_pinned(self, at: int, size: int, times: int) -> float:
        """Bytes per second from pinned host memory."""
        host = ctypes.c_void_p()
        self._must("cuMemAllocHost_v2", ctypes.byref(host), ctypes.c_size_t(size))
        try:
            ctypes.memset(host, 1, size)
            with self.timed() as spent:
                for _ in range(times):
                    self._must(
                        "cuMemcpyHtoDAsync_v2",
                        ctypes.c_uint64(at),
                        host,
                        ctypes.c_size_t(size),
                        None,
                    )
        finally:
            self._must("cuMemFreeHost", host)
        return size * times / spent[0]

    def close(self) -> None:
        for at in self._taken[:]:
            self.give_back(at)
        if self._module is not None:
            self._must("cuModuleUnload", self._module)
        self._must("cuDevicePrimaryCtxRelease_v2", self._device)

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def kernels_for(capability: tuple[int, int]) -> bytes:
    name = "kernels_80.ptx" if capability >= (8, 0) else "kernels_75.ptx"
    return (resources.files("gpool.agent.gpu_verification") / name).read_bytes()


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

"""Overwrites and checks all free memory of the visible CUDA GPU. Stdlib only; run as a script without privileges.

Prints one JSON line {"free", "scrubbed", "wrong"}: free bytes, overwritten bytes, samples with a wrong value. Uses only
the driver's library, so nothing needs installing.
"""

from __future__ import annotations

import ctypes
import json
import sys

CHUNK = 4 << 30
LEAST = 2 << 20  # the driver's smallest allocation
SAMPLE = 4096
SAMPLES = 64  # per chunk
MARK, CLEAN = 0x5C, 0


class CudaCallFailed(Exception): ...


def open_driver() -> ctypes.CDLL:
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    call(cuda, "cuInit", 0)
    call(cuda, "cuDeviceGet", ctypes.byref(device), 0)
    call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call(cuda, "cuCtxSetCurrent", context)
    return cuda


def call(cuda: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(cuda, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(text))
        raise CudaCallFailed(f"{name}: {(text.value or b'?').decode()}")


def take_all(cuda: ctypes.CDLL) -> list[tuple[int, int]]:
    held, size = [], CHUNK
    while size >= LEAST:
        place = ctypes.c_uint64()
        try:
            call(cuda, "cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(size))
        except CudaCallFailed:
            size //= 2
            continue
        held.append((place.value, size))
    return held


def overwrite(cuda: ctypes.CDLL, held: list[tuple[int, int]], value: int) -> int:
    for place, size in held:
        call(cuda, "cuMemsetD8_v2", ctypes.c_uint64(place), value, ctypes.c_size_t(size))
    call(cuda, "cuCtxSynchronize")
    page = ctypes.create_string_buffer(SAMPLE)
    wanted, wrong = bytes([value]) * SAMPLE, 0
    for place, size in held:
        step = max(SAMPLE, size // SAMPLES // SAMPLE * SAMPLE)
        for offset in range(0, size - SAMPLE + 1, step):
            at = ctypes.c_uint64(place + offset)
            call(cuda, "cuMemcpyDtoH_v2", page, at, ctypes.c_size_t(SAMPLE))
            wrong += page.raw != wanted
    return wrong


def main() -> int:
    try:
        cuda = open_driver()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        call(cuda, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        held = take_all(cuda)
        wrong = overwrite(cuda, held, MARK) + overwrite(cuda, held, CLEAN)
    except (CudaCallFailed, OSError) as why:
        sys.stdout.write(json.dumps({"refused": str(why)}) + "\n")
        return 1
    scrubbed = sum(size for _, size in held)
    sys.stdout.write(json.dumps({"free": free.value, "scrubbed": scrubbed, "wrong": wrong}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

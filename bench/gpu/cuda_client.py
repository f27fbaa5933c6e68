"""A small CUDA program over the driver library alone (ctypes, no torch): what it sees, takes and finds. For the scripts here.

Prints JSON lines. `hold BYTES`: takes that much, says so, waits for a line. `fill PART`: writes a pattern over that part of
the free memory. `spy PART`: counts bytes of the pattern in fresh memory. `see`: what CUDA shows.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time

PATTERN = 0xA7
CHUNK = 1 << 30
SM_COUNT = 16


class Refused(Exception):
    pass


cuda = ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    code = getattr(cuda, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(text))
        raise Refused(f"{name}: {(text.value or b'?').decode()}")


def say(**facts: object) -> None:
    print(json.dumps({"at": round(time.perf_counter() - BEGAN, 3), **facts}), flush=True)


def open_context() -> None:
    call("cuInit", 0)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)


def memory() -> tuple[int, int]:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def take(size: int) -> ctypes.c_uint64:
    place = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(size))
    return place


def see() -> None:
    sms = ctypes.c_int()
    call("cuDeviceGetAttribute", ctypes.byref(sms), SM_COUNT, 0)
    name = ctypes.create_string_buffer(100)
    call("cuDeviceGetName", name, 100, 0)
    free, total = memory()
    say(
        sees=name.value.decode(),
        sms=sms.value,
        free=free,
        total=total,
        pid=os.getpid(),
        uid=os.getuid(),
    )


def take_part(part: float) -> list[tuple[ctypes.c_uint64, int]]:
    free, _ = memory()
    left, held, size = int(free * part), [], CHUNK
    while left > 1 << 21:
        try:
            held.append((take(min(size, left)), min(size, left)))
            left -= held[-1][1]
        except Refused:
            if size <= 1 << 21:
                break
            size //= 2
    return held


def main() -> None:
    word, argument = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    open_context()
    if word == "see":
        see()
    elif word == "hold":
        see()
        for size in argument.split(","):
            try:
                place = take(int(size))
                call("cuMemsetD8_v2", place, 1, ctypes.c_size_t(int(size)))
                call("cuCtxSynchronize")
                say(took=int(size))
            except Refused as why:
                say(refused=int(size), why=str(why))
        sys.stdin.readline()
    elif word == "fill":
        held = take_part(float(argument))
        for place, size in held:
            call("cuMemsetD8_v2", place, PATTERN, ctypes.c_size_t(size))
        call("cuCtxSynchronize")
        say(filled=sum(size for _, size in held), of=memory()[1])
    elif word == "spy":
        held = take_part(float(argument))
        found = nonzero = looked = 0
        page = ctypes.create_string_buffer(1 << 26)
        pattern = bytes([PATTERN])
        for place, size in held:
            for offset in range(0, size, 1 << 26):
                part = min(1 << 26, size - offset)
                call(
                    "cuMemcpyDtoH_v2",
                    page,
                    ctypes.c_uint64(place.value + offset),
                    ctypes.c_size_t(part),
                )
                seen = page.raw[:part]
                looked += part
                found += seen.count(pattern)
                nonzero += part - seen.count(0)
        say(spied=looked, of=memory()[1], pattern=found, nonzero=nonzero)
    elif word == "again":  # the control: what one program frees, it finds again itself
        held = take_part(0.5)
        for place, size in held:
            call("cuMemsetD8_v2", place, PATTERN, ctypes.c_size_t(size))
        call("cuCtxSynchronize")
        for place, _ in held:
            call("cuMemFree_v2", place)
        page = ctypes.create_string_buffer(1 << 26)
        place = take(1 << 26)
        call("cuMemcpyDtoH_v2", page, place, ctypes.c_size_t(1 << 26))
        say(again=page.raw.count(bytes([PATTERN])), of=1 << 26)


BEGAN = time.perf_counter()
if __name__ == "__main__":
    try:
        main()
    except Refused as refused:
        say(failed=str(refused))
        sys.exit(1)

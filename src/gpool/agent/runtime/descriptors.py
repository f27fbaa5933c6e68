"""Descriptors under any event loop (asyncio's or uvloop's)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence


async def readable(descriptors: Sequence[int], within_s: float | None = None) -> bool:
    """Wait for data or the end on one descriptor; False after `within_s` (None: no limit)."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[bool] = loop.create_future()

    def tell(answer: bool) -> None:
        if not ready.done():
            ready.set_result(answer)

    timer = loop.call_later(within_s, tell, False) if within_s is not None else None
    for descriptor in descriptors:
        loop.add_reader(descriptor, tell, True)
    try:
        return await ready
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
        if timer is not None:
            timer.cancel()


async def writable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_writer(descriptor, tell)
    try:
        await ready
    finally:
        loop.remove_writer(descriptor)


def command_pipes() -> tuple[tuple[int, int, int], tuple[int, int]]:
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    os.set_blocking(out, False)
    os.set_blocking(err, False)
    return (os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), out_end, err_end), (out, err)


def memory_file(name: str, data: bytes) -> int:
    """Descriptor of the data, which no command line shows."""
    made = os.memfd_create(name, os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(made, view) :]
    os.lseek(made, 0, os.SEEK_SET)
    return made


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

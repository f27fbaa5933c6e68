"""Descriptors under any event loop (asyncio's or uvloop's)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence


async def readable(descriptors: Sequence[int], within_s: float | None = None) -> bool:
    """Wait for data or the end on one descriptor; False after `within_s` (None: no limit)."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[bool] = loop.create_future()
    timer = loop.call_later(within_s, _answer, ready, False) if within_s is not None else None
    for descriptor in descriptors:
        loop.add_reader(descriptor, _answer, ready, True)
    try:
        return await ready
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
        if timer is not None:
            timer.cancel()


class ReadWatch:
    """One descriptor that stays registered with the loop from wait to wait, which `readable` pays for each time.

    Data that comes while no coroutine waits ends the registration: the loop would report it in every iteration.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop: asyncio.AbstractEventLoop | None = None  # None: not registered
        self._waiter: asyncio.Future[bool] | None = None

    async def wait(self, within_s: float) -> bool:
        """Wait for data or the end; False after `within_s`."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiter = waiter
        if self._loop is None:
            loop.add_reader(self._descriptor, self._tell)
            self._loop = loop
        timer = loop.call_later(within_s, _answer, waiter, False)
        try:
            return await waiter
        finally:
            self._waiter = None
            timer.cancel()

    def close(self) -> None:
        """End the registration, before the descriptor is closed."""
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
            self._loop = None

    def _tell(self) -> None:
        if self._waiter is None:
            self.close()
        else:
            _answer(self._waiter, True)


def _answer(waiter: asyncio.Future[bool], answer: bool) -> None:
    if not waiter.done():
        waiter.set_result(answer)


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

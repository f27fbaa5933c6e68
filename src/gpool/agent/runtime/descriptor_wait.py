"""Waiting for descriptors under any event loop: asyncio's or uvloop's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


async def readable(descriptors: Sequence[int], within_s: float | None = None) -> bool:
    """Whether one of them has something to read, or has ended, in that time (None: however long it takes)."""
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
    """When it takes bytes again, or is broken."""
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

"""Memory watchdog: ends a sandbox whose processes hold more GPU memory than its slice, and no other.

Needed behind MPS too, whose limit is per process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection

import structlog

from gpool.agent.machine.detection.nvml import Nvml, NvmlError
from gpool.agent.runtime.protocol import GpuShare
from gpool.agent.sharing.plan import overdrawn
from gpool.core.model import GIB, MIB

EVERY_S = 0.2

log = structlog.get_logger(__name__)


class Watched:
    __slots__ = ("gpu", "limit_bytes", "seat")

    def __init__(self, gpu: str, limit_bytes: int, seat: GpuShare) -> None:
        self.gpu, self.limit_bytes, self.seat = gpu, limit_bytes, seat


class Watchdog:
    """Polls only while there are slices to watch."""

    def __init__(self, nvml: Nvml, every_s: float = EVERY_S) -> None:
        self._nvml = nvml
        self._every_s = every_s
        self._watched: set[Watched] = set()
        self._looking: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def begin(self, watched: Watched) -> None:
        self._watched.add(watched)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_on())

    def end(self, watched: Watched) -> None:
        self._watched.discard(watched)

    async def close(self) -> None:
        self._watched.clear()
        tasks = [*self._ending, *([self._looking] if self._looking is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _look_on(self) -> None:
        while self._watched:
            await self.look()
            await asyncio.sleep(self._every_s)

    async def look(self) -> None:
        try:
            found = await asyncio.to_thread(self._find, tuple(self._watched))
        except NvmlError as error:
            log.warning("gpu_memory_not_seen", error=str(error))
            return
        for watched, held in found.items():
            seat = watched.seat
            if seat.exceeded or seat.kill is None:
                continue
            seat.exceeded = over(held, watched.limit_bytes)
            log.info("gpu_slice_exceeded", gpu=watched.gpu, held=held, limit=watched.limit_bytes)
            task = asyncio.create_task(_ended(seat.kill()))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _find(self, watched: Collection[Watched]) -> dict[Watched, int]:
        found: dict[Watched, int] = {}
        for gpu in {one.gpu for one in watched}:
            here = [one for one in watched if one.gpu == gpu]
            processes = self._nvml.processes(gpu)
            owner_of = {
                process.pid: one
                for process in processes
                for one in here
                if one.seat.owns is not None and one.seat.owns(process.pid)
            }
            found |= overdrawn(processes, owner_of, {one: one.limit_bytes for one in here})
        return found


async def _ended(killing: Awaitable[None]) -> None:
    await killing


def over(held: int, limit: int) -> str:
    return f"it held {size(held)} of GPU memory, more than its GPU memory slice of {size(limit)}"


def size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"

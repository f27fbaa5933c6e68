"""GPU memory of sandboxes: the watchdog of a slice's limit, and the scrub between users.

Needed behind MPS too, whose limit is per process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from gpool.agent.machine.nvml import GpuProcess, NvmlError
from gpool.agent.runtime.protocol import CommandJob, GpuShare, Runtime, SandboxFailed, SandboxLimits
from gpool.agent.sharing.plan import overdrawn
from gpool.core.model import GIB, MIB

EVERY_S = 0.2

log = structlog.get_logger(__name__)


class Watched:
    __slots__ = ("gpu", "limit_bytes", "seat")

    def __init__(self, gpu: str, limit_bytes: int, seat: GpuShare) -> None:
        self.gpu, self.limit_bytes, self.seat = gpu, limit_bytes, seat


class Watchdog:
    """Polls only while there are slices to watch. `processes` lists those of a GPU, by uuid, and blocks."""

    def __init__(
        self, processes: Callable[[str], Sequence[GpuProcess]], every_s: float = EVERY_S
    ) -> None:
        self._processes = processes
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
        for watched, why in found.items():
            seat = watched.seat
            if seat.exceeded or seat.kill is None:
                continue
            seat.exceeded = why
            log.info("gpu_slice_exceeded", gpu=watched.gpu, why=why)
            task = asyncio.create_task(_ended(seat.kill()))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _find(self, watched: Collection[Watched]) -> dict[Watched, str]:
        found: dict[Watched, str] = {}
        for gpu in {one.gpu for one in watched}:
            here = [one for one in watched if one.gpu == gpu]
            processes = self._processes(gpu)
            owner_of = {
                process.pid: one
                for process in processes
                for one in here
                if one.seat.owns is not None and one.seat.owns(process.pid)
            }
            held = overdrawn(processes, owner_of, {one: one.limit_bytes for one in here})
            found |= {one: over(size, one.limit_bytes) for one, size in held.items()}
            hosted = [GpuProcess(process.pid, process.host_bytes) for process in processes]
            limits = {one: one.seat.memory_bytes for one in here if one.seat.memory_bytes}
            limited = {pid: one for pid, one in owner_of.items() if one in limits}
            for one, size in overdrawn(hosted, limited, limits).items():
                found[one] = over_host(size, limits[one])
        return found


async def _ended(killing: Awaitable[None]) -> None:
    await killing


def over(held: int, limit: int) -> str:
    return f"it held {size(held)} of GPU memory, more than its GPU memory slice of {size(limit)}"


def over_host(held: int, limit: int) -> str:
    return f"its GPU held {size(held)} of the host's memory, more than its {size(limit)} of memory"


def size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


SCRIPT = Path(__file__).with_name("scrubber.py")
WITHIN_S = 30.0
LEAST_PART = 0.95
"""Least part of the free memory to overwrite; the driver keeps some once a program starts."""
LIMITS = SandboxLimits(cpu_milli=2000, memory_bytes=8 * GIB)
MOST_SAID = 64 * 1024


@dataclass(frozen=True, slots=True)
class Scrubbed:
    free: int = 0
    scrubbed: int = 0
    wrong: int = 0
    refused: str = ""


def fault(told: Scrubbed) -> str:
    """Reason; empty if clean."""
    if told.refused:
        return told.refused
    if told.wrong:
        return f"{told.wrong} samples of it did not hold what was written"
    if told.scrubbed < LEAST_PART * told.free or not told.scrubbed:
        return f"only {told.scrubbed} of {told.free} free bytes could be overwritten"
    return ""


def read(said: bytes) -> Scrubbed:
    lines = said.strip().splitlines()
    try:
        return msgspec.json.decode(lines[-1] if lines else b"", type=Scrubbed)
    except msgspec.DecodeError:
        return Scrubbed(refused=said.decode("utf-8", "replace").strip()[-400:] or "it said nothing")


async def scrub(runtime: Runtime, seat: GpuShare) -> Scrubbed:
    """Overwrite all free memory of the GPU. Never raises for faults of the card."""
    argv = ("python3", "-I", "-c", SCRIPT.read_text())
    said = b""
    try:
        async with asyncio.timeout(WITHIN_S):
            sandbox = await runtime.start_command(
                CommandJob(argv, (), (), (), LIMITS, gpu_share=seat)
            )
            try:
                async for _, data in sandbox.output():
                    said = (said + data)[-MOST_SAID:]
                await sandbox.ended()
            finally:
                await asyncio.shield(sandbox.remove())
    except TimeoutError:
        return Scrubbed(refused=f"it took longer than {WITHIN_S:g} s")
    except SandboxFailed as error:
        return Scrubbed(refused=str(error))
    return read(said)

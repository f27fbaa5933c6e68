"""A guest as the rest of the agent sees it: something started, and a place where its outputs lie."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from gpool.agent.runtime.bubblewrap.launcher_client import ProcessExit, StartedProcess
from gpool.agent.runtime.descriptor_wait import readable
from gpool.agent.runtime.microvm.guest_link import GuestConnection
from gpool.agent.runtime.microvm.guest_outputs import printable
from gpool.agent.runtime.protocol import BadOutput
from gpool.agent.runtime.work_directory import WorkDirectory
from gpool.core.model import OutputFile

TAIL_BYTES = 2000
CONSOLE_CHUNK_BYTES = 64 * 1024
CONSOLE_EVERY_S = 0.05  # a guest that floods its console waits, and not we
T = TypeVar("T")


class Console:
    """What the guest's kernel and the monitor say: the last of it is kept, for when something went wrong."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._tail = b""
        self._task = asyncio.create_task(self._drain())

    def ends(self) -> tuple[int, int]:
        """stdout and stderr for the monitor; to be taken once."""
        return os.dup(self._write), self._write

    async def _drain(self) -> None:
        try:
            while True:
                await readable([self._read])
                data = os.read(self._read, CONSOLE_CHUNK_BYTES)
                if not data:
                    return
                self._tail = (self._tail + data)[-TAIL_BYTES:]
                await asyncio.sleep(CONSOLE_EVERY_S)
        finally:
            os.close(self._read)

    def tail(self) -> str:
        lines = self._tail.decode("utf-8", "replace").split("\n")
        return printable(" | ".join(line.strip() for line in lines[-6:] if line.strip()))

    async def close(self) -> str:
        """What it said last."""
        await asyncio.wait([self._task], timeout=1.0)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return self.tail()


class StartedGuest(StartedProcess):
    """What runs in a guest: over when the command is, though the machine stays until its outputs are fetched."""

    def __init__(self, monitor: StartedProcess, talk: GuestConnection, console: Console) -> None:
        self._monitor = monitor
        self._talk = talk
        self._console = console
        self._closed = False
        talk.on_lie = monitor.kill
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        self._talk.gone(await self._monitor.exited())

    @property
    def is_over(self) -> bool:
        return self._talk.over.done()

    async def exited(self) -> ProcessExit:
        return await asyncio.shield(self._talk.over)

    async def kill(self) -> None:
        """The whole machine, outputs and all."""
        await self._monitor.kill()
        await self._watching
        if not self._closed:
            self._closed = True
            await self._console.close()
            await self._talk.close()

    async def warn(self) -> None:
        if not self.is_over:
            await self._talk.warn()


class GuestWorkDirectory(WorkDirectory):
    """A work directory that lies in a guest: outputs come over the line. What lies on the host is the disk, unread."""

    __slots__ = ("_loop", "_talk")

    def __init__(self, root: Path, uid: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(root, uid)
        object.__setattr__(self, "_loop", loop)
        object.__setattr__(self, "_talk", None)

    _loop: asyncio.AbstractEventLoop
    _talk: GuestConnection | None

    def use(self, talk: GuestConnection) -> None:
        object.__setattr__(self, "_talk", talk)

    def collect(self, wanted: Sequence[str], into: Path, quota_bytes: int) -> list[OutputFile]:
        """Called in a thread, as every work place's; the loop does the work."""
        talk = self._talking()
        asked = asyncio.run_coroutine_threadsafe(
            talk.collect(wanted, into, quota_bytes), self._loop
        )
        return _result(asked)

    def take_value(self, name: str, into: Path, quota_bytes: int) -> Path:
        talk = self._talking()
        asked = asyncio.run_coroutine_threadsafe(
            talk.take_value(name, into, quota_bytes), self._loop
        )
        return _result(asked)

    def _talking(self) -> GuestConnection:
        if self._talk is None:
            raise BadOutput("the guest never ran")
        return self._talk


def _result(asked: Future[T]) -> T:
    return asked.result()

"""A running command of any runtime."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from gpool.agent.runtime.bubblewrap.launcher_client import ProcessExit, StartedProcess
from gpool.agent.runtime.collection import take
from gpool.agent.runtime.descriptors import readable
from gpool.agent.runtime.disk_watchdog import WatchedDirectory
from gpool.agent.runtime.protocol import GpuShare, SandboxExit
from gpool.agent.runtime.work_directory import WorkDirectory
from gpool.core.model import EndReason, OutputFile

READ_BYTES = 64 * 1024
HEAD_BYTES = 512
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # exit codes, as a shell's
KILLED = 137


def limit_exceeded(watched: WatchedDirectory, share: GpuShare | None) -> SandboxExit | None:
    if watched.exceeded:
        detail = f"it wrote more than its disk limit of {watched.limit_bytes} bytes"
        return SandboxExit(KILLED, EndReason.BAD_OUTPUT, detail)
    if share is not None and share.exceeded:
        return SandboxExit(KILLED, EndReason.OUT_OF_MEMORY, share.exceeded)
    return None


class RunningCommand:
    def __init__(
        self,
        started: StartedProcess,
        pipes: tuple[int, int],
        place: WorkDirectory,
        *,
        disk_bytes: int,
        judge: Callable[[ProcessExit, bytes], SandboxExit],
        release: Callable[[], None],
    ) -> None:
        self._started = started
        self._streams = {pipes[0]: 1, pipes[1]: 2}
        self._place = place
        self._disk_bytes = disk_bytes
        self._judge = judge
        self._release: Callable[[], None] | None = release
        self._head = b""
        self._ended: SandboxExit | None = None

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        while self._streams:
            idle = True
            for descriptor, stream in list(self._streams.items()):
                try:
                    data = os.read(descriptor, READ_BYTES)
                except BlockingIOError:
                    continue
                idle = False
                if not data:
                    self._close(descriptor)
                    continue
                if stream == 2 and len(self._head) < HEAD_BYTES:
                    self._head += data[: HEAD_BYTES - len(self._head)]
                yield stream, data
            if idle:
                await readable(tuple(self._streams))
            else:
                await asyncio.sleep(0)  # a flood of output must not delay the agent's heartbeats

    def _close(self, descriptor: int) -> None:
        if self._streams.pop(descriptor, None) is not None:
            os.close(descriptor)

    async def ended(self) -> SandboxExit:
        exit = await self._started.exited()
        if self._ended is None:
            self._ended = self._judge(exit, self._head)
        return self._ended

    async def kill(self) -> None:
        await self._started.kill()

    async def warn(self) -> None:
        await self._started.warn()

    async def collect(self, wanted: Sequence[str], into: Path) -> list[OutputFile]:
        if not wanted:
            return []
        return await asyncio.to_thread(self._place.collect, tuple(wanted), into, self._disk_bytes)

    async def read_end(self, name: str, most_bytes: int) -> bytes:
        return await asyncio.to_thread(self._place.read_end, name, most_bytes)

    async def take(self, directory: str, to: Path) -> None:
        """Move a directory of the ended command, then owned by the agent and read-only; links are not followed.

        Raises `BadOutput` for a missing, special or too deep entry.
        """
        await self._started.exited()
        place = self._place
        await asyncio.to_thread(take, place.work, directory, to, place.uid)

    async def remove(self) -> None:
        release, self._release = self._release, None
        if release is None:
            return
        await self._started.kill()
        await self.ended()
        for descriptor in tuple(self._streams):
            self._close(descriptor)
        if not self._place.remove_if_empty():
            await asyncio.to_thread(self._place.remove)
        release()

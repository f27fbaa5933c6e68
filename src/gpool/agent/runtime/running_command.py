"""A running command, whatever isolates it: reads its pipes, waits for its end, takes its outputs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from gpool.agent.runtime.bubblewrap.launcher_client import ProcessExit, StartedProcess
from gpool.agent.runtime.collection import take
from gpool.agent.runtime.descriptor_wait import readable
from gpool.agent.runtime.protocol import SandboxExit
from gpool.agent.runtime.work_directory import WorkDirectory
from gpool.core.model import OutputFile

READ_BYTES = 64 * 1024
HEAD_BYTES = 512


def command_pipes() -> tuple[tuple[int, int, int], tuple[int, int]]:
    """((stdin, stdout, stderr) for the command, (stdout, stderr) for us)."""
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    os.set_blocking(out, False)
    os.set_blocking(err, False)
    return (os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), out_end, err_end), (out, err)


class RunningCommand:
    """A `CommandSandbox`. `judge` turns the exit and the first bytes of stderr into how it ended."""

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
                await asyncio.sleep(0)  # a flood must not starve the agent's beats

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

    async def take(self, directory: str, to: Path) -> None:
        """After the end: a directory beneath the work directory becomes `to`, the agent's own and nobody's to write.

        Links stay links and are never followed. Raises `BadOutput` for what is missing, special or too deep.
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
        if os.listdir(self._place.work):
            await asyncio.to_thread(self._place.remove)
        else:
            self._place.remove()
        release()

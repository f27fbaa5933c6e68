"""A guest as a sandbox: started process, work directory, console."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpool.agent.runtime.bubblewrap.launcher_client import ProcessExit, StartedProcess
from gpool.agent.runtime.descriptors import readable
from gpool.agent.runtime.microvm.guest_link import GuestConnection
from gpool.agent.runtime.microvm.guest_outputs import printable
from gpool.agent.runtime.protocol import BadOutput
from gpool.agent.runtime.work_directory import WorkDirectory
from gpool.core.model import OutputFile

TAIL_BYTES = 2000
CONSOLE_CHUNK_BYTES = 64 * 1024
CONSOLE_EVERY_S = 0.05  # slows a guest that floods its console


class Console:
    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._tail = b""
        self._task = asyncio.create_task(self._drain())

    def ends(self) -> tuple[int, int]:
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
        await asyncio.wait([self._task], timeout=1.0)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return self.tail()


class StartedGuest:
    """Over with the command, though the machine stays until the outputs are fetched."""

    def __init__(
        self, monitor: StartedProcess, connection: GuestConnection, console: Console
    ) -> None:
        self._monitor = monitor
        self._connection = connection
        self._console = console
        self._closed = False
        connection.on_violation = monitor.kill
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        self._connection.gone(await self._monitor.exited())

    @property
    def is_over(self) -> bool:
        return self._connection.over.done()

    async def exited(self) -> ProcessExit:
        return await asyncio.shield(self._connection.over)

    async def kill(self) -> None:
        await self._monitor.kill()
        await self._watching
        if not self._closed:
            self._closed = True
            await self._console.close()
            await self._connection.close()

    async def warn(self) -> None:
        if not self.is_over:
            await self._connection.warn()


class GuestWorkDirectory(WorkDirectory):
    """Outputs come over the connection; the host holds the disk image, unread."""

    __slots__ = ("_connection", "_loop")

    def __init__(self, root: Path, uid: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(root, uid)
        object.__setattr__(self, "_loop", loop)
        object.__setattr__(self, "_connection", None)

    _loop: asyncio.AbstractEventLoop
    _connection: GuestConnection | None

    def use(self, connection: GuestConnection) -> None:
        object.__setattr__(self, "_connection", connection)

    def collect(self, wanted: Sequence[str], into: Path, quota_bytes: int) -> list[OutputFile]:
        collecting = self._connected().collect(wanted, into, quota_bytes)
        return asyncio.run_coroutine_threadsafe(collecting, self._loop).result()

    def read_end(self, name: str, most_bytes: int) -> bytes:
        """As of other sandboxes, but a larger file is not read at all: outputs leave a guest whole."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                [found] = self.collect([name], Path(folder), most_bytes)
            except (BadOutput, OSError):
                return b""
            return (Path(folder) / found.sha256).read_bytes()

    def take_value(self, name: str, into: Path, quota_bytes: int) -> Path:
        taking = self._connected().take_value(name, into, quota_bytes)
        return asyncio.run_coroutine_threadsafe(taking, self._loop).result()

    def _connected(self) -> GuestConnection:
        if self._connection is None:
            raise BadOutput("the guest never ran")
        return self._connection

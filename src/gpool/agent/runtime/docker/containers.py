"""A running container: waits for its end in a thread of its own, and removes it before anyone hears of the end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from gpool.agent.runtime.bubblewrap.launcher_client import ProcessExit, StartedProcess
from gpool.agent.runtime.docker.engine import ContainerExit, EngineClient
from gpool.agent.runtime.protocol import SandboxFailed

T = TypeVar("T")
LAST_WORDS_S = 0.25
KILLED = 137
log = structlog.get_logger(__name__)


class RunningContainer(StartedProcess):
    """A `StartedProcess` whose launcher is a container engine. Make it on the loop, after the container has started."""

    def __init__(
        self,
        engine: EngineClient,
        container: str,
        threads: Executor,
        streams: Coroutine[Any, Any, None],
    ) -> None:
        self.container = container
        self.gone: ContainerExit | None = None
        self._engine = engine
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[ProcessExit] = self._loop.create_future()
        self._killed = False
        self._streams = self._loop.create_task(streams)
        threading.Thread(target=self._wait, name=f"wait-{container[:12]}", daemon=True).start()

    @property
    def is_over(self) -> bool:
        return self._over.done()

    def when_over(self, tell: Callable[[RunningContainer], None]) -> None:
        self._over.add_done_callback(lambda _: tell(self))

    async def exited(self) -> ProcessExit:
        return await asyncio.shield(self._over)

    async def kill(self) -> None:
        if not self._over.done():
            self._killed = True
            await self._signal("SIGKILL")
        await asyncio.shield(self._over)

    async def warn(self) -> None:
        if not self._over.done():
            await self._signal("SIGTERM")

    async def _signal(self, name: str) -> None:
        with contextlib.suppress(SandboxFailed):  # no engine: the wait says so
            await self._loop.run_in_executor(
                self._threads, self._engine.signal, self.container, name
            )

    def _wait(self) -> None:
        """In its own thread: it may take days."""
        gone: ContainerExit | None = None
        try:
            gone = self._engine.wait(self.container)
            if gone.code == KILLED and not gone.out_of_memory and not self._killed:
                exceeded = self._engine.exceeded_memory(self.container)
                gone = replace(gone, out_of_memory=exceeded)
        except SandboxFailed as lost:
            log.warning("container_lost", container=self.container, error=str(lost))
        try:
            self._engine.remove(self.container)
        except SandboxFailed as refused:
            log.warning("container_left", container=self.container, error=str(refused))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._hear, gone)

    def _hear(self, gone: ContainerExit | None) -> None:
        self._telling = self._loop.create_task(self._tell(gone))

    async def _tell(self, gone: ContainerExit | None) -> None:
        """Its last words are in the pipes by then, unless those are full and nobody reads them."""
        await asyncio.wait([self._streams], timeout=LAST_WORDS_S)
        self.gone = gone
        if gone is None:
            self._over.set_result(ProcessExit(137, ran=True, killed=self._killed, lost=True))
        else:
            self._over.set_result(ProcessExit(gone.code, ran=gone.ran, killed=self._killed))


async def undivided(threads: Executor, work: Callable[[], T], undo: Callable[[T], object]) -> T:
    """The work of a thread cannot be cancelled: when we are, what it made is undone before we end."""
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(threads, work)

    async def undone() -> None:
        with contextlib.suppress(SandboxFailed):
            made = await future
            await loop.run_in_executor(threads, undo, made)

    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.shield(loop.create_task(undone()))
        raise

"""Processes that can be stopped (SIGSTOP): their callbacks wait in a backlog until they are continued.

A callback belongs to the process in whose context it was scheduled; networks and databases belong to none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from gpool.testing.simulation import SimulatedProcess, VirtualLoop, process_in


class PausableProcess(SimulatedProcess):
    def __init__(
        self, loop: PausableLoop, name: str, on_end: Callable[[asyncio.Task[Any]], None]
    ) -> None:
        super().__init__(name, on_end)
        self.paused = False
        self._loop = loop
        self._backlog: list[asyncio.Handle] = []

    def pause(self) -> None:
        self.paused = self.alive

    def resume(self) -> None:
        """Run what became due meanwhile, in that order; its time has jumped."""
        self.paused = False
        backlog, self._backlog = self._backlog, []
        self._loop.run_soon(backlog)

    def kill(self) -> None:
        super().kill()
        self.resume()

    def defers(self, handle: asyncio.Handle) -> bool:
        if self.paused:
            self._backlog.append(handle)
        return self.paused


class ReadyHandles(deque[asyncio.Handle]):
    """The loop's queue. A handle of a paused process is replaced by a cancelled one, which the loop skips."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._nothing = asyncio.Handle(lambda: None, (), loop)
        self._nothing.cancel()

    def popleft(self) -> asyncio.Handle:
        handle = super().popleft()
        process = process_in(handle._context)  # type: ignore[attr-defined]
        is_deferred = isinstance(process, PausableProcess) and process.defers(handle)
        return self._nothing if is_deferred else handle


class PausableLoop(VirtualLoop):
    _ready: deque[asyncio.Handle]

    def __init__(self) -> None:
        super().__init__()
        self._ready = ReadyHandles(self)

    def run_soon(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

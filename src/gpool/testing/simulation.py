"""Deterministic runs: an asyncio loop under virtual time, random numbers from one seed, and a hashed trace.

Sockets, threads and executors are refused: a program is a function of its inputs.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import random
from asyncio import BaseEventLoop
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, NoReturn, TypeVar

from msgspec import structs

from gpool.wire.frames import Grants, Line, encode

T = TypeVar("T")


class Dice(random.Random):
    def __init__(self, name: str) -> None:
        super().__init__(name)  # text is hashed by SHA-512, the same in every process
        self.name = name

    def branch(self, name: object) -> Dice:
        return Dice(f"{self.name}/{name}")

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def between(self, low: int, high: int) -> int:
        return low + int(self.random() * (high - low + 1))

    def pick(self, choices: Sequence[T]) -> T:
        return choices[int(self.random() * len(choices))]


RESOLUTION_S = 1e-7  # below the microsecond of all timestamps
MAX_TURNS = 20_000
INSTANT_S = 2e-6  # average time per iteration below which a loop is stuck


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set."""


class Livelock(RuntimeError):
    """The loop iterates without time passing."""


class OutsideSimulation(RuntimeError):
    """Thread, socket or process requested under virtual time."""


class _JumpingClock:
    """Replaces the selector: advances the clock instead of waiting for I/O."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._turns = 0
        self._since_s = 0.0

    def select(self, timeout: float | None) -> list[NoReturn]:
        if timeout is None:
            raise Deadlock("every task waits and no timer is set")
        self.now_s += timeout
        self._turns += 1
        if self._turns > MAX_TURNS:
            if self.now_s < self._since_s + MAX_TURNS * INSTANT_S:
                raise Livelock(f"{MAX_TURNS} turns of the loop at {self.now_s} s")
            self._turns, self._since_s = 0, self.now_s
        return []

    def close(self) -> None: ...


class VirtualLoop(BaseEventLoop):
    """Starts at zero; `us` is the time in microseconds."""

    _selector: _JumpingClock
    _clock_resolution: float

    def __init__(self) -> None:
        super().__init__()
        self._selector = _JumpingClock()
        self._clock_resolution = RESOLUTION_S

    def time(self) -> float:
        return self._selector.now_s

    @property
    def us(self) -> int:
        return round(self._selector.now_s * 1_000_000)

    def after_us(
        self, delay_us: int, callback: Callable[..., object], *args: Any
    ) -> asyncio.TimerHandle:
        return self.call_at((self.us + max(0, delay_us)) / 1_000_000, callback, *args)

    def outside_us(
        self, delay_us: int, callback: Callable[..., object], *args: Any
    ) -> asyncio.TimerHandle:
        """Call it as part of no process, whichever one asks: networks and databases go on when a process stops."""
        at_s = (self.us + max(0, delay_us)) / 1_000_000
        return self.call_at(at_s, callback, *args, context=_OUTSIDE)

    def _process_events(self, event_list: list[NoReturn]) -> None: ...

    def _write_to_self(self) -> None: ...

    def run_in_executor(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        raise OutsideSimulation("no threads under virtual time")

    async def shutdown_default_executor(self, timeout: float | None = None) -> None: ...  # noqa: ASYNC109


class SimulatedProcess:
    """Tasks started by one simulated process or its tasks; they die together."""

    def __init__(self, name: str, on_end: Callable[[asyncio.Task[Any]], None]) -> None:
        self.name = name
        self.alive = True
        self._on_end = on_end  # a task of the running process ended by itself
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def spawn(self, loop: VirtualLoop, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return loop.create_task(coroutine, context=self.context())

    def context(self) -> contextvars.Context:
        """New context of this process, for a task or a callback."""
        context = contextvars.Context()
        context.run(_process.set, self)
        return context

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        return list(self._tasks)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if self.alive and not task.cancelled():
            self._on_end(task)

    def kill(self) -> None:
        self.alive = False
        for task in self.tasks:
            task.cancel()


_OUTSIDE = contextvars.Context()
_process: contextvars.ContextVar[SimulatedProcess | None] = contextvars.ContextVar(
    "process", default=None
)


def process_in(context: contextvars.Context) -> SimulatedProcess | None:
    return context.get(_process)


def _create(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
    context: contextvars.Context | None = None,
) -> asyncio.Task[T]:
    process = _process.get() if context is None else context.get(_process, _process.get())
    if process is not None and context is not None:
        context.run(_process.set, process)  # even a task with a context of its own is its creator's
    task: asyncio.Task[T] = asyncio.Task(coroutine, loop=loop, context=context)
    if process is not None:
        process.adopt(task)
    return task


def new_loop(kind: type[VirtualLoop] = VirtualLoop) -> VirtualLoop:
    loop = kind()
    loop.set_task_factory(_create)
    return loop


class Trace:
    """`keep` also keeps the lines; the hash is the same."""

    def __init__(self, loop: VirtualLoop, *, keep: bool = False) -> None:
        self._loop = loop
        self._keep = keep
        self._hash = hashlib.sha256()
        self._pending: list[str] = []
        self.lines: list[str] = []
        self.count = 0

    def say(self, who: str, what: str, *details: object) -> None:
        line = f"{self._loop.us} {who} {what} {' '.join(map(str, details))}"
        self.count += 1
        self._pending.append(line)
        if self._keep:
            self.lines.append(
                f"{self._loop.us / 1e6:10.6f}  {who:<12} {what} {' '.join(map(str, details))}"
            )
        if len(self._pending) >= 256:
            self._flush()

    def frame(self, who: str, way: str, data: bytes, frame: object) -> None:
        """Hash a frame without gang secrets: they do not come from the seed."""
        self.count += 1
        if isinstance(frame, Grants) and any(line.gang is not None for line in frame.lines):
            data = encode(structs.replace(frame, lines=tuple(map(_without_secret, frame.lines))))
        self._pending.append(f"{self._loop.us} {who} {way} {data.hex()}")
        if self._keep:
            self.lines.append(f"{self._loop.us / 1e6:10.6f}  {who:<12} {way} {frame}")

    def _flush(self) -> None:
        self._hash.update("\n".join(self._pending).encode() + b"\n")
        self._pending.clear()

    def digest(self) -> str:
        self._flush()
        return self._hash.hexdigest()


def _without_secret(line: Line) -> Line:
    return (
        line
        if line.gang is None
        else structs.replace(line, gang=structs.replace(line.gang, secret=b""))
    )

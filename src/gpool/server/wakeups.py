"""In-process notifications that a task, batch or node changed, without data: the waiter reads the store; and turns of
callers at expensive work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


def _end_wait(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Subscription:
    """Open it before the first read, so that no change is missed."""

    __slots__ = ("_changed", "_hub", "_topics", "_waiter")

    def __init__(self, hub: Hub, topics: tuple[int, ...]) -> None:
        self._hub = hub
        self._topics = topics
        self._changed = False
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        for topic in self._topics:
            self._hub.subscribers.setdefault(topic, {})[self] = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for topic in self._topics:
            others = self._hub.subscribers.get(topic)
            if others is not None:
                others.pop(self, None)
                if not others:
                    del self._hub.subscribers[topic]

    def wake(self) -> None:
        self._changed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, seconds: float) -> bool:
        """True after a publication since the last wait, False after the timeout."""
        if not self._changed and seconds > 0:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(seconds, _end_wait, self._waiter)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        changed, self._changed = self._changed, False
        return changed


class _Expected(Generic[T]):
    __slots__ = ("count", "found", "wake")

    def __init__(self, count: int, wake: Callable[[], object]) -> None:
        self.found: dict[int, T] = {}
        self.count, self.wake = count, wake


class AwaitedResults(Generic[T]):
    """Results of tasks that requests wait for, each put where its request finds it. One request waits for a task."""

    def __init__(self) -> None:
        self._expected: dict[int, _Expected[T]] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def __contains__(self, task: int) -> bool:
        return task in self._expected

    def put(self, task: int, result: T) -> bool:
        """Wake the request with its last result; whether that was the last."""
        expected = self._expected.get(task)
        if expected is None:
            return False
        expected.found[task] = result
        if len(expected.found) < expected.count:
            return False
        expected.wake()
        return True

    def expect(self, tasks: Collection[int], wake: Callable[[], object]) -> dict[int, T]:
        """Mapping that receives the results, until `forget` is called for the tasks."""
        expected = _Expected[T](len(tasks), wake)
        self._expected.update(dict.fromkeys(tasks, expected))
        return expected.found

    def forget(self, tasks: Iterable[int]) -> None:
        for task in tasks:
            self._expected.pop(task, None)


class Hub:
    """A topic is an id; tasks, batches and nodes share one id source."""

    def __init__(self) -> None:
        # in order of subscription, so that the wake-up order is deterministic
        self.subscribers: dict[int, dict[Subscription, None]] = {}

    def subscription(self, *topics: int) -> Subscription:
        return Subscription(self, topics)

    def publish(self, topics: Iterable[int]) -> None:
        subscribers = self.subscribers
        if not subscribers:
            return
        known: Collection[int] = subscribers.keys() & topics
        for topic in known:
            for subscription in tuple(subscribers[topic]):
                subscription.wake()


class Wake:
    """Wake-up of one loop: calls before it waits count as one, calls while it works cause one more run."""

    def __init__(self) -> None:
        self._called = False
        self._waiter: asyncio.Future[None] | None = None

    def call(self) -> None:
        self._called = True
        if self._waiter is not None:
            _end_wait(self._waiter)

    @property
    def called(self) -> bool:
        return self._called

    async def wait(self, seconds: float) -> None:
        if not self._called:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(seconds, _end_wait, self._waiter)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        self._called = False


class KeyedTurns:
    """At most `most` pieces of work per key at once; more wait, so that a caller with many requests waits for itself."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[Hashable, tuple[asyncio.Semaphore, int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, key: Hashable) -> AsyncIterator[None]:
        semaphore, users = self._waiting.get(key) or (asyncio.Semaphore(self._most), 0)
        self._waiting[key] = (semaphore, users + 1)
        try:
            async with semaphore:
                yield
        finally:
            semaphore, users = self._waiting.pop(key)
            if users > 1:
                self._waiting[key] = (semaphore, users - 1)


@dataclass(frozen=True, slots=True)
class Turns:
    """Limits of work that occupies memory or the interpreter for long."""

    large_bodies: KeyedTurns = field(default_factory=lambda: KeyedTurns(4))
    listings: KeyedTurns = field(default_factory=lambda: KeyedTurns(1))
    parsing: asyncio.Lock = field(default_factory=asyncio.Lock)

"""In-process wake-ups: somebody waits for a task, a batch or a node to change. Carries no data; the store has that."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from types import TracebackType
from typing import Self


class Subscription:
    """Opened before the first read, so that nothing published in between is missed."""

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
        """True once something was published since the last wait; False when the time is over first."""
        if not self._changed and seconds > 0:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(seconds):
                    await self._waiter
            except TimeoutError:
                pass
            finally:
                self._waiter = None
        changed, self._changed = self._changed, False
        return changed


class Hub:
    """Topics are ids: those of tasks, batches and nodes never meet, they come from one source."""

    def __init__(self) -> None:
        # in the order they came, so that they wake in one order in every process
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
    """One loop's alarm clock: many calls before it looks are one; a call while it works is exactly one more."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def call(self) -> None:
        self._event.set()

    @property
    def called(self) -> bool:
        return self._event.is_set()

    async def wait(self, seconds: float) -> None:
        """Until called, or for this long. Forgets the call."""
        if not self._event.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._event.wait()
            except TimeoutError:
                pass
        self._event.clear()

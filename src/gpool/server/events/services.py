"""State of events in one process: subscribers, open streams, workers that deliver."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpool.core.model import Instant
from gpool.server.events.recording import Subscribers
from gpool.server.store.operations.events.outbox import EventHolder
from gpool.server.wakeups import Wake


@dataclass(slots=True)
class EventServices:
    """`delivering`: wake-up of the loop that delivers; `tailing`: of the loop that tells streams about new events."""

    subscribers: Subscribers = field(default_factory=Subscribers)
    delivering: Wake = field(default_factory=Wake)
    tailing: Wake = field(default_factory=Wake)
    checking: Wake = field(default_factory=Wake)
    streams: int = 0
    readers: dict[EventHolder, Instant] = field(default_factory=dict)
    """Accounts with a reader here, and until when their events are recorded."""
    workers: set[asyncio.Task[None]] = field(default_factory=set)

    @contextmanager
    def stream(self) -> Iterator[None]:
        self.streams += 1
        self.tailing.call()
        try:
            yield
        finally:
            self.streams -= 1

    def check_conditions(self) -> None:
        """Compare conditions (budgets, nodes, alerts) with the store now; else it is done every few seconds."""
        self.checking.call()

    async def close(self) -> None:
        workers = tuple(self.workers)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

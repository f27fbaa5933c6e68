"""This process among the replicas: whether it leads, its row, its slot for ids. Reads no task and plans nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Protocol

from gpool.core.errors import Unreachable
from gpool.core.model import SECOND, Instant, Span
from gpool.observability.logs import get_logger
from gpool.server.replicas.leadership import LeaderLock
from gpool.server.store.drivers.opening import POSTGRES
from gpool.server.store.drivers.replica_sessions import (
    FeedPage,
    ReplicaDatabase,
    ReplicaIdentity,
    SeenReplica,
)
from gpool.server.store.protocol import Store
from gpool.server.store.sealing import KeyHolder
from gpool.server.wakeups import Wake

log = get_logger(__name__)

KEEP_CHANGES = Span(600 * SECOND)
COALESCE_S = 0.005
"""Least time between two notifications of this replica."""


class Replica(Protocol):
    """This server among those of its database."""

    @property
    def id(self) -> int:
        """0: the only server, which no table names."""
        ...

    @property
    def leads(self) -> bool: ...

    @property
    def reign(self) -> int:
        """Number of times this process began to lead: what a loop remembers of an earlier reign is out of date."""
        ...

    def feed_lag_s(self, now: Instant) -> float:
        """Time since all changes of other replicas were known; `now`: by the time of leases."""
        ...


class SoleServer:
    """A server on SQLite, or in a simulation: no other one exists, and it always leads."""

    id = 0
    leads = True
    reign = 1

    def feed_lag_s(self, now: Instant) -> float:  # noqa: ARG002 - no other server changes anything
        return 0.0


class Membership:
    """A server on PostgreSQL. `dead_after`: age of a replica's heartbeat, by the database's clock, that counts as death."""

    def __init__(
        self,
        database: ReplicaDatabase,
        id_: int,
        address: str,
        version: str,
        dead_after: Span,
    ) -> None:
        self.id = id_
        self.slot = 0
        self.reign = 0
        self.wake = Wake()  # of the loop that reads the feed
        self.others: Mapping[int, SeenReplica] = {}
        self._is_draining = False
        self._caught_up_at: Instant | None = None  # by the time of leases
        self._database, self._dead_after = database, dead_after
        self._link = database.link(self.wake.call)
        self._lock = LeaderLock(database, dead_after, self._turned, self._turned)
        self._identity = ReplicaIdentity(id_, address, version)
        self._turn: Callable[[], None] = lambda: None
        self._unnotified = asyncio.Event()
        self._notifying: asyncio.Task[None] | None = None

    @property
    def leads(self) -> bool:
        return self._lock.is_held

    async def open_store(self, readers: int | None = None, keys: KeyHolder | None = None) -> Store:
        """Open the store, whose commits notify the other replicas, and register."""
        store = await self._database.open_store(self.id, self._unnotified.set, readers, keys)
        self.slot = await self._link.register(self._identity)
        return store

    async def start(self, changed_leadership: Callable[[], None]) -> None:
        await self._lock.start()
        await self.heartbeat(0)
        self._turn = changed_leadership
        log.info("replica started", replica=self.id, slot=self.slot, leads=self.leads)
        self._notifying = asyncio.create_task(self._notify(), name="gpool-notify")

    async def resign(self) -> None:
        """Give up the leadership for good, and let no node be sent here: another replica leads within a second or two."""
        was_leader = self.leads
        self._is_draining = True
        await self._lock.resign()
        if was_leader:
            self._turned()

    async def stop(self) -> None:
        """Give up the leadership and remove the row, so that nobody waits for this replica."""
        if self._notifying is not None:
            self._notifying.cancel()
            await asyncio.gather(self._notifying, return_exceptions=True)
        self._turn = lambda: None
        await self._lock.stop()
        await self._link.remove()
        await self._link.close()

    async def heartbeat(self, term: int) -> bool:
        """Record that this replica lives, and its term; False if the leader had removed it, and it registered again."""
        seen = await self._link.heartbeat(
            term if self.leads else 0, self._lock.pid, is_draining=self._is_draining
        )
        if seen is None:
            self.slot = await self._link.register(self._identity)
            return False
        self.others = {each.id: each for each in seen if each.id != self.id}
        return True

    async def others_running(self) -> bool:
        return await self._link.others_running()

    @property
    def dead(self) -> list[int]:
        return [id_ for id_, each in self.others.items() if each.silent_us > self._dead_after]

    async def horizon(self) -> int:
        return await self._link.horizon()

    async def read(self, cursor: int, *, with_own: bool) -> FeedPage:
        return await self._link.read(cursor, None if with_own else self.id)

    def caught_up(self, at: Instant) -> None:
        """Record that the changes of the others up to `at` were applied."""
        self._caught_up_at = at

    def feed_lag_s(self, now: Instant) -> float:
        """Time since all changes of the others were known; 0 before the first read."""
        return 0.0 if self._caught_up_at is None else max(0, now - self._caught_up_at) / SECOND

    async def prune_feed(self) -> None:
        await self._link.prune(KEEP_CHANGES)

    def _turned(self) -> None:
        self.reign += self.leads
        log.warning("leadership changed", replica=self.id, leads=self.leads)
        self._turn()

    async def _notify(self) -> None:
        """Wake the other replicas after commits, at most once each `COALESCE_S`; they poll anyway."""
        while True:
            await self._unnotified.wait()
            self._unnotified.clear()
            if self.others:
                try:
                    await self._link.notify()
                except Unreachable as error:
                    log.warning("the database did not answer", reason=error.detail)
            await asyncio.sleep(COALESCE_S)


def is_replicated(url: str) -> bool:
    return url.startswith(POSTGRES)


def database_of(url: str) -> ReplicaDatabase:
    """Sessions on a PostgreSQL database; the driver is in the extra `postgres`."""
    driver = import_module("gpool.server.store.drivers.postgres_replica")
    database: ReplicaDatabase = driver.PostgresReplicas(url)
    return database

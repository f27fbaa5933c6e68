"""Sessions of one simulated replica: its store, the feed's link and the leader's lock (`replica_sessions`).

Every answer takes time; a cut path gives none until `ANSWER_US`, and statements under way may or may not arrive.
One file because the three share the path and its faults.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from gpool.core.errors import Unreachable
from gpool.server.store.drivers.replica_sessions import (
    FeedPage,
    LockSession,
    ReplicaIdentity,
    ReplicaLink,
    SeenReplica,
)
from gpool.server.store.protocol import Store
from gpool.server.store.rows import select, values
from gpool.server.store.sealing import KeyHolder
from gpool.testing.simulation import Dice, VirtualLoop
from gpool.testing.world.database import MAX_GROUP, PendingOperation, SimulatedDisk
from gpool.testing.world.replicas.database import SimulatedPostgres
from gpool.testing.world.replicas.pausing import PausableProcess

MS = 1_000
ANSWER_US = 2_000 * MS
MAX_REPLICAS = 32


class CommitFate(StrEnum):
    """Fate of a COMMIT that was sent over a cut path."""

    LOST = "lost"
    ARRIVES = "arrives"
    LATE = "late"  # after the cut, when its caller has given up


@dataclass(frozen=True, slots=True)
class FeedConditions:
    """Chances by seed: that a NOTIFY or the answer to a COMMIT is lost, that a transaction is open for up to `late_us`."""

    notify_lost: float = 0.0
    answer_lost: float = 0.0
    late: float = 0.0
    late_us: int = 600 * MS


@dataclass(slots=True)
class DatabasePath:
    """Way of one process to the database, with the ends of its disturbances."""

    loop: VirtualLoop
    dice: Dice
    process: PausableProcess
    conditions: FeedConditions
    cut_until_us: int = 0
    slow_until_us: int = 0  # the feed's link
    held_until_us: int = 0  # transactions of a process stopped between two statements
    blind_until_us: int = 0  # the end of the lock's session is not noticed

    @property
    def is_cut(self) -> bool:
        return self.loop.us < self.cut_until_us

    def patience_us(self) -> int:
        """Time until a session that gets no answer is given up."""
        cut_us = max(0, self.cut_until_us - self.loop.us)
        return min(ANSWER_US, cut_us) + self.dice.between(1, 50 * MS)

    async def round_trip(self) -> None:
        await asyncio.sleep(self.dice.between(50, 1_500) / 1e6)
        if self.is_cut:
            await asyncio.sleep(self.patience_us() / 1e6)
        if self.is_cut:
            raise Unreachable("the database does not answer; try again")

    async def slow_down(self) -> None:
        if self.loop.us < self.slow_until_us:
            await asyncio.sleep(self.dice.between(1, 1_500) / 1e3)

    def call(self, delay_us: int, callback: Callable[..., None], *args: object) -> None:
        """Call it in the process: an answer that a stopped process reads when it continues."""
        at_s = (self.loop.us + delay_us) / 1e6
        self.loop.call_at(at_s, callback, *args, context=self.process.context())


@dataclass(slots=True)
class StoreSession:
    """The writer's session; `xid`: its open transaction, 0: none."""

    database: SimulatedPostgres
    path: DatabasePath
    replica: int
    committed: Callable[[], None] = field(default=lambda: None)
    xid: int = 0


class ReplicaStore(SimulatedDisk):
    """Store of one replica: one transaction at a time, which may be answered late, or not at all."""

    session: StoreSession

    def _begin(self) -> None:
        if self._dead or self._open or not self._waiting:
            return
        self._group, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
        self._open = True
        path, dice = self.session.path, self._dice
        if path.is_cut:
            self._fail(self._group)
            return
        self.session.xid = self.session.database.begin()
        delay = dice.between(*self._pace.commit_us)
        if dice.chance(path.conditions.late):
            delay += dice.between(1, path.conditions.late_us)
        delay = max(delay, self._pace.stuck_until_us - self._loop.us)
        self._loop.outside_us(delay, self._land, self._group)

    def _land(self, group: list[PendingOperation]) -> None:
        """Commit, wherever the process is by now; a transaction of a stopped one may have to wait for it."""
        path = self.session.path
        if self._dead or not self.session.xid:
            return
        if self._loop.us < path.held_until_us:
            self._loop.outside_us(path.held_until_us - self._loop.us, self._land, group)
            return
        session = self.session
        xid, session.xid = session.xid, 0
        if not path.is_cut:
            self._commit_now(xid, group)
            if self._dice.chance(path.conditions.answer_lost):
                self._fail(group)
            else:
                path.call(self._dice.between(*self._pace.answer_us), self._answer_group, group)
            return
        fate = self._dice.pick(tuple(CommitFate))
        if fate is CommitFate.LOST:
            session.database.roll_back(xid)
        elif fate is CommitFate.ARRIVES:
            self._commit_now(xid, group)
        else:
            late_us = path.cut_until_us - self._loop.us + self._dice.between(1, 500 * MS)
            self._loop.outside_us(late_us, self._commit_now, xid, group)
        self._fail(group)

    def _commit_now(self, xid: int, group: list[PendingOperation]) -> None:
        copies = [PendingOperation(asked.operation, asked.future) for asked in group]

        def run() -> None:
            for asked in copies:
                self._run(asked, self._file.write_now)

        self.session.database.commit(xid, self.session.replica, run)
        self.commits += 1
        for asked, copy in zip(group, copies, strict=True):
            if asked.error is None:  # else its failure was decided before
                asked.value, asked.error = copy.value, copy.error

    def _fail(self, group: list[PendingOperation]) -> None:
        """Answer that the outcome is unknown."""
        for asked in group:
            asked.value, asked.error = None, Unreachable("the database does not answer; try again")
        self.session.path.call(self.session.path.patience_us(), self._answer_group, group)

    def _answer_group(self, group: list[PendingOperation]) -> None:
        self._open = False
        super()._answer_group(group)
        self.session.committed()

    def _look(self, asked: PendingOperation) -> None:
        path = self.session.path
        if self._dead or not path.is_cut:
            super()._look(asked)
            return
        asked.error = Unreachable("the database does not answer; try again")
        self._loop.after_us(path.patience_us(), self._answer, [asked])

    def crash(self) -> bool:
        """Return whether an open group was discarded: its COMMIT may have been sent before."""
        xid, self.session.xid = self.session.xid, 0
        lost = bool(xid)
        if lost and self._dice.chance(0.3):
            self._commit_now(xid, self._group)
            lost = False
        elif lost:
            self.session.database.roll_back(xid)
        self._dead = True
        return lost


class _ReplicaRow(NamedTuple):
    id: int
    address: str
    draining: int
    heard_at: int
    started_at: int


class SimulatedFeedLink:
    def __init__(
        self, database: SimulatedPostgres, path: DatabasePath, notified: Callable[[], None]
    ) -> None:
        self._database, self._path, self._notified = database, path, notified
        self._id = 0
        self._is_broken = False

    async def register(self, me: ReplicaIdentity) -> int:
        self._id = me.id
        await self._ask()
        self._database.listeners[me.id] = lambda: self._path.call(0, self._notified)
        taken = set(self._database.query(values(int, "SELECT slot FROM replicas")))
        slot = min(set(range(MAX_REPLICAS)) - taken)
        row = {"id": me.id, "slot": slot, "address": me.address, "version": me.version}
        self._database.execute(
            values(
                int,
                "INSERT INTO replicas (id, slot, address, version, started_at, heard_at, term) "
                "VALUES (:id, :slot, :address, :version, :now, :now, 0) RETURNING slot",
                {**row, "now": self._database.now},
            )
        )
        return slot

    async def heartbeat(
        self, term: int, lock_pid: int | None, *, is_draining: bool
    ) -> list[SeenReplica] | None:
        await self._ask()
        known = self._database.execute(
            values(
                int,
                "UPDATE replicas SET heard_at = :now, term = :term, lock_pid = :pid, draining = :draining "
                "WHERE id = :id RETURNING id",
                {
                    "now": self._database.now,
                    "term": term,
                    "pid": lock_pid,
                    "draining": int(is_draining),
                    "id": self._id,
                },
            )
        )
        if not known:
            return None
        await self._ask()
        rows = self._database.query(
            select(
                _ReplicaRow,
                "SELECT id, address, draining, heard_at, started_at FROM replicas ORDER BY id",
            )
        )
        now = self._database.now
        return [
            SeenReplica(
                row.id, row.address, row.draining != 0, now - row.heard_at, now - row.started_at
            )
            for row in rows
        ]

    async def others_running(self) -> bool:
        await self._ask()
        sql = "SELECT lock_pid FROM replicas WHERE id <> :id AND lock_pid IS NOT NULL"
        pids = self._database.query(values(int, sql, {"id": self._id}))
        return any(self._database.is_open(pid) for pid in pids)

    async def horizon(self) -> int:
        await self._ask()
        return self._database.horizon()

    async def read(self, cursor: int, without: int | None = None) -> FeedPage:
        await self._ask()
        await self._path.slow_down()
        page = self._database.page(cursor, without)
        await self._path.slow_down()
        return page

    async def notify(self) -> None:
        await self._ask()
        path = self._path
        for replica, listener in self._database.listeners.items():
            if replica != self._id and not path.dice.chance(path.conditions.notify_lost):
                path.loop.outside_us(path.dice.between(50, 2 * MS), listener)

    async def prune(self, keep_us: int) -> None:
        await self._ask()
        self._delete("DELETE FROM changes WHERE at < :at", at=self._database.now - keep_us)

    async def remove(self) -> None:
        try:
            await self._ask()
        except Unreachable:
            return
        gone = "UPDATE node_connections SET replica_id = NULL WHERE replica_id = :id"
        self._delete(gone, id=self._id)
        self._delete("DELETE FROM replicas WHERE id = :id", id=self._id)

    async def close(self) -> None:
        self._database.listeners.pop(self._id, None)

    def _delete(self, sql: str, **parameters: int) -> None:
        self._database.execute(values(int, f"{sql} RETURNING 1", parameters))

    async def _ask(self) -> None:
        try:
            await self._path.round_trip()
        except Unreachable:
            self._is_broken = True
            raise
        if self._is_broken:  # changes may have come while there was no connection
            self._is_broken = False
            self._notified()


class SimulatedLockSession:
    def __init__(self, database: SimulatedPostgres, path: DatabasePath, pid: int) -> None:
        self.pid = pid
        self._database, self._path = database, path
        self._closed = False

    def is_closed(self) -> bool:
        return self._closed

    def learn_end(self, ended: Callable[[], None]) -> None:
        """Called when another replica ended the session; the process notices it later."""
        path = self._path
        blind_us = max(path.blind_until_us, path.cut_until_us) - path.loop.us
        path.call(max(0, blind_us) + path.dice.between(1, 300 * MS), self._ended, ended)

    def _ended(self, ended: Callable[[], None]) -> None:
        self._closed = True
        ended()

    async def try_lock(self) -> bool:
        await self._ask()
        return self._database.try_lock(self.pid)

    async def check(self) -> None:
        await self._ask()

    async def end_silent(self, dead_after_us: int) -> bool:
        await self._ask()
        holder = self._database.locked_by
        if holder is None:
            return False
        sql = "SELECT heard_at FROM replicas WHERE lock_pid = :pid"
        heard = self._database.query(values(int, sql, {"pid": holder}))
        # a session that no replica names is left over, unless it is new
        if max(heard, default=self._database.began(holder)) >= self._database.now - dead_after_us:
            return False
        self._database.end(holder)
        return True

    async def unlock(self) -> None:
        await self._ask()
        self._database.unlock(self.pid)

    def terminate(self) -> None:
        """The database does not learn it over a cut path."""
        self._closed = True
        if not self._path.is_cut:
            self._database.disconnect(self.pid)

    async def close(self) -> None:
        self.terminate()

    async def _ask(self) -> None:
        path = self._path
        await path.round_trip()
        if not self._database.is_open(self.pid):
            blind_us = min(ANSWER_US, path.blind_until_us - path.loop.us)
            await asyncio.sleep(max(0, blind_us) / 1e6)
            raise Unreachable("the session of the server lock is lost")


@dataclass(frozen=True, slots=True)
class SimulatedReplicas:
    """The database as one replica's process opens it (`ReplicaDatabase`)."""

    database: SimulatedPostgres
    path: DatabasePath
    store: ReplicaStore
    make_link: Callable[..., ReplicaLink] = SimulatedFeedLink

    async def open_store(
        self,
        replica: int,
        committed: Callable[[], None],
        readers: int | None = None,  # noqa: ARG002 - one file, one reader
        keys: KeyHolder | None = None,  # noqa: ARG002 - nothing is encrypted here
    ) -> Store:
        await self.path.round_trip()
        assert replica == self.store.session.replica
        self.store.session.committed = committed
        return self.store

    def link(self, notified: Callable[[], None]) -> ReplicaLink:
        return self.make_link(self.database, self.path, notified)

    async def lock_session(self, earlier: int | None, ended: Callable[[], None]) -> LockSession:
        await self.path.round_trip()
        if earlier is not None:
            self.database.disconnect(earlier)
        opened: list[SimulatedLockSession] = []
        pid = self.database.connect(lambda: opened[0].learn_end(ended))
        opened.append(SimulatedLockSession(self.database, self.path, pid))
        return opened[0]

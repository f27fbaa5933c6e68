"""Simulated PostgreSQL over one SQLite file: transaction ids, the change feed, the leader's lock.

A transaction gets its id when it opens and runs all statements when it commits, so commits are not in the order of
their ids; each execution is one that PostgreSQL allows. Triggers for SQLite are derived from migration 0013.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TypeVar

from gpool.core.model import Instant
from gpool.server.store import InlineStore
from gpool.server.store.drivers.replica_sessions import Change, FeedPage, unpacked
from gpool.server.store.protocol import Operation, Statement
from gpool.server.store.rows import values

T = TypeVar("T")
FIRST_XID = 1_000
_NAMED_TABLE = "CREATE TABLE world_named (id INTEGER NOT NULL)"


def _trigger(number: int, event: str, table: str, condition: str, id_: str) -> str:
    named = f"INSERT INTO world_named (id) VALUES ({id_})"  # noqa: S608 - a constant
    return f"CREATE TRIGGER world_{number} AFTER {event} ON {table} {condition} BEGIN {named}; END"


def feed_triggers() -> Iterator[str]:
    """Triggers of the change feed as row triggers of SQLite, which name the same ids."""
    feed = import_module("gpool.server.store.migrations.versions.0013_replicas")
    found: list[tuple[str, str, str, str]] = []
    for table, (column, words) in feed.NAMED.items():
        for word in words.split():
            row = "OLD" if word == "DELETE" else "NEW"
            found.append((word, table, "", f"{row}.{column}"))
    columns = ("owner_id", "name", "offer", "availability")
    new, old = (", ".join(f"{row}.{each}" for each in columns) for row in ("NEW", "OLD"))
    found.append(("UPDATE", "nodes", f"WHEN ({new}) IS NOT ({old})", "NEW.id"))
    for table, words, id_ in feed.WHOLE:
        found += [(event, table, "", str(id_)) for event in words.split(" OR ")]
    for number, (event, table, condition, id_) in enumerate(found):
        yield _trigger(number, event, table, condition, id_)


def _run(statement: Statement) -> Operation[None]:
    yield statement


class SimulatedPostgres:
    """`now`: the database's clock; `committed` is called after each commit."""

    def __init__(
        self, file: InlineStore, now: Callable[[], Instant], committed: Callable[[], None]
    ) -> None:
        self._file, self._now, self._committed = file, now, committed
        self._next = FIRST_XID
        self._open: dict[int, None] = {}
        self._lock: int | None = None  # pid of the session that has it
        self._sessions: dict[int, Callable[[], None]] = {}  # by pid: called when others end it
        self._began: dict[int, Instant] = {}  # of each session
        self._pids = 0
        self.listeners: dict[int, Callable[[], None]] = {}  # by replica: called after a NOTIFY
        for sql in (_NAMED_TABLE, *feed_triggers()):
            file.write_now(_run(Statement(sql)))

    @property
    def now(self) -> Instant:
        return self._now()

    # ---- transactions

    def begin(self) -> int:
        self._next += 1
        self._open[self._next] = None
        return self._next

    def roll_back(self, xid: int) -> None:
        self._open.pop(xid, None)

    def commit(self, xid: int, replica: int, run: Callable[[], None]) -> None:
        """Run the statements of an open transaction and commit it."""
        self._run_and_commit(xid, replica, run)
        self._committed()

    def _run_and_commit(self, xid: int, replica: int, run: Callable[[], None]) -> None:
        self._file.begin_group()
        run()
        self._name_changes(xid, replica)
        self._file.commit_group()
        del self._open[xid]

    def execute(self, operation: Operation[T]) -> T:
        """Run a statement of a session that is no store's: a transaction of its own, by no replica."""
        found: list[T] = []
        run = self._file.write_now
        self._run_and_commit(self.begin(), 0, lambda: found.append(run(operation)))
        return found[0]

    def query(self, operation: Operation[T]) -> T:
        return self._file.read_now(operation)

    def _name_changes(self, xid: int, replica: int) -> None:
        write = self._file.write_now
        ids = write(values(int, "SELECT DISTINCT id FROM world_named ORDER BY id"))
        if not ids:
            return
        write(_run(Statement("DELETE FROM world_named")))
        sql = "INSERT INTO changes (xid, at, replica_id, ids) VALUES (:xid, :at, :replica, :ids)"
        row = {
            "xid": xid,
            "at": self._now(),
            "replica": replica,
            "ids": b"".join(id_.to_bytes(8, "big") for id_ in ids),
        }
        write(_run(Statement(sql, row)))

    # ---- the feed

    def horizon(self) -> int:
        """Id below which no transaction is open."""
        return min(self._open, default=self._next + 1)

    def page(self, cursor: int, without: int | None = None) -> FeedPage:
        return FeedPage(self.horizon(), self._file.read_now(_changes(cursor, without)))

    # ---- the lock

    def connect(self, ended: Callable[[], None]) -> int:
        self._pids += 1
        self._sessions[self._pids] = ended
        self._began[self._pids] = self._now()
        return self._pids

    def began(self, pid: int) -> Instant:
        return self._began[pid]

    def is_open(self, pid: int) -> bool:
        return pid in self._sessions

    def try_lock(self, pid: int) -> bool:
        if self._lock is None and pid in self._sessions:
            self._lock = pid
        return self._lock == pid

    def unlock(self, pid: int) -> None:
        if self._lock == pid:
            self._lock = None

    def disconnect(self, pid: int) -> None:
        """End a session by its own process."""
        self._sessions.pop(pid, None)
        self.unlock(pid)

    def end(self, pid: int) -> None:
        """`pg_terminate_backend`: the process learns it later, if at all."""
        ended = self._sessions.pop(pid, None)
        self.unlock(pid)
        if ended is not None:
            ended()

    @property
    def locked_by(self) -> int | None:
        return self._lock


def _changes(cursor: int, without: int | None) -> Operation[list[Change]]:
    sql = (
        "SELECT xid, replica_id, ids FROM changes WHERE xid >= :cursor AND replica_id IS NOT :without "
        "ORDER BY xid"
    )
    rows = yield Statement(sql, {"cursor": cursor, "without": without})
    assert isinstance(rows, list)
    return [Change(xid, replica, unpacked(ids)) for xid, replica, ids in rows]

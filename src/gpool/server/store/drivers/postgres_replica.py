"""PostgreSQL sessions of one replica beside its store: the leadership lock, and the link that reads the change feed.

Each has a connection of its own: an advisory lock ends with its session, and LISTEN needs one that is not pooled.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from sys import byteorder
from typing import Any, NamedTuple

import asyncpg  # type: ignore[import-untyped]

from gpool.core.errors import Unreachable
from gpool.observability.logs import get_logger
from gpool.server.store.drivers.postgres import LOST, SERVER_LOCK
from gpool.server.store.drivers.shared import this_process

log = get_logger(__name__)

TRY_EVERY_S = 1.0
"""Interval of a follower's attempts at the lock, and of the check whether a leader's session still answers."""

ANSWER_S = 5.0
CLOSE_S = 1.0
CHANNEL = "gpool_changes"
MAX_REPLICAS = 32
BROKEN = (*LOST, asyncpg.PostgresError, TimeoutError)

NOW = "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)"

_SESSION = """
    SET synchronous_commit = off;
    SET tcp_keepalives_idle = 15; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3;
"""
"""Nothing these sessions write has to survive a crash of the database."""

_END_OWN = """
    SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a
    WHERE a.pid = $1 AND a.application_name = current_setting('application_name') AND a.datname = current_database()
"""
"""Ends a lost session of this process: PostgreSQL would keep it, and its lock, until the keep-alive gives up."""

_END_SILENT = f"""
    SELECT pg_terminate_backend(l.pid) FROM pg_locks l JOIN replicas r ON r.lock_pid = l.pid
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
    AND (CAST(l.classid AS bigint) << 32) | CAST(l.objid AS bigint) = $1
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND r.heard_at < {NOW} - $2
"""  # noqa: S608 - the names are constants
"""Ends the session of a leader that is stopped or cut off: its connection may stay open for long."""


class LeaderLock:
    """Tries to have the advisory lock, keeps it, and tries again after its session was lost."""

    def __init__(
        self, url: str, dead_after_us: int, took: Callable[[], None], lost: Callable[[], None]
    ) -> None:
        self.is_held = False
        self._url, self._dead_after_us = url, dead_after_us
        self._took, self._lost = took, lost
        self._connection: Any = None
        self._pid: int | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._pid

    async def start(self) -> None:
        """Try once, then go on in the background. `Unreachable` if the database does not answer."""
        try:
            await self._try()
        except BROKEN as exc:
            raise Unreachable(f"PostgreSQL refused the session of the server lock: {exc}") from exc
        self._task = asyncio.create_task(self._run(), name="gpool-leader-lock")

    async def resign(self) -> None:
        """Give up the lock and try no more; the session stays open, as a sign that the process runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.is_held:
            self.is_held = False
            try:
                await self._connection.execute("SELECT pg_advisory_unlock_all()", timeout=ANSWER_S)
            except BROKEN:
                self._connection.terminate()

    async def stop(self) -> None:
        await self.resign()
        await _close(self._connection)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TRY_EVERY_S)
            try:
                await self._try()
            except BROKEN as exc:
                self._broken(exc)

    async def _try(self) -> None:
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._connected()
        connection = self._connection
        if self.is_held:
            await connection.execute("SELECT 1", timeout=ANSWER_S)
        elif await connection.fetchval(
            "SELECT pg_try_advisory_lock($1)", SERVER_LOCK, timeout=ANSWER_S
        ):
            self.is_held = True
            self._took()
        else:
            ended = await connection.fetch(
                _END_SILENT, SERVER_LOCK, self._dead_after_us, timeout=ANSWER_S
            )
            if ended:
                log.warning("the leader is silent; its database session was ended")

    async def _connected(self) -> Any:
        connection = await asyncpg.connect(self._url, timeout=ANSWER_S)
        connection.add_termination_listener(self._ended)
        await connection.execute(_SESSION)
        await connection.execute("SELECT set_config('application_name', $1, false)", this_process())
        if self._pid is not None:
            await connection.execute(_END_OWN, self._pid)
        self._pid = connection.get_server_pid()
        return connection

    def _ended(self, connection: Any) -> None:
        if connection is self._connection:
            self._step_down("the session ended")

    def _broken(self, why: BaseException) -> None:
        if self._connection is not None:
            self._connection.terminate()
        self._step_down(str(why) or type(why).__name__)

    def _step_down(self, why: str) -> None:
        if self.is_held:
            log.warning("lost the leadership lock", reason=str(why))
            self.is_held = False
            self._lost()


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    id: int
    address: str
    version: str


class SeenReplica(NamedTuple):
    """`silent_us`: age of its last heartbeat by the database's clock."""

    id: int
    slot: int
    term: int
    silent_us: int


class Change(NamedTuple):
    """Ids that one transaction changed; `replica_id` 0: written by another program."""

    xid: int
    replica_id: int
    ids: array[int]


class FeedPage(NamedTuple):
    """All visible changes from the cursor on. Below `horizon` no transaction is open: it is the next cursor."""

    horizon: int
    changes: list[Change]


def unpacked(data: bytes) -> array[int]:
    found = array("q", data)
    if byteorder == "little":
        found.byteswap()
    return found


_REGISTER = f"""
    INSERT INTO replicas (id, slot, address, version, started_at, heard_at) SELECT $1, (
        SELECT min(s) FROM generate_series(0, {MAX_REPLICAS - 1}) AS s WHERE s NOT IN (SELECT slot FROM replicas)
    ), $2, $3, {NOW}, {NOW} RETURNING slot
"""  # noqa: S608 - the names are constants
_HEARTBEAT = f"""
    UPDATE replicas SET heard_at = {NOW}, term = $2, lock_pid = $3 WHERE id = $1 RETURNING id
"""  # noqa: S608
_REPLICAS = f"SELECT id, slot, term, {NOW} - heard_at FROM replicas ORDER BY id"  # noqa: S608
_RUNNING = """
    SELECT r.id FROM replicas r JOIN pg_stat_activity a ON a.pid = r.lock_pid
    WHERE r.id <> $1 AND a.datname = current_database() AND a.application_name LIKE 'gpool server%'
"""
"""Other replicas whose session of the lock is open: a killed process has none, whatever its row says."""
_READ = """
    SELECT CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint) AS horizon, c.xid, c.replica_id, c.ids
    FROM (VALUES (1)) AS one LEFT JOIN changes c ON c.xid >= $1 ORDER BY c.xid
"""
_HORIZON = "SELECT CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint) AS horizon"
_DISCONNECT = "UPDATE node_connections SET replica_id = NULL WHERE replica_id = $1"
_PRUNE = f"""
    DELETE FROM changes WHERE at < {NOW} - $1
    OR xid > CAST(CAST(pg_snapshot_xmax(pg_current_snapshot()) AS text) AS bigint)
"""  # noqa: S608
"""Old rows, and rows of another database cluster, which a restored backup may contain."""


class ReplicaLink:
    """The replica's row, the change feed and its notifications. Calls take turns; a lost connection is replaced."""

    def __init__(self, url: str, notified: Callable[[], None]) -> None:
        self._url, self._notified = url, notified
        self._connection: Any = None
        self._turn = asyncio.Lock()
        self._id = 0

    async def register(self, me: ReplicaIdentity) -> int:
        """Write the replica's row; return its slot. `Unreachable` if all slots are taken."""
        self._id = me.id
        for _ in range(MAX_REPLICAS):
            try:
                rows = await self._ask(_REGISTER, me.id, me.address, me.version)
            except asyncpg.UniqueViolationError:  # another replica took the slot
                continue
            except asyncpg.NotNullViolationError as exc:
                raise Unreachable(
                    f"this database has {MAX_REPLICAS} replicas already; stop one first"
                ) from exc
            return int(rows[0]["slot"])
        raise Unreachable("the replica could not be registered; start it again")

    async def heartbeat(self, term: int, lock_pid: int | None) -> list[SeenReplica] | None:
        """Record that this replica lives; return all replicas, or None if the leader has removed this one."""
        if not await self._ask(_HEARTBEAT, self._id, term, lock_pid):
            return None
        return [SeenReplica(*row) for row in await self._ask(_REPLICAS)]

    async def others_running(self) -> bool:
        return bool(await self._ask(_RUNNING, self._id))

    async def horizon(self) -> int:
        [row] = await self._ask(_HORIZON)
        return int(row["horizon"])

    async def read(self, cursor: int) -> FeedPage:
        rows = await self._ask(_READ, cursor)
        changes = [
            Change(row["xid"], row["replica_id"], unpacked(row["ids"]))
            for row in rows
            if row["xid"] is not None
        ]
        [horizon] = {int(row["horizon"]) for row in rows}
        return FeedPage(horizon, changes)

    async def notify(self) -> None:
        await self._ask("SELECT pg_notify($1, $2)", CHANNEL, str(self._id))

    async def prune(self, keep_us: int) -> None:
        await self._ask(_PRUNE, keep_us)

    async def remove(self) -> None:
        """Remove the replica's row and its nodes' connections."""
        with suppress(Unreachable):
            await self._ask(_DISCONNECT, self._id)
            await self._ask("DELETE FROM replicas WHERE id = $1", self._id)

    async def close(self) -> None:
        await _close(self._connection)

    async def _ask(self, sql: str, *arguments: Any) -> list[Any]:
        async with self._turn:
            try:
                if self._connection is None or self._connection.is_closed():
                    self._connection = await self._connected()
                rows: list[Any] = await self._connection.fetch(sql, *arguments, timeout=ANSWER_S)
            except (asyncpg.UniqueViolationError, asyncpg.NotNullViolationError):
                raise
            except BROKEN as exc:
                if self._connection is not None:
                    self._connection.terminate()
                raise Unreachable(f"the change feed cannot be read: {exc}") from exc
            return rows

    async def _connected(self) -> Any:
        connection = await asyncpg.connect(self._url, timeout=ANSWER_S)
        await connection.execute(_SESSION)
        await connection.add_listener(CHANNEL, self._on_notify)
        self._notified()  # changes may have come while there was no connection
        return connection

    def _on_notify(self, _connection: Any, _pid: int, _channel: str, payload: str) -> None:
        if payload != str(self._id):
            self._notified()


async def _close(connection: Any) -> None:
    if connection is not None:
        with suppress(*BROKEN):
            await connection.close(timeout=CLOSE_S)

"""PostgreSQL sessions of one replica (`replica_sessions`): the leader's lock, and the link that reads the change feed.

Each has a connection of its own: an advisory lock ends with its session, and LISTEN needs one that is not pooled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import asyncpg  # type: ignore[import-untyped]

from gpool.core.errors import Unreachable
from gpool.server.store.drivers.opening import open_store
from gpool.server.store.drivers.postgres import LOST, SERVER_LOCK
from gpool.server.store.drivers.replica_sessions import (
    Change,
    FeedPage,
    ReplicaIdentity,
    SeenReplica,
    unpacked,
)
from gpool.server.store.drivers.shared import this_process
from gpool.server.store.protocol import Store
from gpool.server.store.sealing import KeyHolder

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
    SELECT pg_terminate_backend(l.pid) FROM pg_locks l LEFT JOIN replicas r ON r.lock_pid = l.pid
    LEFT JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
    AND (CAST(l.classid AS bigint) << 32) | CAST(l.objid AS bigint) = $1
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND (r.heard_at < {NOW} - $2 OR r.id IS NULL
        AND a.backend_start < clock_timestamp() - $2 * INTERVAL '1 microsecond')
"""  # noqa: S608 - the names are constants
"""Ends the session of a leader that is stopped or cut off: its connection may stay open for long. A session that no
replica names, and that is not new, is left over from one that was removed while it was cut off."""


class PostgresLockSession:
    """Session of the leader's lock."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.pid: int = connection.get_server_pid()

    def is_closed(self) -> bool:
        return bool(self._connection.is_closed())

    async def try_lock(self) -> bool:
        return bool(await self._value("SELECT pg_try_advisory_lock($1)", SERVER_LOCK))

    async def check(self) -> None:
        await self._value("SELECT 1")

    async def end_silent(self, dead_after_us: int) -> bool:
        return await self._value(_END_SILENT, SERVER_LOCK, dead_after_us) is not None

    async def unlock(self) -> None:
        await self._value("SELECT pg_advisory_unlock_all()")

    def terminate(self) -> None:
        self._connection.terminate()

    async def close(self) -> None:
        await _close(self._connection)

    async def _value(self, sql: str, *arguments: Any) -> Any:
        try:
            return await self._connection.fetchval(sql, *arguments, timeout=ANSWER_S)
        except BROKEN as exc:
            why = str(exc) or type(exc).__name__
            raise Unreachable(f"the session of the server lock is lost: {why}") from exc


class PostgresReplicas:
    """Sessions of a replica on the PostgreSQL database of `url`."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def open_store(
        self,
        replica: int,
        committed: Callable[[], None],
        readers: int | None = None,
        keys: KeyHolder | None = None,
    ) -> Store:
        return await open_store(self._url, replica, committed, readers, keys)

    def link(self, notified: Callable[[], None]) -> PostgresLink:
        return PostgresLink(self._url, notified)

    async def lock_session(
        self, earlier: int | None, ended: Callable[[], None]
    ) -> PostgresLockSession:
        try:
            connection = await asyncpg.connect(self._url, timeout=ANSWER_S)
            connection.add_termination_listener(lambda _: ended())
            await connection.execute(_SESSION)
            named = "SELECT set_config('application_name', $1, false)"
            await connection.execute(named, this_process())
            if earlier is not None:
                await connection.execute(_END_OWN, earlier)
        except BROKEN as exc:
            raise Unreachable(f"PostgreSQL refused the session of the server lock: {exc}") from exc
        return PostgresLockSession(connection)


_REGISTER = f"""
    INSERT INTO replicas (id, slot, address, version, started_at, heard_at) SELECT $1, (
        SELECT min(s) FROM generate_series(0, {MAX_REPLICAS - 1}) AS s WHERE s NOT IN (SELECT slot FROM replicas)
    ), $2, $3, {NOW}, {NOW} RETURNING slot
"""  # noqa: S608 - the names are constants
_HEARTBEAT = f"""
    UPDATE replicas SET heard_at = {NOW}, term = $2, lock_pid = $3, draining = $4 WHERE id = $1 RETURNING id
"""  # noqa: S608
_REPLICAS = f"""
    SELECT id, address, draining <> 0, {NOW} - heard_at, {NOW} - started_at FROM replicas ORDER BY id
"""  # noqa: S608
_RUNNING = """
    SELECT r.id FROM replicas r JOIN pg_stat_activity a ON a.pid = r.lock_pid
    WHERE r.id <> $1 AND a.datname = current_database() AND a.application_name LIKE 'gpool server%'
"""
"""Other replicas whose session of the lock is open: a killed process has none, whatever its row says."""
_READ = """
    SELECT CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint) AS horizon, c.xid, c.replica_id, c.ids
    FROM (VALUES (1)) AS one LEFT JOIN changes c ON c.xid >= $1 AND c.replica_id IS DISTINCT FROM $2
    ORDER BY c.xid
"""
_HORIZON = "SELECT CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint) AS horizon"
_DISCONNECT = "UPDATE node_connections SET replica_id = NULL WHERE replica_id = $1"
_PRUNE = f"""
    DELETE FROM changes WHERE at < {NOW} - $1
    OR xid > CAST(CAST(pg_snapshot_xmax(pg_current_snapshot()) AS text) AS bigint)
"""  # noqa: S608
"""Old rows, and rows of another database cluster, which a restored backup may contain."""


class PostgresLink:
    """Calls take turns; a lost connection is replaced."""

    def __init__(self, url: str, notified: Callable[[], None]) -> None:
        self._url, self._notified = url, notified
        self._connection: Any = None
        self._turn = asyncio.Lock()
        self._id = 0

    async def register(self, me: ReplicaIdentity) -> int:
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

    async def heartbeat(
        self, term: int, lock_pid: int | None, *, is_draining: bool
    ) -> list[SeenReplica] | None:
        if not await self._ask(_HEARTBEAT, self._id, term, lock_pid, int(is_draining)):
            return None
        return [SeenReplica(*row) for row in await self._ask(_REPLICAS)]

    async def others_running(self) -> bool:
        return bool(await self._ask(_RUNNING, self._id))

    async def horizon(self) -> int:
        [row] = await self._ask(_HORIZON)
        return int(row["horizon"])

    async def read(self, cursor: int, without: int | None = None) -> FeedPage:
        rows = await self._ask(_READ, cursor, without)
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

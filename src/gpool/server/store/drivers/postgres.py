"""PostgreSQL store: one writer task with its own connection and group commit, and a pool of readers.

Row locks and guarded statements isolate concurrent writers; an operation that loses a deadlock or a race runs again
in a transaction of its own.

PostgreSQL releases it with the session, so the session is watched; no pooler that shares sessions may lie between.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar

import asyncpg  # type: ignore[import-untyped]

from gpool.core.errors import Conflict, GpoolError, InternalFault, Unreachable
from gpool.observability.logs import get_logger
from gpool.server.store.drivers.poolers import refuse_shared_sessions
from gpool.server.store.drivers.shared import (
    MAX_GROUP,
    PATIENCE_S,
    RefusedLate,
    Waiting,
    answer_all,
    held_by_another,
    this_process,
    writes,
)
from gpool.server.store.migrations import newest_migration
from gpool.server.store.protocol import Operation, Row, Statement, again

log = get_logger(__name__)

SERVER_LOCK = 0x67706F6F6C73  # "gpools"; migrations have a lock of their own

_CHECK_S = 5.0
"""Interval and time limit of the check whether the session still answers."""

_RETRY_S = 0.2
_CLOSE_S = 1.0

_SESSION = f"""
    SET lock_timeout = '{PATIENCE_S:g}s';
    SET tcp_keepalives_idle = 15; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3;
"""
"""PostgreSQL drops the session of a machine that vanished after 15 + 3 × 5 = 30 s; the server itself notices a silent
database within 2 × `_CHECK_S` = 10 s, hence before another one can have the lock."""

_HOLDER = """
    SELECT a.pid, a.application_name FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.granted AND a.datname = current_database()
    AND l.objsubid = 1 AND (l.classid::bigint << 32) | l.objid::bigint = $1
"""


_END_SESSION = """
    SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a
    WHERE a.pid = $1 AND a.application_name = current_setting('application_name') AND a.datname = current_database()
"""
"""Ends a lost session of this process: PostgreSQL would keep it, and its lock, until the keep-alive gives up."""


class PostgresServerLock:
    def __init__(self, url: str, connection: Any, reclaim_s: float) -> None:
        self._url = url
        self._connection = connection
        self._pid: int = connection.get_server_pid()
        self._reclaim_s = reclaim_s

    async def lost(self) -> str:
        """Return the reason once the lock cannot be kept. A lost session is replaced within `reclaim_s`."""
        while True:
            await self._until_silent()
            log.warning(
                "the database session that holds the server lock is lost; taking the lock again"
            )
            try:
                async with asyncio.timeout(self._reclaim_s):
                    self._connection = await self._reclaimed()
                    self._pid = self._connection.get_server_pid()
            except Conflict as exc:
                return exc.detail
            except TimeoutError:
                return f"PostgreSQL did not grant it again within {self._reclaim_s:g} s"
            log.warning("this server holds the server lock again")

    async def close(self) -> None:
        with suppress(*LOST):
            await self._connection.close(timeout=_CLOSE_S)

    async def _until_silent(self) -> None:
        closed = asyncio.Event()
        self._connection.add_termination_listener(lambda _: closed.set())
        while not self._connection.is_closed():
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_S):
                    await closed.wait()
                return
            try:
                await self._connection.execute("SELECT 1", timeout=_CHECK_S)
            except (*LOST, asyncpg.PostgresError):
                self._connection.terminate()

    async def _reclaimed(self) -> Any:
        while True:
            try:
                return await locked_session(self._url, self._pid)
            except (Unreachable, asyncpg.PostgresError):  # it starts, or has no connection to spare
                await asyncio.sleep(_RETRY_S)


@asynccontextmanager
async def locked_database(url: str, reclaim_s: float) -> AsyncIterator[PostgresServerLock]:
    """Hold the database's server lock; `Conflict` if another server has it, `Invalid` behind a pooler that shares sessions.

    `reclaim_s`: how long replacing a lost session may take; shorter than a lease time, because a server that takes the
    lock meanwhile expires no lease before that.
    """
    await refuse_shared_sessions(url, _CHECK_S)
    lock = PostgresServerLock(url, await locked_session(url), reclaim_s)
    try:
        yield lock
    finally:
        await lock.close()


async def locked_session(url: str, lost_pid: int | None = None) -> Any:
    """`lost_pid`: backend of an earlier session of this process, ended first if it still lives."""
    try:
        connection = await asyncpg.connect(url, timeout=_CHECK_S)
    except LOST as exc:
        raise Unreachable(
            f"PostgreSQL cannot be reached: {exc}; check the store's address"
        ) from exc
    try:
        await _lock(connection, lost_pid)
    except LOST as exc:
        connection.terminate()
        raise Unreachable(f"PostgreSQL closed the session of the server lock: {exc}") from exc
    except BaseException:
        connection.terminate()
        raise
    return connection


async def _lock(connection: Any, lost_pid: int | None) -> None:
    await connection.execute(_SESSION)
    await connection.execute("SELECT set_config('application_name', $1, false)", this_process())
    if lost_pid is not None:
        await connection.execute(_END_SESSION, lost_pid)
    try:
        await connection.execute("SELECT pg_advisory_lock($1)", SERVER_LOCK)
    except asyncpg.LockNotAvailableError:
        found = await connection.fetchrow(_HOLDER, SERVER_LOCK)
        holder = "unknown session"
        if found is not None:
            holder = f"{found['application_name'] or 'unknown'}; PostgreSQL session {found['pid']}"
        raise held_by_another(
            holder, "this PostgreSQL database", "GPOOL_SERVER_DATABASE_URL"
        ) from None


T = TypeVar("T")
Columns = tuple[tuple[str, str], ...]

READERS = 4
LONE_TRIES = 5
"""Attempts of an operation in its own transaction that loses a deadlock or a race for a unique name."""

PREPARED: dict[str, Any] = {"statement_cache_size": 512, "max_cached_statement_lifetime": 0}
"""Keep as many prepared statements as `compiled` does, without expiry: preparing one again costs a round trip."""

MIGRATION_LOCK = 0x67706F6F6C  # "gpool"
TYPES = {"int": "bigint", "text": "text", "blob": "bytea"}
LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.OperatorInterventionError,
    OSError,
)
RACES = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.UniqueViolationError,
)

_ONLY_HERE = re.compile(r"/\*postgresql (.*?)\*/")
_PARAMETER = re.compile(r":([a-z_][a-z0-9_]*)")


@lru_cache(maxsize=512)
def compiled(sql: str, relations: tuple[tuple[str, Columns], ...]) -> tuple[str, tuple[str, ...]]:
    """SQL with numbered parameters and relations as unnested arrays, and the names of the first parameters.

    The columns of the relations follow the named parameters, relation by relation.
    """
    order: list[str] = []

    def number(found: re.Match[str]) -> str:
        name = found[1]
        if name not in order:
            order.append(name)
        return f"${order.index(name) + 1}"

    sql = _PARAMETER.sub(number, _ONLY_HERE.sub(r"\1", sql))
    last = len(order)
    for name, columns in relations:
        arrays = ", ".join(
            f"${last + i}::{TYPES[kind]}[]" for i, (_, kind) in enumerate(columns, start=1)
        )
        last += len(columns)
        heads = ", ".join(column for column, _ in columns)
        source = f"(SELECT * FROM unnest({arrays}) AS u({heads}))"  # noqa: S608 - the names are constants
        sql = sql.replace("{" + name + "}", source)
    return sql, tuple(order)


async def execute(connection: Any, statement: Statement) -> list[Row]:
    relations = statement.relations
    signature = tuple((name, relation.columns) for name, relation in relations.items())
    sql, order = compiled(statement.sql, signature)
    arguments: list[Any] = [statement.parameters[name] for name in order]
    for relation in relations.values():
        if relation.rows:
            arguments.extend(zip(*relation.rows, strict=True))
        else:
            arguments.extend(() for _ in relation.columns)
    return [tuple(record) for record in await connection.fetch(sql, *arguments)]


async def drive(connection: Any, operation: Operation[T]) -> T:
    steps = again(operation)
    wrote = False
    try:
        statement = next(steps)
        while True:
            wrote = wrote or writes(statement)
            statement = steps.send(await execute(connection, statement))
    except StopIteration as stop:
        value: T = stop.value
        return value
    except GpoolError as refusal:
        if wrote:
            raise RefusedLate(refusal) from refusal
        raise


class PostgresStore:
    def __init__(self, url: str, writer: Any, readers: Any) -> None:
        self._url = url
        self._writer = writer
        self._readers = readers
        self._waiting: deque[Waiting] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._task = asyncio.create_task(self._write_all(), name="store-writer")

    async def write(self, operation: Operation[T]) -> T:
        if self._closing:
            raise Unreachable("the server is shutting down; try again in a moment")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(operation, future))
        self._wake.set()
        return await future

    async def read(self, operation: Operation[T]) -> T:
        if self._closing:
            raise Unreachable("the server is shutting down; try again in a moment")
        try:
            async with (
                self._readers.acquire() as connection,
                connection.transaction(isolation="repeatable_read", readonly=True),
            ):
                return await drive(connection, operation)
        except (*LOST, asyncpg.PostgresError) as exc:
            raise _translated(exc) from exc

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        await self._task
        await self._writer.close()
        await self._readers.close()

    # ---- the writer's task

    async def _write_all(self) -> None:
        while self._waiting or not self._closing:
            if not self._waiting:
                self._wake.clear()
                await self._wake.wait()
                continue
            count = min(MAX_GROUP, len(self._waiting))
            group = [self._waiting.popleft() for _ in range(count)]
            await self._commit(group)
            answer_all(group)

    async def _commit(self, group: Sequence[Waiting]) -> None:
        try:
            if self._writer.is_closed():
                self._writer = await asyncpg.connect(self._url, **PREPARED)
            async with self._writer.transaction():
                for waiting in group:
                    try:
                        waiting.value = await drive(self._writer, waiting.operation)
                    except GpoolError as exc:
                        waiting.fail(exc)
        except Exception as broken:  # noqa: BLE001 - the others must not fail with it; `_alone` raises it again
            unreachable = _translated(broken)
            for waiting in group:
                if isinstance(unreachable, Unreachable):
                    # it is unknown whether the commit arrived: the caller repeats it, and fencing makes that harmless
                    waiting.fail(unreachable)
                    continue
                waiting.error = None
                try:
                    waiting.value = await self._alone(waiting.operation)
                except Exception as exc:  # noqa: BLE001 - raised in the caller of `write`
                    waiting.fail(exc)

    async def _alone(self, operation: Operation[T]) -> T:
        for tried in range(1, LONE_TRIES + 1):
            try:
                async with self._writer.transaction():
                    return await drive(self._writer, operation)
            except RefusedLate as late:
                raise late.refusal from None
            except (*LOST, asyncpg.PostgresError) as exc:
                if tried == LONE_TRIES or not isinstance(exc, RACES):
                    raise _translated(exc) from exc
        raise AssertionError("the last attempt returns or raises")


def _translated(exc: Exception) -> Exception:
    """Translate an asyncpg error. A value that asyncpg cannot encode is a bug (ValueError), not a lost connection."""
    if isinstance(exc, LOST) and not isinstance(exc, ValueError):
        return Unreachable("the database does not answer; try again")
    if isinstance(exc, asyncpg.PostgresError):
        return InternalFault(f"the database refused: {exc}")
    return exc


async def migrate(connection: Any) -> str | None:
    """Migrate the database and return its revision before, None if it was empty.

    A concurrent call waits on an advisory lock and finds nothing to do.
    """
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", MIGRATION_LOCK)
        current = None
        if await connection.fetchval("SELECT to_regclass('alembic_version')") is not None:
            current = await connection.fetchval("SELECT version_num FROM alembic_version")
        if current != newest_migration():
            upgrade = import_module("gpool.server.store.migrations.upgrade")
            await connection.execute(await asyncio.to_thread(upgrade.postgres_script, current))
    return current


async def migrate_database(url: str) -> str | None:
    await refuse_shared_sessions(url, _CHECK_S)
    try:
        connection = await asyncpg.connect(url)
    except LOST as exc:
        raise Unreachable(
            f"PostgreSQL cannot be reached: {exc}; check the store's address"
        ) from exc
    try:
        return await migrate(connection)
    finally:
        await connection.close()


async def _no_reset(_: Any) -> None:
    """Skip asyncpg's reset: readers change no session state, and it costs a round trip per read."""


async def open_postgres(url: str) -> PostgresStore:
    try:
        writer = await asyncpg.connect(url, **PREPARED)
        await migrate(writer)
        readers = await asyncpg.create_pool(
            url, min_size=1, max_size=READERS, reset=_no_reset, **PREPARED
        )
    except LOST as exc:
        raise Unreachable(
            f"PostgreSQL cannot be reached: {exc}; check the store's address"
        ) from exc
    return PostgresStore(url, writer, readers)

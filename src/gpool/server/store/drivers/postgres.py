"""PostgreSQL store: one writer task with its own connection and group commit, and a pool of readers.

Row locks and guarded statements isolate concurrent writers; an operation that loses a deadlock or a race runs again
in a transaction of its own. Each session of the writer names its replica, which the triggers of the change feed record.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar

import asyncpg  # type: ignore[import-untyped]

from gpool.core.errors import GpoolError, InternalFault, Unreachable
from gpool.observability.logs import get_logger
from gpool.server.store.drivers.poolers import refuse_shared_sessions
from gpool.server.store.drivers.shared import (
    MAX_GROUP,
    RefusedLate,
    Waiting,
    answer_all,
    writes,
)
from gpool.server.store.migrations import newest_migration
from gpool.server.store.protocol import Operation, Row, Statement, again
from gpool.server.store.sealing import CIPHER, KeyHolder, NoKeys

log = get_logger(__name__)

SERVER_LOCK = (
    0x67706F6F6C73  # "gpools": leadership (`postgres_replica`); migrations have a lock of their own
)

T = TypeVar("T")
Columns = tuple[tuple[str, str], ...]

LONE_TRIES = 5
"""Attempts of an operation in its own transaction that loses a deadlock or a race for a unique name."""

PREPARED: dict[str, Any] = {"statement_cache_size": 512, "max_cached_statement_lifetime": 0}
"""Keep as many prepared statements as `compiled` does, without expiry: preparing one again costs a round trip."""

CONNECT_S = 5.0
SILENCE_MS = 5_000
"""Longest time without an acknowledgement from the database's host; then the kernel closes the connection."""

MIGRATION_LOCK = 0x67706F6F6C  # "gpool"
NO_KEYS = NoKeys()
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


async def drive(connection: Any, operation: Operation[T], keys: KeyHolder = NO_KEYS) -> T:
    steps = again(operation)
    wrote = False
    try:
        statement = next(steps)
        while True:
            wrote = wrote or writes(statement)
            if statement is CIPHER:
                statement = steps.send(keys)
            else:
                statement = steps.send(await execute(connection, statement))
    except StopIteration as stop:
        value: T = stop.value
        return value
    except GpoolError as refusal:
        if wrote:
            raise RefusedLate(refusal) from refusal
        raise


IDLE_TRANSACTION = "10s"
"""Time after which PostgreSQL ends a transaction whose process is stopped: it would keep the next leader from a term."""

_NAME_AND_LIMIT = """
    SELECT set_config('gpool.replica', $1, false), set_config('idle_in_transaction_session_timeout', $2, false)
"""


async def limit_silence(connection: Any) -> None:
    """Notice a database that is cut off within seconds: without this, TCP repeats a statement for a quarter of an hour.

    Slow statements are not affected: the host of the database acknowledges them. asyncpg has no option for it.
    """
    transport = connection._transport
    used = transport.get_extra_info("socket")
    if used is None or used.family == socket.AF_UNIX:
        return
    used.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 3),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", SILENCE_MS),
    ):
        option = getattr(socket, name, None)  # Linux has all of them
        if option is not None:
            used.setsockopt(socket.IPPROTO_TCP, option, value)


@dataclass(frozen=True, slots=True)
class ReplicaWiring:
    """The replica that the store belongs to (0: none), a callback after each commit, and keys of accounts."""

    replica: int = 0
    committed: Callable[[], None] = lambda: None
    keys: KeyHolder = NO_KEYS

    async def connect(self, url: str) -> Any:
        """Named by a statement: PgBouncer refuses unknown settings at the start of a session."""
        connection = await asyncpg.connect(url, timeout=CONNECT_S, **PREPARED)
        await limit_silence(connection)
        await connection.execute(_NAME_AND_LIMIT, str(self.replica), IDLE_TRANSACTION)
        return connection


NO_REPLICA = ReplicaWiring()


class PostgresStore:
    def __init__(self, url: str, writer: Any, readers: Any, wiring: ReplicaWiring) -> None:
        self._url = url
        self._writer = writer
        self._wiring = wiring
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
                return await drive(connection, operation, self._wiring.keys)
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
            if self._writer.is_closed() and not await self._connected_again():
                continue
            count = min(MAX_GROUP, len(self._waiting))
            group = [self._waiting.popleft() for _ in range(count)]
            await self._commit(group)
            answer_all(group)
            self._wiring.committed()

    async def _connected_again(self) -> bool:
        """Replace a lost connection; if the database does not answer, fail all that wait: a further attempt takes as long."""
        try:
            self._writer = await self._wiring.connect(self._url)
        except (*LOST, asyncpg.PostgresError) as exc:
            group = [*self._waiting]
            self._waiting.clear()
            for waiting in group:
                waiting.fail(_translated(exc))
            answer_all(group)
            return False
        return True

    async def _commit(self, group: Sequence[Waiting]) -> None:
        try:
            async with self._writer.transaction():
                for waiting in group:
                    try:
                        waiting.value = await drive(
                            self._writer, waiting.operation, self._wiring.keys
                        )
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
                    return await drive(self._writer, operation, self._wiring.keys)
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
        # the script is made in between, which takes long on a busy machine
        await connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        await connection.execute("SELECT pg_advisory_xact_lock($1)", MIGRATION_LOCK)
        current = None
        if await connection.fetchval("SELECT to_regclass('alembic_version')") is not None:
            current = await connection.fetchval("SELECT version_num FROM alembic_version")
        if current != newest_migration():
            upgrade = import_module("gpool.server.store.migrations.upgrade")
            await connection.execute(await asyncio.to_thread(upgrade.postgres_script, current))
    return current


async def migrate_database(url: str) -> str | None:
    await refuse_shared_sessions(url)
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


async def open_postgres(
    url: str, wiring: ReplicaWiring = NO_REPLICA, readers: int = 4
) -> PostgresStore:
    await refuse_shared_sessions(url)
    try:
        writer = await wiring.connect(url)
        await migrate(writer)
        pool = await asyncpg.create_pool(
            url,
            min_size=1,
            max_size=readers,
            reset=_no_reset,
            init=limit_silence,
            timeout=CONNECT_S,
            **PREPARED,
        )
    except LOST as exc:
        raise Unreachable(
            f"PostgreSQL cannot be reached: {exc}; check the store's address"
        ) from exc
    return PostgresStore(url, writer, pool, wiring)

"""Rows of a PostgreSQL database for a backup, in one snapshot, and the writing of a restored one in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeVar

import asyncpg  # type: ignore[import-untyped]

from gpool.core.errors import Conflict, Unreachable
from gpool.server.store.drivers.poolers import refuse_shared_sessions
from gpool.server.store.drivers.postgres import LOST, MIGRATION_LOCK, SERVER_LOCK, drive
from gpool.server.store.drivers.shared import FETCHED_ROWS, TableColumns
from gpool.server.store.drivers.sqlite_copy import not_restorable
from gpool.server.store.migrations import newest_migration
from gpool.server.store.protocol import Operation

T = TypeVar("T")

_TABLES = """
    SELECT c.table_name, c.column_name FROM information_schema.columns c
    JOIN information_schema.tables t ON t.table_schema = c.table_schema AND t.table_name = c.table_name
    WHERE c.table_schema = current_schema() AND t.table_type = 'BASE TABLE' ORDER BY c.table_name, c.ordinal_position
"""
_SERVERS = """
    SELECT DISTINCT a.application_name FROM pg_stat_activity a
    WHERE a.datname = current_database() AND a.application_name LIKE 'gpool server%'
"""
_FUNCTIONS = """
    SELECT CAST(CAST(p.oid AS regprocedure) AS text) AS name FROM pg_proc p
    JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = current_schema() AND p.proname LIKE 'gpool\\_%'
"""


async def _connected(url: str) -> Any:
    await refuse_shared_sessions(url)
    try:
        return await asyncpg.connect(url)
    except LOST as exc:
        raise Unreachable(
            f"PostgreSQL cannot be reached: {exc}; check GPOOL_SERVER_DATABASE_URL"
        ) from exc


async def _tables(connection: Any) -> list[TableColumns]:
    columns: dict[str, list[str]] = {}
    for row in await connection.fetch(_TABLES):
        columns.setdefault(row["table_name"], []).append(row["column_name"])
    return [TableColumns(name, tuple(of)) for name, of in columns.items()]


async def _revision(connection: Any) -> str | None:
    if await connection.fetchval("SELECT to_regclass('alembic_version')") is None:
        return None
    found = await connection.fetchval("SELECT version_num FROM alembic_version")
    return None if found is None else str(found)


class PostgresSnapshot:
    """One repeatable-read transaction: the state of its beginning, while others write."""

    kind = "postgresql"

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, url: str) -> PostgresSnapshot:
        connection = await _connected(url)
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await connection.execute("SELECT 1")
        return cls(connection)

    async def revision(self) -> str | None:
        return await _revision(self._connection)

    async def tables(self) -> list[TableColumns]:
        return await _tables(self._connection)

    async def rows(self, table: TableColumns) -> AsyncIterator[Sequence[Sequence[Any]]]:
        """Rows in pages."""
        sql = f"SELECT {table.listed} FROM {table.name}"  # noqa: S608 - names of the catalogue
        try:
            cursor = await self._connection.cursor(sql)
            while page := await cursor.fetch(FETCHED_ROWS):
                yield [tuple(row) for row in page]
        except LOST as exc:
            raise Unreachable(f"the database went away during the backup: {exc}") from exc

    async def read(self, operation: Operation[T]) -> T:
        return await drive(self._connection, operation)

    async def close(self) -> None:
        with suppress(*LOST):
            await self._connection.close()


class PostgresTarget:
    """One transaction that replaces the whole schema; `commit` commits it. Until then the database is unchanged."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._revision = ""

    @classmethod
    async def open(cls, url: str) -> PostgresTarget:
        return cls(await _connected(url))

    async def check(self, *, force: bool) -> int:
        """`Conflict` while a server runs, or if there are rows and not `force`; return the scheduler's term, 0 without one.

        The lock of the leader is held until `close`, so that no server leads meanwhile.
        """
        connection = self._connection
        servers = [row["application_name"] for row in await connection.fetch(_SERVERS)]
        locked = await connection.fetchval("SELECT pg_try_advisory_lock($1)", SERVER_LOCK)
        if servers or not locked:
            raise Conflict(
                f"{', '.join(servers) or 'a gpool server'} uses this database; stop every server first"
            )
        if await connection.fetchval("SELECT to_regclass('users')") is None:
            return 0
        if not force and await connection.fetchval("SELECT EXISTS (SELECT 1 FROM users)"):
            raise Conflict(
                "the database has accounts and tasks; restore into an empty one, or replace it with --force"
            )
        return int(await connection.fetchval("SELECT COALESCE(MAX(term), 0) FROM scheduler_term"))

    async def begin(self, revision: str) -> None:
        connection = self._connection
        self._revision = revision
        await connection.execute("BEGIN")
        await connection.execute("SELECT pg_advisory_xact_lock($1)", MIGRATION_LOCK)
        if await _revision(connection) is not None:
            for table in await _tables(connection):
                await connection.execute(f"DROP TABLE {table.name} CASCADE")
            for row in await connection.fetch(_FUNCTIONS):
                await connection.execute(f"DROP FUNCTION {row['name']} CASCADE")
        await self._upgrade(None, revision)
        await self._set_triggers("DISABLE")
        for table in await _tables(connection):
            if table.name != "alembic_version":  # rows that migrations insert
                await connection.execute(f"DELETE FROM {table.name}")  # noqa: S608

    async def insert(self, table: TableColumns, rows: Sequence[Sequence[Any]]) -> None:
        try:
            await self._connection.copy_records_to_table(
                table.name, columns=list(table.columns), records=rows
            )
        except LOST as exc:
            raise Unreachable(f"the database went away; nothing was changed: {exc}") from exc
        except (asyncpg.PostgresError, ValueError, TypeError) as exc:
            raise not_restorable(table, exc) from exc

    async def finish(self, operation: Operation[T]) -> T:
        """Migrate the loaded rows to the newest schema, and run the operation on them."""
        await self._set_triggers("ENABLE")
        if self._revision != newest_migration():
            await self._upgrade(self._revision, "head")
        done = await drive(self._connection, operation)
        if await self._connection.fetchval("SELECT to_regclass('changes')") is not None:
            await self._connection.execute("DELETE FROM changes")
        return done

    async def commit(self) -> None:
        await self._connection.execute("COMMIT")
        await self._connection.execute("ANALYZE")

    async def close(self) -> None:
        with suppress(*LOST):
            await self._connection.close()

    async def _set_triggers(self, word: str) -> None:
        """Triggers would name every loaded row in the change feed, which nobody reads yet."""
        for table in await _tables(self._connection):
            await self._connection.execute(f"ALTER TABLE {table.name} {word} TRIGGER USER")

    async def _upgrade(self, current: str | None, to: str) -> None:
        upgrade = import_module("gpool.server.store.migrations.upgrade")
        script = await asyncio.to_thread(upgrade.postgres_script, current, to)
        await self._connection.execute(script)

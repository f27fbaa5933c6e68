"""Rows of an SQLite database for a backup, in one snapshot, and the writing of a restored one."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from gpool.core.errors import Conflict, InternalFault, Invalid, NotFound
from gpool.server.store.drivers.opening import close_to_others, sqlite_version
from gpool.server.store.drivers.shared import FETCHED_ROWS, TableColumns
from gpool.server.store.drivers.sqlite_connection import Connection
from gpool.server.store.protocol import Operation, Row, Statement

T = TypeVar("T")

COMPANIONS = ("", "-wal", "-shm", "-journal")


class SqliteSnapshot:
    """One read transaction: the state of its beginning, while others write. The WAL grows until it is closed."""

    kind = "sqlite"

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise NotFound(f"there is no database {path}; name the server's directory with --data")
        self._connection = Connection(str(path), writes=False)
        self._connection.begin()
        self._rows("SELECT 1 FROM sqlite_master LIMIT 1")  # the snapshot begins with the first read

    async def revision(self) -> str | None:
        if not self._rows("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'"):
            return None
        [(found,)] = self._rows("SELECT version_num FROM alembic_version")
        return str(found)

    async def tables(self) -> list[TableColumns]:
        named = self._rows(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name"
        )
        return [TableColumns(name, self._columns(name)) for (name,) in named]

    def _columns(self, table: str) -> tuple[str, ...]:
        sql = "SELECT name FROM pragma_table_info(:table)"
        return tuple(str(column) for (column,) in self._rows(sql, {"table": table}))

    async def rows(self, table: TableColumns) -> AsyncIterator[Sequence[Sequence[Any]]]:
        """Rows in pages."""
        sql = f"SELECT {table.listed} FROM {table.name}"  # noqa: S608 - names of the catalogue
        for page in self._connection.pages(sql, FETCHED_ROWS):
            yield page

    async def read(self, operation: Operation[T]) -> T:
        return self._connection.drive(operation)

    async def close(self) -> None:
        self._connection.close()

    def _rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        found = self._connection.execute(Statement(sql, parameters or {}))
        assert isinstance(found, list)
        return found


class SqliteTarget:
    """A new database beside its final place, which `commit` moves it to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._draft = path.with_name(f"{path.name}.restoring")
        self._raw: sqlite3.Connection | None = None
        self._revision = ""

    async def check(self, *, force: bool) -> int:
        """`Conflict` if there is a database and not `force`; return its scheduler's term, 0 without one."""
        if not self._path.exists():
            return 0
        if not force:
            raise Conflict(
                f"{self._path} exists; restore into an empty directory, or replace it with --force"
            )
        with suppress(sqlite3.Error):  # a damaged database is replaced too
            raw = sqlite3.connect(self._path)
            try:
                [(term,)] = raw.execute("SELECT COALESCE(MAX(term), 0) FROM scheduler_term")
            finally:
                raw.close()
            return int(term)
        return 0

    async def begin(self, revision: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._remove_draft()
        close_to_others(self._draft)
        self._revision = revision
        _upgrade(self._draft, revision)
        self._raw = sqlite3.connect(self._draft, isolation_level=None)
        self._raw.execute("PRAGMA synchronous = OFF")  # `commit` flushes it once
        self._raw.execute("BEGIN IMMEDIATE")
        named = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT IN ('alembic_version')"
        for (table,) in self._raw.execute(named).fetchall():
            self._raw.execute(f"DELETE FROM {table}")  # noqa: S608 - rows that migrations insert

    async def insert(self, table: TableColumns, rows: Sequence[Sequence[Any]]) -> None:
        assert self._raw is not None
        places = ", ".join("?" * len(table.columns))
        try:
            self._raw.executemany(
                f"INSERT INTO {table.name} ({table.listed}) VALUES ({places})",  # noqa: S608 - names of the catalogue
                rows,
            )
        except sqlite3.Error as error:
            raise not_restorable(table, error) from error

    async def finish(self, operation: Operation[T]) -> T:
        """Migrate the loaded rows to the newest schema, and run the operation on them."""
        assert self._raw is not None
        self._raw.execute("COMMIT")
        self._raw.close()
        self._raw = None
        _upgrade(self._draft, "head")
        connection = Connection(str(self._draft), writes=True)
        try:
            return connection.alone(operation)
        finally:
            connection.close()

    async def commit(self) -> None:
        """Put the database in its place, durably. The lock of the place must be held."""
        raw = sqlite3.connect(self._draft, isolation_level=None)
        raw.execute("PRAGMA journal_mode = DELETE")  # all of it in one file
        raw.close()
        self._put_in_place()

    async def close(self) -> None:
        if self._raw is not None:
            self._raw.close()
        self._remove_draft()

    def _put_in_place(self) -> None:
        _flush(self._draft)
        for companion in COMPANIONS[1:]:
            Path(f"{self._path}{companion}").unlink(missing_ok=True)
        self._draft.replace(self._path)
        _flush(self._path.parent)

    def _remove_draft(self) -> None:
        for companion in COMPANIONS:
            Path(f"{self._draft}{companion}").unlink(missing_ok=True)


def not_restorable(table: TableColumns, error: Exception) -> Invalid:
    return Invalid(
        f"the rows of the table {table.name} cannot be restored: {error}; nothing was changed"
    )


def _upgrade(path: Path, revision: str) -> None:
    import_module("gpool.server.store.migrations.upgrade").upgrade_sqlite(path, revision)
    if sqlite_version(path) is None:
        raise InternalFault(f"{path} was not migrated")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

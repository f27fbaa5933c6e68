"""Interfaces of a database to copy from and to, and their choice by the store's URL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar

from gpool.core.errors import Invalid, Unreachable
from gpool.server.store.drivers.opening import POSTGRES, SQLITE
from gpool.server.store.drivers.shared import TableColumns
from gpool.server.store.drivers.sqlite_copy import SqliteSnapshot, SqliteTarget
from gpool.server.store.migrations import newest_migration
from gpool.server.store.protocol import Operation

T = TypeVar("T")


class StoreSnapshot(Protocol):
    """One state of a database, while servers write to it."""

    kind: str

    async def revision(self) -> str | None: ...

    async def tables(self) -> list[TableColumns]: ...

    def rows(self, table: TableColumns) -> AsyncIterator[Sequence[Sequence[Any]]]: ...

    async def read(self, operation: Operation[T]) -> T: ...

    async def close(self) -> None: ...


class StoreTarget(Protocol):
    """A database that a restore fills: `check`, `begin`, `insert` …, `finish`, `commit`. Unchanged before `commit`."""

    async def check(self, *, force: bool) -> int: ...

    async def begin(self, revision: str) -> None: ...

    async def insert(self, table: TableColumns, rows: Sequence[Sequence[Any]]) -> None: ...

    async def finish(self, operation: Operation[T]) -> T: ...

    async def commit(self) -> None: ...

    async def close(self) -> None: ...


async def open_snapshot(url: str) -> StoreSnapshot:
    """Open a snapshot; `Invalid` if its schema is not one that this version of gpool knows."""
    snapshot: StoreSnapshot
    if url.startswith(SQLITE):
        snapshot = SqliteSnapshot(Path(url.removeprefix(SQLITE)))
    else:
        snapshot = await _postgres(url).PostgresSnapshot.open(url)
    try:
        await known_revision(snapshot)
    except BaseException:
        await snapshot.close()
        raise
    return snapshot


async def open_target(url: str) -> StoreTarget:
    if url.startswith(SQLITE):
        return SqliteTarget(Path(url.removeprefix(SQLITE)))
    target: StoreTarget = await _postgres(url).PostgresTarget.open(url)
    return target


async def known_revision(snapshot: StoreSnapshot) -> str:
    found = await snapshot.revision()
    if found is None:
        raise Unreachable(
            "the database is empty; start the server once, or name its directory with --data"
        )
    if found > newest_migration():
        raise Invalid(
            f"the database has the schema {found}, and this version of gpool knows {newest_migration()}; "
            "use the version of the server"
        )
    return found


def _postgres(url: str) -> Any:
    if not url.startswith(POSTGRES):
        raise Invalid(
            f"{url[:40]!r} is no store; give sqlite:///PATH or postgresql://HOST/DATABASE"
        )
    return import_module("gpool.server.store.drivers.postgres_copy")

"""Opening a store by its URL, with its schema migrated. Imports SQLAlchemy only to migrate."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, closing, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from gpool.core.errors import Invalid
from gpool.server.store.drivers.shared import locked_file
from gpool.server.store.drivers.sqlite import InlineStore, SqliteStore
from gpool.server.store.migrations import newest_migration
from gpool.server.store.protocol import Store
from gpool.server.store.sealing import KeyHolder, NoKeys

SQLITE = "sqlite:///"
POSTGRES = ("postgresql://", "postgres://")


def _ignored() -> None:
    """Nobody waits for commits."""


def default_readers(url: str) -> int:
    """Connections for reads, unless set: reads of PostgreSQL do not compete for the interpreter."""
    return 4 if url.startswith(POSTGRES) else 2


async def open_store(
    url: str,
    replica: int = 0,
    committed: Callable[[], None] = _ignored,
    readers: int | None = None,
    keys: KeyHolder | None = None,
) -> Store:
    """Open `sqlite:///PATH` (relative; `sqlite:////PATH` is absolute) or `postgresql://…`; `Invalid` for another URL.

    PostgreSQL only: `replica` is named in the change feed; `committed` is called after each commit. `keys` opens and
    seals encrypted fields; without it they cannot be read.
    """
    readers = readers or default_readers(url)
    if url.startswith(SQLITE):
        path = Path(url.removeprefix(SQLITE))
        close_to_others(path)
        await asyncio.to_thread(migrate_sqlite, path)
        return await SqliteStore.open(path, readers, keys)
    if url.startswith(POSTGRES):
        # asyncpg is in the extra `postgres`, so it is imported only where the URL asks for it
        postgres = import_module("gpool.server.store.drivers.postgres")
        wiring = postgres.ReplicaWiring(replica, committed, keys or NoKeys())
        store: Store = await postgres.open_postgres(url, wiring, readers)
        return store
    raise _unknown_store(url)


class Migration(NamedTuple):
    before: str | None  # revision of the schema; None: an empty database
    after: str


async def migrate_store(url: str) -> Migration:
    """Migrate the schema and return; servers may be running on the database, as in a rolling update."""
    if url.startswith(SQLITE):
        path = Path(url.removeprefix(SQLITE))
        path.parent.mkdir(parents=True, exist_ok=True)
        close_to_others(path)
        before = sqlite_version(path)
        await asyncio.to_thread(migrate_sqlite, path)
        return Migration(before, newest_migration())
    if url.startswith(POSTGRES):
        postgres = import_module("gpool.server.store.drivers.postgres")
        return Migration(await postgres.migrate_database(url), newest_migration())
    raise _unknown_store(url)


def close_to_others(database: Path) -> None:
    """Create the file with mode 0600, or give it and its companions that mode; SQLite's new ones copy it."""
    os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for suffix in ("", "-wal", "-shm", "-journal"):
        with suppress(FileNotFoundError, PermissionError):  # another user's: that user decides
            os.chmod(f"{database}{suffix}", 0o600)


def lock_for_serving(url: str) -> AbstractAsyncContextManager[None]:
    """Hold the lock of an SQLite store; `Conflict` names the server that has it. PostgreSQL serves several at once."""
    if url.startswith(SQLITE):
        return locked_file(Path(url.removeprefix(SQLITE)))
    if url.startswith(POSTGRES):
        return nullcontext()
    raise _unknown_store(url)


def _unknown_store(url: str) -> Invalid:
    return Invalid(f"{url[:40]!r} is no store; give sqlite:///PATH or postgresql://HOST/DATABASE")


def open_inline(path: Path | str, *, synchronous: str = "FULL") -> InlineStore:
    migrate_sqlite(Path(path))
    return SqliteStore.inline(path, synchronous=synchronous)


def sqlite_version(path: Path) -> str | None:
    with closing(sqlite3.connect(path)) as connection:
        try:
            found = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.OperationalError:  # no such table: an empty database
            return None
        return None if found is None else str(*found)


def migrate_sqlite(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if sqlite_version(path) != newest_migration():
        import_module("gpool.server.store.migrations.upgrade").upgrade_sqlite(path)

"""Opening a store by its address. The schema is brought up to date first; an unknown address is refused."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from pathlib import Path

from gpool.core.errors import Invalid
from gpool.server.store.drivers.schema_version import migrate_sqlite
from gpool.server.store.drivers.sqlite import InlineStore, SqliteStore
from gpool.server.store.protocol import Store
from gpool.server.store.server_lock import ServerLock, locked_file

SQLITE = "sqlite:///"
POSTGRES = ("postgresql://", "postgres://")


async def open_store(url: str) -> Store:
    """`sqlite:///PATH` (relative; `sqlite:////PATH` absolute) or `postgresql://…`."""
    if url.startswith(SQLITE):
        path = Path(url.removeprefix(SQLITE))
        await asyncio.to_thread(migrate_sqlite, path)
        return await SqliteStore.open(path)
    if url.startswith(POSTGRES):
        # asyncpg is in the extra `postgres`: only who names a PostgreSQL needs it
        postgres = import_module("gpool.server.store.drivers.postgres")
        store: Store = await postgres.open_postgres(url)
        return store
    raise _no_store(url)


def lock_for_serving(url: str, reclaim_s: float) -> AbstractAsyncContextManager[ServerLock]:
    """Hold the store's server lock while this is open; `Conflict` names the server that has it already.

    `reclaim_s`: how long a lock that is lost with its database session may take to be taken again.
    """
    if url.startswith(SQLITE):
        return locked_file(Path(url.removeprefix(SQLITE)))
    if url.startswith(POSTGRES):
        postgres = import_module("gpool.server.store.postgres_lock")
        lock: AbstractAsyncContextManager[ServerLock] = postgres.locked_database(url, reclaim_s)
        return lock
    raise _no_store(url)


def _no_store(url: str) -> Invalid:
    return Invalid(f"{url[:40]!r} is no store; give sqlite:///PATH or postgresql://HOST/DATABASE")


def open_inline(path: Path | str, *, synchronous: str = "FULL") -> InlineStore:
    """A migrated SQLite store driven in the caller's thread."""
    migrate_sqlite(Path(path))
    return SqliteStore.inline(path, synchronous=synchronous)

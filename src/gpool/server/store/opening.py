"""Opening a store by its address. The schema is brought up to date first; an unknown address is refused."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path

from gpool.core.errors import Invalid
from gpool.server.store.protocol import Store
from gpool.server.store.sqlite import InlineStore, SqliteStore
from gpool.server.store.versions import migrate_sqlite

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
        postgres = import_module("gpool.server.store.postgres")
        store: Store = await postgres.open_postgres(url)
        return store
    raise Invalid(f"{url[:40]!r} is no store; give sqlite:///PATH or postgresql://HOST/DATABASE")


def open_inline(path: Path | str, *, synchronous: str = "FULL") -> InlineStore:
    """A migrated SQLite store driven in the caller's thread."""
    migrate_sqlite(Path(path))
    return SqliteStore.inline(path, synchronous=synchronous)

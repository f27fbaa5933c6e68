"""Detection of a connection pooler that gives a PostgreSQL session to several clients: PgBouncer in transaction mode."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import asyncpg  # type: ignore[import-untyped]

from gpool.core.errors import Invalid

_NO_NAMES: dict[str, Any] = {"statement_cache_size": 0}
"""Prepared statements without a name: a shared session may hold another client's of the same name."""

_REFUSAL = (
    "a connection pooler between gpool and PostgreSQL {fault}. gpool keeps locks, settings and prepared statements in "
    "its sessions: set pool_mode = session in PgBouncer for this database, or name PostgreSQL itself in "
    "GPOOL_SERVER_DATABASE_URL"
)


async def refuse_shared_sessions(url: str, within_s: float = 5.0) -> None:
    """Raise `Invalid` if a pooler shares sessions, or has no second one within `within_s`.

    PostgreSQL itself is recognised by one query: the process id it announces is its backend's. Behind a pooler, a
    second connection begins a transaction, and the first must still have its backend. Does nothing if the database
    cannot be reached, which the caller's own connection reports.
    """
    try:
        first = await asyncpg.connect(url, timeout=within_s, **_NO_NAMES)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return
    try:
        backend = await _backend(first)
        if backend == first.get_server_pid():
            return
        fault = "gives a session to several clients (pool_mode transaction or statement)"
        try:
            async with asyncio.timeout(within_s):
                if await _is_kept(first, backend, url):
                    return
        except TimeoutError:
            fault = f"gave no second session within {within_s:g} s"
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            fault = f"refused a transaction ({error})"
    finally:
        await _close(first, within_s)
    raise Invalid(_REFUSAL.format(fault=fault))


async def _is_kept(first: Any, backend: int, url: str) -> bool:
    second = await asyncpg.connect(url, **_NO_NAMES)
    try:
        async with second.transaction():
            with suppress(asyncpg.InvalidSQLStatementNameError):  # prepared in another backend
                return await _backend(second) != backend and await _backend(first) == backend
            return False
    finally:
        second.terminate()


async def _backend(connection: Any) -> int:
    return int(await connection.fetchval("SELECT pg_backend_pid()"))


async def _close(connection: Any, within_s: float) -> None:
    try:
        await connection.close(timeout=within_s)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        connection.terminate()

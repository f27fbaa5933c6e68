"""Server lock of a PostgreSQL database: a session-level advisory lock on its own connection.

PostgreSQL releases it with the session, so the session is watched; no pooler that shares sessions may lie between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg  # type: ignore[import-untyped]

from gpool.core.errors import Conflict, Unreachable
from gpool.server.store.drivers.postgres import LOST
from gpool.server.store.drivers.server_lock import PATIENCE_S, held_by_another, this_process

log = logging.getLogger(__name__)

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


class PostgresServerLock:
    def __init__(self, url: str, connection: Any, reclaim_s: float) -> None:
        self._url = url
        self._connection = connection
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
                return await _locked_session(self._url)
            except (Unreachable, asyncpg.PostgresError):  # it starts, or has no connection to spare
                await asyncio.sleep(_RETRY_S)


@asynccontextmanager
async def locked_database(url: str, reclaim_s: float) -> AsyncIterator[PostgresServerLock]:
    """Hold the database's server lock; `Conflict` if another server has it.

    `reclaim_s`: how long replacing a lost session may take; shorter than a lease time, because a server that takes the
    lock meanwhile expires no lease before that.
    """
    lock = PostgresServerLock(url, await _locked_session(url), reclaim_s)
    try:
        yield lock
    finally:
        await lock.close()


async def _locked_session(url: str) -> Any:
    try:
        connection = await asyncpg.connect(url, timeout=_CHECK_S)
    except LOST as exc:
        raise Unreachable(
            f"PostgreSQL cannot be reached: {exc}; check the store's address"
        ) from exc
    try:
        await _lock(connection)
    except LOST as exc:
        connection.terminate()
        raise Unreachable(f"PostgreSQL closed the session of the server lock: {exc}") from exc
    except BaseException:
        connection.terminate()
        raise
    return connection


async def _lock(connection: Any) -> None:
    await connection.execute(_SESSION)
    await connection.execute("SELECT set_config('application_name', $1, false)", this_process())
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

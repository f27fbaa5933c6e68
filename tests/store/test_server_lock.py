"""One server at a time on a store: real processes on both databases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from gpool.core.errors import Conflict
from tests.tools.processes import PATIENCE_S, Pool, eventually

HOLDERS = (
    "SELECT a.pid FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid "
    "WHERE l.locktype = 'advisory' AND l.granted AND a.datname = current_database()"
)
WAITING = HOLDERS.replace("l.granted", "NOT l.granted")


@contextmanager
def served(folder: Path, url: str, *names: str) -> Iterator[list[Pool]]:
    """Servers with one data directory and one database; none is started yet."""
    settings = {"GPOOL_SERVER_DATABASE_URL": url, "GPOOL_SERVER_TTL_S": "120"}
    pools = [Pool(folder, settings) for _ in names]
    for pool, name in zip(pools, names, strict=True):
        pool.server.log = folder / f"{name}.log"
    try:
        yield pools
    finally:
        for pool in pools:
            pool.stop()


def ended(pool: Pool) -> str:
    """Wait until the server has ended by itself, and return its output."""
    eventually("the server ends", lambda: not pool.server.is_running, PATIENCE_S)
    return pool.server.said()


def test_a_second_server_refuses_to_start_until_the_first_is_killed(
    url: str, tmp_path: Path
) -> None:
    with served(tmp_path, url, "first", "second") as (first, second):
        first.start_server()
        second.server.start()
        said = ended(second)
        assert second.server.exit_code == 1
        assert f"process {first.server.pid} on" in said
        assert "stop that server first" in said
        assert "Traceback" not in said
        assert first.ask("GET", "/v1/nodes").status_code == 200
        first.server.kill()
        second.start_server()
        second.server.stop()
        first.start_server()  # after an orderly stop, too


def test_a_server_takes_its_lock_again_when_the_session_is_lost(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    url = postgres()
    with served(tmp_path, url, "first") as (pool,):
        pool.start_server()
        [holder] = asked(url, HOLDERS)
        asked(url, f"SELECT pg_terminate_backend({holder})")
        eventually("another session holds it", lambda: holds_since(url, holder), PATIENCE_S)
        assert pool.ask("GET", "/v1/nodes").status_code == 200


def test_a_server_stops_when_another_has_the_lock_it_lost(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    url = postgres()
    with served(tmp_path, url, "first") as (pool,):
        pool.start_server()
        asyncio.run(take_over(url))
        said = ended(pool)
        assert pool.server.exit_code == 1
        assert "lost the lock of its store: another server" in said
        assert "Traceback" not in said


async def take_over(url: str) -> None:
    """Wait in line for the lock, end the holder's session, and keep the lock until the server asked for it in vain."""
    rival = await connected(url)
    looking = await connected(url)
    [holder] = await looking.fetch(HOLDERS)
    lock = import_module("gpool.server.store.drivers.postgres").SERVER_LOCK
    taking = asyncio.create_task(rival.execute("SELECT pg_advisory_lock($1)", lock))
    await until(looking, WAITING)
    await looking.execute("SELECT pg_terminate_backend($1)", holder["pid"])
    await taking
    await until(looking, WAITING)  # the server's new session
    await until(looking, f"SELECT 1 WHERE NOT EXISTS ({WAITING})")  # and gave up
    await rival.close()
    await looking.close()


async def until(connection: Any, query: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await connection.fetch(query):
            pass


async def connected(url: str) -> Any:
    return await import_module("asyncpg").connect(url)


def asked(url: str, query: str) -> list[Any]:
    async def run() -> list[Any]:
        connection = await connected(url)
        try:
            return [row[0] for row in await connection.fetch(query)]
        finally:
            await connection.close()

    return asyncio.run(run())


def holds_since(url: str, before: int) -> bool:
    found = asked(url, HOLDERS)
    return len(found) == 1 and found != [before]


def test_a_server_ends_its_own_lost_session_that_postgresql_still_keeps(
    postgres: Callable[[], str],
) -> None:
    """As after a broken network: PostgreSQL notices only when its keep-alive gives up, 30 s later."""
    url = postgres()
    driver = import_module("gpool.server.store.drivers.postgres")

    async def lose_and_reclaim() -> None:
        lost = await driver.locked_session(url)
        try:
            with pytest.raises(Conflict):  # control: the session alone keeps the lock
                await driver.locked_session(url)
            again = await driver.locked_session(url, lost.get_server_pid())
            await again.close()
        finally:
            lost.terminate()

    asyncio.run(lose_and_reclaim())

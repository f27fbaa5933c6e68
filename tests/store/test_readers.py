"""The number of connections for reads is a setting, on both databases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from threading import enumerate as threads
from typing import NamedTuple

import pytest

from gpool.server.settings import Settings
from gpool.server.store.drivers.opening import default_readers, open_store
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.rows import select


class _Session(NamedTuple):
    pid: int
    slept: str


@operation
def session() -> Operation[int]:
    """Process id of the session, whose connection is in use for a moment."""
    rows = yield from select(_Session, "SELECT pg_backend_pid(), CAST(pg_sleep(0.3) AS text)", {})
    return rows[0].pid


@pytest.mark.parametrize("readers", [1, 6])
def test_as_many_reads_run_at_once_as_postgresql_has_readers(
    postgres: Callable[[], str], readers: int
) -> None:
    url = postgres()

    async def sessions() -> set[int]:
        store = await open_store(url, readers=readers)
        try:
            return set(await asyncio.gather(*(store.read(session()) for _ in range(8))))
        finally:
            await store.close()

    assert len(asyncio.run(sessions())) == readers


def test_sqlite_has_as_many_reader_threads(tmp_path: Path) -> None:
    async def counted() -> int:
        store = await open_store(f"sqlite:///{tmp_path}/gpool.db", readers=5)
        found = sum(thread.name.startswith("store-reader") for thread in threads())
        await store.close()
        return found

    before = sum(thread.name.startswith("store-reader") for thread in threads())
    assert asyncio.run(counted()) - before == 5


def test_the_setting_has_a_default_for_each_database(tmp_path: Path) -> None:
    assert Settings(data=tmp_path).store_readers == default_readers("sqlite:///x") == 2
    shared = Settings(data=tmp_path, database_url="postgresql://h/d")
    assert shared.store_readers == default_readers("postgresql://h/d") == 4
    assert Settings(data=tmp_path, database_readers=9).store_readers == 9

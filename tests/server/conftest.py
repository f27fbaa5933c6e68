"""Desks to work at: with the loops standing still, or running."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpool.server.app import running
from gpool.server.store.drivers.opening import migrate_sqlite
from tests.server.server_desk import Desk, Live, StoppedClock, open_desk, serving
from tests.tools.object_store import ObjectServer, object_server


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database with today's schema, to start each test from."""
    path = tmp_path_factory.mktemp("migrated") / "gpool.db"
    migrate_sqlite(path)
    return path


@pytest.fixture
def data(tmp_path: Path, migrated: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copy(migrated, folder)
    return folder


@pytest.fixture
async def desk(data: Path) -> AsyncIterator[Desk]:
    """Nothing runs by itself: the test calls the loops."""
    desk = await open_desk(data, StoppedClock())
    async with desk.http:
        yield desk
    await desk.server.store.close()


@pytest.fixture
async def busy_desk(data: Path) -> AsyncIterator[Desk]:
    """The loops run."""
    desk = await open_desk(data, StoppedClock())
    desk.plan_submissions()
    async with running(desk.server), desk.http:
        yield desk


@pytest.fixture(scope="session")
def object_store(
    require: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ObjectServer]:
    """A real S3 server with an empty bucket."""
    require("object store")
    with object_server(tmp_path_factory.mktemp("objects")) as server:
        yield server


@pytest.fixture
def bucket(object_store: ObjectServer) -> dict[str, Any]:
    """Settings of a server that keeps its artifacts in a part of the bucket that no other test uses."""
    return object_store.settings(secrets.token_hex(8))


@pytest.fixture
async def bucket_desk(data: Path, bucket: dict[str, Any]) -> AsyncIterator[Desk]:
    desk = await open_desk(data, StoppedClock(), **bucket)
    async with desk.http, desk.bare:
        yield desk
    await desk.server.blobs.close()
    await desk.server.store.close()


@pytest.fixture
def live(data: Path) -> Iterator[Live]:
    """A real server behind a real socket on loopback, in a thread of its own."""
    with serving(data) as live:
        yield live

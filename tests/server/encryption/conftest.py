"""A desk that encrypts, on each database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gpool.server.app import close_server
from tests.server.server_desk import Desk, StoppedClock, open_desk
from tests.store.conftest import postgres, postgres_server

__all__ = ["postgres", "postgres_server"]


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings that name the store."""
    if request.param == "sqlite":
        return {}
    fresh: Callable[[], str] = request.getfixturevalue("postgres")
    return {"database_url": fresh()}


@pytest.fixture
async def sealed_desk(data: Path, database: dict[str, Any]) -> AsyncIterator[Desk]:
    desk = await open_desk(data, StoppedClock(), encrypt_data=True, **database)
    async with desk.http, desk.bare:
        yield desk
    await close_server(desk.server)

"""Desks to work at: with the loops standing still, or running."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from server_desk import Desk, StoppedClock, open_desk

from gpool.server.app import running


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    """Nothing runs by itself: the test calls the loops."""
    desk = await open_desk(tmp_path / "data", StoppedClock())
    async with desk.http:
        yield desk
    await desk.server.store.close()


@pytest.fixture
async def busy_desk(tmp_path: Path) -> AsyncIterator[Desk]:
    """The loops run."""
    desk = await open_desk(tmp_path / "data", StoppedClock())
    async with running(desk.server), desk.http:
        yield desk

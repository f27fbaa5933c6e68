"""`/readyz` asks the database, in bounded time."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gpool.server.api.readiness import Readiness
from gpool.server.store.protocol import Operation, Statement, operation
from tests.server.server_desk import Desk
from tests.tools.processes import PATIENCE_S

pytestmark = pytest.mark.anyio


@operation
def blocking(begun: threading.Event, until: threading.Event) -> Operation[None]:
    begun.set()
    until.wait(PATIENCE_S)
    yield Statement("SELECT 1")


async def test_a_database_that_hangs_makes_the_server_not_ready_in_bounded_time(desk: Desk) -> None:
    assert (await desk.bare.get("/readyz")).status_code == 200  # control
    begun, until = threading.Event(), threading.Event()
    hanging = asyncio.create_task(desk.server.store.write(blocking(begun, until)))
    try:
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        desk.app.state.readiness = readiness = Readiness(desk.server.store, within_s=0.05)
        for _ in range(2):
            answer = await desk.bare.get("/readyz")
            assert answer.status_code == 503
            assert answer.json()["status"] == "unavailable"
            assert "did not answer within 0.05 s" in answer.json()["detail"]
        assert (await desk.bare.get("/healthz")).status_code == 200
    finally:
        until.set()
        await hanging
    assert await readiness.problem() == ""


async def test_a_database_that_is_gone_makes_the_server_not_ready(desk: Desk) -> None:
    await desk.server.store.close()
    answer = await desk.bare.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")

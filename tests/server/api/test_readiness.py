"""`/readyz` asks the database, in bounded time."""

from __future__ import annotations

import asyncio
import threading

import pytest
from starlette.types import Message

from gpool.server.api.readiness import Readiness
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.wire.frames import CHANNEL_PATH, NODE_HEADER
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


async def test_a_channel_is_refused_for_now_while_the_database_hangs(desk: Desk) -> None:
    """A load balancer then tries another replica; a channel that is accepted would wait for the database."""
    node = (await desk.node()).badge.identity.node
    assert (await opened(desk, node))["type"] == "websocket.accept"  # control
    begun, until = threading.Event(), threading.Event()
    hanging = asyncio.create_task(desk.server.store.write(blocking(begun, until)))
    try:
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        desk.app.state.readiness = Readiness(desk.server.store, within_s=0.05)
        refused = await opened(desk, node)
        assert (refused["type"], refused["status"]) == ("websocket.http.response.start", 503)
        assert (b"retry-after", b"1") in refused["headers"]
    finally:
        until.set()
        await hanging


async def opened(desk: Desk, node: str) -> Message:
    """First message of the server to a node that opens its channel and closes it at once."""
    arriving = iter([{"type": "websocket.connect"}, {"type": "websocket.disconnect", "code": 1006}])
    sent: list[Message] = []

    async def receive() -> Message:
        return next(arriving)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "websocket",
        "path": CHANNEL_PATH,
        "raw_path": CHANNEL_PATH.encode(),
        "query_string": b"",
        "headers": [(NODE_HEADER.lower().encode(), node.encode())],
        "client": ("127.0.0.1", 1),
        "extensions": {"websocket.http.response": {}},
    }
    await desk.app(scope, receive, send)
    return sent[0]


async def test_a_database_that_is_gone_makes_the_server_not_ready(desk: Desk) -> None:
    await desk.server.store.close()
    answer = await desk.bare.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")

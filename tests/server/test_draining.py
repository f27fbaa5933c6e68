"""SIGTERM: the server answers 503 at /readyz, sends its nodes elsewhere, serves requests for a while, then ends."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx2
import pytest

from gpool.server.app import drain
from gpool.wire.frames import Refused
from tests.server.server_desk import Desk
from tests.tools.processes import PATIENCE_S, Pool, eventually

DRAIN_S = 3


@pytest.mark.anyio
async def test_a_draining_server_refuses_nodes_for_now_and_still_serves_requests(
    desk: Desk,
) -> None:
    agent = await desk.agent()
    assert (await desk.get("/readyz")).status_code == 200
    await drain(desk.app, desk.server)
    [refused] = agent.frames(Refused)
    assert refused.retry
    ready = await desk.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (503, "stopping")
    assert (await desk.get("/v1/nodes")).status_code == 200
    await desk.command()


def test_sigterm_drains_for_the_time_that_is_set_and_then_ends(tmp_path: Path) -> None:
    pool = Pool(tmp_path, {"GPOOL_SERVER_DRAIN_S": str(DRAIN_S)})
    try:
        pool.start_server()
        pool.server.signal(signal.SIGTERM)
        eventually("it drains", lambda: readiness(pool) == 503, PATIENCE_S)
        assert pool.ask("GET", "/v1/nodes").status_code == 200
        eventually("it ends", lambda: not pool.server.is_running, PATIENCE_S)
        assert pool.server.exit_code == 128 + signal.SIGTERM
    finally:
        pool.stop()


def readiness(pool: Pool) -> int:
    try:
        return httpx2.get(f"{pool.address}/readyz", trust_env=False).status_code
    except httpx2.TransportError:
        return 0

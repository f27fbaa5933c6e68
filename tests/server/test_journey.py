"""One task from submission to result, over the real routes and the real channel."""

from __future__ import annotations

import asyncio
import json

import pytest
from server_desk import Desk, exited, returned

from gpool.core.errors import BY_CODE
from gpool.core.ids import decode
from gpool.core.model import EndReason
from gpool.server.loops import Expire
from gpool.wire.frames import (
    BeatSeen,
    Grants,
    HandedBack,
    Hold,
    LogChunk,
    Recorded,
    Refused,
    Released,
    Started,
    Stop,
    Welcome,
)

pytestmark = pytest.mark.anyio


async def test_a_command_runs_from_submission_to_result(desk: Desk) -> None:
    agent = await desk.agent()
    task = await desk.command(name="hello")
    assert await desk.schedule() == 1
    [lease] = agent.leases()
    assert lease.task == decode("task", task)
    await agent.report(
        Started(lease.task, lease.epoch), LogChunk(lease.task, lease.epoch, 0, 1, b"42\n")
    )
    running = (await desk.get(f"/v1/tasks/{task}")).json()
    assert (running["status"], running["status_text"]) == ("running", "processing")
    recorded = await agent.report(exited(lease, 7))
    assert recorded == Recorded(2)
    ended = (await desk.get(f"/v1/tasks/{task}")).json()
    assert (ended["status"], ended["exit_code"], ended["node_name"]) == ("failed", 7, "bench")
    result = (await desk.get(f"/v1/tasks/{task}/result")).json()
    assert (result["reason"], result["exit_code"]) == ("exited", 7)
    logs = (await desk.get(f"/v1/tasks/{task}/logs")).json()
    assert [item["text"] for item in logs["items"]] == ["42\n"]
    assert logs["ended"] is True
    events = [event["event"] for event in (await desk.get(f"/v1/tasks/{task}/events")).json()]
    assert events == ["queued", "leased", "started", "failed"]

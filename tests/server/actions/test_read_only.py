"""Read-only mode: reads work, changes get 503, nodes keep their leases and send their reports when it has ended."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpool.core.errors import ReadOnly
from gpool.core.permissions import RULES, Action
from gpool.server.actions import policy
from gpool.server.api.routing import endpoints
from gpool.server.read_only import STILL_WRITTEN
from gpool.server.scheduling.loops import LoopRunner, all_loops
from gpool.wire.frames import BeatSeen, Hold, Recorded, Refused, Started
from tests.server.server_desk import Agent, Desk, exited

pytestmark = pytest.mark.anyio
REASON = "the database moves"


async def switch(desk: Desk, reason: str) -> None:
    answer = await desk.http.put("/v1/admin/read-only", json={"reason": reason})
    assert (answer.status_code, answer.json()) == (200, {"reason": reason})


def is_refused(answer: Any) -> bool:
    return answer.status_code == 503 and answer.json().get("code") == "read_only"


def changes(actions: tuple[Action, ...]) -> bool:
    found = [each for each in actions if RULES[each].changes]
    return bool(found) and not any(each in STILL_WRITTEN | {Action.NODE_PROVE} for each in found)


async def answers(desk: Desk) -> dict[tuple[str, str], Any]:
    """Every route, asked by the operator with an empty body."""
    found = {}
    for each in endpoints():
        if each.method == "WEBSOCKET" or each.path == "/v1/admin/read-only":
            continue
        path = re.sub(r"\{[^}]*\}", "x", each.path)
        if each.path.endswith("/events") or "stream" in each.name:
            continue
        body = {} if each.method in ("GET", "HEAD") else {"json": {}}
        found[each.method, each.path] = await desk.http.request(each.method, path, **body)
    return found


async def test_every_changing_route_is_refused_and_every_other_one_is_not(desk: Desk) -> None:
    before = await answers(desk)
    assert not any(is_refused(each) for each in before.values())  # control
    await switch(desk, REASON)
    after = await answers(desk)
    declared = {(each.method, each.path): each.actions for each in endpoints()}
    for route, answer in after.items():
        assert is_refused(answer) == changes(declared[route]), route
    refused = after["POST", "/v1/tasks"]
    assert REASON in refused.json()["detail"]
    assert int(refused.headers["retry-after"]) > 0
    assert sum(is_refused(each) for each in after.values()) > 30


async def test_nothing_of_a_task_changes_while_its_node_keeps_it_and_reports_again_later(
    desk: Desk,
) -> None:
    task = await desk.command()
    agent = await desk.agent()
    await desk.schedule()
    [lease] = agent.leases()
    hold = Hold(lease.task, lease.epoch)
    await switch(desk, REASON)
    shown = (await desk.get(f"/v1/tasks/{task}")).json()
    heard = len(agent.sent)
    await agent.report(Started(*_of(hold)), exited(lease))
    assert len(agent.sent) == heard  # no acknowledgement: the agent keeps them
    seen = await agent.send_beat(hold)
    assert isinstance(seen, BeatSeen)
    assert seen.drop == ()
    assert (await desk.get(f"/v1/tasks/{task}")).json() == shown
    await switch(desk, "")
    told = agent.sent[-1]
    assert isinstance(told, Refused)
    assert told.retry
    back = agent.again()
    await back.connect(hold)
    recorded = await back.report(Started(*_of(hold)), exited(lease))
    assert isinstance(recorded, Recorded)
    assert recorded.refused == ()
    done = (await desk.get(f"/v1/tasks/{task}")).json()
    assert (done["status"], done["epoch"]) == ("succeeded", lease.epoch)


def _of(hold: Hold) -> tuple[int, int]:
    return hold.task, hold.epoch


async def test_a_report_after_an_unrecorded_one_waits_for_the_next_connection(desk: Desk) -> None:
    """Else the end of a task could be recorded without its output."""
    await desk.command()
    agent = await desk.agent()
    await desk.schedule()
    [lease] = agent.leases()
    await switch(desk, REASON)
    await agent.report(Started(lease.task, lease.epoch))
    desk.server.read_only.set("")  # ended, and the connection is not yet told
    heard = len(agent.sent)
    await agent.report(exited(lease))
    assert len(agent.sent) == heard


async def test_an_agent_that_restarts_meanwhile_loses_its_lease_only_after_the_mode(
    desk: Desk,
) -> None:
    task = await desk.command()
    agent = await desk.agent()
    await desk.schedule()
    [lease] = agent.leases()
    await agent.report(Started(lease.task, lease.epoch))
    await switch(desk, REASON)
    await agent.again().connect()  # it has nothing of the lease
    assert (await desk.get(f"/v1/tasks/{task}")).json()["status"] == "running"
    await switch(desk, "")
    back: Agent = agent.again()
    back.beat += 5
    await back.connect()
    assert (await desk.get(f"/v1/tasks/{task}")).json()["status"] == "queued"


async def test_the_mode_is_stored_audited_and_read_again_at_a_start(desk: Desk) -> None:
    await switch(desk, REASON)
    assert (await desk.get("/v1/admin/read-only")).json() == {"reason": REASON}
    newest = (await desk.get("/v1/audit?limit=1")).json()["items"][0]
    assert (newest["action"], newest["thing"], newest["facts"]) == (
        "server.read_only",
        "on",
        {"reason": REASON},
    )
    assert (await desk.get("/readyz")).status_code == 200
    desk.server.read_only.set("")
    await policy.refresh(desk.server)  # as a starting server and other replicas do
    assert desk.server.read_only.reason == REASON


async def test_loops_that_change_the_pool_stand_still(desk: Desk) -> None:
    loops = all_loops(desk.server)
    runner = LoopRunner(desk.server, *loops)
    assert all(runner.is_due(loop) for loop in loops)  # control
    await switch(desk, REASON)
    assert not any(runner.is_due(loop) for loop in loops)


async def test_the_check_names_the_reason(desk: Desk) -> None:
    desk.server.read_only.set(REASON)
    with pytest.raises(ReadOnly, match=REASON):
        desk.server.read_only.check([Action.TASK_SUBMIT], by_node=False)
    desk.server.read_only.check([Action.TASK_READ], by_node=False)
    uploads = [Action.ARTIFACT_UPLOAD, Action.ARTIFACT_UPLOAD_OUTPUT]
    desk.server.read_only.check(uploads, by_node=True)
    with pytest.raises(ReadOnly):
        desk.server.read_only.check(uploads, by_node=False)

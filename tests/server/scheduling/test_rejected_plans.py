"""A task whose plan the store keeps refusing waits longer every time, says so, and holds up nobody."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gpool.core.ids import NodeId, TaskId, UserId, decode
from gpool.core.model import SECOND, Allocation, Availability, Instant, TaskKind, TaskSpec
from gpool.core.scheduler.state.events import LeaseGrant, Placement
from gpool.core.scheduler.state.state import State
from gpool.core.scheduler.state.waiting import shape_of
from gpool.server.actions.quotas import set_quota
from gpool.server.scheduling.backoff import LONGEST_PAUSE, RejectedPlans, pause_after
from gpool.server.store.identity_values import GivenQuota
from gpool.server.store.operations import nodes
from gpool.server.store.operations.identity import users
from tests.server.server_desk import Desk

pytestmark = pytest.mark.anyio


def refuse(data: Path, task: str) -> None:
    """From now on the store leases everything but this task."""
    number = decode("task", task)
    with closing(sqlite3.connect(data / "gpool.db")) as store, store:
        store.execute(
            "CREATE TRIGGER refuses BEFORE UPDATE OF status ON tasks "
            f"WHEN NEW.id = {number} AND NEW.status = 'leased' BEGIN SELECT RAISE(IGNORE); END"
        )


def allow(data: Path) -> None:
    with closing(sqlite3.connect(data / "gpool.db")) as store, store:
        store.execute("DROP TRIGGER refuses")


async def passes(desk: Desk, count: int) -> int:
    """How many of so many passes planned something."""
    planned = 0
    for _ in range(count):
        before = desk.server.picture.rejected.total
        await desk.schedule()
        planned += desk.server.picture.rejected.total != before
    return planned


async def status(desk: Desk, task: str) -> str:
    found: str = (await desk.get(f"/v1/tasks/{task}")).json()["status"]
    return found


async def test_one_that_is_always_refused_is_planned_ever_more_rarely(
    desk: Desk, data: Path
) -> None:
    agent = await desk.agent()
    task = await desk.command()
    refuse(data, task)
    assert await passes(desk, 50) == 3, "thrice, the third time on a new picture"
    for pause in (1, 2, 4, 8):
        desk.clock.advance(pause - 0.001)
        assert await passes(desk, 5) == 0
        desk.clock.advance(0.001)
        assert await passes(desk, 5) == 1
    allow(data)
    desk.clock.advance(16)
    await agent.send_beat()
    await desk.schedule()
    assert await status(desk, task) == "leased"


async def test_it_says_so(desk: Desk, data: Path) -> None:
    await desk.agent()
    task = await desk.command()
    refuse(data, task)
    await passes(desk, 5)
    told = (await desk.get(f"/v1/tasks/{task}/explain")).json()
    assert told["code"] == "refused"
    assert "3 times in a row" in told["sentence"]
    assert told["sentence"].endswith("It is planned again in 1 s.")


async def test_the_others_start_meanwhile(desk: Desk, data: Path) -> None:
    await desk.agent()
    stuck = await desk.command()
    refuse(data, stuck)
    others = [await desk.command() for _ in range(2)]
    await passes(desk, 4)
    assert [await status(desk, task) for task in others] == ["leased"] * 2
    assert await status(desk, stuck) == "queued"


async def test_it_is_not_forgotten_by_a_new_picture_and_waits_on(desk: Desk, data: Path) -> None:
    await desk.agent()
    task = await desk.command()
    refuse(data, task)
    await passes(desk, 5)
    desk.server.picture.invalidate()
    assert await passes(desk, 5) == 0
    allow(data)
    desk.clock.advance(1)
    await desk.schedule()
    assert await status(desk, task) == "leased"


async def test_it_can_be_cancelled(desk: Desk, data: Path) -> None:
    await desk.agent()
    task = await desk.command()
    refuse(data, task)
    await passes(desk, 5)
    assert (await desk.http.delete(f"/v1/tasks/{task}")).json()["status"] == "cancelled"
    desk.clock.advance(100)
    assert await passes(desk, 3) == 0
    assert desk.server.picture.state.queue_of(TaskId(decode("task", task))) is None
    assert desk.server.picture.state.queued_count == 0


async def test_what_another_replica_did_is_seen_after_two_refusals(desk: Desk) -> None:
    """Behind this server's back the node was paused: a new picture says so, and nothing is held against the task."""
    agent = await desk.agent()
    task = await desk.command()
    node = agent.credentials.node
    await desk.server.store.write(
        nodes.set_availability(node, None, Availability.PAUSED, desk.server.now)
    )
    assert await passes(desk, 10) == 2
    told = (await desk.get(f"/v1/tasks/{task}/explain")).json()
    assert told["code"] != "refused"
    row = await desk.server.store.write(
        nodes.set_availability(node, None, Availability.AVAILABLE, desk.server.now)
    )
    assert row is not None
    desk.server.picture.node_changed(row.node)
    await desk.schedule()
    assert await status(desk, task) == "leased"


async def test_while_it_is_kept_out_it_counts_as_waiting(desk: Desk, data: Path) -> None:
    await desk.agent()
    operator = await desk.server.store.read(users.user_by_name("operator"))
    assert operator is not None
    quota = GivenQuota(queued_tasks=2)
    await set_quota(desk.server, operator, ("user", operator.id), quota)
    refuse(data, await desk.command())
    await passes(desk, 5)
    more = [await desk.post("/v1/tasks", {"command": ["true"]}) for _ in range(2)]
    assert [answer.status_code for answer in more] == [202, 429]


def test_pauses_grow_to_a_minute() -> None:
    pauses = [pause_after(refusals) for refusals in range(40)]
    assert pauses[:3] == [0, 0, 0]
    assert [pause // SECOND for pause in pauses[3:10]] == [1, 2, 4, 8, 16, 32, 60]
    assert set(pauses[10:]) == {LONGEST_PAUSE}


def test_one_that_was_cancelled_while_it_was_planned_is_not_remembered() -> None:
    """It was withdrawn before it was refused: nothing would ever come to forget it."""
    refused, task = RejectedPlans(), TaskId(7)
    shape = shape_of(TaskSpec(TaskKind.COMMAND, "t", command=("true",)), UserId(1), None)
    plan = [Placement(NodeId(1), Allocation(1, 0, 0), shape, (LeaseGrant(task, 1),))]
    refused.pause(State(), refused.count(plan, ()), Instant(0))
    refused.count(plan, ())
    assert not refused.needs_rebuild([task]), "it is the first refusal that is known"

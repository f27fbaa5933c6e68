"""Starts in the commit of their submission: while nothing waits, no pass is needed."""

from __future__ import annotations

import asyncio

import pytest

from gpool.core.ids import decode
from gpool.core.model import Availability
from gpool.server.store.operations import nodes
from tests.server.server_desk import Desk, exited

pytestmark = pytest.mark.anyio


async def status(desk: Desk, task: str) -> str:
    document = (await desk.get(f"/v1/tasks/{task}")).json()
    found: str = document["status"]
    return found


async def idle(desk: Desk) -> None:
    """Let the picture know the nodes, then leave the planner to submissions."""
    await desk.schedule()
    desk.plan_submissions()


async def rebuilt_equals(desk: Desk) -> bool:
    """Whether the picture is what the store's rows give."""
    picture = desk.server.picture
    before = picture.state
    picture.invalidate()
    await picture.rebuild(desk.server.now)
    return picture.state == before


async def test_a_task_submitted_to_an_idle_pool_is_leased_without_a_pass(desk: Desk) -> None:
    agent = await desk.agent()
    await idle(desk)
    task = await desk.command()
    assert await status(desk, task) == "leased"
    assert [lease.task for lease in agent.leases()] == [decode("task", task)]
    assert await rebuilt_equals(desk)


async def test_while_a_task_waits_later_ones_wait_for_a_pass(desk: Desk) -> None:
    waiting = await desk.command()
    agent = await desk.agent()
    desk.plan_submissions()
    later = await desk.command()
    assert (await status(desk, waiting), await status(desk, later)) == ("queued", "queued")
    assert agent.leases() == []
    assert await desk.schedule() == 2


async def test_while_a_pass_is_under_way_a_submission_is_not_planned(desk: Desk) -> None:
    await desk.agent()
    await idle(desk)
    async with desk.server.scheduler.planning:
        task = await desk.command()
        assert await status(desk, task) == "queued"
    assert await desk.schedule() == 1
    assert await rebuilt_equals(desk)


async def test_submissions_at_once_never_exceed_the_capacity(desk: Desk) -> None:
    agent = await desk.agent()
    await idle(desk)
    tasks = await asyncio.gather(*(desk.command(cpus=1) for _ in range(40)))
    await desk.schedule()
    found = [await status(desk, task) for task in tasks]
    held = {lease.task for lease in agent.leases()}
    assert held == {
        decode("task", task) for task, each in zip(tasks, found, strict=True) if each == "leased"
    }
    assert await rebuilt_equals(desk)
    for lease in agent.leases():
        await agent.report(exited(lease))
    assert await rebuilt_equals(desk)


async def test_a_repeated_request_starts_nothing_again(desk: Desk) -> None:
    agent = await desk.agent()
    await idle(desk)
    headers = {"idempotency-key": "the same"}
    answers = [
        await desk.post("/v1/tasks", {"command": ["true"]}, headers=headers) for _ in range(2)
    ]
    assert answers[0].json() == answers[1].json()
    assert len(agent.leases()) == 1
    assert await rebuilt_equals(desk)


async def test_a_refused_submission_leaves_nothing_in_the_picture(desk: Desk) -> None:
    await desk.agent()
    await idle(desk)
    call = {"payload_sha256": "0" * 64}
    document = {"function": {"sha256": "0" * 64, "python": "3.11"}, "calls": [call]}
    assert (await desk.post("/v1/tasks", document)).status_code == 422
    assert desk.server.picture.waiting == 0
    assert await rebuilt_equals(desk)


async def test_a_node_that_drains_before_the_commit_gets_nothing(desk: Desk) -> None:
    agent = await desk.agent()
    await idle(desk)
    draining = nodes.set_availability(
        agent.credentials.node, None, Availability.DRAINING, desk.server.now
    )
    await desk.server.write(draining)  # the picture does not know it yet
    task = await desk.command()
    assert await status(desk, task) == "queued"
    assert agent.leases() == []

"""Agents that stop: no new lease, and what they leave behind is queued again after the margin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpool.server.scheduling.loops import ExpireNodes
from gpool.wire.frames import HandedBack, Hold, OfferChanged
from tests.server.server_desk import Agent, Desk

pytestmark = pytest.mark.anyio
MARGIN_S = 5.0


async def leased(desk: Desk) -> tuple[Agent, str]:
    agent = await desk.agent()
    task = await desk.command()
    assert await desk.schedule() == 1
    return agent, task


async def withdraw(agent: Agent, *, leaving: bool) -> None:
    closed = replace(agent.offer, closed="its agent was stopped")
    await agent.channel.receive(OfferChanged(closed, leaving=leaving))


async def expire(desk: Desk, seconds: float) -> None:
    desk.clock.advance(seconds)
    await ExpireNodes(desk.server).run_once(desk.server.now)


async def status_of(desk: Desk, task: str) -> str:
    return str((await desk.get(f"/v1/tasks/{task}")).json()["status"])


async def test_a_node_whose_agent_stops_gets_no_lease_for_the_slots_it_returns(desk: Desk) -> None:
    agent, task = await leased(desk)
    [lease] = agent.leases()
    await withdraw(agent, leaving=True)
    await agent.report(HandedBack(lease.task, lease.epoch))
    assert await status_of(desk, task) == "queued"
    assert await desk.schedule() == 0
    assert agent.leases() == [lease]


@pytest.mark.parametrize(
    ("leaving", "is_orderly"), [(True, True), (True, False), (False, True), (False, False)]
)
async def test_no_task_stays_on_a_departed_node_longer_than_the_margin(
    desk: Desk, leaving: bool, is_orderly: bool
) -> None:
    """Control: an agent that lost its connection or was killed keeps its leases for the lease time."""
    agent, task = await leased(desk)
    await withdraw(agent, leaving=leaving)
    await agent.channel.close(is_orderly=is_orderly)
    await expire(desk, MARGIN_S)
    assert await status_of(desk, task) == "leased", "the margin protects a sandbox that still ends"
    await expire(desk, 0.001)
    assert await status_of(desk, task) == ("queued" if leaving and is_orderly else "leased")


async def test_an_agent_that_starts_again_within_the_margin_keeps_its_leases(desk: Desk) -> None:
    agent, task = await leased(desk)
    [lease] = agent.leases()
    await withdraw(agent, leaving=True)
    await agent.channel.close(is_orderly=True)
    again = agent.again()
    await again.connect(Hold(lease.task, lease.epoch))
    await expire(desk, 3 * MARGIN_S)
    assert await status_of(desk, task) == "leased"

"""Nodes that give back what they are given are left alone for a while, so that it is carried out elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpool.core.model import SECOND, EndReason, OnLoss
from gpool.core.reliability import FREE, LONGEST_BACKOFF, backoff_after
from gpool.wire.frames import Finished, HandedBack, Lease, Released, ReportItem, Started
from tests.server.scheduling.gang_site import gang_spec, open_site
from tests.server.server_desk import Agent, Desk, an_offer, returned

pytestmark = pytest.mark.anyio

WAYS: dict[str, Callable[[Lease], tuple[ReportItem, ...]]] = {
    "handed back": lambda lease: (HandedBack(lease.task, lease.epoch),),
    "released": lambda lease: (Started(lease.task, lease.epoch), Released(lease.task, lease.epoch)),
    "made room": lambda lease: (Finished(lease.task, lease.epoch, EndReason.PREEMPTED),),
    "lost": lambda lease: (Finished(lease.task, lease.epoch, EndReason.LOST),),
    "lost while it ran": lambda lease: (
        Started(lease.task, lease.epoch),
        Finished(lease.task, lease.epoch, EndReason.LOST),
    ),
}


async def give_back(desk: Desk, agent: Agent, way: str = "handed back") -> bool:
    """Once, if it was given anything."""
    before = len(agent.leases())
    if not await desk.schedule() or len(agent.leases()) == before:
        return False
    await agent.report(*WAYS[way](agent.leases()[-1]))
    return True


@pytest.mark.parametrize("way", WAYS)
async def test_a_node_that_gives_everything_back_does_not_keep_a_task_from_another(
    desk: Desk, way: str
) -> None:
    liar = await desk.agent("liar", an_offer(1))  # where it fits best
    honest = await desk.agent("honest", an_offer(8))
    await desk.command()
    given = 0
    while await give_back(desk, liar, way):
        given += 1
        assert given <= FREE + 1
    assert given == FREE + 1
    assert len(honest.leases()) == 1


async def test_alone_it_is_asked_again_later_and_ever_more_seldom(desk: Desk) -> None:
    liar = await desk.agent("liar", an_offer(1))
    name = await desk.command()
    for _ in range(FREE + 1):
        assert await give_back(desk, liar)
    told = (await desk.get(f"/v1/tasks/{name}/explain")).json()
    assert told["code"] == "resting"
    assert "again and again" in told["sentence"]
    for rest_s in (1, 2, 4, 8):
        desk.clock.advance(rest_s - 0.1)
        assert not await give_back(desk, liar)
        desk.clock.advance(0.1)
        assert await give_back(desk, liar)


async def test_a_node_that_carries_as_much_to_its_end_never_rests(desk: Desk) -> None:
    agent = await desk.agent("busy", an_offer(1))
    for _ in range(3 * FREE):
        await desk.command()
        assert await give_back(desk, agent)
        assert await desk.schedule() == 1
        lease = agent.leases()[-1]
        await agent.report(Finished(lease.task, lease.epoch, EndReason.EXITED, 0))
    assert not desk.server.nodes.backoff.is_any


async def test_whoever_was_asked_to_make_room_does_not_rest_for_it(desk: Desk) -> None:
    agent = await desk.agent("asked", an_offer(1))
    name = await desk.command(preemptible=True)
    for _ in range(2 * FREE):
        assert await desk.schedule() == 1
        lease = agent.leases()[-1]
        await agent.report(Started(lease.task, lease.epoch))
        assert (await desk.post(f"/v1/tasks/{name}/preempt")).status_code < 300
        line = desk.server.picture.state.held[lease.task]  # type: ignore[index]
        assert line.stopping
        await agent.report(Finished(lease.task, lease.epoch, EndReason.PREEMPTED))
    assert not desk.server.nodes.backoff.is_any


async def test_what_waited_behind_a_long_one_is_given_back_rightly(desk: Desk) -> None:
    agent = await desk.agent("long", an_offer(1))
    for number in range(3):  # such calls were short so far, so several stand in line
        await desk.calls(1)
        assert await desk.schedule() == 1
        lease = agent.leases()[number]
        desk.clock.advance(0.01)
        await agent.report(returned(lease))
    await desk.calls(4 * FREE)
    before = len(agent.leases())
    assert await desk.schedule() > 1
    tail = agent.leases()[before + 1 :]
    for _ in range(2 * FREE):
        assert tail
        before = len(agent.leases())
        await agent.report(*(HandedBack(lease.task, lease.epoch) for lease in tail))
        await desk.schedule()
        tail = agent.leases()[before:]
    assert not desk.server.nodes.backoff.is_any


async def test_of_a_gang_only_the_member_that_gave_it_back_rests(desk: Desk) -> None:
    site = await open_site(desk, "a", "b")
    task = await site.submit(gang_spec(2, on_loss=OnLoss.REFORM))
    for epoch in range(1, FREE + 2):
        assert await desk.schedule() == 1
        liar, other = site.agents["a"], site.agents["b"]
        await liar.report(HandedBack(task, epoch))
        await other.report(Released(task, epoch))
    rests = desk.server.nodes.backoff
    assert liar.credentials.node in rests
    assert other.credentials.node not in rests
    assert await desk.schedule() == 0
    await site.is_sound()


async def test_a_new_picture_does_not_end_a_rest(desk: Desk) -> None:
    liar = await desk.agent("liar", an_offer(1))
    await desk.command()
    while await give_back(desk, liar):
        pass
    desk.server.picture.invalidate()
    assert await desk.schedule() == 0
    desk.clock.advance(1)
    assert await desk.schedule() == 1


def test_rests_grow_up_to_the_longest() -> None:
    rests = [backoff_after(times) for times in range(FREE + 40)]
    assert rests[: FREE + 1] == [0] * (FREE + 1)
    assert rests[FREE + 1] == SECOND
    assert rests == sorted(rests)
    assert rests[-1] == LONGEST_BACKOFF

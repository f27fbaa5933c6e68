"""A node that does not let go of a gang keeps the others' slices for a while only."""

from __future__ import annotations

import pytest

from gpool.core.ids import TaskId, encode
from gpool.core.model import SECOND, EndReason
from gpool.server.scheduling.loops import OVERDUE_AFTER, BlockOverdueNodes, ExpireNodes
from gpool.wire.frames import Finished, Hold, Refused, Released, Welcome
from tests.server.scheduling.gang_site import TTL_S, Site, ended, gang_spec, open_site
from tests.server.server_desk import Agent, Desk

pytestmark = pytest.mark.anyio


@pytest.fixture
async def site(desk: Desk) -> Site:
    return await open_site(desk, "a", "b")


async def pass_time(site: Site, seconds: float, **holding: Hold) -> None:
    """All that are connected beat on."""
    for _ in range(int(seconds // 20)):
        site.desk.clock.advance(20)
        for name, agent in site.agents.items():
            if not agent.channel.closed:
                await agent.send_beat(*([holding[name]] if name in holding else []))
        await ExpireNodes(site.desk.server).run_once(site.desk.server.now)
    await BlockOverdueNodes(site.desk.server).run_once(site.desk.server.now)


async def is_given_up(site: Site, stuck: Agent, task: TaskId, name: str) -> None:
    """From the moment it is not spoken to any more."""
    assert stuck.channel.closed
    assert isinstance(stuck.sent[-1], Refused)
    assert stuck.sent[-1].retry
    again = stuck.again()
    await again.connect(Hold(task, 1))
    assert isinstance(again.sent[-1], Refused), "it would be heard from again"
    picture = site.desk.server.picture
    assert picture.state.held.keys() == {task}
    await pass_time(site, 2 * TTL_S)
    assert not picture.state.held
    site.agents[name] = later = again.again()
    await later.connect(Hold(task, 1))
    [welcome] = later.frames(Welcome)
    assert welcome.drop == (Hold(task, 1),)
    await site.submit()
    assert await site.desk.schedule() >= 1, "all nodes are free"
    await site.is_sound()


async def test_one_that_does_not_let_go_of_a_cancelled_gang_is_given_up(site: Site) -> None:
    task = await site.running()
    first, second = site.members(task)
    name = next(name for name, agent in site.agents.items() if agent is second)
    await site.desk.http.delete(f"/v1/tasks/{encode('task', task)}")
    await first.report(Released(task, 1))
    await pass_time(site, OVERDUE_AFTER / SECOND, **{name: Hold(task, 1)})
    assert not second.channel.closed, "it has time"
    await pass_time(site, 20, **{name: Hold(task, 1)})
    await is_given_up(site, second, task, name)


async def test_one_that_does_not_let_go_of_a_failed_gang_is_given_up(site: Site) -> None:
    task = await site.running()
    first, second = site.members(task)
    name = next(name for name, agent in site.agents.items() if agent is first)
    await second.report(ended(task, 1))
    await pass_time(site, OVERDUE_AFTER / SECOND + 20, **{name: Hold(task, 1)})
    await is_given_up(site, first, task, name)


async def test_a_member_that_works_on_is_left_alone_however_long_the_others_are_done(
    site: Site,
) -> None:
    task = await site.running()
    first, second = site.members(task)
    name = next(name for name, agent in site.agents.items() if agent is first)
    await second.report(ended(task, 0))
    await pass_time(site, 2 * OVERDUE_AFTER / SECOND, **{name: Hold(task, 1)})
    assert not first.channel.closed
    await first.report(ended(task, 0))
    assert (await site.words(task))[0] == "succeeded"


async def test_time_counts_from_what_called_the_gang_off(desk: Desk) -> None:
    site = await open_site(desk, "a", "b", "c")
    task = await site.running(gang_spec(3))
    members = site.members(task)
    await members[2].report(ended(task, 0))
    holding = {name: Hold(task, 1) for name, agent in site.agents.items() if agent is members[0]}
    holding |= {name: Hold(task, 1) for name, agent in site.agents.items() if agent is members[1]}
    await pass_time(site, 2 * OVERDUE_AFTER / SECOND, **holding)
    await members[1].report(ended(task, 1))
    await pass_time(site, 20, **holding)
    assert not members[0].channel.closed


async def test_one_that_saves_a_checkpoint_is_left_alone(site: Site) -> None:
    task = await site.running()
    first, second = site.members(task)
    await second.report(Finished(task, 1, EndReason.PREEMPTED))
    name = next(name for name, agent in site.agents.items() if agent is first)
    await pass_time(site, 2 * OVERDUE_AFTER / SECOND, **{name: Hold(task, 1)})
    assert not first.channel.closed

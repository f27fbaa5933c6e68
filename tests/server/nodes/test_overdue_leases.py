"""A node that keeps a task past its time-out, its preemption or its cancellation: the server ends the lease."""

from __future__ import annotations

import pytest

from gpool.core.ids import TaskId, decode
from gpool.server.actions import quotas
from gpool.server.scheduling.loops import BlockOverdueNodes, ExpireNodes
from gpool.server.scheduling.overdue import EndOverdueLeases
from gpool.server.store.identity_values import GivenQuota
from gpool.server.store.operations.identity import teams
from gpool.server.store.operations.leases import grants
from gpool.wire.frames import BeatSeen, Hold, Recorded, Refused, Started
from tests.server.scheduling.gang_site import gang_spec, open_site
from tests.server.server_desk import Agent, Desk, an_offer, exited

pytestmark = pytest.mark.anyio
TIMEOUT_S = 2
LIMIT_S = TIMEOUT_S + 10 + 1800  # time-out, default grace, default `collect_s`
RELEASE_S = 300


class Watch:
    """Time passes; nodes send heartbeats; the loops run, or the one under test is left out (control)."""

    def __init__(self, desk: Desk, *agents: Agent, defended: bool = True) -> None:
        self._desk = desk
        self._agents = agents
        self._loop = EndOverdueLeases(desk.server) if defended else None

    async def seconds(self, seconds: float) -> None:
        if self._loop is not None:  # ages count from its first run
            await self._loop.run_once(self._desk.server.now)
        while seconds > 0:
            step = min(20, seconds)
            seconds -= step
            self._desk.clock.advance(step)
            server = self._desk.server
            for agent in self._agents:
                if not agent.channel.closed:
                    await agent.send_beat(*(Hold(each.task, each.epoch) for each in agent.leases()))
            await ExpireNodes(server).run_once(server.now)
            if self._loop is not None:
                await self._loop.run_once(server.now)


async def running(desk: Desk, agent: Agent, **members: object) -> str:
    name = await desk.command(**members)
    assert await desk.schedule() == 1
    lease = agent.leases()[-1]
    await agent.report(Started(lease.task, lease.epoch))
    return name


async def shown(desk: Desk, name: str) -> dict[str, object]:
    found: dict[str, object] = (await desk.get(f"/v1/tasks/{name}")).json()
    return found


async def test_a_task_is_timed_out_by_the_server_if_its_node_does_not(desk: Desk) -> None:
    agent = await desk.agent()
    name = await running(desk, agent, timeout_s=TIMEOUT_S)
    watch = Watch(desk, agent)
    await watch.seconds(LIMIT_S)
    assert (await shown(desk, name))["status"] == "running", "the node has time to collect"
    await watch.seconds(20)
    told = await shown(desk, name)
    assert (told["status"], told["reason"]) == ("failed", "timed_out")
    assert "its node did not end it" in str(told["error_text"])
    [lease] = agent.leases()
    seen = await agent.send_beat(Hold(lease.task, lease.epoch))
    assert isinstance(seen, BeatSeen)
    assert seen.drop == (Hold(lease.task, lease.epoch),), "the node is told to drop it"
    assert isinstance(await agent.report(exited(lease)), Recorded)
    assert (await shown(desk, name))["status"] == "failed", "a late report changes nothing"


async def test_without_the_server_s_limit_a_node_keeps_a_task_for_ever(desk: Desk) -> None:
    agent = await desk.agent()
    name = await running(desk, agent, timeout_s=TIMEOUT_S)
    await Watch(desk, agent, defended=False).seconds(2 * LIMIT_S)
    assert (await shown(desk, name))["status"] == "running"


async def test_a_timed_out_task_with_retries_left_is_queued_for_another_node(desk: Desk) -> None:
    agent = await desk.agent()
    name = await running(desk, agent, timeout_s=TIMEOUT_S, retries=1)
    watch = Watch(desk, agent)
    await watch.seconds(LIMIT_S)
    await watch.seconds(1)
    told = await shown(desk, name)
    assert (told["status"], told["tries"]) == ("queued", 1)
    node = desk.server.picture.state.nodes[agent.credentials.node].node
    assert node is not None
    assert node.resting, "the node gets a backoff"
    assert desk.server.nodes.take_losses() == {agent.credentials.node: 1}
    honest = await desk.agent("honest")
    assert await desk.schedule() == 1
    [lease] = honest.leases()
    assert lease.epoch == 2


async def gpu_quota(desk: Desk, gpus: int) -> None:
    me = (await desk.get("/v1/me")).json()["id"]
    given = GivenQuota(running_gpu_milli=gpus * 1000)
    await desk.server.write(teams.set_quota("user", decode("user", me), given))
    await quotas.refresh(desk.server)


@pytest.mark.parametrize("defended", [True, False])
async def test_a_cancelled_task_counts_against_the_gpu_quota_for_a_while_only(
    desk: Desk, defended: bool
) -> None:
    await gpu_quota(desk, 1)
    evil = await desk.agent("evil", an_offer(gpus=1))
    first = await running(desk, evil, gpu=1)
    honest = await desk.agent("honest", an_offer(gpus=1))
    second = await desk.command(gpu=1)
    await desk.http.delete(f"/v1/tasks/{first}")
    watch = Watch(desk, evil, honest, defended=defended)
    await watch.seconds(RELEASE_S)
    assert await desk.schedule() == 0, "the node has time to release it"
    await watch.seconds(20)
    assert await desk.schedule() == int(defended)
    assert (await shown(desk, first))["status"] == "cancelled"
    assert (await shown(desk, second))["status"] == ("leased" if defended else "queued")
    assert len(honest.leases()) == int(defended)


async def test_a_preempted_task_that_is_not_stopped_goes_back_to_the_queue(desk: Desk) -> None:
    agent = await desk.agent()
    name = await running(desk, agent)
    task = TaskId(decode("task", name))
    server = desk.server
    server.picture.absorb(await server.write(grants.preempt([task], server.now)))
    watch = Watch(desk, agent)
    await watch.seconds(LIMIT_S - TIMEOUT_S)
    assert (await shown(desk, name))["status"] == "running"
    await watch.seconds(20)
    told = await shown(desk, name)
    assert told["status"] == "queued"
    assert "did not stop it" in (await desk.get(f"/v1/tasks/{name}/events")).text


async def test_a_lease_that_its_node_never_starts_goes_back_to_the_queue(desk: Desk) -> None:
    agent = await desk.agent()
    name = await desk.command(timeout_s=TIMEOUT_S)
    assert await desk.schedule() == 1
    watch = Watch(desk, agent)
    await watch.seconds(LIMIT_S)
    assert (await shown(desk, name))["status"] == "leased"
    await watch.seconds(RELEASE_S + 1860)
    assert (await shown(desk, name))["status"] == "queued"


async def test_tasks_of_others_on_the_node_are_left_alone(desk: Desk) -> None:
    agent = await desk.agent()
    overdue = await running(desk, agent, timeout_s=TIMEOUT_S)
    other = await running(desk, agent)
    await Watch(desk, agent).seconds(LIMIT_S + 20)
    assert (await shown(desk, overdue))["status"] == "failed"
    assert (await shown(desk, other))["status"] == "running"
    assert not agent.channel.closed


async def test_a_node_that_keeps_a_member_of_a_gang_past_its_time_out_is_blocked(
    desk: Desk,
) -> None:
    site = await open_site(desk, "a", "b")
    task = await site.running(gang_spec(timeout=TIMEOUT_S * 1_000_000))
    watch = Watch(desk, *site.agents.values())
    await watch.seconds(LIMIT_S)
    assert not any(agent.channel.closed for agent in site.agents.values())
    await watch.seconds(20)
    for agent in site.agents.values():
        assert isinstance(agent.sent[-1], Refused)
    await BlockOverdueNodes(desk.server).run_once(desk.server.now)
    await watch.seconds(60)
    assert (await site.words(task))[0] == "queued"
    assert not desk.server.picture.state.held

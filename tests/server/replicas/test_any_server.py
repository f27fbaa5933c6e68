"""Any server answers for the nodes of all: readings, free and busy, queue, explain, streams, gangs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gpool.core.ids import TaskId, decode, encode
from gpool.core.model import EndReason
from gpool.server.replicas.readings import ExchangeReadings
from gpool.wire.frames import (
    Beat,
    Finished,
    GpuReading,
    Grants,
    Hold,
    Line,
    LogChunk,
    Released,
    Started,
    StopReason,
    TaskReading,
)
from tests.server.replicas.replica_desks import ReplicaDesk, executed, replica_desks
from tests.server.scheduling.gang_site import lab_offer, stops
from tests.server.server_desk import Agent, an_offer, exited

pytestmark = pytest.mark.anyio

HOT = GpuReading(0, 90, 7 << 30, 650_000, 70)


async def test_readings_of_a_node_are_shown_by_all_servers(url: str, tmp_path: Path) -> None:
    async with replica_desks(url, tmp_path, 3) as (clock, (leader, follower, third)):
        agent = await follower.desk.agent(offer=an_offer(gpus=1))
        task = await leader.desk.command(gpu="1")
        await leader.schedule()
        for replica in (follower, third):
            await replica.follow()
        [lease] = agent.leases()
        await agent.report(Started(lease.task, lease.epoch))
        clock.advance(1)
        for replica in (leader, follower, third):
            await replica.follow()  # they know of one another
        loops = [
            ExchangeReadings(each.desk.server, each.membership)
            for each in (follower, leader, third)
        ]
        for beat in (2, 3):
            clock.advance(8)
            own = TaskReading(lease.task, lease.epoch, 80, 8 << 30, 700_000, 70)
            hold = Hold(lease.task, lease.epoch)
            await agent.channel.receive(Beat(beat, (hold,), (HOT,), (own,)))
            if beat == 2:
                assert await shown(leader, task) == (None, 0, 0), "control: not exchanged yet"
            for loop in loops:
                await loop.run_once(clock.now())
        for replica in (leader, follower, third):
            reading, of_gpu, of_task = await shown(replica, task)
            assert reading is not None
            assert (reading["utilisation_percent"], of_gpu, of_task) == (90, 2, 2)
        clock.advance(600)
        await agent.channel.receive(Beat(9, (), (HOT,), ()))
        await loops[0].run_once(clock.now())
        assert len(await executed(url, "SELECT 1 FROM readings")) == 1, "old rows are deleted"


async def shown(replica: ReplicaDesk, task: str) -> tuple[dict[str, Any] | None, int, int]:
    """Reading of the only GPU now, and the lengths of its history and of the task's."""
    [gpu] = (await replica.desk.get("/v1/resources?kind=gpu")).json()["items"]
    of_gpu = (await replica.desk.get(f"/v1/resources/{gpu['id']}/telemetry")).json()
    of_task = (await replica.desk.get(f"/v1/tasks/{task}/telemetry")).json()
    return gpu["reading"], len(of_gpu["readings"]), len(of_task["readings"])


async def test_one_server_exchanges_nothing(url: str, tmp_path: Path) -> None:
    async with replica_desks(url, tmp_path, 1) as (clock, (only,)):
        agent = await only.desk.agent(offer=an_offer(gpus=1))
        await agent.channel.receive(Beat(2, (), (HOT,), ()))
        await ExchangeReadings(only.desk.server, only.membership).run_once(clock.now())
        assert await executed(url, "SELECT 1 FROM readings") == []


async def test_all_servers_give_the_same_answers_about_nodes_queue_and_reasons(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path, 3) as (clock, replicas):
        leader, second, third = replicas
        busy = await second.desk.agent("busy", an_offer(cpus=1, gpus=1))
        await third.desk.agent("idle", an_offer(cpus=1))
        first = await third.desk.command(gpu="1", name="first")
        clock.advance(1)
        waiting = [await each.desk.command(gpu="1", name="waits") for each in replicas]
        never = await second.desk.command(gpu="H100:8", name="never")
        await leader.schedule()
        clock.advance(1)
        for _ in range(2):
            for replica in replicas:
                await replica.follow()
        [lease] = busy.leases()
        assert lease.task == decode("task", first)
        paths = ["/v1/nodes", "/v1/resources", "/v1/queue", f"/v1/tasks/{first}"]
        paths += [f"/v1/tasks/{task}/explain" for task in (*waiting, never)]
        for path in paths:
            answers = [(await each.desk.get(path)).json() for each in replicas]
            assert answers[0] == answers[1] == answers[2], path
        nodes = (await leader.desk.get("/v1/nodes")).json()["items"]
        assert {each["name"]: each["status"] for each in nodes} == {
            "busy": "online",
            "idle": "online",
        }
        why = (await third.desk.get(f"/v1/tasks/{waiting[0]}/explain")).json()
        assert why["code"] == "gpus_busy", why


async def test_output_and_results_are_streamed_by_a_server_without_the_node(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (_, (leader, follower)):
        agent = await follower.desk.agent()
        task = await leader.desk.command()
        batch = (await leader.desk.get(f"/v1/tasks/{task}")).json()["batch"]
        await leader.schedule()
        await follower.follow()
        [lease] = agent.leases()
        follow = {"accept": "text/event-stream"}
        reading = asyncio.create_task(
            leader.desk.get(f"/v1/tasks/{task}/logs?follow=true", headers=follow)
        )
        results = asyncio.create_task(leader.desk.get(f"/v1/batches/{batch}/results"))
        await agent.report(Started(lease.task, lease.epoch))
        await agent.report(LogChunk(lease.task, lease.epoch, 0, 1, b"from the other server\n"))
        await leader.follow()
        assert not reading.done()
        await agent.report(exited(lease))
        await leader.follow()
        assert "from the other server" in (await reading).text
        [result] = [json.loads(line) for line in (await results).text.splitlines() if line]
        assert (result["id"], result["status"]) == (task, "succeeded")


async def test_the_lag_of_the_feed_grows_until_it_is_read(url: str, tmp_path: Path) -> None:
    async with replica_desks(url, tmp_path) as (clock, (_, follower)):
        await follower.follow()
        assert await feed_lag_s(follower) == 0.0
        clock.advance(25)
        assert await feed_lag_s(follower) == 25.0
        await follower.follow()
        assert await feed_lag_s(follower) == 0.0


async def feed_lag_s(replica: ReplicaDesk) -> float:
    text = (await replica.desk.get("/metrics")).text
    [line] = [
        each for each in text.splitlines() if each.startswith("gpool_store_feed_lag_seconds ")
    ]
    return float(line.split()[1])


# ---- gangs


class SplitGang:
    """A gang of two, whose members are connected to different servers, and who the leader is."""

    def __init__(self, replicas: list[ReplicaDesk], agents: list[Agent]) -> None:
        self.replicas, self.agents = replicas, agents

    async def start(self) -> TaskId:
        leader = self.replicas[0]
        task = TaskId(decode("task", await self.replicas[-1].desk.command(nodes=2, on_loss="end")))
        assert await leader.schedule() == 1
        await self.follow()
        for agent in self.agents:
            await agent.report(Started(task, 1))
        await self.follow()
        return task

    async def follow(self) -> None:
        for replica in self.replicas:
            await replica.follow()

    def lines(self) -> list[Line]:
        return [
            line for agent in self.agents for frame in agent.frames(Grants) for line in frame.lines
        ]

    async def status(self, task: TaskId) -> set[str]:
        """As every server shows it."""
        return {await each.status(encode("task", task)) for each in self.replicas}


async def split_gang(replicas: list[ReplicaDesk]) -> SplitGang:
    agents = []
    for number, replica in enumerate(replicas[-2:], 1):
        agents.append(await replica.desk.agent(f"member-{number}", lab_offer(number)))
    return SplitGang(replicas, agents)


@pytest.mark.parametrize("count", [2, 3])
async def test_a_gang_runs_with_members_at_different_servers(
    count: int, url: str, tmp_path: Path
) -> None:
    """With three servers the leader has none of them."""
    async with replica_desks(url, tmp_path, count) as (_, replicas):
        gang = await split_gang(replicas)
        task = await gang.start()
        told = [line.gang for line in gang.lines()]
        assert len(told) == 2, "each member is told once"
        assert sorted(each.rank for each in told if each) == [0, 1]
        assert len({each.secret for each in told if each}) == 1
        assert len({each.peers for each in told if each}) == 1
        assert await gang.status(task) == {"running"}
        for agent in gang.agents:
            await agent.report(Finished(task, 1, EndReason.EXITED, 0, duration_us=1000))
        await gang.follow()
        assert await gang.status(task) == {"succeeded"}
        assert not any(each.state.held for each in replicas)


async def test_a_cancelled_gang_is_stopped_at_both_servers(url: str, tmp_path: Path) -> None:
    async with replica_desks(url, tmp_path) as (_, replicas):
        gang = await split_gang(replicas)
        task = await gang.start()
        answer = await replicas[1].desk.http.delete(f"/v1/tasks/{encode('task', task)}")
        assert answer.status_code == 200, answer.text
        await gang.follow()
        for agent in gang.agents:
            assert set(stops(agent)) == {StopReason.CANCELLED}
            await agent.report(Released(task, 1))
        await gang.follow()
        assert await gang.status(task) == {"cancelled"}
        assert not any(each.state.held for each in replicas)


async def test_a_member_that_fails_at_one_server_stops_the_member_at_the_other(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (_, replicas):
        gang = await split_gang(replicas)
        task = await gang.start()
        failing, other = gang.agents[1], gang.agents[0]
        await failing.report(Finished(task, 1, EndReason.EXITED, 7, duration_us=1000))
        await gang.follow()
        assert stops(other), "the rest of a gang ends with its first failure"
        await other.report(Released(task, 1))
        await gang.follow()
        assert await gang.status(task) == {"failed"}
        assert not any(each.state.held for each in replicas)

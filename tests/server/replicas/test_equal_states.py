"""Random work at three servers of one database: every state equals one rebuilt from the store, and each task ends once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpool.core.ids import decode
from gpool.wire.frames import Hold, Lease, Released, Started, Stop
from tests.server.replicas.replica_desks import ReplicaDesk, replica_desks
from tests.server.server_desk import Agent, StoppedClock, an_offer, exited

pytestmark = pytest.mark.anyio
STEPS = 60


@dataclass
class Machine:
    """A node that moves between servers, and the leases it has."""

    agent: Agent
    started: set[Hold] = field(default_factory=set)
    ended: set[Hold] = field(default_factory=set)
    earlier: dict[Hold, Lease] = field(default_factory=dict)  # of connections before

    def open_leases(self) -> dict[Hold, Lease]:
        granted = {Hold(each.task, each.epoch): each for each in self.agent.leases()}
        both = self.earlier | granted
        return {hold: each for hold, each in both.items() if hold not in self.ended}

    def stopped(self) -> list[Hold]:
        asked = [hold for frame in self.agent.frames(Stop) for hold in frame.holds]
        return [hold for hold in dict.fromkeys(asked) if hold not in self.ended]


@dataclass
class Work:
    dice: random.Random
    clock: StoppedClock
    replicas: list[ReplicaDesk]
    machines: list[Machine]
    tasks: list[str] = field(default_factory=list)

    @property
    def some(self) -> ReplicaDesk:
        return self.dice.choice(self.replicas)

    async def step(self) -> None:
        self.clock.advance(self.dice.random())
        often = (self.submit, self.plan, self.follow, self.run, self.run)
        await self.dice.choice((*often, *often, self.cancel, self.move, self.pause))()

    async def submit(self) -> None:
        wanted = {"command": ["true"], "copies": self.dice.randint(1, 3), "retries": 1}
        answer = await self.some.desk.post("/v1/tasks", wanted)
        self.tasks += answer.json()["ids"]

    async def plan(self) -> None:
        await self.replicas[0].schedule()

    async def follow(self) -> None:
        await self.some.follow()

    async def run(self) -> None:
        machine = self.dice.choice(self.machines)
        for hold in machine.stopped():
            machine.ended.add(hold)
            await machine.agent.report(Released(hold.task, hold.epoch))
        for hold, lease in list(machine.open_leases().items())[:2]:
            if hold not in machine.started:
                machine.started.add(hold)
                await machine.agent.report(Started(hold.task, hold.epoch))
            else:
                machine.ended.add(hold)
                await machine.agent.report(exited(lease, self.dice.choice((0, 0, 1))))

    async def cancel(self) -> None:
        if self.tasks:
            await self.some.desk.http.delete(f"/v1/tasks/{self.dice.choice(self.tasks)}")

    async def move(self) -> None:
        """Connect to a server, perhaps another one, stating the leases it has."""
        machine = self.dice.choice(self.machines)
        old = machine.agent
        machine.earlier = machine.open_leases()
        machine.agent = old.again(self.some.desk.server)
        await machine.agent.connect(*machine.earlier)
        await old.channel.close()

    async def pause(self) -> None:
        nodes = (await self.some.desk.get("/v1/nodes")).json()["items"]
        word = self.dice.choice(("available", "available", "paused"))
        node = self.dice.choice(nodes)["id"]
        await self.some.desk.http.patch(f"/v1/nodes/{node}", json={"availability": word})

    async def settle(self) -> None:
        for _ in range(2):
            for replica in self.replicas:
                await replica.follow()

    async def finish(self) -> None:
        """Resume all nodes, and run until no task is open."""
        for node in (await self.some.desk.get("/v1/nodes")).json()["items"]:
            path = f"/v1/nodes/{node['id']}"
            await self.some.desk.http.patch(path, json={"availability": "available"})
        for _ in range(200):
            await self.settle()
            await self.plan()
            for _ in range(2 * len(self.machines)):
                await self.run()
            if not any([await self.is_open(task) for task in self.tasks]):
                return
        raise AssertionError("tasks stay open")

    async def is_open(self, task: str) -> bool:
        status = await self.replicas[0].status(task)
        return status not in ("succeeded", "failed", "cancelled")


@pytest.mark.parametrize("seed", range(3))
async def test_states_of_three_servers_equal_the_store_and_every_task_ends_once(
    seed: int, url: str, tmp_path: Path
) -> None:
    dice = random.Random(seed)
    async with replica_desks(url, tmp_path, 3) as (clock, replicas):
        machines = [
            Machine(await dice.choice(replicas).desk.agent(f"m{number}", an_offer(cpus=2)))
            for number in range(3)
        ]
        work = Work(dice, clock, replicas, machines)
        for _ in range(STEPS):
            await work.step()
        await work.settle()
        for replica in replicas:
            picture = replica.desk.server.picture
            assert not picture.is_stale, "nothing contradicted the state"
            folded = picture.state
            await picture.rebuild(clock.now())
            assert folded == picture.state, f"seed {seed}"
        await work.finish()
        ends = [hold.task for machine in machines for hold in machine.ended]
        assert {decode("task", task) for task in work.tasks} >= set(ends)
        for replica in replicas:
            await work.settle()
            assert not replica.state.held
            assert not replica.state.queued_count

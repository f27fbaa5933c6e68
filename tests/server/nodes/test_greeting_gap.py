"""While a node's GPUs are looked up, its leases may change: what it is told at last is what is so then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpool.core.ids import encode
from gpool.core.model import Availability
from gpool.server.nodes.gpu_verifier import GpuVerifier, VerificationSettings
from gpool.server.store.operations import nodes
from gpool.server.store.protocol import Operation, Store
from gpool.wire.frames import Hold, Refused, Stop, Welcome
from tests.server.server_desk import Agent, Desk, StoppedClock, an_offer, open_desk

pytestmark = pytest.mark.anyio


class Slow:
    """A store that reads when it is let."""

    def __init__(self, real: Store) -> None:
        self._real = real
        self.asked, self.let = asyncio.Event(), asyncio.Event()

    async def write(self, operation: Operation[Any]) -> Any:
        return await self._real.write(operation)

    async def read(self, operation: Operation[Any]) -> Any:
        self.asked.set()
        await self.let.wait()
        return await self._real.read(operation)

    async def close(self) -> None:
        await self._real.close()


@pytest.fixture
async def desk(data: Path) -> AsyncIterator[Desk]:
    desk = await open_desk(data, StoppedClock(), examine_gpus=True)
    async with desk.http:
        yield desk
    await desk.server.store.close()


async def dawdling(
    desk: Desk, agent: Agent, *holds: Hold
) -> tuple[Agent, Slow, asyncio.Task[None]]:
    """The node comes back, and stands before the store with its GPUs."""
    slow = Slow(desk.server.store)
    examiner = GpuVerifier(
        slow, desk.server.picture, desk.clock.now, VerificationSettings.of(desk.server.settings)
    )
    back = agent.again(replace(desk.server, examiner=examiner))
    greeting = asyncio.create_task(back.connect(*holds))
    await slow.asked.wait()
    return back, slow, greeting


async def leased(desk: Desk) -> tuple[Agent, Hold]:
    agent = await desk.agent(offer=an_offer(gpus=1))
    await desk.command()
    await desk.schedule()
    (lease,) = await agent.granted(1)
    await agent.channel.close()
    return agent, Hold(lease.task, lease.epoch)


async def test_what_is_cancelled_meanwhile_is_stopped(desk: Desk) -> None:
    agent, hold = await leased(desk)
    back, slow, greeting = await dawdling(desk, agent, hold)
    await desk.http.delete(f"/v1/tasks/{encode('task', hold.task)}")
    slow.let.set()
    await greeting
    assert [frame.holds for frame in back.frames(Stop)] == [(hold,)]


async def test_what_is_cancelled_meanwhile_is_not_granted_again(desk: Desk) -> None:
    agent, hold = await leased(desk)
    back, slow, greeting = await dawdling(desk, agent)
    await desk.http.delete(f"/v1/tasks/{encode('task', hold.task)}")
    slow.let.set()
    await greeting
    assert back.leases() == []
    assert [frame.holds for frame in back.frames(Stop)] == [(hold,)]


async def test_a_node_that_is_paused_meanwhile_gets_nothing(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(gpus=1))
    await agent.channel.close()
    back, slow, greeting = await dawdling(desk, agent)
    node = back.credentials.node
    row = await desk.server.store.write(
        nodes.set_availability(node, None, Availability.PAUSED, desk.server.now)
    )
    assert row is not None
    desk.server.picture.node_changed(row.node)
    slow.let.set()
    await greeting
    assert back.frames(Welcome)
    entry = desk.server.picture.state.nodes[node]
    assert entry.node is not None
    assert entry.node.availability is Availability.PAUSED
    await desk.command()
    assert await desk.schedule() == 0


async def test_a_newer_connection_is_not_replaced_by_the_one_that_dawdled(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(gpus=1))
    await agent.channel.close()
    back, slow, greeting = await dawdling(desk, agent)
    newer = back.again(desk.server)
    await newer.connect()
    slow.let.set()
    await greeting
    assert back.frames(Refused)
    assert desk.server.nodes.connection(newer.credentials.node) is newer.channel


class Late(Slow):
    """A store that writes when it is let."""

    async def write(self, operation: Operation[Any]) -> Any:
        self.asked.set()
        await self.let.wait()
        return await self._real.write(operation)

    async def read(self, operation: Operation[Any]) -> Any:
        return await self._real.read(operation)


async def test_an_older_hello_does_not_write_its_offer_over_a_newer_one(desk: Desk) -> None:
    agent = await desk.agent()
    await agent.channel.close()
    late = Late(desk.server.store)
    slow = replace(desk.server, store=late)
    older, newer = agent.again(slow), agent.again(slow)
    older.offer, newer.beat = an_offer(cpus=7), older.beat + 1
    greeting = asyncio.create_task(newer.connect())
    await late.asked.wait()
    overtaken = asyncio.create_task(older.connect())
    await asyncio.sleep(0)
    late.let.set()
    await asyncio.gather(greeting, overtaken)
    assert older.frames(Refused)
    assert newer.frames(Welcome)
    assert await cpus_of(desk, agent) == (2000, 2000)


async def test_what_a_hello_wrote_is_known_though_its_connection_is_gone(desk: Desk) -> None:
    agent = await desk.agent()
    await agent.channel.close()
    late = Late(desk.server.store)
    gone = agent.again(replace(desk.server, store=late))
    gone.offer = an_offer(cpus=7)
    greeting = asyncio.create_task(gone.connect())
    await late.asked.wait()
    await gone.channel.close()
    late.let.set()
    await greeting
    assert not gone.frames(Welcome)
    assert await cpus_of(desk, agent) == (7000, 7000)


async def cpus_of(desk: Desk, agent: Agent) -> tuple[int, int]:
    """In the store, and as the scheduler knows it."""
    row = await desk.server.store.read(nodes.node(agent.credentials.node))
    entry = desk.server.picture.state.nodes[agent.credentials.node]
    assert row is not None
    assert entry.node is not None
    return row.node.offer.cpu_milli, entry.node.offer.cpu_milli

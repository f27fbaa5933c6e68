"""Nodes move to an emptier server, a bounded part of them at a time, and from a server that stops; leases go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.server.app import drain
from gpool.server.replicas.moving import (
    ASK_AGAIN,
    EVERY_S,
    SETTLED,
    Destination,
    MoveNodes,
    assigned,
    surplus,
)
from gpool.wire.frames import Hold, Refused, Started, Welcome
from tests.server.replicas.replica_desks import ReplicaDesk, executed, replica_desks
from tests.server.server_desk import Agent, exited

COUNTS = st.lists(st.integers(0, 2000), min_size=2, max_size=6)


def others_than(index: int, counts: list[int]) -> list[Destination]:
    return [
        Destination(f"http://{number}", nodes)
        for number, nodes in enumerate(counts)
        if number != index
    ]


@given(COUNTS)
def test_servers_become_about_equal_and_then_ask_nobody(counts: list[int]) -> None:
    """All decide at the same time, from the same numbers."""
    total = sum(counts)
    for _ in range(400):
        moved = [surplus(own, others_than(at, counts), 0.5) for at, own in enumerate(counts)]
        if not any(moved):
            break
        before = list(counts)
        for at, count in enumerate(moved):
            counts[at] -= count
            for address in assigned(count, others_than(at, before)):
                counts[int(address.removeprefix("http://"))] += 1
    mean = total / len(counts)
    assert sum(counts) == total
    assert max(counts) - mean < max(1.0, 0.1 * mean) + 1


@given(COUNTS, st.floats(0.01, 1.0))
def test_no_server_asks_more_than_the_given_part_of_its_nodes(
    counts: list[int], fraction: float
) -> None:
    asked = surplus(counts[0], others_than(0, counts), fraction)
    assert asked <= counts[0] * fraction * EVERY_S / 60 + 1


def test_nobody_is_asked_without_another_server_or_with_a_fraction_of_zero() -> None:
    assert surplus(1000, [], 0.1) == 0
    assert surplus(1000, [Destination("http://1", 0)], 0.0) == 0
    assert surplus(1000, [Destination("http://1", 0)], 0.1) == 10  # control


@pytest.mark.anyio
async def test_a_full_server_asks_idle_nodes_to_move_and_their_leases_go_on(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path, rebalance_per_minute=1.0) as (clock, (full, empty)):
        agents = [await full.desk.agent(f"node-{number}") for number in range(4)]
        task = await full.desk.command()
        await full.schedule()
        [busy] = [agent for agent in agents if agent.leases()]
        [lease] = busy.leases()
        await busy.report(Started(lease.task, lease.epoch))
        moving = MoveNodes(full.desk.server, full.membership)
        await moving.run_once(clock.now())
        assert asked(agents) == [], "control: the other one has just started"
        await settled(url, full)
        for count in (1, 2):
            await moving.run_once(clock.now())
            assert len(asked(agents)) == count
            gone = asked(agents)[-1]
            [refused] = gone.frames(Refused)
            assert (refused.retry, refused.to) == (True, "http://replica-1")
            await gone.channel.close()
            await gone.again(empty.desk.server).connect()
            await full.follow()
        assert busy not in asked(agents), "idle nodes first"
        await moving.run_once(clock.now())
        assert len(asked(agents)) == 2, "both have two"
        busy.channel.refuse("unreachable", "move", retry=True)
        await busy.channel.close()
        there = busy.again(empty.desk.server)
        await there.connect(Hold(lease.task, lease.epoch))
        [welcome] = there.frames(Welcome)
        assert welcome.drop == ()
        await there.report(exited(lease))
        assert await full.status(task) == "succeeded"


@pytest.mark.anyio
async def test_a_node_that_comes_back_is_left_alone_for_a_while(url: str, tmp_path: Path) -> None:
    """As one does behind a load balancer that sends it to the same server again."""
    async with replica_desks(url, tmp_path, rebalance_per_minute=1.0) as (clock, (full, _)):
        agents = [await full.desk.agent(f"node-{number}") for number in range(2)]
        await settled(url, full)
        moving = MoveNodes(full.desk.server, full.membership)
        for _ in range(2):
            await moving.run_once(clock.now())
            [gone] = asked(agents)
            await gone.channel.close()
            agents.remove(gone)
            agents.append(gone.again())
            await agents[-1].connect()
        await moving.run_once(clock.now())
        assert asked(agents) == []
        clock.advance(ASK_AGAIN / 1_000_000 + 1)
        await moving.run_once(clock.now())
        assert len(asked(agents)) == 1


@pytest.mark.anyio
async def test_a_stopping_server_names_another_one_and_gets_no_nodes_itself(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path, rebalance_per_minute=1.0) as (clock, (one, other)):
        agents = [await one.desk.agent(f"node-{number}") for number in range(2)]
        staying = [await other.desk.agent(f"other-{number}") for number in range(6)]
        await settled(url, one, other)
        await drain(one.desk.app, one.desk.server)
        for agent in agents:
            [refused] = agent.frames(Refused)
            assert refused.to == "http://replica-1"
            await agent.channel.close()
        moving = MoveNodes(other.desk.server, other.membership)
        await other.follow()
        await moving.run_once(clock.now())
        assert len(asked(staying)) == 1, "control: it is not marked yet"
        await settled(url, one, other)
        await moving.run_once(clock.now())
        assert len(asked(staying)) == 1


async def settled(url: str, *replicas: ReplicaDesk) -> None:
    """Let all servers have run for a while, and the given ones know it."""
    await executed(
        url,
        f"UPDATE replicas SET started_at = started_at - {2 * SETTLED}, address = 'http://replica-' || slot",  # noqa: S608
    )
    for replica in replicas:
        await replica.membership.heartbeat(replica.desk.server.picture.term)


def asked(agents: list[Agent]) -> list[Agent]:
    return [agent for agent in agents if agent.frames(Refused)]

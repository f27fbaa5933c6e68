"""What experience says of nodes reaches the scheduler, survives a restart, and steers tasks."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from gpool.core.errors import Unreachable
from gpool.core.gpu_verification import GpuVerdict, MeasuredSpeed
from gpool.core.ids import NodeId
from gpool.core.model import Merit
from gpool.core.reliability import LOSS, PRIOR
from gpool.server.nodes.reliability import EVERY_S, UpdateReliability
from gpool.server.scheduling.loops import ExpireNodes
from gpool.server.store.operations import gpus, node_pages
from gpool.wire.frames import Started
from tests.server.server_desk import Desk, an_offer

pytestmark = pytest.mark.anyio


def reliability_of(desk: Desk, node: NodeId) -> Merit:
    known = desk.server.picture.state.nodes[node].node
    assert known is not None
    return known.merit


async def test_a_store_that_fails_is_never_held_against_a_node(desk: Desk) -> None:
    await desk.agent(offer=an_offer(cpus=1))
    await desk.command()
    assert await desk.schedule() == 1
    desk.clock.advance(desk.server.settings.ttl_s + 1)
    await desk.server.store.close()
    for _ in range(3):
        with pytest.raises(Unreachable):
            await ExpireNodes(desk.server).run_once(desk.server.now)
    assert desk.server.nodes.take_losses() == {}


async def test_a_node_that_goes_away_with_leases_is_known_for_it(desk: Desk) -> None:
    merits, expire = UpdateReliability(desk.server), ExpireNodes(desk.server)
    await merits.run_once(desk.server.now)
    agent = await desk.agent(offer=an_offer(cpus=1))
    node = agent.credentials.node
    for _ in range(3):
        await desk.command()
        assert await desk.schedule() == 1
        desk.clock.advance(desk.server.settings.ttl_s + 1)
        await expire.run_once(desk.server.now)
        agent = agent.again()
        await agent.connect()
        await merits.run_once(desk.server.now)
    known = desk.server.picture.state.nodes[node].node
    assert known is not None
    assert known.merit.mtbf < PRIOR
    stored = await desk.server.store.read(node_pages.reliability_records())
    assert stored[node].losses_milli > 2900
    await desk.server.picture.rebuild(desk.server.now)
    assert desk.server.picture.state.nodes[node].node == known
    again = UpdateReliability(desk.server)
    desk.server.picture.use_reliability({})
    await again.run_once(desk.server.now)
    assert reliability_of(desk, node) == known.merit, "a restart forgives nobody"


async def test_a_node_that_goes_away_with_nothing_keeps_its_name(desk: Desk) -> None:
    merits, expire = UpdateReliability(desk.server), ExpireNodes(desk.server)
    agent = await desk.agent()
    await merits.run_once(desk.server.now)
    desk.clock.advance(desk.server.settings.ttl_s + 1)
    await expire.run_once(desk.server.now)
    await merits.run_once(desk.server.now)
    assert reliability_of(desk, agent.credentials.node).mtbf >= PRIOR


async def test_an_agent_that_forgot_what_it_ran_was_lost_too(desk: Desk) -> None:
    merits = UpdateReliability(desk.server)
    agent = await desk.agent()
    await merits.run_once(desk.server.now)
    await desk.command()
    await desk.schedule()
    lease = agent.leases()[-1]
    await agent.report(Started(lease.task, lease.epoch))
    await agent.again().connect()
    await merits.run_once(desk.server.now)
    stored = await desk.server.store.read(node_pages.reliability_records())
    assert stored[agent.credentials.node].losses_milli == LOSS


async def test_time_that_nobody_looked_is_not_counted(desk: Desk) -> None:
    merits = UpdateReliability(desk.server)
    agent = await desk.agent()
    await merits.run_once(desk.server.now)
    for seconds in (EVERY_S, 1_000_000):
        desk.clock.advance(seconds)
        await agent.send_beat()
        await merits.run_once(desk.server.now)
    stored = await desk.server.store.read(node_pages.reliability_records())
    assert stored[agent.credentials.node].up <= EVERY_S * 1_000_000


async def test_what_gpus_proved_and_measured_is_known_of_their_node(desk: Desk) -> None:
    offer = an_offer(gpus=1)
    real = replace(offer, gpus=tuple(replace(gpu, simulated=False) for gpu in offer.gpus))
    agent = await desk.agent(offer=real)
    node = agent.credentials.node
    rates = msgspec.json.encode(MeasuredSpeed(60_000, 0, 900_000, 0, 1, 1)).decode()
    await desk.server.write(gpus.judge(node, "GPU-0", GpuVerdict.PASSED, desk.server.now))
    await desk.server.write(gpus.note_measured(node, "GPU-0", rates))
    await UpdateReliability(desk.server).run_once(desk.server.now)
    found = reliability_of(desk, node)
    assert found.is_proven
    assert 600_000 < found.gigaflops <= 900_000


@pytest.mark.parametrize(
    ("verdict", "claimed"),
    [(GpuVerdict.PASSED, 1 << 60), (GpuVerdict.WRONG_PRODUCT, 900_000), (None, 900_000)],
)
async def test_a_speed_that_is_only_claimed_is_not_believed(
    desk: Desk, verdict: GpuVerdict | None, claimed: int
) -> None:
    offer = an_offer(gpus=1)
    real = replace(offer, gpus=tuple(replace(gpu, simulated=False) for gpu in offer.gpus))
    node = (await desk.agent(offer=real)).credentials.node
    rates = msgspec.json.encode(MeasuredSpeed(60_000, 0, claimed, 0, 1, 1)).decode()
    if verdict is not None:
        await desk.server.write(gpus.judge(node, "GPU-0", verdict, desk.server.now))
    await desk.server.write(gpus.note_measured(node, "GPU-0", rates))
    await UpdateReliability(desk.server).run_once(desk.server.now)
    assert reliability_of(desk, node).gigaflops == 0

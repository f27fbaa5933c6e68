"""What free room is worth is learnt beside everything else, kept over a restart, and shown to operators."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpool.core.scheduler.place.portfolio import LEAST_ARRIVALS, PLAIN
from gpool.core.scheduler.place.pricing import USUAL
from gpool.server.scheduling.learning import TrainingSet, train_in_process
from gpool.server.scheduling.loops import TrainPricing
from gpool.server.store.operations.tasks import submissions
from tests.server.server_desk import Desk, StoppedClock, an_offer, open_desk

pytestmark = pytest.mark.anyio
DAY_S = 86_400.0


async def a_day(desk: Desk, count: int = LEAST_ARRIVALS) -> None:
    """Tasks of two kinds, each half of the day alike."""
    for _ in range(2):
        for gpu, cpus in (("1", 1.0), ("0.4", 0.5)):
            for _ in range(count // 50):
                await desk.command(gpu=gpu, cpus=cpus, copies=25)


async def test_a_pricing_is_learnt_kept_over_a_restart_and_shown(desk: Desk, data: Path) -> None:
    await desk.agent(offer=an_offer(8, gpus=4))
    await a_day(desk)
    learning = TrainPricing(desk.server)
    await learning.run_once(desk.server.now)
    learnt = desk.server.picture.policy.rules.learnt
    assert learnt is not None
    assert desk.server.picture.policy.current.pricing == learnt.pricing != USUAL
    assert learnt.pricing.mix, "both kinds ask for GPUs"
    chosen, plain = learnt.of(learnt.pricing.weights), learnt.of(PLAIN)
    assert chosen is not None
    assert plain is not None
    assert chosen <= plain
    told = (await desk.get("/v1/admin/policy")).json()["learnt"]
    assert told["arrivals"] == learnt.arrivals
    assert told["idle_percent"] == chosen
    assert f"{chosen:.2f} % of the GPUs idle" in told["sentence"]
    assert f'replayed_idle_percent{{way="plain"}} {plain}' in desk.server.metrics.page().decode()
    again = await open_desk(data, desk.clock)
    try:
        assert again.server.picture.policy.rules.learnt == learnt
        assert again.server.picture.policy.current.pricing == learnt.pricing
    finally:
        await again.server.store.close()


async def test_it_is_learnt_once_a_day_and_whenever_an_operator_asks(desk: Desk) -> None:
    await desk.agent(offer=an_offer(8, gpus=4))
    await a_day(desk)
    learning, policy = TrainPricing(desk.server), desk.server.picture.policy
    await learning.run_once(desk.server.now)
    first = policy.rules.learnt
    assert first is not None
    await learning.run_once(desk.clock.advance(DAY_S / 2))
    assert policy.rules.learnt is first
    answer = await desk.post("/v1/admin/policy/learn")
    assert (answer.status_code, learning.wake.called) == (202, True)
    await learning.run_once(desk.server.now)
    second = policy.rules.learnt
    assert second is not None
    assert second.at == desk.server.now > first.at
    await learning.run_once(desk.clock.advance(DAY_S))
    third = policy.rules.learnt
    assert third is not None
    assert third.at > second.at


async def test_a_pool_with_little_past_or_without_gpus_learns_nothing(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(8))
    await a_day(desk)
    await TrainPricing(desk.server).run_once(desk.server.now)
    await agent.channel.close()
    assert desk.server.picture.policy.rules.learnt is None
    assert desk.server.picture.policy.current.pricing is USUAL


async def test_where_it_is_turned_off_it_is_learnt_only_when_asked(data: Path) -> None:
    desk = await open_desk(data, StoppedClock(), learn_every_s=0)
    await desk.agent(offer=an_offer(8, gpus=4))
    await a_day(desk)
    await TrainPricing(desk.server).run_once(desk.server.now)
    assert desk.server.picture.policy.rules.learnt is None
    desk.server.learning.ask()
    await TrainPricing(desk.server).run_once(desk.server.now)
    assert desk.server.picture.policy.rules.learnt is not None
    await desk.server.store.close()


async def test_the_process_answers_as_the_planner_here_would(desk: Desk) -> None:
    await desk.agent(offer=an_offer(8, gpus=4))
    await a_day(desk)
    came = await desk.server.store.read(submissions.recent_shapes(10_000))
    nodes = [entry.node for entry in desk.server.picture.state.nodes.values()]
    asked = TrainingSet.of(tuple(n for n in nodes if n is not None), came, desk.server.now)
    assert sum(count for _, count in asked.arrivals) == 4 * LEAST_ARRIVALS // 2
    assert await train_in_process(asked) == asked.best_pricing() is not None


async def test_of_a_large_batch_only_some_count_and_the_oldest_come_first(desk: Desk) -> None:
    await desk.command(gpu="1", copies=500)
    await desk.command(gpu="0.5")
    came = await desk.server.store.read(submissions.recent_shapes(10_000))
    assert [count for _, count in came] == [submissions.MOST_ALIKE, 1]
    assert [shape.requirements.gpu[0].share_milli for shape, _ in came] == [1000, 500]

"""What is learnt from earlier arrivals never serves later ones worse than plain gradient descent, and never saw what judged it."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.model import Shape
from gpool.core.scheduler.place.portfolio import (
    LEAST_ARRIVALS,
    PLAIN,
    WAYS,
    choose,
    learn,
    priced,
    unallocated_pct,
)
from gpool.core.scheduler.place.pricing import USUAL
from gpool.core.specs import gpu as gpuspec
from tests.core.scheduler.state.builders import NOW, a_node, a_shape

KINDS = [
    a_shape(gpu=gpuspec.parse(gpu), cpu_milli=cpus * 1000)
    for gpu, cpus in (("1", 8), ("1", 24), ("0.81", 6), ("0.47", 8), ("0.19", 2), ("4", 32))
] + [a_shape(cpu_milli=8000)]
POOL = [a_node(n, 48, 4) for n in (1, 2, 3)] + [a_node(n, 96, 2) for n in (4, 5)]

MIXES = st.lists(st.integers(0, 20), min_size=len(KINDS), max_size=len(KINDS)).filter(
    lambda weights: any(weights[:-1])
)


def arrivals(seed: int, weights: list[int], count: int = LEAST_ARRIVALS) -> list[Shape]:
    return Random(seed).choices(KINDS, weights, k=count)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10_000), MIXES, MIXES)
def test_what_is_learnt_never_leaves_more_idle_than_plain_gradient_descent_on_the_later_half(
    seed: int, before: list[int], after: list[int]
) -> None:
    """Whatever the mix was before, and whatever it becomes."""
    earlier, later = arrivals(seed, before), arrivals(seed + 1, after)
    learnt = learn(POOL, earlier + later, NOW)
    if learnt is None:
        return  # one half asks for no GPU
    chosen = unallocated_pct(POOL, later, learnt.pricing)
    assert chosen <= unallocated_pct(POOL, later, priced(earlier, PLAIN))
    assert learnt.of(learnt.pricing.weights) == chosen


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10_000), MIXES)
def test_the_half_that_judges_is_never_the_half_that_prices(seed: int, mix: list[int]) -> None:
    earlier = arrivals(seed, [5, 5, 5, 5, 5, 1, 1])
    learnt = learn(POOL, earlier + arrivals(seed + 1, mix), NOW)
    assert learnt is not None
    assert learnt.pricing in [priced(earlier, weights) for weights in WAYS]


def test_every_way_is_judged_and_told() -> None:
    learnt = learn(POOL, arrivals(1, [3] * len(KINDS), 2 * LEAST_ARRIVALS), NOW)
    assert learnt is not None
    assert [each.weights for each in learnt.judged] == list(WAYS)
    assert (learnt.at, learnt.arrivals) == (NOW, 2 * LEAST_ARRIVALS)


def test_nothing_is_learnt_from_too_little_or_from_tasks_without_gpus() -> None:
    few = arrivals(1, [3] * len(KINDS), 2 * LEAST_ARRIVALS - 1)
    without = [KINDS[-1]] * 2 * LEAST_ARRIVALS
    for came in (few, without, without + few):
        assert learn(POOL, came, NOW) is None
        assert choose(POOL, came) is USUAL

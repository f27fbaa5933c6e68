"""The index, which scores many nodes at once and few of them again, finds what the rules written down plainly find."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.ids import UserId
from gpool.core.model import GIB, Audience, Merit, Node, Shape
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.place.pricing import Pricing, Weights, price
from gpool.core.scheduler.state.events import NodeChanged, NodeRemoved, TasksReleased
from gpool.core.scheduler.state.state import State
from tests.core.scheduler.place.plain_placement import best_place
from tests.core.scheduler.place.test_index import (
    A10G,
    H100,
    PRICINGS,
    SHAPES,
    STEPS,
    T4,
    questions,
    wanting,
)
from tests.core.scheduler.state.builders import (
    NOW,
    a_node,
    a_shape,
    a_state,
    apply,
    enqueue,
    index_of,
    plan,
)

MORE = [
    *SHAPES,
    wanting("0.1", 2),
    wanting("0.45", 1, cpu_milli=500),
    wanting("T4:2,A10G:1", 2),
    a_shape(1, cpu_milli=500, disk_bytes=40 * GIB),
    wanting("1", 1, max_price_microcredits=900),
]
ODD = Weights(fragmentation=3, remnants=7_000, stranding=2, step=7)
WEIGHED = [*PRICINGS, price([(shape.requirements, 3) for shape in MORE], ODD)]


def priced(node: Node, number: int) -> Node:
    """Some cost something, or one GPU costs more or less; some are free to their owner and others; some are proven."""
    prices, merits = (0, 0, 500, 1000), (Merit(), Merit(), Merit(is_proven=True))
    own = {0: 1500, 1: 0}.get(number % 5)
    gpus = tuple(
        replace(gpu, price_microcredits=None if gpu.index else own) for gpu in node.offer.gpus
    )
    offer = replace(node.offer, price_microcredits=prices[number % 4], gpus=gpus)
    free = Audience(frozenset({2})) if number % 7 == 0 else None
    owner = UserId(number % 6)
    return replace(node, offer=offer, merit=merits[number % 3], free_for=free, owner=owner)


def assert_alike(state: State, shape: Shape, pricing: Pricing) -> None:
    index = index_of(state, pricing)
    for turn in range(len(shape.requirements.gpu) or 1):
        found = index.best(shape, turn, ())
        answer = None
        if found is not None:
            request = shape.requirements.gpu[turn] if shape.requirements.gpu else None
            is_part = request is not None and (request.share_milli < 1000 or request.vram_bytes)
            answer = (found[0], found[1].slices[0].gpu_index if is_part else -1)
        assert answer == best_place(state, shape, turn, pricing), shape


@settings(max_examples=120, deadline=None)
@given(steps=STEPS, pricing=st.sampled_from(WEIGHED), has_prices=st.booleans())
def test_the_engine_finds_what_plain_rules_find_whatever_happens(
    steps: list[tuple[Any, ...]], pricing: Pricing, has_prices: bool
) -> None:
    def put(node: Node) -> Node:
        return priced(node, node.id) if has_prices else node

    for state, shape in questions(steps, MORE, pricing, put):
        assert_alike(state, shape, pricing)


@pytest.mark.parametrize("seed", range(3))
def test_among_hundreds_of_nodes_of_which_many_are_alike(seed: int) -> None:
    """So many that one stands for those that are alike, while they fill up and empty again."""
    random = Random(seed)
    pricing = WEIGHED[seed + 1]
    kinds = [(8, 4), (8, (T4, T4)), (16, (H100, A10G, A10G)), (32, 8), (12, 0), (2, 1)]
    nodes = [priced(a_node(n, *random.choice(kinds)), random.randrange(12)) for n in range(1, 321)]
    policy, state = Policy(order="fcfs", pricing=pricing), a_state(*nodes)
    for number in range(1, 121):
        shape = random.choice(MORE)
        if number % 6 == 0:
            assert_alike(state, shape, pricing)
        enqueue(state, shape, range(number * 100, number * 100 + random.choice((1, 1, 8, 30))))
        apply(state, plan(state, NOW, policy))
        if number % 3 == 0 and state.held:
            ended = random.sample(sorted(state.held), min(5, len(state.held)))
            state.fold(TasksReleased(tuple(ended)))
        if number % 20 == 0:
            gone, other = random.choice(nodes), random.choice(nodes)
            state.fold(NodeRemoved(gone.id))
            state.fold(NodeChanged(replace(other, gpus_withheld=frozenset({0}))))
    for shape in MORE:
        assert_alike(state, shape, pricing)

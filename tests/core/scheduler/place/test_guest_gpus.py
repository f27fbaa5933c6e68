"""GPUs passed through to guests serve tasks of tier vm, and no other GPU does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.ids import TaskId, UserId
from gpool.core.model import Node, RuntimeOffer, Shape, Tier
from gpool.core.scheduler.explain.waiting import explain
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.place.fit import Unfit, unfit
from gpool.core.specs import gpu as gpuspec
from tests.core.scheduler.place.test_index import (
    PRICINGS,
    SHAPES,
    STEPS,
    asked,
    asked_anew,
    places_by_looking,
    questions,
)
from tests.core.scheduler.state.builders import (
    NOW,
    a_node,
    a_shape,
    a_state,
    enqueue,
    index_of,
    plan,
)

EVE = UserId(3)


def with_guests(node: Node, *indexes: int) -> Node:
    """The node with both tiers, and these GPUs for guests."""
    gpus = [replace(gpu, guest=gpu.index in indexes) for gpu in node.offer.gpus]
    boxes = RuntimeOffer("bubblewrap", Tier.CONTAINER)
    guests = RuntimeOffer("microvm", Tier.VM, gpus=bool(indexes), gangs=False)
    offer = replace(node.offer, gpus=tuple(gpus), runtimes=(boxes, guests))
    return replace(node, offer=replace(offer, tiers=frozenset({Tier.CONTAINER, Tier.VM})))


def gpu_task(tier: Tier, spec: str = "1") -> Shape:
    shape = a_shape(EVE, gpu=gpuspec.parse(spec))
    return replace(shape, requirements=replace(shape.requirements, tier=tier))


@pytest.mark.parametrize(("tier", "index"), [(Tier.VM, 1), (Tier.CONTAINER, 0)])
def test_a_task_gets_the_gpu_of_its_tier(tier: Tier, index: int) -> None:
    state = a_state(with_guests(a_node(1, 8, 2), 1))
    enqueue(state, gpu_task(tier), [1, 2])
    (place,) = plan(state, NOW).places
    assert [part.gpu_index for part in place.allocation.slices] == [index]


@pytest.mark.parametrize(
    ("tier", "guests", "said"),
    [(Tier.VM, (1,), "none is passed through"), (Tier.CONTAINER, (0, 1), "ask for the tier 'vm'")],
)
def test_a_task_whose_tier_has_no_such_gpu_reads_why(
    tier: Tier, guests: tuple[int, ...], said: str
) -> None:
    node = with_guests(a_node(1, 8, 2), *guests)
    if tier is Tier.VM:  # the only passed-through GPU is of another model
        first, second = node.offer.gpus
        node = replace(node, offer=replace(node.offer, gpus=(first, replace(second, model="T4"))))
    shape = gpu_task(tier, first.model if tier is Tier.VM else "1")
    assert unfit(node, shape) is Unfit.GPU
    state = a_state(node)
    enqueue(state, shape, [1])
    told = explain(state, TaskId(1), NOW, Policy(order="fcfs"))
    assert told.code == "guest_gpu"
    assert said in told.sentence


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, pricing=st.sampled_from(PRICINGS), tier=st.sampled_from([Tier.VM, None]))
def test_the_index_answers_as_a_look_at_every_node_where_some_gpus_are_for_guests(
    steps: list[tuple[Any, ...]], pricing: Any, tier: Tier | None
) -> None:
    def put(node: Node) -> Node:
        return with_guests(node, 0, 2)

    shapes = [
        shape
        if tier is None
        else replace(shape, requirements=replace(shape.requirements, tier=tier))
        for shape in SHAPES
    ]
    for state, shape in questions(steps, shapes, pricing, put):
        index = index_of(state, pricing)
        found = asked(index, shape)
        assert found == asked_anew(state, shape, index)
        open_to_it = places_by_looking(state, shape)
        assert any(found) == bool(open_to_it)
        first = next(filter(None, found), None)
        assert first is None or first[0] in open_to_it  # type: ignore[index]

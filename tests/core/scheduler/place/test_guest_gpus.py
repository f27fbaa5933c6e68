"""GPUs passed through to guests serve tasks of tier vm, and no other GPU does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpool.core.ids import TaskId, UserId
from gpool.core.model import Node, RuntimeOffer, Shape, Tier
from gpool.core.scheduler.explain.waiting import explain
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.place.fit import Unfit, unfit
from gpool.core.specs import gpu as gpuspec
from tests.core.scheduler.state.builders import (
    NOW,
    a_node,
    a_shape,
    a_state,
    enqueue,
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

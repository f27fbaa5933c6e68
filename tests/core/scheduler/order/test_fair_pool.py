"""Shares are of what can be given out now: what is away, kept back or out of order is no part of the pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import SECOND, Allocation, Availability, Gpu, GpuRequest, Instant, Node, Slice
from gpool.core.scheduler.state.events import NodeChanged, NodeRemoved, TasksReleased
from gpool.core.scheduler.state.state import State, build
from tests.core.scheduler.state.builders import NOW, a_node, a_shape, a_state, enqueue, hold

ALL = 1_000_000
SHUT: dict[str, dict[str, Any]] = {
    "paused": {"availability": Availability.PAUSED},
    "draining": {"availability": Availability.DRAINING},
    "disconnected": {"connected": False},
    "cordoned": {"cordoned": True},
    "resting": {"resting": "says that it cannot start anything just now"},
}
ONE_GPU = Allocation(0, 1000, 1 << 30, (Slice(0, 1 << 30, 1000),))


def a_pool() -> State:
    """Two nodes of two GPUs; user 1 holds one GPU on the first."""
    state = a_state(a_node(1, gpus=2), a_node(2, gpus=2))
    hold(state, a_shape(1, gpu=(GpuRequest(),)), 1, ONE_GPU, 1)
    return state


def share(state: State) -> int:
    return state.shares.of(("user", 1))


def shut(node: Node, index: int) -> Node:
    """One of its GPUs takes nothing."""
    gpus: tuple[Gpu, ...] = tuple(
        replace(gpu, closed="too hot") if gpu.index == index else gpu for gpu in node.offer.gpus
    )
    return replace(node, offer=replace(node.offer, gpus=gpus))


@pytest.mark.parametrize("why", SHUT)
def test_a_node_that_takes_nothing_is_no_part_of_the_pool(why: str) -> None:
    state = a_pool()
    assert share(state) == ALL // 4
    state.fold(NodeChanged(replace(a_node(2, gpus=2), **SHUT[why])))
    assert share(state) == ALL // 2
    state.fold(NodeChanged(a_node(2, gpus=2)))
    assert share(state) == ALL // 4


def test_a_node_closed_by_its_owner_s_rules_is_no_part_of_the_pool() -> None:
    state = a_pool()
    node = a_node(2, gpus=2)
    state.fold(NodeChanged(replace(node, offer=replace(node.offer, closed="office hours"))))
    assert share(state) == ALL // 2


def test_a_gpu_that_takes_nothing_is_no_part_of_the_pool() -> None:
    state = a_pool()
    state.fold(NodeChanged(shut(a_node(2, gpus=2), 1)))
    assert share(state) == ALL // 3
    state.fold(NodeChanged(replace(a_node(2, gpus=2), gpus_withheld=frozenset({0, 1}))))
    assert share(state) == ALL // 2


def test_what_is_held_where_nothing_new_starts_still_counts_for_its_holder() -> None:
    state = a_pool()
    state.fold(NodeChanged(replace(a_node(1, gpus=2), availability=Availability.DRAINING)))
    assert share(state) == ALL // 2


def test_a_node_that_went_while_it_was_shut_leaves_the_rest_as_it_was() -> None:
    state = a_pool()
    state.fold(NodeChanged(replace(a_node(2, gpus=2), connected=False)))
    state.fold(NodeRemoved(NodeId(2)))
    assert share(state) == ALL // 2


def test_a_pool_built_anew_counts_the_same() -> None:
    gone = replace(a_node(2, gpus=2), connected=False)
    shape = a_shape(1, gpu=(GpuRequest(),))
    held = [(NodeId(1), ONE_GPU, shape, 1)]
    state = build([a_node(1, gpus=2), gone], [], held)  # type: ignore[arg-type]  # a task's number
    assert share(state) == ALL // 2


@pytest.mark.parametrize("others", [1, 3, 9])
def test_what_was_had_before_is_not_another_part_because_nodes_went(others: int) -> None:
    """The first two hold a GPU each for an hour in which a third waits; one of them began again just now."""
    gone = range(2, 2 + others)
    state = a_state(a_node(1, gpus=2), *(a_node(number, gpus=2) for number in gone))
    shapes = [a_shape(user, gpu=(GpuRequest(),)) for user in (1, 2)]
    parts = [Allocation(i, 1000, 1 << 30, (Slice(i, 1 << 30, 1000),)) for i in (0, 1)]
    enqueue(state, a_shape(3), [9])
    for task in (0, 1):
        hold(state, shapes[task], 1, parts[task], task)
    state.pass_time(NOW)
    state.pass_time(Instant(NOW + 3600 * SECOND))
    state.fold(TasksReleased((TaskId(1),)))
    hold(state, shapes[1], 1, parts[1], 1)

    def had() -> list[int]:
        return [state.shares.recent(("user", user)) for user in (1, 2)]

    before = had()
    assert before[0] == before[1] > 0
    for number in gone:
        state.fold(NodeChanged(replace(a_node(number, gpus=2), connected=False)))
    assert had() == before
    for number in gone:
        state.fold(NodeRemoved(NodeId(number)))
    assert had() == before
    state.fold(NodeChanged(replace(a_node(1, gpus=2), cordoned=True)))
    assert had() == before
    assert share(state) == before[0]  # of a pool that lends nothing nobody has a part

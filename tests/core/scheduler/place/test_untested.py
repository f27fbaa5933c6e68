"""GPUs of a kind that gpool never ran on: only their owner's tasks and those of the owner's teams run there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.ids import TaskId, UserId
from gpool.core.model import SECOND, Instant, Node, Shape
from gpool.core.scheduler.explain.waiting import explain
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.place.fit import unfit
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

LAB, CLUB = 501, 502
ADA, EVE = UserId(1), UserId(3)


def untested(node: Node, *indexes: int) -> Node:
    gpus = [replace(gpu, untested=gpu.index in indexes) for gpu in node.offer.gpus]
    return replace(node, offer=replace(node.offer, gpus=tuple(gpus)))


def gpu_task(user: UserId, team: int | None = None, spec: str = "1") -> Shape:
    return replace(a_shape(user, gpu=gpuspec.parse(spec)), team=team)


@pytest.mark.parametrize(
    ("user", "team", "runs"),
    [(ADA, None, True), (EVE, LAB, True), (EVE, CLUB, False), (EVE, None, False)],
)
def test_an_untested_gpu_serves_its_owner_and_the_owners_teams(
    user: UserId, team: int | None, runs: bool
) -> None:
    node = a_node(1, 8, 1, owner=ADA, owner_teams=frozenset({LAB}))
    for here, expected in ((untested(node, 0), runs), (node, True)):  # the second is the control
        state = a_state(here)
        enqueue(state, gpu_task(user, team), [1])
        assert bool(plan(state, NOW).places) is expected
        assert (unfit(here, gpu_task(user, team)) is None) is expected


def test_a_stranger_gets_the_tested_gpu_of_a_node_and_its_processors_whatever_else_it_has() -> None:
    node = untested(a_node(1, 8, 2, owner=ADA), 0)
    state = a_state(node)
    enqueue(state, gpu_task(EVE), [1])
    enqueue(state, a_shape(EVE), [2])
    places = plan(state, NOW).places
    assert {grant.task for place in places for grant in place.grants} == {1, 2}
    assert [part.gpu_index for place in places for part in place.allocation.slices] == [1]
    assert unfit(node, gpu_task(EVE, spec="2")) is not None
    assert unfit(node, gpu_task(ADA, spec="2")) is None


def test_two_owners_nodes_that_are_alike_are_told_apart() -> None:
    nodes = [
        untested(a_node(1, 8, 1, owner=EVE), 0),
        untested(a_node(2, 8, 1, owner=ADA), 0),
    ]
    state = a_state(*nodes)
    enqueue(state, gpu_task(ADA), [1])
    [place] = plan(state, NOW).places
    assert place.node == 2
    enqueue(state, gpu_task(EVE), [2])
    assert {place.node for place in plan(state, NOW).places} == {1, 2}


def test_no_running_task_is_stopped_for_a_stranger_to_an_untested_gpu() -> None:
    later = Instant(NOW + 3600 * SECOND)
    for node, stopped in ((untested(a_node(1, 4, 1, owner=ADA), 0), 0), (a_node(1, 4, 1), 1)):
        state = a_state(node)
        enqueue(state, replace(gpu_task(node.owner), preemptible=True), [1])
        for place in plan(state, NOW).places:
            state.fold(place.leased(tuple(grant.task for grant in place.grants), NOW))
        enqueue(state, gpu_task(EVE), [2], later)
        assert len(plan(state, later).preemptions) == stopped


def test_a_stranger_reads_why_an_untested_gpu_takes_nothing_of_theirs() -> None:
    state = a_state(untested(a_node(1, 4, 1, owner=ADA), 0))
    enqueue(state, gpu_task(EVE), [1])
    told = explain(state, TaskId(1), NOW, Policy(order="fcfs"))
    assert told.code == "untested"
    assert "never run on their kind" in told.sentence
    assert "GPOOL_AGENT_LEND_UNTESTED" in told.sentence


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, pricing=st.sampled_from(PRICINGS))
def test_the_index_answers_as_a_look_at_every_node_where_some_gpus_are_untested(
    steps: list[tuple[Any, ...]], pricing: Any
) -> None:
    def put(node: Node) -> Node:
        return untested(replace(node, owner=UserId(1 + node.id % 3)), 0, 2)

    for state, shape in questions(steps, SHAPES, pricing, put):
        index = index_of(state, pricing)
        found = asked(index, shape)
        assert found == asked_anew(state, shape, index)
        open_to_it = places_by_looking(state, shape)
        assert any(found) == bool(open_to_it)
        first = next(filter(None, found), None)
        assert first is None or first[0] in open_to_it  # type: ignore[index]

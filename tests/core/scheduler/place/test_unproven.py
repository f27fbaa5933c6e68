"""GPUs that have not proved what they claim serve their owner, the owner's teams and tasks that name the owner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.ids import TaskId, UserId
from gpool.core.model import Node, Owners, Shape
from gpool.core.scheduler.explain.waiting import explain
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.place.fit import unfit
from tests.core.scheduler.place.test_index import (
    PRICINGS,
    SHAPES,
    STEPS,
    asked,
    asked_anew,
    places_by_looking,
    questions,
)
from tests.core.scheduler.place.test_untested import ADA, CLUB, EVE, LAB, gpu_task, untested
from tests.core.scheduler.state.builders import (
    NOW,
    a_node,
    a_shape,
    a_state,
    enqueue,
    index_of,
    plan,
)

NAMED = Owners("user:ada", users=(int(ADA),))
OF_TEAM = Owners("team:lab", teams=(LAB,))
OTHERS = Owners("user:eve", users=(int(EVE),))


def unproven(node: Node, *indexes: int) -> Node:
    return replace(node, gpus_unproven=frozenset(indexes))


def on(shape: Shape, owners: Owners | None) -> Shape:
    return replace(shape, requirements=replace(shape.requirements, on=owners))


@pytest.mark.parametrize(
    ("user", "team", "named", "runs"),
    [
        (ADA, None, None, True),
        (EVE, LAB, None, True),
        (EVE, None, NAMED, True),
        (EVE, None, OF_TEAM, True),
        (EVE, CLUB, None, False),
        (EVE, None, None, False),
        (EVE, None, OTHERS, False),
    ],
)
def test_who_gets_an_unproven_gpu(
    user: UserId, team: int | None, named: Owners | None, runs: bool
) -> None:
    node, shape = a_node(1, 8, 1, owner=ADA, owner_teams=frozenset({LAB})), gpu_task(user, team)
    for here, expected in ((unproven(node, 0), runs), (node, named is not OTHERS)):  # the control
        state = a_state(here)
        enqueue(state, on(shape, named), [1])
        assert bool(plan(state, NOW).places) is expected
        assert (unfit(here, on(shape, named)) is None) is expected


def test_naming_the_owner_does_not_lend_an_untested_gpu() -> None:
    node = unproven(untested(a_node(1, 8, 1, owner=ADA), 0), 0)
    assert unfit(node, on(gpu_task(EVE), NAMED)) is not None


def test_a_stranger_gets_the_proven_gpu_of_a_node_and_its_processors() -> None:
    state = a_state(unproven(a_node(1, 8, 2, owner=ADA), 0))
    enqueue(state, gpu_task(EVE), [1])
    enqueue(state, a_shape(EVE), [2])
    places = plan(state, NOW).places
    assert {grant.task for place in places for grant in place.grants} == {1, 2}
    assert [part.gpu_index for place in places for part in place.allocation.slices] == [1]


def test_a_stranger_reads_why_an_unproven_gpu_takes_nothing_of_theirs() -> None:
    state = a_state(unproven(a_node(1, 4, 1, owner=ADA), 0))
    enqueue(state, gpu_task(EVE), [1])
    told = explain(state, TaskId(1), NOW, Policy(order="fcfs"))
    assert told.code == "unproven"
    assert "--on user:NAME" in told.sentence


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, pricing=st.sampled_from(PRICINGS), named=st.sampled_from([None, NAMED]))
def test_the_index_answers_as_a_look_at_every_node_where_some_gpus_are_unproven(
    steps: list[tuple[Any, ...]], pricing: Any, named: Owners | None
) -> None:
    def put(node: Node) -> Node:
        return unproven(replace(node, owner=UserId(1 + node.id % 3)), 0, 2)

    shapes = [on(shape, named) for shape in SHAPES]
    for state, shape in questions(steps, shapes, pricing, put):
        index = index_of(state, pricing)
        found = asked(index, shape)
        assert found == asked_anew(state, shape, index)
        open_to_it = places_by_looking(state, shape)
        assert any(found) == bool(open_to_it)
        first = next(filter(None, found), None)
        assert first is None or first[0] in open_to_it  # type: ignore[index]

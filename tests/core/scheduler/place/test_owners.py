"""Tasks that accept some owners only: the index, which does not tell owners apart by kind, keeps them off other nodes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from gpool.core.ids import NodeId, UserId
from gpool.core.model import SECOND, Instant, Node, Owners, Shape
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.passes.plan import DEFAULT
from gpool.core.scheduler.place.fit import Unfit, unfit
from gpool.core.scheduler.place.gangs import is_possible
from gpool.core.scheduler.place.kinds import OwnerSlots
from gpool.core.scheduler.state.events import NodeChanged, TasksReleased
from gpool.core.scheduler.state.state import State
from gpool.core.specs import gpu as gpuspec
from tests.core.scheduler.place.test_plain_placement import MORE, WEIGHED, assert_alike, priced
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

LAB, CLUB = 501, 502
ADA, BOB, EVE = UserId(1), UserId(2), UserId(3)
ME = Owners("me", (ADA,))
OUR_LAB = Owners("team:lab", (), (LAB,))


def of(node: Node, owner: UserId, *teams: int) -> Node:
    return replace(node, owner=owner, owner_teams=frozenset(teams))


def accepting(shape: Shape, on: Owners | None) -> Shape:
    return replace(shape, requirements=replace(shape.requirements, on=on))


def started(state: State, policy: Policy = DEFAULT) -> dict[int, NodeId]:
    """Node of each task that one pass starts."""
    found = plan(state, NOW, policy)
    return {grant.task: place.node for place in found.places for grant in place.grants}


@pytest.mark.parametrize(
    ("on", "accepted"),
    [
        (ME, {1}),
        (OUR_LAB, {2, 3}),
        (Owners("me,team:club", (ADA,), (CLUB,)), {1, 3}),
        (Owners("user:eve", (EVE,)), {4}),
        (None, {1, 2, 3, 4}),
    ],
)
def test_a_node_is_accepted_by_its_owner_and_the_owners_teams(
    on: Owners | None, accepted: set[int]
) -> None:
    nodes = (
        of(a_node(1), ADA),
        of(a_node(2), BOB, LAB),
        of(a_node(3), BOB, LAB, CLUB),
        of(a_node(4), EVE),
    )
    shape = a_shape(ADA, on=on)
    assert {node.id for node in nodes if unfit(node, shape) is None} == accepted
    assert all(unfit(node, shape) is Unfit.OWNER for node in nodes if node.id not in accepted)


def test_a_task_waits_beside_a_strangers_idle_node_and_one_that_accepts_anyone_starts() -> None:
    state = a_state(of(a_node(1, 8, 2), EVE))
    enqueue(state, a_shape(ADA, "mine", gpu=gpuspec.parse("1"), on=ME), [1])
    assert started(state) == {}
    enqueue(state, a_shape(ADA, "anyones", gpu=gpuspec.parse("1")), [2])
    assert started(state) == {2: 1}


def test_membership_counts_when_the_pass_is_planned() -> None:
    outside, inside = of(a_node(1), BOB), of(a_node(1), BOB, LAB)
    state = a_state(outside)
    enqueue(state, a_shape(ADA, on=OUR_LAB), [1])
    assert started(state) == {}
    state.fold(NodeChanged(inside))
    assert started(state) == {1: 1}
    state.fold(NodeChanged(outside))
    assert started(state) == {}


def test_a_gang_takes_accepted_nodes_only_and_waits_where_they_are_too_few() -> None:
    nodes = [
        of(a_node(number, 4, 1), BOB, *((LAB,) if number > 2 else ())) for number in range(1, 6)
    ]
    state = a_state(*nodes)
    gang = a_shape(ADA, "gang", gpu=gpuspec.parse("1"), nodes=3, on=OUR_LAB)
    enqueue(state, gang, [1])
    [place] = plan(state, NOW).places
    assert {place.node, *(member.node for member in place.members)} == {3, 4, 5}
    four = accepting(a_shape(ADA, "four", gpu=gpuspec.parse("1"), nodes=4), OUR_LAB)
    assert not is_possible(index_of(state), four)
    assert is_possible(index_of(state), accepting(four, None))


def test_no_running_task_is_stopped_for_one_that_does_not_accept_the_owner() -> None:
    state, later = a_state(of(a_node(1, 4, 1), EVE)), Instant(NOW + 3600 * SECOND)
    running = replace(a_shape(EVE, "long", gpu=gpuspec.parse("1")), preemptible=True)
    enqueue(state, running, [1])
    for place in plan(state, NOW).places:
        state.fold(place.leased(tuple(grant.task for grant in place.grants), NOW))
    fresh = a_shape(ADA, "fresh", gpu=gpuspec.parse("1"))
    enqueue(state, accepting(fresh, ME), [2], later)
    assert plan(state, later).preemptions == ()
    enqueue(state, fresh, [3], later)
    assert [each.beneficiary for each in plan(state, later).preemptions] == [3]


@pytest.mark.parametrize("seed", range(3))
def test_the_engine_finds_what_plain_rules_find_among_owners_that_change(seed: int) -> None:
    random = Random(seed)
    pricing = WEIGHED[seed + 1]
    kinds = [(8, 4), (16, 2), (12, 0), (2, 1)]
    owners = [None, ME, OUR_LAB, Owners("me,team:club", (ADA,), (CLUB,)), Owners("user:x", (77,))]
    nodes = [
        of(
            priced(a_node(number, *random.choice(kinds)), random.randrange(12)),
            random.choice((ADA, BOB, EVE)),
            *random.sample((LAB, CLUB), random.randrange(3)),
        )
        for number in range(1, 321)
    ]
    shapes = [accepting(shape, on) for shape in MORE for on in owners]
    policy, state = Policy(order="fcfs", pricing=pricing), a_state(*nodes)
    for number in range(1, 91):
        shape = random.choice(shapes)
        if number % 4 == 0:
            assert_alike(state, shape, pricing)
        enqueue(state, shape, range(number * 100, number * 100 + random.choice((1, 1, 8, 30))))
        found = plan(state, NOW, policy)
        for place in found.places:
            node = state.nodes[place.node].node
            assert node is not None
            assert unfit(node, place.shape) is None
        apply(state, found)
        if number % 3 == 0 and state.held:
            ended = random.sample(sorted(state.held), min(5, len(state.held)))
            state.fold(TasksReleased(tuple(ended)))
        changed = [random.choice(nodes)] if number % 5 else random.sample(nodes, 20)
        for node in changed:
            state.fold(NodeChanged(of(node, node.owner, *random.sample((LAB, CLUB), 1))))
    for shape in random.sample(shapes, 20):
        assert_alike(state, shape, pricing)


def test_owners_change_no_plan_of_tasks_that_accept_anyone() -> None:
    random = Random(7)
    kinds = [random.choice([(8, 4), (16, 2), (12, 0)]) for _ in range(60)]
    alike = a_state(*(a_node(number, *kind) for number, kind in enumerate(kinds, 1)))
    owned = a_state(
        *(
            of(a_node(number, *kind), UserId(number), LAB + number % 3)
            for number, kind in enumerate(kinds, 1)
        )
    )
    for state in (alike, owned):
        for number, shape in enumerate(MORE):
            enqueue(state, shape, range(number * 10, number * 10 + 7))
    assert started(alike) == started(owned)
    assert index_of(alike).board.kinds.size == index_of(owned).board.kinds.size


def test_slots_of_owners_follow_nodes_that_come_change_and_leave() -> None:
    slots = OwnerSlots()

    def of_owners(*users: int, teams: tuple[int, ...] = ()) -> list[int]:
        found: list[int] = slots.mask(Owners("", users, teams), 8).nonzero()[0].tolist()
        return found

    slots.put(4, of(a_node(1), BOB, LAB))
    slots.put(2, of(a_node(2), BOB))
    assert of_owners(BOB) == [2, 4]
    assert of_owners(teams=(LAB,)) == [4]
    slots.put(4, of(a_node(1), BOB, CLUB))
    assert of_owners(teams=(LAB,)) == []
    slots.put(2, of(a_node(3), EVE, CLUB))
    slots.remove(4)
    assert of_owners(BOB, EVE, teams=(CLUB,)) == [2]
    assert of_owners(BOB) == []

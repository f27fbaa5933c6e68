"""The index always finds what a look at every node would, by looking at few; names never decide."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import GIB, SECOND, Audience, Availability, Merit, Node, Shape, Span, Tier
from gpool.core.scheduler.order.limits import GpuLimits
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.passes import plan as passes
from gpool.core.scheduler.place.fit import fit, is_open, unfit
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.place.kinds import MAX_GPUS
from gpool.core.scheduler.place.pricing import USUAL, Pricing, Weights, price
from gpool.core.scheduler.state.events import (
    MAX_LOGGED,
    NodeChanged,
    NodeChanges,
    NodeRemoved,
    TasksReleased,
)
from gpool.core.scheduler.state.state import State
from gpool.core.specs import gpu
from tests.core.scheduler.state.builders import (
    NOW,
    OWNER,
    a_node,
    a_shape,
    a_state,
    apply,
    enqueue,
    index_of,
    plan,
)

H100, T4, A10G = "NVIDIA H100 80GB HBM3", "Tesla T4", "NVIDIA A10G"


def wanting(spec: str, user: int = 1, **more: Any) -> Shape:
    return a_shape(user, gpu=gpu.parse(spec), **more)


BY_GPUS = {"cpu_by_gpus": True, "memory_by_gpus": True}
SHAPES = [
    a_shape(),
    a_shape(2, cpu_milli=3000, memory_bytes=3 * GIB),
    a_shape(99, tier=Tier.NONE),
    a_shape(1, environment="torch"),
    wanting("1"),
    wanting("2", 2),
    wanting("4"),
    wanting("0.3"),
    wanting("0.3", 2),
    wanting("0.7", 2, cpu_milli=2000),
    wanting("vram=6GB"),
    wanting("vram=30GB,0.5", 2),
    wanting("H100,T4"),
    wanting("80GB,1", 3),
    wanting("1", 3, **BY_GPUS),
    wanting("2", cpu_by_gpus=True, memory_bytes=GIB),
    wanting("0.3", 2, **BY_GPUS),
    wanting("vram=6GB", **BY_GPUS),
    wanting("H100,T4", 2, memory_by_gpus=True),
]
PRICINGS = [
    USUAL,
    price([(shape.requirements, 1 + place) for place, shape in enumerate(SHAPES)]),
    price([(shape.requirements, 1) for shape in SHAPES], Weights(step=1)),
    price([], Weights(0, 0, 0)),
]
NODES = st.builds(
    lambda number, cpus, gpus, more: a_node(number, cpus, gpus, **more),
    st.integers(1, 12),
    st.integers(0, 12),
    st.one_of(
        st.integers(0, 4),
        st.lists(st.sampled_from([H100, T4, A10G]), max_size=5).map(tuple),
    ),
    st.sampled_from(
        [
            {},
            {},
            {"gpus_withheld": frozenset({0})},
            {"connected": False},
            {"availability": Availability.PAUSED},
            {"audience": Audience(frozenset({2}))},
            {"tiers": frozenset({Tier.NONE, Tier.CONTAINER})},
        ]
    ),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("node"), NODES),
        st.tuples(st.just("gone"), st.integers(1, 12)),
        st.tuples(st.just("come"), st.sampled_from(SHAPES), st.integers(1, 3)),
        st.tuples(st.just("end"), st.integers(0, 50)),
        st.tuples(st.just("ask"), st.sampled_from(SHAPES)),
    ),
    min_size=4,
    max_size=40,
)


def asked(index: PlacementIndex, shape: Shape) -> list[object]:
    turns = range(len(shape.requirements.gpu) or 1)
    return [index.best(shape, turn, ()) for turn in turns]


def asked_anew(state: State, shape: Shape, index: PlacementIndex) -> list[object]:
    fresh = PlacementIndex()
    fresh.follow(state, index.pricing)
    return asked(fresh, shape)


def places_by_looking(state: State, shape: Shape) -> list[int]:
    nodes = [entry.node for entry in state.nodes.values() if entry.node is not None]
    return [
        node.id
        for node in nodes
        if is_open(node)
        and unfit(node, shape) is None
        and fit(node, state.nodes[node.id].room, shape) is not None
    ]


def questions(
    steps: list[tuple[Any, ...]],
    last: list[Shape],
    pricing: Pricing,
    put: Callable[[Node], Node] = lambda node: node,
) -> Iterator[tuple[State, Shape]]:
    """Lives through the steps; at each question, and for the `last` ones, the state as it then is. Nodes come as `put` makes them."""
    policy = Policy(order="fcfs", pricing=pricing)
    state, ids = a_state(a_node(1, 8, 2), a_node(2, 12, 4)), 0
    for step in [*steps, *(("ask", shape) for shape in last)]:
        match step:
            case ("node", Node() as node):
                state.fold(NodeChanged(put(node)))
            case ("gone", int(number)):
                state.fold(NodeRemoved(NodeId(number)))
            case ("come", Shape() as shape, int(count)):
                enqueue(state, shape, range(ids + 1, ids + count + 1))
                ids += count
                apply(state, plan(state, NOW, policy))
            case ("end", int(number)):
                held = sorted(state.held)
                if held:
                    state.fold(TasksReleased((held[number % len(held)],)))
            case (_, Shape() as shape):
                yield state, shape


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, pricing=st.sampled_from(PRICINGS))
def test_a_followed_index_always_answers_as_a_new_one_and_as_a_look_at_every_node(
    steps: list[tuple[Any, ...]], pricing: Pricing
) -> None:
    for state, shape in questions(steps, SHAPES, pricing):
        index = index_of(state, pricing)
        found = asked(index, shape)
        assert found == asked_anew(state, shape, index)
        open_to_it = places_by_looking(state, shape)
        assert any(found) == bool(open_to_it)
        first = next(filter(None, found), None)
        assert first is None or first[0] in open_to_it  # type: ignore[index]


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, pricing=st.sampled_from(PRICINGS))
def test_a_fresh_index_always_gives_the_same_plan(
    steps: list[tuple[Any, ...]], pricing: Pricing
) -> None:
    policy = Policy(order="fcfs", pricing=pricing)
    for number, (state, shape) in enumerate(questions(steps, SHAPES, pricing)):
        enqueue(state, shape, [10**6 + number])
        decided = plan(state, NOW, policy)
        assert decided == passes.plan(state, PlacementIndex(), NOW, policy)


def test_a_log_that_dropped_changes_tells_those_who_have_not_read_them() -> None:
    changes, node = NodeChanges(), NodeId(1)
    changes.note(node)
    read = changes.last
    for number in range(MAX_LOGGED + 1):
        changes.note(NodeId(number))
    assert changes.is_complete_since(changes.last)
    assert not changes.is_complete_since(read)


@settings(max_examples=60, deadline=None)
@given(
    nodes=st.lists(NODES, min_size=2, max_size=8),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=12),
    pricing=st.sampled_from(PRICINGS),
    names=st.randoms(use_true_random=False),
)
def test_the_names_of_nodes_and_the_order_they_came_in_never_decide(
    nodes: list[Node], shapes: list[Shape], pricing: Any, names: Any
) -> None:
    def placed(nodes: list[Node]) -> list[tuple[int, int]]:
        state, answer = a_state(*nodes), []
        for number, shape in enumerate(shapes):
            enqueue(state, shape, [number + 1])
            decided = plan(state, NOW, Policy(order="fcfs", pricing=pricing))
            apply(state, decided)
            answer += [(p.node, p.grants[0].task) for p in decided.places]
        return answer

    unlike = list({node.id: node for node in nodes}.values())
    renamed = [replace(node, name=f"{names.random()}") for node in unlike]
    names.shuffle(renamed)
    assert placed(unlike) == placed(renamed)


@pytest.mark.parametrize("count", [40, 400])
def test_a_decision_never_looks_at_every_node_again(count: int) -> None:
    """Two shapes in turn: each looks once at all nodes, then only at those the other has changed."""
    state = a_state(*(a_node(n, 8, 4) for n in range(1, count + 1)))
    shapes = [wanting("1"), wanting("0.5")]
    for number, shape in enumerate(shapes):
        enqueue(state, shape, [number + 1])
        apply(state, plan(state, NOW))
    index = index_of(state)
    before = index.scored
    for number in range(10, 50):
        enqueue(state, shapes[number % 2], [number])
        assert apply(state, plan(state, NOW)) == [number]
    assert index.scored - before <= 40 * 4


def test_a_plan_that_was_not_written_leaves_no_trace() -> None:
    state = a_state(a_node(1, 8, 2), a_node(2, 8, 2))
    enqueue(state, wanting("1"), range(1, 5))
    first = plan(state, NOW)
    assert len(first.places) == 4
    assert plan(state, NOW) == first
    assert asked(index_of(state), wanting("2")) != [None]


def test_an_environment_that_lies_ready_is_preferred_to_one_that_must_be_made() -> None:
    environment = "pip:1234"
    bare, ready = a_node(1, 4), a_node(2, 8)
    bare = replace(bare, offer=replace(bare.offer, builds=frozenset({"pip"})))
    ready = replace(
        ready,
        offer=replace(
            ready.offer, environments=frozenset({environment}), builds=frozenset({"pip"})
        ),
    )
    state = a_state(bare, ready)
    enqueue(state, a_shape(environment=environment), [1])
    assert plan(state, NOW).places[0].node == 2


def test_cpu_tasks_leave_nodes_with_gpus_alone_even_when_all_those_are_busy() -> None:
    state = a_state(a_node(1, 8, 1), a_node(2, 16))
    enqueue(state, wanting("1"), [1])
    assert apply(state, plan(state, NOW)) == [1]
    enqueue(state, a_shape(), range(2, 12))
    assert {place.node for place in plan(state, NOW).places} == {2}


def test_a_node_that_costs_time_comes_after_one_that_does_not() -> None:
    state = a_state(a_node(1, 4), a_node(2, 8))
    enqueue(state, a_shape(), [1])
    assert plan(state, NOW).places[0].node == 1
    state.fold(NodeChanged(a_node(1, 4, merit=Merit(mtbf=Span(3600 * SECOND)))))
    assert plan(state, NOW).places[0].node == 2


def test_a_node_for_few_is_never_given_to_others_even_when_it_comes_late() -> None:
    state, mine, other = a_state(), wanting("1", 2), wanting("1", 1)
    enqueue(state, other, [1])
    enqueue(state, mine, [2])
    assert plan(state, NOW).places == ()
    state.fold(NodeChanged(a_node(1, 4, 2, audience=Audience(frozenset({2})))))
    assert apply(state, plan(state, NOW)) == [2]
    enqueue(state, a_shape(OWNER, gpu=gpu.parse("1")), [3])
    assert apply(state, plan(state, NOW)) == [3]


def test_offers_that_change_all_day_do_not_pile_up() -> None:
    state = a_state(a_node(1, 4, 1))
    for number in range(1000):
        node = a_node(1, 4, 1)
        offer = replace(node.offer, environments=frozenset({"default", f"pip:{number}"}))
        state.fold(NodeChanged(replace(node, offer=offer)))
        enqueue(state, wanting("0.1"), [number + 1])
        leased = apply(state, plan(state, NOW))
        assert leased == [number + 1]
        state.fold(TasksReleased(tuple(TaskId(id_) for id_ in leased)))
    assert len(index_of(state).board.kinds.nodes) < 100


def test_what_kinds_of_nodes_mean_is_learnt_anew_when_kinds_are_numbered_anew() -> None:
    shape = a_shape(python="3.11")
    state = a_state(a_node(1, 4))
    index = index_of(state)
    assert index.would_fit(shape, index.free()).any()
    for number in range(100):
        node = a_node(1, 4, pythons=frozenset({"3.9"}))
        offer = replace(node.offer, labels=frozenset({f"number={number}"}))
        state.fold(NodeChanged(replace(node, offer=offer)))
        index.follow(state, USUAL)
        if len(index.board.kinds.nodes) == 2:
            assert not index.would_fit(shape, index.free()).any()
            return
    raise AssertionError("kinds were never numbered anew")


def test_users_who_want_the_same_slices_learn_once_what_the_nodes_are() -> None:
    """What each may join is their own; which nodes could run it is everybody's."""
    state = a_state(*(a_node(n, 8 + n, 2) for n in range(1, 31)))
    for user in range(1, 40):
        enqueue(state, wanting("0.4", user), [user])
    assert len(apply(state, plan(state, NOW))) == 39
    index = index_of(state)
    assert {asked(index, wanting("0.4", user))[0] for user in (1, 2, 50)} == {
        asked_anew(state, wanting("0.4", user), index)[0] for user in (1, 2, 50)
    }
    state.fold(NodeChanged(a_node(31, 64, 8, audience=Audience(frozenset({2})))))
    for user in (1, 2, 50):
        found = asked(index, wanting("0.4", user))
        assert found == asked_anew(state, wanting("0.4", user), index)


def test_one_node_with_a_thousand_gpus_does_not_widen_all_others() -> None:
    state = a_state(a_node(1, 2000, 1000), a_node(2, 4, 1))
    enqueue(state, wanting("1"), range(1, 200))
    assert len(apply(state, plan(state, NOW))) == MAX_GPUS + 1
    assert index_of(state).board.columns.width == MAX_GPUS


def test_the_board_grows_with_the_pool_and_takes_places_that_became_free() -> None:
    state = a_state(a_node(1, 1))
    plan(state, NOW)
    for number in range(2, 300):
        state.fold(NodeChanged(a_node(number, 1)))
    enqueue(state, a_shape(), range(1, 400))
    assert len(apply(state, plan(state, NOW))) == 299
    for number in range(1, 300):
        state.fold(NodeRemoved(NodeId(number)))
        state.fold(NodeChanged(a_node(1000 + number, 1)))
    assert len(apply(state, plan(state, NOW))) == 100
    assert len(index_of(state).board.nodes) <= 600


def test_rows_are_shared_by_users_who_may_use_the_same() -> None:
    state = a_state(*(a_node(n, 8, 4) for n in range(1, 101)))
    for user in range(1, 50):
        enqueue(state, wanting("1", user), [user])
    apply(state, plan(state, NOW))
    assert index_of(state).scored < 100 + 49 * 3


def test_a_slice_of_memory_never_takes_a_user_past_a_limit_and_finds_the_card_that_does_not() -> (
    None
):
    """A third of an A10G is over the limit of 0.2; of an H100 the same memory is less."""
    state = a_state(a_node(1, 4, (A10G,)), a_node(2, 64, (H100,) * 4))
    enqueue(state, wanting("vram=8GB"), [1])
    limits = GpuLimits(user_milli=200)
    places = plan(state, NOW, Policy(limits=limits)).places
    assert [place.node for place in places] == [2]


def test_who_only_asks_or_lends_never_needs_numpy() -> None:
    """It belongs to the server's extra."""
    names = "gpool.client, gpool.agent.daemon, gpool.cli.main, gpool.wire.frames"
    said = f"import sys, {names}; print('numpy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"

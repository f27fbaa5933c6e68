"""A task that could not be started somewhere goes elsewhere first; where nothing else would do, it goes there again."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import (
    SECOND,
    Allocation,
    Availability,
    GpuRequest,
    Instant,
    Node,
    Shape,
    Slice,
)
from gpool.core.scheduler.explain.waiting import explain
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.place.fit import is_open, unfit
from gpool.core.scheduler.state.events import Leased, QueuedTask, TasksLeased
from gpool.core.scheduler.state.state import State, build
from tests.core.scheduler.state.builders import (
    NOW,
    a_gpu,
    a_node,
    a_shape,
    a_state,
    apply,
    enqueue,
    hold,
    plan,
)

POLICIES = st.sampled_from([Policy(order=name) for name in sorted(ORDERS)])


@st.composite
def pools(draw: st.DrawFn) -> list[Node]:
    made = []
    for number in range(1, draw(st.integers(1, 6)) + 1):
        node = a_node(number, cpus=draw(st.sampled_from([1, 2, 8])))
        made.append(
            replace(
                node,
                connected=draw(st.booleans()) or draw(st.booleans()),
                availability=draw(
                    st.sampled_from([*[Availability.AVAILABLE] * 3, Availability.PAUSED])
                ),
                resting=draw(st.sampled_from(["", "", "says so"])),
            )
        )
    return made


def avoiding(shape: Shape, *nodes: int) -> Shape:
    return replace(shape, avoids=tuple(NodeId(node) for node in nodes))


@given(pools(), st.sets(st.integers(1, 6)), st.integers(1, 4), POLICIES)
def test_it_never_goes_where_it_failed_while_another_node_would_do(
    nodes: list[Node], avoided: set[int], cpus: int, policy: Policy
) -> None:
    state = a_state(*nodes)
    shape = avoiding(a_shape(cpu_milli=1000 * cpus), *sorted(avoided))
    enqueue(state, shape, range(1, 5))
    able = {node.id for node in nodes if is_open(node) and unfit(node, shape) is None}
    elsewhere = able - {NodeId(each) for each in avoided}
    places = plan(state, NOW, policy).places
    assert bool(places) == bool(able)
    assert {place.node for place in places} <= (elsewhere or able)


@given(pools(), st.sets(st.integers(1, 6)))
def test_it_waits_for_a_busy_node_rather_than_go_back(nodes: list[Node], avoided: set[int]) -> None:
    state = a_state(*nodes)
    for node in nodes:
        if node.id not in avoided:
            whole = Allocation(0, node.offer.cpu_milli, node.offer.memory_bytes)
            hold(state, a_shape(9, "other"), node.id, whole, 1000 + node.id)
    shape = avoiding(a_shape(), *sorted(avoided))
    enqueue(state, shape, [1])
    busy = [node for node in nodes if is_open(node) and node.id not in avoided]
    if busy:
        assert plan(state, NOW).places == ()
        assert "busy" in explain(state, TaskId(1), NOW).code


def test_gangs_avoid_too_while_a_site_has_enough_others() -> None:
    nodes = [a_node(number) for number in (1, 2, 3)]
    state = a_state(*nodes)
    enqueue(state, avoiding(a_shape(nodes=2), 1), [1])
    (place,) = plan(state, NOW).places
    assert {place.node, *(part.node for part in place.members)} == {2, 3}
    state = a_state(*nodes)
    enqueue(state, avoiding(a_shape(nodes=2), 1, 2), [1])
    assert len(plan(state, NOW).places) == 1  # two others there are not


def test_others_of_its_kind_still_go_there_and_once_it_runs_nothing_is_avoided() -> None:
    state = a_state(a_node(1, cpus=1), a_node(2, cpus=1))
    enqueue(state, avoiding(a_shape(), 1), [1])
    enqueue(state, a_shape(), [2])
    assert sorted(apply(state, plan(state, NOW))) == [1, 2]
    assert state.held[TaskId(1)].node == 2
    assert state.held[TaskId(2)].node == 1
    assert {line.shape for line in state.held.values()} == {a_shape()}


def test_what_is_avoided_is_a_hint_and_no_part_of_the_truth() -> None:
    task = QueuedTask(TaskId(1), 1, NOW)
    one = build([a_node(1)], [(avoiding(a_shape(), 1), task)], [])
    other = build([a_node(1)], [(a_shape(), task)], [])
    assert one == other
    assert isinstance(one, State)


def test_nothing_is_stopped_for_it_where_it_would_not_start_though_it_is_for_others() -> None:
    """The first node is cleared for its like; the other one would do, and may not be cleared."""
    state, now = a_state(a_node(1, gpus=2), a_node(2, gpus=2)), Instant(NOW + 3600 * SECOND)
    one = a_shape(1, cpu_milli=100, memory_bytes=1, gpu=(GpuRequest(),))
    for node, preemptible in ((1, True), (2, False)):
        for index in (0, 1):
            part = Allocation(index, 100, 1, (Slice(index, a_gpu().memory_bytes, 1000),))
            task = TaskId(10 * node + index)
            leases = (Leased(1, NOW),) if preemptible else ()
            shape = replace(one, preemptible=preemptible)
            state.fold(TasksLeased(NodeId(node), part, shape, (task,), (), NOW, leases))
    mine = replace(one, user=UserId(2))
    enqueue(state, mine, [1], now - 1)
    enqueue(state, avoiding(mine, 1), [2], now)
    stopped = plan(state, now).preemptions
    assert [each.beneficiary for each in stopped] == [1]

"""The folded state always equals the rebuilt one, whatever happens in whatever order."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import (
    GIB,
    Allocation,
    Availability,
    GpuRequest,
    Instant,
    Node,
    Shape,
    Slice,
    Span,
)
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.state.events import (
    NodeChanged,
    NodeRemoved,
    Placement,
    QueuedTask,
    RunTimesObserved,
    TasksLeased,
    TasksQueued,
    TasksReleased,
    TasksWithdrawn,
)
from gpool.core.scheduler.state.state import Contradiction, State, build
from tests.core.scheduler.state.builders import a_node, a_shape, plan, queued

SHAPES = [
    a_shape(1),
    a_shape(1, "g", gpu=(GpuRequest(),)),
    a_shape(1, gpu=(GpuRequest(share_milli=200),)),
    a_shape(2, gpu=(GpuRequest(share_milli=300),)),
    a_shape(2, "h", gpu=(GpuRequest(vram_bytes=5 * GIB), GpuRequest(count=2))),
    a_shape(3, cpu_milli=2500, memory_bytes=3 * GIB),
    a_shape(3, "i", gpu=(GpuRequest(count=2),)),
    replace(a_shape(3, "j", gpu=(GpuRequest(),)), team=7),
    replace(a_shape(1, "j", gpu=(GpuRequest(share_milli=500),)), team=7),
]
POLICIES = [
    Policy(order=order, max_prefetch=7, max_places_per_pass=places)
    for order in ("fcfs", "round_robin", "priority")
    for places in (2, 100)
]


class Life(RuleBasedStateMachine):
    """A scheduler's life beside a plain record of what is so, from which the state can be rebuilt."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State()
        self.nodes: dict[NodeId, Node] = {}
        self.queued: dict[TaskId, tuple[Shape, QueuedTask]] = {}
        self.held: dict[TaskId, tuple[NodeId, Allocation, Shape, int]] = {}
        self.ids = 0
        self.now = 1000

    @initialize()
    def first_nodes(self) -> None:
        for node in (a_node(1, cpus=6), a_node(2, cpus=12, gpus=3)):
            self.change(node)

    def change(self, node: Node) -> None:
        self.nodes[node.id] = node
        self.state.fold(NodeChanged(node))

    @rule(
        number=st.integers(1, 3),
        cpus=st.integers(0, 12),
        gpus=st.integers(0, 3),
        availability=st.sampled_from([Availability.AVAILABLE] * 4 + list(Availability)),
        connected=st.sampled_from([True, True, True, False]),
    )
    def node_changes(
        self, number: int, cpus: int, gpus: int, availability: Availability, connected: bool
    ) -> None:
        self.change(a_node(number, cpus, gpus, availability=availability, connected=connected))

    @rule(number=st.integers(1, 3))
    def node_goes(self, number: int) -> None:
        self.nodes.pop(NodeId(number), None)
        self.state.fold(NodeRemoved(NodeId(number)))

    @rule(shape=st.sampled_from(SHAPES), count=st.integers(1, 5), back=st.integers(0, 5))
    def tasks_come(self, shape: Shape, count: int, back: int) -> None:
        tasks = []
        for _ in range(count):
            self.ids += 1
            tasks.append(QueuedTask(TaskId(self.ids), 0, Instant(self.now - back)))
        self.now += 1
        self.queued |= {task.id: (shape, task) for task in tasks}
        self.state.fold(TasksQueued(shape, tuple(tasks)))

    @rule(data=st.data())
    @precondition(lambda self: self.queued)
    def tasks_are_cancelled(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(sorted(self.queued)), max_size=4))
        for task in gone:
            self.queued.pop(task, None)
        self.state.fold(TasksWithdrawn(tuple(gone)))

    @rule(data=st.data())
    @precondition(lambda self: self.queued)
    def tasks_leave_and_come_back_unleased(self, data: st.DataObject) -> None:
        back = data.draw(st.sets(st.sampled_from(sorted(self.queued)), min_size=1, max_size=3))
        self.state.fold(TasksWithdrawn(tuple(sorted(back))))
        for id_ in sorted(back):
            shape, task = self.queued[id_]
            self.state.fold(TasksQueued(shape, (task,)))

    @rule(policy=st.sampled_from(POLICIES), refused=st.sampled_from([0, 0, 0, 1, 2]))
    def a_plan_is_applied(self, policy: Policy, refused: int) -> None:
        before = self.state.truth()
        decided = plan(self.state, Instant(self.now), policy)
        assert self.state.truth() == before, "a plan never changes the state"
        assert plan(self.state, Instant(self.now), policy) == decided, "always the same plan"
        granted = [grant.task for place in decided.places for grant in place.grants]
        assert len(granted) == len(set(granted)), "a task is never granted twice"
        assert len(decided.places) <= policy.max_places_per_pass
        used = {(node, a.number): (a, shape) for node, a, shape, _ in self.held.values()}
        for place in decided.places:
            self.check(place, used)
        old = {(node, a.number) for node, a, _, _ in self.held.values()}
        for place in decided.places:
            written = place.grants[refused:]  # the store refused the first few
            for grant in written:
                del self.queued[grant.task]
                self.held[grant.task] = (place.node, place.allocation, place.shape, grant.epoch)
            ids = tuple(grant.task for grant in written)
            self.state.fold(TasksLeased(place.node, place.allocation, place.shape, ids))
            if ids and (place.node, place.allocation.number) not in old:
                self.nothing_of_it_is_lent_twice(place)

    def check(
        self, place: Placement, used: dict[tuple[NodeId, int], tuple[Allocation, Shape]]
    ) -> None:
        node, number = self.nodes[place.node], place.allocation.number
        assert node.connected
        assert node.availability is Availability.AVAILABLE
        if (node.id, number) in used:
            assert used[node.id, number] == (place.allocation, place.shape), "one line, one shape"
        else:
            assert all((node.id, n) in used for n in range(number)), "always the smallest free one"
            used[node.id, number] = (place.allocation, place.shape)
        for grant in place.grants:
            shape, task = self.queued[grant.task]
            assert shape == place.shape
            assert grant.epoch == task.epoch + 1

    def nothing_of_it_is_lent_twice(self, place: Placement) -> None:
        entry = self.state.nodes[place.node]
        assert entry.room.free_cpu >= 0
        assert entry.room.free_memory >= 0
        for part in place.allocation.slices:
            assert entry.room.gpus[part.gpu_index].free_memory >= 0
            assert entry.room.gpus[part.gpu_index].free_share >= 0

    @rule(data=st.data(), requeue=st.booleans())
    @precondition(lambda self: self.held)
    def leases_end(self, data: st.DataObject, requeue: bool) -> None:
        ended = data.draw(st.sets(st.sampled_from(sorted(self.held)), max_size=6))
        self.state.fold(TasksReleased(tuple(sorted(ended))))
        for id_ in sorted(ended):
            _, _, shape, epoch = self.held.pop(id_)
            if requeue:
                task = QueuedTask(id_, epoch, Instant(1000 + id_ % 7))
                self.queued[id_] = (shape, task)
                self.state.fold(TasksQueued(shape, (task,)))

    @rule(shape=st.sampled_from(SHAPES), mean=st.sampled_from([1_000, 100_000, 10_000_000]))
    def run_times_are_seen(self, shape: Shape, mean: int) -> None:
        self.state.fold(RunTimesObserved(shape, 3, Span(3 * mean)))

    @invariant()
    def the_folded_state_equals_the_rebuilt_one(self) -> None:
        rebuilt = build(
            self.nodes.values(),
            reversed(self.queued.values()),
            ((node, a, shape, id_) for id_, (node, a, shape, _) in self.held.items()),
        )
        assert self.state == rebuilt
        assert self.state.queued_count == len(self.queued)

    @invariant()
    def strangers_never_share_a_gpu(self) -> None:
        users: dict[tuple[NodeId, int], set[UserId]] = {}
        for node, allocation, shape, _ in self.held.values():
            for part in allocation.slices:
                users.setdefault((node, part.gpu_index), set()).add(shape.user)
        assert all(len(them) == 1 for them in users.values())


Life.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestTheStateThroughItsLife = Life.TestCase


def order_in(state: State, shape: Shape) -> list[int]:
    return [task for _, task, _ in state.shapes[shape].queue.entries()]


def test_a_task_that_comes_back_keeps_its_age() -> None:
    state, shape = State(), a_shape()
    state.fold(TasksQueued(shape, queued((1, 0, 10), (2, 0, 20), (3, 0, 30))))
    state.fold(TasksLeased(NodeId(1), Allocation(0, 1000, 0), shape, (TaskId(1), TaskId(2))))
    state.fold(TasksReleased((TaskId(2),)))
    state.fold(TasksQueued(shape, queued((2, 1, 20))))
    assert order_in(state, shape) == [2, 3]
    assert state.queue_of(TaskId(2)) is state.shapes[shape]
    assert state.queue_of(TaskId(1)) is None


def test_a_task_queued_twice_waits_once() -> None:
    state, shape = State(), a_shape()
    state.fold(TasksQueued(shape, queued((1, 0, 10), (2, 0, 20))))
    state.fold(TasksQueued(shape, queued((1, 0, 10))))
    assert order_in(state, shape) == [1, 2]


def test_a_task_queued_under_another_shape_moves_there() -> None:
    state, shape, other = State(), a_shape(), a_shape(group="g")
    state.fold(TasksQueued(shape, queued((1, 0, 10))))
    state.fold(TasksQueued(other, queued((1, 1, 10))))
    assert list(state.shapes) == [other]
    assert order_in(state, other) == [1]


def test_what_is_over_leaves_nothing_behind() -> None:
    state, shape = State(), a_shape()
    state.fold(TasksQueued(shape, queued(*((i, 0, i) for i in range(1000)))))
    state.fold(TasksWithdrawn(tuple(TaskId(i) for i in range(500, 1000))))
    ids = tuple(TaskId(i) for i in range(500))
    state.fold(TasksLeased(NodeId(1), Allocation(0, 1000, 0), shape, ids))
    state.fold(TasksReleased(ids))
    assert state == State()


def test_an_allocation_number_held_by_another_shape_is_a_contradiction() -> None:
    state = State()
    state.fold(TasksLeased(NodeId(1), Allocation(0, 1000, 0), a_shape(), (TaskId(1),)))
    with pytest.raises(Contradiction):
        state.fold(TasksLeased(NodeId(1), Allocation(0, 1000, 0), a_shape(2), (TaskId(2),)))
    with pytest.raises(Contradiction):
        state.fold(TasksLeased(NodeId(1), Allocation(0, 2000, 0), a_shape(), (TaskId(2),)))
    with pytest.raises(Contradiction):
        state.fold(TasksLeased(NodeId(1), Allocation(1, 1000, 0), a_shape(), (TaskId(1),)))


def test_a_node_that_goes_keeps_its_leases_until_they_end() -> None:
    state = State()
    state.fold(NodeChanged(a_node(1, gpus=1)))
    held = Allocation(0, 1000, GIB, (Slice(0, 24 * GIB, 1000),))
    state.fold(TasksLeased(NodeId(1), held, a_shape(), (TaskId(1),)))
    state.fold(NodeRemoved(NodeId(1)))
    assert state.held[TaskId(1)].allocation == held
    state.fold(NodeChanged(a_node(1, gpus=1)))
    assert state.nodes[NodeId(1)].room.gpus[0].free_share == 0
    state.fold(NodeRemoved(NodeId(1)))
    state.fold(TasksReleased((TaskId(1),)))
    assert state == State()


def test_estimates_follow_what_is_seen_and_are_no_part_of_the_truth() -> None:
    state, shape = State(), a_shape()
    assert state.history.estimate(shape) is None
    state.fold(RunTimesObserved(shape, 10, Span(10_000)))
    assert state.history.estimate(shape) == 1000
    state.fold(RunTimesObserved(shape, 1, Span(2000)))
    assert state.history.estimate(shape) == 1100
    state.fold(RunTimesObserved(shape, 100, Span(200_000)))
    assert 1990 <= (state.history.estimate(shape) or 0) <= 2000
    assert state == State()


def test_a_hundred_thousand_waiting_tasks_take_less_than_15_megabytes() -> None:
    state, shape = State(), a_shape()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for block in range(200):
            first = (1 << 60) + block * 500
            tasks = queued(*((first + i, 0, 10**15 + block) for i in range(500)))
            state.fold(TasksQueued(shape, tasks))
        del tasks
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert state.queued_count == 100_000
    assert used < 15_000_000

"""Groups of running allocations kept between passes equal the groups that a pass would compute anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.ids import TaskId, UserId
from gpool.core.model import GIB, SECOND, GpuRequest, Instant, Shape, Span
from gpool.core.scheduler.order.orders import HOUR, Policy, Promotion
from gpool.core.scheduler.order.promotion import Promotions
from gpool.core.scheduler.state.events import (
    QueuedTask,
    TasksPreempted,
    TasksQueued,
    TasksReleased,
)
from gpool.core.scheduler.state.state import State
from gpool.core.scheduler.state.stoppable import GroupingStage, GroupKey, RunningGroup, grouped
from tests.core.scheduler.state.builders import NOW, a_node, a_shape, a_state, plan

PERIOD = Span(HOUR // 4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 2), st.sampled_from([1, 2, 8])),
        st.tuples(st.just("stop"), st.integers(0, 20), st.booleans()),
        st.tuples(st.just("end"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("wait"), st.sampled_from([0, 60, 900, 1800, 7200, 90_000]), st.just(0)),
        st.tuples(st.just("look"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


class Pool:
    def __init__(self) -> None:
        self.state = a_state(*(a_node(number, cpus=16, gpus=8) for number in (1, 2, 3)))
        self.now, self.last = NOW, 0
        self.waiting: dict[TaskId, QueuedTask] = {}
        self.shapes: dict[TaskId, Shape] = {}

    def submit(self, user: int, gpus: int) -> None:
        needs = {"cpu_milli": 1000, "memory_bytes": GIB, "gpu": (GpuRequest(min(gpus, 4)),)}
        shape = a_shape(user, nodes=2 if gpus == 8 else 1, **needs)
        self.last += 1
        task = TaskId(self.last)
        self.shapes[task] = replace(shape, preemptible=True)
        self.queue(QueuedTask(task, 0, self.now))

    def queue(self, task: QueuedTask) -> None:
        self.waiting[task.id] = task
        self.state.fold(TasksQueued(self.shapes[task.id], (task,)))

    def start(self) -> None:
        for place in plan(self.state, self.now, Policy(preemption=False)).places:
            tasks = tuple(grant.task for grant in place.grants)
            self.state.fold(place.leased(tasks, self.now))
            for grant in place.grants:
                self.waiting[grant.task] = QueuedTask(grant.task, grant.epoch, grant.queued_at)

    def chosen(self, number: int) -> TaskId | None:
        held = sorted(self.state.held)
        return held[number % len(held)] if held else None

    def stop(self, number: int, *, is_over: bool) -> None:
        task = self.chosen(number)
        if task is None:
            return
        self.state.fold(TasksPreempted((task,)))
        if is_over:
            attained = self.state.attained(task, self.now)
            known = self.waiting[task]
            self.state.fold(TasksReleased((task,), self.now))
            self.queue(QueuedTask(task, known.epoch, known.queued_at, attained))

    def end(self, number: int) -> None:
        task = self.chosen(number)
        if task is not None:
            self.state.fold(TasksReleased((task,), self.now))


def members(groups: Mapping[GroupKey, RunningGroup]) -> dict[GroupKey, set[object]]:
    return {key: set(group.lines) for key, group in groups.items()}


def check(state: State, now: Instant) -> None:
    policy = Policy(starvation=Span(2 * HOUR), promotion=Span(3 * HOUR))
    stage = GroupingStage(now, PERIOD, Promotions(state, now, policy))
    kept = state.stoppable.groups(stage)
    assert members(kept) == members(grouped(state.stoppable.values(), stage))
    for group in kept.values():
        assert set(group.freed.lines) == set(group.lines)
    for user in (UserId(1), UserId(2)):
        found = [
            (lease.queued_at, task)
            for line in state.stoppable.values()
            if line.shape.user == user
            for task, lease in line.leases.items()
            if line.since - lease.queued_at - lease.attained >= policy.starvation
        ]
        waited = state.stoppable.waited(user, policy.starvation)
        assert [(each.queued_at, each.task) for each in waited] == sorted(found)
    assert set(state.stoppable.stopping) == {
        line for line in state.stoppable.values() if line.stopping
    }


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_groups_kept_between_passes_equal_groups_made_anew(
    steps: list[tuple[str, int, int]],
) -> None:
    pool = Pool()
    for step, number, other in steps:
        match step:
            case "submit":
                pool.submit(number, other)
            case "stop":
                pool.stop(number, is_over=bool(other))
            case "end":
                pool.end(number)
            case "wait":
                pool.now = Instant(pool.now + number * SECOND)
            case _:
                check(pool.state, pool.now)
                continue
        pool.start()
    check(pool.state, pool.now)
    check(pool.state, Instant(pool.now - HOUR))  # an earlier instant: nothing kept may be used


def test_a_running_task_changes_its_group_with_time_and_promotion() -> None:
    pool = Pool()
    pool.submit(1, 1)
    pool.start()

    def groups(later: int, promoted: dict[int, Promotion]) -> list[tuple[int, Promotion]]:
        found = pool.state.stoppable.groups(
            GroupingStage(Instant(NOW + later * SECOND), PERIOD, Fixed(promoted))
        )
        return [(key.level, key.promotion) for key in found]

    assert groups(0, {}) == [(0, Promotion.NONE)]
    assert groups(1800, {}) == [(1, Promotion.NONE)]
    assert groups(1801, {1: Promotion.LONG}) == [(1, Promotion.LONG)]
    assert groups(1802, {1: Promotion.FIRST}) == [(1, Promotion.FIRST)]
    assert groups(7200, {}) == [(2, Promotion.NONE)]
    pool.end(0)
    assert groups(7201, {}) == []


class Fixed:
    def __init__(self, promoted: dict[int, Promotion]) -> None:
        self.promoted = promoted

    def of_user(self, user: UserId) -> Mapping[int, Promotion]:
        return self.promoted

"""`--by`: a task near its deadline goes first among its own people's, and takes nothing from others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, GpuRequest, Instant, Shape
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.state.events import QueuedTask, TasksQueued
from gpool.core.scheduler.state.state import State
from tests.core.scheduler.state.builders import NOW, a_node, a_shape, a_state, plan

HOUR = 3600 * SECOND
FAIR = Policy()


def a_task(user: int = 1, *, by: int | None = None, preemptible: bool = False) -> Shape:
    needs = {"gpu": (GpuRequest(1),), "cpu_milli": 100, "memory_bytes": 1 << 20}
    when = None if by is None else Instant(by)
    return replace(a_shape(user, **needs), by=when, preemptible=preemptible)


def submit(state: State, shape: Shape, *ids: int, at: int = NOW) -> None:
    tasks = tuple(QueuedTask(TaskId(i), 0, Instant(at)) for i in ids)
    state.fold(TasksQueued(shape, tasks))


def first_to_start(state: State, now: int) -> int:
    return int(plan(state, Instant(now), FAIR).places[0].grants[0].task)


def lease_all(state: State, now: int) -> None:
    for place in plan(state, Instant(now), FAIR).places:
        state.fold(place.leased(tuple(grant.task for grant in place.grants), Instant(now)))


@pytest.mark.parametrize(
    ("hours_left", "first"), [(1, 2), (2, 2), (3, 1), (48, 1)], ids=lambda value: str(value)
)
def test_a_task_near_its_deadline_goes_before_older_ones_of_its_user(
    hours_left: int, first: int
) -> None:
    state, now = a_state(a_node(1, gpus=1)), NOW + HOUR
    submit(state, a_task(), 1)
    submit(state, a_task(by=now + hours_left * HOUR), 2, at=now)
    assert first_to_start(state, now) == first


def test_a_deadline_is_no_claim_on_what_another_is_owed() -> None:
    """The user with less goes first, however urgent the other's task is."""
    state = a_state(a_node(1, gpus=3))
    submit(state, a_task(1), 1, 2)
    lease_all(state, NOW)
    later = NOW + HOUR
    submit(state, a_task(1, by=later + 60 * SECOND), 3, at=NOW)
    submit(state, a_task(2), 4, at=later)
    assert first_to_start(state, later) == 4


def test_a_due_task_takes_the_place_of_its_own_users_other_one() -> None:
    state = a_state(a_node(1, gpus=1))
    submit(state, a_task(preemptible=True), 1)
    lease_all(state, NOW)
    soon = NOW + 60 * SECOND
    submit(state, a_task(by=soon + HOUR), 2, at=soon - FAIR.restart)
    assert [each.task for each in plan(state, Instant(soon), FAIR).preemptions] == [1]


def test_a_task_without_a_deadline_does_not_do_so() -> None:
    state = a_state(a_node(1, gpus=1))
    submit(state, a_task(preemptible=True), 1)
    lease_all(state, NOW)
    soon = NOW + 60 * SECOND
    submit(state, a_task(), 2, at=soon - FAIR.restart)
    assert plan(state, Instant(soon), FAIR).preemptions == ()


def test_a_deadline_that_has_passed_counts_no_less() -> None:
    state, now = a_state(a_node(1, gpus=1)), NOW + 10 * HOUR
    submit(state, a_task(), 1)
    submit(state, a_task(by=NOW + HOUR), 2, at=NOW + 1)
    assert first_to_start(state, now) == 2


@settings(max_examples=80, deadline=None)
@given(
    waiting=st.lists(
        st.tuples(
            st.integers(1, 3),  # user
            st.integers(0, 3),  # hours ago it came
            st.one_of(st.none(), st.integers(-2, 30)),  # hours until it is wanted
        ),
        min_size=1,
        max_size=12,
    ),
    gpus=st.integers(1, 6),
)
def test_deadlines_never_change_how_much_anybody_gets(
    waiting: list[tuple[int, int, int | None]], gpus: int
) -> None:
    now = NOW + 5 * HOUR
    got = []
    for with_deadlines in (True, False):
        state = a_state(a_node(1, cpus=8, gpus=gpus))
        for number, (user, ago, hours) in enumerate(waiting, 1):
            by = now + hours * HOUR if with_deadlines and hours is not None else None
            submit(state, a_task(user, by=by), number, at=now - ago * HOUR)
        places = plan(state, Instant(now), FAIR).places
        got.append(sorted(int(place.shape.user) for place in places))
    assert [got[0].count(user) for user in (1, 2, 3)] == pytest.approx(
        [got[1].count(user) for user in (1, 2, 3)], abs=1
    )  # of users who have the same the one with the oldest task, or the due one, gets the odd GPU
    assert len(got[0]) == len(got[1])

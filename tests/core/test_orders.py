"""What every order promises, and what each is for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_builders import NOW, a_node, a_shape, a_state, enqueue

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, GpuRequest, Instant, Span
from gpool.core.scheduling.events import RunTimesObserved
from gpool.core.scheduling.orders import ORDERS, Candidate, Policy
from gpool.core.scheduling.plan import plan

HOUR = 3600 * SECOND
amounts = st.integers(0, 10**12)


@settings(max_examples=50)
@given(
    name=st.sampled_from(sorted(ORDERS)),
    base=st.tuples(
        amounts, st.integers(0, 9), st.integers(0, 9), amounts, amounts, amounts, amounts
    ),
    field=st.sampled_from(["queued_at", "running", "served", "attained", "predicted", "shares"]),
    more=st.integers(1, 10**12),
)
def test_a_key_never_gets_smaller_when_what_it_looks_at_grows(
    name: str, base: tuple[int, ...], field: str, more: int
) -> None:
    at, running, served, attained, team, user, predicted = base
    first = Candidate(
        a_shape(),
        Instant(at),
        TaskId(1),
        running,
        served,
        Span(attained),
        (team, user),
        Span(predicted),
    )
    grown = (team + more, user) if field == "shares" else getattr(first, field) + more
    order, policy = ORDERS[name], Policy(order=name)
    now = Instant(4 * 10**12)
    if field == "attained":  # a long wait lifts by levels: compared at the same waiting
        policy = replace(policy, promotion=Span(10**18))
    assert order(first, now, policy) <= order(first._replace(**{field: grown}), now, policy)


def test_the_shortest_predicted_goes_first() -> None:
    state = a_state(a_node(1, gpus=1))
    needs = {"gpu": (GpuRequest(1),), "cpu_milli": 100}
    long, short = a_shape(group="long", **needs), a_shape(group="short", **needs)
    for _ in range(3):
        state.fold(RunTimesObserved(long, 1, Span(HOUR)))
        state.fold(RunTimesObserved(short, 1, Span(SECOND)))
    enqueue(state, long, [1])
    enqueue(state, short, [2], at=NOW + 1)
    policy = Policy(order="shortest")
    assert plan(state, Instant(NOW + 2), policy).places[0].grants[0].task == 2


@pytest.mark.parametrize(("hours", "first"), [(1, 2), (5, 1)])
def test_a_task_wanted_soon_goes_before_the_others_of_its_user(hours: int, first: int) -> None:
    state = a_state(a_node(1, cpus=1))
    enqueue(state, a_shape(), [1])
    due = replace(a_shape(), by=Instant(NOW + hours * HOUR))
    enqueue(state, due, [2], at=NOW + 1)
    assert plan(state, Instant(NOW + 2), Policy()).places[0].grants[0].task == first


def test_a_deadline_never_passes_another_user() -> None:
    state = a_state(a_node(1, cpus=2))
    enqueue(state, a_shape(1), [1, 2])
    enqueue(state, replace(a_shape(2), by=Instant(NOW + HOUR)), [3, 4], at=NOW + 1)
    tasks = {grant.task for place in plan(state, Instant(NOW + 2)).places for grant in place.grants}
    assert len(tasks & {1, 2}) == 1
    assert len(tasks & {3, 4}) == 1

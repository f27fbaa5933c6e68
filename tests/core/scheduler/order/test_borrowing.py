"""Guarantees: starts within them go first, what was borrowed is taken back, and nobody is stopped within their own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, GpuRequest, Instant, Shape
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.limits import GpuLimits
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.state.events import (
    PassPlan,
    QueuedTask,
    TasksPreempted,
    TasksQueued,
    TasksReleased,
)
from gpool.core.scheduler.state.state import State
from tests.core.scheduler.state.builders import NOW, a_node, a_shape, a_state, plan

MINUTE = 60 * SECOND


def work(team: int, gpus: int = 1, *, preemptible: bool = False, user: int = 0) -> Shape:
    needs = {"gpu": (GpuRequest(gpus),), "cpu_milli": 100, "memory_bytes": 1 << 20}
    shape = a_shape(user or team * 10, f"{gpus}", **needs)
    return replace(shape, team=team, preemptible=preemptible)


def sure(order: str = "fair_share", **teams: int) -> Policy:
    guaranteed = {("team", int(name[1:])): 1000 * gpus for name, gpus in teams.items()}
    return Policy(order=order, limits=GpuLimits(guaranteed=guaranteed))  # type: ignore[arg-type]


def submit(state: State, shape: Shape, *ids: int, at: int = NOW) -> None:
    tasks = tuple(QueuedTask(TaskId(i), 0, Instant(at)) for i in ids)
    state.fold(TasksQueued(shape, tasks))


def write(state: State, decided: PassPlan, now: int = NOW) -> list[int]:
    for place in decided.places:
        state.fold(place.leased(tuple(grant.task for grant in place.grants), Instant(now)))
    if decided.preemptions:
        state.fold(TasksPreempted(tuple(each.task for each in decided.preemptions)))
    return [grant.task for place in decided.places for grant in place.grants]


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_what_is_guaranteed_always_goes_before_what_is_borrowed(order: str) -> None:
    state = a_state(a_node(1, gpus=2))
    submit(state, work(2), 1, 2, 3, at=NOW - 10 * MINUTE)
    submit(state, work(1), 4, 5, 6, at=NOW)
    assert write(state, plan(state, NOW, sure(order, t1=2))) == [4, 5]


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_what_is_left_idle_is_always_lent(order: str) -> None:
    state = a_state(a_node(1, gpus=4))
    submit(state, work(2), 1, 2, 3, 4)
    assert len(write(state, plan(state, NOW, sure(order, t1=4)))) == 4


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_a_lender_gets_back_what_was_borrowed_by_preemption_in_every_order(order: str) -> None:
    state, policy = a_state(a_node(1, gpus=4)), sure(order, t1=2)
    submit(state, work(2, preemptible=True), 1, 2, 3, 4)
    write(state, plan(state, NOW, policy))
    later = Instant(NOW + MINUTE)
    submit(state, work(1), 5, 6, 7, at=later)
    decided = plan(state, later, policy)
    assert len({each.task for each in decided.preemptions}) == 2  # the third is no guarantee's
    assert {each.beneficiary for each in decided.preemptions} == {5, 6}


def test_a_lender_gets_the_next_that_ends_where_nothing_may_be_stopped() -> None:
    state, policy = a_state(a_node(1, gpus=2)), sure(t1=2)
    submit(state, work(2), 1, 2, 3, 4)
    write(state, plan(state, NOW, policy))
    submit(state, work(1), 5, 6)
    assert plan(state, NOW, policy) == PassPlan()
    for ended, started in ((1, 5), (2, 6)):
        state.fold(TasksReleased((TaskId(ended),), NOW))
        assert write(state, plan(state, NOW, policy)) == [started]


def test_a_user_has_a_guarantee_of_their_own() -> None:
    state = a_state(a_node(1, gpus=1))
    submit(state, work(1, user=11), 1, at=NOW - MINUTE)
    submit(state, work(1, user=12), 2)
    policy = Policy(limits=GpuLimits(guaranteed={("user", 12): 1000}))
    assert write(state, plan(state, NOW, policy)) == [2]


def test_a_large_task_of_a_lender_never_takes_a_borrower_below_its_own() -> None:
    state, policy = a_state(a_node(1, gpus=6)), sure(t1=4, t2=4)
    submit(state, work(2, preemptible=True), 1, 2, 3, 4, 5, 6)
    write(state, plan(state, NOW, policy))
    submit(state, work(1, 4), 7)
    assert plan(state, NOW, policy).preemptions == ()  # two are borrowed, and four would have to go
    submit(state, work(1, 2), 8)
    assert len(plan(state, NOW, policy).preemptions) == 2


TEAMS = (1, 2, 3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("queue"), st.sampled_from(TEAMS), st.integers(1, 3), st.booleans()),
        st.tuples(st.just("end"), st.integers(0, 20)),
        st.tuples(st.just("plan"), st.integers(0, 40)),
    ),
    min_size=4,
    max_size=25,
)


@settings(deadline=None)
@given(
    order=st.sampled_from(sorted(ORDERS)),
    sures=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    steps=STEPS,
)
def test_nobody_is_ever_stopped_within_their_guarantee_for_another_team(
    order: str, sures: list[int], steps: list[tuple[object, ...]]
) -> None:
    policy = sure(order, **{f"t{team}": gpus for team, gpus in zip(TEAMS, sures, strict=True)})
    state, now, ids = a_state(a_node(1, gpus=4), a_node(2, gpus=2)), int(NOW), 0
    team_of: dict[int, int] = {}
    for step in [*steps, ("plan", 31)]:
        match step:
            case ("queue", int(team), int(gpus), bool(preemptible)):
                ids += 1
                team_of[ids] = team
                submit(state, work(team, gpus, preemptible=preemptible), ids, at=now)
            case ("end", int(number)):
                held = sorted(state.held)
                if held:
                    state.fold(TasksReleased((held[number % len(held)],), Instant(now)))
            case ("plan", int(minutes)):
                now += minutes * MINUTE
                had = Counter({team: state.gpus.get(("team", team), 0) for team in TEAMS})
                going = {line for line in state.stoppable.values() if line.stopping}
                for line in going:
                    had[line.shape.team or 0] -= line.amounts[0]
                decided = plan(state, Instant(now), policy)
                lost: Counter[int] = Counter()
                for each in decided.preemptions:
                    if team_of[each.task] != team_of[each.beneficiary]:
                        lost[team_of[each.task]] += state.held[each.task].amounts[0]
                for team, gpus in lost.items():
                    assert had[team] - gpus >= 1000 * sures[team - 1]
                write(state, decided, now)

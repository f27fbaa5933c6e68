"""Forecasts, ranges, dry runs and rules: what always holds, and worked cases."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.errors import Invalid
from gpool.core.ids import NodeId, TaskId
from gpool.core.model import SECOND, Audience, Instant, Shape, Span
from gpool.core.scheduler.explain.waiting import explain
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.place.fit import Unfit, is_open, unfit
from gpool.core.scheduler.predict.forecast import (
    Bounds,
    Calibration,
    ForecastQuestion,
    courses,
    waits,
)
from gpool.core.scheduler.predict.run_times import RunTimes
from gpool.core.scheduler.predict.simulation import compare
from gpool.core.scheduler.state.events import NodeChanged
from gpool.core.scheduler.state.operator_rules import OperatorRules, PolicyChange, Reservation
from gpool.core.scheduler.state.snapshot import take
from gpool.core.scheduler.state.state import State
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

FCFS = Policy(order="fcfs")
PRIORITY = Policy(order="priority")


def known(shape: Shape, *seconds: float) -> RunTimes:
    times = RunTimes()
    for each in seconds or (100.0,) * 20:
        times.observe(shape, Span(round(each * SECOND)))
    return times


def a_question(
    state: State, times: RunTimes, since: dict[int, int] | None = None
) -> ForecastQuestion:
    held = {TaskId(task): Instant(at) for task, at in (since or {}).items()}
    return ForecastQuestion(take(state), NOW, times, held)


def busy_pool(count: int = 5) -> tuple[State, Shape]:
    """One CPU, task 1 runs on it since 40 s, the others wait."""
    state, shape = a_state(a_node(1, 1)), a_shape()
    enqueue(state, shape, list(range(1, count + 1)))
    apply(state, plan(state, NOW, FCFS))
    return state, shape


@given(st.sets(st.integers(2, 8), min_size=1), st.sampled_from([FCFS, PRIORITY, Policy()]))
def test_whoever_else_is_asked_for_a_start_is_always_told_the_same(
    asked: set[int], policy: Policy
) -> None:
    """A course may end sooner, but what it tells of those it was made for stays."""
    state, shape = busy_pool(8)
    whole = a_question(state, known(shape), {1: NOW - 40 * SECOND})
    wanted = frozenset(TaskId(task) for task in asked)
    part = replace(whole, wanted=wanted)
    for long, short in zip(courses(whole, policy), courses(part, policy), strict=True):
        assert {task: short.starts[task] for task in wanted} == {
            task: long.starts[task] for task in wanted
        }
        assert short.until <= long.until


def test_a_course_ends_when_those_have_started_who_were_asked_for() -> None:
    state, shape = busy_pool(8)
    asked = replace(a_question(state, known(shape)), wanted=frozenset({TaskId(2)}))
    for course in courses(asked, FCFS):
        assert set(course.starts) == {TaskId(2)}


def test_tasks_start_one_after_another_when_each_takes_as_long() -> None:
    state, shape = busy_pool()
    found = courses(a_question(state, known(shape), {1: NOW - 40 * SECOND}), FCFS)
    for place, task in enumerate((2, 3, 4, 5)):
        told = waits(found, TaskId(task), place, NOW)
        assert told is not None
        assert told[2] / SECOND == pytest.approx(60 + 100 * place, rel=0.12)


def test_a_plain_queue_is_estimated_within_a_factor_of_two_after_its_tasks_became_longer() -> None:
    """A kind such as `python -c` is coarse: 50 quick programs, then a queue of programs of 8 s."""
    state, shape = busy_pool(48)
    times = RunTimes()

    def last_start_s() -> float:
        found = courses(a_question(state, times.copy(), {1: NOW}), FCFS)
        told = waits(found, TaskId(48), 46, NOW)
        assert told is not None
        return told[2] / SECOND

    for _ in range(50):
        times.observe(shape, Span(SECOND // 20))
    assert last_start_s() < 10  # control: nothing is known of the change yet
    for _ in range(10):
        times.observe(shape, Span(8 * SECOND))
    assert 47 * 8 / 2 < last_start_s() < 47 * 8 * 2


def last_start_s(state: State, times: RunTimes, ran_s: int) -> float:
    """Forecast start of the last of 48 tasks, the first of which runs for so long already."""
    asked = a_question(state, times.copy(), {1: NOW - ran_s * SECOND})
    told = waits(courses(asked, FCFS), TaskId(48), 46, NOW)
    assert told is not None
    return told[2] / SECOND


def test_a_queue_of_a_new_kind_is_estimated_within_a_factor_of_two() -> None:
    """50 quick tasks of another kind of the same user have ended; the queue's tasks take 8 s each."""
    state, shape = busy_pool(48)
    times = known(replace(shape, group="quick"), *(1.0,) * 50)
    assert last_start_s(state, times, 0) < 46 * 8 / 2  # control: nothing is known of the kind
    for ran_s in (3, 5, 7):
        assert 46 * 8 / 2 < last_start_s(state, times, ran_s) < 47 * 8 * 2
    for _ in range(4):
        times.observe(shape, Span(8 * SECOND))
        assert 46 * 8 / 2 < last_start_s(state, times, 1) < 47 * 8 * 2


def test_a_task_that_ended_at_once_does_not_hide_the_age_of_those_that_run() -> None:
    state, shape = busy_pool(48)
    times = known(replace(shape, group="quick"), *(1.0,) * 50)
    times.observe(shape, Span(SECOND // 10))
    assert 46 * 8 / 2 < last_start_s(state, times, 5) < 47 * 8 * 2


def test_a_course_never_goes_past_its_bounds_and_the_rest_is_extrapolated() -> None:
    state, shape = busy_pool(200)
    found = courses(a_question(state, known(shape)), FCFS, bounds=Bounds(passes=20))
    assert all(len(course.starts) <= 20 for course in found)
    told = waits(found, TaskId(200), 198, NOW)
    assert told is not None
    assert told[2] / SECOND == pytest.approx(199 * 100, rel=0.3)


def test_what_nothing_can_run_never_gets_an_estimate() -> None:
    state, shape = busy_pool(2)
    enqueue(state, a_shape(2, cpu_milli=9000), [9])
    assert waits(courses(a_question(state, known(shape)), FCFS), TaskId(9), 1, NOW) is None


@given(st.integers(0, 10_000))
def test_a_forecast_never_changes_the_state_and_always_says_the_same(seed: int) -> None:
    dice = Random(seed)
    state = a_state(*(a_node(number, dice.choice((1, 2, 4))) for number in range(1, 4)))
    for user in range(1, 4):
        enqueue(
            state, a_shape(user, cpu_milli=dice.choice((1000, 2000))), [user * 10, user * 10 + 1]
        )
    apply(state, plan(state, NOW, FCFS))
    before = state.truth()
    asked = a_question(state, known(a_shape(), *(dice.randint(1, 500) for _ in range(12))))
    first, second = (courses(asked, FCFS, count=2) for _ in range(2))
    assert first == second
    assert state.truth() == before
    assert all(at >= NOW for course in first for at in course.starts.values())


def test_a_running_task_is_only_compared_with_those_that_ran_longer() -> None:
    shape = a_shape()
    times = known(shape, *(10.0,) * 30, *(1000.0,) * 10)
    assert times.left(shape, Span(0), 0.5) == 10 * SECOND
    assert times.left(shape, Span(20 * SECOND), 0.5) == 980 * SECOND
    assert times.left(shape, Span(5000 * SECOND), 0.5) == pytest.approx(5000 * SECOND, rel=0.01)


@given(st.integers(0, 10_000))
def test_a_remaining_time_is_always_more_than_nothing(seed: int) -> None:
    dice = Random(seed)
    shape = a_shape()
    times = known(shape, *(dice.expovariate(0.01) + 0.001 for _ in range(dice.randint(1, 40))))
    age = Span(round(dice.expovariate(0.005) * SECOND))
    assert times.left(shape, age, dice.random()) > 0
    assert times.left(a_shape(9, "other"), age, dice.random()) > 0


# ---- ranges


def test_a_range_always_comes_to_hold_eight_of_ten() -> None:
    """Whatever the errors look like, and while they change midway."""
    dice, calibration = Random(7), Calibration()
    inside = []
    for number in range(6000):
        bias, spread = (1.0, 0.4) if number < 3000 else (2.5, 0.9)
        forecast = Span(round(dice.uniform(60, 6000) * SECOND))
        told = calibration.told(forecast, Instant(number // 10))
        truth = Span(round(forecast * bias * dice.lognormvariate(0, spread)))
        inside.append(told.range.low <= truth <= told.range.high)
        calibration.note(told, truth)
    assert 0.75 <= sum(inside[500:]) / len(inside[500:]) <= 0.85


@given(st.integers(0, 10**13))
def test_a_range_always_holds_its_middle(forecast: int) -> None:
    told = Calibration().told(Span(forecast), NOW).range
    assert 0 <= told.low <= told.middle <= told.high


# ---- another policy


def test_a_dry_run_counts_who_starts_sooner_and_later() -> None:
    state, shape = busy_pool(1)
    enqueue(state, a_shape(1), [2, 3, 4], at=NOW - 10 * SECOND)
    enqueue(state, a_shape(2, priority=50), [5], at=NOW)
    found = compare(a_question(state, known(shape)), FCFS, PRIORITY)
    assert (found.waiting, found.sooner, found.later, found.same) == (4, 1, 3, 0)
    assert found.sentence == "Would start 1 task sooner, 3 later; 0 of 4 as now."
    assert found.moved[0].task == 5


def test_the_same_policy_never_changes_anything() -> None:
    state, shape = busy_pool(6)
    found = compare(a_question(state, known(shape)), FCFS, FCFS)
    assert (found.sooner, found.later, found.same) == (0, 0, 5)


def test_a_policy_that_makes_no_sense_is_refused() -> None:
    for change in (PolicyChange(order="luck"), PolicyChange(ageing=Span(0))):
        with pytest.raises(Invalid):
            change.applied(FCFS)


# ---- cordons and reservations


def test_rules_are_laid_upon_nodes_and_taken_off_again() -> None:
    node = a_node(1)
    class_ = Reservation(
        1, frozenset({NodeId(1)}), Audience(frozenset({7})), NOW, Instant(NOW + 10)
    )
    rules = OperatorRules(cordons={NodeId(1): "disks"}, reservations=(class_,))
    laid = rules.upon(node, NOW)
    assert laid.cordoned
    assert laid.reserved_for == Audience(frozenset({7}))
    assert not is_open(laid)
    assert rules.upon(laid, NOW) is laid
    assert rules.upon(laid, Instant(NOW + 10)).reserved_for is None
    assert OperatorRules().upon(laid, NOW) == node
    assert rules.changes_between(Instant(NOW + 9), Instant(NOW + 10))
    assert not rules.changes_between(Instant(NOW + 10), Instant(NOW + 11))


@pytest.mark.parametrize(
    ("user", "team", "starts"), [(7, None, 1), (8, None, 0), (8, 3, 1), (OWNER, None, 1)]
)
def test_a_reserved_node_never_starts_a_strangers_task(
    user: int, team: int | None, starts: int
) -> None:
    """The second asks before the first: rows of the engine are not shared among users once somebody is kept for."""
    reserved = Audience(frozenset({7}), frozenset({3}))
    state = a_state(a_node(1, 8))
    index_of(state, FCFS.pricing)
    stranger = a_shape(5)
    enqueue(state, stranger, [1])
    apply(state, plan(state, NOW, FCFS))
    state.fold(NodeChanged(replace(a_node(1, 8), reserved_for=reserved)))
    enqueue(state, stranger, [2])
    enqueue(state, replace(a_shape(user), team=team), [3])
    granted = [grant.task for place in plan(state, NOW, FCFS).places for grant in place.grants]
    assert granted == [3] * starts
    assert unfit(replace(a_node(1), reserved_for=reserved), stranger) is Unfit.RESERVED
    assert explain(state, TaskId(2), NOW, FCFS).code == "reserved"

"""What every order promises, and what each is for."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, GpuRequest, Instant, Span
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.builtin.fair_share import FairShareKey
from gpool.core.scheduler.order.fair_share import HALF_LIFE
from gpool.core.scheduler.order.orders import Candidate, Order, Policy, Promotion, Rank
from gpool.core.scheduler.order.ranking import NEAR_MILLI, Exchange, ExchangeSide, outranks
from gpool.core.scheduler.state.events import RunTimesObserved, TasksReleased
from tests.core.scheduler.state.builders import NOW, a_node, a_shape, a_state, enqueue, plan

HOUR = 3600 * SECOND
amounts = st.integers(0, 10**12)


@settings(max_examples=50)
@given(
    name=st.sampled_from(sorted(ORDERS)),
    base=st.tuples(
        amounts, st.integers(0, 9), st.integers(0, 9), amounts, amounts, amounts, amounts
    ),
    field=st.sampled_from(
        ["queued_at", "running", "served", "attained", "predicted", "shares", "band"]
    ),
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
    assert order.rank(first, now, policy) <= order.rank(
        first._replace(**{field: grown}), now, policy
    )


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


# ---- nobody starves

IMPATIENT = Policy(
    ageing=Span(SECOND),
    promotion=Span(20 * SECOND),
    urgency=Span(HOUR),
    patience=Span(SECOND),
)
ROUND = Span(HALF_LIFE // 5)


@pytest.mark.parametrize("name", sorted(ORDERS))
@settings(max_examples=6, deadline=None)
@given(
    rivals=st.lists(
        st.tuples(
            st.integers(2, 4),  # user
            st.integers(0, 20),  # priority
            st.booleans(),  # due soon
            st.booleans(),  # known to be short
            st.booleans(),  # somebody new
        ),
        min_size=1,
        max_size=4,
    ),
    priority=st.integers(-5, 0),
)
def test_a_task_always_starts_one_day_whatever_arrives(
    name: str, rivals: list[tuple[int, int, bool, bool, bool]], priority: int
) -> None:
    """One slot, a task that ends with every round, and for each two others that any order may like better.

    A round is a part of the half-life: people who have had nothing yet go before those who have, until that has worn off.
    """
    policy = replace(
        IMPATIENT,
        order=name,
        ageing=ROUND,
        promotion=Span(20 * ROUND),
        starvation=Span(10 * ROUND),
        urgency=Span(100 * ROUND),
        patience=ROUND,
    )
    state, mine = a_state(a_node(1, cpus=1)), a_shape(1, "mine", priority)
    state.fold(RunTimesObserved(mine, 3, Span(3 * HOUR)))
    enqueue(state, mine, [1])
    enqueue(state, a_shape(1, "own"), [2], at=NOW)
    last = 2
    for round_ in range(90):
        now = Instant(NOW + round_ * ROUND)
        for number in range(2):
            user, more, is_due, is_short, is_new = rivals[(round_ + number) % len(rivals)]
            last += 1
            user = 1000 + last if is_new else user
            shape = a_shape(user, "short" if is_short else "other", more)
            if is_short:
                state.fold(RunTimesObserved(shape, 1, Span(SECOND)))
            if is_due:
                shape = replace(shape, by=Instant(NOW + 100 * ROUND))
            enqueue(state, shape, [last], at=now)
        for held in tuple(state.held):
            state.fold(TasksReleased((held,), now))
        for place in plan(state, now, policy).places:
            tasks = tuple(grant.task for grant in place.grants)
            state.fold(place.leased(tasks, now))
        if 1 in state.held:
            return
    raise AssertionError("it never started")


def test_a_stream_of_new_users_never_starves_those_who_wait() -> None:
    state, policy = a_state(a_node(1, cpus=1)), Policy(order="round_robin")
    enqueue(state, a_shape(1), [1, 2])
    started = []
    for number in range(10):
        enqueue(state, a_shape(100 + number), [100 + number], at=NOW + number)
        for place in plan(state, Instant(NOW + number), policy).places:
            state.fold(place.leased((place.grants[0].task,), NOW))
            started.append(place.grants[0].task)
        state.fold(TasksReleased(tuple(state.held), NOW))
    assert started.index(TaskId(2)) <= 3  # of ten


def test_priority_never_passes_another_user_in_fair_share_but_counts_among_equals() -> None:
    state = a_state(a_node(1, cpus=1))
    enqueue(state, a_shape(1), [1])
    enqueue(state, a_shape(1, priority=3), [2], at=NOW + 1)
    enqueue(state, a_shape(2, priority=9), [3], at=NOW + 2)
    now = Instant(NOW + 3)
    started = []
    for _ in range(3):
        for place in plan(state, now).places:
            state.fold(place.leased((place.grants[0].task,), now))
            started.append(int(place.grants[0].task))
        now = Instant(now + HOUR)
        state.fold(TasksReleased(tuple(state.held), now))
    assert started == [3, 2, 1]  # all had nothing: the highest priority; then whoever had less


# ---- when it is worth stopping somebody

shares = st.integers(0, 10**6)
FAIR = ORDERS["fair_share"]


def side(
    share: int, task: int, had: int = 0, holds: int = 0, level: int = 0, band: int = 0
) -> ExchangeSide:
    rank = Rank(band, FairShareKey(share, share, 1, level, Promotion.NONE, 0, TaskId(task)))
    return ExchangeSide(rank, (share, share), (had, had), (holds, holds))


@given(
    fair=st.integers(1000, 10**6),
    off=st.tuples(st.integers(-99, 99), st.integers(-99, 99)),
    before=st.tuples(st.integers(-29, 29), st.integers(-29, 29)),
    ran=st.integers(0, 10**12),
)
def test_a_tenant_within_the_margin_of_its_share_never_stops_another_within_it(
    fair: int, off: tuple[int, int], before: tuple[int, int], ran: int
) -> None:
    policy = Policy(margin_milli=100)
    mine, theirs = (fair * (1000 + each) // 1000 for each in off)
    had, others = (fair * (1000 + each) // 1000 for each in before)
    if mine == theirs:
        return
    waiting, running = side(mine, 1, had), side(theirs, 2, others, level=3)
    assert not outranks(Exchange(waiting, (mine, mine), running, Span(ran)), FAIR, policy)


@given(
    shares,
    shares,
    st.tuples(shares, shares),
    st.tuples(shares, shares),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.sampled_from((Span(0), Policy().quantum)),
)
def test_what_had_its_turn_always_goes_to_who_had_clearly_less_and_never_before(
    mine: int,
    theirs: int,
    had: tuple[int, int],
    others: tuple[int, int],
    now: tuple[int, int],
    ran: Span,
) -> None:
    """If they hold less: they gain so much here that the shares alone would never be worth it."""
    policy = Policy()
    waiting = side(mine, 1, holds=now[0])._replace(had=had)
    running = side(theirs, 2, holds=now[1])._replace(had=others)
    both = Exchange(waiting, (10**9,) * 2, running, ran)
    if mine != theirs:
        is_clear = others[0] * (1000 - NEAR_MILLI) > had[0] * (1000 + NEAR_MILLI)
        assert ran or not outranks(both, FAIR, policy)
        assert not (ran and is_clear and now[0] < now[1]) or outranks(both, FAIR, policy)
        if is_clear:  # nobody wants it back from them at once
            nothing = (0, 0)
            back = Exchange(
                running._replace(holds=nothing),
                (10**9,) * 2,
                waiting._replace(holds=nothing),
                ran,
            )
            assert not outranks(back, FAIR, policy)


@given(shares, shares, shares, st.sampled_from((Span(0), Policy().quantum)), st.booleans())
def test_who_comes_new_takes_what_had_its_turn_until_all_hold_the_same(
    mine: int, had: int, more: int, ran: Span, evens: bool
) -> None:
    """It begins with as much as others had lately: what it holds counts by itself then, and only then."""
    waiting, running = side(mine, 1, had), side(mine + 1, 2, had)
    both = Exchange(waiting, (10**9,) * 2, running, ran, (evens,) * 2)
    is_by_margin = (mine + 1) * 900 > mine * 1100
    assert outranks(both, FAIR, Policy()) == (bool(ran) and (evens or is_by_margin))
    ahead = both._replace(waiting=side(mine, 1, had + more + 1))
    assert not outranks(ahead, FAIR, Policy())


@given(mine=shares, theirs=shares, gain=st.integers(1, 10**6), mine_gains=st.integers(1, 10**6))
def test_what_has_not_had_its_turn_is_never_taken_back_at_once(
    mine: int, theirs: int, gain: int, mine_gains: int
) -> None:
    """`theirs` is without what it would lose, `gain`; after the exchange the others ask for the same."""
    policy = Policy()
    waiting, running, after = side(mine, 1), side(theirs, 2), (mine + mine_gains,) * 2
    if mine != theirs and outranks(Exchange(waiting, after, running, Span(0)), FAIR, policy):
        back = Exchange(running, (theirs + gain,) * 2, waiting, Span(0))
        assert not outranks(back, FAIR, policy)


@given(
    st.tuples(shares, shares, shares),
    st.tuples(shares, shares),
    st.integers(0, 10**10),
)
def test_what_may_be_stopped_may_always_be_stopped_once_it_ran_longer(
    now: tuple[int, int, int], had: tuple[int, int], ran: int
) -> None:
    mine, gained, theirs = now
    waiting, running = side(mine, 1, had[0]), side(theirs, 2, had[1])
    both, policy = Exchange(waiting, (gained, gained), running, Span(0)), Policy()
    later = both._replace(ran=Span(ran))
    assert not outranks(both, FAIR, policy) or outranks(later, FAIR, policy)


def test_what_is_due_to_a_guarantee_is_always_worth_it() -> None:
    both = Exchange(side(9, 1), (9, 9), side(0, 2, band=1), Span(0))
    for order in ORDERS.values():
        assert outranks(both, order, Policy(order=order.name))


def test_orders_have_the_names_that_operators_use() -> None:
    assert sorted(ORDERS) == ["fair_share", "fcfs", "priority", "round_robin", "shortest"]
    assert {name for name, order in ORDERS.items() if order.may_preempt} == {
        "fair_share",
        "priority",
        "round_robin",
    }


class LengthKey(NamedTuple):
    """A plug-in's key: long names of functions first."""

    shortness: int
    task: int


def test_a_new_order_decides_starts_and_preemption_by_its_own_fields() -> None:
    def longest_name(candidate: Candidate, now: Instant, policy: Policy) -> LengthKey:
        return LengthKey(-len(candidate.shape.group), candidate.task)

    order = Order("longest_name", longest_name, decisive=("shortness",))
    policy, orders = Policy(order="longest_name"), {"longest_name": order}
    state = a_state(a_node(1, gpus=1))
    short, long = (
        replace(a_shape(group=name, gpu=(GpuRequest(1),)), preemptible=True)
        for name in ("f", "train")
    )
    enqueue(state, short, [1, 2])
    for place in plan(state, NOW, policy, orders).places:
        state.fold(place.leased((TaskId(1),), NOW))
    assert not plan(state, NOW, policy, orders).preemptions  # equal decisive fields
    enqueue(state, long, [3], at=NOW + 1)
    assert [each.task for each in plan(state, NOW, policy, orders).preemptions] == [1]

"""A pass ends soon, whatever waits: what it leaves out is nothing that could be, or comes in a later one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import GIB, MIB, SECOND, Allocation, GpuRequest, Instant, Shape, Slice, Span
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.orders import Candidate, Key, Order, Policy, Rank
from gpool.core.scheduler.order.ranking import Exchange, ExchangeSide, outranks
from gpool.core.scheduler.passes.context import SEARCHES_IN_ROTATION
from gpool.core.scheduler.passes.preemptible_capacity import PreemptibleCapacity
from gpool.core.scheduler.passes.starts import MAX_SHAPES, MAX_STARTS
from gpool.core.scheduler.passes.victims import (
    Victim,
    VictimGroup,
    VictimGroups,
)
from gpool.core.scheduler.place.fit import fit, unfit
from gpool.core.scheduler.state.events import Leased, QueuedTask, TasksLeased, TasksQueued
from gpool.core.scheduler.state.state import State
from gpool.core.scheduler.state.stoppable import FreedParts
from gpool.core.scheduler.state.waiting import HeldAllocation, ShapeState
from tests.core.scheduler.state.builders import (
    NOW,
    a_node,
    a_shape,
    a_state,
    apply,
    enqueue,
    hold,
    index_of,
    plan,
)

HOUR = 3600 * SECOND


def preemptible(user: int, **needs: Any) -> Shape:
    return replace(a_shape(user, **needs), preemptible=True)


def runs(
    state: State, shape: Shape, node: int, number: int, gpu: int, task: int, ago: int = HOUR
) -> None:
    """One whole GPU, for so long already."""
    memory = state.nodes[NodeId(node)].room.gpus[gpu].gpu.memory_bytes
    needs = shape.requirements
    allocation = Allocation(
        number, needs.cpu_milli, needs.memory_bytes or GIB, (Slice(gpu, memory, 1000),)
    )
    since = Instant(NOW - ago)
    lease = (Leased(1, since, Span(0)),)
    state.fold(TasksLeased(NodeId(node), allocation, shape, (TaskId(task),), (), since, lease))


def full(nodes: int, gpus: int, users: int) -> State:
    """All GPUs in use, one each, by tasks of so many users that may be stopped."""
    state = a_state(*(a_node(number, cpus=64, gpus=gpus) for number in range(1, nodes + 1)))
    for place in range(nodes * gpus):
        shape = preemptible(10_000 + place % users, gpu=(GpuRequest(1),), memory_bytes=GIB)
        node, gpu = divmod(place, gpus)
        runs(state, shape, node + 1, gpu, gpu, 10**6 + place)
    return state


def one_each(state: State, users: range, gpus: int) -> None:
    """A shape of their own for each user."""
    for user in users:
        shape = a_shape(
            user, gpu=(GpuRequest(gpus),), cpu_milli=100 + user, memory_bytes=GIB + user * MIB
        )
        state.fold(TasksQueued(shape, (QueuedTask(TaskId(user), 0, NOW),)))


class Asked:
    """An order that counts how often it is asked."""

    def __init__(self, order: str = "fair_share") -> None:
        self.order, self.count = ORDERS[order], 0

    def __call__(self, candidate: Candidate, now: Instant, policy: Policy) -> Key:
        self.count += 1
        return self.order.key(candidate, now, policy)

    @property
    def as_order(self) -> Order:
        return replace(self.order, key=self)


def test_no_crowd_of_users_ever_makes_a_pass_look_long_for_what_to_stop() -> None:
    """Each may have one node cleared of a few and no more, so all of them look, and most in vain."""
    state = full(60, 8, 60)
    one_each(state, range(1, 501), 8)
    asked = Asked()
    plan(state, Instant(NOW + SECOND), Policy(), {"fair_share": asked.as_order})
    # of those that wait, of those that run, and anew of those whose people lost something
    assert asked.count < 500 + 480 + 2000


def test_no_more_shapes_are_ever_looked_at_in_a_pass_than_so_many_and_in_time_all() -> None:
    state = a_state(a_node(1, cpus=4))
    for user in range(1, 3001):
        enqueue(state, a_shape(user, cpu_milli=64_000 + user), [user])
    started = a_shape(5000, cpu_milli=500)
    asked, seen = Asked(), set[int]()

    def order(candidate: Candidate, now: Instant, policy: Policy) -> Key:
        seen.add(int(candidate.task))
        return asked(candidate, now, policy)

    for number in range(12):
        before = asked.count
        state.pass_time(Instant(NOW + number))
        assert plan(
            state, NOW, Policy(), {"fair_share": replace(asked.order, key=order)}
        ).is_partial
        assert asked.count - before <= MAX_SHAPES + SEARCHES_IN_ROTATION
    assert len(seen) == 3000
    enqueue(state, started, [9999])
    assert apply(state, plan(state, NOW)) == [9999]  # what comes last starts at once


def test_the_same_state_always_gives_the_same_plan_and_a_copy_of_it_too() -> None:
    state = a_state(a_node(1, cpus=64))
    for user in range(1, 2001):
        enqueue(state, a_shape(user, cpu_milli=1000 + user), [user])
    for number in range(3):
        state.pass_time(Instant(NOW + number))
        assert plan(state, NOW) == plan(state, NOW)


def test_a_pass_starts_so_many_and_the_next_ones_the_rest() -> None:
    count = 2 * MAX_STARTS + 10
    state = a_state(*(a_node(number, cpus=40) for number in range(1, 26)))
    for user in range(1, count + 1):
        enqueue(state, a_shape(user, cpu_milli=1000), [user])
    left = []
    for number in range(3):
        state.pass_time(Instant(NOW + number))
        decided = plan(state, NOW)
        left.append((len(apply(state, decided)), decided.is_partial))
    assert left == [(MAX_STARTS, True), (MAX_STARTS, True), (10, False)]


def test_who_could_have_room_made_always_has_it_made_though_very_many_look_in_vain() -> None:
    """Those before it in the order may stop four of the five that they need, which they find out at length in every pass."""
    state = a_state(*(a_node(number, cpus=64, gpus=8) for number in range(1, 101)))
    for place in range(800):
        node, gpu = divmod(place, 8)
        user, ago = (10_000, HOUR) if gpu < 4 else (20_000 + place, SECOND)
        shape = preemptible(user, gpu=(GpuRequest(1),), memory_bytes=GIB)
        runs(state, shape, node + 1, gpu, gpu, 10**6 + place, ago)
    crowd = 60
    one_each(state, range(1, crowd + 1), 5)
    one = a_shape(9000, gpu=(GpuRequest(1),), cpu_milli=100, memory_bytes=GIB)
    state.fold(TasksQueued(one, (QueuedTask(TaskId(9000), 0, Instant(NOW + 1)),)))
    at_once = plan(state, Instant(NOW + SECOND))
    assert not at_once.preemptions  # the others came first, and it took too long
    for number in range(-(-(crowd + 1) // SEARCHES_IN_ROTATION)):
        now = Instant(NOW + SECOND + number)
        state.pass_time(now)
        decided = plan(state, now)
        if decided.preemptions:
            assert {each.beneficiary for each in decided.preemptions} == {9000}
            return
    raise AssertionError("nothing was stopped for it")


REQUESTS = st.sampled_from([(), (GpuRequest(1),), (GpuRequest(3),), (GpuRequest(share_milli=400),)])


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.tuples(st.integers(1, 3), REQUESTS, st.booleans()), max_size=14),
    cpus=st.integers(1, 8),
    asked=REQUESTS,
    reached=st.sets(st.integers(1, 3)),
    stopped=st.integers(0, 13),
)
def test_reach_never_denies_room_that_stopping_the_reachable_would_make(
    lines: list[tuple[int, tuple[GpuRequest, ...], bool]],
    cpus: int,
    asked: tuple[GpuRequest, ...],
    reached: set[int],
    stopped: int,
) -> None:
    state = a_state(*(a_node(number, cpus=8, gpus=4) for number in range(1, 4)))
    for task, (user, gpu, stops) in enumerate(lines, 1):
        needs = {"cpu_milli": 2000, "memory_bytes": GIB, "gpu": gpu}
        enqueue(state, preemptible(user, **needs) if stops else a_shape(user, **needs), [task])
        for place in plan(state, NOW).places:
            tasks = tuple(grant.task for grant in place.grants)
            state.fold(place.leased(tasks, Instant(NOW)))
    shape = a_shape(9, cpu_milli=cpus * 1000, memory_bytes=GIB, gpu=asked)
    index = index_of(state)
    held = list(state.stoppable.values())
    users = [[line for line in held if line.shape.user == user] for user in (1, 2, 3)]
    capacity = PreemptibleCapacity(index, map(FreedParts, users), FreedParts(()))
    stops = held[stopped : stopped + 1]
    if stops:
        capacity.nodes(shape, np.ones(4, bool))
        capacity.stop(stops[0])
    there = capacity.nodes(shape, np.array([True, *(user in reached for user in (1, 2, 3))]))
    for id_, entry in state.nodes.items():
        room = entry.room.copy()
        for line in entry.lines.values():
            is_reached = line.shape.user in reached or line in stops
            if is_reached and state.stoppable.get(id_, line.allocation.number):
                room.give(line.allocation)
        assert entry.node is not None
        fits = unfit(entry.node, shape) is None and fit(entry.node, room, shape) is not None
        assert there[index.board.slots[id_]] or not fits


SHARES = st.integers(0, 12).map(lambda n: n * 10_000)
KEYS = st.tuples(
    st.integers(0, 1),
    SHARES,
    SHARES,
    st.integers(0, 1),
    st.integers(0, 2),
    st.integers(0, 3),
    st.integers(0, 9),
)


def rank_of(key: Key) -> Rank:
    """A key with every field that any order compares."""
    return Rank(key[0], AnyKey(key[1], key[1], *key[1:]))


class AnyKey(NamedTuple):
    running: int
    since: int
    tenant_share: int
    user_share: int
    is_due: int
    level: int
    promotion: int
    task: int


def standing(key: Key, had: int, held: int) -> ExchangeSide:
    return ExchangeSide(rank_of(key), (key[1], key[2]), (had, had), (held, held))


@settings(max_examples=200, deadline=None)
@given(
    mine=KEYS,
    theirs=st.lists(KEYS, min_size=1, max_size=8),
    gain=SHARES,
    ran=st.sampled_from([0, HOUR]),
    had=st.tuples(SHARES, SHARES),
    held=st.tuples(SHARES, SHARES),
    order=st.sampled_from(sorted(ORDERS)),
)
def test_no_group_is_ever_passed_over_of_which_something_may_be_stopped(
    mine: Key,
    theirs: list[Key],
    gain: int,
    ran: int,
    had: tuple[int, int],
    held: tuple[int, int],
    order: str,
) -> None:
    policy, entry = Policy(), ShapeState(preemptible(2), {})
    groups, waiting = [], standing(mine, had[0], held[0])
    for key in theirs:
        line = HeldAllocation(NodeId(1), Allocation(0, 0, 0, ()), entry.shape)
        victim = Victim(rank_of(key), line)
        groups.append(
            VictimGroup([victim.line], (key[1], key[2]), {victim.line: victim}.__getitem__)
        )
    victims = VictimGroups(groups, [had[1]] * len(groups), [held[1]] * len(groups))
    looked = list(victims.worth_comparing(a_shape(1), waiting, ORDERS[order], policy))
    gained, evens = (mine[1] + gain, mine[2] + gain), (held[0] < held[1],) * 2
    for key, group in zip(theirs, groups, strict=True):
        exchange = Exchange(waiting, gained, standing(key, had[1], held[1]), Span(ran), evens)
        if outranks(exchange, ORDERS[order], policy):
            assert group in looked
    own = victims.worth_comparing(a_shape(2), waiting, ORDERS[order], policy)
    assert list(own) == groups  # of one's own all are
    assert entry.shape.user == UserId(2)


def test_shapes_that_were_never_asked_for_are_looked_at_a_few_a_pass_and_in_time_all() -> None:
    """Slices are scored for each user apart, and here every node might do until it is looked at."""
    idle = a_node(100, cpus=1)
    state = a_state(idle, *(a_node(number, cpus=1, gpus=1) for number in range(1, 100)))
    for number in range(1, 100):
        hold(state, a_shape(5000), number, Allocation(0, 1000, GIB), 10_000 + number)
    for user in range(1, 601):
        enqueue(state, a_shape(user, gpu=(GpuRequest(vram_bytes=GIB),), cpu_milli=900), [user])
    last, fresh = a_shape(9000, cpu_milli=500), index_of(state).scored_for_new
    enqueue(state, last, [9000], at=NOW + 1)
    for number in range(5):
        state.pass_time(Instant(NOW + number))
        apply(state, plan(state, NOW))
        before, fresh = fresh, index_of(state).scored_for_new
        assert fresh - before <= 510_000
    assert TaskId(9000) in state.held

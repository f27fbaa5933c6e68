"""Who gets how much: in any backlogged hour each team its share, whatever its tasks and however many its users."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from heapq import heappop, heappush
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.ids import TaskId, UserId
from gpool.core.model import SECOND, GpuRequest, Instant, Requirements, Shape, Span, TaskKind
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.fair_share import (
    HALF_LIFE,
    MAX_REMEMBERED,
    Amounts,
    RecentUsage,
    asked_by,
    plus,
)
from gpool.core.scheduler.order.limits import Holder
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.passes.context import QueueCursor, begin, rank_of
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.state.events import (
    NodeChanged,
    QueuedTask,
    RunTimesObserved,
    TasksQueued,
    TasksReleased,
)
from gpool.core.scheduler.state.state import State
from tests.core.scheduler.state.builders import NOW, a_node, a_state, plan

HOUR = 3600 * SECOND
Kind = tuple[int, int, int, int]  # team, users, GPUs and minutes of a task


def a_task(team: int, user: int, gpus: int) -> Shape:
    needs = Requirements((GpuRequest(gpus),), gpus * 100, 1 << 20)
    return Shape(UserId(user), needs, 0, TaskKind.COMMAND, "default", "train", team)


class Backlog:
    """A pool in which every user always has tasks waiting, from when its team came."""

    def __init__(self, gpus: int, policy: Policy, seed: int = 1) -> None:
        self.state: State = a_state(*(a_node(n, cpus=8, gpus=8) for n in range(1, gpus // 8 + 1)))
        self.policy, self.dice = policy, Random(seed)
        self.now, self.last = NOW, 0
        self.kinds: list[Kind] = []
        self.ends: list[tuple[int, TaskId]] = []
        self.shape_of: dict[TaskId, tuple[Kind, Shape]] = {}
        self.lengths: dict[TaskId, Span] = {}
        self.seconds: Counter[int] = Counter()
        self.by_user: Counter[int] = Counter()

    def join(self, kind: Kind) -> None:
        self.kinds.append(kind)
        for user in range(kind[1]):
            for _ in range(3):
                self.submit(kind, a_task(kind[0], kind[0] * 10_000 + user, kind[2]))

    def submit(self, kind: Kind, shape: Shape) -> None:
        self.last += 1
        task = TaskId(self.last)
        self.shape_of[task] = (kind, shape)
        self.state.fold(TasksQueued(shape, (QueuedTask(task, 0, self.now),)))

    def run(self, until: Instant) -> None:
        """Work is counted from now until then, even of what goes on after it."""
        start = self.now
        self.seconds.clear()
        self.by_user.clear()
        for at, task in self.ends:  # what began before
            self.credit(task, (min(until, at) - start) / SECOND)
        self.schedule(until)
        while self.ends and self.ends[0][0] <= until:
            at, task = heappop(self.ends)
            self.now = Instant(at)
            self.state.fold(RunTimesObserved(self.shape_of[task][1], 1, self.lengths.pop(task)))
            self.state.fold(TasksReleased((task,), self.now))
            if self.ends and self.ends[0][0] == at:
                continue
            self.schedule(until)
        self.now = until

    def credit(self, task: TaskId, seconds: float) -> None:
        kind, shape = self.shape_of[task]
        self.seconds[kind[0]] += round(kind[2] * seconds)
        self.by_user[shape.user] += round(kind[2] * seconds)

    def schedule(self, until: Instant) -> None:
        for place in plan(self.state, self.now, self.policy).places:
            tasks = tuple(grant.task for grant in place.grants)
            self.state.fold(place.leased(tasks, self.now))
            for task in tasks:
                kind, shape = self.shape_of[task]
                length = round(kind[3] * 60 * SECOND * self.dice.uniform(0.5, 1.5))
                self.lengths[task] = Span(length)
                heappush(self.ends, (self.now + length, task))
                self.credit(task, (min(until, self.now + length) - self.now) / SECOND)
                self.submit(kind, shape)


def shares(pool: Backlog) -> dict[int, float]:
    total = sum(pool.seconds.values())
    return {team: done / total for team, done in pool.seconds.items()}


@pytest.mark.parametrize("seed", range(3))
def test_in_a_backlogged_hour_each_team_gets_its_share(seed: int) -> None:
    pool = Backlog(64, Policy(), seed)
    for kind in ((1, 3, 1, 5), (2, 1, 4, 3), (3, 5, 2, 2), (4, 2, 1, 1)):
        pool.join(kind)
    pool.run(Instant(NOW + HOUR))
    for _ in range(2):
        pool.run(Instant(pool.now + HOUR))
        for team, share in shares(pool).items():
            assert share == pytest.approx(0.25, rel=0.05), (team, shares(pool))


def test_weights_count() -> None:
    pool = Backlog(64, Policy(weights={("team", 1): 3000}))
    pool.join((1, 2, 1, 3))
    pool.join((2, 2, 1, 3))
    pool.run(Instant(NOW + HOUR))
    pool.run(Instant(pool.now + HOUR))
    assert shares(pool)[1] == pytest.approx(0.75, rel=0.05)


def test_a_greedy_team_of_many_users_gains_nothing() -> None:
    pool = Backlog(32, Policy())
    pool.join((1, 300, 1, 4))
    pool.join((2, 10, 1, 4))
    pool.run(Instant(NOW + HOUR))
    pool.run(Instant(pool.now + HOUR))
    assert shares(pool)[1] == pytest.approx(0.5, rel=0.05)


def test_a_greedy_user_of_many_teams_gains_nothing() -> None:
    """Anybody may make teams."""
    pool = Backlog(32, Policy())
    pool.join((1, 1, 1, 4))
    for team in range(2, 11):
        for _ in range(3):
            pool.submit((2, 1, 1, 4), a_task(team, 20_000, 1))
    pool.run(Instant(NOW + HOUR))
    pool.run(Instant(pool.now + HOUR))
    assert shares(pool)[1] == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(("weight", "victims"), [(1000, 1 / 7), (1000 // 6, 1 / 2)])
def test_six_accounts_of_one_person_have_six_shares_unless_their_weights_make_one(
    weight: int, victims: float
) -> None:
    """The planner does not know persons; an operator who does sets `gpool admin policy --weight`."""
    puppets = range(2, 8)
    pool = Backlog(32, Policy(weights={("user", user): weight for user in puppets}))
    for user in (1, *puppets):
        for _ in range(3):
            shape = replace(a_task(0, user, 1), team=None)
            pool.submit((1 if user == 1 else 2, 1, 1, 4), shape)
    pool.run(Instant(NOW + HOUR))
    pool.run(Instant(pool.now + HOUR))
    assert shares(pool)[1] == pytest.approx(victims, rel=0.1)


def test_who_was_alone_is_not_made_to_pay_for_it() -> None:
    pool = Backlog(64, Policy())
    pool.join((1, 2, 1, 3))
    pool.run(Instant(NOW + 5 * HOUR))
    pool.join((2, 2, 1, 3))
    pool.run(Instant(pool.now + 300 * SECOND))  # until what ran before has ended
    pool.run(Instant(pool.now + HOUR))
    assert shares(pool)[1] == pytest.approx(0.5, rel=0.05)


def test_users_of_a_team_share_alike() -> None:
    pool = Backlog(64, Policy())
    pool.join((1, 4, 1, 3))
    pool.run(Instant(NOW + HOUR))
    pool.run(Instant(pool.now + HOUR))
    total = sum(pool.by_user.values())
    for done in pool.by_user.values():
        assert done / total == pytest.approx(0.25, rel=0.05)


def used(pool: Backlog) -> dict[tuple[str, int], int]:
    return pool.state.used(pool.now)


def test_what_was_had_is_the_same_after_a_restart() -> None:
    pool = Backlog(32, Policy())
    pool.join((1, 2, 1, 4))
    pool.join((2, 1, 4, 9))
    pool.run(Instant(NOW + HOUR))
    before, at = used(pool), pool.now
    assert before["team", 1] > 0
    anew = State()
    anew.shares.restore({key: (value, at) for key, value in before.items()}, at)
    assert anew.used(at) == pytest.approx(before, abs=2)
    later = Instant(at + HALF_LIFE)
    anew.shares.restore({key: (value, at) for key, value in before.items()}, later)
    halved = {key: value / 2 for key, value in before.items()}
    assert anew.used(later) == pytest.approx(halved, abs=2)


def test_a_state_that_takes_the_place_of_another_knows_what_was_had() -> None:
    pool = Backlog(32, Policy())
    pool.join((1, 2, 1, 4))
    pool.run(Instant(NOW + HOUR))
    anew = State()
    anew.inherit(pool.state, pool.now)
    assert anew.used(pool.now) == used(pool)


def test_a_state_that_takes_the_place_of_another_sees_the_pieces_of_those_who_wait_in_it() -> None:
    """Who stopped waiting, or began to, while folding had stopped is seen as the new picture has it."""
    old, anew, alike = State(), State(), State()
    old.fold(TasksQueued(a_task(1, 1, 8), (QueuedTask(TaskId(1), 0, NOW),)))
    for state in (anew, alike):
        state.fold(TasksQueued(a_task(2, 2, 4), (QueuedTask(TaskId(2), 0, NOW),)))
    anew.inherit(old, NOW)
    assert anew.shares.usage.steps == alike.shares.usage.steps


def test_short_tasks_are_never_free() -> None:
    """Two tenants take turns on one GPU, one with tasks ten times as long: both get half of the time."""
    pool = Backlog(8, Policy())
    pool.join((1, 1, 8, 1))
    pool.join((2, 1, 8, 10))
    pool.run(Instant(NOW + 2 * HOUR))
    pool.run(Instant(pool.now + 4 * HOUR))
    assert shares(pool)[1] == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("minutes", [5, 20])
def test_long_tasks_that_take_turns_never_win_by_their_length(minutes: int) -> None:
    """The whole pool by turns with somebody whose tasks are a minute: over hours both get half."""
    pool = Backlog(8, Policy())
    pool.join((1, 1, 8, 1))
    pool.join((2, 1, 8, minutes))
    pool.run(Instant(NOW + 2 * HOUR))
    pool.run(Instant(pool.now + 8 * HOUR))
    assert shares(pool)[1] == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("seed", range(2))
def test_from_the_first_hour_large_and_long_pieces_are_rounded_to_the_nearest(seed: int) -> None:
    """42 2/3 GPUs each: five pieces of eight and a third. Six are 12 % too many for two hours."""
    pool = Backlog(128, Policy(), seed)
    for kind in ((1, 2, 1, 10), (2, 2, 8, 120), (3, 1, 2, 20)):
        pool.join(kind)
        for _ in range(40):
            pool.submit(kind, a_task(kind[0], kind[0] * 10_000, kind[2]))
    pool.run(Instant(NOW + HOUR))
    for team, share in shares(pool).items():
        assert share == pytest.approx(1 / 3, rel=0.07), (team, shares(pool))


def test_an_hour_that_gave_too_little_is_never_paid_for_by_the_hour_after_the_next() -> None:
    """One team fills the pool for an hour before the others come, and nothing may be stopped."""
    pool = Backlog(64, Policy())
    pool.join((1, 64, 1, 60))
    pool.run(Instant(NOW + 60 * SECOND))
    for kind in ((2, 4, 1, 5), (3, 4, 2, 10), (4, 2, 1, 3)):
        pool.join(kind)
    pool.run(Instant(pool.now + 2 * HOUR))
    pool.run(Instant(pool.now + HOUR))
    for team, share in shares(pool).items():
        assert share == pytest.approx(0.25, rel=0.06), (team, shares(pool))


SHAPES = [a_task(1, 1, 1), a_task(1, 1, 8), a_task(1, 2, 4), a_task(2, 3, 2)]


@given(st.data())
def test_all_tasks_of_a_holder_are_always_seen_with_the_same_share(data: st.DataObject) -> None:
    """So that a piece's size decides between tenants, never among a user's own tasks."""
    pool = Backlog(64, Policy())
    for shape in data.draw(st.lists(st.sampled_from(SHAPES), min_size=2, max_size=6)):
        assert shape.team is not None
        pool.submit((shape.team, 1, shape.requirements.gpu[0].count, 5), shape)
        if data.draw(st.booleans()):
            pool.run(Instant(pool.now + data.draw(st.integers(1, 300)) * SECOND))
    ctx = begin(pool.state, PlacementIndex(), pool.now, pool.policy, ORDERS["fair_share"])
    seen: dict[tuple[int | None, int], set[tuple[int, ...]]] = {}
    for entry in pool.state.queues.shapes():
        shape = entry.shape
        rank = rank_of(ctx, QueueCursor(entry))
        shares = (rank.band, rank.key.tenant_share, rank.key.user_share)  # type: ignore[attr-defined]
        seen.setdefault((shape.team, shape.user), set()).add(shares)
    assert all(len(keys) == 1 for keys in seen.values())


@given(
    held=st.integers(0, 64),
    gpus=st.integers(1, 8),
    passed=st.integers(0, 7200),
    lasts=st.one_of(st.none(), st.integers(1, 7200)),
)
def test_a_share_never_gets_smaller_by_one_more_piece(
    held: int, gpus: int, passed: int, lasts: int | None
) -> None:
    state, shape = a_state(*(a_node(n, cpus=8, gpus=8) for n in range(1, 9))), a_task(1, 1, gpus)
    for _ in range(3 if lasts else 0):
        state.fold(RunTimesObserved(shape, 1, Span((lasts or 0) * SECOND)))
    state.fold(TasksQueued(shape, (QueuedTask(TaskId(1), 0, NOW),)))
    shares = state.shares
    shares.pass_time(NOW, 1)
    shares.take(shape, (8000, 800, 1 << 20))
    shares.pass_time(Instant(NOW + passed * SECOND), 1)
    shares.give(shape, (8000, 800, 1 << 20))
    before: Amounts = (1000 * held, 100 * held, held)
    more = plus(before, asked_by(shape))
    holders: tuple[Holder, ...] = (("team", 1), ("user", 1))
    for holder in holders:
        assert shares.of(holder, 1000, before) <= shares.of(holder, 1000, more)


@given(st.permutations(range(5)))
def test_a_piece_is_always_the_same_whichever_came_first(order: list[int]) -> None:
    """Nodes before tasks, tasks before nodes, small before large."""
    state, shapes = State(), [a_task(1, 1, 1), a_task(1, 1, 8)]
    for number in order:
        if number < 3:
            state.fold(NodeChanged(a_node(number + 1, cpus=8, gpus=8)))
        else:
            task = QueuedTask(TaskId(number), 0, NOW)
            state.fold(TasksQueued(shapes[number - 3], (task,)))
    held = (8000, 800, 0)
    assert state.shares.of(("team", 1), 1000, held) == (8000 + 500) * 10**6 // 24_000


def test_who_has_had_nothing_is_always_seen_with_nothing() -> None:
    """Or a gang as large as the pool would never come first."""
    pool = Backlog(64, Policy())
    pool.join((1, 2, 1, 5))
    pool.run(Instant(NOW + 600 * SECOND))
    fresh = State()
    fresh.fold(TasksQueued(a_task(2, 9, 8), (QueuedTask(TaskId(9), 0, NOW),)))
    assert fresh.shares.of(("team", 2)) == 0
    assert pool.state.shares.of(("team", 1)) > 0


def test_a_team_with_more_weight_that_comes_back_begins_even() -> None:
    pool = Backlog(64, Policy(weights={("team", 1): 3000}))
    pool.state.shares.weights = pool.policy.weights
    pool.join((1, 2, 1, 3))
    pool.join((2, 2, 1, 3))
    pool.run(Instant(NOW + HOUR))
    pool.join((3, 2, 1, 3))
    pool.run(Instant(pool.now + HOUR))
    assert shares(pool)[3] == pytest.approx(0.2, rel=0.05)


def test_a_large_pool_of_users_never_makes_it_forget_their_team() -> None:
    usage = RecentUsage()
    usage.pass_time(NOW, is_contended=True)
    usage.settle(("team", 1), 500_000)
    usage.pass_time(Instant(NOW + HOUR), is_contended=True)
    for user in range(MAX_REMEMBERED + 10):
        usage.settle(("team", 1), 500_000)
        usage.settle(("user", user), 1)
    assert usage.recent(("team", 1), 500_000) > 300_000

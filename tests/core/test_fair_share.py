"""Who gets how much: in any backlogged hour each team its share, whatever its tasks and however many its users."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from random import Random

import pytest
from scheduling_builders import NOW, a_node, a_state

from gpool.core.ids import TaskId, UserId
from gpool.core.model import SECOND, GpuRequest, Instant, Requirements, Shape, TaskKind
from gpool.core.scheduling.events import QueuedTask, TasksQueued, TasksReleased
from gpool.core.scheduling.fair_share import HALF_LIFE, MAX_REMEMBERED, Usage
from gpool.core.scheduling.orders import Policy
from gpool.core.scheduling.plan import plan
from gpool.core.scheduling.state import State

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
    anew.shares.recall({key: (value, at) for key, value in before.items()}, at)
    assert anew.used(at) == pytest.approx(before, abs=2)
    later = Instant(at + HALF_LIFE)
    anew.shares.recall({key: (value, at) for key, value in before.items()}, later)
    halved = {key: value / 2 for key, value in before.items()}
    assert anew.used(later) == pytest.approx(halved, abs=2)


def test_a_state_that_takes_the_place_of_another_knows_what_was_had() -> None:
    pool = Backlog(32, Policy())
    pool.join((1, 2, 1, 4))
    pool.run(Instant(NOW + HOUR))
    anew = State()
    anew.inherit(pool.state, pool.now)
    assert anew.used(pool.now) == used(pool)


def test_short_tasks_are_never_free() -> None:
    """Two tenants take turns on one GPU, one with tasks ten times as long: both get half of the time."""
    pool = Backlog(8, Policy())
    pool.join((1, 1, 8, 1))
    pool.join((2, 1, 8, 10))
    pool.run(Instant(NOW + 2 * HOUR))
    pool.run(Instant(pool.now + 4 * HOUR))
    assert shares(pool)[1] == pytest.approx(0.5, rel=0.1)


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
    usage = Usage()
    usage.pass_time(NOW, is_contended=True)
    usage.settle(("team", 1), 500_000)
    usage.pass_time(Instant(NOW + HOUR), is_contended=True)
    for user in range(MAX_REMEMBERED + 10):
        usage.settle(("team", 1), 500_000)
        usage.settle(("user", user), 1)
    assert usage.lately(("team", 1), 500_000) > 300_000

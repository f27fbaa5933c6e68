"""What holds whatever the operator chose: every order, with and without preemption, with and without gangs, guarantees, limits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, GpuRequest, Instant, Shape, Span
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.limits import GpuLimits, Holder, gpus_of
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.passes import plan as passes
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.state.events import (
    PassPlan,
    QueuedTask,
    TasksLeased,
    TasksPreempted,
    TasksQueued,
    TasksReleased,
)
from tests.core.scheduler.state.builders import NOW, a_node, a_shape, a_state, plan

STEP = 7 * 60 * SECOND  # turns and times of protection begin and end in between
STEPS = 60
NODES, GPUS = 3, 4


@dataclass(frozen=True, slots=True)
class Job:
    user: int
    team: int | None
    gpus: int
    nodes: int
    preemptible: bool
    priority: int
    comes: int  # step
    lasts: int  # steps

    def shape(self) -> Shape:
        needs = {"gpu": (GpuRequest(self.gpus),), "cpu_milli": 100, "memory_bytes": 1 << 20}
        shape = a_shape(self.user, "f", self.priority, nodes=self.nodes, **needs)
        return replace(shape, team=self.team, preemptible=self.preemptible)


def jobs(most_nodes: int) -> st.SearchStrategy[list[Job]]:
    one = st.builds(
        Job,
        st.integers(1, 3),
        st.sampled_from((None, 1, 2)),
        st.sampled_from((1, 2, 4)),
        st.integers(1, most_nodes),
        st.booleans(),
        st.integers(0, 2),
        st.integers(0, 5),
        st.integers(1, 6),
    )
    return st.lists(one, min_size=1, max_size=12)


class Story:
    """A pool that lives through all of it, one pass after another, and is looked at after each."""

    def __init__(self, all_: list[Job], policy: Policy) -> None:
        self.jobs = {TaskId(n): job for n, job in enumerate(all_, 1)}
        self.policy, self.now = policy, NOW
        self.state = a_state(*(a_node(n, cpus=8, gpus=GPUS) for n in range(1, NODES + 1)))
        self.left = {task: job.lasts * STEP for task, job in self.jobs.items()}
        self.began: dict[TaskId, Instant] = {}
        self.epochs = dict.fromkeys(self.jobs, 0)

    def live(self) -> None:
        for step in range(STEPS):
            self.now = Instant(NOW + step * STEP)
            for task, job in self.jobs.items():
                if job.comes == step:
                    self.queue(task, Span(0))
            for task in [t for t, at in self.began.items() if self.now - at >= self.left[t]]:
                self.state.fold(TasksReleased((task,), self.now))
                del self.began[task], self.left[task]
            self.come_to_rest()

    def queue(self, task: TaskId, ran: Span) -> None:
        job = self.jobs[task]
        came = Instant(NOW + job.comes * STEP)
        self.state.fold(TasksQueued(job.shape(), (QueuedTask(task, self.epochs[task], came, ran),)))

    def come_to_rest(self) -> None:
        stopped: set[TaskId] = set()
        for _ in range(3 * len(self.jobs) + 3):
            self.state.pass_time(self.now)
            decided = plan(self.state, self.now, self.policy)
            fresh = PlacementIndex()  # nothing but the state counts
            assert decided == passes.plan(self.state, fresh, self.now, self.policy)
            self.write(decided, stopped)
            self.check()
            if not decided.places and not decided.preemptions:
                return
        raise AssertionError("it never came to rest")

    def write(self, decided: PassPlan, stopped: set[TaskId]) -> None:
        for place in decided.places:
            tasks = tuple(grant.task for grant in place.grants)
            leased: TasksLeased = place.leased(tasks, self.now)
            self.state.fold(leased)
            for grant in place.grants:
                assert grant.task not in self.began, "it runs already"
                self.began[grant.task], self.epochs[grant.task] = self.now, grant.epoch
        for each in decided.preemptions:
            self.judge(each.task, each.beneficiary)
            assert each.task not in stopped, "stopped twice at one moment"
            stopped.add(each.task)
            self.state.fold(TasksPreempted((each.task,)))
        for each in decided.preemptions:
            ran = self.state.attained(each.task, self.now)
            self.left[each.task] -= self.now - self.began.pop(each.task)
            self.state.fold(TasksReleased((each.task,), self.now))
            self.queue(each.task, ran)

    def judge(self, task: TaskId, gainer: TaskId) -> None:
        policy, job = self.policy, self.jobs[task]
        assert policy.preemption
        assert job.preemptible
        assert task in self.began
        assert gainer not in self.began
        assert ORDERS[policy.order].may_preempt or policy.limits.guaranteed
        if self.epochs[task] > 1:
            is_own = self.jobs[gainer].user == job.user
            alone = policy.protection if is_own else min(policy.protection, policy.quantum)
            assert self.now - self.began[task] >= alone

    def check(self) -> None:
        held: dict[Holder, int] = {}
        for task, line in self.state.held.items():
            parts = (line, *line.members)
            assert len({part.node for part in parts}) == self.jobs[task].nodes, "not whole"
            taken = sum(gpus_of(part.allocation) for part in parts)
            job = self.jobs[task]
            held["user", job.user] = held.get(("user", job.user), 0) + taken
            if job.team is not None:
                held["team", job.team] = held.get(("team", job.team), 0) + taken
        for entry in self.state.nodes.values():
            assert all(gpu.free_share >= 0 for gpu in entry.room.gpus.values())
        for holder, gpus in held.items():
            limit = self.policy.limits.of(holder)
            assert limit is None or gpus <= limit


LIMITS = (
    GpuLimits(),
    GpuLimits(guaranteed={("team", 1): 4000}),
    GpuLimits(user_milli=8000),
    GpuLimits(
        guaranteed={("user", 1): 2000, ("team", 2): 6000}, user_milli=10_000, team_milli=11_000
    ),
)


@pytest.mark.parametrize("most_nodes", [1, NODES], ids=["single", "gangs"])
@pytest.mark.parametrize("preemption", [True, False], ids=["preempting", "waiting"])
@pytest.mark.parametrize("order", sorted(ORDERS))
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_no_policy_ever_books_twice_stops_in_vain_or_leaves_anybody_waiting(
    order: str, preemption: bool, most_nodes: int, data: st.DataObject
) -> None:
    policy = Policy(
        order=order, preemption=preemption, limits=data.draw(st.sampled_from(LIMITS), "limits")
    )
    story = Story(data.draw(jobs(most_nodes), "jobs"), policy)
    story.live()
    most = [policy.limits.of(("user", 0)), policy.limits.of(("team", 0))]
    limit = min((each for each in most if each is not None), default=NODES * GPUS * 1000)
    never = {t for t, j in story.jobs.items() if 1000 * j.gpus * j.nodes > limit}
    assert set(story.left) <= never  # all others always end

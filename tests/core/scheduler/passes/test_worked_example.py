"""The worked examples of the guides on fair share and preemption: their figures are those of the planner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import SECOND, GpuRequest, Instant, Shape
from gpool.core.scheduler.order.limits import Holder
from gpool.core.scheduler.state import snapshot
from gpool.core.scheduler.state.events import (
    PassPlan,
    QueuedTask,
    TasksPreempted,
    TasksQueued,
    TasksReleased,
)
from gpool.core.scheduler.state.state import State
from tests.core.scheduler.state.builders import NOW, a_node, a_shape, a_state, plan

GUIDES = Path(__file__).parents[4] / "docs" / "guides"
PASS = 10 * SECOND
P, Q, R = 1, 2, 3
GPUS_PER_TASK = {P: 8, Q: 4, R: 1}
TASKS_PER_TEAM = 64


def shape_of(team: int) -> Shape:
    needs = {
        "gpu": (GpuRequest(GPUS_PER_TASK[team]),),
        "cpu_milli": 100,
        "memory_bytes": 1 << 20,
    }
    return replace(a_shape(team, group=f"team{team}", **needs), preemptible=True, team=team)


class ExamplePool:
    """Four nodes of 8 GPUs, three teams with more tasks than fit. Victims stop at once."""

    def __init__(self) -> None:
        self.state = a_state(*(a_node(number, cpus=64, gpus=8) for number in (1, 2, 3, 4)))
        self.now = Instant(NOW)
        self.running: dict[TaskId, tuple[Shape, int]] = {}
        for team in GPUS_PER_TASK:
            first = team * 1000
            tasks = (TaskId(id_) for id_ in range(first, first + TASKS_PER_TEAM))
            queued = tuple(QueuedTask(task, 0, self.now) for task in tasks)
            self.state.fold(TasksQueued(shape_of(team), queued))

    def run_until(self, seconds: int) -> None:
        """Passes before this time."""
        end = NOW + seconds * SECOND
        while self.now < end:
            self.run_pass()

    def run_pass(self) -> PassPlan:
        self.state.pass_time(self.now)
        decided = plan(self.state, self.now)
        for place in decided.places:
            self.state.fold(place.leased(tuple(each.task for each in place.grants), self.now))
            self.running |= {each.task: (place.shape, each.epoch) for each in place.grants}
        if decided.preemptions:
            victims = tuple(each.task for each in decided.preemptions)
            gainers = tuple(each.beneficiary for each in decided.preemptions)
            self.state.fold(TasksPreempted(victims, gainers))
            self.state.fold(TasksReleased(victims, self.now))
            for task in victims:
                shape, epoch = self.running.pop(task)
                again = QueuedTask(task, epoch, Instant(NOW))
                self.state.fold(TasksQueued(shape, (again,)))
        self.now = Instant(self.now + PASS)
        return decided

    def gpus(self) -> dict[int, int]:
        held = dict.fromkeys(GPUS_PER_TASK, 0)
        for shape, _ in self.running.values():
            assert shape.team is not None
            held[shape.team] += GPUS_PER_TASK[shape.team]
        return held

    def compared(self) -> dict[int, str]:
        """As the guides print it."""
        return {team: f"**{self.state.shares.of(tenant(team)) / 1e6:.3f}**" for team in (P, Q, R)}


def tenant(team: int) -> Holder:
    return "team", team


def starts(state: State, now: Instant) -> set[tuple[NodeId, int | None]]:
    return {(place.node, place.shape.team) for place in plan(state, now).places}


def test_compared_shares_after_ten_minutes_are_those_of_the_guide() -> None:
    pool = ExamplePool()
    pool.run_until(600)
    assert pool.gpus() == {P: 8, Q: 12, R: 12}
    pool.state.pass_time(pool.now)
    shares = pool.compared()
    assert shares == {P: "**0.595**", Q: "**0.767**", R: "**0.720**"}
    text = (GUIDES / "scheduling.md").read_text()
    assert [share for share in shares.values() if share not in text] == []


def test_a_pin_keeps_the_freed_node_for_the_team_of_the_guide() -> None:
    pool = ExamplePool()
    pool.run_until(19 * 60 + 50)
    assert pool.gpus() == {P: 8, Q: 12, R: 12}
    victims = pool.run_pass().preemptions
    assert {each.node for each in victims} == {NodeId(3)}
    assert len(victims) == 5
    shares = pool.compared()
    assert shares == {P: "**0.849**", Q: "**0.818**", R: "**0.771**"}
    text = (GUIDES / "preemption.md").read_text()
    assert [share for share in shares.values() if share not in text] == []
    unpinned = snapshot.take(pool.state).state()
    unpinned.pins.drop([task for task, _ in unpinned.pins.items()])
    assert starts(unpinned, pool.now) == {(NodeId(3), Q), (NodeId(3), R)}
    assert starts(pool.state, pool.now) == {(NodeId(3), P)}

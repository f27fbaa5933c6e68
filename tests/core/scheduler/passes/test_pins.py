"""Room that was made for somebody is theirs: those who come first by now do not take it, but for a guarantee."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.fairness import HOUR, SLICE, Pool, Tenant, Work

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import GpuRequest, Instant, Shape
from gpool.core.scheduler.order.limits import GpuLimits
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.state import snapshot
from gpool.core.scheduler.state.events import (
    NodeChanged,
    NodeRemoved,
    Placement,
    QueuedTask,
    TasksPreempted,
    TasksQueued,
    TasksReleased,
    TasksWithdrawn,
)
from gpool.core.scheduler.state.hints import PinnedSlots
from gpool.core.scheduler.state.state import State
from tests.core.scheduler.state.builders import NOW, a_node, a_shape, a_state, plan

LATER = Instant(NOW + HOUR)
RUNS, FIRST, NEXT = TaskId(1), TaskId(2), TaskId(3)  # the last two wait, in this order


def a_task_of(user: int) -> Shape:
    needs = {"gpu": (GpuRequest(1),), "cpu_milli": 100, "memory_bytes": 1 << 20}
    return replace(a_shape(user, **needs), preemptible=True)


def submit(state: State, task: TaskId, at: int) -> None:
    state.fold(TasksQueued(a_task_of(task), (QueuedTask(task, 0, Instant(at)),)))


def a_full_pool() -> State:
    """One GPU in use, and two users who wait for it."""
    state = a_state(a_node(1, gpus=1))
    submit(state, RUNS, NOW)
    start(state, *plan(state, NOW).places)
    submit(state, FIRST, NOW + 1)
    submit(state, NEXT, NOW + 2)
    return state


def start(state: State, *places: Placement) -> list[TaskId]:
    tasks = [grant.task for place in places for grant in place.grants]
    for place in places:
        state.fold(place.leased(tuple(grant.task for grant in place.grants), NOW))
    return tasks


def stop(state: State, *gainer: TaskId) -> None:
    state.fold(TasksPreempted((RUNS,), gainer))


def started(state: State, policy: Policy | None = None) -> list[TaskId]:
    return start(state, *plan(state, LATER, policy or Policy()).places)


@pytest.mark.parametrize(("gainer", "gets_it"), [((NEXT,), NEXT), ((), FIRST)])
def test_room_goes_to_whom_it_was_made_for_and_else_to_the_first(
    gainer: tuple[TaskId, ...], gets_it: TaskId
) -> None:
    state = a_full_pool()
    stop(state, *gainer)
    state.fold(TasksReleased((RUNS,), LATER))
    assert started(state) == [gets_it]
    assert not state.pins


def test_room_that_is_being_made_is_promised_once_and_nothing_more_stops_for_it() -> None:
    state = a_full_pool()
    stop(state, NEXT)
    decided = plan(state, LATER)
    assert decided.places == decided.preemptions == ()
    state.fold(TasksReleased((RUNS,), LATER))
    assert started(state) == [NEXT]


def test_who_was_promised_room_starts_sooner_where_there_is_some_when_it_is_their_turn() -> None:
    state = a_full_pool()
    stop(state, NEXT)
    state.fold(NodeChanged(a_node(2, gpus=1)))
    assert started(state) == [FIRST]
    assert started(state) == []
    state.fold(NodeChanged(a_node(3, gpus=1)))
    assert started(state) == [NEXT]
    assert not state.pins
    submit(state, TaskId(4), LATER)
    state.fold(TasksReleased((RUNS,), LATER))
    assert started(state) == [TaskId(4)]


def test_what_a_guarantee_covers_goes_before_a_promise() -> None:
    state = a_full_pool()
    stop(state, NEXT)
    state.fold(TasksReleased((RUNS,), LATER))
    limits = GpuLimits(guaranteed={("user", UserId(FIRST)): 1000})
    assert started(state, Policy(limits=limits)) == [FIRST]
    assert not state.pins  # the room is gone


def test_a_promise_ends_with_its_task_and_with_its_node() -> None:
    state = a_full_pool()
    stop(state, NEXT)
    state.fold(TasksReleased((RUNS,), LATER))
    twin = snapshot.take(state).state()
    assert twin.pins.items() == [(NEXT, NodeId(1))]
    state.fold(TasksWithdrawn((NEXT,)))
    assert not state.pins
    assert started(state) == [FIRST]
    twin.fold(NodeRemoved(NodeId(1)))
    assert not twin.pins


def test_a_state_in_place_of_another_keeps_promises_to_those_who_wait_in_both() -> None:
    state, again = a_full_pool(), a_full_pool()
    stop(state, NEXT)
    again.inherit(state, LATER)
    assert again.pins.items() == [(NEXT, NodeId(1))]
    other = a_state(a_node(1, gpus=1))
    other.inherit(state, LATER)
    assert not other.pins


def test_while_more_stops_there_another_start_ends_no_promise() -> None:
    pins, node = PinnedSlots(), NodeId(1)
    pins.pin(FIRST, node)
    pins.pin(NEXT, node)
    pins.note_start(node, [False, True])
    assert len(pins.items()) == 2
    pins.note_start(NodeId(2), [])
    assert len(pins.items()) == 2
    pins.note_start(node, [False])
    assert not pins


class Watched(Pool):
    """Counts what is stopped for others who do not start in the next pass."""

    vain = 0
    expected: frozenset[TaskId] = frozenset()
    tells = True

    def schedule(self) -> None:
        while True:
            self.state.pass_time(self.now)
            decided = plan(self.state, self.now, self.policy)
            granted = {grant.task for place in decided.places for grant in place.grants}
            self.vain += len(self.expected - granted)
            for place in decided.places:
                leased = place.leased(tuple(grant.task for grant in place.grants), self.now)
                self.state.fold(leased)
                for grant in place.grants:
                    self.start(leased, grant.task, grant.epoch)
            self.expected = frozenset(
                each.beneficiary
                for each in decided.preemptions
                if self.of[each.beneficiary][0] is not self.of[each.task][0]
            )
            for each in decided.preemptions:
                gainers = (each.beneficiary,) if self.tells else ()
                self.state.fold(TasksPreempted((each.task,), gainers))
            for each in decided.preemptions:
                self.stop(each.task)
            if not decided.preemptions and not decided.places:
                return


@pytest.mark.parametrize("tells", [True, False])
def test_between_teams_nothing_is_stopped_in_vain(tells: bool) -> None:
    """Teams with pieces of 8, 4 and 1 in 32 GPUs. If it is not told for whom, those who lost take the room back."""
    pool = Watched(4, Policy(), 7)
    pool.tick, pool.tells = SLICE // 10, tells
    for team, gpus in enumerate((8, 4, 1), 1):
        pool.join(Tenant(team, Work(gpus, 100, preemptible=True)))
    pool.run(2 * HOUR)
    assert (pool.vain == 0) is tells

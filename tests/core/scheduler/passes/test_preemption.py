"""What is stopped for others: only what allows it, the cheapest whole set, and never back and forth."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import SECOND, Allocation, GpuRequest, Instant, Shape, Slice, Span
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.orders import (
    AGES,
    Candidate,
    Key,
    Policy,
    Rank,
    attained_at,
    level_of,
)
from gpool.core.scheduler.passes.victim_sets import Clearable, fewest_victims
from gpool.core.scheduler.passes.victims import Victim, in_sight
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.events import (
    PassPlan,
    QueuedTask,
    TasksPreempted,
    TasksQueued,
    TasksReleased,
    TasksWithdrawn,
)
from gpool.core.scheduler.state.state import State
from gpool.core.scheduler.state.waiting import HeldAllocation
from tests.core.scheduler.state.builders import NOW, a_node, a_shape, a_state, plan

HOUR = 3600 * SECOND
FAIR = Policy()


def a_gpu_task(gpus: int = 1, *, user: int = 1, nodes: int = 1, preemptible: bool = True) -> Shape:
    needs = {"gpu": (GpuRequest(gpus),), "cpu_milli": 100, "memory_bytes": 1 << 20}
    return replace(a_shape(user, f"{gpus}x{nodes}", nodes=nodes, **needs), preemptible=preemptible)


def submit(state: State, shape: Shape, *ids: int, at: int = NOW, ran: int = 0) -> None:
    tasks = tuple(QueuedTask(TaskId(i), 0, Instant(at), Span(ran)) for i in ids)
    state.fold(TasksQueued(shape, tasks))


def write(state: State, decided: PassPlan, now: int) -> None:
    for place in decided.places:
        tasks = tuple(grant.task for grant in place.grants)
        state.fold(place.leased(tasks, Instant(now)))
    if decided.preemptions:
        state.fold(TasksPreempted(tuple(each.task for each in decided.preemptions)))


def stop(state: State, task: int, shape: Shape, now: int, at: int = NOW) -> None:
    """Its node says that it ended; it is queued again with its age."""
    ran = state.attained(TaskId(task), Instant(now))
    state.fold(TasksReleased((TaskId(task),), Instant(now)))
    state.fold(TasksQueued(shape, (QueuedTask(TaskId(task), 1, Instant(at), ran),)))


def running(state: State) -> set[int]:
    return {int(task) for task in state.held}


def test_a_fresh_task_takes_the_place_of_one_that_has_run_for_long() -> None:
    state, old, new = a_state(a_node(1, gpus=1)), a_gpu_task(), a_gpu_task(user=1)
    submit(state, old, 1)
    write(state, plan(state, NOW, FAIR), NOW)
    later = Instant(NOW + HOUR)
    submit(state, new, 2, at=later - FAIR.restart)
    decided = plan(state, later, FAIR)
    assert [each.task for each in decided.preemptions] == [1]
    assert decided.preemptions[0].epoch == 1
    assert decided.preemptions[0].beneficiary == 2
    assert decided.places == ()  # the room is not there yet
    write(state, decided, later)
    assert plan(state, later, FAIR) == PassPlan()  # asked once
    stop(state, 1, old, later)
    write(state, plan(state, later, FAIR), later)
    assert running(state) == {2}
    assert plan(state, later, FAIR) == PassPlan()  # and not back again


def test_what_does_not_allow_it_is_never_stopped() -> None:
    state = a_state(a_node(1, gpus=1))
    submit(state, a_gpu_task(preemptible=False), 1)
    write(state, plan(state, NOW, FAIR), NOW)
    later = Instant(NOW + 10 * HOUR)
    submit(state, a_gpu_task(user=2), 2, at=later)
    assert plan(state, later, FAIR).preemptions == ()


def test_the_cheapest_whole_set_is_stopped() -> None:
    state = a_state(a_node(1, cpus=8, gpus=4), a_node(2, cpus=8, gpus=4))
    submit(state, a_gpu_task(4), 1)
    submit(state, a_gpu_task(1), 2, 3)
    submit(state, a_gpu_task(2), 4)
    write(state, plan(state, NOW, FAIR), NOW)
    assert running(state) == {1, 2, 3, 4}
    later = Instant(NOW + HOUR)
    submit(state, a_gpu_task(2), 5, at=later - FAIR.restart)
    stopped = {each.task for each in plan(state, later, FAIR).preemptions}
    assert stopped in ({4}, {2, 3})  # two GPUs, not four


def test_half_a_place_for_a_gang_is_never_made() -> None:
    state = a_state(a_node(1, gpus=2), a_node(2, gpus=2))
    submit(state, a_gpu_task(2), 1)
    submit(state, a_gpu_task(2, preemptible=False), 2)
    write(state, plan(state, NOW, FAIR), NOW)
    later = Instant(NOW + HOUR)
    submit(state, a_gpu_task(2, nodes=2), 3, at=later)
    assert plan(state, later, FAIR).preemptions == ()


def test_a_gang_is_placed_whole_and_leaves_whole() -> None:
    state = a_state(*(a_node(n, gpus=2) for n in (1, 2, 3)))
    gang = a_gpu_task(2, nodes=3)
    submit(state, gang, 1)
    decided = plan(state, NOW, FAIR)
    (place,) = decided.places
    assert {place.node, *(member.node for member in place.members)} == {1, 2, 3}
    write(state, decided, NOW)
    later = Instant(NOW + HOUR)
    submit(state, a_gpu_task(1), 2, at=later - FAIR.restart)
    decided = plan(state, later, FAIR)
    assert [each.task for each in decided.preemptions] == [1]
    write(state, decided, later)
    stop(state, 1, gang, later)
    assert all(not node.lines for node in state.nodes.values())
    write(state, plan(state, later, FAIR), later)
    assert running(state) == {2}  # two free nodes are not three


def test_a_preempted_task_is_left_alone_for_a_while() -> None:
    state, shape = a_state(a_node(1, gpus=1)), a_gpu_task()
    submit(state, shape, 1, ran=3 * HOUR)
    write(state, plan(state, NOW, FAIR), NOW)
    soon = Instant(NOW + FAIR.protection // 2)
    submit(state, shape, 2, at=soon)
    assert plan(state, soon, FAIR).preemptions == ()
    late = Instant(NOW + FAIR.protection)
    assert [each.task for each in plan(state, late, FAIR).preemptions] == [1]


def test_nothing_is_preempted_when_the_policy_says_so() -> None:
    state = a_state(a_node(1, gpus=1))
    submit(state, a_gpu_task(), 1)
    write(state, plan(state, NOW, FAIR), NOW)
    later = Instant(NOW + HOUR)
    submit(state, a_gpu_task(), 2, at=later)
    assert plan(state, later, replace(FAIR, preemption=False)).preemptions == ()


def test_a_task_that_waits_in_vain_rises() -> None:
    order, shape = ORDERS["fair_share"], a_gpu_task()
    state = a_state(a_node(1, gpus=1))
    submit(state, shape, 1, ran=AGES[-1])
    submit(state, shape, 2, at=NOW + 1)
    assert plan(state, Instant(NOW + HOUR), FAIR).places[0].grants[0].task == 2
    assert order is ORDERS["fair_share"]
    late = Instant(NOW + AGES[-1] + 3 * FAIR.promotion)
    assert plan(state, late, FAIR).places[0].grants[0].task == 1


def test_a_task_waits_as_long_as_a_restart_costs_before_it_stops_another() -> None:
    state, shape = a_state(a_node(1, gpus=1)), a_gpu_task()
    submit(state, shape, 1)
    write(state, plan(state, NOW, FAIR), NOW)
    later = NOW + HOUR
    submit(state, shape, 2, at=later)
    assert plan(state, Instant(later + FAIR.restart - 1), FAIR).preemptions == ()
    worth_it = plan(state, Instant(later + FAIR.restart), FAIR).preemptions
    assert [each.task for each in worth_it] == [1]


def test_an_older_task_does_not_stop_a_younger_one_of_its_level() -> None:
    state, shape = a_state(a_node(1, gpus=1)), a_gpu_task()
    submit(state, shape, 2, at=NOW + 1, ran=3 * HOUR)
    write(state, plan(state, Instant(NOW + 1), FAIR), NOW + 1)
    submit(state, shape, 1, ran=4 * HOUR)
    later = Instant(NOW + HOUR)
    assert plan(state, later, FAIR).preemptions == ()
    submit(state, shape, 3, ran=HOUR)  # control: of a lower level
    assert [each.beneficiary for each in plan(state, later, FAIR).preemptions] == [3]


def test_a_start_in_the_same_pass_does_not_spare_a_long_task_of_its_user() -> None:
    state = a_state(a_node(1, gpus=2), a_node(2, gpus=1))
    submit(state, a_gpu_task(1), 1, ran=AGES[3])
    submit(state, a_gpu_task(1), 2, 3)
    write(state, plan(state, NOW, FAIR), NOW)
    assert running(state) == {1, 2, 3}
    waited = Instant(NOW + HOUR // 4)
    submit(state, a_gpu_task(2), 4)  # not even with the place of task 1
    submit(state, a_gpu_task(1), 5, 6)
    held = next(task for task in (2, 3) if state.held[TaskId(task)].node == 2)
    state.fold(TasksReleased((TaskId(held),), waited))
    decided = plan(state, waited, FAIR)
    assert [grant.task for place in decided.places for grant in place.grants] == [5]
    assert [(each.task, each.beneficiary) for each in decided.preemptions] == [(1, 6)]


def test_of_two_sets_the_one_of_the_last_level_is_stopped_though_it_is_larger() -> None:
    """The other would stop the larger one in turn: two restarts instead of one."""
    state = a_state(a_node(1, cpus=8, gpus=2), a_node(2, cpus=8, gpus=2))
    submit(state, a_gpu_task(2), 1, ran=40 * HOUR)
    submit(state, a_gpu_task(1), 2, 3, ran=HOUR)
    write(state, plan(state, NOW, FAIR), NOW)
    assert running(state) == {1, 2, 3}
    later = Instant(NOW + HOUR // 2)
    submit(state, a_gpu_task(1), 4, at=NOW + 1)
    assert [each.task for each in plan(state, later, FAIR).preemptions] == [1]


def test_starving_tasks_go_before_long_ones_within_their_part_and_never_before_short_ones() -> None:
    """Ten GPUs, three of them for tasks that waited for a day, six for those that waited for two."""
    state = a_state(*(a_node(n, gpus=1) for n in range(1, 11)))
    starved = NOW - 30 * HOUR
    submit(state, a_gpu_task(), *range(1, 9), ran=40 * HOUR)
    submit(state, a_gpu_task(), 9, 10)
    write(state, plan(state, NOW, FAIR), NOW)
    assert running(state) == set(range(1, 11))
    submit(state, a_gpu_task(), *range(11, 20), at=starved - 200 * HOUR, ran=200 * HOUR)
    later = Instant(NOW + FAIR.protection)
    decided = plan(state, later, FAIR)
    assert len(decided.preemptions) == 3
    assert {each.task for each in decided.preemptions} <= set(range(1, 9))
    assert {each.beneficiary for each in decided.preemptions} == {11, 12, 13}
    longer = replace(FAIR, starvation=Span(15 * HOUR))  # waited for it twice
    decided = plan(state, later, longer)
    assert {each.task for each in decided.preemptions} <= set(range(1, 9))
    assert {each.beneficiary for each in decided.preemptions} == set(range(11, 17))
    waits = replace(FAIR, starvation=Span(10 * 24 * HOUR))  # control: not starving yet
    assert plan(state, later, waits).preemptions == ()


def test_one_starving_task_at_a_time_goes_before_short_ones() -> None:
    state = a_state(a_node(1, gpus=1), a_node(2, gpus=1))
    submit(state, a_gpu_task(), 1, 2)
    write(state, plan(state, NOW, FAIR), NOW)
    old = NOW - FAIR.promotion - 200 * HOUR
    submit(state, a_gpu_task(), 3, 4, at=old, ran=200 * HOUR)
    decided = plan(state, Instant(NOW + SECOND), FAIR)
    assert [each.beneficiary for each in decided.preemptions] == [3]


def test_waiting_for_long_comes_before_everything_that_has_not() -> None:
    """Whatever arrives: the longest wait is bounded by the policy, not by the load."""
    state, shape = a_state(a_node(1, gpus=1)), a_gpu_task()
    submit(state, shape, 1, ran=AGES[-1])
    late = Instant(NOW + AGES[-1] + FAIR.promotion)
    submit(state, shape, *range(2, 50), at=late)
    assert plan(state, late, FAIR).places[0].grants[0].task == 1


def test_of_equal_costs_the_last_in_the_order_is_stopped() -> None:
    state = a_state(*(a_node(n, gpus=1) for n in range(1, 5)))
    for task, hours in ((1, 1), (2, 40), (3, 3), (4, 0)):
        submit(state, a_gpu_task(), task, at=NOW, ran=hours * HOUR)
    write(state, plan(state, NOW, FAIR), NOW)
    later = Instant(NOW + HOUR)
    submit(state, a_gpu_task(), 5, at=later - FAIR.restart)
    assert [each.task for each in plan(state, later, FAIR).preemptions] == [2]


@given(
    short=st.integers(1, 8),
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=7),
)
def test_no_set_that_would_do_costs_less(short: int, sizes: list[tuple[int, int]]) -> None:
    """Compared with all sets there are; `sizes`: GPUs of a task on this node, and elsewhere."""
    victims = []
    for number, (here, elsewhere) in enumerate(sizes):
        line = a_line(1, number, here)
        line.members = (a_line(2, number, elsewhere),) if elsewhere else ()
        line.amounts = ((here + elsewhere) * 1000, 0, 0)
        victims.append(Victim(Rank(0, (number,)), line))
    node = a_node(1, gpus=short)
    room = Room(node)
    room.take(Allocation(99, 0, 0, tuple(Slice(i, 0, 1000) for i in range(short))), UserId(7))
    chosen = fewest_victims(Clearable(node, room, victims), a_gpu_task(short))
    enough = [
        picked
        for count in range(len(sizes) + 1)
        for picked in combinations(sizes, count)
        if sum(here for here, _ in picked) >= short
    ]
    if chosen is None:
        assert not enough
        return
    cheapest = min((sum(map(sum, picked)), len(picked)) for picked in enough)
    assert (sum(victim.amounts[0] for victim in chosen) // 1000, len(chosen)) == cheapest


def a_line(node: int, number: int, gpus: int) -> HeldAllocation:
    slices = tuple(Slice(index, 0, 1000) for index in range(gpus))
    state = a_state(a_node(node, gpus=gpus))
    shape = a_gpu_task(gpus)
    state.fold(TasksQueued(shape, (QueuedTask(TaskId(1), 0, NOW),)))
    entry = next(state.queues.shapes())
    return HeldAllocation(NodeId(node), Allocation(number, 0, 0, slices), entry.shape)


def test_a_pass_considers_some_and_in_time_all_that_may_be_stopped() -> None:
    nodes = 40
    state = a_state(*(a_node(n, gpus=4, cpus=8) for n in range(1, nodes + 1)))
    submit(state, a_gpu_task(), *range(1, 4 * nodes + 1))
    write(state, plan(state, NOW, FAIR), NOW)
    assert len(state.stoppable) == 4 * nodes
    assert len(in_sight(state, NOW)) == 4 * nodes
    seen = set()
    for second in range(60):
        found = in_sight(state, Instant(NOW + second * SECOND), most=12)
        assert 12 <= len(found) < 12 + 4
        by_node = Counter(line.node for line in found)
        assert set(by_node.values()) == {4}  # all of a node, or a whole set could not be found
        seen |= {(line.node, line.allocation.number) for line in found}
    assert len(seen) == 4 * nodes


@settings(max_examples=40, deadline=None)
@given(
    tasks=st.lists(
        st.tuples(
            st.integers(1, 2),  # user
            st.sampled_from([1, 2, 4]),  # GPUs
            st.integers(1, 40),  # tenths of an hour it runs
            st.integers(0, 20),  # tenths of an hour until it comes
        ),
        min_size=2,
        max_size=10,
    )
)
def test_who_was_stopped_for_another_never_takes_the_room_back_at_once(
    tasks: list[tuple[int, int, int, int]],
) -> None:
    """Of one user's, only once that one has sunk below it (between users shares decide, and those change as they run); and
    whoever begins again is left alone for the time of protection, by others for a turn."""
    tenth = 360 * SECOND
    state = a_state(a_node(1, cpus=8, gpus=4))
    shapes = {n: a_gpu_task(gpus, user=user) for n, (user, gpus, _, _) in enumerate(tasks, 1)}
    came = {n: NOW + task[3] * tenth for n, task in enumerate(tasks, 1)}
    left = {n: task[2] * tenth for n, task in enumerate(tasks, 1)}
    begun: dict[int, int] = {}
    stops: dict[int, int] = dict.fromkeys(shapes, 0)
    stopped_for: dict[tuple[int, int], int] = {}
    now = int(NOW)
    for _ in range(300):
        for n, at in came.items():
            if at == now:
                submit(state, shapes[n], n, at=now)
        for n in [n for n, since in begun.items() if now - since >= left[n]]:
            del begun[n]
            state.fold(TasksReleased((TaskId(n),), Instant(now)))
        for _ in range(3):
            decided = plan(state, Instant(now), FAIR)
            write(state, decided, now)
            begun |= {int(g.task): now for place in decided.places for g in place.grants}
            for each in decided.preemptions:
                ran = now - begun.pop(each.task)
                is_own = shapes[each.beneficiary].user == shapes[each.task].user
                alone = FAIR.protection if is_own else FAIR.quantum
                assert not stops[each.task] or ran >= alone
                assert not is_own or now - came[each.beneficiary] >= FAIR.restart
                if is_own and (each.beneficiary, each.task) in stopped_for:
                    done = tasks[each.task - 1][2] * tenth - left[each.task] + ran
                    assert done >= AGES[0]
                stopped_for[each.task, each.beneficiary] = now
                stops[each.task] += 1
                left[each.task] -= ran
                stop(state, each.task, shapes[each.task], now, came[each.task])
        now += tenth
    assert not state.held
    assert not state.queued_count


def test_levels_begin_at_their_ages() -> None:
    for level in range(len(AGES) + 1):
        assert level_of(attained_at(level)) == level


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from(sorted(ORDERS)),
    tasks=st.lists(
        st.tuples(
            st.integers(1, 3),  # user
            st.sampled_from([1, 2, 4]),  # GPUs
            st.integers(1, 2),  # nodes
            st.booleans(),  # preemptible
            st.integers(0, 3),  # hours until it comes
        ),
        min_size=1,
        max_size=14,
    ),
    lengths=st.lists(st.integers(1, 600), min_size=14, max_size=14),
)
def test_no_order_ever_stops_in_vain_or_back_and_forth(
    order: str, tasks: list[tuple[int, int, int, bool, int]], lengths: list[int]
) -> None:
    """At one moment, preempting comes to an end; nobody is stopped twice, and never who came in by stopping."""
    state = a_state(a_node(1, cpus=8, gpus=4), a_node(2, cpus=8, gpus=4))
    policy = Policy(order=order)
    shapes = {
        n: a_gpu_task(gpus, user=user, nodes=nodes, preemptible=may)
        for n, (user, gpus, nodes, may, _) in enumerate(tasks, 1)
    }
    came = {n: NOW + task[4] * HOUR for n, task in enumerate(tasks, 1)}
    for now in sorted({*came.values(), NOW + 5 * HOUR}):
        for n, at in came.items():
            if at == now:
                submit(state, shapes[n], n, at=now)
        stopped: set[int] = set()
        for _ in range(3 * len(tasks)):
            decided = plan(state, Instant(now), policy)
            write(state, decided, now)
            for place in decided.places:
                assert len({place.node, *(m.node for m in place.members)}) == (
                    place.shape.requirements.nodes
                )
            for each in decided.preemptions:
                assert shapes[each.task].preemptible
                assert ORDERS[order].may_preempt
                assert each.task not in stopped
                stopped.add(each.task)
                stop(state, each.task, shapes[each.task], now, came[each.task])
            if not decided.preemptions and not decided.places:
                break
        else:
            raise AssertionError("it never came to rest")
        for node in state.nodes.values():
            assert all(gpu.free_share >= 0 for gpu in node.room.gpus.values())
        for task in sorted(running(state)):
            if lengths[task - 1] < 200:
                state.fold(TasksReleased((TaskId(task),), Instant(now)))


def a_cpu_task(cpus: int = 1, *, user: int = 1) -> Shape:
    needs = {"cpu_milli": 1000 * cpus, "memory_bytes": 1 << 20}
    return replace(a_shape(user, f"{cpus} CPUs", **needs), preemptible=True)


def test_room_is_made_where_cpus_are_short_and_gpus_are_not() -> None:
    state = a_state(a_node(1, cpus=4, gpus=1), a_node(2, cpus=4, gpus=1))
    submit(state, a_cpu_task(), *range(1, 9))
    write(state, plan(state, NOW, FAIR), NOW)
    later = Instant(NOW + HOUR)
    wanted = a_shape(2, gpu=(GpuRequest(1),), cpu_milli=3000, memory_bytes=1 << 20)
    submit(state, wanted, 100, at=later)
    assert len(plan(state, later, FAIR).preemptions) == 3
    state.fold(TasksWithdrawn((TaskId(100),)))
    gang = replace(wanted, requirements=replace(wanted.requirements, nodes=2))
    submit(state, gang, 101, at=later)
    assert len(plan(state, later, FAIR).preemptions) == 6


def test_nothing_is_stopped_that_makes_no_room_and_of_equals_the_last_in_the_order() -> None:
    state = a_state(a_node(1, cpus=4, gpus=2))
    submit(state, replace(a_cpu_task(1), group="small"), 1)
    submit(state, a_cpu_task(3), 2)
    write(state, plan(state, NOW, FAIR), NOW)
    later = Instant(NOW + HOUR)
    submit(state, a_cpu_task(3, user=2), 3, at=later)
    assert [each.task for each in plan(state, later, FAIR).preemptions] == [2]

    state = a_state(a_node(1, cpus=2))
    submit(state, a_cpu_task(), 1, at=NOW - SECOND)
    submit(state, a_cpu_task(), 2)
    write(state, plan(state, NOW, FAIR), NOW)
    submit(state, a_cpu_task(user=2), 3, at=later)
    assert [each.task for each in plan(state, later, FAIR).preemptions] == [2]


@pytest.mark.parametrize("minutes", [5, 20])
def test_a_stream_of_tasks_that_may_be_stopped_never_starves_a_large_one(minutes: int) -> None:
    """Of two people who have little, of tasks that end before they have had their turn: none of them is stopped for it."""
    state, large = a_state(a_node(1, cpus=64, gpus=8)), a_gpu_task(8, user=9, preemptible=False)
    for user in (1, 2):
        submit(state, a_gpu_task(user=user), *range(1000 * user, 1000 * user + 500))
    submit(state, large, 1, at=NOW + 1)
    ends: dict[int, int] = {}
    for minute in range(120):
        now = NOW + minute * 60 * SECOND
        over = tuple(TaskId(task) for task in sorted(running(state)) if ends[task] <= minute)
        state.fold(TasksReleased(over, Instant(now)))
        write(state, plan(state, Instant(now), FAIR), now)
        for place, task in enumerate(sorted(running(state) - ends.keys())):
            ends[task] = minute + minutes - (place * minutes // 8 if not minute else 0)
        if TaskId(1) in state.held:
            return
    raise AssertionError("it waits after two hours")


def test_many_kinds_of_tasks_of_one_user_never_make_a_pass_look_long_for_what_to_stop() -> None:
    state = a_state(*(a_node(number, cpus=64, gpus=8) for number in range(1, 5)))
    submit(state, a_gpu_task(), *range(1, 33))
    write(state, plan(state, NOW, FAIR), NOW)
    asked = [0]

    def order(candidate: Candidate, now: Instant, policy: Policy) -> Key:
        asked[0] += 1
        return ORDERS["fair_share"].key(candidate, now, policy)

    for number in range(400):
        needs = {"cpu_milli": 9000 - number, "memory_bytes": (1 << 20) + number}
        submit(state, a_shape(2, gpu=(GpuRequest(9),), **needs), 1000 + number, at=NOW + 1)
    plan(
        state, Instant(NOW + SECOND), FAIR, {"fair_share": replace(ORDERS["fair_share"], key=order)}
    )
    assert asked[0] < 400 + 32 + 70  # of those that wait, of those that run, of some of both


def test_a_gang_is_never_stopped_for_one_that_would_be_stopped_for_it_next() -> None:
    """By turns of users it counts on each of its nodes, and seen as if it did not run it counts on none."""
    state = a_state(*(a_node(number, gpus=1) for number in range(1, 4)))
    submit(state, a_gpu_task(nodes=3, user=1), 1)
    policy = Policy(order="round_robin")
    write(state, plan(state, NOW, policy), NOW)
    assert running(state) == {1}
    submit(state, a_gpu_task(nodes=3, user=2), 2, at=NOW + 1)
    assert not plan(state, Instant(NOW + HOUR), policy).preemptions
    single = a_state(*(a_node(number, gpus=1) for number in range(1, 4)))
    submit(single, a_gpu_task(user=1), 1, 2, 3)
    write(single, plan(single, NOW, policy), NOW)
    submit(single, a_gpu_task(user=2), 4, at=NOW + 1)
    assert len(plan(single, Instant(NOW + HOUR), policy).preemptions) == 1

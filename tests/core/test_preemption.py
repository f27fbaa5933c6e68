"""What is stopped for others: only what allows it, the cheapest whole set, and never back and forth."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_builders import NOW, a_node, a_shape, a_state

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, GpuRequest, Instant, Shape, Span
from gpool.core.scheduling.events import (
    Plan,
    QueuedTask,
    TasksPreempted,
    TasksQueued,
    TasksReleased,
)
from gpool.core.scheduling.levels import AGES, attained_at, level_of
from gpool.core.scheduling.orders import DECISIVE, ORDERS, Policy
from gpool.core.scheduling.plan import plan
from gpool.core.scheduling.state import State

HOUR = 3600 * SECOND
FAIR = Policy()


def a_gpu_task(gpus: int = 1, *, user: int = 1, nodes: int = 1, preemptible: bool = True) -> Shape:
    needs = {"gpu": (GpuRequest(gpus),), "cpu_milli": 100, "memory_bytes": 1 << 20}
    return replace(a_shape(user, f"{gpus}x{nodes}", nodes=nodes, **needs), preemptible=preemptible)


def submit(state: State, shape: Shape, *ids: int, at: int = NOW, ran: int = 0) -> None:
    tasks = tuple(QueuedTask(TaskId(i), 0, Instant(at), Span(ran)) for i in ids)
    state.fold(TasksQueued(shape, tasks))


def write(state: State, decided: Plan, now: int) -> None:
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
    submit(state, new, 2, at=later)
    decided = plan(state, later, FAIR)
    assert [each.task for each in decided.preemptions] == [1]
    assert decided.preemptions[0].epoch == 1
    assert decided.preemptions[0].beneficiary == 2
    assert decided.places == ()  # the room is not there yet
    write(state, decided, later)
    assert plan(state, later, FAIR) == Plan()  # asked once
    stop(state, 1, old, later)
    write(state, plan(state, later, FAIR), later)
    assert running(state) == {2}
    assert plan(state, later, FAIR) == Plan()  # and not back again


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
    submit(state, a_gpu_task(2), 5, at=later)
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
    submit(state, a_gpu_task(1), 2, at=later)
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
                assert order in DECISIVE
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

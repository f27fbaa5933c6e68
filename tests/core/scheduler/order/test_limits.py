"""Running GPUs: a plan never takes a user or a team past its limit, and explain says when that is why a task waits."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gpool.core.ids import TaskId
from gpool.core.model import GIB, GpuRequest, Instant, Shape
from gpool.core.scheduler.explain.waiting import explain
from gpool.core.scheduler.order.limits import GpuLimits, gpus_of, holders_of
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.state.events import RunTimesObserved, TasksReleased
from gpool.core.scheduler.state.state import State
from tests.core.scheduler.state.builders import NOW, a_node, a_shape, a_state, apply, enqueue, plan

WHOLE = (GpuRequest(),)
SHAPES = [
    a_shape(1, gpu=WHOLE),
    a_shape(1, "g", gpu=(GpuRequest(count=2),)),
    replace(a_shape(1, "h", gpu=(GpuRequest(share_milli=300),)), team=7),
    replace(a_shape(2, gpu=WHOLE), team=7),
    a_shape(2, "g", gpu=(GpuRequest(vram_bytes=5 * GIB), GpuRequest(count=2))),
    replace(a_shape(3, gpu=(GpuRequest(share_milli=500),)), team=8),
    a_shape(3, "cpu"),
]
LIMIT = st.one_of(st.none(), st.integers(0, 5).map(lambda n: n * 500))


def used_by(state: State, kind: str, number: int) -> int:
    """Counted anew from the lines."""
    return sum(
        gpus_of(line.allocation)
        for node in state.nodes.values()
        for line in node.lines.values()
        if (kind, number) in set(holders_of(line.shape))
    )


@given(
    user_milli=LIMIT,
    team_milli=LIMIT,
    mine=LIMIT,
    order=st.sampled_from(["fcfs", "round_robin", "priority"]),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("queue"), st.sampled_from(SHAPES), st.integers(1, 4)),
            st.tuples(st.just("end"), st.integers(0, 20)),
            st.tuples(st.just("plan"), st.integers(0, 200)),
        ),
        max_size=25,
    ),
)
def test_a_plan_never_takes_anybody_past_a_limit(
    user_milli: int | None,
    team_milli: int | None,
    mine: int | None,
    order: str,
    steps: list[tuple[object, ...]],
) -> None:
    given_ = {("user", 1): mine} if mine is not None else {}
    limits = GpuLimits(user_milli, team_milli, given_)  # type: ignore[arg-type]
    policy = Policy(order=order, limits=limits)
    state = a_state(a_node(1, cpus=8, gpus=3), a_node(2, cpus=8, gpus=2))
    for shape in SHAPES:
        state.fold(RunTimesObserved(shape, 1, 1000))  # type: ignore[arg-type]
    now, ids = NOW, 0
    for step in [*steps, ("plan", 100)]:
        match step:
            case ("queue", Shape() as shape, int(count)):
                enqueue(state, shape, range(ids + 1, ids + count + 1), now)
                ids += count
            case ("end", int(number)):
                held = sorted(state.held)
                if held:
                    state.fold(TasksReleased((held[number % len(held)],)))
            case ("plan", int(seconds)):
                now = Instant(now + seconds * 1_000_000)
                apply(state, plan(state, now, policy))
        for holder in [("user", 1), ("user", 2), ("user", 3), ("team", 7), ("team", 8)]:
            used = used_by(state, *holder)
            assert state.gpus.get(holder, 0) == used  # type: ignore[call-overload]
            limit = limits.of(holder)  # type: ignore[arg-type]
            assert limit is None or used <= limit


def test_without_the_limit_the_same_tasks_take_all_there_is() -> None:
    for limit, started in ((None, 4), (2000, 2)):
        state = a_state(a_node(1, cpus=8, gpus=4))
        enqueue(state, SHAPES[0], range(1, 9))
        assert len(apply(state, plan(state, NOW, Policy(limits=GpuLimits(limit))))) == started


def test_a_user_at_the_limit_never_keeps_others_waiting() -> None:
    state = a_state(a_node(1, cpus=8, gpus=2))
    policy = Policy(order="fcfs", limits=GpuLimits(1000))
    enqueue(state, SHAPES[0], range(1, 5), NOW - 10**9)
    enqueue(state, a_shape(5, gpu=WHOLE), [9], NOW)
    assert apply(state, plan(state, NOW, policy)) == [1, 9]


def test_the_limit_is_kept_for_a_large_task_that_has_waited_long() -> None:
    state = a_state(a_node(1, cpus=8, gpus=4))
    policy = Policy(order="fcfs", limits=GpuLimits(2000))
    enqueue(state, SHAPES[0], [1], NOW - 10**9)
    apply(state, plan(state, NOW, policy))
    enqueue(state, SHAPES[1], [2], NOW - 10**9)  # two GPUs
    enqueue(state, replace(SHAPES[0], group="small"), [3, 4], NOW)
    assert apply(state, plan(state, NOW, policy)) == []
    state.fold(TasksReleased((TaskId(1),)))
    assert apply(state, plan(state, NOW, policy)) == [2]


def test_what_can_never_fit_the_limit_keeps_nothing_back() -> None:
    state = a_state(a_node(1, cpus=8, gpus=4))
    policy = Policy(order="fcfs", limits=GpuLimits(1000))
    enqueue(state, SHAPES[1], [1], NOW - 10**9)
    enqueue(state, SHAPES[0], [2], NOW)
    assert apply(state, plan(state, NOW, policy)) == [2]
    told = explain(state, TaskId(1), NOW, policy)
    assert (told.code, told.sentence) == (
        "over_quota",
        "You may run 1 GPUs at once; it asks for 2.",
    )


def test_explain_says_when_the_quota_is_why() -> None:
    state = a_state(a_node(1, cpus=8, gpus=4))
    policy = Policy(limits=GpuLimits(None, 1000))
    enqueue(state, SHAPES[3], [1, 2])
    apply(state, plan(state, NOW, policy))
    told = explain(state, TaskId(2), NOW, policy)
    assert told.code == "quota_used"
    assert "Your team may run 1 GPUs at once and 1 are in use" in told.sentence

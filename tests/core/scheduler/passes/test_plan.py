"""What a plan always and never does: best fit, orders, fairness of lines, growth.

Past 400 lines because the promises of one function, `plan`, stand together.
"""

from __future__ import annotations

from collections import Counter
from time import thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.errors import Invalid
from gpool.core.ids import TaskId, UserId
from gpool.core.model import (
    GIB,
    MIB,
    SECOND,
    Allocation,
    Availability,
    Instant,
    Node,
    Shape,
    Slice,
    Span,
    Tier,
)
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.orders import Candidate, Key, Order, Policy
from gpool.core.scheduler.state.events import (
    NodeChanged,
    Placement,
    RunTimesObserved,
    TasksReleased,
)
from gpool.core.scheduler.state.state import State
from gpool.core.specs import gpu
from tests.core.scheduler.state.builders import (
    NOW,
    a_node,
    a_shape,
    a_state,
    apply,
    enqueue,
    hold,
    plan,
)

FCFS, ROUND_ROBIN, PRIORITY = (Policy(order=name) for name in ("fcfs", "round_robin", "priority"))


def gpu_shape(spec: str, user: int = 1, **more: object) -> Shape:
    return a_shape(user, spec, gpu=gpu.parse(spec), **more)


def first_place(state: State, policy: Policy = FCFS) -> Placement:
    return plan(state, NOW, policy).places[0]


def runs_on(shape: Shape, *nodes: Node) -> int | None:
    """The node chosen for one task of this shape."""
    state = a_state(*nodes)
    enqueue(state, shape, [1])
    places = plan(state, NOW, FCFS).places
    return places[0].node if places else None


# ---- placement


@pytest.mark.parametrize(
    ("shape", "nodes", "chosen"),
    [
        (a_shape(), (a_node(1, gpus=1), a_node(2)), 2),  # CPU tasks leave GPU nodes alone
        (a_shape(), (a_node(1, cpus=8), a_node(2, cpus=2)), 2),  # the tightest fit
        (a_shape(cpu_milli=3000), (a_node(1, cpus=2), a_node(2, cpus=4)), 2),
        (gpu_shape("1"), (a_node(1), a_node(2, gpus=1)), 2),
        (gpu_shape("1"), (a_node(1, gpus=("NVIDIA H200",)), a_node(2, gpus=1)), 2),  # smallest card
        (gpu_shape("1"), (a_node(1, gpus=4), a_node(2, gpus=1)), 2),  # keeps the big node together
        (
            gpu_shape("H100,A10G"),
            (a_node(1, gpus=1), a_node(2, gpus=("NVIDIA H100 80GB HBM3",))),
            2,
        ),
        (gpu_shape("2"), (a_node(1, gpus=1), a_node(2, gpus=3)), 2),
        (gpu_shape("80GB"), (a_node(1, gpus=1),), None),
        (gpu_shape("1"), (a_node(1, gpus=1, gpus_withheld=frozenset({0})),), None),
        (a_shape(), (a_node(1, connected=False),), None),
        (a_shape(), (a_node(1, availability=Availability.PAUSED),), None),
        (a_shape(), (a_node(1, availability=Availability.DRAINING),), None),
        (a_shape(python="3.12"), (a_node(1), a_node(2, pythons=frozenset({"3.12"}))), 2),
        (a_shape(environment="torch"), (a_node(1),), None),
        (a_shape(tier=Tier.CONTAINER), (a_node(1, tiers=frozenset({Tier.VM})),), 1),
        (a_shape(tier=Tier.CONTAINER), (a_node(1, tiers=frozenset({Tier.NONE})),), None),
        (a_shape(tier=Tier.VM), (a_node(1),), None),
        (a_shape(tier=Tier.NONE), (a_node(1, tiers=frozenset({Tier.NONE})),), None),  # a stranger's
        (a_shape(99, tier=Tier.NONE), (a_node(1),), None),
        (a_shape(99, tier=Tier.NONE), (a_node(1, tiers=frozenset({Tier.NONE})),), 1),
        (a_shape(disk_bytes=200 * GIB), (a_node(1),), None),
        (a_shape(memory_bytes=17 * GIB), (a_node(1),), None),
    ],
)
def test_a_task_goes_where_it_fits_best(
    shape: Shape, nodes: tuple[Node, ...], chosen: int | None
) -> None:
    assert runs_on(shape, *nodes) == chosen
    assert runs_on(shape, *reversed(nodes)) == chosen


def test_memory_not_asked_for_follows_the_cpu_share() -> None:
    state = a_state(a_node(1, cpus=4))
    enqueue(state, a_shape(cpu_milli=500), [1])
    assert first_place(state).allocation.memory_bytes == 2 * GIB


def test_slices_of_one_user_share_a_gpu_and_strangers_never_do() -> None:
    state = a_state(a_node(1, cpus=8, gpus=2))
    enqueue(state, gpu_shape("0.4", 1), [1, 2, 3])
    enqueue(state, gpu_shape("0.4", 2), [4])
    places = plan(state, NOW, FCFS).places
    gpus = {p.grants[0].task: p.allocation.slices[0].gpu_index for p in places}
    assert gpus == {
        1: 0,
        2: 0,
        3: 1,
    }  # the third fills no gap on GPU 0; user 2 finds no GPU of its own


def test_four_slices_of_6gb_fit_a_card_sold_as_24gb() -> None:
    state = a_state(a_node(1, cpus=8, gpus=1))
    enqueue(state, a_shape(gpu=gpu.parse(None, "6GB")), range(1, 9))
    assert len(plan(state, NOW, FCFS).places) == 4


def test_a_touched_gpu_is_never_given_whole() -> None:
    state = a_state(a_node(1, gpus=1))
    enqueue(state, gpu_shape("0.1"), [1])
    apply(state, plan(state, NOW, FCFS))
    enqueue(state, gpu_shape("1"), [2])
    assert plan(state, NOW, FCFS).places == ()


def test_several_gpus_are_of_one_model_where_possible() -> None:
    mixed = ("NVIDIA A10G", "NVIDIA H200", "Tesla T4", "NVIDIA H200")
    state = a_state(a_node(1, gpus=mixed))
    enqueue(state, gpu_shape("2"), [1])
    assert [part.gpu_index for part in first_place(state).allocation.slices] == [1, 3]


# ---- orders


def test_first_come_is_first_served_whoever_asks() -> None:
    state = a_state(a_node(1, cpus=1))
    enqueue(state, a_shape(1, priority=9), [5], at=NOW - 1)
    enqueue(state, a_shape(2), [7], at=NOW - 2)
    assert apply(state, plan(state, NOW, FCFS)) == [7]


def test_a_higher_priority_goes_first_and_waiting_makes_up_for_it() -> None:
    def first_of(waited: int) -> list[int]:
        state = a_state(a_node(1, cpus=1))
        enqueue(state, a_shape(1, priority=2), [1], at=NOW)
        enqueue(state, a_shape(2), [2], at=NOW - waited)
        return apply(state, plan(state, NOW, PRIORITY))

    assert first_of(PRIORITY.ageing * 2 - 1) == [1]
    assert first_of(PRIORITY.ageing * 2 + 1) == [2]


@given(st.lists(st.tuples(st.integers(-100, 100), st.integers(0, 10**6)), min_size=1, max_size=6))
def test_no_task_ever_waits_behind_an_endless_stream_of_higher_priority(
    stream: list[tuple[int, int]],
) -> None:
    state = a_state(a_node(1, cpus=1))
    low = a_shape(1, priority=-100)
    enqueue(state, low, [1], at=NOW)
    longest = 200 * PRIORITY.ageing
    number, now = 1, int(NOW)
    for _ in range(21 * (len(stream) + 1) + 1):  # after 21 steps nothing new overtakes it
        for priority, jitter in stream:
            number += 1
            enqueue(
                state, a_shape(2, f"g{number}", priority=priority), [number], at=now - jitter % 2
            )
        leased = apply(state, plan(state, Instant(now), PRIORITY))
        if 1 in leased:
            return
        state.fold(TasksReleased(tuple(TaskId(i) for i in leased)))
        now += longest // 20
    raise AssertionError("the task starved")


@given(
    users=st.integers(2, 5),
    slots=st.integers(1, 7),
    rounds=st.integers(2, 12),
    head=st.integers(1, 200),
)
def test_round_robin_never_serves_a_user_two_tasks_more_than_another(
    users: int, slots: int, rounds: int, head: int
) -> None:
    """Every user has plenty waiting; whoever came first with however many gains nothing."""
    state = a_state(a_node(1, cpus=slots))
    for user in range(1, users + 1):
        count = head if user == 1 else rounds * slots
        enqueue(state, a_shape(user), range(user * 10_000, user * 10_000 + count + rounds * slots))
    served: Counter[int] = Counter()
    for _ in range(rounds):
        leased = apply(state, plan(state, NOW, ROUND_ROBIN))
        assert len(leased) == slots
        served.update(task // 10_000 for task in leased)
        state.fold(TasksReleased(tuple(TaskId(task) for task in leased)))
        counts = [served[user] for user in range(1, users + 1)]
        assert max(counts) - min(counts) <= 1


def test_round_robin_alternates_between_two_users_on_one_slot() -> None:
    state = a_state(a_node(1, cpus=1))
    enqueue(state, a_shape(1), range(100, 200), at=NOW - 500)
    enqueue(state, a_shape(2), range(200, 300), at=NOW)
    turns = []
    for _ in range(6):
        leased = apply(state, plan(state, NOW, ROUND_ROBIN))
        turns.append(leased[0] // 100)
        state.fold(TasksReleased(tuple(TaskId(task) for task in leased)))
    assert turns == [1, 2, 1, 2, 1, 2]


def test_an_order_of_ones_own_is_used_by_name() -> None:
    def newest(candidate: Candidate, now: Instant, policy: Policy) -> Key:
        return (-candidate.task,)

    state = a_state(a_node(1, cpus=1))
    enqueue(state, a_shape(1), [1])
    enqueue(state, a_shape(2), [2])
    decided = plan(state, NOW, Policy(order="newest"), {"newest": Order("newest", newest)})
    assert decided.places[0].grants[0].task == 2
    with pytest.raises(Invalid, match="newest"):
        plan(state, NOW, Policy(order="newest"))


# ---- lines


def quick(state: State, *shapes: Shape, each: int = 1000) -> None:
    for shape in shapes:
        state.fold(RunTimesObserved(shape, 10, Span(10 * each)))


def depths(state: State, policy: Policy) -> list[int]:
    return [len(place.grants) for place in plan(state, NOW, policy).places]


@pytest.mark.parametrize(
    ("each", "waiting", "expected"),
    [
        (None, 1000, [1, 1]),  # unknown: nobody waits behind what may take hours
        (10_000_000, 1000, [1, 1]),
        (100_000, 1000, [3, 3]),
        (1, 5000, [500, 500]),
        (1000, 10, [5, 5]),  # shared evenly, not all in one line
        (1000, 1, [1]),
        (1000, 7, [4, 3]),
    ],
)
def test_a_line_is_as_deep_as_runs_out_within_the_target(
    each: int | None, waiting: int, expected: list[int]
) -> None:
    state, shape = a_state(a_node(1, cpus=2)), a_shape()
    if each is not None:
        quick(state, shape, each=each)
    enqueue(state, shape, range(1, waiting + 1))
    assert depths(state, FCFS) == expected


def test_lines_are_fed_again_once_a_quarter_is_gone() -> None:
    state, shape = a_state(a_node(1, cpus=1)), a_shape()
    quick(state, shape, each=3000)
    enqueue(state, shape, range(1, 1000))
    leased = apply(state, plan(state, NOW, FCFS))
    assert len(leased) == 100
    state.fold(TasksReleased(tuple(TaskId(i) for i in leased[:24])))
    assert depths(state, FCFS) == []
    state.fold(TasksReleased((TaskId(leased[24]),)))
    assert depths(state, FCFS) == [25]
    assert first_place(state).allocation.number == 0


def test_two_lines_take_the_oldest_tasks_in_turn() -> None:
    state, shape = a_state(a_node(1, cpus=2)), a_shape()
    quick(state, shape)
    enqueue(state, shape, range(1, 7))
    grants = [[g.task for g in place.grants] for place in plan(state, NOW, FCFS).places]
    assert grants == [[1, 3, 5], [2, 4, 6]]


def test_a_line_is_never_fed_while_somebody_first_in_order_waits_for_its_place() -> None:
    state, mine, other = a_state(a_node(1, cpus=1)), a_shape(1), a_shape(2)
    quick(state, mine, other)
    enqueue(state, mine, range(1, 1000), at=NOW - 100)
    apply(state, plan(state, NOW, ROUND_ROBIN))
    state.fold(TasksReleased(tuple(TaskId(i) for i in range(2, 300))))
    assert depths(state, ROUND_ROBIN) == [299 - 1]
    enqueue(state, other, [5000])
    assert depths(state, ROUND_ROBIN) == []  # the other user's turn is next
    assert depths(state, FCFS) == [299 - 1]  # here mine came first


def test_a_line_never_holds_up_an_older_shape_of_the_same_user() -> None:
    state, mine, older = a_state(a_node(1, cpus=1)), a_shape(1), a_shape(1, "older")
    quick(state, mine)
    enqueue(state, mine, range(1, 1000))
    apply(state, plan(state, NOW, ROUND_ROBIN))
    state.fold(TasksReleased(tuple(TaskId(i) for i in range(2, 300))))
    enqueue(state, older, [5000], at=NOW - 100)
    assert depths(state, ROUND_ROBIN) == []


def test_users_who_hold_equally_much_are_both_fed() -> None:
    state, mine, other = a_state(a_node(1, cpus=2)), a_shape(1), a_shape(2)
    quick(state, mine, other)
    enqueue(state, mine, range(1, 1000))
    enqueue(state, other, range(1001, 2000))
    assert depths(state, ROUND_ROBIN) == [300, 300]


def test_a_line_is_fed_when_those_ahead_could_not_use_its_place() -> None:
    state, mine, other = a_state(a_node(1, cpus=1)), a_shape(1), gpu_shape("H100", 2)
    quick(state, mine)
    enqueue(state, other, [5000], at=NOW - 100)
    enqueue(state, mine, range(1, 1000))
    assert depths(state, FCFS) == [300]


def test_a_line_on_a_paused_node_is_never_fed() -> None:
    state, shape = a_state(a_node(1, cpus=1)), a_shape()
    enqueue(state, shape, range(1, 1000))
    apply(state, plan(state, NOW, FCFS))
    quick(state, shape)
    assert depths(state, FCFS) == [299]
    state.fold(NodeChanged(a_node(1, cpus=1, availability=Availability.PAUSED)))
    assert depths(state, FCFS) == []


def test_a_line_over_a_withheld_gpu_is_never_fed() -> None:
    state, shape = a_state(a_node(1, gpus=2)), gpu_shape("1")
    quick(state, shape)
    whole = Allocation(0, 1000, 4 * GIB, (Slice(0, 0, 1000),))
    hold(state, shape, 1, whole, 1)
    hold(state, shape, 1, Allocation(1, 1000, 4 * GIB, (Slice(1, 0, 1000),)), 2)
    enqueue(state, shape, range(10, 1000))
    assert depths(state, FCFS) == [299, 299]
    state.fold(NodeChanged(a_node(1, gpus=2, gpus_withheld=frozenset({0}))))
    assert [place.allocation.number for place in plan(state, NOW, FCFS).places] == [1]


# ---- large and small


def test_small_tasks_never_starve_a_large_one() -> None:
    """Two GPUs, a stream of one-GPU tasks that end one at a time, and one task that needs both."""
    state = a_state(a_node(1, gpus=2))
    small, large = gpu_shape("1", 1), gpu_shape("2", 2)
    enqueue(state, small, range(1, 3), at=NOW - 1)
    running = apply(state, plan(state, NOW, PRIORITY))
    enqueue(state, large, [1000], at=NOW)
    now, number = int(NOW), 2000
    for _ in range(200):
        now += SECOND
        number += 1
        enqueue(state, small, [number], at=now)
        state.fold(TasksReleased((TaskId(running.pop(0)),)))
        leased = apply(state, plan(state, Instant(now), PRIORITY))
        if 1000 in leased:
            return
        running += leased
        if not running:
            break
    raise AssertionError("the large task starved")


def test_a_node_is_kept_clear_only_from_those_behind() -> None:
    state = a_state(a_node(1, cpus=2))
    hold(state, a_shape(3), 1, Allocation(0, 1000, GIB), 1)
    enqueue(state, a_shape(2, cpu_milli=2000), [10], at=NOW - FCFS.patience)
    enqueue(state, a_shape(1), [5], at=NOW - FCFS.patience - 1)
    enqueue(state, a_shape(4), [20], at=NOW - 5)
    assert apply(state, plan(state, NOW, FCFS)) == [5]
    state.fold(TasksReleased((TaskId(5),)))
    assert plan(state, NOW, FCFS).places == ()
    state.fold(TasksReleased((TaskId(1),)))
    assert apply(state, plan(state, NOW, FCFS)) == [10]


def test_a_pass_makes_no_more_places_than_allowed_and_the_next_goes_on() -> None:
    state = a_state(a_node(1, cpus=8))
    enqueue(state, a_shape(), range(1, 20))
    policy = Policy(order="fcfs", max_places_per_pass=3)
    assert apply(state, plan(state, NOW, policy)) == [1, 2, 3]
    assert apply(state, plan(state, NOW, policy)) == [4, 5, 6]
    assert [line.allocation.number for line in state.held.values()] == [0, 1, 2, 3, 4, 5]


# ---- growth


class Counting:
    """An order that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, candidate: Candidate, now: Instant, policy: Policy) -> Key:
        self.asked += 1
        return candidate.queued_at, candidate.task


def crowded(tasks: int, shapes: int = 10, nodes: int = 20) -> State:
    state = a_state(*(a_node(n, cpus=2) for n in range(1, nodes + 1)))
    for number in range(shapes):
        first = number * 10**6 + 1
        enqueue(state, a_shape(UserId(number + 1)), range(first, first + tasks // shapes))
    return state


def test_a_pass_over_many_shapes_of_known_run_times_costs_a_little_for_each() -> None:
    """Whoever submits thousands of tasks, each with a need of its own, must not stop the server for others."""
    state = a_state(a_node(1, cpus=2))
    shapes = [a_shape(cpu_milli=1000, memory_bytes=MIB + number) for number in range(3000)]
    for number, shape in enumerate(shapes):
        enqueue(state, shape, [10 * number + 1, 10 * number + 2], NOW + number)
        state.fold(RunTimesObserved(shape, 10, Span(10_000)))
    apply(state, plan(state, NOW))
    asked = 0

    def counting(candidate: Candidate, now: Instant, policy: Policy) -> Key:
        nonlocal asked
        asked += 1
        return ORDERS["priority"].key(candidate, now, policy)

    plan(state, NOW, Policy(order="counting"), {"counting": Order("counting", counting)})
    assert asked <= 10 * len(shapes)


def test_a_pass_over_100_000_tasks_costs_no_more_than_over_1000() -> None:
    few, many = crowded(1000), crowded(100_000)
    asked = []
    for state in (few, many):
        order = Counting()
        plan(state, NOW, Policy(order="counting"), {"counting": Order("counting", order)})
        asked.append(order.asked)
    assert asked[0] == asked[1]

    def cost(state: State) -> float:
        start = thread_time()  # a busy machine proves nothing wrong
        plan(state, NOW, FCFS)
        return thread_time() - start

    def is_no_dearer() -> bool:
        """The best of each, taken by turns: what a neighbour does to caches, it does to both."""
        turns = [(cost(few), cost(many)) for _ in range(15)]
        return min(many for _, many in turns) <= 2 * min(few for few, _ in turns)

    assert any(is_no_dearer() for _ in range(5))


@settings(max_examples=50)
@given(st.permutations(range(12)))
def test_the_same_state_always_gives_the_same_plan_however_it_came_about(order: list[int]) -> None:
    def made(numbers: list[int]) -> State:
        state = State()
        for number in numbers:
            if number < 4:
                state.fold(NodeChanged(a_node(number + 1, cpus=2 + number % 2, gpus=number % 3)))
            else:
                shape = a_shape(number % 3, gpu=gpu.parse(str(number % 2)))
                enqueue(state, shape, [number], at=NOW - number)
        return state

    assert plan(made(order), NOW) == plan(made(sorted(order)), NOW)

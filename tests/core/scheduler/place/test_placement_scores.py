"""What decides between places that spoil equally much: labels, prices and disk as walls; then lost time, cost, trust and speed."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import (
    GIB,
    MIB,
    SECOND,
    Audience,
    Health,
    InputFile,
    Instant,
    Merit,
    Node,
    Shape,
    Slice,
    Span,
    TaskKind,
    TaskSpec,
)
from gpool.core.reliability import HALF_LIFE, PRIOR, ReliabilityRecord, least_rate
from gpool.core.scheduler.explain.waiting import explain
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.passes.plan import plan as planned
from gpool.core.scheduler.place.fit import Fit, Unfit, fit, price_of, unfit
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.place.rows import (
    MAX_PRICE_STEP,
    RESTART,
    StartCost,
    price_step,
    start_cost,
)
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.events import (
    NodeChanged,
    PassPlan,
    RunTimesObserved,
    TasksReleased,
    TasksWithdrawn,
)
from gpool.core.scheduler.state.hints import KEPT, InputCaches
from gpool.core.scheduler.state.snapshot import take
from gpool.core.scheduler.state.state import State
from gpool.core.scheduler.state.waiting import LEAST_DATA, shape_of
from gpool.core.specs import gpu
from tests.core.scheduler.state.builders import NOW, a_node, a_shape, a_state, apply, enqueue, plan

HOUR = 3600 * SECOND
FCFS = Policy(order="fcfs")


def lending(number: int, gpus: Any = 1, cpus: int = 8, **more: Any) -> Node:
    """A node; `labels`, `price`, `disk` and what its merit is go to where they belong."""
    offer = {
        "labels": frozenset(more.pop("labels", ())),
        "price_microcredits": more.pop("price", 0),
        "disk_bytes": more.pop("disk", 100 * GIB),
    }
    node = a_node(number, cpus, gpus, **more)
    return replace(node, offer=replace(node.offer, **offer))


def wanting(spec: str = "1", user: int = 1, **needs: Any) -> Shape:
    return a_shape(user, gpu=gpu.parse(spec), **needs)


def placed(shape: Shape, *nodes: Node, state: State | None = None) -> int | None:
    state = a_state(*nodes) if state is None else state
    enqueue(state, shape, [1])
    places = plan(state, NOW, FCFS).places
    return places[0].node if places else None


# ---- walls


def test_a_task_goes_only_where_all_its_labels_are() -> None:
    nodes = lending(1), lending(2, labels=["ssd"]), lending(3, 4, labels=["ssd", "zone=a"])
    assert placed(wanting(labels=("ssd", "zone=a")), *nodes) == 3
    assert placed(wanting(labels=("ssd", "zone=b")), *nodes) is None
    assert unfit(nodes[1], wanting(labels=("ssd", "zone=a"))) is Unfit.LABELS


def test_a_task_goes_only_where_it_costs_no_more_than_it_may() -> None:
    dear, cheap = lending(1, 2, price=400_000), lending(2, 4, price=310_000)
    assert placed(wanting(max_price_microcredits=310_000), dear, cheap) == 2
    assert placed(wanting(max_price_microcredits=309_999), dear, cheap) is None
    assert unfit(dear, wanting(max_price_microcredits=310_000)) is Unfit.PRICE
    assert placed(wanting("2", max_price_microcredits=620_000), dear, cheap) == 2
    assert placed(wanting("2", max_price_microcredits=619_999), dear, cheap) is None
    assert placed(wanting("0.5", max_price_microcredits=155_000), dear, cheap) == 2
    assert placed(wanting("0.5", max_price_microcredits=154_999), dear, cheap) is None


def test_of_two_cards_on_one_node_the_slice_is_of_one_that_is_not_too_dear() -> None:
    node = lending(1, ("Tesla T4", "NVIDIA A10G"), price=300_000)  # 8 GB is more of a T4
    shape = wanting("vram=8GB", max_price_microcredits=110_000)
    state = a_state(node)
    enqueue(state, shape, [1])
    place = plan(state, NOW, FCFS).places[0]
    assert place.allocation.slices[0].gpu_index == 1
    found = fit(node, Room(node), shape)
    assert found is not None
    assert found.slices == place.allocation.slices
    assert price_of(node, found, shape) <= 110_000


def test_a_task_without_gpu_pays_its_part_of_the_node() -> None:
    node = lending(1, 0, 8, price=800_000)
    assert placed(a_shape(cpu_milli=1000, max_price_microcredits=100_000), node) == 1
    assert placed(a_shape(cpu_milli=1000, max_price_microcredits=99_999), node) is None


def test_own_tasks_and_those_of_named_accounts_cost_nothing() -> None:
    lab, owner = 70, UserId(9)
    named = Audience(frozenset({3}), frozenset({lab}))
    node = replace(lending(1, 2, price=400_000), owner=owner, free_for=named)
    broke = {"max_price_microcredits": 0}
    assert placed(wanting(user=9, **broke), node) == 1
    assert placed(wanting(user=3, **broke), node) == 1
    assert placed(replace(wanting(user=4, **broke), team=lab), node) == 1
    assert placed(replace(wanting(user=4, **broke), team=71), node) is None  # the control
    assert placed(a_shape(4, cpu_milli=1000, **broke), node) is None
    assert placed(a_shape(9, cpu_milli=1000, **broke), node) == 1


def test_a_free_node_of_ones_own_comes_before_a_cheap_one() -> None:
    own = replace(lending(1, price=900_000), owner=UserId(9))
    cheap = replace(lending(2, price=1_000), owner=UserId(8))
    state = a_state(own, cheap)
    for user, node in ((4, 2), (9, 1)):  # one state: rows of one user are not used for another
        assert placed(wanting(user=user), state=state) == node
        state.fold(TasksWithdrawn((TaskId(1),)))


def test_an_account_that_becomes_an_owner_pays_nothing_on_its_node_and_others_do() -> None:
    state, index = a_state(replace(lending(2, price=1_000), owner=UserId(8))), PlacementIndex()
    free = {"max_price_microcredits": 0}

    def node_of(user: int, spec: str = "0.5", **needs: Any) -> int | None:
        enqueue(state, wanting(spec, user, **needs), [1])
        places = planned(state, index, NOW, FCFS).places
        state.fold(TasksWithdrawn((TaskId(1),)))
        return places[0].node if places else None

    assert [node_of(user) for user in (9, 4)] == [2, 2]  # rows and facts are shared
    assert [node_of(user, **free) for user in (9, 4)] == [None, None]
    state.fold(NodeChanged(replace(lending(1, price=900_000), owner=UserId(9))))
    assert [node_of(user) for user in (9, 4)] == [1, 2]
    assert [node_of(user, **free) for user in (9, 4)] == [1, None]
    assert [node_of(user, "1", **free) for user in (9, 4)] == [1, None]


def test_each_gpu_has_its_own_price() -> None:
    node = lending(1, ("NVIDIA A10G", "NVIDIA A10G", "NVIDIA A10G"), price=300_000)
    gpus = [
        replace(gpu, price_microcredits=p)
        for gpu, p in zip(node.offer.gpus, (None, 0, 900_000), strict=True)
    ]
    node = replace(node, owner=UserId(9), offer=replace(node.offer, gpus=tuple(gpus)))

    def indexes(spec: str, cap: int) -> list[int]:
        shape = wanting(spec, max_price_microcredits=cap)
        found = fit(node, Room(node), shape) if unfit(node, shape) is None else None
        if found is None:
            return []
        assert price_of(node, found, shape) <= cap
        return [part.gpu_index for part in found.slices]

    assert indexes("1", 0) == [1]
    assert indexes("2", 600_000) == [1, 0]
    assert indexes("2", 599_999) == []
    assert indexes("3", 2_700_000) == [1, 0, 2]
    everything = Fit(8000, GIB, tuple(Slice(n, GIB, 1000) for n in range(3)))
    assert price_of(node, everything, wanting()) == 1_200_000
    assert price_of(node, everything, wanting(user=9)) == 0
    half = Fit(8000, GIB, (Slice(2, GIB, 333),))
    assert price_of(node, half, wanting()) == 299_700


def test_disk_that_was_asked_for_is_never_given_twice() -> None:
    state = a_state(lending(1, 0, disk=100 * GIB))
    enqueue(state, a_shape(disk_bytes=40 * GIB), [1, 2, 3])
    assert apply(state, plan(state, NOW, FCFS)) == [1, 2]
    assert state.nodes[NodeId(1)].room.free_disk == 20 * GIB
    state.fold(TasksReleased((TaskId(1),)))
    assert apply(state, plan(state, NOW, FCFS)) == [3]
    assert state.nodes[NodeId(1)].room.free_disk == 20 * GIB


@given(
    st.integers(0, 10**7),
    st.sampled_from(["1", "2", "0.3", "vram=6GB", "T4,A10G:2", "A10G,0.5"]),
    st.integers(0, 3 * 10**7),
)
def test_a_place_never_costs_more_than_the_cap_and_one_that_would_do_is_always_found(
    price: int, spec: str, cap: int
) -> None:
    node = lending(1, ("Tesla T4", "NVIDIA A10G", "NVIDIA A10G"), price=price)
    shape = wanting(spec, max_price_microcredits=cap)
    state = a_state(node)
    enqueue(state, shape, [1])
    places = plan(state, NOW, FCFS).places
    for place in places:
        shares = sum(part.share_milli for part in place.allocation.slices)
        assert price * shares <= 1000 * cap
    assert bool(places) == (unfit(node, shape) is None)
    if places:
        found = fit(node, Room(node), shape)
        assert found is not None
        assert price_of(node, found, shape) <= cap


# ---- lost time


def test_a_task_goes_where_least_of_it_is_expected_to_be_lost() -> None:
    often, seldom = Merit(Span(HOUR)), Merit(Span(1000 * HOUR))
    assert placed(wanting(), lending(1, merit=often), lending(2, 4, merit=seldom)) == 2
    assert placed(wanting(), lending(1, 4, merit=seldom), lending(2, merit=often)) == 1


def test_a_loss_costs_half_of_what_no_checkpoint_kept_and_a_restart() -> None:
    hour = Span(4096 * SECOND)
    plain = a_shape()
    kept = replace(plain, checkpoint_every=Span(600 * SECOND))
    gang = a_shape(nodes=3)
    assert start_cost(plain, hour).exposure == 4096 * (2048 + RESTART)
    assert start_cost(kept, hour).exposure == 4096 * (300 + RESTART)
    assert start_cost(gang, hour).exposure == 3 * start_cost(plain, hour).exposure


def test_a_long_run_bears_a_flaky_node_with_checkpoints_better_than_without() -> None:
    """By seconds of loading the ready node wins for the short one, the steady node for the long one."""
    environment = "pip:1"
    ready, steady = lending(1), lending(2)
    ready = replace(
        ready,
        merit=Merit(Span(4 * HOUR)),
        offer=replace(ready.offer, environments=frozenset({environment})),
    )
    steady = replace(
        steady,
        merit=Merit(Span(4096 * HOUR)),
        offer=replace(steady.offer, builds=frozenset({"pip"})),
    )
    shape = replace(wanting(), environment=environment)
    for seconds, node in ((20, 1), (7200, 2)):
        state = a_state(ready, steady)
        state.fold(RunTimesObserved(shape, 5, Span(5 * seconds * SECOND)))
        assert placed(shape, state=state) == node


@given(st.integers(1, 10**8), st.integers(0, 10**8))
def test_stakes_never_shrink_when_a_run_grows(run: int, more: int) -> None:
    shape = a_shape()
    short, long = (start_cost(shape, Span(each * SECOND)) for each in (run, run + more))
    assert short.exposure <= long.exposure
    assert short.step <= long.step
    assert short == StartCost(*short)


# ---- records


def test_a_node_nobody_knows_counts_as_the_prior_and_a_record_moves_it() -> None:
    assert ReliabilityRecord().mtbf == PRIOR == Merit().mtbf
    week = Span(7 * 24 * HOUR)
    steady = ReliabilityRecord().later(Instant(week), up=week)
    flaky = ReliabilityRecord().later(Instant(week), up=week, losses=20)
    assert flaky.mtbf < PRIOR < steady.mtbf


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=20),
    st.integers(0, 400),
)
def test_what_a_node_was_like_always_wears_off_and_losses_never_help(
    days: list[tuple[int, int]], away: int
) -> None:
    day = 24 * HOUR
    good = bad = ReliabilityRecord()
    at = 0
    for up, losses in days:
        at += 30 * day
        good = good.later(Instant(at), Span(up * day))
        bad = bad.later(Instant(at), Span(up * day), losses)
        assert bad.mtbf <= good.mtbf
    later = bad.later(Instant(at + away * day))
    assert later.losses_milli <= bad.losses_milli
    assert later.up <= bad.up
    assert bad.later(Instant(at + 60 * HALF_LIFE)).mtbf == PRIOR


def test_speeds_are_told_in_coarse_steps_and_of_the_slowest() -> None:
    assert least_rate([]) == least_rate([0, 50_000]) == 0
    assert least_rate([51_000, 90_000]) == least_rate([52_000])
    assert least_rate([50_000]) < least_rate([100_000])


# ---- inputs that lie there


def with_data(data: str, size: int = 4 * GIB, **needs: Any) -> Shape:
    return replace(wanting(**needs), data=data, data_bytes=size)


def test_a_task_goes_to_the_node_that_has_its_large_inputs() -> None:
    state = a_state(*(lending(n) for n in range(1, 6)))
    shape = with_data("model")
    enqueue(state, shape, [1])
    first = plan(state, NOW, FCFS).places[0].node
    apply(state, plan(state, NOW, FCFS))
    enqueue(state, wanting(user=2), [2, 3])  # would have taken any
    apply(state, plan(state, NOW, FCFS))
    state.fold(TasksReleased((TaskId(1), TaskId(2), TaskId(3))))
    enqueue(state, with_data("other"), [4])
    assert apply(state, plan(state, NOW, FCFS)) == [4]
    state.fold(TasksReleased((TaskId(4),)))
    enqueue(state, shape, [5])
    assert plan(state, NOW, FCFS).places[0].node == first


def at(seconds: float) -> Instant:
    return Instant(NOW + round(seconds * SECOND))


def one_runs_with_the_model(*, is_known: bool = True) -> tuple[State, Shape]:
    """Two nodes; one has the model, which takes 43 s to load, and runs a task with it, most of which take 30 s."""
    state, shape = a_state(lending(1), lending(2)), with_data("model")
    if is_known:
        state.fold(RunTimesObserved(shape, 9, Span(9 * 30 * SECOND)))
    enqueue(state, shape, [1])
    place = plan(state, NOW, FCFS).places[0]
    state.fold(place.leased((TaskId(1),), NOW))
    return state, shape


def test_a_task_waits_for_a_node_with_its_inputs_while_that_is_sooner_than_loading() -> None:
    state, shape = one_runs_with_the_model()
    enqueue(state, shape, [2], at=at(10))
    assert plan(state, at(10), FCFS) == PassPlan()
    told = explain(state, TaskId(2), at(10), FCFS)
    assert told.code == "awaits_inputs"
    assert "would take 43 s" in told.sentence
    warm = state.held[TaskId(1)].node
    state.fold(TasksReleased((TaskId(1),)))
    assert [place.node for place in plan(state, at(31), FCFS).places] == [warm]


def test_a_task_never_waits_for_inputs_without_good_reason_or_for_long() -> None:
    state, shape = one_runs_with_the_model(is_known=False)
    enqueue(state, shape, [2], at=at(10))
    assert len(plan(state, at(10), FCFS).places) == 1, "nobody knows when the other ends"
    state, shape = one_runs_with_the_model()
    enqueue(state, shape, [2, 3], at=at(10))
    assert len(plan(state, at(10), FCFS).places) == 1, "two cannot both have it"
    state, shape = one_runs_with_the_model()
    enqueue(state, shape, [2], at=at(10))
    assert plan(state, at(69), FCFS) == PassPlan(), "it is late by less than loading takes"
    assert len(plan(state, at(74), FCFS).places) == 1, "it is late by more"
    assert len(plan(state, at(97), FCFS).places) == 1, "and twice the loading is enough anyway"


def test_what_waits_for_inputs_stops_nobody_and_keeps_no_node_clear() -> None:
    state, shape = one_runs_with_the_model()
    enqueue(state, shape, [2], at=at(1))
    enqueue(state, wanting(user=5), [3], at=at(2))
    decided = plan(state, at(20), FCFS)
    assert [place.grants[0].task for place in decided.places] == [3]
    assert not decided.preemptions


def test_only_large_inputs_make_another_shape() -> None:
    def spec(*sizes: int) -> TaskSpec:
        files = tuple(InputFile(f"f{n}", f"{n}" * 64, size) for n, size in enumerate(sizes))
        return TaskSpec(TaskKind.COMMAND, "x", command=("true",), inputs=files)

    small, large = shape_of(spec(10, 20), UserId(1)), shape_of(spec(10, LEAST_DATA), UserId(1))
    assert small == shape_of(spec(), UserId(1))
    assert large.data
    assert large.data_bytes == LEAST_DATA
    assert shape_of(spec(MIB, MIB), UserId(1)).data == ""


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from("abcdefgh")), max_size=60))
def test_a_node_is_never_believed_to_keep_more_than_it_can(notes: list[tuple[int, str]]) -> None:
    caches, last = InputCaches(), {}
    for node, data in notes:
        caches.note(NodeId(node), data)
        last[node] = data
    for node, data in last.items():
        assert node in caches.with_data(data)
        assert sum(node in caches.with_data(each) for each in "abcdefgh") <= KEPT
    twin = InputCaches()
    twin.note(NodeId(9), "z")
    twin.take(caches)
    assert twin.truth() == caches.truth()
    assert twin.take(caches) == set()
    for node in range(1, 10):
        twin.forget(NodeId(node))
    assert not twin.truth()


# ---- cost, trust, speed


def test_among_equals_the_cheaper_then_the_proven_then_the_faster_comes_first() -> None:
    cheap, dear = lending(1, price=100), lending(2, price=200)
    assert placed(wanting(), cheap, dear) == 1
    assert placed(wanting(), replace(cheap, id=NodeId(3)), dear) == 3
    plain, proven = lending(1), lending(2, merit=Merit(is_proven=True))
    assert placed(wanting(), plain, proven) == 2
    ailing = replace(
        proven.offer, gpus=tuple(replace(g, health=Health.DEGRADED) for g in proven.offer.gpus)
    )
    assert placed(wanting(), plain, replace(proven, offer=ailing)) == 1
    slow, fast = (lending(n, merit=Merit(gigaflops=10_000 * n)) for n in (1, 9))
    assert placed(wanting(), slow, fast) == 9


def test_a_place_that_spoils_less_always_comes_before_a_cheaper_or_faster_one() -> None:
    half = a_state(lending(1, price=9), lending(2, price=1, merit=Merit(gigaflops=90_000)))
    enqueue(half, wanting("0.5", labels=()), [7])
    apply(half, plan(half, NOW, FCFS))
    on = next(iter(half.held.values())).node
    assert placed(wanting("0.5"), state=half) == on


@given(st.integers(0, 10**13), st.integers(0, 10**13))
def test_a_dearer_place_never_counts_as_cheaper(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert price_step(low) <= price_step(high) <= MAX_PRICE_STEP
    if high > low + low // 20 + 1:
        assert price_step(low) < price_step(high)


# ---- all of it together: what is remembered plans as what is made anew


def some_node(dice: Random, number: int) -> Node:
    return lending(
        number,
        tuple(dice.choice(("Tesla T4", "NVIDIA A10G")) for _ in range(dice.randint(0, 3))),
        dice.choice((4, 8)),
        labels=dice.sample(("ssd", "zone=a", "fast"), dice.randint(0, 3)),
        price=dice.choice((0, 0, 100_000, 250_000)),
        merit=Merit(Span(HOUR << dice.randint(0, 8)), dice.random() < 0.5, dice.choice((0, 9000))),
    )


def some_shape(dice: Random) -> Shape:
    shape = wanting(
        dice.choice(("1", "2", "0.5", "vram=6GB", "T4,A10G")),
        dice.randint(1, 2),
        labels=tuple(sorted(dice.sample(("ssd", "zone=a"), dice.choice((0, 0, 1, 2))))),
        max_price_microcredits=dice.choice((None, None, 0, 120_000)),
        disk_bytes=dice.choice((None, 30 * GIB)),
    )
    return replace(shape, data=dice.choice(("", "a", "b")), data_bytes=2 * GIB)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_pool_that_remembers_always_plans_as_its_snapshot_made_anew(seed: int) -> None:
    dice = Random(seed)
    state = a_state(*(some_node(dice, n) for n in range(1, 6)))
    last = 0
    for _ in range(12):
        match dice.randrange(4):
            case 0:
                state.fold(NodeChanged(some_node(dice, dice.randint(1, 6))))
            case 1 if state.held:
                state.fold(TasksReleased((dice.choice(sorted(state.held)),)))
            case 2:
                run = Span(dice.choice((5, 500, 50_000)) * SECOND)
                state.fold(RunTimesObserved(some_shape(dice), 3, run))
            case _:
                last += 1
                enqueue(state, some_shape(dice), [last])
        decided = plan(state, NOW, FCFS)
        assert decided == plan(take(state).state(), NOW, FCFS)
        started = {place.grants[0].task for place in decided.places}
        for waiting in list(state.queues.shapes()):
            task = TaskId(next(waiting.queue.entries())[1])
            if explain(state, task, NOW, FCFS).code == "next":
                assert task in started
        apply(state, decided)
        for entry in state.nodes.values():
            assert entry.room.free_disk >= 0

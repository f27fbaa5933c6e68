"""Gangs in the plan: one site, whole or not at all, never waiting on what they hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import (
    GIB,
    SECOND,
    Allocation,
    Availability,
    GpuRequest,
    Instant,
    Network,
    Node,
    RuntimeOffer,
    Shape,
    Slice,
    Span,
    Tier,
)
from gpool.core.scheduler.explain.waiting import explain
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.place import gangs
from gpool.core.scheduler.place.fit import Unfit, fit, unfit
from gpool.core.scheduler.state.events import (
    NodeChanged,
    PassPlan,
    Placement,
    QueuedTask,
    RunTimesObserved,
    TasksPreempted,
    TasksQueued,
    TasksReleased,
)
from gpool.core.scheduler.state.snapshot import take
from gpool.core.scheduler.state.state import State
from gpool.testing.simulation import Dice
from tests.core.scheduler.state.builders import NOW, a_node, a_shape, a_state, hold, index_of, plan

HOUR = 3600 * SECOND
LATER = Instant(NOW + HOUR)
MINUTE_BEFORE = Instant(LATER - 60 * SECOND)  # the cost of a restart: who waits less stops nobody
T4, A10G = "Tesla T4", "NVIDIA A10G"
SLICE = (GpuRequest(vram_bytes=4 * GIB),)


def a_gang(nodes: int = 2, gpus: int = 1, *, user: int = 1, **more: Any) -> Shape:
    needs: dict[str, Any] = {"cpu_milli": 100, "memory_bytes": 1 << 20, "nodes": nodes}
    needs["gpu"] = (GpuRequest(gpus),) if gpus else ()
    preemptible = more.pop("preemptible", False)
    shape = a_shape(user, more.pop("group", "gang"), **(needs | more))
    return replace(shape, preemptible=preemptible)


def submit(state: State, shape: Shape, *ids: int, at: int = NOW) -> None:
    tasks = tuple(QueuedTask(TaskId(id_), 0, Instant(at)) for id_ in ids)
    state.fold(TasksQueued(shape, tasks))


def write(state: State, decided: PassPlan, at: int = NOW) -> None:
    for place in decided.places:
        tasks = tuple(grant.task for grant in place.grants)
        state.fold(place.leased(tasks, Instant(at)))
    state.fold(TasksPreempted(tuple(each.task for each in decided.preemptions)))


def nodes_of(place: Placement) -> set[int]:
    return {int(place.node), *(int(member.node) for member in place.members)}


def chosen(state: State, now: Instant = NOW) -> set[int]:
    (place,) = plan(state, now).places
    return nodes_of(place)


def fill(state: State, node: int, gpus: int, task: int) -> None:
    slices = tuple(Slice(index, 23028 << 20, 1000) for index in range(gpus))
    hold(state, a_gang(1, gpus, user=9), node, Allocation(0, 100, 1 << 20, slices), task)


# ---- where


@pytest.mark.parametrize("needs", [{}, {"gpu": SLICE}, {"gpu": ()}])
def test_a_gang_is_placed_on_different_nodes_of_one_site(needs: dict[str, Any]) -> None:
    state = a_state(*(a_node(n, gpus=2, site="ab"[n % 2]) for n in range(1, 7)))
    submit(state, a_gang(3, **needs), 1)
    (place,) = plan(state, NOW).places
    assert nodes_of(place) in ({1, 3, 5}, {2, 4, 6})
    assert len({member.node for member in place.members} | {place.node}) == 3
    assert all(part.allocation.slices or not needs.get("gpu", True) for part in place.members)


def test_half_a_gang_on_each_of_two_sites_is_never_placed() -> None:
    state = a_state(*(a_node(n, gpus=1, site="ab"[n % 2]) for n in range(1, 5)))
    submit(state, a_gang(3), 1)
    assert plan(state, NOW) == PassPlan()


@pytest.mark.parametrize("lacks", [{"site": ""}, {"address": ""}, {"gang_port": 0}])
def test_a_node_that_others_cannot_reach_never_has_a_member(lacks: dict[str, Any]) -> None:
    nodes = [a_node(n, gpus=1) for n in (1, 2)]
    nodes[1] = replace(nodes[1], offer=replace(nodes[1].offer, **lacks))
    state = a_state(*nodes)
    submit(state, a_gang(2), 1)
    assert plan(state, NOW) == PassPlan()
    assert unfit(nodes[1], a_gang(2)) is Unfit.SITE
    submit(state, a_gang(1), 2, 3)
    assert len(plan(state, NOW).places) == 2  # single tasks run there as anywhere


def test_a_gang_never_takes_two_places_on_one_node() -> None:
    state = a_state(a_node(1, cpus=8, gpus=8), a_node(2, gpus=1))
    submit(state, a_gang(3), 1)
    assert plan(state, NOW) == PassPlan()


def test_a_gang_goes_where_it_leaves_the_larger_site_whole() -> None:
    state = a_state(*(a_node(n, gpus=1, site="large" if n > 2 else "small") for n in range(1, 8)))
    submit(state, a_gang(2), 1)
    assert chosen(state) == {1, 2}


def test_a_gang_fills_what_is_begun() -> None:
    state = a_state(*(a_node(n, gpus=2, site="b" if n > 3 else "a") for n in range(1, 7)))
    fill(state, 5, 1, 90)
    fill(state, 6, 1, 91)
    submit(state, a_gang(2), 1)
    assert chosen(state) == {5, 6}


def test_a_gang_keeps_to_one_model_where_several_would_do() -> None:
    models = {1: T4, 2: A10G, 3: T4, 4: A10G, 5: A10G}
    state = a_state(*(a_node(n, gpus=(model,)) for n, model in models.items()))
    submit(state, a_gang(3), 1)
    assert chosen(state) == {2, 4, 5}


def test_a_gang_takes_several_models_rather_than_wait() -> None:
    state = a_state(a_node(1, gpus=(T4,)), a_node(2, gpus=(A10G,)))
    submit(state, a_gang(2), 1)
    assert chosen(state) == {1, 2}


def test_alternatives_of_a_gang_are_tried_in_their_order() -> None:
    state = a_state(*(a_node(n, gpus=(T4 if n < 3 else A10G,)) for n in (1, 2, 3, 4)))
    either = (GpuRequest(model="A10G"), GpuRequest(model="T4"))
    submit(state, a_gang(2, gpu=either), 1, 2)
    first, second = plan(state, NOW).places
    assert (nodes_of(first), nodes_of(second)) == ({3, 4}, {1, 2})


@given(st.permutations(range(4)), st.permutations(["x", "a", "m"]))
def test_names_never_decide_where_a_gang_goes(order: list[int], sites: list[str]) -> None:
    def where(names: list[str], arrival: list[int]) -> set[int]:
        made = [a_node(n + 1, gpus=1, site=names[n // 2]) for n in range(4)]
        state = a_state(*(made[place] for place in arrival))
        submit(state, a_gang(2), 1)
        return chosen(state)

    assert where(sites, order) == where(["x", "a", "m"], [0, 1, 2, 3])


# ---- waiting


PATIENT = Policy(order="fcfs", preemption=False)


def test_a_gang_that_waits_long_has_a_whole_set_kept_clear() -> None:
    state = a_state(a_node(1, gpus=1), a_node(2, gpus=1), a_node(3, gpus=1, site="b"))
    fill(state, 1, 1, 90)
    submit(state, a_gang(2), 1)
    late = Instant(NOW + PATIENT.patience)
    submit(state, a_gang(1, user=2), 2, 3, at=late)
    (place,) = plan(state, late, PATIENT).places
    assert place.node == 3  # node 2 is free, and kept for the gang
    state.fold(TasksReleased((TaskId(90),)))
    assert nodes_of(plan(state, late, PATIENT).places[0]) == {1, 2}


def test_what_would_outlast_a_gangs_reservation_does_not_get_in() -> None:
    """Of its nodes one is idle already; that says nothing about when the other is."""
    state = a_state(a_node(1, gpus=1), a_node(2, gpus=1))
    short, long = a_gang(1, user=2, group="short"), a_gang(1, user=2, group="long")
    busy = a_gang(1, user=9, group="busy")
    for shape, seconds in ((short, 300), (long, 1800), (busy, 900)):
        state.fold(RunTimesObserved(shape, 9, Span(9 * seconds * SECOND)))
    submit(state, busy, 90)
    write(state, plan(state, NOW, PATIENT))
    submit(state, a_gang(2), 1)
    late = Instant(NOW + PATIENT.patience)
    submit(state, long, 2, at=late)
    assert plan(state, late, PATIENT).places == ()
    submit(state, short, 3, at=late)
    assert [place.grants[0].task for place in plan(state, late, PATIENT).places] == [3]


@pytest.mark.parametrize("order", ["fcfs", "round_robin", "fair_share", "priority"])
@pytest.mark.parametrize("stoppable", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_stream_of_small_tasks_never_starves_a_gang(
    order: str, stoppable: bool, seed: int
) -> None:
    """Two sites, always something waiting, ends at random: the gang gets its turn."""
    dice, policy = Dice(f"{order}-{seed}"), Policy(order=order)
    state = a_state(*(a_node(n, cpus=8, gpus=2, site="ab"[n % 2]) for n in range(1, 7)))
    small = a_gang(1, user=2, group="small", preemptible=stoppable)
    next_id, ends = 100, dict[TaskId, int]()
    for minute in range(95):
        now = Instant(NOW + minute * 60 * SECOND)
        for task in [task for task, at in ends.items() if at <= now]:
            state.fold(RunTimesObserved(small, 1, Span(10 * 60 * SECOND)))
            state.fold(TasksReleased((task,), now))
            del ends[task]
        while state.queued_count < 5:
            submit(state, small, next_id, at=now)
            next_id += 1
        if minute == 30:
            submit(state, a_gang(3, 2), 1, at=now)
        decided = plan(state, now, policy)
        write(state, decided, now)
        for place in decided.places:
            ends |= {g.task: now + dice.between(1, 20) * 60 * SECOND for g in place.grants}
        for stop in decided.preemptions:
            ran = state.attained(stop.task, now)
            state.fold(TasksReleased((stop.task,), now))
            again = QueuedTask(stop.task, stop.epoch, now, ran)
            state.fold(TasksQueued(small, (again,)))
            del ends[stop.task]
        if TaskId(1) in state.held:
            break
    assert minute <= 30 + 60, "a gang waits three times as long as anything runs"


def test_two_gangs_never_keep_a_half_each() -> None:
    state = a_state(*(a_node(n, gpus=2) for n in (1, 2, 3)))
    for node in (1, 2, 3):
        fill(state, node, 1, 90 + node)
    submit(state, a_gang(2, 2), 1)
    submit(state, a_gang(2, 2, user=2), 2, at=NOW + 1)
    late = Instant(NOW + 2 * PATIENT.patience)
    submit(state, a_gang(1, user=3), 3, 4, 5, at=late)
    (place,) = plan(state, late, PATIENT).places
    assert place.node == 3  # the first gang keeps two nodes, and one is of no use to the second


def test_a_gang_larger_than_every_site_keeps_nothing_from_others() -> None:
    state = a_state(*(a_node(n, gpus=1, site="ab"[n % 2]) for n in (1, 2, 3, 4)))
    submit(state, a_gang(3), 1)
    late = Instant(NOW + 10 * PATIENT.patience)
    submit(state, a_gang(1, user=2), 2, 3, 4, 5, at=late)
    assert len(plan(state, late, PATIENT).places) == 4


def test_a_gang_that_can_never_start_leaves_lines_their_tasks() -> None:
    state, short = a_state(a_node(1, gpus=1)), a_gang(1, group="short")
    state.fold(RunTimesObserved(short, 1, Span(SECOND // 100)))
    submit(state, a_gang(2, user=2), 1)
    submit(state, short, *range(2, 60))
    (place,) = plan(state, NOW).places
    assert len(place.grants) > 10


# ---- what stops for a gang


def test_the_cheapest_whole_set_of_one_site_stops_for_a_gang() -> None:
    state = a_state(*(a_node(n, cpus=8, gpus=4, site="b" if n > 2 else "a") for n in (1, 2, 3, 4)))
    submit(state, a_gang(1, 4, preemptible=True), 1, 2)
    write(state, plan(state, NOW))
    submit(state, a_gang(1, 3, preemptible=True, group="three"), 3, 4)
    write(state, plan(state, NOW))
    sites = {state.nodes[state.held[TaskId(id_)].node].node.offer.site for id_ in (1, 2)}  # type: ignore[union-attr]
    assert len(sites) == 1
    submit(state, a_gang(2, 2, preemptible=True, group="new"), 5, at=MINUTE_BEFORE)
    decided = plan(state, LATER)
    assert {each.task for each in decided.preemptions} == {3, 4}
    assert {each.beneficiary for each in decided.preemptions} == {5}
    write(state, decided, LATER)
    assert plan(state, LATER) == PassPlan()  # asked once
    state.fold(TasksReleased((TaskId(3),), LATER))
    assert plan(state, LATER).places == ()  # half of it is of no use
    state.fold(TasksReleased((TaskId(4),), LATER))
    (place,) = plan(state, LATER).places
    assert place.grants[0].task == 5


def test_a_gang_that_stops_counts_once_for_all_its_nodes() -> None:
    state = a_state(*(a_node(n, cpus=8, gpus=2) for n in (1, 2, 3, 4)))
    submit(state, a_gang(2, 2, preemptible=True), 1)
    write(state, plan(state, NOW))
    submit(state, a_gang(1, 2, preemptible=True, group="a"), 2)
    submit(state, a_gang(1, 2, preemptible=False, group="b"), 3)
    write(state, plan(state, NOW))
    submit(state, a_gang(2, 2, preemptible=True, group="new"), 4, at=MINUTE_BEFORE)
    # four GPUs of the gang on both its nodes, rather than two of a single task and four of the gang
    assert [each.task for each in plan(state, LATER).preemptions] == [1]


def test_nothing_stops_for_a_gang_on_two_sites() -> None:
    state = a_state(a_node(1, gpus=1), a_node(2, gpus=1, site="b"))
    submit(state, a_gang(1, preemptible=True), 1, 2)
    write(state, plan(state, NOW))
    submit(state, a_gang(2, group="new"), 3, at=LATER)
    assert plan(state, LATER).preemptions == ()


# ---- what explain is told


def test_enough_of_one_site_is_told_from_enough_in_all() -> None:
    nodes = [a_node(n, gpus=1, site="ab"[n % 2]) for n in range(1, 6)]
    assert gangs.most_together(nodes) == 3
    assert gangs.most_together(a_node(n, site="") for n in (1, 2)) == 0
    state = a_state(*nodes)
    assert gangs.is_possible(index_of(state), a_gang(3))
    assert not gangs.is_possible(index_of(state), a_gang(4))


def test_a_pool_without_sites_says_so() -> None:
    state = a_state(a_node(1, gpus=1, site=""))
    submit(state, a_gang(2), 1)
    assert explain(state, TaskId(1), NOW).code == "no_site"


# ---- any pool, any order

SITES = st.sampled_from(["", "a", "b"])
NODES = st.lists(st.tuples(SITES, st.integers(0, 3), st.sampled_from([T4, A10G])), max_size=7)
JOBS = st.lists(
    st.tuples(
        st.integers(1, 4),  # nodes
        st.integers(0, 2),  # GPUs
        st.integers(1, 3),  # user
        st.booleans(),  # may be stopped
        st.booleans(),  # a slice
    ),
    max_size=14,
)


def a_pool(described: list[tuple[str, int, str]]) -> list[Node]:
    return [
        a_node(n, gpus=(model,) * gpus, site=site)
        for n, (site, gpus, model) in enumerate(described, 1)
    ]


def a_job(nodes: int, gpus: int, user: int, preemptible: bool, sliced: bool) -> Shape:
    more = {"gpu": SLICE} if sliced else {}
    return a_gang(nodes, gpus, user=user, preemptible=preemptible, **more)


def check(state: State) -> None:
    for id_, line in state.held.items():
        parts = (line, *line.members)
        wanted = line.shape.requirements.nodes
        assert len({part.node for part in parts}) == wanted, f"task {id_} is not whole"
        if wanted > 1:
            offers = [state.nodes[part.node].node for part in parts]
            assert len({node.offer.site for node in offers if node}) == 1
            assert all(node is None or node.offer.site for node in offers)
    for entry in state.nodes.values():
        for gpu in entry.room.gpus.values():
            assert gpu.free_memory >= 0
            assert gpu.free_share >= 0
        assert entry.room.free_cpu >= 0


@settings(deadline=None)
@given(NODES, JOBS, st.sampled_from(sorted(ORDERS)), st.data())
def test_a_gang_is_always_whole_and_everything_that_could_ever_run_ends(
    described: list[tuple[str, int, str]],
    jobs: list[tuple[int, int, int, bool, bool]],
    order: str,
    data: st.DataObject,
) -> None:
    nodes, policy, now = a_pool(described), Policy(order=order), NOW
    state = a_state(*nodes)
    shapes = {TaskId(id_): a_job(*job) for id_, job in enumerate(jobs, 1)}
    for id_, shape in shapes.items():
        submit(state, shape, id_, at=now)
    could = {
        id_ for id_, shape in shapes.items() if _most(nodes, shape) >= shape.requirements.nodes
    }
    ended: set[TaskId] = set()
    for _ in range(60):
        now = Instant(now + HOUR)
        decided = plan(state, now, policy)
        write(state, decided, now)
        check(state)
        if not state.held:
            break
        for stop in decided.preemptions:
            ran = state.attained(stop.task, now)
            state.fold(TasksReleased((stop.task,), now))
            again = QueuedTask(stop.task, stop.epoch, now, ran)
            state.fold(TasksQueued(shapes[stop.task], (again,)))
        if not decided.preemptions:
            done = data.draw(st.sampled_from(sorted(state.held)))
            state.fold(TasksReleased((done,), now))
            ended.add(done)
    assert ended == could


@settings(deadline=None)
@given(NODES, JOBS, st.integers(2, 3), st.integers(0, 2), st.booleans(), st.sets(st.integers(1, 7)))
def test_a_place_is_found_exactly_where_a_look_at_every_node_finds_one(
    described: list[tuple[str, int, str]],
    jobs: list[tuple[int, int, int, bool, bool]],
    wanted: int,
    gpus: int,
    sliced: bool,
    barred: set[int],
) -> None:
    state = a_state(*a_pool(described))
    for id_, job in enumerate(jobs, 1):
        submit(state, a_job(*job), id_)
    write(state, plan(state, NOW))
    gang, out = a_job(wanted, gpus, 1, False, sliced), {NodeId(id_) for id_ in barred}
    index = index_of(state)
    found = gangs.places(index, gang, 0, out)
    open_to = [
        entry.node
        for id_, entry in state.nodes.items()
        if entry.node is not None
        and id_ not in out
        and unfit(entry.node, gang) is None
        and fit(entry.node, entry.room, gang) is not None
    ]
    assert bool(found) == (gangs.most_together(open_to) >= wanted)
    chosen = [node for node in open_to if node.id in {id_ for id_, _ in found}]
    assert len(found) in (0, wanted)
    assert gangs.most_together(chosen) == len(found)
    kept = gangs.nearest(index, gang, out)
    could = [n.node for i, n in state.nodes.items() if i not in out and n.node is not None]
    could = [node for node in could if unfit(node, gang) is None]
    assert bool(kept) == (gangs.most_together(could) >= wanted)
    assert gangs.most_together(node for node in could if node.id in kept) == len(kept)


def _most(nodes: list[Node], shape: Shape) -> int:
    able = [node for node in nodes if unfit(node, shape) is None]
    return gangs.most_together(able) if shape.requirements.nodes > 1 else len(able)


@settings(deadline=None)
@given(NODES, JOBS, st.integers(0, 6))
def test_a_plan_for_gangs_is_the_same_from_a_copy_of_the_state(
    described: list[tuple[str, int, str]], jobs: list[tuple[int, int, int, bool, bool]], away: int
) -> None:
    nodes = a_pool(described)
    state = a_state(*nodes)
    for id_, job in enumerate(jobs, 1):
        submit(state, a_job(*job), id_)
    write(state, plan(state, NOW))
    if away < len(nodes):
        state.fold(NodeChanged(replace(nodes[away], availability=Availability.PAUSED)))
    assert plan(state, LATER) == plan(take(state).state(), LATER)
    assert all(NodeId(away + 1) not in nodes_of(place) for place in plan(state, LATER).places)


def test_a_gang_is_not_placed_where_only_a_virtual_machine_gives_the_tier() -> None:
    """A guest's network leads outwards only: its peers could not reach it."""
    both = frozenset({Network.NONE, Network.EGRESS})
    guest = RuntimeOffer("microvm", Tier.VM, both, gangs=False)
    box = RuntimeOffer("bubblewrap", Tier.CONTAINER, both)
    node = a_node(1, tiers=frozenset({Tier.CONTAINER, Tier.VM}))
    node = replace(node, offer=replace(node.offer, runtimes=(box, guest), networks=both))
    alone = a_shape(tier=Tier.VM, network=Network.EGRESS)
    assert unfit(node, alone) is None
    assert unfit(node, a_shape(tier=Tier.VM, nodes=2)) is Unfit.RUNTIME
    assert unfit(node, a_shape(nodes=2)) is None

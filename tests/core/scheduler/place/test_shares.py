"""Tasks with GPUs get their part of the node's CPUs and memory, unless they ask for an amount."""

from __future__ import annotations

from dataclasses import asdict, make_dataclass, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.ids import TaskId
from gpool.core.model import GIB, Node, Requirements, Shape, Sharing, SliceProfile
from gpool.core.scheduler.explain.whatif import suggest
from gpool.core.scheduler.passes.plan import DEFAULT
from gpool.core.scheduler.place.fit import Fit, fit
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.snapshot import take
from gpool.core.scheduler.state.state import State
from gpool.core.specs import gpu
from tests.core.scheduler.state.builders import (
    NOW,
    OWNER,
    a_gpu,
    a_node,
    a_shape,
    a_state,
    apply,
    enqueue,
    index_of,
    plan,
)

BIG = a_node(1, cpus=192, gpus=8)  # 768 GiB: 4 GiB a CPU
BOTH = {"cpu_by_gpus": True, "memory_by_gpus": True}


def wanting(spec: str, **more: Any) -> Shape:
    return a_shape(gpu=gpu.parse(spec), **more)


def found(node: Node, shape: Shape, room: Room | None = None) -> Fit:
    place = fit(node, Room(node) if room is None else room, shape)
    assert place is not None
    return place


@pytest.mark.parametrize(
    ("spec", "more", "cpus", "gib"),
    [
        ("1", BOTH, 24, 96),
        ("4", BOTH, 96, 384),
        ("8", BOTH, 192, 768),
        ("0.5", BOTH, 12, 48),
        ("0.01", BOTH, 1, 4),  # not less than a task without GPU
        ("1", {"cpu_milli": 4000, "memory_by_gpus": True}, 4, 96),
        ("1", {"cpu_milli": 96_000, "memory_by_gpus": True}, 96, 384),
        ("1", {"cpu_by_gpus": True, "memory_bytes": GIB}, 24, 1),
        ("1", {}, 1, 4),  # a spec stored by an older server
    ],
)
def test_a_task_gets_the_part_of_the_node_that_its_gpus_are(
    spec: str, more: dict[str, Any], cpus: int, gib: int
) -> None:
    place = found(BIG, wanting(spec, **more))
    assert (place.cpu_milli, place.memory_bytes) == (cpus * 1000, gib * GIB)


def test_a_task_without_gpu_is_unchanged() -> None:
    assert found(BIG, a_shape())[:2] == (1000, 4 * GIB)


def test_the_part_is_that_of_the_node_which_runs_it() -> None:
    small = a_node(2, cpus=16, gpus=1)
    assert found(small, wanting("1", **BOTH)).cpu_milli == 16_000
    assert found(BIG, wanting("1", **BOTH)).cpu_milli == 24_000


def test_a_running_cpu_task_keeps_no_gpu_idle() -> None:
    node = a_node(1, cpus=16, gpus=1)
    room = Room(node)
    room.take(found(node, a_shape(cpu_milli=14_500)).numbered(0), OWNER)
    place = found(node, wanting("1", **BOTH), room)
    assert (place.cpu_milli, place.memory_bytes) == (1500, 6 * GIB)
    room.take(found(node, a_shape(cpu_milli=1000)).numbered(1), OWNER)
    assert fit(node, room, wanting("1", **BOTH)) is None  # not even one CPU is free


@given(
    st.integers(1, 300),
    st.integers(1, 16),
    st.lists(st.sampled_from(["1", "2", "4", "0.5", "0.25"]), max_size=40),
)
def test_default_tasks_fill_every_gpu_and_never_exceed_the_node(
    cpus: int, gpus: int, wanted: list[str]
) -> None:
    """Whole GPUs always find their part of the CPUs, provided that each part is a CPU at least."""
    node = a_node(1, cpus=cpus, gpus=gpus)
    room, held = Room(node), 0
    for number, spec in enumerate(wanted):
        shape = wanting(spec, **BOTH)
        place = fit(node, room, shape)
        if place is None:
            assert any(gpu.holders for gpu in room.gpus.values()) or cpus < gpus or int(spec) > gpus
            continue
        room.take(place.numbered(number), OWNER)
        held += sum(part.share_milli for part in place.slices)
        assert room.free_cpu >= 0
        assert room.free_memory >= 0
        assert place.cpu_milli >= 1000
    if cpus >= gpus and all(spec == "1" for spec in wanted):
        assert held == 1000 * min(gpus, len(wanted))


def granted(state: State) -> list[tuple[int, int]]:
    places = plan(state, NOW).places
    parts = [p.allocation for each in places for p in (each, *each.members)]
    return [(part.cpu_milli, part.memory_bytes) for part in parts]


def test_the_planner_grants_the_part_and_counts_it_as_taken() -> None:
    state = a_state(BIG)
    enqueue(state, wanting("2", **BOTH), [1])
    made = plan(state, NOW)
    apply(state, made)
    assert made.places[0].allocation.cpu_milli == 48_000
    assert state.nodes[BIG.id].room.free_cpu == 144_000
    assert state.shares.truth()[("user", 1)][1] == 48_000


def test_each_member_of_a_gang_gets_the_part_of_its_own_node() -> None:
    state = a_state(a_node(1, cpus=64, gpus=8), a_node(2, cpus=32, gpus=8))
    enqueue(state, wanting("8", nodes=2, **BOTH), [1])
    assert sorted(granted(state)) == [(32_000, 128 * GIB), (64_000, 256 * GIB)]


def test_eight_tasks_of_one_gpu_share_a_node_evenly() -> None:
    state = a_state(BIG)
    for user in range(1, 9):
        enqueue(state, a_shape(user, gpu=gpu.parse("1"), **BOTH), [user])
    assert granted(state) == [(24_000, 96 * GIB)] * 8


def test_the_index_and_the_plain_rule_grant_the_same() -> None:
    node = a_node(1, cpus=30, gpus=4)
    state = a_state(node)
    for spec in ("1", "2", "0.3", "vram=6GB"):
        shape = wanting(spec, **BOTH)
        place = index_of(state).best(shape, 0, ())
        assert place is not None
        assert place[1] == fit(node, state.nodes[node.id].room, shape)


def test_a_hardware_slice_gets_the_part_of_its_profile() -> None:
    """0.25 of a GPU is rounded up to the profile with 2 of 7 compute slices."""
    profiles = (
        SliceProfile("1g.18gb", 18 * GIB, 1, 1, tuple(range(7))),
        SliceProfile("2g.36gb", 36 * GIB, 2, 2, (0, 2, 4)),
        SliceProfile("7g.140gb", 140 * GIB, 7, 8, (0,)),
    )
    card = a_gpu(0, "NVIDIA H200", sharing=Sharing.MIG, profiles=profiles)
    bare = a_node(1, cpus=28, gpus=0)
    node = replace(bare, offer=replace(bare.offer, gpus=(card,)))
    place = found(node, wanting("0.25", **BOTH))
    assert (place.slices[0].profile, place.cpu_milli) == ("2g.36gb", 28_000 * 285 // 1000)
    state = a_state(node)
    by_index = index_of(state).best(wanting("0.25", **BOTH), 0, ())
    assert by_index is not None
    assert by_index[1] == place


def test_gpu_memory_counts_as_the_part_of_the_card_it_lies_on() -> None:
    """A slice by memory is a larger part of a smaller card, so it gets more CPUs with it."""
    half = wanting("vram=40GB", **BOTH)
    small = a_node(1, cpus=64, gpus=("NVIDIA A100-SXM4-80GB",))
    large = a_node(2, cpus=64, gpus=("NVIDIA H200",))
    assert found(small, half).cpu_milli == 64_000 * found(small, half).slices[0].share_milli // 1000
    assert found(small, half).cpu_milli > found(large, half).cpu_milli


def test_alternatives_get_the_part_of_the_one_that_fits() -> None:
    either = wanting("H200:2,A10G:1", **BOTH)
    assert found(a_node(1, cpus=32, gpus=4), either).cpu_milli == 8000
    assert found(a_node(2, cpus=32, gpus=("NVIDIA H200",) * 4), either).cpu_milli == 16_000


def test_a_suggested_amount_of_cpus_is_no_share_any_more() -> None:
    shape = wanting("1", **BOTH)
    node = a_node(1, cpus=4, gpus=2)
    state = a_state(node)
    enqueue(state, a_shape(7, cpu_milli=3500), [1])
    apply(state, plan(state, NOW))
    enqueue(state, shape, [2])
    told = {each.kind: each for each in suggest(take(state), TaskId(2), NOW, DEFAULT)}
    assert told["cpus"].change == "--cpus 0.5"
    assert not told["cpus"].requirements.cpu_by_gpus
    assert told["cpus"].requirements.memory_by_gpus


def test_older_agents_and_stored_specs_read_requirements_without_the_flags() -> None:
    """An agent of the last release knows neither flag, and a spec of the last release has none."""
    new = Requirements(gpu=gpu.parse("8"), **BOTH)
    flags = set(BOTH)
    older = make_dataclass("OlderRequirements", [("cpu_milli", int, 1000), ("nodes", int, 1)])
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=older)
    assert asdict(read) == {"cpu_milli": 1000, "nodes": 1}
    stored = {name: value for name, value in msgspec.to_builtins(new).items() if name not in flags}
    assert msgspec.convert(stored, Requirements) == replace(
        new, cpu_by_gpus=False, memory_by_gpus=False
    )

"""GPUs of one task are the closest free ones, on recorded machines and against every possible choice."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.ids import NodeId, UserId
from gpool.core.model import (
    GIB,
    Gpu,
    GpuDetails,
    GpuRequest,
    Node,
    Offer,
    Requirements,
    Shape,
    TaskKind,
    TaskSpec,
)
from gpool.core.scheduler.place.fit import whole
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.waiting import shape_of
from gpool.core.specs.gpu_topology import (
    EXACT,
    FARTHEST,
    Closeness,
    PciePath,
    closeness,
    distances_of,
    nearest,
)
from tests.core.specs.recorded_topologies import NAMES, recorded


def chosen(name: str, count: int, busy: set[int] = frozenset()) -> set[int]:  # type: ignore[assignment]
    gpus = recorded(name).gpus
    known = distances_of(gpus)
    assert known is not None
    return set(nearest([gpu.index for gpu in gpus if gpu.index not in busy], count, known))


def close(name: str, indexes: set[int]) -> Closeness | None:
    return closeness([gpu for gpu in recorded(name).gpus if gpu.index in indexes])


def test_every_kind_of_machine_is_recorded_with_its_source() -> None:
    assert {
        "v100-cube-mesh",
        "a100-nvswitch",
        "h100-nvswitch",
        "pcie-pairs",
        "pcie-switches",
    } <= set(NAMES)
    for name in NAMES:
        words = recorded(name).words
        assert all(words[a][b] == words[b][a] for a, b in combinations(range(len(words)), 2)), name


@pytest.mark.parametrize(
    ("name", "count", "busy", "wanted", "said"),
    [
        # The cube mesh: two GPUs with two links, four with a link each.
        ("v100-cube-mesh", 2, {1, 3}, {0, 2}, Closeness.NVLINK),
        ("v100-cube-mesh", 4, set(), {0, 1, 2, 3}, Closeness.NVLINK),
        ("v100-cube-mesh", 4, {0}, {4, 5, 6, 7}, Closeness.NVLINK),
        ("v100-cube-mesh", 2, {0, 1, 2, 3}, {4, 6}, Closeness.NVLINK),  # leaves (5, 7)
        # NVSwitch: all are equally near by NVLink, so the NUMA node decides.
        ("h100-nvswitch", 4, {0}, {4, 5, 6, 7}, Closeness.NVLINK),
        ("h100-nvswitch", 2, {0, 1, 2}, {4, 5}, Closeness.NVLINK),
        ("h100-nvswitch", 1, {0, 1, 2}, {3}, None),
        ("a100-nvswitch", 2, {0}, {2, 3}, Closeness.NVLINK),
        ("a100-nvswitch", 1, {0}, {1}, None),
        # PCIe only.
        ("pcie-pairs", 1, {0}, {1}, None),
        ("pcie-pairs", 2, {0}, {2, 3}, Closeness.SWITCH),
        ("pcie-pairs", 3, {0}, {1, 2, 3}, Closeness.NUMA),  # leaves 4-7 whole
        ("pcie-pairs", 4, {0}, {4, 5, 6, 7}, Closeness.NUMA),
        ("pcie-pairs", 2, {0, 3, 4, 7}, {1, 2}, Closeness.NUMA),
        ("pcie-pairs", 2, {0, 1, 2, 4, 5, 6}, {3, 7}, Closeness.SOCKETS),
        ("pcie-switches", 2, set(), {0, 1}, Closeness.SWITCH),
        ("pcie-switches", 2, {1}, {4, 5}, Closeness.SWITCH),
        ("pcie-switches", 4, {7}, {0, 1, 2, 3}, Closeness.SWITCH),
        ("pcie-switches", 1, {0}, {1}, None),
        ("rtx4090-root-ports", 4, {2}, {4, 5, 6, 7}, Closeness.NUMA),
        ("rtx4090-root-ports", 2, {0, 1, 2}, {4, 5}, Closeness.NUMA),
        ("uneven-five", 1, set(), {0}, None),
        ("uneven-five", 2, set(), {1, 2}, Closeness.NUMA),
        ("uneven-five", 4, set(), {1, 2, 3, 4}, Closeness.NUMA),
    ],
)
def test_the_closest_gpus_of_a_recorded_machine_are_chosen(
    name: str, count: int, busy: set[int], wanted: set[int], said: Closeness | None
) -> None:
    found = chosen(name, count, busy)
    assert found == wanted
    assert close(name, found) is said


@pytest.mark.parametrize("name", [name for name in NAMES if len(recorded(name).gpus) == 8])
def test_small_tasks_leave_close_groups_for_large_ones(name: str) -> None:
    """After tasks of 1, 1 and 2 GPUs, four GPUs of one NUMA node (or switch tree) are still free together."""
    gpus = recorded(name).gpus
    busy: set[int] = set()
    best = close(name, chosen(name, 4))
    for count in (1, 1, 2):
        busy |= chosen(name, count, busy)
    left = chosen(name, 4, busy)
    assert close(name, left) is best
    assert len({gpu.details.numa for gpu in gpus if gpu.details and gpu.index in left}) <= 2


def matrices() -> st.SearchStrategy[tuple[Gpu, ...]]:
    def made(count: int, words: list[tuple[int, int]], numas: list[int | None]) -> tuple[Gpu, ...]:
        pairs = dict(zip(combinations(range(count), 2), words, strict=False))
        gpus = []
        for index in range(count):
            links, near = [], []
            for other in range(count):
                if other != index:
                    nvlinks, path = pairs[min(index, other), max(index, other)]
                    links += [(other, nvlinks)] * bool(nvlinks)
                    near += [(other, path)] * (path >= 0)
            details = GpuDetails(links=tuple(links), near=tuple(near), numa=numas[index])
            gpus.append(Gpu(index, f"GPU-{index}", "X", "nvidia", GIB, details=details))
        return tuple(gpus)

    pair = st.tuples(st.sampled_from([0, 0, 1, 2, 4, 12, 18]), st.integers(-1, PciePath.SYS))
    numa = st.sampled_from([None, 0, 1])
    return st.integers(2, EXACT).flatmap(
        lambda n: st.builds(
            made,
            st.just(n),
            st.lists(pair, min_size=n * (n - 1) // 2, max_size=n * (n - 1) // 2),
            st.lists(numa, min_size=n, max_size=n),
        )
    )


@given(matrices(), st.integers(1, EXACT), st.sets(st.integers(0, EXACT - 1)))
def test_no_other_choice_has_a_better_bottleneck_or_sum_or_leaves_more(
    gpus: tuple[Gpu, ...], count: int, busy: set[int]
) -> None:
    known = distances_of(gpus)
    free = [gpu.index for gpu in gpus if gpu.index not in busy]
    if known is None or count > len(free):
        return
    found = nearest(free, count, known)
    assert len(set(found)) == count
    assert set(found) <= set(free)

    def worst(some: tuple[int, ...]) -> int:
        return max((known.between(a, b).link for a in some for b in some if a != b), default=0)

    def spread(some: tuple[int, ...]) -> int:
        return sum(known.between(a, b).total for a in some for b in some if a < b)

    def cut(some: tuple[int, ...]) -> int:
        return sum(known.between(a, b).total for a in some for b in free if b not in some)

    every = list(combinations(free, count))
    least = min(map(worst, every))
    assert worst(found) == least
    level = [some for some in every if worst(some) == least]
    assert spread(found) == min(map(spread, level))
    level = [some for some in level if spread(some) == spread(found)]
    assert cut(found) == max(map(cut, level))


def test_more_than_eight_free_gpus_are_grown_from_the_nearest() -> None:
    """Sixteen GPUs in pairs, each half a NUMA node: eight of them are one half."""
    gpus = tuple(
        Gpu(
            index,
            f"GPU-{index}",
            "X",
            "nvidia",
            GIB,
            details=GpuDetails(numa=index % 2, near=((index ^ 2, 0),)),
        )
        for index in range(16)
    )
    known = distances_of(gpus)
    assert known is not None
    assert nearest(range(16), 8, known) == tuple(range(0, 16, 2))
    assert nearest(range(3, 16), 2, known) == (4, 6)


def test_a_machine_that_reports_nothing_gets_the_lowest_indexes() -> None:
    gpus = tuple(Gpu(i, f"GPU-{i}", "X", "nvidia", GIB, details=GpuDetails()) for i in range(4))
    assert distances_of(gpus) is None
    assert closeness(gpus) is None
    assert FARTHEST.total > 0


def a_node(gpus: tuple[Gpu, ...]) -> Node:
    return Node(NodeId(1), UserId(1), "a1", Offer(64_000, 512 * GIB, GIB, gpus))


def a_shape(gpus: int) -> Shape:
    needs = Requirements(gpu=(GpuRequest(gpus),))
    return shape_of(TaskSpec(TaskKind.COMMAND, "true", needs), UserId(1))


def test_the_planner_gives_a_task_the_closest_free_gpus() -> None:
    node = a_node(recorded("pcie-pairs").gpus)
    room = Room(node)
    room.gpus[0].holders = 1
    found = whole(node, room, GpuRequest(2), a_shape(2))
    assert found is not None
    assert [part.gpu_index for part in found] == [2, 3]


def test_a_node_that_claims_links_to_gpus_it_does_not_have_changes_nothing() -> None:
    details = GpuDetails(links=((7, 18), (1, 4)), near=((9, 99), (1, -5)))
    gpus = (
        Gpu(0, "a", "X", "nvidia", GIB, details=details),
        Gpu(1, "b", "X", "nvidia", GIB, details=GpuDetails()),
    )
    node = a_node(gpus)
    assert whole(node, Room(node), GpuRequest(2), a_shape(2)) is not None

"""The agent reads PCIe and NUMA topology from the kernel, and pins a task to the CPUs near its GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.machine.gpus import Detector
from gpool.agent.machine.numa import (
    NumaNode,
    cpus_in,
    numa_nodes,
    pinned_cpus,
    with_topology,
)
from gpool.agent.machine.nvml import NVSWITCH
from gpool.agent.machine.vendors import ParsedGpus
from gpool.core.model import GIB, Gpu, GpuDetails, Slice
from gpool.core.specs.gpu_topology import PciePath, closeness
from gpool.testing.fake_nvml import FakeNvml, h200
from tests.core.specs.recorded_topologies import NAMES, recorded


def a_gpu(index: int, bus: str, vendor: str = "nvidia") -> Gpu:
    details = GpuDetails(bus=bus)
    return Gpu(index, f"GPU-{index}", "X", vendor, GIB, details=details)


def sysfs(root: Path, devices: Mapping[str, tuple[str, int]]) -> Path:
    """A tree as below /sys: the path of each device from its host bridge down, and its NUMA node."""
    listing = root / "bus" / "pci" / "devices"
    listing.mkdir(parents=True)
    for bus, (above, numa) in devices.items():
        device = root / "devices" / above / bus
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{numa}\n")
        (listing / bus).symlink_to(device)
    return listing


SWITCH = "pci0000:16/0000:16:01.0/0000:17:00.0"
MACHINE = {
    "0000:19:00.0": (f"{SWITCH}/0000:18:00.0", 0),
    "0000:1a:00.0": (f"{SWITCH}/0000:18:01.0", 0),
    # behind another switch below the first
    "0000:1e:00.0": (f"{SWITCH}/0000:18:02.0/0000:1c:00.0/0000:1d:00.0", 0),
    "0000:21:00.0": ("pci0000:16/0000:16:02.0", 0),  # another root port of the host bridge
    "0000:3b:00.0": ("pci0000:3a/0000:3a:00.0", 0),  # another host bridge of the socket
    "0000:86:00.0": ("pci0000:85/0000:85:00.0", 1),
}


def test_paths_are_named_as_nvidia_smi_names_them(tmp_path: Path) -> None:
    buses = list(MACHINE)
    gpus = with_topology([a_gpu(i, bus) for i, bus in enumerate(buses)], sysfs(tmp_path, MACHINE))
    first = gpus[0].details
    assert first is not None
    assert dict(first.near) == {
        1: PciePath.PIX,
        2: PciePath.PXB,
        3: PciePath.PHB,
        4: PciePath.NODE,
        5: PciePath.SYS,
    }
    assert [gpu.details and gpu.details.numa for gpu in gpus] == [0, 0, 0, 0, 0, 1]
    for one in gpus:
        for other in gpus:
            if one is not other:
                assert one.details is not None
                assert other.details is not None
                assert dict(one.details.near)[other.index] == dict(other.details.near)[one.index]


def test_a_guest_whose_kernel_knows_no_numa_nodes_says_so(tmp_path: Path) -> None:
    root = sysfs(tmp_path, {"0000:00:05.0": ("pci0000:00", -1), "0000:00:06.0": ("pci0000:00", -1)})
    one, _, gone = with_topology(
        [a_gpu(0, "0000:00:05.0"), a_gpu(1, "0000:00:06.0"), a_gpu(2, "0000:99:00.0")], root
    )
    assert one.details is not None
    assert (one.details.numa, one.details.near) == (None, ((1, PciePath.PHB),))
    assert gone.details is not None
    assert gone.details.near == ()
    assert closeness([one, gone]) is None


def test_gpus_behind_an_nvswitch_are_linked_to_each_other(tmp_path: Path) -> None:
    cards = [replace(h200(i), nvlinks=(NVSWITCH,) * 18 if i < 2 else ()) for i in range(3)]
    nvml = FakeNvml(*cards)
    found = Detector(None, nvml, ParsedGpus, pci=sysfs(tmp_path, {})).survey().gpus
    links = [gpu.details.links for gpu in found if gpu.details is not None]
    assert links == [((1, 18),), ((0, 18),), ()]


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("", set()), ("5", {5}), ("0-0", {0})],
)
def test_a_list_of_cpus_is_read_as_the_kernel_writes_it(text: str, cpus: set[int]) -> None:
    assert cpus_in(text) == cpus


def test_numa_nodes_have_the_cpus_that_the_agent_may_use(tmp_path: Path) -> None:
    for number, cpus in enumerate(("0-3", "4-7")):
        folder = tmp_path / f"node{number}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{cpus}\n")
        (folder / "distance").write_text("10 21\n" if number == 0 else "21 10\n")
    found = numa_nodes(tmp_path, allowed=range(6))
    assert found == (
        NumaNode(0, frozenset({0, 1, 2, 3}), (10, 21)),
        NumaNode(1, frozenset({4, 5}), (21, 10)),
    )
    assert numa_nodes(tmp_path / "none") == ()


def nodes_of(name: str) -> tuple[NumaNode, ...]:
    """NUMA nodes of a recorded machine; DGX A100 has one without GPUs beside each with."""
    machine = recorded(name)
    cpus: dict[int, frozenset[int]] = {}
    for gpu, text in zip(machine.gpus, machine.cpus, strict=True):
        if gpu.details is not None and gpu.details.numa is not None:
            cpus[gpu.details.numa] = cpus_in(text)
    if name == "a100-nvswitch":
        for numa, text in {
            0: "0-15,128-143",
            2: "32-47,160-175",
            4: "64-79,192-207",
            6: "96-111,224-239",
        }.items():
            cpus[numa] = cpus_in(text)
    sockets = {numa: numa // 4 if name == "a100-nvswitch" else numa for numa in cpus}
    return tuple(
        NumaNode(
            numa,
            cpus[numa],
            tuple(
                10 if other == numa else 12 if sockets[other] == sockets[numa] else 32
                for other in sorted(cpus)
            ),
        )
        for numa in sorted(cpus)
    )


def pinned(name: str, indexes: list[int], cpus: float, share: int = 1000) -> tuple[int, ...]:
    gpus = {gpu.index: gpu for gpu in recorded(name).gpus}
    slices = [Slice(index, GIB, share) for index in indexes]
    return pinned_cpus(gpus, slices, round(cpus * 1000), nodes_of(name))


def test_a_task_is_pinned_to_the_numa_node_of_its_gpus() -> None:
    first, second = cpus_in("0-55,112-167"), cpus_in("56-111,168-223")
    assert set(pinned("h100-nvswitch", [0], 28)) == first
    assert set(pinned("h100-nvswitch", [4, 5, 6, 7], 112)) == second
    assert set(pinned("h100-nvswitch", [3, 4], 56)) == first | second
    assert set(pinned("h100-nvswitch", [0], 14, share=500)) == first
    assert set(pinned("pcie-pairs", [6], 5)) == cpus_in("10-19,30-39")


def test_a_task_with_more_cpus_than_its_gpus_part_is_not_pinned() -> None:
    assert pinned("h100-nvswitch", [0], 28.001) == ()
    assert pinned("h100-nvswitch", [0], 20, share=500) == ()


def test_a_numa_node_without_gpus_serves_the_nearest_one_with() -> None:
    near, both = cpus_in("48-63,176-191"), cpus_in("32-63,160-191")
    assert set(pinned("a100-nvswitch", [0], 16)) == near
    assert set(pinned("a100-nvswitch", [0], 32)) == both  # 1/8 of the machine, its default


def test_a_machine_without_numa_nodes_pins_nothing() -> None:
    assert pinned("pcie-switches", [0, 1], 12) == ()
    gpus = {gpu.index: gpu for gpu in recorded("h100-nvswitch").gpus}
    only = (NumaNode(0, frozenset(range(8)), (10,)),)
    assert pinned_cpus(gpus, [Slice(0, GIB, 1000)], 1000, only) == ()
    assert pinned_cpus(gpus, [], 1000, nodes_of("h100-nvswitch")) == ()


@given(
    st.sampled_from([name for name in NAMES if name != "pcie-switches"]),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40)), max_size=8),
)
def test_pinned_tasks_always_have_room_on_their_cpus(
    name: str, wanted: list[tuple[int, int]]
) -> None:
    """Hall's condition: the tasks pinned inside any set of NUMA nodes have no more CPUs together than these."""
    free = [gpu.index for gpu in recorded(name).gpus]
    tasks: list[tuple[frozenset[int], int]] = []
    for count, cpus in wanted:
        indexes, free = free[:count], free[count:]
        if len(indexes) == count:
            found = frozenset(pinned(name, indexes, cpus))
            assert not found or len(found) >= cpus
            if found:
                tasks.append((found, cpus))
    for around, _ in tasks:
        assert sum(cpus for where, cpus in tasks if where <= around) <= len(around)

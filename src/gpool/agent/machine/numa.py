"""PCIe and NUMA topology from sysfs, of GPUs of every vendor, and the CPUs near a task's GPUs. Reads only.

**CPUs of a task.** A task with GPUs runs on the CPUs of its GPUs' NUMA nodes, from which memory is taken first as well
(the kernel's default: the node of the CPU that touches a page). A NUMA node without GPUs belongs to the nearest one with
GPUs. Pinning must not take CPUs away: the tasks on a NUMA node's GPUs have room on its CPUs if each has at most its GPUs'
part of them. A task with more (`--cpus`), or with a GPU whose NUMA node is unknown, is not pinned.

Example: two NUMA nodes of 32 CPUs with 4 GPUs each. A task with one GPU is pinned to the 32 CPUs of its node if it has at
most 8; with 12 CPUs it is not pinned.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpool.core.model import Gpu, Slice
from gpool.core.specs.gpu_topology import PciePath

PCI = Path("/sys/bus/pci/devices")
NODES = Path("/sys/devices/system/node")
_MOST_CPUS = 1 << 16


def with_topology(gpus: Sequence[Gpu], root: Path = PCI) -> tuple[Gpu, ...]:
    """Add the NUMA node of each GPU and the PCIe paths between them, as far as the kernel knows them."""
    buses = {
        gpu.index: gpu.details.bus for gpu in gpus if gpu.details is not None and gpu.details.bus
    }
    places = {index: _place(root / bus) for index, bus in buses.items()}
    numas = {index: _numa(root / bus) for index, bus in buses.items()}
    found = []
    for gpu in gpus:
        if gpu.details is None or gpu.index not in places:
            found.append(gpu)
            continue
        near = []
        for other in places:
            numa = (numas[gpu.index], numas[other])
            path = None if other == gpu.index else _path(places[gpu.index], places[other], *numa)
            if path is not None:
                near.append((other, int(path)))
        details = replace(gpu.details, numa=numas[gpu.index], near=tuple(near))
        found.append(replace(gpu, details=details))
    return tuple(found)


def _place(device: Path) -> tuple[str, ...]:
    """Names from the host bridge ("pci0000:16") down to the device; empty if it is not there."""
    if not device.exists():
        return ()
    parts = device.resolve().parts
    first = next((at for at, part in enumerate(parts) if part.startswith("pci")), len(parts))
    return parts[first:]


def _numa(device: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        number = int((device / "numa_node").read_text())
        return number if number >= 0 else None
    return None


def _path(
    one: tuple[str, ...], other: tuple[str, ...], numa: int | None, others: int | None
) -> PciePath | None:
    if not one or not other:
        return None
    if one[0] != other[0]:  # two host bridges
        if numa is None or others is None:
            return None
        return PciePath.NODE if numa == others else PciePath.SYS
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    if shared <= 1:
        return PciePath.PHB
    # A switch has a port above and one for each device below: both devices are two steps below the common port.
    return PciePath.PIX if max(len(one), len(other)) - shared <= 2 else PciePath.PXB


@dataclass(frozen=True, slots=True)
class NumaNode:
    number: int
    cpus: frozenset[int]  # that this process may use
    distances: tuple[int, ...] = ()  # to each node, as the firmware tells


def numa_nodes(root: Path = NODES, allowed: Iterable[int] | None = None) -> tuple[NumaNode, ...]:
    usable = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    found = []
    for folder in root.glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            number = int(folder.name.removeprefix("node"))
            cpus = cpus_in((folder / "cpulist").read_text()) & usable
            words = (folder / "distance").read_text().split()
            found.append(NumaNode(number, cpus, tuple(int(word) for word in words)))
    return tuple(sorted(found, key=lambda node: node.number))


def cpus_in(text: str) -> frozenset[int]:
    """`"0-3,8"` is 0, 1, 2, 3 and 8. Raises `ValueError`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), min(int(last or first), _MOST_CPUS) + 1))
    return frozenset(found)


def pinned_cpus(
    gpus: Mapping[int, Gpu], slices: Sequence[Slice], cpu_milli: int, nodes: Sequence[NumaNode]
) -> tuple[int, ...]:
    """CPUs for a task with these parts of the machine's `gpus`; empty: not pinned."""
    if len([node for node in nodes if node.cpus]) < 2 or not slices:
        return ()
    milli: dict[int, int] = {}  # thousandths of GPUs, by NUMA node
    for part in slices:
        numa = _numa_of(gpus.get(part.gpu_index))
        if numa is None:
            return ()
        milli[numa] = milli.get(numa, 0) + part.share_milli
    counts: dict[int, int] = {}  # GPUs, by NUMA node
    for gpu in gpus.values():
        numa = _numa_of(gpu)
        if numa is not None:
            counts[numa] = counts.get(numa, 0) + 1
    known = {node.number: node.cpus for node in nodes}
    for local in (known, _with_bare_nodes(nodes, frozenset(counts))):
        if any(numa not in local for numa in milli):
            return ()
        theirs = sum(len(local[numa]) * milli[numa] // counts[numa] for numa in milli)
        if cpu_milli <= theirs:
            return tuple(sorted(frozenset().union(*(local[numa] for numa in milli))))
    return ()


def _numa_of(gpu: Gpu | None) -> int | None:
    return None if gpu is None or gpu.details is None else gpu.details.numa


def _with_bare_nodes(
    nodes: Sequence[NumaNode], with_gpus: frozenset[int]
) -> dict[int, frozenset[int]]:
    """CPUs of each NUMA node with GPUs and of the nodes without that are nearest to it, spread evenly."""
    cpus = {node.number: node.cpus for node in nodes if node.number in with_gpus}
    places = {node.number: at for at, node in enumerate(nodes)}
    for node in nodes:
        if node.number in cpus or not cpus:
            continue

        def rank(home: int, node: NumaNode = node) -> tuple[int, int, int]:
            at = places[home]
            far = node.distances[at] if at < len(node.distances) else 0
            return far, len(cpus[home]), home

        home = min(cpus, key=rank)
        cpus[home] |= node.cpus
    return cpus

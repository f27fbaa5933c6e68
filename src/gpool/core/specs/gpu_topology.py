"""Closeness of a node's GPUs: which of the free ones a task with several should get. Pure; reads `GpuDetails` only.

**Distance of two GPUs**, from what the agent reports of each (`links`, `near`, `numa`): NVLinks first, the more the
closer, then the PCIe path: one switch (PIX), several (PXB), a host bridge (PHB), one NUMA node (NODE), two (SYS).

**Choice of k of the free GPUs**, in this order:

1. the best bottleneck: the farthest two of the chosen are as close as possible (the slowest link sets the pace of a
   collective operation);
2. the smallest sum of distances, in which the PCIe path decides between equal NVLinks: with NVSwitch, GPUs of one NUMA
   node;
3. the least closeness between the chosen and the GPUs that stay free, so that close groups stay whole for later tasks;
4. the lowest indexes.

Exact for up to `EXACT` free GPUs (at most 70 sets of 8); beyond, sets grown from
single GPUs are compared.

Example: GPUs 0-3 and 4-7 are two NUMA nodes, each with the pairs (0,1), (2,3), (4,5), (6,7) under one switch; 0 is
busy. One GPU: 1, whose pair is broken already. Two: (2,3). Four: 4-7.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum, StrEnum
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from gpool.core.model import Gpu

EXACT = 8
MOST = 32
"""GPUs of a node beyond which closeness is not considered: a node may claim to have many, and the choice takes time."""
_STARTS = 16
_PCIE = 8  # unit of a link's distance: above every PCIe path
_UNLINKED = 100  # link distance without NVLink; one NVLink is 60, eighteen are 3


class PciePath(IntEnum):
    """As `nvidia-smi topo -m` names them."""

    PIX = 0
    PXB = 1
    PHB = 2
    NODE = 3
    SYS = 4


class Closeness(StrEnum):
    """Of the farthest two GPUs of a task."""

    NVLINK = "NVLink"
    SWITCH = "same PCIe switch"
    NUMA = "same NUMA node"
    SOCKETS = "across sockets"


class Distance(NamedTuple):
    link: int  # smaller is closer
    total: int  # the link, then the PCIe path


FARTHEST = Distance(_UNLINKED + PciePath.SYS, (_UNLINKED + PciePath.SYS) * _PCIE + PciePath.SYS)
_PairDistance = tuple[int, int, Distance]


class GpuDistances:
    """Distances by index, both ways. Nodes with equal distances have the same object: it is a key of the cache."""

    __slots__ = ("_between",)

    def __init__(self, pairs: tuple[_PairDistance, ...]) -> None:
        self._between = {(one, other): found for one, other, found in pairs}
        self._between |= {(other, one): found for one, other, found in pairs}

    def between(self, one: int, other: int) -> Distance:
        return self._between.get((one, other), FARTHEST)


def distances_of(gpus: tuple[Gpu, ...]) -> GpuDistances | None:
    """None if nothing is known about any two of them."""
    if not 2 <= len(gpus) <= MOST or gpus[0].details is None:
        return None
    return _distances(_SameGpus(gpus))


class _SameGpus:
    """Key by identity: a hash of all details would take longer than the choice."""

    __slots__ = ("gpus",)

    def __init__(self, gpus: tuple[Gpu, ...]) -> None:
        self.gpus = gpus

    def __hash__(self) -> int:
        return id(self.gpus)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameGpus) and other.gpus is self.gpus


@lru_cache(maxsize=16_384)
def _distances(same: _SameGpus) -> GpuDistances | None:
    gpus = same.gpus
    facts = [_facts(gpu) for gpu in gpus]
    pairs = []
    for (one, mine), (other, others) in combinations(zip(gpus, facts, strict=True), 2):
        links, path = _links(one, mine, other, others), _path(mine, other, others)
        if links > 0 or path is not None:
            far = PciePath.SYS if path is None else path
            link = max(1, 60 // links) if links > 0 else _UNLINKED + far
            pairs.append((one.index, other.index, Distance(link, link * _PCIE + far)))
    return _interned(tuple(pairs)) if pairs else None


@lru_cache(maxsize=1024)
def _interned(pairs: tuple[_PairDistance, ...]) -> GpuDistances:
    return GpuDistances(pairs)


class _GpuFacts(NamedTuple):
    links: dict[int, int]
    near: dict[int, int]
    numa: int | None


def _facts(gpu: Gpu) -> _GpuFacts:
    details = gpu.details
    if details is None:
        return _GpuFacts({}, {}, None)
    return _GpuFacts(dict(details.links), dict(details.near), details.numa)


def _links(one: Gpu, mine: _GpuFacts, other: Gpu, others: _GpuFacts) -> int:
    """NVLinks between two GPUs; both ends must report them."""
    return min(mine.links.get(other.index, 0), others.links.get(one.index, 0))


def _path(mine: _GpuFacts, other: Gpu, others: _GpuFacts) -> PciePath | None:
    """PCIe path, or what the NUMA nodes tell of it. None: unknown."""
    known = mine.near.get(other.index)
    path = None if known is None else PciePath(min(max(known, 0), PciePath.SYS))
    if mine.numa is None or others.numa is None:
        return path
    if mine.numa != others.numa:
        return PciePath.SYS
    # Of one NUMA node, though the driver names no common bridge (each GPU has a root port of its own).
    return PciePath.NODE if path is None else min(path, PciePath.NODE)


def nearest(free: Iterable[int], count: int, known: GpuDistances) -> tuple[int, ...]:
    """Choose `count` of the free GPUs, by index, ascending."""
    return _nearest(tuple(sorted(free)), count, known)


@lru_cache(maxsize=65_536)
def _nearest(free: tuple[int, ...], count: int, known: GpuDistances) -> tuple[int, ...]:
    if count <= 0 or count >= len(free):
        return free[: max(0, count)]
    sets = combinations(free, count) if len(free) <= EXACT else _grown(free, count, known)
    return min(sets, key=lambda chosen: _cost(chosen, free, known))


class SetCost(NamedTuple):
    bottleneck: int
    inside: int
    kept: int  # closeness to the GPUs that stay free, negative distance
    chosen: tuple[int, ...]


def _cost(chosen: tuple[int, ...], free: tuple[int, ...], known: GpuDistances) -> SetCost:
    inside = [known.between(one, other) for one, other in combinations(chosen, 2)]
    left = [index for index in free if index not in chosen]
    return SetCost(
        max([each.link for each in inside], default=0),
        sum([each.total for each in inside]),
        -sum([known.between(one, other).total for one in chosen for other in left]),
        chosen,
    )


def _grown(free: tuple[int, ...], count: int, known: GpuDistances) -> list[tuple[int, ...]]:
    """Sets grown from up to `_STARTS` of the GPUs, always by the one nearest to the set."""
    found: list[tuple[int, ...]] = []
    for first in free[:: -(-len(free) // _STARTS)]:
        chosen = [first]
        links = {new: 0 for new in free if new != first}  # farthest link to the set
        totals = dict.fromkeys(links, 0)
        while len(chosen) < count:
            for new in links:
                step = known.between(chosen[-1], new)
                links[new] = max(links[new], step.link)
                totals[new] += step.total
            following = min(links, key=lambda new: (links[new], totals[new], new))
            chosen.append(following)
            del links[following], totals[following]
        found.append(tuple(sorted(chosen)))
    return found


def closeness(gpus: Sequence[Gpu]) -> Closeness | None:
    """Closeness of the farthest two of these GPUs. None: one GPU, or unknown."""
    found: list[Closeness] = []
    for (one, mine), (other, others) in combinations([(gpu, _facts(gpu)) for gpu in gpus], 2):
        path = _path(mine, other, others)
        if _links(one, mine, other, others) > 0:
            found.append(Closeness.NVLINK)
        elif path is None:
            return None
        elif path <= PciePath.PXB:
            found.append(Closeness.SWITCH)
        else:
            found.append(Closeness.SOCKETS if path is PciePath.SYS else Closeness.NUMA)
    order = list(Closeness)
    return max(found, key=order.index, default=None)

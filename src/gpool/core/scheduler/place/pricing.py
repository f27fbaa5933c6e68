"""Pricing of placements: the GPU that a placement makes unusable for the usual tasks.

Packing tasks onto GPUs is a cutting-stock problem: how few GPUs hold the mix? The dual prices are the worth of each
size in GPUs; the most valuable set of sizes that fits into r thousandths is the worth of r. A rest of 0.19 into which
nothing fits is worth nothing, so the task that leaves it pays for it.

Column generation: from one pattern per size, the most valuable pattern under the present prices (a knapsack) replaces
another, until none is worth more than one GPU.

Three costs are added, in thousandths of a GPU, and rounded to steps:

- **fragmentation**: free GPU that a task drawn from the mix could not use, on average (`fragmentation`);
- **remnants**: worth of the rest of a shared GPU, lost beyond the task's own part (`remnants`);
- **stranding**: free GPU for which free CPU or memory is short, at the mix's needs per GPU.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpool.core.model import GIB, GpuRequest, Node, Requirements
from gpool.core.scheduler.place.fit import suits

GPU = 1000
"""One GPU, in thousandths."""

_ROUNDS = 2_000  # far more than ever needed; an end even when prices go in circles
_EPSILON = 1e-9
_Column = NDArray[np.float64]


def remnant_values(demand: Mapping[int, int]) -> tuple[float, ...]:
    """Worth in GPUs of 0 to 1000 free thousandths. `demand`: number of requests per size."""
    sizes = sorted(size for size, count in demand.items() if 0 < size <= GPU and count > 0)
    if not sizes:
        return tuple(0.0 if free < GPU else 1.0 for free in range(GPU + 1))
    prices = _prices(sizes, np.array([demand[size] for size in sizes], float))
    worth, _ = _best_patterns(sizes, prices, unit := gcd(GPU, *sizes))
    return tuple(float(worth[free // unit]) for free in range(GPU + 1))


def least_gpus(demand: Mapping[int, int]) -> float:
    sizes = sorted(size for size, count in demand.items() if count > 0)
    if not sizes:
        return 0.0
    counts = np.array([demand[size] for size in sizes], float)
    return float(_prices(sizes, counts) @ counts)


def _prices(sizes: list[int], demand: _Column) -> _Column:
    unit = gcd(GPU, *sizes)
    basis = np.diag([float(GPU // size) for size in sizes])
    cost = np.ones(len(sizes))
    prices: _Column = np.linalg.solve(basis.T, cost).astype(float)
    for _ in range(_ROUNDS):
        entering, is_pattern = _entering(sizes, prices, unit)
        if entering is None:
            break
        amounts = np.linalg.solve(basis, demand)
        change = np.linalg.solve(basis, entering)
        falling = np.flatnonzero(change > _EPSILON)
        if not len(falling):
            break
        ratios = amounts[falling] / change[falling]
        leaving = falling[int(ratios.argmin())]
        basis[:, leaving], cost[leaving] = entering, 1.0 if is_pattern else 0.0
        prices = np.linalg.solve(basis.T, cost).astype(float)
    floor: _Column = np.maximum(prices, 0.0)
    return floor


def _entering(sizes: list[int], prices: _Column, unit: int) -> tuple[_Column | None, bool]:
    """None at the optimum."""
    if prices.min() < -_EPSILON:
        surplus = np.zeros(len(sizes))
        surplus[int(prices.argmin())] = -1.0
        return surplus, False
    worth, last = _best_patterns(sizes, prices, unit)
    if worth[-1] <= 1 + 1e-7:
        return None, True
    pattern, left = np.zeros(len(sizes)), GPU // unit
    while left > 0:
        place = last[left]
        if place < 0:
            left -= 1
        else:
            pattern[place] += 1
            left -= sizes[place] // unit
    return pattern, True


def _best_patterns(
    sizes: list[int], prices: _Column, unit: int
) -> tuple[NDArray[np.float64], list[int]]:
    """Worth of the best pattern and its last size by capacity (-1: the pattern of the next smaller capacity)."""
    steps = [size // unit for size in sizes]
    values = prices.tolist()
    worth, last = [0.0] * (GPU // unit + 1), [-1] * (GPU // unit + 1)
    for room in range(1, len(worth)):
        best, chosen = worth[room - 1], -1
        for place, step in enumerate(steps):
            if step > room:
                break
            value = worth[room - step] + values[place]
            if value > best + _EPSILON:
                best, chosen = value, place
        worth[room], last[room] = best, chosen
    return np.array(worth), last


Ints = NDArray[np.int64]
Slots = NDArray[np.intp]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_MAX_MIXES = 4096


class Mix(NamedTuple):
    """Free GPUs of a node by class: GPUs that fit, rests too small, usable free GPU times the weight; and all free GPU times
    all weights.
    """

    fits: Floats
    rests: Floats
    useful: Floats
    total: float


class FragmentationTarget:
    def __init__(self, pricing: Pricing) -> None:
        self._mix = [needs for needs, _ in pricing.mix]
        sizes = [size_of(needs.gpu[0]) for needs in self._mix]
        self.classes = len(sizes)
        self._counts = np.array([needs.gpu[0].count for needs in self._mix], float)
        self._weights = np.array([weight for _, weight in pricing.mix], float)
        needs = np.array([needs.cpu_milli for needs in self._mix], float)
        # Steps of CPU: between two of them the same classes have enough.
        self._steps: Floats = np.unique(needs)
        self._step_list: list[float] = self._steps.tolist()
        low = np.concatenate([[-1.0], self._steps])
        self._enough: Bools = low[:, None] >= needs  # by how many of the steps there is CPU for
        self._suits: Bools  # by kind of node
        self._mixes: dict[tuple[int, ...], Mix] = {}  # by the free parts of a node's GPUs
        self.forget_kinds()
        gpu, memory = pricing.gpu_milli, pricing.memory_bytes
        self._per_cpu = gpu / max(1, pricing.cpu_milli)  # GPU that so much CPU and memory feed
        self._per_byte = gpu / memory if memory else 0.0
        free = np.arange(GPU + 1)[:, None]
        enough = free >= np.array(sizes, np.int64).reshape(1, -1)
        # By free thousandths of a GPU: whether a class fits, and the rest that is too small for it.
        self.fits: Floats = enough.astype(float)
        self.rests: Floats = np.where(enough, 0.0, free)
        self.worth: Floats = np.array(pricing.remnants, float) / GPU

    def forget_kinds(self) -> None:
        self._suits = np.zeros((1, self.classes), bool)

    def add_kind(self, node: Node) -> None:
        row = np.array([[suits(node, wanted) for wanted in self._mix]], bool)
        self._suits = np.concatenate([self._suits, row.reshape(1, -1)])

    def fragments(
        self, kinds: Slots, cpu: Floats, mix: tuple[Floats, Floats], total: Floats, taken: int = 0
    ) -> Floats:
        """Free GPU that the mix cannot use, times `WEIGHT`, by kind.

        `mix`: GPUs that fit each class (`taken` whole ones no longer free), and rests too small for it.
        """
        fits, rests = mix
        can = fits >= (self._counts + taken if taken else self._counts)
        can &= self._suits.take(kinds, 0)
        can &= self._enough.take(self._steps.searchsorted(cpu, "right"), 0)
        lost: Floats = np.where(can, rests, total[:, None]).dot(self._weights)
        return lost

    def mix_of(self, free: tuple[int, ...]) -> Mix:
        known = self._mixes.get(free)
        if known is None:
            if len(self._mixes) >= _MAX_MIXES:
                self._mixes.clear()
            fits, rests = self.fits.take(free, 0).sum(0), self.rests.take(free, 0).sum(0)
            total = sum(free)
            useful = np.where(fits >= self._counts, (total - rests) * self._weights, 0.0)
            known = Mix(fits, rests, useful, total * float(self._weights.sum()))
            self._mixes[free] = known
        return known

    def step_of(self, cpu: int) -> int:
        """Number of the steps of CPU that there is enough for."""
        return bisect_right(self._step_list, cpu)

    def fragments_of(self, kind: int, step: int, mix: Mix) -> float:
        able = self._suits[kind] & self._enough[step]
        return mix.total - float(mix.useful.dot(able))

    def stranded(self, cpu: Floats, memory: Floats, total: Floats) -> Floats:
        fed = cpu * self._per_cpu
        if self._per_byte:
            fed = np.minimum(fed, memory * self._per_byte)
        beyond: Floats = np.maximum(total - fed, 0.0)
        return beyond

    def stranded_of(self, cpu: float, memory: float, total: float) -> float:
        fed = cpu * self._per_cpu
        if self._per_byte:
            fed = min(fed, memory * self._per_byte)
        return max(total - fed, 0.0)


MAX_KINDS = 128
COVERED = 0.95  # of all arrivals; what is rarer does not steer
WEIGHT = 10_000
"""Sum of the weights of a mix: integers keep sums exact."""

_USUAL_VRAM = 24 * GIB  # to give a slice of memory a size where no card is at hand


@dataclass(frozen=True, slots=True)
class Weights:
    """All zero is best fit."""

    fragmentation: int = 1
    remnants: int = 10_000
    stranding: int = 1
    step: int = 80


@dataclass(frozen=True, slots=True)
class Pricing:
    """`mix`: requirements with GPUs and their parts of `WEIGHT`, most frequent first."""

    mix: tuple[tuple[Requirements, int], ...]
    remnants: tuple[int, ...]  # the worth of 0 … 1000 free thousandths, in thousandths
    gpu_milli: int  # requested in all, beside ...
    cpu_milli: int  # ... this CPU
    memory_bytes: int  # ... and memory (0: none was requested)
    weights: Weights = Weights()


def price(arrivals: Iterable[tuple[Requirements, int]], weights: Weights = Weights()) -> Pricing:  # noqa: B008 - frozen
    counts: Counter[Requirements] = Counter()
    for needs, count in arrivals:
        counts[needs] += count
    demand: Counter[int] = Counter()
    gpu = cpu = memory = 0
    kinds: Counter[Requirements] = Counter()
    for needs, count in counts.items():
        kinds[_kind(needs)] += count
        if not needs.gpu:
            continue
        request = needs.gpu[0]
        size = size_of(request)
        demand[size] += request.count * count
        gpu += request.count * size * count
        cpu += needs.cpu_milli * count
        memory += (needs.memory_bytes or 0) * count
    ranked = sorted(kinds.items(), key=lambda pair: (-pair[1], repr(pair[0])))
    total, covered, chosen = sum(kinds.values()), 0, []
    for needs, count in ranked[:MAX_KINDS]:
        chosen.append((needs, count))
        covered += count
        if covered >= COVERED * total:
            break
    mix = [(needs, max(1, count * WEIGHT // covered)) for needs, count in chosen]
    values = remnant_values(demand)
    return Pricing(
        mix=tuple(pair for pair in mix if pair[0].gpu),
        remnants=tuple(round(GPU * value) for value in values),
        gpu_milli=gpu,
        cpu_milli=cpu,
        memory_bytes=memory,
        weights=weights,
    )


def size_of(request: GpuRequest, card_bytes: int = _USUAL_VRAM) -> int:
    """Thousandths of each GPU."""
    if request.vram_bytes is not None and request.share_milli == GPU:
        return max(1, min(GPU, GPU * request.vram_bytes // max(1, card_bytes)))
    return request.share_milli


def _kind(needs: Requirements) -> Requirements:
    return Requirements(
        gpu=needs.gpu,
        cpu_milli=needs.cpu_milli if needs.gpu else 0,
        tier=needs.tier,
        python=needs.python,
        network=needs.network,
    )


USUAL = price([(Requirements(gpu=(GpuRequest(),)), 1)])
"""Without arrivals to learn from: tasks of one GPU and one CPU, so that slices fill shared GPUs."""

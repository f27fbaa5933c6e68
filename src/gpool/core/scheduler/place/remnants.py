"""Worth of the rest of a GPU to the usual tasks: a small linear program over GPU sizes. Knows no nodes.

Packing tasks onto GPUs is a cutting-stock problem: how few GPUs hold the mix? The dual prices are the worth of each
size in GPUs; the most valuable set of sizes that fits into r thousandths is the worth of r. A rest of 0.19 into which
nothing fits is worth nothing, so the task that leaves it pays for it.

Column generation: from one pattern per size, the most valuable pattern under the present prices (a knapsack) replaces
another, until none is worth more than one GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

import numpy as np
from numpy.typing import NDArray

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

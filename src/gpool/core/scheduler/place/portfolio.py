"""Choice of a pricing: replay earlier arrivals with each candidate set of weights, take the best.
Priced fragmentation was best on nearly every measured mix; the choice guards against others. Pricings are learnt from
the earlier half and compared on the later half, where the chosen one is no worse than plain gradient descent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import cycle

from gpool.core.model import Instant, Node, Shape
from gpool.core.scheduler.order.limits import least_gpus
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.place.fit import is_open
from gpool.core.scheduler.place.pricing import USUAL, Pricing, Weights, price
from gpool.core.scheduler.predict.simulation import Replay

PLAIN = Weights(remnants=0, stranding=0, step=40)
"""Fragmentation gradient descent as published."""

WAYS: tuple[Weights, ...] = (
    Weights(),
    Weights(remnants=5_000, stranding=0),  # gradient and remnants
    PLAIN,
    Weights(fragmentation=0, remnants=0, stranding=0),  # best fit
)
LEAST_ARRIVALS = 100  # in each half; with fewer there is no mix to speak of
MOST_ARRIVALS = 20_000  # played for each way
LOAD = 1.3  # times the pool's GPUs, so that it is full in the end
_MARGIN = 0.02  # percentage points by which later weights must be better


@dataclass(frozen=True, slots=True)
class Judged:
    """Result on arrivals not used for learning."""

    weights: Weights
    unallocated_pct: float


@dataclass(frozen=True, slots=True)
class Learnt:
    pricing: Pricing
    judged: tuple[Judged, ...]  # all candidates
    arrivals: int  # both halves
    at: Instant

    def of(self, weights: Weights) -> float | None:
        found = [each.unallocated_pct for each in self.judged if each.weights == weights]
        return found[0] if found else None


def learn(
    nodes: Collection[Node],
    arrivals: Sequence[Shape],
    at: Instant,
    ways: Sequence[Weights] = WAYS,
) -> Learnt | None:
    """Return the pricing that leaves the fewest GPUs idle when the later arrivals are repeated until the pool is full.

    None: too few arrivals. Within `_MARGIN` the earlier weights win, unless `PLAIN` is better.
    """
    half = len(arrivals) // 2
    earlier, later = arrivals[:half], arrivals[half:]
    asks = (any(least_gpus(shape) for shape in part) for part in (earlier, later))
    if half < LEAST_ARRIVALS or not all(asks):
        return None
    pricings = [priced(earlier, weights) for weights in ways]
    judged = [
        Judged(pricing.weights, unallocated_pct(nodes, later, pricing)) for pricing in pricings
    ]
    plain = min((each.unallocated_pct for each in judged if each.weights == PLAIN), default=None)
    best: int | None = None
    for place, each in enumerate(judged):
        if plain is not None and each.unallocated_pct > plain:
            continue
        if best is None or each.unallocated_pct < judged[best].unallocated_pct - _MARGIN:
            best = place
    assert best is not None, "the plain way is not worse than itself"
    return Learnt(pricings[best], tuple(judged), len(arrivals), at)


def choose(
    nodes: Collection[Node], arrivals: Sequence[Shape], ways: Sequence[Weights] = WAYS
) -> Pricing:
    learnt = learn(nodes, arrivals, Instant(0), ways)
    return USUAL if learnt is None else learnt.pricing


def priced(arrivals: Sequence[Shape], weights: Weights = Weights()) -> Pricing:  # noqa: B008 - frozen
    return price(Counter(shape.requirements for shape in arrivals).items(), weights)


def unallocated_pct(nodes: Collection[Node], arrivals: Sequence[Shape], pricing: Pricing) -> float:
    replay = Replay(filter(is_open, nodes), Policy(order="fcfs", pricing=pricing))
    asked = 0
    for number, shape in enumerate(cycle(arrivals)):
        if number >= MOST_ARRIVALS or asked >= LOAD * replay.capacity_milli:
            break
        asked += least_gpus(shape)
        replay.arrive(shape, Instant(number))
    return replay.unallocated_pct

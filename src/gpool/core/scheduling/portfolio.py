"""Chooses how room is priced, by playing the pool's earlier arrivals through the planner with each way there is. It steers no run it has seen.

Priced fragmentation is best on every mix that was measured. Mixes it has not met are the reason for this: what served
yesterday's tasks best serves today's, and plain gradient descent and best fit are among the ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import cycle

from gpool.core.model import Instant, Node, Shape
from gpool.core.scheduling.limits import least_gpus
from gpool.core.scheduling.orders import Policy
from gpool.core.scheduling.placement import is_open
from gpool.core.scheduling.pricing import USUAL, Pricing, Weights, price
from gpool.core.scheduling.replay import Replay

WAYS: tuple[Weights, ...] = (
    Weights(),
    Weights(remnants=5_000, stranding=0),  # gradient and remnants
    Weights(remnants=0, stranding=0, step=40),  # gradient alone
    Weights(fragmentation=0, remnants=0, stranding=0),  # best fit
)
LEAST_ARRIVALS = 100  # with fewer there is no mix to speak of
MOST_ARRIVALS = 20_000  # played for each way
LOAD = 1.3  # times the pool's GPUs, so that it is full in the end
_MARGIN = 0.02  # points by which another way must be better than one before it


def choose(
    nodes: Collection[Node], arrivals: Sequence[Shape], ways: Sequence[Weights] = WAYS
) -> Pricing:
    """The pricing under which these arrivals, repeated until the pool is full, leave the fewest GPUs idle."""
    if len(arrivals) < LEAST_ARRIVALS:
        return USUAL
    pricings = [priced(arrivals, weights) for weights in ways]
    if len(pricings) == 1 or not any(least_gpus(shape) for shape in arrivals):
        return pricings[0]
    best, least = pricings[0], 0.0
    for place, pricing in enumerate(pricings):
        idle = unallocated_pct(nodes, arrivals, pricing)
        if place == 0 or idle < least - _MARGIN:
            best, least = pricing, idle
    return best


def priced(arrivals: Sequence[Shape], weights: Weights = Weights()) -> Pricing:  # noqa: B008 - frozen
    return price(Counter(shape.requirements for shape in arrivals).items(), weights)


def unallocated_pct(nodes: Collection[Node], arrivals: Sequence[Shape], pricing: Pricing) -> float:
    """What is left of the GPUs when arrivals have filled them under this pricing."""
    replay = Replay(filter(is_open, nodes), Policy(order="fcfs", pricing=pricing))
    asked = 0
    for number, shape in enumerate(cycle(arrivals)):
        if number >= MOST_ARRIVALS or asked >= LOAD * replay.capacity_milli:
            break
        asked += least_gpus(shape)
        replay.arrive(shape, Instant(number))
    return replay.unallocated_pct

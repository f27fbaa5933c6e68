"""Queue orders as values: an operator's policy, the candidate that an order ranks, levels of attained run time.

Levels begin at 0, 0.5, 2, 8, 32 and 128 hours of run time in all attempts; within a level the older goes first. Run
times have heavy tails: a task that has run long will probably run as long again, so stopping it for short ones costs it
little. This holds at every scale, hence factors of four: with one level above 8 hours, a task of ten hours would wait
behind tasks of two weeks. Starving tasks are promoted, but never past the levels of short tasks (`order.promotion`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, Instant, Shape, Span
from gpool.core.scheduler.order.limits import NO_LIMITS, WITHIN, GpuLimits, Holder
from gpool.core.scheduler.place.pricing import USUAL, Pricing

AGES = tuple(Span(1800 * 4**level * SECOND) for level in range(5))
"""Attained run time at which the next level begins."""

LEVEL_OF_PROMOTED = 3
"""Level whose tasks come after promoted ones: 8 hours."""


def level_of(attained: Span) -> int:
    return bisect_right(AGES, attained)


def attained_at(level: int) -> Span:
    return AGES[level - 1] if level else Span(0)


def at_level(shape: Shape, level: int) -> Shape:
    return shape if shape.level == level else replace(shape, level=level)


def plain(shape: Shape) -> Shape:
    """The shape without fields that count only while a task waits."""
    return replace(shape, level=0, avoids=()) if shape.level or shape.avoids else shape


_SECOND = 1_000_000
_PREFETCH_TARGET, _AGEING, _PATIENCE = Span(300_000), Span(300 * _SECOND), Span(60 * _SECOND)
HOUR = Span(3600 * _SECOND)
_PROTECTION, _PROMOTION, _URGENCY = Span(HOUR // 4), Span(3 * 24 * HOUR), Span(2 * HOUR)
_QUANTUM, _STARVATION, _RESTART = Span(HOUR // 6), Span(24 * HOUR), Span(60 * _SECOND)


@dataclass(frozen=True, slots=True)
class Policy:
    order: str = "fair_share"
    max_prefetch: int = 500  # leases in the queue of one allocation
    prefetch_target: Span = _PREFETCH_TARGET  # predicted work in the queue of one allocation
    max_places_per_pass: int = 1000
    ageing: Span = _AGEING  # waiting time worth one point of priority
    patience: Span = _PATIENCE  # waiting time after which a node is reserved for a task
    limits: GpuLimits = NO_LIMITS
    pricing: Pricing = USUAL  # learnt from earlier arrivals
    weights: Mapping[Holder, int] = field(default_factory=dict)  # thousandths; 1000 where not set
    preemption: bool = True  # of tasks that allow it
    protection: Span = _PROTECTION  # after a restart; at most `quantum` against other users' tasks
    max_preemptions_per_pass: int = 200
    promotion: Span = _PROMOTION  # waiting time after which a user's oldest task goes first
    starvation: Span = _STARVATION  # waiting time after which it goes before long tasks
    promoted_milli: int = 300  # part of their user's GPUs that promoted tasks may hold at first
    restart: Span = _RESTART  # assumed cost of stopping and restarting a task
    urgency: Span = _URGENCY  # time before its deadline from which a task counts as due
    margin_milli: int = 100  # shares nearer to each other than this are equal in preemption
    quantum: Span = _QUANTUM  # run time after which tenants that had less may take the GPUs


class Promotion(IntEnum):
    """Degree to which a starving task is promoted (`order.promotion`)."""

    FIRST = 0  # before all tasks of its user
    LONG = 1  # before its user's tasks of `LEVEL_OF_PROMOTED` and above
    NONE = 2


class Candidate(NamedTuple):
    """Oldest waiting task of a shape, or a running task ranked as if it waited."""

    shape: Shape
    queued_at: Instant
    task: TaskId
    running: int  # allocations of the user, including those of this pass
    served: int  # grows with each lease of the user: the smallest was served least recently
    attained: Span = Span(0)  # run time so far
    shares: tuple[int, int] = (0, 0)  # of the tenant and of the user (`order.fair_share`)
    predicted: Span | None = None  # run time; None: unknown, or the order does not use it
    band: int = WITHIN  # WITHIN a guarantee, or BORROWED
    promotion: Promotion = Promotion.NONE


Key = tuple[Any, ...]
"""Sort key of an order: its own NamedTuple of integers, smallest first. No other module reads its fields."""


class Rank(NamedTuple):
    """Starts within a guarantee first, then by the order's key."""

    band: int
    key: Key


@cache
def _fields_of(names: tuple[str, ...]) -> Callable[[Key], tuple[int, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda key: tuple([getattr(key, name) for name in names])


@dataclass(frozen=True, slots=True)
class Order:
    """`decisive` names the fields of the key, first to last, that justify preemption; without any, only a guarantee preempts.
    `exchanges_by_share`: preemption between tenants follows the shares and time quanta of `order.ranking` instead, and
    between the tasks of one user the fields in `classes`, computed from level, promotion and deadline alone: tasks that
    are equal in them never stop each other.
    """

    name: str
    key: Callable[[Candidate, Instant, Policy], Key]
    uses_shares: bool = True
    uses_predictions: bool = True
    decisive: tuple[str, ...] = ()
    exchanges_by_share: bool = False
    classes: tuple[str, ...] = ()

    @property
    def may_preempt(self) -> bool:
        return bool(self.decisive)

    def rank(self, candidate: Candidate, now: Instant, policy: Policy) -> Rank:
        return Rank(candidate.band, self.key(candidate, now, policy))

    def precedes(self, key: Key, other: Key) -> bool:
        if not self.decisive:
            return False
        fields = attrgetter(*self.decisive)
        return bool(fields(key) < fields(other))

    def class_of(self, key: Key) -> tuple[int, ...]:
        """Empty for all keys if the order has no classes."""
        return _fields_of(self.classes)(key)

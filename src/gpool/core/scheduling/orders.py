"""Who comes first. An order is a function from a candidate to a sort key, smallest first; it places nothing.

A candidate stands for all waiting tasks of one shape, seen by its oldest, or for a running one that may be preempted, seen
as if it waited. The planner asks again after every start, so an order may look at what the user holds by then. Two promises
are asked of an order: the same arguments give the same key, and a key never gets smaller when `queued_at`, `running`,
`served`, `attained`, `predicted` or the shares grow. Ties go to the older task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gpool.core.ids import TaskId
from gpool.core.model import Instant, Shape, Span
from gpool.core.scheduling.levels import level_of, risen
from gpool.core.scheduling.limits import NO_LIMITS, GpuLimits, Holder, least_gpus
from gpool.core.scheduling.pricing import USUAL, Pricing

Key = tuple[int, ...]
_LINE_TARGET, _AGEING, _PATIENCE = Span(300_000), Span(5 * 60 * 1_000_000), Span(60 * 1_000_000)
_HOUR = Span(3600 * 1_000_000)
_PROTECTION, _PROMOTION, _URGENCY = Span(5 * 60 * 1_000_000), Span(7 * 24 * _HOUR), Span(2 * _HOUR)


@dataclass(frozen=True, slots=True)
class Policy:
    """What an operator may choose."""

    order: str = "fair_share"
    max_line: int = 500  # leases in one line
    line_target: Span = _LINE_TARGET  # work that may stand in one line
    max_places_per_pass: int = 1000
    ageing: Span = _AGEING  # waiting this long is worth one point of priority
    patience: Span = _PATIENCE  # then a node is kept clear for a task that does not fit
    limits: GpuLimits = NO_LIMITS
    pricing: Pricing = USUAL  # what free room is worth, learnt from earlier arrivals
    weights: Mapping[Holder, int] = field(default_factory=dict)  # thousandths; 1000 where not set
    preemption: bool = True  # of tasks that allow it
    protection: Span = _PROTECTION  # not preempted again for so long
    max_preemptions_per_pass: int = 200
    promotion: Span = _PROMOTION  # waiting this long is worth one level
    urgency: Span = _URGENCY  # so long before its `by` a task goes before others of its user


class Candidate(NamedTuple):
    """The next task of a shape, and how its user fares."""

    shape: Shape
    queued_at: Instant
    task: TaskId
    running: int  # allocations the user holds, those of this pass included
    served: int  # grows with each lease; the smallest was served least recently
    attained: Span = Span(0)  # what it has run already
    shares: tuple[int, int] = (0, 0)  # of its team (or user), of its user: see `fair_share`
    predicted: Span | None = None  # how long it will run, as far as can be told


Order = Callable[[Candidate, Instant, Policy], Key]


def fcfs(candidate: Candidate, now: Instant, policy: Policy) -> Key:  # noqa: ARG001 - an Order
    """First come, first served."""
    return candidate.queued_at, candidate.task


def round_robin(candidate: Candidate, now: Instant, policy: Policy) -> Key:  # noqa: ARG001 - an Order
    """Users in turn: who holds least, then who was served least recently, then by age."""
    return candidate.running, candidate.served, candidate.queued_at, candidate.task


def priority(candidate: Candidate, now: Instant, policy: Policy) -> Key:  # noqa: ARG001 - an Order
    """The higher priority, but waiting counts: one point for every `policy.ageing`.

    `priority + waited / ageing` orders as `queued_at - priority * ageing` does: a point is a head start, so every
    task is at the front one day whatever arrives after it.
    """
    head_start = candidate.shape.priority * policy.ageing
    return candidate.queued_at - head_start, candidate.task


def shortest(candidate: Candidate, now: Instant, policy: Policy) -> Key:  # noqa: ARG001 - an Order
    """The least GPU time to come as predicted; what nothing is known of counts as an hour. Waiting for long counts as well."""
    predicted = _HOUR if candidate.predicted is None else candidate.predicted
    size = max(least_gpus(candidate.shape), 1000) * candidate.shape.requirements.nodes
    return predicted * size // 1000, candidate.queued_at, candidate.task


def fair_share(candidate: Candidate, now: Instant, policy: Policy) -> Key:
    """Teams by their share, their users by theirs; a user's own: what is due soon, then by level and age."""
    shape, attained = candidate.shape, candidate.attained
    waited = now - candidate.queued_at - attained
    level = risen(level_of(attained), waited, policy.promotion)
    is_due = shape.by is not None and shape.by - now <= policy.urgency
    head_start = shape.priority * policy.ageing
    since = candidate.queued_at - head_start
    return *candidate.shares, 0 if is_due else 1, level, since, candidate.task


ORDERS: Mapping[str, Order] = {
    "fcfs": fcfs,
    "round_robin": round_robin,
    "priority": priority,
    "shortest": shortest,
    "fair_share": fair_share,
}
"""The orders of the house. The server adds those of the entry point group `gpool.orders` and passes the whole table."""

DECISIVE: Mapping[str, int] = {"round_robin": 1, "priority": 1, "fair_share": 6}
"""How many of the first numbers of a key are worth preempting for; orders that are not named never preempt.

The rest, mere age, decides who starts first but stops nobody: a task of the same standing would be stopped next.
"""

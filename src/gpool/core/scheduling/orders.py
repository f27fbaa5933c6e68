"""Who comes first. An order is a function from a candidate to a sort key, smallest first; it places nothing.

A candidate stands for all waiting tasks of one shape, seen by its oldest. The planner asks again after every start, so an
order may look at what the user holds by then. Two promises are asked of an order: the same arguments give the same key, and
a key never gets smaller when `queued_at`, `running` or `served` grow. Ties go to the older task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpool.core.ids import TaskId
from gpool.core.model import Instant, Shape, Span
from gpool.core.scheduling.limits import NO_LIMITS, GpuLimits
from gpool.core.scheduling.pricing import USUAL, Pricing

Key = tuple[int, ...]
_LINE_TARGET, _AGEING, _PATIENCE = Span(300_000), Span(5 * 60 * 1_000_000), Span(60 * 1_000_000)


@dataclass(frozen=True, slots=True)
class Policy:
    """What an operator may choose."""

    order: str = "priority"
    max_line: int = 500  # leases in one line
    line_target: Span = _LINE_TARGET  # work that may stand in one line
    max_places_per_pass: int = 1000
    ageing: Span = _AGEING  # waiting this long is worth one point of priority
    patience: Span = _PATIENCE  # then a node is kept clear for a task that does not fit
    limits: GpuLimits = NO_LIMITS
    pricing: Pricing = USUAL  # what free room is worth, learnt from earlier arrivals


class Candidate(NamedTuple):
    """The next task of a shape, and how its user fares."""

    shape: Shape
    queued_at: Instant
    task: TaskId
    running: int  # allocations the user holds, those of this pass included
    served: int  # grows with each lease; the smallest was served least recently


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


ORDERS: Mapping[str, Order] = {"fcfs": fcfs, "round_robin": round_robin, "priority": priority}
"""The orders of the house. The server adds those of the entry point group `gpool.orders` and passes the whole table."""

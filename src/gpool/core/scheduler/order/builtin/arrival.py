"""Orders by arrival: first come first served, round robin of users, priority with ageing. None starves a task."""

from __future__ import annotations

from typing import NamedTuple

from gpool.core.ids import TaskId
from gpool.core.model import Instant
from gpool.core.scheduler.order.orders import Candidate, Order, Policy


class ArrivalKey(NamedTuple):
    queued_at: int
    task: TaskId


def fcfs(candidate: Candidate, now: Instant, policy: Policy) -> ArrivalKey:  # noqa: ARG001 - an order's key
    return ArrivalKey(candidate.queued_at, candidate.task)


FCFS = Order("fcfs", fcfs, uses_shares=False, uses_predictions=False)


class RoundRobinKey(NamedTuple):
    running: int
    served: int
    queued_at: int
    task: TaskId


def round_robin(candidate: Candidate, now: Instant, policy: Policy) -> RoundRobinKey:  # noqa: ARG001 - an order's key
    """Fewest allocations first, then served least recently, then oldest."""
    return RoundRobinKey(candidate.running, candidate.served, candidate.queued_at, candidate.task)


ROUND_ROBIN = Order(
    "round_robin", round_robin, uses_shares=False, uses_predictions=False, decisive=("running",)
)


class PriorityKey(NamedTuple):
    since: int
    task: TaskId


def priority(candidate: Candidate, now: Instant, policy: Policy) -> PriorityKey:  # noqa: ARG001 - an order's key
    """A task gains one point for every `policy.ageing` it waits.

    `priority + waited / ageing` sorts like `queued_at - priority * ageing`: a point is a head start in age.
    """
    head_start = candidate.shape.priority * policy.ageing
    return PriorityKey(candidate.queued_at - head_start, candidate.task)


PRIORITY = Order(
    "priority", priority, uses_shares=False, uses_predictions=False, decisive=("since",)
)

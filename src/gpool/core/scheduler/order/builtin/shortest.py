"""Shortest job first: by predicted GPU time. A task that waited for `policy.promotion` goes before all others."""

from __future__ import annotations

from typing import NamedTuple

from gpool.core.ids import TaskId
from gpool.core.model import Instant
from gpool.core.scheduler.order.limits import least_gpus
from gpool.core.scheduler.order.orders import HOUR, Candidate, Order, Policy

_UNKNOWN = HOUR  # run time of a task without a prediction


class ShortestKey(NamedTuple):
    is_promoted: int  # 0: promoted, 1: not
    gpu_time: int
    queued_at: int
    task: TaskId


def shortest(candidate: Candidate, now: Instant, policy: Policy) -> ShortestKey:
    if now - candidate.queued_at >= policy.promotion:
        return ShortestKey(0, 0, candidate.queued_at, candidate.task)
    predicted = _UNKNOWN if candidate.predicted is None else candidate.predicted
    size = max(least_gpus(candidate.shape), 1000) * candidate.shape.requirements.nodes
    return ShortestKey(1, predicted * size // 1000, candidate.queued_at, candidate.task)


SHORTEST = Order("shortest", shortest, uses_shares=False)

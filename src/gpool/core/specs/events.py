"""Kinds of events that users can subscribe to, and the schedule on which a failed delivery is tried again. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from gpool.core.errors import Invalid
from gpool.core.model import SECOND, Instant, Span


class EventKind(StrEnum):
    TASK_STARTED = "task.started"
    TASK_SUCCEEDED = "task.succeeded"
    TASK_FAILED = "task.failed"
    TASK_CANCELLED = "task.cancelled"
    TASK_PREEMPTED = "task.preempted"
    BATCH_DONE = "batch.done"
    BUDGET_WARNING = "budget.warning"
    BUDGET_REACHED = "budget.reached"
    BALANCE_LOW = "balance.low"
    PAYOUT_READY = "payout.ready"
    NODE_LOST = "node.lost"
    NODE_BACK = "node.back"
    GPU_UNHEALTHY = "gpu.unhealthy"
    GPU_HEALTHY = "gpu.healthy"
    ALERT_FIRING = "alert.firing"
    ALERT_RESOLVED = "alert.resolved"
    PING = "ping"  # sent by `gpool webhook test` only


ALL = "*"
SUBSCRIBABLE = tuple(kind for kind in EventKind if kind is not EventKind.PING)

RETRY_DELAYS_S = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""Pauses before the second and later attempts of a delivery: 75 hours in all."""
JITTER = 0.1
"""Share of a pause that is added at random, so that deliveries that failed together are not repeated together."""
LONGEST_PAUSE = Span(86_400 * SECOND)


def kinds_text(kinds: Iterable[str]) -> str:
    """Normal form of a selection: `*`, or sorted kinds joined by commas. `task.*` selects a family."""
    wanted = list(kinds)
    if not wanted or ALL in wanted:
        return ALL
    found: set[EventKind] = set()
    for word in wanted:
        family = word.removesuffix("*") if word.endswith(".*") else None
        matching = [
            kind
            for kind in SUBSCRIBABLE
            if kind == word or (family is not None and kind.startswith(family))
        ]
        if not matching:
            known = ", ".join(SUBSCRIBABLE)
            raise Invalid(f"{word[:60]!r} is no kind of event; use one of {known}, or *")
        found.update(matching)
    return ",".join(kind for kind in SUBSCRIBABLE if kind in found)


def next_attempt(
    attempts: int, now: Instant, jitter: float, asked: Span | None = None
) -> Instant | None:
    """Time of the next attempt after `attempts` failed ones; None: give up.

    `jitter`: a random number from 0 to 1. `asked`: the pause that the receiver asked for (Retry-After), up to a day.
    """
    if attempts > len(RETRY_DELAYS_S):
        return None
    pause = RETRY_DELAYS_S[attempts - 1] * (1 + JITTER * jitter)
    least = Span(0) if asked is None else min(asked, LONGEST_PAUSE)
    return Instant(now + max(round(pause * SECOND), least))

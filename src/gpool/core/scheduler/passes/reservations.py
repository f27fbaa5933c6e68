"""Reservations for what cannot start: a node is kept for it, and others may use that meanwhile if they will be gone in time.

Which node, and when it will have room, follows from the predicted ends of what runs: the one that is ready first. A prediction
may be wrong: then the one that waits starts later than said, never not at all, because nothing that is expected to outlast the
reservation gets in before it. While predictions hold, nothing that passes the one that stands first delays it; who stands behind
others that wait has no such promise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gpool.core.model import Allocation, Instant, Node, Shape, Span
from gpool.core.scheduler.place.fit import fit, is_slice
from gpool.core.scheduler.state.capacity import Room

UNKNOWN = Span(3600 * 1_000_000)
"""What a task counts as when nothing is known of its kind: long enough to be careful, short enough to be of use."""


class Reservation(NamedTuple):
    shape: Shape
    at: Instant  # when there will be room, as predicted
    since: Instant = Instant(0)  # when the one it is for began to wait


class End(NamedTuple):
    """When an allocation will be given back, as predicted."""

    at: int
    allocation: Allocation


def ready_at(
    node: Node, room: Room, ends: Iterable[End], shape: Shape, now: Instant
) -> Instant | None:
    """When this node will have room for the shape; None: not even when all of these have ended. The room is not changed."""
    wanted = _idle_wanted(shape)
    if _has_room(node, room, shape, wanted):
        return now  # of a gang's nodes some are ready before the others
    free = room.copy()
    for end in sorted(ends, key=lambda end: (end.at, end.allocation.number)):
        free.give(end.allocation)
        if _has_room(node, free, shape, wanted):
            return Instant(max(now, end.at))
    return None


def _has_room(node: Node, room: Room, shape: Shape, wanted: int) -> bool:
    idle = sum(1 for gpu in room.gpus.values() if not gpu.holders) if wanted else 0
    return idle >= wanted and fit(node, room, shape) is not None


def _idle_wanted(shape: Shape) -> int:
    """GPUs that must be idle, whatever it chooses: a look that is cheaper than fitting."""
    requests = shape.requirements.gpu
    if any(is_slice(request) for request in requests):
        return 0
    return min((request.count for request in requests), default=0)


def may_pass(shape: Shape, kept: Reservation, now: Instant, predicted: Span | None) -> bool:
    """Whether a task that starts now on a kept node is expected to be gone by then."""
    return kept.shape is shape or (predicted is not None and now + predicted <= kept.at)

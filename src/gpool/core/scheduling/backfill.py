"""Reservations for what cannot start: a node is kept for it, and others may use that meanwhile if they will be gone in time.

When the node will have room is predicted from what runs there. A prediction may be wrong: then the one that waits starts
later than said, never not at all, because nothing that is expected to outlast the reservation gets in before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from gpool.core.model import Instant, Node, Shape, Span
from gpool.core.scheduling.placement import fit
from gpool.core.scheduling.predictions import model_of
from gpool.core.scheduling.room import Room
from gpool.core.scheduling.state import Line

UNKNOWN = Span(3600 * 1_000_000)
"""What a task counts as when nothing is known of its kind: long enough to be careful, short enough to be of use."""


class Reservation(NamedTuple):
    shape: Shape
    at: Instant  # when there will be room, as predicted


def ready_at(
    node: Node,
    room: Room,
    lines: Iterable[Line],
    shape: Shape,
    now: Instant,
    predicted: Callable[[Shape, str], Span | None],
) -> Instant:
    """When this node will have room for the shape, by the predicted ends of what runs there. The room is not changed."""
    ends = []
    for line in lines:
        lasts = predicted(line.shape, model_of(node, line.allocation)) or UNKNOWN
        ends.append((max(now, line.since + lasts), line.allocation.number, line))
    ends.sort()
    free = room.copy()
    for end, _, line in ends:
        free.give(line.allocation)
        if fit(node, free, shape) is not None:
            return Instant(end)
    return Instant(now + UNKNOWN)


def may_pass(shape: Shape, kept: Reservation, now: Instant, predicted: Span | None) -> bool:
    """Whether a task that starts now on a kept node is expected to be gone by then."""
    return kept.shape is shape or (predicted is not None and now + predicted <= kept.at)

"""Whether a task waits for a node that caches its large inputs instead of loading them on another.
It waits while such a node is predicted to have room before a load elsewhere would end, at most `patience` or twice the
loading time. A task past its prediction is expected to run as long as it is late.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import nsmallest

from gpool.core.ids import NodeId
from gpool.core.model import SECOND, Instant, Shape, Span
from gpool.core.scheduler.place.fit import fit, is_open, unfit
from gpool.core.scheduler.place.rows import LOAD_BYTES_PER_S
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.state import State
from gpool.core.scheduler.state.waiting import HeldAllocation, NodeState

MOST_NODES = 64  # looked at


def loading(shape: Shape) -> Span:
    return Span(SECOND * shape.data_bytes // LOAD_BYTES_PER_S)


def may_wait(shape: Shape, queued_at: Instant, now: Instant, patience: Span) -> bool:
    waited = now - queued_at
    is_alone = shape.requirements.nodes == 1  # a gang waits for its nodes, not for its inputs
    return bool(shape.data) and is_alone and waited < max(patience, 2 * loading(shape))


def ready_soon(
    state: State, shape: Shape, now: Instant, room_of: Callable[[NodeId], Room] | None = None
) -> int:
    """Number of nodes with the inputs and room before a load would end; 0 if one has room now."""
    found = 0
    for id_ in nsmallest(MOST_NODES, state.caches.with_data(shape.data)):
        entry = state.nodes.get(id_)
        if entry is None or entry.node is None or not is_open(entry.node):
            continue
        if unfit(entry.node, shape) is not None:
            continue
        room = entry.room if room_of is None else room_of(id_)
        if fit(entry.node, room, shape) is not None:
            return 0
        found += _is_soon(state, entry, room, shape, now)
    return found


def _is_soon(state: State, entry: NodeState, room: Room, shape: Shape, now: Instant) -> bool:
    assert entry.node is not None
    ends = []
    for number, line in entry.lines.items():
        left = _left(state, line, now)
        if left is not None and left <= loading(shape):
            ends.append((left, number, line))
    free = room.copy()
    for _, _, line in sorted(ends, key=lambda end: end[:2]):
        free.give(line.allocation)
        if fit(entry.node, free, shape) is not None:
            return True
    return False


def _left(state: State, line: HeldAllocation, now: Instant) -> Span | None:
    predicted = state.predictions.of(line.shape)
    if predicted is None or not line.since or line.count > 1:
        return None
    return Span(abs(predicted - (now - line.since)))

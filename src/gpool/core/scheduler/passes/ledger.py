"""Capacity during one pass: rooms with the pass's starts and stops, and nodes kept for some shapes only.
Only reads the state; the placement index sees the changed rooms through its overlay.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from gpool.core.ids import NodeId
from gpool.core.model import SECOND, Allocation, Instant, Node, Shape, Span
from gpool.core.scheduler.passes.run_times import RunTimeMemo
from gpool.core.scheduler.place import gangs
from gpool.core.scheduler.place.fit import Fit, is_open
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.state import State

_OVERDUE = Span(1800 * SECOND)


class StartedAllocation(NamedTuple):
    shape: Shape
    allocation: Allocation


class CapacityLedger:
    """Rooms are copied when first taken from."""

    def __init__(self, state: State, index: PlacementIndex) -> None:
        self._state, self._index = state, index
        self._rooms: dict[NodeId, Room] = {}
        self._future: dict[NodeId, Room] = {}
        self._numbers: dict[NodeId, int] = {}  # the smallest allocation number that may be free
        self._started: dict[NodeId, list[StartedAllocation]] = {}
        self._possible: dict[int, bool] = {}  # gangs, by the shape's identity

    def node(self, id_: NodeId) -> Node | None:
        entry = self._state.nodes.get(id_)
        node = entry.node if entry else None
        return node if node is not None and is_open(node) else None

    def room(self, node: NodeId) -> Room:
        return self._rooms.get(node) or self._state.nodes[node].room

    def room_after_stops(self, node: NodeId) -> Room:
        """Room once all preempted tasks have stopped, less the room kept for waiting tasks."""
        return self._future.get(node) or self.room(node)

    def future_room(self, node: NodeId) -> Room:
        """`room_after_stops` as the ledger's own, mutable room."""
        room = self._future.get(node)
        if room is None:
            room = self._future[node] = self.room(node).copy()
        return room

    @property
    def future_nodes(self) -> Collection[NodeId]:
        return self._future.keys()

    def could_ever_start(self, shape: Shape) -> bool:
        if shape.requirements.nodes == 1:
            return True
        known = self._possible.get(id(shape))
        if known is None:
            known = self._possible[id(shape)] = gangs.is_possible(self._index, shape)
        return known

    def started(self, node: NodeId) -> Collection[StartedAllocation]:
        return self._started.get(node, ())

    def take(self, shape: Shape, node: NodeId, found: Fit) -> Allocation:
        entry = self._state.nodes[node]
        number = self._numbers.get(node, 0)
        while number in entry.lines:
            number += 1
        self._numbers[node] = number + 1
        room = self._rooms.get(node)
        if room is None:
            room = self._rooms[node] = entry.room.copy()
        allocation = found.numbered(number)
        room.take(allocation, shape.user)
        self._started.setdefault(node, []).append(StartedAllocation(shape, allocation))
        if node in self._future:
            self._future[node].take(allocation, shape.user)
        self._index.propose(node, room)
        return allocation

    def free_later(self, node: NodeId, allocation: Allocation) -> None:
        self.future_room(node).give(allocation)

    def promise(self, shape: Shape, node: NodeId, found: Fit) -> Allocation:
        """Keep room that will be free; the allocation has no number yet."""
        allocation = found.numbered(-1)
        self.future_room(node).take(allocation, shape.user)
        return allocation


class BackfillReservation(NamedTuple):
    """Tasks predicted to end before `at` may use the node."""

    shape: Shape
    at: Instant  # predicted time at which the node has room
    since: Instant  # when the task it is for was queued


class NodeClaims:
    def __init__(
        self, index: PlacementIndex, now: Instant, run_times: RunTimeMemo, *, preempts: bool
    ) -> None:
        self._index, self._now, self._run_times = index, now, run_times
        self._preempts = preempts
        self._reserved: dict[NodeId, BackfillReservation] = {}
        self._clearing: dict[NodeId, Shape] = {}
        self._pinned: dict[NodeId, list[Shape]] = {}
        self._avoided: dict[int, frozenset[NodeId]] = {}  # by the shape's identity

    @property
    def reserved_count(self) -> int:
        return len(self._reserved)

    def reserve(self, nodes: Collection[NodeId], reservation: BackfillReservation) -> None:
        self._reserved |= dict.fromkeys(nodes, reservation)

    def clear(self, node: NodeId, shape: Shape) -> None:
        self._clearing[node] = shape

    def pin(self, node: NodeId, shape: Shape) -> None:
        self._pinned.setdefault(node, []).append(shape)

    def is_reserved_for_other(self, node: NodeId, shape: Shape) -> bool:
        reservation = self._reserved.get(node)
        return reservation is not None and reservation.shape is not shape

    def closed_to(self, shape: Shape) -> set[NodeId]:
        """A preemptible shape may use reserved nodes, since it can be stopped in time; see `_is_overdue`."""
        found = {id_ for id_, other in self._clearing.items() if other is not shape}
        found |= self.pinned_to_others(shape)
        for id_, kept in self._reserved.items():
            if shape.preemptible and self._preempts and not self._is_overdue(kept, shape):
                continue
            if not self._may_backfill(shape, kept):
                found.add(id_)
        return found | self.avoided(shape) if shape.avoids else found

    def closed_to_preemption_for(self, shape: Shape) -> set[NodeId]:
        """Nodes being cleared for others may be cleared further."""
        found = (self.closed_to(shape) - self._clearing.keys()) | self.pinned_to_others(shape)
        return found | self.avoided(shape)

    def closed_to_reservation_for(self, shape: Shape) -> Collection[NodeId]:
        return self._reserved.keys() | self.avoided(shape) if shape.avoids else self._reserved

    def pinned_to_others(self, shape: Shape) -> set[NodeId]:
        return {
            id_
            for id_, shapes in self._pinned.items()
            if all(other is not shape for other in shapes)
        }

    def avoided(self, shape: Shape) -> frozenset[NodeId]:
        """Nodes on which the shape failed to start, if another open node could run it, busy or not."""
        if not shape.avoids:
            return frozenset()
        known = self._avoided.get(id(shape))
        if known is None:
            is_possible = gangs.is_possible(self._index, shape, shape.avoids)
            known = frozenset(shape.avoids if is_possible else ())
            self._avoided[id(shape)] = known
        return known

    def _may_backfill(self, shape: Shape, kept: BackfillReservation) -> bool:
        if kept.shape is shape:
            return True
        predicted = self._run_times.of(shape)
        return predicted is not None and self._now + predicted <= kept.at

    def _is_overdue(self, kept: BackfillReservation, shape: Shape) -> bool:
        # Not every preemptible task is stopped for the reserving one: within its quantum, the task of a tenant with a small
        # share is not. A stream of such tasks would delay it for ever, so after a while they start elsewhere.
        return kept.shape.user != shape.user and self._now - kept.since >= _OVERDUE

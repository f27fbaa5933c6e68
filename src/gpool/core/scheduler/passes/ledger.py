"""Ledgers of one pass: capacity with its starts and stops, tenants' allocations, shares and limits, predicted run times."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

from gpool.core.ids import NodeId, UserId
from gpool.core.model import SECOND, Allocation, Instant, Node, Shape, Span
from gpool.core.scheduler.order.fair_share import (
    Amounts,
    amounts_of,
    compared,
    plus,
    tenant_of,
    total,
)
from gpool.core.scheduler.order.limits import Holder, band, holders_of, least_gpus
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.order.ranking import Pair
from gpool.core.scheduler.place import gangs
from gpool.core.scheduler.place.fit import Fit, is_open
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.predict.run_times import model_of
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.state import State
from gpool.core.scheduler.state.waiting import HeldAllocation, NodeState

UNKNOWN = Span(3600 * 1_000_000)
"""Assumed run time without a prediction: long enough to be careful, short enough to be of use."""


class Remaining(NamedTuple):
    time: int
    line: HeldAllocation


class RunTimeMemo:
    def __init__(self, state: State, now: Instant) -> None:
        self._state, self._now = state, now
        self._anywhere: dict[int, tuple[Span | None]] = {}  # by the shape's identity
        self._by_model: dict[tuple[int, str], Span] = {}
        self._remaining: dict[int, list[Remaining]] = {}  # by the node entry's identity

    def of(self, shape: Shape) -> Span | None:
        known = self._anywhere.get(id(shape))
        if known is None:
            known = self._anywhere[id(shape)] = (self._state.predictions.of(shape),)
        return known[0]

    def on(self, node: Node, shape: Shape, allocation: Allocation) -> Span:
        model = model_of(node, allocation)
        known = self._by_model.get((id(shape), model))
        if known is None:
            known = self._state.predictions.of(shape, model) or UNKNOWN
            self._by_model[id(shape), model] = known
        return known

    def remaining(self, entry: NodeState) -> list[Remaining]:
        known = self._remaining.get(id(entry))
        if known is None:
            known = [Remaining(self._left(line, entry), line) for line in entry.lines.values()]
            known.sort(key=attrgetter("time"))
            self._remaining[id(entry)] = known
        return known

    def _left(self, line: HeldAllocation, entry: NodeState) -> int:
        # A task that has outlived its prediction is expected to run for another quarter of its run time.
        node = entry.node
        lasts = UNKNOWN if node is None else self.on(node, line.shape, line.allocation)
        ran = self._now - line.since
        return max(lasts - ran, ran // 4)


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


_NOTHING: Amounts = (0, 0, 0)


class Holding(Protocol):
    """Includes the allocations of its gang."""

    @property
    def shape(self) -> Shape: ...
    @property
    def amounts(self) -> Amounts: ...


class TenantLedger:
    def __init__(self, state: State, policy: Policy, *, uses_shares: bool) -> None:
        self._state, self._policy, self._uses_shares = state, policy, uses_shares
        self._running: dict[UserId, int] = {}
        self._gpus: dict[Holder, int] = {}
        self._taken: dict[Holder, Amounts] = {}
        self._shares: dict[Holder, int] = {}
        self._recent: dict[Holder, int] = {}
        self._saved: set[Holder] = set()  # whose limit is kept for a task that has waited long
        self._changed: dict[Holder, int] = {}  # number of the holder's last change
        self.changes = 0

    def count(self, shape: Shape, allocations: Sequence[Allocation], sign: int = 1) -> None:
        self.changes += 1
        self._running[shape.user] = self._running.get(shape.user, 0) + sign * len(allocations)
        amounts = total([amounts_of(allocation) for allocation in allocations])
        for holder in holders_of(shape):
            self._changed[holder] = self.changes
            if amounts[0]:
                self._gpus[holder] = self._gpus.get(holder, 0) + sign * amounts[0]
            self._taken[holder] = plus(self._taken.get(holder, _NOTHING), amounts, sign)
            self._shares.pop(holder, None)

    def has_changed(self, shape: Shape, since: int) -> bool:
        """Whether user or team changed after change `since`; nothing else changes a rank in a pass."""
        if since == self.changes:
            return False
        return any(self._changed.get(holder, 0) > since for holder in holders_of(shape))

    def running(self, user: UserId) -> int:
        return self._state.running.get(user, 0) + self._running.get(user, 0)

    def gpus_held(self, holder: Holder) -> int:
        return self._state.gpus.get(holder, 0) + self._gpus.get(holder, 0)

    def band(self, shape: Shape, without: Holding | None = None, taken: int | None = None) -> int:
        """Whether the next start is within a guarantee. `without`: not counted; `taken`: thousandths of GPUs, if known."""
        less = 0 if without is None else without.amounts[0]
        others = frozenset[Holder]() if without is None else frozenset(holders_of(without.shape))
        if taken is None:
            taken = least_gpus(shape) * shape.requirements.nodes

        def held(holder: Holder) -> int:
            return self.gpus_held(holder) - (less if holder in others else 0)

        return band(self._policy.limits, shape, held, taken)

    def shares(
        self, shape: Shape, without: Holding | None = None, gain: Amounts = _NOTHING
    ) -> Pair:
        """Zeros if the order ignores shares."""
        if not self._uses_shares:
            return 0, 0
        tenant: Holder = tenant_of(shape)
        user: Holder = ("user", shape.user)
        first = self.share(tenant, without, gain)
        if tenant == user:
            return first, first
        return compared(shape, first, self.share(user, without, gain), self._policy.weights)

    def share(
        self, holder: Holder, without: Holding | None = None, gain: Amounts = _NOTHING
    ) -> int:
        if without is None and gain == _NOTHING:
            known = self._shares.get(holder)
            if known is None:
                known = self._shares[holder] = self._share(holder, self._taken.get(holder))
            return known
        more = self._taken.get(holder)
        if gain != _NOTHING:
            more = plus(more or _NOTHING, gain)
        if without is not None and holder in (
            tenant_of(without.shape),
            ("user", without.shape.user),
        ):
            more = plus(more or _NOTHING, without.amounts, -1)
        return self._share(holder, more)

    def _share(self, holder: Holder, more: Amounts | None) -> int:
        return self._state.shares.of(holder, self._policy.weights.get(holder, 1000), more)

    def recent(self, holder: Holder) -> int:
        known = self._recent.get(holder)
        if known is None:
            weight = self._policy.weights.get(holder, 1000)
            known = self._recent[holder] = self._state.shares.recent(holder, weight)
        return known

    def recent_pair(self, shape: Shape) -> Pair:
        if not self._uses_shares:
            return 0, 0
        own = self.recent(("user", shape.user))
        if shape.team is None:
            return own, own
        return compared(shape, self.recent(tenant_of(shape)), own, self._policy.weights)

    def held_pair(self, shape: Shape, more: Amounts = _NOTHING, sign: int = 1) -> Pair:
        """`sign` -1: less `more`."""
        if not self._uses_shares:
            return 0, 0
        own = self._held(("user", shape.user), more, sign)
        if shape.team is None:
            return own, own
        return compared(shape, self._held(tenant_of(shape), more, sign), own, self._policy.weights)

    def _held(self, holder: Holder, more: Amounts, sign: int) -> int:
        taken = plus(self._taken.get(holder, _NOTHING), more, sign)
        return self._state.shares.now(holder, self._policy.weights.get(holder, 1000), taken)

    def limit_exceeded(self, shape: Shape, gpus: int) -> Holder | None:
        """`gpus` in thousandths."""
        if not gpus or not self._policy.limits.is_any:
            return None
        for holder in holders_of(shape):
            limit = self._policy.limits.of(holder)
            if limit is not None and (
                self.gpus_held(holder) + gpus > limit or holder in self._saved
            ):
                return holder
        return None

    def save_limit(self, holder: Holder) -> None:
        """Keeps the holder's smaller tasks from overtaking a large one in this pass."""
        self._saved.add(holder)

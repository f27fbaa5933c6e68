"""The overlay a plan is made on: rooms copied when first taken from, who holds what by then, everything else only read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Protocol

import numpy as np

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import SECOND, Allocation, Instant, Node, Shape, Span
from gpool.core.scheduler.order.fair_share import (
    Amounts,
    amounts_of,
    asked_by,
    compared,
    plus,
    tenant_of,
    total,
)
from gpool.core.scheduler.order.levels import attained_at
from gpool.core.scheduler.order.limits import (
    WITHIN,
    Holder,
    band,
    gpus_in,
    gpus_of,
    holders_of,
    least_gpus,
)
from gpool.core.scheduler.order.orders import DECISIVE, ORDERS, Candidate, Key, Order, Policy
from gpool.core.scheduler.passes.reservations import UNKNOWN, End, Reservation, may_pass, ready_at
from gpool.core.scheduler.place import gangs
from gpool.core.scheduler.place.fit import Fit, is_open
from gpool.core.scheduler.predict.predictions import model_of
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.events import Member
from gpool.core.scheduler.state.queue import Entry
from gpool.core.scheduler.state.state import Line, NodeState, ShapeState, State

MAX_KEPT_CLEAR = 8
_LOOKS_FOR_CLEARING = 64  # shapes a pass for which a node to clear is sought
_HELPED = 8  # tenants a pass
_FAR = Span(30 * 24 * UNKNOWN)
_OVERDUE = Span(1800 * SECOND)
_BEHIND_MILLI = 20  # of what others had
_NODES_COMPARED = 32  # to keep one of them clear
Alike = tuple[UserId, int | None, Amounts]


class Turn:
    """One shape in this pass: what waits still, and where it could go."""

    __slots__ = ("_ahead", "_entries", "entry", "is_over", "key", "left", "seen")

    def __init__(self, entry: ShapeState) -> None:
        self.entry = entry
        self.left = entry.queue.size
        self.is_over = False  # its people run as many GPUs as they may, or it waits for inputs
        self.key: Key = ()
        self.seen = 0  # of the draft's changes, when the key was made
        self._entries: Iterator[Entry] | None = None  # made when it is first taken from
        self._ahead = entry.queue.front()

    @property
    def head(self) -> Entry:
        return self._ahead

    def take(self, count: int) -> list[Entry]:
        """The next `count`, which must be there."""
        if self.left == count == 1:
            self.left = 0
            return [self._ahead]
        if self._entries is None:
            self._entries = self.entry.queue.entries()
            next(self._entries)
        taken = [self._ahead, *islice(self._entries, count - 1)]
        self.left -= count
        if self.left:
            self._ahead = next(self._entries)
        return taken


class NewLine:
    """A line as this pass leaves it."""

    __slots__ = ("allocation", "before", "grants", "members", "node", "shape")

    def __init__(self, node: NodeId, allocation: Allocation, shape: Shape, before: int) -> None:
        self.node = node
        self.allocation = allocation
        self.shape = shape
        self.before = before
        self.members: tuple[Member, ...] = ()
        self.grants: list[Entry] = []

    @property
    def amounts(self) -> Amounts:
        return total(
            amounts_of(part) for part in (self.allocation, *(m.allocation for m in self.members))
        )


class Holding(Protocol):
    """What somebody has on nodes: a line as it is, or as this pass makes it."""

    @property
    def shape(self) -> Shape: ...
    @property
    def amounts(self) -> Amounts: ...


def _is_less(had: int, other: int) -> bool:
    return 1000 * other > (1000 + _BEHIND_MILLI) * had


def _part(line: Holding) -> tuple[int, frozenset[Holder]]:
    return line.amounts[0], frozenset(holders_of(line.shape))


class Draft:
    """See the module."""

    def __init__(self, state: State, now: Instant, policy: Policy, order: Order) -> None:
        self.state, self.now, self.policy, self.order = state, now, policy, order
        self.decisive = DECISIVE.get(policy.order, 0) if policy.preemption else 0
        self.may_preempt = policy.preemption and bool(self.decisive or policy.limits.guaranteed)
        self.engine = state.engine(policy.pricing)
        self.rooms: dict[NodeId, Room] = {}
        self.numbers: dict[NodeId, int] = {}  # the smallest that may be free
        self.running: dict[UserId, int] = {}
        self.gpus: dict[Holder, int] = {}
        self.saved: set[Holder] = set()  # whose limit is kept for a task that has waited long
        self.kept_clear: dict[NodeId, Reservation] = {}
        self._avoided: dict[int, frozenset[NodeId]] = {}  # by shape
        self.looks = _LOOKS_FOR_CLEARING
        self.waiting: list[Turn] = []  # could not start (any more), first in the order first
        self.made: list[NewLine] = []
        self.lines: dict[tuple[NodeId, int], NewLine] = {}
        self.looks_at_shares = policy.order == "fair_share" or policy.order not in ORDERS
        self.changes = 0  # of what anybody holds, in this pass
        self.changed: dict[Holder, int] = {}  # which of them was their last
        self.taken: dict[Holder, Amounts] = {}  # by tenants and users, in this pass
        self._known_shares: dict[Holder, int] = {}  # until they take something
        self.future: dict[NodeId, Room] = {}  # where something stops or is promised
        self.clearing: dict[NodeId, Shape] = {}
        self.pledged: dict[NodeId, list[Shape]] = {}  # what stops there does so for these
        self.helped: set[Holder] = set()  # tenants with a node kept clear though some of theirs run
        self.most_share = self.most_lately = 0  # of any tenant that has tasks waiting
        self.mean_share = 0  # of those, now
        self._lefts: dict[int, list[tuple[int, Line]]] = {}  # by the nodes' entries
        self._latelies: dict[Holder, int] = {}
        self.predictions: dict[int, tuple[Span | None]] = {}
        self.run_times: dict[tuple[int, str], Span] = {}
        self.made_on: dict[NodeId, list[tuple[Shape, Allocation]]] = {}  # in this pass
        self.awaited: dict[str, int] = {}  # large inputs: tasks that wait for a node with them

    def key(self, turn: Turn, given_up: int = 0, without: Holding | None = None) -> Key:
        """Where its next task stands; `without`: as if that did not run."""
        shape = turn.entry.shape
        running = self.state.running.get(shape.user, 0) + self.running.get(shape.user, 0) - given_up
        return self.order(self.candidate(shape, turn.head, running, without), self.now, self.policy)

    def has_changed(self, turn: Turn) -> bool:
        """Whether its people hold something else than when its key was made: nothing else changes a key in a pass."""
        if turn.seen == self.changes:
            return False
        return any(
            self.changed.get(holder, 0) > turn.seen for holder in holders_of(turn.entry.shape)
        )

    def candidate(
        self, shape: Shape, entry: Entry, running: int = 0, without: Holding | None = None
    ) -> Candidate:
        return Candidate(
            shape,
            Instant(entry[0]),
            TaskId(entry[1]),
            running,
            self.state.served(shape.user),
            attained_at(shape.level),
            self.shares(shape, without),
            self.predicted(shape),
            self.band(shape, without) if self.policy.limits.guaranteed else WITHIN,
        )

    def band(self, shape: Shape, without: Holding | None = None, taken: int | None = None) -> int:
        """Whether the next start of this shape is within a guarantee; `taken`: when it is known how many GPUs it takes."""
        less, others = (0, frozenset[Holder]()) if without is None else _part(without)
        if taken is None:
            taken = least_gpus(shape) * shape.requirements.nodes

        def held(holder: Holder) -> int:
            return self.gpus_held(holder) - (less if holder in others else 0)

        return band(self.policy.limits, shape, held, taken)

    def gpus_held(self, holder: Holder) -> int:
        return self.state.gpus.get(holder, 0) + self.gpus.get(holder, 0)

    def predicted(self, shape: Shape) -> Span | None:
        """Asked of the house's orders only by the one that looks at it: it is not cheap."""
        if self.policy.order in ORDERS and self.policy.order != "shortest":
            return None
        return self.predicted_for(shape)

    def predicted_for(self, shape: Shape) -> Span | None:
        known = self.predictions.get(id(shape))
        if known is None:
            known = self.predictions[id(shape)] = (self.state.predictions.of(shape),)
        return known[0]

    def shares(
        self, shape: Shape, without: Holding | None = None, gain: Amounts = (0, 0, 0)
    ) -> tuple[int, int]:
        """Of its tenant and its user, with what this pass gave them; `gain`: and with that besides."""
        if not self.looks_at_shares:
            return 0, 0
        tenant: Holder = tenant_of(shape)
        user: Holder = ("user", shape.user)
        first = self.share(tenant, without, gain)
        if tenant == user:
            return first, first
        return compared(shape, first, self.share(user, without, gain), self.policy.weights)

    def share(self, holder: Holder, without: Holding | None, gain: Amounts = (0, 0, 0)) -> int:
        if without is None and gain == (0, 0, 0):
            known = self._known_shares.get(holder)
            if known is None:
                known = self._known_shares[holder] = self._share(holder, self.taken.get(holder))
            return known
        more = self.taken.get(holder)
        if gain != (0, 0, 0):
            more = plus(more or (0, 0, 0), gain)
        if without is not None and holder in (
            tenant_of(without.shape),
            ("user", without.shape.user),
        ):
            more = plus(more or (0, 0, 0), without.amounts, -1)
        return self._share(holder, more)

    def _share(self, holder: Holder, more: Amounts | None) -> int:
        return self.state.shares.of(holder, self.policy.weights.get(holder, 1000), more)

    def key_beside(self, other: Turn, own: Holding) -> Key:
        """The key of another shape if `own` were given up."""
        shape, user = other.entry.shape, own.shape.user
        if shape.user == user:
            return self.key(other, given_up=1, without=own)
        is_shared = self.looks_at_shares and tenant_of(shape) == tenant_of(own.shape)
        return self.key(other, without=own) if is_shared else other.key

    def is_within_limits(self, turn: Turn, *found: Fit) -> bool:
        """Whether its user and team may run so many GPUs more; else the turn is over its limit."""
        taken = sum(gpus_in(each.slices) for each in found)
        if not taken or not self.policy.limits.is_any:
            return True
        for holder in holders_of(turn.entry.shape):
            limit = self.policy.limits.of(holder)
            if limit is None:
                continue
            used = self.gpus_held(holder)
            if used + taken > limit or holder in self.saved:
                turn.is_over = True
                if taken <= limit and self.now - turn.head[0] >= self.policy.patience:
                    self.saved.add(
                        holder
                    )  # or smaller tasks of the same people would always pass it
                return False
        return True

    def node(self, id_: NodeId) -> Node | None:
        """The node, if it takes new leases."""
        entry = self.state.nodes.get(id_)
        node = entry.node if entry else None
        return node if node is not None and is_open(node) else None

    def room(self, node: NodeId) -> Room:
        return self.rooms.get(node) or self.state.nodes[node].room

    def open_line(self, turn: Turn, *found: tuple[NodeId, Fit]) -> None:
        shape = turn.entry.shape
        parts = [Member(node, self.take(shape, node, fits)) for node, fits in found]
        self.count(shape, [part.allocation for part in parts])
        line = NewLine(parts[0].node, parts[0].allocation, shape, 0)
        line.members = tuple(parts[1:])
        line.grants += turn.take(1)
        self.made.append(line)
        self.lines[line.node, line.allocation.number] = line

    def take(self, shape: Shape, node: NodeId, found: Fit) -> Allocation:
        entry = self.state.nodes[node]
        taken = entry.lines
        number = self.numbers.get(node, 0)
        while number in taken:
            number += 1
        self.numbers[node] = number + 1
        room = self.rooms.get(node)
        if room is None:
            room = self.rooms[node] = entry.room.copy()
        allocation = found.numbered(number)
        room.take(allocation, shape.user)
        self.made_on.setdefault(node, []).append((shape, allocation))
        if node in self.future:
            self.future[node].take(allocation, shape.user)
        before = self.engine.overlay.get(node, (room, len(taken)))[1]
        self.engine.overlay[node] = (room, before + 1)
        self.engine.touch(node)
        return allocation

    def count(self, shape: Shape, allocations: list[Allocation], sign: int = 1) -> None:
        """What its people hold with these."""
        self.changes += 1
        for holder in holders_of(shape):
            self.changed[holder] = self.changes
        self.running[shape.user] = self.running.get(shape.user, 0) + sign * len(allocations)
        gpus = sum(gpus_of(allocation) for allocation in allocations)
        if gpus:
            for holder in holders_of(shape):
                self.gpus[holder] = self.gpus.get(holder, 0) + sign * gpus
        for holder in {tenant_of(shape), ("user", shape.user)}:
            had = self.taken.get(holder, (0, 0, 0))
            for allocation in allocations:
                had = plus(had, amounts_of(allocation), sign)
            self.taken[holder] = had
            self._known_shares.pop(holder, None)

    def keep_clear(self, turn: Turn) -> None:
        """For a task that has waited long: the node nearest to having room takes nothing from those behind it."""
        shape = turn.entry.shape
        if self.now - turn.head[0] < self.policy.patience:
            return
        if turn.entry.lines and not self.is_owed(shape):
            return
        if turn.is_over:
            return  # room would not help it
        most = max(MAX_KEPT_CLEAR, len(self.state.nodes) // 4)
        if not self.looks or len(self.kept_clear) >= most:
            return
        self.looks -= 1
        if shape.requirements.nodes > 1:
            nodes = gangs.nearest(self.engine, shape, self.taken_from(shape))
            if nodes:  # a part of what a gang needs is of no use
                at = Instant(max(self.ready_at(id_, shape) for id_ in nodes))
                since = Instant(turn.head[0])
                self.kept_clear |= dict.fromkeys(nodes, Reservation(shape, at, since))
            return
        owed = self.pieces_owed(turn)
        while owed > 0 and len(self.kept_clear) < most:
            nearest = self.nearest(turn)
            if nearest is None:
                return
            at = Instant(self.ready_at(nearest, shape))
            self.kept_clear[nearest] = Reservation(shape, at, Instant(turn.head[0]))
            owed -= max(1, 1000 * len(self.room(nearest).gpus) // max(1, least_gpus(shape)))

    def pieces_owed(self, turn: Turn) -> int:
        """How many more of these its tenant would have if all had alike; one, where shares do not count."""
        shape, tenant = turn.entry.shape, tenant_of(turn.entry.shape)
        if not self.looks_at_shares or shape.preemptible:
            return 1
        have = self.share(tenant, None) - self.lately(tenant)
        piece = self.share(tenant, None, asked_by(shape)) - self.lately(tenant) - have
        return max(1, min(turn.left, (self.mean_share - have) // max(1, piece)))

    def is_owed(self, shape: Shape) -> bool:
        """What runs somewhere does not starve, but large pieces are a fair share too: its tenant had less than others lately,
        or has less than they even with one more."""
        tenant = tenant_of(shape)
        if tenant in self.helped or len(self.helped) >= _HELPED:
            return False
        if self.looks_at_shares:
            gained = self.shares(shape, None, asked_by(shape))[0]
            if not _is_less(self.lately(tenant), self.most_lately) and gained > self.most_share:
                return False
        self.helped.add(tenant)
        return True

    def is_behind(self, tenant: Holder, other: Holder) -> bool:
        return tenant != other and _is_less(self.lately(tenant), self.lately(other))

    def lately(self, tenant: Holder) -> int:
        known = self._latelies.get(tenant)
        if known is None:
            weight = self.policy.weights.get(tenant, 1000)
            known = self._latelies[tenant] = self.state.shares.lately(tenant, weight)
        return known

    def compare(self, turns: Iterable[Turn]) -> None:
        """Which tenant of those that have tasks waiting has most, and had most lately."""
        if self.looks_at_shares:
            tenants = {tenant_of(turn.entry.shape) for turn in turns}
            self.most_share = max((self.share(each, None) for each in tenants), default=0)
            latelies = {each: self.lately(each) for each in tenants}
            self.most_lately = max(latelies.values(), default=0)
            now = sum(self.share(each, None) - had for each, had in latelies.items())
            self.mean_share = now // max(1, len(tenants))

    def nearest(self, turn: Turn) -> NodeId | None:
        """The node to keep clear, of some that are the same in every pass, or it would be another each time: the one that is
        ready first; where shares count, the one where others have least to do. What may preempt needs it less."""
        shape = turn.entry.shape
        others = self.taken_from(shape)
        if shape.preemptible:
            return self.engine.nearest(shape, others)
        slots, _ = self.engine.could_run(shape, others)
        ids = np.sort(self.engine.board.ids[slots])
        some: list[NodeId] = ids[:: max(1, len(ids) // _NODES_COMPARED)].tolist()
        if not self.looks_at_shares:
            return min(some, key=lambda id_: (self.ready_at(id_, shape), id_), default=None)
        found = [(self.in_the_way(id_, turn), id_) for id_ in some]
        known = [(work, id_) for work, id_ in found if work is not None]
        return NodeId(min(known)[1]) if known else None

    def in_the_way(self, id_: NodeId, turn: Turn) -> int | None:
        """How much has to be done there before there is room, as predicted; None: keeping it clear would not help. If some of
        its shape run, what its own tenant and others no better off have there stays, and what is as small as anything gets what ends next anyway.

        The squares of what they have left, together: what is long counts, what slips in meanwhile hardly does, and on a node
        that is kept clear it gets less and less, so that the same node is kept in the next pass.
        """
        shape, is_first = turn.entry.shape, not turn.entry.lines
        entry, room, needs = self.state.nodes[id_], self.room(id_), shape.requirements
        gpus = min((request.count for request in needs.gpu), default=0) * 1000
        free = sum(1000 for gpu in room.gpus.values() if not gpu.holders)
        cpu, work, tenant = room.free_cpu, 0, tenant_of(shape)
        if free >= gpus and cpu >= needs.cpu_milli:
            return work
        lefts = self.lefts_on(entry)
        if not is_first:
            lefts = [each for each in lefts if self.is_behind(tenant, tenant_of(each[1].shape))]
        for place, (left, line) in enumerate(lefts):
            free, cpu = free + gpus_of(line.allocation), cpu + line.allocation.cpu_milli
            work += (left // SECOND) ** 2
            if free >= gpus and cpu >= needs.cpu_milli:
                return work if is_first or place or gpus > 1000 else None
        return None

    def lefts_on(self, entry: NodeState) -> list[tuple[int, Line]]:
        """What its lines have left to do, the least first."""
        known = self._lefts.get(id(entry))
        if known is None:
            known = [(self.left_of(line, entry.node), line) for line in entry.lines.values()]
            known.sort(key=itemgetter(0))
            self._lefts[id(entry)] = known
        return known

    def left_of(self, line: Line, node: Node | None) -> int:
        """What has outlived its prediction goes on for a while."""
        lasts = UNKNOWN if node is None else self.lasts(line.shape, node, line.allocation)
        ran = self.now - line.since
        return max(lasts - ran, ran // 4)

    def ready_at(self, id_: NodeId, shape: Shape) -> int:
        """When a node will have room, as predicted; far away when that cannot be told."""
        entry, now = self.state.nodes[id_], self.now
        if entry.node is None:
            return now
        held = [(line.since, line.shape, line.allocation) for line in entry.lines.values()]
        held += [(now, *made) for made in self.made_on.get(id_, ())]
        ends = [
            End(since + self.lasts(kind, entry.node, allocation), allocation)
            for since, kind, allocation in held
        ]
        found = ready_at(entry.node, self.room(id_), ends, shape, now)
        return now + _FAR if found is None else found

    def lasts(self, shape: Shape, node: Node, allocation: Allocation) -> Span:
        """How long a task runs there, as predicted."""
        model = model_of(node, allocation)
        known = self.run_times.get((id(shape), model))
        if known is None:
            known = self.state.predictions.of(shape, model) or UNKNOWN
            self.run_times[id(shape), model] = known
        return known

    def barred(self, shape: Shape) -> set[NodeId]:
        """What is being cleared, or kept clear, for others; what may be stopped again may use the latter meanwhile."""
        found = {id_ for id_, other in self.clearing.items() if other is not shape}
        found |= self.pledged_to_others(shape)
        for id_, kept in self.kept_clear.items():
            if shape.preemptible and self.decisive and not self.is_overdue(kept, shape):
                continue
            if not may_pass(shape, kept, self.now, self.predicted_for(shape)):
                found.add(id_)
        return found | self.avoided(shape) if shape.avoids else found

    def pledged_to_others(self, shape: Shape) -> set[NodeId]:
        """Where others were promised what is being cleared, before this pass."""
        return {
            id_
            for id_, shapes in self.pledged.items()
            if all(other is not shape for other in shapes)
        }

    def taken_from(self, shape: Shape) -> Collection[NodeId]:
        """Nodes that are not kept clear for it: for others they are, or it could not be started there."""
        return self.kept_clear.keys() | self.avoided(shape) if shape.avoids else self.kept_clear

    def avoided(self, shape: Shape) -> frozenset[NodeId]:
        """Where it could not be started, as long as another node that takes new leases would do, busy or not."""
        if not shape.avoids:
            return frozenset()
        known = self._avoided.get(id(shape))
        if known is None:
            would_do = gangs.is_possible(self.engine, shape, shape.avoids)
            known = frozenset(shape.avoids if would_do else ())
            self._avoided[id(shape)] = known
        return known

    def is_overdue(self, kept: Reservation, shape: Shape) -> bool:
        """Not all that may be stopped is stopped for it: what has not had its turn, and belongs to people who have little, is
        not. A stream of such would hold it off for ever, so after a while they start elsewhere."""
        return kept.shape.user != shape.user and self.now - kept.since >= _OVERDUE

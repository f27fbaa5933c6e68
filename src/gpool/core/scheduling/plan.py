"""Decides which waiting tasks get which allocations now. Pure: reads a state, writes nothing, the same state gives the same plan.

A pass has two halves. First **starts**: shapes take turns in the policy's order, one allocation a turn, until nothing more
fits. Then **lines**: tasks that cannot start stand in line behind leases of their own shape, evenly and no deeper than
what runs out within `line_target`, so that a node does not idle for a round trip.

What keeps it fair. A line is fed only if its shape would win the allocation again: when another shape that could run there
comes first in the order (counting the line's own allocation as given up), the line runs dry and the allocation goes over.
And small tasks do not starve a large one: once a shape of which nothing runs has waited for `patience`, the node that is
nearest to having room for it takes nothing from those behind it.

No start takes a user or a team past its limit of running GPUs (`policy.limits`); a task that waits for nothing else keeps
no node clear and takes no line from others, but after `patience` its own people's limit is kept for it.

What it costs: a little for each shape that waits, each grant, and each node that changed since a shape was last asked for.
Neither the length of a queue nor the number of nodes matters much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import islice
from operator import itemgetter

from gpool.core.errors import Invalid
from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import Allocation, Instant, Node, Shape, Span
from gpool.core.scheduling import gangs, preemption
from gpool.core.scheduling.backfill import Reservation, may_pass, ready_at
from gpool.core.scheduling.events import Grant, Member, Place, Plan, Preempt
from gpool.core.scheduling.fair_share import Amounts, amounts_of, tenant_of
from gpool.core.scheduling.levels import attained_at
from gpool.core.scheduling.limits import Holder, gpus_in, gpus_of, holders_of, least_gpus
from gpool.core.scheduling.orders import DECISIVE, ORDERS, Candidate, Key, Order, Policy
from gpool.core.scheduling.placement import Fit, fit, is_open, unfit
from gpool.core.scheduling.preemption import Victim
from gpool.core.scheduling.queue import Entry, epoch_of
from gpool.core.scheduling.room import Room
from gpool.core.scheduling.state import Line, ShapeState, State

MAX_KEPT_CLEAR = 8
_LOOKS_FOR_CLEARING = 64  # shapes a pass for which a node to clear is sought
_LOOKS_FOR_FEEDING = (
    200_000  # comparisons a pass for who comes before whom; past them lines run dry
)
_HELPED = 2  # tenants a pass
_LOOKS_AHEAD = 16  # tasks of one shape that are weighed against what runs
_LOOKS_WITHIN_LIMITS = 32  # cards tried for a slice whose share of them differs
_REFILL = 4  # a line is fed once a quarter of it is gone: fewer, fuller grants

DEFAULT = Policy()


def plan(
    state: State, now: Instant, policy: Policy = DEFAULT, orders: Mapping[str, Order] = ORDERS
) -> Plan:
    """What to lease now. `Invalid` when the policy names an order that is not in the table."""
    draft = _Draft(state, now, policy, order_named(policy.order, orders))
    try:
        draft.start_what_fits()
    finally:
        draft.engine.end_pass()
    draft.fill_lines()
    return draft.result()


def order_named(name: str, orders: Mapping[str, Order] = ORDERS) -> Order:
    order = orders.get(name)
    if order is None:
        raise Invalid(f"no order is called {name!r}; there are: {', '.join(sorted(orders))}")
    return order


def line_depth(state: State, shape: Shape, policy: Policy) -> int:
    """How many leases may stand in one line: 1 while run times are unknown."""
    seen = state.estimate(shape)
    if seen is None:
        return 1
    return max(1, min(policy.max_line, policy.line_target // seen))


class _Turn:
    """One shape in this pass: what waits still, and where it could go."""

    __slots__ = ("_ahead", "_entries", "entry", "is_over", "key", "left")

    def __init__(self, entry: ShapeState) -> None:
        self.entry = entry
        self.left = entry.queue.size
        self.is_over = False  # its user or team runs as many GPUs as it may
        self.key: Key = ()
        self._entries: Iterator[Entry] = entry.queue.entries()
        self._ahead = next(self._entries)

    @property
    def head(self) -> Entry:
        return self._ahead

    def take(self, count: int) -> list[Entry]:
        """The next `count`, which must be there."""
        taken = [self._ahead, *islice(self._entries, count - 1)]
        self.left -= count
        if self.left:
            self._ahead = next(self._entries)
        return taken


class _NewLine:
    """A line as this pass leaves it."""

    __slots__ = ("allocation", "before", "grants", "members", "node", "shape")

    def __init__(self, node: NodeId, allocation: Allocation, shape: Shape, before: int) -> None:
        self.node = node
        self.allocation = allocation
        self.shape = shape
        self.before = before
        self.members: tuple[Member, ...] = ()
        self.grants: list[Entry] = []


class _Draft:
    """The overlay a plan is made on: rooms copied when first taken from, everything else only read."""

    def __init__(self, state: State, now: Instant, policy: Policy, order: Order) -> None:
        self.state, self.now, self.policy, self.order = state, now, policy, order
        self.decisive = DECISIVE.get(policy.order, 0) if policy.preemption else 0
        self.engine = state.engine(policy.pricing)
        self.rooms: dict[NodeId, Room] = {}
        self.numbers: dict[NodeId, int] = {}  # the smallest that may be free
        self.running: dict[UserId, int] = {}
        self.gpus: dict[Holder, int] = {}
        self.saved: set[Holder] = set()  # whose limit is kept for a task that has waited long
        self.kept_clear: dict[NodeId, Reservation] = {}
        self.looks = _LOOKS_FOR_CLEARING
        self.waiting: list[_Turn] = []  # could not start (any more), first in the order first
        self.made: list[_NewLine] = []
        self.lines: dict[tuple[NodeId, int], _NewLine] = {}
        self.taken: dict[Holder, Amounts] = {}  # by tenants and users, in this pass
        self.future: dict[NodeId, Room] = {}  # where something stops or is promised
        self.clearing: dict[NodeId, Shape] = {}
        self.partly: gangs.Found = []  # nodes that have room for the gang just asked about
        self.stopped: set[Line] = set()
        self.wanted: set[TaskId] = set()
        self.helped: set[Holder] = set()  # tenants with a node kept clear though some of theirs run
        self.predictions: dict[int, tuple[Span | None]] = {}
        self.preemptions: list[Preempt] = []
        self.unwanted: list[Line] | None = None
        self._victims: list[list[Victim]] | None = None

    # ---- starts

    def start_what_fits(self) -> None:
        turns = []
        for entry in self.state.waiting():
            turn = _Turn(entry)
            turn.key = self.key(turn)
            turns.append((turn.key, turn.head, turn))
        heapify(turns)
        self.book_what_stops()
        while turns and len(self.made) < self.policy.max_places_per_pass:
            key, _, turn = turns[0]
            turn.key = self.key(turn)
            if turn.key > key:  # its user got something meanwhile
                heapreplace(turns, (turn.key, turn.head, turn))
                continue
            if not self.start_one(turn) and not self.clear_for(turn):
                self.waiting.append(turn)
                self.keep_clear(turn)
                heappop(turns)
            elif turn.left:
                turn.key = self.key(turn)
                heapreplace(turns, (turn.key, turn.head, turn))
            else:
                heappop(turns)
        while turns:
            self.waiting.append(heappop(turns)[2])

    def key(self, turn: _Turn, given_up: int = 0, without: Line | None = None) -> Key:
        """Where its next task stands; `without`: as if that line did not run."""
        shape = turn.entry.shape
        running = self.state.running.get(shape.user, 0) + self.running.get(shape.user, 0) - given_up
        return self.order(self.candidate(shape, turn.head, running, without), self.now, self.policy)

    def candidate(
        self, shape: Shape, entry: Entry, running: int = 0, without: Line | None = None
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
        )

    def predicted(self, shape: Shape) -> Span | None:
        """Asked of the house's orders only by the one that looks at it: it is not cheap."""
        if self.policy.order in ORDERS and self.policy.order != "shortest":
            return None
        known = self.predictions.get(id(shape))
        if known is None:
            known = self.predictions[id(shape)] = (self.state.predictions.of(shape),)
        return known[0]

    def shares(self, shape: Shape, without: Line | None = None) -> tuple[int, int]:
        """Of its tenant and its user, with what this pass gave them."""
        tenant: Holder = tenant_of(shape)
        user: Holder = ("user", shape.user)
        first = self.share(tenant, without)
        return first, first if tenant == user else self.share(user, without)

    def share(self, holder: Holder, without: Line | None) -> int:
        more = self.taken.get(holder)
        if without is not None and holder in (
            tenant_of(without.shape),
            ("user", without.shape.user),
        ):
            less = without.amounts
            base = more or (0, 0, 0)
            more = (base[0] - less[0], base[1] - less[1], base[2] - less[2])
        return self.state.shares.of(holder, self.policy.weights.get(holder, 1000), more)

    def key_beside(self, other: _Turn, user: UserId) -> Key:
        """The key of another shape if `user` gave up one allocation."""
        return self.key(other, given_up=1) if other.entry.shape.user == user else other.key

    def start_one(self, turn: _Turn) -> bool:
        shape = turn.entry.shape
        requests = shape.requirements.gpu
        self.partly = []
        for choice in range(len(requests) or 1):
            barred = self.barred(shape)
            if shape.requirements.nodes > 1:
                found_all = gangs.places(self.engine, shape, choice, barred)
                if len(found_all) < shape.requirements.nodes:
                    self.partly = max(self.partly, found_all, key=len)
                elif self.is_within_limits(turn, *(found for _, found in found_all)):
                    self.open_line(turn, *found_all)
                    return True
                continue
            looks = _LOOKS_WITHIN_LIMITS
            while (found := self.engine.best(shape, choice, barred)) is not None:
                if self.is_within_limits(turn, found[1]):
                    self.open_line(turn, found)
                    return True
                looks -= 1
                if requests[choice].vram_bytes is None or not looks:
                    break  # it takes the same of every GPU
                barred.add(found[0])
        return False

    def barred(self, shape: Shape) -> set[NodeId]:
        """What is being cleared, or kept clear, for others; what may be stopped again may use the latter meanwhile."""
        found = {id_ for id_, other in self.clearing.items() if other is not shape}
        if self.kept_clear and not (shape.preemptible and self.decisive):
            predicted = self.state.predictions.of(shape)
            for id_, kept in self.kept_clear.items():
                if not may_pass(shape, kept, self.now, predicted):
                    found.add(id_)
        return found

    def is_within_limits(self, turn: _Turn, *found: Fit) -> bool:
        """Whether its user and team may run so many GPUs more; else the turn is over its limit."""
        taken = sum(gpus_in(each.slices) for each in found)
        if not taken or not self.policy.limits.is_any:
            return True
        for holder in holders_of(turn.entry.shape):
            limit = self.policy.limits.of(holder)
            if limit is None:
                continue
            used = self.state.gpus.get(holder, 0) + self.gpus.get(holder, 0)
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

    def open_line(self, turn: _Turn, *found: tuple[NodeId, Fit]) -> None:
        shape = turn.entry.shape
        parts = [Member(node, self.take(shape, node, fits)) for node, fits in found]
        self.count(shape, [part.allocation for part in parts])
        line = _NewLine(parts[0].node, parts[0].allocation, shape, 0)
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
        if node in self.future:
            self.future[node].take(allocation, shape.user)
        before = self.engine.overlay.get(node, (room, len(taken)))[1]
        self.engine.overlay[node] = (room, before + 1)
        self.engine.touch(node)
        return allocation

    def count(self, shape: Shape, allocations: list[Allocation], sign: int = 1) -> None:
        """What its people hold with these."""
        self.running[shape.user] = self.running.get(shape.user, 0) + sign * len(allocations)
        gpus = sum(gpus_of(allocation) for allocation in allocations)
        if gpus:
            for holder in holders_of(shape):
                self.gpus[holder] = self.gpus.get(holder, 0) + sign * gpus
        for holder in {tenant_of(shape), ("user", shape.user)}:
            had = self.taken.get(holder, (0, 0, 0))
            for allocation in allocations:
                more = amounts_of(allocation)
                had = (had[0] + sign * more[0], had[1] + sign * more[1], had[2] + sign * more[2])
            self.taken[holder] = had

    # ---- making room

    def book_what_stops(self) -> None:
        """What was asked to stop will be free, and its people are counted without it."""
        for line in self.state.stoppable.values():
            if line.stopping:
                for part in (line, *line.members):
                    self.ahead(part.node).give(part.allocation)
                self.count(line.shape, [part.allocation for part in (line, *line.members)], -1)

    def ahead(self, node: NodeId) -> Room:
        """What will be free there once all that was asked to stop has stopped, less what is promised."""
        room = self.future.get(node)
        if room is None:
            room = self.future[node] = self.room(node).copy()
        return room

    def clear_for(self, turn: _Turn) -> bool:
        """Preempts what comes later for the next task of this turn, or waits for what stops already. It starts in a later pass."""
        if not self.decisive or not self.state.stoppable or turn.is_over:
            return False
        self.victims()
        if TaskId(turn.head[1]) not in self.wanted:
            return False
        shape = turn.entry.shape
        have = {node for node, _ in self.partly}
        need = shape.requirements.nodes - len(have)
        found = preemption.cheapest(shape, need, self.clearable(turn, have))
        if found is None or not self.is_within_limits(turn, *(each.fit for each in found)):
            return False
        task = TaskId(turn.head[1])
        for victim in {id(v.line): v for each in found for v in each.victims}.values():
            if victim.line in self.stopped:
                continue
            self.stopped.add(victim.line)
            for part in victim.parts:
                self.ahead(part.node).give(part.allocation)
            self.count(victim.line.shape, [part.allocation for part in victim.parts], -1)
            self.preemptions += [
                Preempt(id_, lease.epoch, victim.line.node, task)
                for id_, lease in victim.line.leases.items()
            ]
        promised = []
        for node, fits in (*self.partly, *((each.node, each.fit) for each in found)):
            allocation = fits.numbered(-1)
            self.ahead(node).take(allocation, shape.user)
            self.clearing[node] = shape
            promised.append(allocation)
        self.count(shape, promised)
        self._victims = None  # shares are not what they were
        turn.take(1)  # it stays queued; the next of its kind may want room as well
        return True

    def clearable(
        self, turn: _Turn, have: set[NodeId]
    ) -> Iterator[tuple[Node, Room, list[Victim]]]:
        """Nodes on which something would stop for it, or stops already."""
        at: dict[NodeId, list[Victim]] = {id_: [] for id_ in self.future}
        if len(self.preemptions) < self.policy.max_preemptions_per_pass:
            for alike in self.victims():
                mine = self.key(turn, without=alike[0].line)[: self.decisive]
                for victim in alike:
                    if victim.key[: self.decisive] <= mine:
                        break
                    if victim.line not in self.stopped:
                        for id_ in {part.node for part in victim.parts}:
                            at.setdefault(id_, []).append(victim)
        for id_, victims in at.items():
            node = self.node(id_)
            if node is not None and id_ not in have and unfit(node, turn.entry.shape) is None:
                yield node, self.future.get(id_) or self.room(id_), victims

    def victims(self) -> list[list[Victim]]:
        """What could be stopped: those of one user and size together, the last in the order first."""
        if self._victims is None:
            if self.unwanted is None:
                self.unwanted = self.find_unwanted()
            groups: dict[tuple[UserId, int | None, Amounts], list[Line]] = {}
            for line in self.unwanted:
                if line not in self.stopped:
                    which = (line.shape.user, line.shape.team, line.amounts)
                    groups.setdefault(which, []).append(line)
            self._victims = []
            for lines in groups.values():
                shares = self.shares(lines[0].shape, lines[0])
                found = [Victim(self.standing(line, shares), line) for line in lines]
                self._victims.append(sorted(found, reverse=True, key=_key))
        return self._victims

    def standing(self, line: Line, shares: tuple[int, int]) -> Key:
        """The key of a running task as if it waited."""
        task, lease = next(iter(line.leases.items()))
        user = line.shape.user
        running = self.state.running.get(user, 0) + self.running.get(user, 0) - 1
        attained = Span(lease.attained + max(0, self.now - line.since))
        served = self.state.served(user)
        candidate = Candidate(line.shape, lease.queued_at, task, running, served, attained, shares)
        return self.order(candidate, self.now, self.policy)

    def find_unwanted(self) -> list[Line]:
        """Those for whom nothing would be left if everybody were served in order; `wanted` are the waiting ones served then."""
        ranked: list[tuple[Key, int, Line | TaskId]] = []
        shares: dict[tuple[UserId, int | None], tuple[int, int]] = {}
        left = self.state.shares.free_gpus
        for line in self.state.stoppable.values():
            if line.stopping:
                left += line.amounts[0]
            elif line.leases and not self.is_protected(line):
                left += line.amounts[0]
                whose = (line.shape.user, line.shape.team)
                if whose not in shares:
                    shares[whose] = self.shares(line.shape)
                ranked.append((self.standing(line, shares[whose]), line.amounts[0], line))
        for entry in self.state.waiting():
            shape = entry.shape
            size = least_gpus(shape) * shape.requirements.nodes
            for waiting in islice(entry.queue.entries(), _LOOKS_AHEAD):
                key = self.order(self.candidate(shape, waiting), self.now, self.policy)
                ranked.append((key, size, TaskId(waiting[1])))
        ranked.sort(key=itemgetter(0))
        unwanted: list[Line] = []
        for _, size, who in ranked:
            if size <= left:
                left -= size
                if not isinstance(who, Line):
                    self.wanted.add(who)
            elif isinstance(who, Line):
                unwanted.append(who)
        return unwanted

    def is_protected(self, line: Line) -> bool:
        """Preempted before, and started again only lately."""
        lease = next(iter(line.leases.values()))
        return lease.attained > 0 and self.now - line.since < self.policy.protection

    def keep_clear(self, turn: _Turn) -> None:
        """For a task that has waited long: the node nearest to having room takes nothing from those behind it."""
        shape = turn.entry.shape
        if self.now - turn.head[0] < self.policy.patience:
            return
        if turn.entry.lines:  # what runs somewhere does not starve, but large pieces are a fair share too
            tenant = tenant_of(shape)
            if tenant in self.helped or len(self.helped) >= _HELPED:
                return
            self.helped.add(tenant)
        if turn.is_over:
            return  # room would not help it
        if not self.looks or len(self.kept_clear) >= MAX_KEPT_CLEAR:
            return
        self.looks -= 1
        nodes: list[NodeId] = []
        for _ in range(shape.requirements.nodes):
            nearest = self.engine.nearest(shape, {*self.kept_clear, *nodes})
            if nearest is None:
                return  # a part of the nodes is of no use
            nodes.append(nearest)
        at = max(self.ready_at(id_, shape) for id_ in nodes)
        for id_ in nodes:
            self.kept_clear[id_] = Reservation(shape, at)

    def ready_at(self, id_: NodeId, shape: Shape) -> Instant:
        entry = self.state.nodes[id_]
        if entry.node is None:
            return self.now
        lines = entry.lines.values()
        predicted = self.state.predictions.of
        return ready_at(entry.node, self.room(id_), lines, shape, self.now, predicted)

    # ---- lines

    def fill_lines(self) -> None:
        """Shapes without a line cost nothing here, and those with one no more than a budget: whoever has many shapes
        waiting must not hold up the rest."""
        started: dict[int, list[_NewLine]] = {}
        for line in self.made:
            started.setdefault(id(line.shape), []).append(line)
        looks = _LOOKS_FOR_FEEDING
        for rank, turn in enumerate(self.waiting):
            made = started.get(id(turn.entry.shape), [])
            if not (made or turn.entry.lines) or turn.entry.shape.requirements.nodes > 1:
                continue
            depth = line_depth(self.state, turn.entry.shape, self.policy)
            if depth > 1 and len(self.made) < self.policy.max_places_per_pass:
                nodes = {line.node for line in made} | {node for node, _ in turn.entry.lines}
                if rank * (1 + len(nodes)) > looks:
                    continue
                looks -= rank * (1 + len(nodes))
                lines = self.lines_to_feed(turn, made, self.waiting[:rank], depth)
                if lines:
                    self.spread(turn, lines, depth)

    def lines_to_feed(
        self, turn: _Turn, made: list[_NewLine], before: list[_Turn], depth: int
    ) -> list[_NewLine]:
        shape = turn.entry.shape
        by_node: dict[NodeId, list[_NewLine]] = {}
        for (id_, _), line in turn.entry.lines.items():
            by_node.setdefault(id_, []).append(_NewLine(id_, line.allocation, shape, line.count))
        for line_made in made:
            by_node.setdefault(line_made.node, []).append(line_made)
        if before:
            without = self.key(turn, given_up=1)
            mine = set(holders_of(shape))
            before = [
                other
                for other in before
                if (not other.is_over or mine.intersection(holders_of(other.entry.shape)))
                and self.key_beside(other, shape.user) < without
            ]
        found: list[_NewLine] = []
        for id_, lines in by_node.items():
            node = self.node(id_)
            kept = self.kept_clear.get(id_)
            if node is None or (kept is not None and kept.shape is not shape):
                continue
            if unfit(node, shape) is not None or self.is_wanted(node, lines, before):
                continue
            found += [line for line in lines if self.wants_more(node, line, depth)]
        room = self.policy.max_places_per_pass - len(self.made)
        found.sort(
            key=lambda line: (line.before + len(line.grants), line.node, line.allocation.number)
        )
        return found[:room]

    def is_wanted(self, node: Node, lines: list[_NewLine], before: list[_Turn]) -> bool:
        """Could somebody who comes first start here if these lines were given up?"""
        room: Room | None = None
        for other in before:
            shape = other.entry.shape
            if unfit(node, shape) is not None:
                continue
            if room is None:
                room = self.room(node.id).copy()
                for line in lines:
                    room.give(line.allocation)
            if fit(node, room, shape) is not None:
                return True
        return False

    @staticmethod
    def wants_more(node: Node, line: _NewLine, depth: int) -> bool:
        if any(part.gpu_index in node.gpus_withheld for part in line.allocation.slices):
            return False
        return (depth - line.before - len(line.grants)) * _REFILL >= depth

    def spread(self, turn: _Turn, lines: list[_NewLine], depth: int) -> None:
        """Gives the oldest tasks to the shortest lines, interleaved, all lines about equally long in the end."""
        counts = [line.before + len(line.grants) for line in lines]  # ascending
        level = _water_level(counts, turn.left, depth)
        needs = [max(0, level - count) for count in counts]
        for place in range(
            min(turn.left - sum(needs), len(lines))
        ):  # one more each, as far as it goes
            if counts[place] <= level < depth:
                needs[place] += 1
        entries = turn.take(sum(needs)) if sum(needs) else []
        position = given = 0
        while position < len(entries):
            open_lines = [line for line, need in zip(lines, needs, strict=True) if need > given]
            step = min(need for need in needs if need > given) - given
            block = entries[position : position + step * len(open_lines)]
            for place, line in enumerate(open_lines):
                line.grants += block[place :: len(open_lines)]
            position += len(block)
            given += step
        for line in lines:
            key = (line.node, line.allocation.number)
            if line.grants and key not in self.lines:
                self.lines[key] = line
                self.made.append(line)

    def result(self) -> Plan:
        places = []
        for line in self.made:
            if line.shape.preemptible:
                grants = tuple([self.grant_known(entry) for entry in line.grants])
            else:
                grants = tuple([Grant(TaskId(e[1]), epoch_of(e) + 1) for e in line.grants])
            places.append(Place(line.node, line.allocation, line.shape, grants, line.members))
        return Plan(tuple(places), tuple(self.preemptions))

    def grant_known(self, entry: Entry) -> Grant:
        """With what is needed to compare it with others while it runs."""
        task = TaskId(entry[1])
        attained = self.state.attained(task, self.now)
        return Grant(task, epoch_of(entry) + 1, Instant(entry[0]), attained)


def _key(victim: Victim) -> Key:
    return victim.key


def _water_level(counts: list[int], tasks: int, depth: int) -> int:
    """The highest level, at most `depth`, to which all shorter lines can be filled with this many tasks."""
    filled = 0
    for place, count in enumerate(counts):
        above = min(counts[place + 1], depth) if place + 1 < len(counts) else depth
        needed = (above - count) * (place + 1)
        if filled + needed > tasks:
            return count + (tasks - filled) // (place + 1)
        filled += needed
    return depth

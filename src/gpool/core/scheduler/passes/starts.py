"""The first half of a pass: starts, in the policy's order, and room made for what comes first and finds none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import chain

import numpy as np

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import Instant, Node, Shape, Span
from gpool.core.scheduler.order.fair_share import Amounts, asked_by, compared, plus, tenant_of
from gpool.core.scheduler.order.limits import WITHIN, Holder, holders_of
from gpool.core.scheduler.order.orders import Candidate, Key, Order, Policy, Standing, outranks
from gpool.core.scheduler.passes import preemption
from gpool.core.scheduler.passes.draft import Alike, Draft, Turn
from gpool.core.scheduler.passes.preemption import Victim, Victims
from gpool.core.scheduler.place import gangs, input_affinity
from gpool.core.scheduler.place.fit import fit, unfit
from gpool.core.scheduler.place.preemptible_capacity import Reach
from gpool.core.scheduler.place.remnants import GPU
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.events import Preempt
from gpool.core.scheduler.state.state import Line, ShapeState, State

_LOOKS_WITHIN_LIMITS = 32  # cards tried for a slice whose share of them differs
MAX_IN_VIEW = 1500
"""Shapes that one pass looks at; where more wait, in turn (`turns`)."""

MAX_STARTS = 400
"""Of one pass: the next one goes on."""

_FRESH = 500_000  # nodes scored in a pass for shapes that were never asked for; then they wait for the next

# Looking for what to stop costs as much as what runs, and whoever has many kinds of tasks waiting must not hold up the rest: of
# one user so many shapes a pass for which nothing can be stopped, and of all together so much work, in about microseconds.
# Beyond that a few users have their turn in each pass, whatever was spent.
_VAIN_OF_ONE = 64
_WORK, _OF_A_NODE, _OF_A_VICTIM = 10_000, 15, 3
SEARCHES_IN_TURN = 2
MAX_NODES_SEARCHED = 128
"""For one task, of those where something might stop for it."""


class Starts(Draft):
    """See the module."""

    def __init__(self, state: State, now: Instant, policy: Policy, order: Order) -> None:
        super().__init__(state, now, policy, order)
        self.preemptions: list[Preempt] = []
        self.stopped: set[Line] = set()
        # By user: shapes for which nothing can be stopped, as things stand, and how many were looked at for nothing.
        self.hopeless: dict[UserId, list[Shape]] = {}
        self.in_vain: dict[UserId, int] = {}
        self.work = _WORK  # that may still be done to find what to stop
        self._due: dict[UserId, ShapeState] | None = None
        self.is_partial = False
        self._reach: Reach | None = None
        self._alike: dict[Alike, list[Line]] | None = None  # what may be stopped
        self._victims: dict[Alike, list[Victim]] = {}
        self._found: Victims | None = None  # those

    def start_what_fits(self) -> None:
        turns = []
        in_view = self.state.in_view(MAX_IN_VIEW, SEARCHES_IN_TURN)
        for entry in in_view:
            turn = Turn(entry)
            turn.key = self.key(turn)
            turns.append((turn.key, turn.head, turn))
        self.compare(turn for _, _, turn in turns)
        self.book_what_stops()
        fresh, most = self.engine.fresh, min(self.policy.max_places_per_pass, MAX_STARTS)
        if self.state.promises and self.looks_at_shares and turns:
            self.keep_promises([turn for _, _, turn in turns], most)
            turns = [(key, turn.head, turn) for key, _, turn in turns if turn.left]
        heapify(turns)
        self.is_partial = len(in_view) < self.state.shapes_waiting
        while turns and len(self.made) < most:
            key, _, turn = turns[0]
            if self.has_changed(turn):
                turn.key, turn.seen = self.key(turn), self.changes
                if turn.key > key:  # its user got something meanwhile
                    heapreplace(turns, (turn.key, turn.head, turn))
                    continue
            if self.engine.fresh - fresh > _FRESH and self.may_wait(turn):
                self.is_partial = True
                self.waiting.append(turn)
                heappop(turns)
                continue
            if not self.start_one(turn) and not self.clear_for(turn):
                self.waiting.append(turn)
                self.keep_clear(turn)
                heappop(turns)
            elif turn.left:
                turn.key, turn.seen = self.key(turn), self.changes
                heapreplace(turns, (turn.key, turn.head, turn))
            else:
                heappop(turns)
        self.is_partial |= bool(turns)
        while turns:
            self.waiting.append(heappop(turns)[2])

    def may_wait(self, turn: Turn) -> bool:
        """Whether it takes long to look for a place for it, and it is not its turn."""
        entry = turn.entry
        return entry is not self.due().get(entry.shape.user) and self.engine.is_new(entry.shape)

    def due(self) -> dict[UserId, ShapeState]:
        """Whose turn it is to be looked for, and for which of their shapes."""
        if self._due is None:
            self._due = self.state.due(SEARCHES_IN_TURN)
        return self._due

    def start_one(self, turn: Turn) -> bool:
        shape = turn.entry.shape
        requests = shape.requirements.gpu
        for choice in range(len(requests) or 1):
            if self.engine.is_full(shape, choice):
                continue
            barred = self.barred(shape)
            if shape.requirements.nodes > 1:
                members = gangs.places(self.engine, shape, choice, barred)
                if members and self.is_within_limits(turn, *(found for _, found in members)):
                    self.open_line(turn, *members)
                    return True
                continue
            looks = _LOOKS_WITHIN_LIMITS
            while (found := self.engine.best(shape, choice, barred)) is not None:
                if self.is_within_limits(turn, found[1]):
                    if shape.data and self.waits_for_inputs(turn, found[0]):
                        turn.is_over = True  # more room would not help it
                        return False
                    self.open_line(turn, found)
                    return True
                looks -= 1
                if requests[choice].vram_bytes is None or not looks:
                    break  # it takes the same of every GPU
                barred.add(found[0])
        return False

    def waits_for_inputs(self, turn: Turn, node: NodeId) -> bool:
        """Rather than start on a node without them: only if all that wait for the same will soon have a place with them."""
        shape, now, policy = turn.entry.shape, self.now, self.policy
        if node in self.state.caches.with_data(shape.data):
            return False
        if not input_affinity.may_wait(shape, Instant(turn.head[0]), now, policy.patience):
            return False
        waiting = self.awaited.get(shape.data, 0) + turn.left
        if input_affinity.ready_soon(self.state, shape, now, self.room) < waiting:
            return False
        self.awaited[shape.data] = waiting
        return True

    def book_what_stops(self) -> None:
        """What was asked to stop will be free, and its people are counted without it."""
        for line in self.state.stoppable.values():
            if line.stopping:
                for part in (line, *line.members):
                    self.ahead(part.node).give(part.allocation)
                self.count(line.shape, [part.allocation for part in (line, *line.members)], -1)

    def keep_promises(self, turns: Sequence[Turn], most: int) -> None:
        """They start where others were stopped for them; until all has stopped there nobody else does (see `promises`).

        What a guarantee covers goes first all the same, and gangs are looked for anew. Elsewhere they start when it is their turn.
        """
        first = min(turn.key[0] for turn in turns)
        known = {id(turn.entry): turn for turn in turns if turn.key[0] == first}
        for task, id_ in self.state.promises.items():
            entry, node = self.state.queue_of(task), self.node(id_)
            turn = None if entry is None else known.get(id(entry))
            if node is None or turn is None or not turn.left or len(self.made) >= most:
                continue
            shape = turn.entry.shape
            if shape.requirements.nodes > 1 or unfit(node, shape) or id_ in self.avoided(shape):
                continue
            found = fit(node, self.room(id_), shape)
            later = fit(node, self.ahead(id_), shape) if found is None else None
            if found is not None and self.is_within_limits(turn, found):
                self.open_line(turn, (id_, found))
            elif later is not None and self.is_within_limits(turn, later):
                self.pledged.setdefault(id_, []).append(shape)

    def ahead(self, node: NodeId) -> Room:
        """What will be free there once all that was asked to stop has stopped, less what is promised."""
        room = self.future.get(node)
        if room is None:
            room = self.future[node] = self.room(node).copy()
        return room

    def clear_for(self, turn: Turn) -> bool:
        """Preempts what comes later for the next task of this turn, or waits for what stops already. It starts in a later pass."""
        if not self.may_preempt or not self.state.stoppable or turn.is_over:
            return False
        shape = turn.entry.shape
        vain = self.in_vain.get(shape.user, 0)
        if not self.may_search(turn, vain):
            return False
        tried = self.hopeless.setdefault(shape.user, [])
        if any(preemption.asks_no_less(shape, other) for other in tried):
            return False
        if not self.reach().nodes(shape).any():
            return False
        self.in_vain[shape.user] = vain + 1
        choose = gangs.cheapest if shape.requirements.nodes > 1 else preemption.cheapest
        found = choose(shape, shape.requirements.nodes, self.clearable(turn))
        sure = self.policy.limits.guaranteed
        if found is not None and sure and not self.spares(shape, found):
            found = choose(shape, shape.requirements.nodes, self.clearable(turn, dict(sure)))
        is_told = not self.kept_clear or (shape.preemptible and self.decisive)
        if found is None and is_told and not shape.avoids:
            tried.append(shape)  # nor will those of its user that come later and need more
        if found is None or not self.is_within_limits(turn, *(each.fit for each in found)):
            return False
        self.in_vain[shape.user] = vain
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
        for each in found:
            allocation = each.fit.numbered(-1)
            self.ahead(each.node).take(allocation, shape.user)
            self.reach().take(each.node, allocation)
            self.clearing[each.node] = shape
            promised.append(allocation)
        self.count(shape, promised)
        self.forget_standings({shape, *(v.line.shape for each in found for v in each.victims)})
        turn.take(1)  # it stays queued; the next of its kind may want room as well
        return True

    def spares(self, shape: Shape, found: list[preemption.Clearing]) -> bool:
        """Whether all others keep what they are guaranteed, as far as they use it."""
        mine, lost = set(holders_of(shape)), dict[Holder, int]()
        for line in {victim.line for each in found for victim in each.victims} - self.stopped:
            for holder in holders_of(line.shape):
                lost[holder] = lost.get(holder, 0) + line.amounts[0]
        sure = self.policy.limits.guaranteed
        return all(
            holder in mine or not gpus or self.gpus_held(holder) - gpus >= sure.get(holder, 0)
            for holder, gpus in lost.items()
        )

    def may_search(self, turn: Turn, vain: int) -> bool:
        """Whether to look for what to stop for it: while there is time, and for those whose turn it is."""
        if self.work > 0 and vain < _VAIN_OF_ONE:
            return True
        due = self.due().get(turn.entry.shape.user)
        return due is not None and (not vain or due is turn.entry)

    def reach(self) -> Reach:
        if self._reach is None:
            stopping = [line for line in self.state.stoppable.values() if line.stopping]
            self._reach = Reach(self.engine, chain(stopping, *self.in_sight().values()))
        return self._reach

    def clearable(
        self, turn: Turn, sure: dict[Holder, int] | None = None
    ) -> Iterator[tuple[Node, Room, list[Victim]]]:
        """Nodes on which something would stop for it, or stops already; for a gang those that have room as well.

        `sure`: what others have to keep.
        """
        shape, slots = turn.entry.shape, self.engine.board.slots
        there = self.reach().nodes(shape)
        at: dict[NodeId, list[Victim]] = {
            id_: [] for id_ in self.future if id_ in slots and there[slots[id_]]
        }
        if shape.requirements.nodes > 1:
            free, board = self.engine.could_run(shape, ()), self.engine.board
            at |= {NodeId(int(id_)): [] for id_ in board.ids[free[0][free[1]]]}
        if len(self.preemptions) < self.policy.max_preemptions_per_pass:
            for victim in self.outranked(turn):
                self.work -= _OF_A_VICTIM
                line = victim.line
                if line in self.stopped or (sure and not self.is_spare(victim, turn, sure)):
                    continue
                for id_ in {part.node for part in victim.parts} if line.members else (line.node,):
                    if id_ in slots and there[slots[id_]]:
                        at.setdefault(id_, []).append(victim)
        barred = (self.barred(shape) - self.clearing.keys()) | self.pledged_to_others(shape)
        for id_ in barred | self.avoided(shape):
            at.pop(id_, None)
        for id_ in self.nearest_of(shape, at):
            self.work -= _OF_A_NODE
            node = self.node(id_)
            if node is not None:
                yield node, self.future.get(id_) or self.room(id_), at[id_]

    def nearest_of(self, shape: Shape, at: dict[NodeId, list[Victim]]) -> Iterable[NodeId]:
        """Not all of very many: half of them those with most idle GPUs, and others in turn. Of a gang's all."""
        if len(at) <= MAX_NODES_SEARCHED or shape.requirements.nodes > 1:
            return list(at)
        board = self.engine.board
        ids = np.fromiter(at, np.int64, len(at))
        idle = (board.free[[board.slots[id_] for id_ in at]] == GPU).sum(1)
        order = ids[np.lexsort((ids, -idle))]
        half = MAX_NODES_SEARCHED // 2
        rest = np.sort(order[half:])
        first = self.state.passes * half % len(rest)
        chosen = [*order[:half].tolist(), *np.roll(rest, -first)[:half].tolist()]
        return [NodeId(id_) for id_ in chosen]

    def outranked(self, turn: Turn) -> Iterator[Victim]:
        """What may be stopped for it. Of strangers' only those are looked at that may come after it by their shares."""
        shape = turn.entry.shape
        mine, gained = self.key(turn), self.shares(shape, None, asked_by(shape))
        had, holds = self.had(shape), self.holds(shape)
        then = self.holds(shape, asked_by(shape))
        for alike in self.victims().worth_a_look(shape, mine, had[0], holds[0], self.policy):
            self.work -= 1
            line, other = alike[0].line, alike[0].line.shape
            theirs, left = self.holds(other), self.holds(other, line.amounts, -1)
            evens = (
                holds[0] < theirs[0] and then[0] <= left[0],
                holds[1] < theirs[1] and then[1] <= left[1],
            )
            both = Standing(
                mine, gained, alike[0].key, Span(0), had, self.had(other), holds, theirs, evens
            )
            if shape.user == other.user or (shape.team is not None and shape.team == other.team):
                own = self.shares(shape, line, asked_by(shape))
                both = both._replace(key=self.key(turn, without=line), gained=own)
            if shape.user == other.user:
                alike = self.not_left_alone(alike)
            found = self.outranked_of(alike, both)
            is_for_share = shape.user != other.user and mine[0] == both.other[0]
            yield from self.not_in_vain(found) if is_for_share else found

    def had(self, shape: Shape) -> tuple[int, int]:
        """What its tenant and its user had lately."""
        if not self.looks_at_shares:
            return 0, 0
        own = self.lately(("user", shape.user))
        if shape.team is None:
            return own, own
        return compared(shape, self.lately(tenant_of(shape)), own, self.policy.weights)

    def holds(self, shape: Shape, more: Amounts = (0, 0, 0), sign: int = 1) -> tuple[int, int]:
        """What they hold now, with what this pass gave them; `more`: with that besides, or without it."""
        if not self.looks_at_shares:
            return 0, 0
        own = self.holds_now(("user", shape.user), more, sign)
        if shape.team is None:
            return own, own
        tenant = self.holds_now(tenant_of(shape), more, sign)
        return compared(shape, tenant, own, self.policy.weights)

    def holds_now(self, holder: Holder, more: Amounts, sign: int) -> int:
        taken = plus(self.taken.get(holder, (0, 0, 0)), more, sign)
        return self.state.shares.now(holder, self.policy.weights.get(holder, 1000), taken)

    def not_left_alone(self, alike: list[Victim]) -> list[Victim]:
        """Of a user's own."""
        since = self.now - preemption.left_alone_for(self.policy, is_own=True)
        return [
            victim
            for victim in alike
            if victim.line.since <= since or not preemption.began_before(victim.line)
        ]

    def not_in_vain(self, found: Iterator[Victim]) -> Iterator[Victim]:
        """Of strangers': what keeps nothing and begins anew goes on for as long as it ran for nothing before. Stopped after each
        turn, it would never end."""
        for victim in found:
            line, lease = victim.line, next(iter(victim.line.leases.values()))
            keeps = line.shape.checkpoint_every is not None or self.policy.order != "fair_share"
            if keeps or self.now - line.since >= lease.attained:
                yield victim

    def outranked_of(self, alike: list[Victim], both: Standing) -> Iterator[Victim]:
        """Of some of one user and size those that may be stopped; `both`: with one that has not run yet."""
        mine, theirs = both.key, both.other
        decides = 3 if self.policy.order == "fair_share" else 1  # and is the same for all of them
        if mine[:decides] != theirs[:decides] and outranks(both, self.policy):
            yield from alike
            return
        for victim in alike:
            ran = Span(self.now - victim.line.since)
            if outranks(both._replace(other=victim.key, ran=ran), self.policy):
                yield victim
            elif mine[:3] == victim.key[:3] or ran >= self.policy.turn:
                return  # nor may those that come before it

    def is_spare(self, victim: Victim, turn: Turn, sure: dict[Holder, int]) -> bool:
        """Whether its people have what they are guaranteed without it, and without those that this was said of before."""
        gpus, mine = victim.amounts[0], set(holders_of(turn.entry.shape))
        theirs = [
            each for each in holders_of(victim.line.shape) if each in sure and each not in mine
        ]
        if any(self.gpus_held(holder) - gpus < sure[holder] for holder in theirs):
            return False
        for holder in theirs:
            sure[holder] += gpus
        return True

    def victims(self) -> Victims:
        """What could be stopped."""
        if self._found is None:
            for which, lines in self.in_sight().items():
                if which not in self._victims:
                    self._victims[which] = self.standings(lines)
            groups = [found for found in self._victims.values() if found]
            shapes = [group[0].line.shape for group in groups]
            had, held = [[of(each)[0] for each in shapes] for of in (self.had, self.holds)]
            self._found = Victims(groups, had, held)
        return self._found

    def in_sight(self) -> dict[Alike, list[Line]]:
        """What is not left alone, by user and size."""
        if self._alike is None:
            self._alike = {}
            safe_since = self.now - preemption.left_alone_for(self.policy, is_own=False)
            for line in preemption.in_sight(self.state, self.now):
                if line.since <= safe_since or not preemption.began_before(line):
                    which = (line.shape.user, line.shape.team, line.amounts)
                    self._alike.setdefault(which, []).append(line)
        return self._alike

    def forget_standings(self, shapes: set[Shape]) -> None:
        """The shares of their people are not what they were."""
        self.hopeless, self._found = {}, None
        users, teams = {shape.user for shape in shapes}, {shape.team for shape in shapes}
        for which in list(self._victims):
            if which[0] in users or (which[1] is not None and which[1] in teams):
                del self._victims[which]

    def standings(self, lines: list[Line]) -> list[Victim]:
        """Running tasks of one user and size, each with its key as if it waited."""
        lines = [line for line in lines if line not in self.stopped]
        if not lines:
            return []
        shape, now, policy = lines[0].shape, self.now, self.policy
        running = self.state.running.get(shape.user, 0) + self.running.get(shape.user, 0)
        served, shares = self.state.served(shape.user), self.shares(shape, lines[0])
        sure = policy.limits.guaranteed
        band = self.band(shape, lines[0], lines[0].amounts[0]) if sure else WITHIN
        found = []
        for line in lines:
            task, lease = next(iter(line.leases.items()))
            ran = Span(lease.attained + max(0, now - line.since))
            others = running - 1 - len(line.members)
            candidate = Candidate(
                line.shape, lease.queued_at, task, others, served, ran, shares, None, band
            )
            found.append(Victim(self.order(candidate, now, policy), line))
        found.sort(reverse=True, key=_key)
        return found


def _key(victim: Victim) -> Key:
    return victim.key

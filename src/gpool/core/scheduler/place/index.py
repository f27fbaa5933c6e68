"""Placement index: the best place for a shape among all nodes; scores only nodes changed since the last query.

For each alternative of a shape a row (`rows`) holds one score per node; the largest wins. Scores compare by:

1. the price step (`pricing`): GPU that the usual tasks could use, lost by this placement;
2. seconds that a start there loses (`rows`, start cost);
3. the price an hour, the cheaper first;
4. for tasks with GPUs: proven and healthy GPUs, then faster ones, in coarse steps;
5. tasks without GPU go to nodes without; then the least free GPU, the smallest cards, the least free CPU and memory:
   full nodes fill up, empty ones stay whole;
6. the node's id. Names never matter.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from gpool.core.ids import NodeId
from gpool.core.model import Node, Shape
from gpool.core.money.prices import is_priced
from gpool.core.scheduler.place.board import CPU, DISK, MEMORY, WHOLE, Board, RoomAndCount
from gpool.core.scheduler.place.fit import (
    Fit,
    a_slice,
    accepts_owner,
    is_slice,
    placed,
    slice_of,
    whole,
    with_share,
)
from gpool.core.scheduler.place.kinds import OwnerSlots, is_for_some
from gpool.core.scheduler.place.pricing import GPU, USUAL, Bools, Floats, Ints, Pricing, Slots
from gpool.core.scheduler.place.rows import PlacementRow, RowCache
from gpool.core.scheduler.place.scoring import NO_ROOM, PRICE, Scorer
from gpool.core.scheduler.state.capacity import ANYBODY, Room
from gpool.core.scheduler.state.state import State

_MANY = 256  # nodes to score, of which some are likely alike
_COST_OF_A_ROW = 2000  # in nodes scored


class Candidates(NamedTuple):
    """Slots with room, best first."""

    slots: Slots
    steps: Ints
    rest: Ints


class FreeAmounts(NamedTuple):
    """Mutable, by slot."""

    cpu: Floats
    memory: Floats
    disk: Floats
    gpus: Floats


class PlacementIndex:
    """Cache beside a state, owned by the caller of `plan`. It follows the state's log of changed nodes; a pass writes only to
    an overlay.
    """

    def __init__(self) -> None:
        self.pricing = USUAL
        self._follow_anew(State())

    def _follow_anew(self, state: State) -> None:
        self._state = state
        self.board = Board(self.pricing, self._room_and_count)
        self._owners = OwnerSlots()
        self._rows = RowCache(state, self.board)
        self._scorer = Scorer(self.board, self.pricing.weights, state.caches)
        self._overlay: dict[NodeId, RoomAndCount] = {}
        self._read = state.changes.last
        self.scored_for_new = 0  # nodes scored for new rows, plus a constant for each such row
        nodes = [entry.node for entry in state.nodes.values() if entry.node is not None]
        self.board.expect(len(nodes), max((len(node.offer.gpus) for node in nodes), default=0))
        for node in nodes:
            self._put(node)

    @property
    def scored(self) -> int:
        return self._scorer.scored

    def end_pass(self) -> None:
        for id_ in self._overlay:
            self.board.touch(id_)
        self._overlay = {}
        self._rows.end_pass()

    def follow(self, state: State, pricing: Pricing) -> None:
        """Read changes; everything if the state or the pricing was replaced."""
        is_same = self.pricing is pricing or self.pricing == pricing
        changes = state.changes
        if self._state is not state or not is_same or not changes.is_complete_since(self._read):
            self.pricing = pricing
            self._follow_anew(state)
            return
        if self._read == changes.last:
            return
        for id_ in changes.rooms_since(self._read):
            entry = state.nodes.get(id_)
            if entry is None or entry.node is None:
                self._remove(id_)
            elif self.board.node(id_) is not entry.node:
                self._put(entry.node)
            else:
                self.board.touch(id_)
        for id_ in changes.inputs_since(self._read):
            self.board.touch(id_, anew=True)
        self._read = changes.last

    def _put(self, node: Node) -> None:
        if is_for_some(node):
            self._rows.restrict()
        if is_priced(node.offer):
            self._rows.favour(node)
        self.board.put(node)
        self._owners.put(self.board.slots[node.id], node)

    def _remove(self, id_: NodeId) -> None:
        slot = self.board.slots.get(id_)
        if slot is not None:
            self._owners.remove(slot)
            self.board.remove(id_)

    def propose(self, id_: NodeId, room: Room) -> None:
        """Use this room, with one more allocation, until the pass ends."""
        _, count = self._room_and_count(id_)
        self._overlay[id_] = (room, count + 1)
        self.board.touch(id_)

    def _room_and_count(self, id_: NodeId) -> RoomAndCount:
        overlaid = self._overlay.get(id_)
        if overlaid is not None:
            return overlaid
        entry = self._state.nodes[id_]
        return entry.room, len(entry.lines)

    def best(
        self, shape: Shape, turn: int, barred: Collection[NodeId]
    ) -> tuple[NodeId, Fit] | None:
        board = self.board
        board.refresh()
        if self._fits_nowhere(shape, turn):
            return None
        row = self._rows.of(shape)[turn]
        if row.generation != board.generation and not self._might_fit(row):
            row.full_at = (board.generation, board.now)
            return None
        self._update(row)
        key = row.key
        first = int(key.argmax())
        if key[first] == NO_ROOM:
            row.full_at = (board.generation, board.now)
            return None
        if barred:
            key = key.copy()
            key[[board.slots[id_] for id_ in barred if id_ in board.slots]] = NO_ROOM
            first = int(key.argmax())
        while (slot := self._best(row, key, first)) is not None:
            found = self._fit(row, slot)
            if found is not None:
                return NodeId(int(board.columns.ids[slot])), found
            row.key[slot] = key[slot] = NO_ROOM  # until the node changes
            first = int(key.argmax())
        return None

    def is_new(self, shape: Shape) -> bool:
        rows = self._rows.of(shape)
        return any(row.generation != self.board.generation and self._might_fit(row) for row in rows)

    def is_full(self, shape: Shape, turn: int) -> bool:
        """Whether no place was found and no node has changed since."""
        board = self.board
        board.refresh()
        return self._rows.of(shape)[turn].full_at == (board.generation, board.now)

    def candidates(self, shape: Shape, turn: int, barred: Collection[NodeId]) -> Candidates:
        board = self.board
        board.refresh()
        row = self._rows.of(shape)[turn]
        if row.generation != board.generation and not self._might_fit(row):
            row.full_at = (board.generation, board.now)
            return Candidates(np.empty(0, np.intp), np.empty(0, np.int64), np.empty(0, np.int64))
        self._update(row)
        slots = np.flatnonzero(row.key != NO_ROOM)
        if not len(slots):
            row.full_at = (board.generation, board.now)
        if barred:
            out = np.array([board.slots[id_] for id_ in barred if id_ in board.slots], np.intp)
            slots = slots[~np.isin(slots, out)]
        lesser = (
            board.columns.ids[slots],
            board.columns.tight[slots],
            row.facts.taken[board.columns.kind[slots]],
        )
        slots = slots[np.lexsort((*lesser, -row.key[slots]))]
        steps = row.key[slots] >> PRICE
        return Candidates(slots, steps, row.key[slots] - (steps << PRICE))

    def fit_at(self, shape: Shape, turn: int, slot: int) -> tuple[NodeId, Fit] | None:
        found = self._fit(self._rows.of(shape)[turn], slot)
        return None if found is None else (NodeId(int(self.board.columns.ids[slot])), found)

    def could_run(self, shape: Shape, barred: Collection[NodeId]) -> tuple[Slots, Bools]:
        """Nodes that could run the shape when idle, and whether each has room now."""
        board = self.board
        board.refresh()
        able, has_room = np.zeros(board.columns.size, bool), np.zeros(board.columns.size, bool)
        for row in self._rows.of(shape):
            self._update(row)
            row.facts.learn(board)
            able |= row.facts.able[board.columns.kind]
            has_room |= row.key != NO_ROOM
        self._keep_accepted(shape, able)
        for id_ in barred:
            if id_ in board.slots:
                able[board.slots[id_]] = False
        slots = np.flatnonzero(able)
        return slots, has_room[slots]

    def free(self) -> FreeAmounts:
        board = self.board
        board.refresh()
        idle = board.columns.amounts[WHOLE].copy()
        amounts = board.columns.amounts
        return FreeAmounts(amounts[CPU].copy(), amounts[MEMORY].copy(), amounts[DISK].copy(), idle)

    def would_fit(self, shape: Shape, free: FreeAmounts) -> Bools:
        """A slice counts as fitting on any free GPU."""
        board, found = self.board, np.zeros(self.board.columns.size, bool)
        needs = shape.requirements
        for row in self._rows.of(shape):
            row.facts.learn(board)
            able = row.facts.able[board.columns.kind]
            able &= free.cpu >= needs.cpu_milli
            able &= free.memory >= row.facts.memory[board.columns.kind]
            if needs.disk_bytes:
                able &= free.disk >= needs.disk_bytes
            if row.request is not None:
                if is_slice(row.request):
                    able &= (free.gpus > 0) | (board.columns.free > 0).any(1)
                else:
                    able &= free.gpus >= row.request.count
            found |= able
        self._keep_accepted(shape, found)
        return found

    def _keep_accepted(self, shape: Shape, slots: Bools) -> None:
        """Clear the slots of owners that the shape does not accept: nodes of one kind have several."""
        on = shape.requirements.on
        if on is not None:
            slots &= self._owners.mask(on, len(slots))

    def nearest(self, shape: Shape, barred: Collection[NodeId]) -> NodeId | None:
        board, (slots, _) = self.board, self.could_run(shape, barred)
        if not len(slots):
            return None
        lines = board.columns.lines[slots]
        return NodeId(int(board.columns.ids[slots[lines == lines.min()]].min()))

    def _fits_nowhere(self, shape: Shape, turn: int) -> bool:
        """Spares computing the start cost."""
        rows = self._rows.of_earlier_pass(shape)
        if rows is None or rows[turn].generation != self.board.generation:
            return False
        self._update(rows[turn])
        return bool((rows[turn].key == NO_ROOM).all())

    def _update(self, row: PlacementRow) -> None:
        board, on = self.board, row.shape.requirements.on
        changed: set[int] | Slots
        if row.generation == board.generation and row.read == board.now:
            return
        if row.generation != board.generation:
            row.generation = board.generation
            row.key = np.full(board.columns.size, NO_ROOM, np.int64)
            row.gpu = np.zeros(board.columns.size, np.int16)
            changed = np.arange(len(board.nodes))
            if on is not None:
                changed = self._owners.mask(on, board.columns.size).nonzero()[0]
            self.scored_for_new += len(changed) + _COST_OF_A_ROW
        else:
            changed = board.since(row.read)
        row.read = board.now
        if isinstance(changed, set):
            changed = {slot for slot in changed if self._may_take(row, slot)}
            if not changed:
                return
            row.facts.learn(board)
            if row.request is None:
                changed = {
                    slot for slot in changed if not self._scorer.score_without_gpus(row, slot)
                }
                if not changed:
                    return
            changed = np.array(list(changed), np.intp)
        elif on is not None:
            row.key[changed] = NO_ROOM
            changed = changed[self._owners.mask(on, board.columns.size)[changed]]
        row.facts.learn(board)
        if len(changed) < _MANY or row.shape.data:
            self._scorer.score(row, changed)
            return
        models, some = board.models(changed)
        self._scorer.score(row, some)
        row.key[changed] = row.key.take(models)
        row.gpu[changed] = row.gpu.take(models)

    def _might_fit(self, row: PlacementRow) -> bool:
        most = self.board.most_free()
        needs, request = row.shape.requirements, row.request
        if needs.cpu_milli > most.cpu or (needs.memory_bytes or 0) > most.memory:
            return False
        if request is None:
            return True
        if is_slice(request):
            free = most.gpu_milli
            return free > 0 and (request.share_milli == GPU or request.share_milli <= free)
        return request.count <= most.idle_gpus

    def _may_take(self, row: PlacementRow, slot: int) -> bool:
        node = self.board.nodes[slot]
        row.key[slot] = NO_ROOM
        if node is None or not accepts_owner(row.shape.requirements, node):
            return False
        room, needs, request = self._room_and_count(node.id)[0], row.shape.requirements, row.request
        if room.free_cpu < needs.cpu_milli or room.free_memory < (needs.memory_bytes or 0):
            return False
        if room.free_disk < (needs.disk_bytes or 0):
            return False
        if request is None:
            return True
        if is_slice(request):
            share = request.share_milli if request.share_milli < GPU else 1
            vram, holders = request.vram_bytes or 1, (None, ANYBODY, row.shape.user)
            return any(
                gpu.free_share >= share and gpu.free_memory >= vram and gpu.user in holders
                for gpu in room.gpus.values()
            )
        return sum(1 for gpu in room.gpus.values() if not gpu.holders) >= request.count

    def _best(self, row: PlacementRow, key: Ints, first: int) -> int | None:
        most = key[first]
        if most == NO_ROOM:
            return None
        tied = (key == most).nonzero()[0]
        if len(tied) == 1:
            return first
        board = self.board
        tied = _least(tied, row.facts.taken.take(board.columns.kind.take(tied)))
        tied = _least(tied, board.columns.tight.take(tied))
        return int(tied[board.columns.ids.take(tied).argmin()])

    def _fit(self, row: PlacementRow, slot: int) -> Fit | None:
        node = self.board.nodes[slot]
        assert node is not None
        needs, request = row.shape.requirements, row.request
        room = self._room_and_count(node.id)[0]
        if request is None:
            return with_share(node, room, needs, ())
        if is_slice(request):
            part = slice_of(node.offer.gpus[int(row.gpu[slot])], request)
            there = placed(room.gpus[part.gpu_index], part)
            if there is not None:
                return with_share(node, room, needs, (there,))
            other = a_slice(node, room, request, row.shape)
            return None if other is None else with_share(node, room, needs, other)
        found = whole(node, room, request, row.shape)
        assert found is not None, "the board says there are idle GPUs and the room has none"
        return with_share(node, room, needs, found)


def _least(slots: Slots, measure: Ints) -> Slots:
    return slots[measure == np.minimum.reduce(measure)] if len(slots) > 1 else slots

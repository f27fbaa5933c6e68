"""Finds the best place for a shape among all nodes, looking only at those that changed since it was last asked. It takes nothing.

For each shape (rather: for all that ask for the same and may use the same) a **row** holds one number for each node: how
good a place it is, or that it is none. Asked again, only nodes that the board notes as changed since are scored anew, and the
largest number wins. Numbers are compared in this order:

1. the step of the price (`pricing`): GPU that the usual tasks could use, spoilt by this placement;
2. seconds a start there loses (`stakes`): an environment to be made first, inputs to fetch, a node that often goes away;
3. what it costs in an hour, the cheaper first;
4. of tasks with GPUs: whether they are proven and healthy, then the faster ones, in coarse steps;
5. a task without GPU goes to nodes without; the least free GPU, then the smallest cards, the least free CPU and memory:
   full nodes fill up, empty ones stay whole;
6. the node's id. Names never matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpool.core.ids import NodeId
from gpool.core.model import Node, Shape, Tier
from gpool.core.scheduler.place.board import (
    CPU,
    FRAGMENTS,
    MEMORY,
    MERIT,
    MERIT_BITS,
    NEEDED,
    TOTAL,
    UNFED,
    WHOLE,
    Board,
)
from gpool.core.scheduler.place.candidates import MAX_PRICE_STEP, Row
from gpool.core.scheduler.place.fit import (
    Fit,
    a_slice,
    is_slice,
    memory_for,
    placed,
    slice_of,
    whole,
)
from gpool.core.scheduler.place.fragmentation import Floats, Ints, Slots
from gpool.core.scheduler.place.pricing import USUAL, WEIGHT, Pricing
from gpool.core.scheduler.place.remnants import GPU
from gpool.core.scheduler.place.start_cost import Stakes, stakes
from gpool.core.scheduler.state.capacity import ANYBODY, NOBODY, Room
from gpool.core.scheduler.state.state import State
from gpool.core.specs import environment

Overlaid = tuple[Room, int]
MAX_CELLS = 8_000_000  # numbers kept in all rows together, about 80 MB
MAX_SHAPES = 20_000

_MANY = 256  # nodes to be scored, of which some are likely to be alike
_OF_A_ROW = 2000
_MADE = (environment.PIP, environment.IMAGE)
_NONE = np.iinfo(np.int64).min
# Bits below which the lesser rules stand: free GPU, merit, cost, lost time, and on top the step of the price, at most
# some 140,000: all free GPU of a node, in single thousandths, and a remnant.
_COST = MERIT.bit_length() - 1 + MERIT_BITS
_LOST = _COST + MAX_PRICE_STEP.bit_length()
_MOST_LOST = (1 << 9) - 1
_STEP = _LOST + _MOST_LOST.bit_length()


class Candidates(NamedTuple):
    """Slots of nodes, the best first, and of each how good it is: steps of the price, then all that counts less."""

    slots: Slots
    steps: Ints
    rest: Ints


class Free(NamedTuple):
    """Amounts by slot: of CPU, memory and disk, and how many GPUs are idle."""

    cpu: Floats
    memory: Floats
    disk: Floats
    gpus: Floats


class PlacementIndex:
    """A cache beside a state, owned by the caller of `plan`.

    It follows the state's log of changed nodes. A pass writes to the overlay only: rooms that it has taken from.
    """

    def __init__(self) -> None:
        self.pricing = USUAL
        self._state: State | None = None
        self._follow_anew()

    def _follow_anew(self) -> None:
        self.scored = 0  # nodes scored so far: the cost of decisions
        self.scored_for_new = 0  # of them for new rows, plus a constant for each such row
        self.board = Board(self.pricing, self._room_and_lines)
        self._read = 0  # number of the last change that was read
        self._overlay: dict[NodeId, Overlaid] = {}
        self._has_audiences = False
        self._rows: dict[tuple[object, ...], list[Row]] = {}
        self._by_kinds: dict[tuple[object, ...], list[Row]] = {}
        self._row_count = 0
        self._by_shape: dict[int, tuple[Shape, list[Row], int]] = {}
        self._pass = 1
        self._is_uneven = False  # some nodes go away more often than others

    @contextmanager
    def overlaid(self, state: State, pricing: Pricing) -> Iterator[None]:
        """Follow the state, and forget at the end what the pass proposed."""
        self.follow(state, pricing)
        try:
            yield
        finally:
            for id_ in self._overlay:
                self.board.touch(id_)
            self._overlay = {}
            self._pass += 1

    def follow(self, state: State, pricing: Pricing) -> None:
        """Read the changes since the last call; everything if the state or the pricing is another."""
        is_same = self.pricing is pricing or self.pricing == pricing
        changes = state.changes
        if self._state is not state or not is_same or not changes.is_complete_since(self._read):
            self._state, self.pricing = state, pricing
            self._follow_anew()
            nodes = [entry.node for entry in state.nodes.values() if entry.node is not None]
            self.board.expect(len(nodes), max((len(node.offer.gpus) for node in nodes), default=0))
            for node in nodes:
                self._put(node)
        elif self._read != changes.last:
            for id_ in changes.rooms_since(self._read):
                entry = state.nodes.get(id_)
                if entry is None or entry.node is None:
                    self.board.remove(id_)
                elif self.board.node(id_) is not entry.node:
                    self._put(entry.node)
                else:
                    self.board.touch(id_)
            for id_ in changes.inputs_since(self._read):
                self.board.touch(id_, anew=True)
        self._read = changes.last

    def _put(self, node: Node) -> None:
        is_for_some = node.audience is not None or node.reserved_for is not None
        if is_for_some and not self._has_audiences:
            self._has_audiences = True
            self._forget()  # rows were shared among users
        self.board.put(node)

    def propose(self, id_: NodeId, room: Room) -> None:
        """Use this room, with one allocation more, for the rest of the pass."""
        _, count = self._room_and_lines(id_)
        self._overlay[id_] = (room, count + 1)
        self.board.touch(id_)

    def _room_and_lines(self, id_: NodeId) -> Overlaid:
        overlaid = self._overlay.get(id_)
        if overlaid is not None:
            return overlaid
        assert self._state is not None
        entry = self._state.nodes[id_]
        return entry.room, len(entry.lines)

    # ---- what is asked

    def best(
        self, shape: Shape, turn: int, barred: Collection[NodeId]
    ) -> tuple[NodeId, Fit] | None:
        """Where one more allocation by this alternative of the shape goes best; None: nowhere."""
        board = self.board
        board.refresh()
        if self._fits_nowhere(shape, turn):
            return None
        row = self._rows_of(shape)[turn]
        if row.generation != board.generation and not self._might_fit(row):
            row.full = (board.generation, board.now)
            return None
        self._update(row)
        key = row.key
        first = int(key.argmax())
        if key[first] == _NONE:
            row.full = (board.generation, board.now)
            return None
        if barred:
            key = key.copy()
            key[[board.slots[id_] for id_ in barred if id_ in board.slots]] = _NONE
            first = int(key.argmax())
        while (slot := self._best(row, key, first)) is not None:
            found = self._fit(row, slot)
            if found is not None:
                return NodeId(int(board.ids[slot])), found
            row.key[slot] = key[slot] = _NONE  # until the node changes
            first = int(key.argmax())
        return None

    def is_new(self, shape: Shape) -> bool:
        """Whether some of its alternatives have never been asked for, so that all nodes have to be scored."""
        rows = self._rows_of(shape)
        return any(row.generation != self.board.generation and self._might_fit(row) for row in rows)

    def is_full(self, shape: Shape, turn: int) -> bool:
        """Whether `best` or `candidates` found nowhere for this alternative, or for another that asks for the same, and nothing changed since."""
        board = self.board
        board.refresh()
        return self._rows_of(shape)[turn].full == (board.generation, board.now)

    def candidates(self, shape: Shape, turn: int, barred: Collection[NodeId]) -> Candidates:
        """Every node that has room for one more allocation by this alternative, the best first."""
        board = self.board
        board.refresh()
        row = self._rows_of(shape)[turn]
        if row.generation != board.generation and not self._might_fit(row):
            row.full = (board.generation, board.now)
            return Candidates(np.empty(0, np.intp), np.empty(0, np.int64), np.empty(0, np.int64))
        self._update(row)
        slots = np.flatnonzero(row.key != _NONE)
        if not len(slots):
            row.full = (board.generation, board.now)
        if barred:
            out = np.array([board.slots[id_] for id_ in barred if id_ in board.slots], np.intp)
            slots = slots[~np.isin(slots, out)]
        lesser = (board.ids[slots], board.tight[slots], row.taken[board.kind[slots]])
        slots = slots[np.lexsort((*lesser, -row.key[slots]))]
        steps = row.key[slots] >> _STEP
        return Candidates(slots, steps, row.key[slots] - (steps << _STEP))

    def fit_at(self, shape: Shape, turn: int, slot: int) -> tuple[NodeId, Fit] | None:
        """The place itself, at one of the `candidates`."""
        found = self._fit(self._rows_of(shape)[turn], slot)
        return None if found is None else (NodeId(int(self.board.ids[slot])), found)

    def could_run(
        self, shape: Shape, barred: Collection[NodeId]
    ) -> tuple[Slots, NDArray[np.bool_]]:
        """The nodes that could run it when idle, and whether each has room now."""
        board = self.board
        board.refresh()
        able, has_room = np.zeros(board.size, bool), np.zeros(board.size, bool)
        for row in self._rows_of(shape):
            self._update(row)
            row.learn(self.board)
            able |= row.able[board.kind]
            has_room |= row.key != _NONE
        for id_ in barred:
            if id_ in board.slots:
                able[board.slots[id_]] = False
        slots = np.flatnonzero(able)
        return slots, has_room[slots]

    def free(self) -> Free:
        """What is free now, to be changed by who asked."""
        board = self.board
        board.refresh()
        idle = board.amounts[WHOLE].copy()
        return Free(board.cpu.copy(), board.memory.copy(), board.disk.copy(), idle)

    def would_fit(self, shape: Shape, free: Free) -> NDArray[np.bool_]:
        """The slots where one allocation might have room if so much were free; of parts of GPUs any GPU will do."""
        board, found = self.board, np.zeros(self.board.size, bool)
        needs = shape.requirements
        for row in self._rows_of(shape):
            row.learn(board)
            able = row.able[board.kind]
            able &= free.cpu >= needs.cpu_milli
            able &= free.memory >= row.memory[board.kind]
            if needs.disk_bytes:
                able &= free.disk >= needs.disk_bytes
            if row.request is not None:
                if is_slice(row.request):
                    able &= (free.gpus > 0) | (board.free > 0).any(1)
                else:
                    able &= free.gpus >= row.request.count
            found |= able
        return found

    def nearest(self, shape: Shape, barred: Collection[NodeId]) -> NodeId | None:
        """Of the nodes that could run it when idle, the one with the fewest lines."""
        board, (slots, _) = self.board, self.could_run(shape, barred)
        if not len(slots):
            return None
        lines = board.lines[slots]
        return NodeId(int(board.ids[slots[lines == lines.min()]].min()))

    # ---- rows

    def _rows_of(self, shape: Shape) -> list[Row]:
        is_uneven = len(self.board.mtbfs) > 1
        if is_uneven != self._is_uneven:
            self._is_uneven = is_uneven
            self._by_shape.clear()
        known = self._by_shape.get(id(shape))
        if known is not None and known[0] is shape and known[2] in (0, self._pass):
            return known[1]
        at_stake = None
        if is_uneven or shape.data or environment.kind_of(shape.environment) in _MADE:
            assert self._state is not None
            at_stake = stakes(shape, self._state.predictions.of(shape))
        rows = self._shared_rows(shape, at_stake)
        if len(self._by_shape) >= MAX_SHAPES:
            self._by_shape.clear()
        self._by_shape[id(shape)] = (shape, rows, 0 if at_stake is None else self._pass)
        return rows

    def _fits_nowhere(self, shape: Shape, turn: int) -> bool:
        """Whether its row of an earlier pass says so already: what is at stake need only be known where there is room."""
        known = self._by_shape.get(id(shape))
        if known is None or known[0] is not shape or known[2] in (0, self._pass):
            return False
        row = known[1][turn]
        if row.generation != self.board.generation:
            return False
        self._update(row)
        return bool((row.key == _NONE).all())

    def _shared_rows(self, shape: Shape, at_stake: Stakes | None) -> list[Row]:
        needs = shape.requirements
        is_open_to_all = needs.tier is not Tier.NONE and not self._has_audiences
        is_anyones = is_open_to_all and not any(is_slice(request) for request in needs.gpu)
        whose = None if is_anyones else (shape.user, shape.team)
        key = (needs, shape.environment, whose, at_stake, shape.data)
        rows = self._rows.get(key)
        if rows is None:
            if self._row_count * (self.board.size + 64) >= MAX_CELLS:
                self._forget()
            requests = needs.gpu or (None,)
            if is_anyones or not is_open_to_all:
                rows = [Row(shape, request, at_stake) for request in requests]
            else:
                rows = [Row(shape, like.request, at_stake, like) for like in self._learnt(shape)]
            self._rows[key] = rows
            self._row_count += len(rows)
        return rows

    def _learnt(self, shape: Shape) -> list[Row]:
        """Rows that only know what the kinds of nodes are to such a shape, whoever's it is."""
        needs = shape.requirements
        key = (needs, shape.environment)
        rows = self._by_kinds.get(key)
        if rows is None:
            rows = self._by_kinds[key] = [Row(shape, request, None) for request in needs.gpu]
        return rows

    def _forget(self) -> None:
        self._rows.clear()
        self._by_kinds.clear()
        self._row_count = 0
        self._by_shape.clear()

    def _update(self, row: Row) -> None:
        board = self.board
        changed: set[int] | Slots
        if row.generation == board.generation and row.read == board.now:
            return
        if row.generation != board.generation:
            row.generation = board.generation
            row.key = np.full(board.size, _NONE, np.int64)
            row.gpu = np.zeros(board.size, np.int16)
            changed = np.arange(len(board.nodes))
            self.scored_for_new += len(board.nodes) + _OF_A_ROW
        else:
            changed = board.since(row.read)
        row.read = board.now
        if isinstance(changed, set):
            changed = {slot for slot in changed if self._may_take(row, slot)}
            if not changed:
                return
            row.learn(board)
            if row.request is None:
                changed = {slot for slot in changed if not self._score_bare(row, slot)}
                if not changed:
                    return
            changed = np.array(list(changed), np.intp)
        row.learn(board)
        if len(changed) < _MANY or row.shape.data:
            self._score(row, changed)
            return
        models, some = board.models(changed)
        self._score(row, some)
        row.key[changed] = row.key.take(models)
        row.gpu[changed] = row.gpu.take(models)

    def _might_fit(self, row: Row) -> bool:
        """Whether any node has so much of anything: if not, there need be no row yet."""
        cpu, memory, free, idle = self.board.most()
        needs, request = row.shape.requirements, row.request
        if needs.cpu_milli > cpu or (needs.memory_bytes or 0) > memory:
            return False
        if request is None:
            return True
        if is_slice(request):
            return free > 0 and (request.share_milli == GPU or request.share_milli <= free)
        return request.count <= idle

    def _may_take(self, row: Row, slot: int) -> bool:
        """A quick look at one node: most of a full pool need not be scored."""
        node = self.board.nodes[slot]
        row.key[slot] = _NONE
        if node is None:
            return False
        room, needs, request = self._room_and_lines(node.id)[0], row.shape.requirements, row.request
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

    # ---- scoring

    def _score(self, row: Row, slots: Slots) -> None:
        board = self.board
        self.scored += len(slots)
        row.key[slots] = _NONE
        there, kinds = board.amounts.take(slots, 1), board.kind.take(slots)
        left = there[:NEEDED]
        left -= row.least.take(kinds, 1)
        able = np.minimum.reduce(left, 0) >= 0
        if row.is_uneven and row.request is not None:
            idle = (board.holder.take(slots, 0) == NOBODY) & row.usable.take(kinds, 0)
            able &= idle.sum(1) >= row.request.count
        chosen = able.nonzero()[0]
        if not len(chosen):
            return
        if len(chosen) < len(slots):
            slots, kinds, there = slots.take(chosen), kinds.take(chosen), there.take(chosen, 1)
        if row.request is not None and is_slice(row.request):
            self._score_slices(row, slots, kinds, there)
        else:
            self._settle(row, slots, self._price(row, slots, kinds, there))

    def _score_bare(self, row: Row, slot: int) -> bool:
        """A node without GPUs for a task without: nothing can be spoilt. False: it has some."""
        node = self.board.nodes[slot]
        if node is None or node.offer.gpus:
            return False
        kind = self.board.kind[slot]
        if row.able[kind] and self.board.memory[slot] >= row.memory[kind]:
            key = -int(row.price[kind]) << _COST
            if row.stakes is not None:
                key -= int(self._lost(row, row.stakes, np.array([slot]))[0]) << _LOST
            row.key[slot] = key
        return True

    def _score_slices(self, row: Row, slots: Slots, kinds: Slots, there: Floats) -> None:
        gpus, parts = self.board.gpus.take(slots, 0), row.parts.take(kinds, 0)
        free, holder, need = gpus[:, 2], gpus[:, 3], parts[:, 2]
        enough = gpus[:, :2] >= parts[:, :2]
        fit = enough[:, 0] & enough[:, 1]
        fit &= (holder < 0) | (holder == row.shape.user)
        flat = fit.ravel().nonzero()[0]  # much quicker than to ask for pairs
        if not len(flat):
            return
        place, gpu = np.divmod(flat, self.board.width)
        before = free[place, gpu]
        after = np.maximum(before - need[place, gpu], 0)
        price = self._price(
            row, slots.take(place), kinds.take(place), there.take(place, 1), (before, after)
        )
        is_first = np.ones(len(place), bool)
        np.not_equal(place[1:], place[:-1], out=is_first[1:])
        starts = is_first.nonzero()[0]
        combined = (price << 22) - (before << 12) - gpu  # the best price, then the fullest GPU
        best = -np.maximum.reduceat(combined, starts)
        found = slots.take(place.take(starts))
        row.gpu[found] = best & 4095
        self._settle(row, found, -(best >> 22))

    def _price(
        self,
        row: Row,
        slots: Slots,
        kinds: Slots,
        there: Floats,
        part: tuple[Ints, Ints] | None = None,
    ) -> Ints:
        """The step of the gain for each candidate: higher is better. `there`: what it has, less what is needed; `part`: what is
        free of the GPU that a slice would be of, before and after."""
        board, target, weights = self.board, self.board.target, self.pricing.weights
        fits, rests = board.fits.take(slots, 0), board.rests.take(slots, 0)
        cpu, total, count = there[CPU], there[TOTAL], 0
        lost = -weights.stranding * there[UNFED]
        if part is not None:
            before, after = part
            fits += target.fits.take(after, 0)
            fits -= target.fits.take(before, 0)
            rests += target.rests.take(after, 0)
            rests -= target.rests.take(before, 0)
            total = total - (before - after)
            lost += weights.remnants * (target.worth.take(before) - target.worth.take(after))
        elif row.request is not None:
            count = row.request.count
            total = total - GPU * count
        lost += weights.stranding * target.stranded(cpu, there[MEMORY], total)
        gain = there[FRAGMENTS] - target.fragments(kinds, cpu, (fits, rests), total, count)
        gain *= weights.fragmentation / WEIGHT
        gain -= lost
        gain /= weights.step
        steps: Ints = np.floor(gain).astype(np.int64)
        return steps

    def _settle(self, row: Row, slots: Slots, steps: Ints) -> None:
        board = self.board
        key = (steps << _STEP) - board.rank[0 if row.request is None else 1].take(slots)
        if row.is_priced:
            key -= row.price[board.kind[slots]] << _COST
        if row.stakes is not None:
            key -= self._lost(row, row.stakes, slots) << _LOST
        row.key[slots] = key

    def _lost(self, row: Row, at_stake: Stakes, slots: Slots) -> Ints:
        """The time that a start in each slot loses, in the grain of its run."""
        board = self.board
        seconds = row.seconds[board.kind[slots]] + at_stake.exposure // board.mtbf[slots]
        if row.shape.data:
            assert self._state is not None
            caches = self._state.caches
            there, loss = caches.with_data(row.shape.data), caches.loss
            whole = at_stake.loading
            ids = board.ids[
                slots
            ].tolist()  # what is thrown out will have to be loaded again, perhaps
            seconds += [0 if id_ in there else whole + whole * loss(id_) // 4 for id_ in ids]
        lost: Ints = np.minimum(seconds // at_stake.grain, _MOST_LOST)
        return lost

    # ---- the winner

    def _best(self, row: Row, key: Ints, first: int) -> int | None:
        """`first`: one of those with the largest number."""
        most = key[first]
        if most == _NONE:
            return None
        tied = (key == most).nonzero()[0]
        if len(tied) == 1:
            return first
        board = self.board
        tied = _least(tied, row.taken.take(board.kind.take(tied)))
        tied = _least(tied, board.tight.take(tied))
        return int(tied[board.ids.take(tied).argmin()])

    def _fit(self, row: Row, slot: int) -> Fit | None:
        """None: cards whose hardware slices do not nest have no place for this one after all."""
        node = self.board.nodes[slot]
        assert node is not None
        needs, request = row.shape.requirements, row.request
        memory = memory_for(node, needs)
        disk = needs.disk_bytes or 0
        if request is None:
            return Fit(needs.cpu_milli, memory, (), disk)
        if is_slice(request):
            part = slice_of(node.offer.gpus[int(row.gpu[slot])], request)
            room = self._room_and_lines(node.id)[0].gpus[part.gpu_index]
            there = placed(room, part)
            if there is not None:
                return Fit(needs.cpu_milli, memory, (there,), disk)
            other = a_slice(node, self._room_and_lines(node.id)[0], request, row.shape)
            return None if other is None else Fit(needs.cpu_milli, memory, other, disk)
        cap = needs.max_price_microcredits
        found = whole(node, self._room_and_lines(node.id)[0], request, cap)
        assert found is not None, "the board says there are idle GPUs and the room has none"
        return Fit(needs.cpu_milli, memory, found, disk)


def _least(slots: Slots, measure: Ints) -> Slots:
    return slots[measure == np.minimum.reduce(measure)] if len(slots) > 1 else slots

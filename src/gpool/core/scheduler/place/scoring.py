"""Scores of placements: one integer per slot, the rules of `index` from the highest bits to the lowest."""

from __future__ import annotations

import numpy as np

from gpool.core.scheduler.place.board import (
    CPU,
    FRAGMENTS,
    MEMORY,
    MERIT,
    MERIT_BITS,
    NEEDED,
    TOTAL,
    UNFED,
    Board,
)
from gpool.core.scheduler.place.fit import is_slice
from gpool.core.scheduler.place.pricing import GPU, WEIGHT, Floats, Ints, Slots, Weights
from gpool.core.scheduler.place.rows import MAX_PRICE_STEP, PlacementRow, StartCost
from gpool.core.scheduler.state.capacity import NOBODY
from gpool.core.scheduler.state.hints import InputCaches

NO_ROOM = np.iinfo(np.int64).min
"""Score of a slot without room."""

# Lowest bits of the parts of a score: free GPU, merit, cost, lost time, and on top the price step, at most some 140,000: all
# free GPU of a node, in single thousandths, and a remnant.
_COST = MERIT.bit_length() - 1 + MERIT_BITS
_LOST = _COST + MAX_PRICE_STEP.bit_length()
_MOST_LOST = (1 << 9) - 1
PRICE = _LOST + _MOST_LOST.bit_length()
"""The lowest bit of the price step."""


class Scorer:
    def __init__(self, board: Board, weights: Weights, caches: InputCaches) -> None:
        self._board, self._weights, self._caches = board, weights, caches
        self.scored = 0  # nodes so far: the cost of decisions

    def score(self, row: PlacementRow, slots: Slots) -> None:
        columns, facts = self._board.columns, row.facts
        self.scored += len(slots)
        row.key[slots] = NO_ROOM
        there, kinds = columns.amounts.take(slots, 1), columns.kind.take(slots)
        left = there[:NEEDED]
        left -= facts.least.take(kinds, 1)
        able = np.minimum.reduce(left, 0) >= 0
        if facts.is_uneven and row.request is not None:
            idle = (columns.holder.take(slots, 0) == NOBODY) & facts.usable.take(kinds, 0)
            able &= idle.sum(1) >= row.request.count
        chosen = able.nonzero()[0]
        if not len(chosen):
            return
        if len(chosen) < len(slots):
            slots, kinds, there = slots.take(chosen), kinds.take(chosen), there.take(chosen, 1)
        if row.request is not None and is_slice(row.request):
            self._score_slices(row, slots, kinds, there)
        else:
            if facts.more is not None and row.request is not None:  # each GPU takes as much
                _take_more(there, facts.more.take(kinds, 0).max(2).T)
            self._combine(row, slots, self._price_steps(row, slots, kinds, there))

    def score_without_gpus(self, row: PlacementRow, slot: int) -> bool:
        """Score a node without GPUs for a task without: nothing is fragmented. False: the node has GPUs."""
        node = self._board.nodes[slot]
        if node is None or node.offer.gpus:
            return False
        columns, facts = self._board.columns, row.facts
        kind = columns.kind[slot]
        if facts.able[kind] and columns.amounts[MEMORY, slot] >= facts.memory[kind]:
            key = -int(facts.price[kind]) << _COST
            if row.cost is not None:
                key -= int(self._lost_steps(row, row.cost, np.array([slot]))[0]) << _LOST
            row.key[slot] = key
        return True

    def _score_slices(self, row: PlacementRow, slots: Slots, kinds: Slots, there: Floats) -> None:
        columns = self._board.columns
        gpus, parts = columns.gpus.take(slots, 0), row.facts.parts.take(kinds, 0)
        free, holder, need = gpus[:, 2], gpus[:, 3], parts[:, 2]
        enough = gpus[:, :2] >= parts[:, :2]
        fit = enough[:, 0] & enough[:, 1]
        fit &= (holder < 0) | (holder == row.shape.user)
        flat = fit.ravel().nonzero()[0]  # much quicker than to ask for pairs
        if not len(flat):
            return
        place, gpu = np.divmod(flat, columns.width)
        before = free[place, gpu]
        after = np.maximum(before - need[place, gpu], 0)
        chosen, there = kinds.take(place), there.take(place, 1)
        if row.facts.more is not None:
            _take_more(there, row.facts.more[chosen, :, gpu].T)
        price = self._price_steps(row, slots.take(place), chosen, there, (before, after))
        is_first = np.ones(len(place), bool)
        np.not_equal(place[1:], place[:-1], out=is_first[1:])
        starts = is_first.nonzero()[0]
        combined = (price << 22) - (before << 12) - gpu  # the best price, then the fullest GPU
        best = -np.maximum.reduceat(combined, starts)
        found = slots.take(place.take(starts))
        row.gpu[found] = best & 4095
        self._combine(row, found, -(best >> 22))

    def _price_steps(
        self,
        row: PlacementRow,
        slots: Slots,
        kinds: Slots,
        there: Floats,
        part: tuple[Ints, Ints] | None = None,
    ) -> Ints:
        """Price steps, higher is better. `there`: amounts less the task's needs; `part`: free thousandths of a slice's GPU,
        before and after.
        """
        columns, target, weights = self._board.columns, self._board.target, self._weights
        fits, rests = columns.fits.take(slots, 0), columns.rests.take(slots, 0)
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

    def _combine(self, row: PlacementRow, slots: Slots, steps: Ints) -> None:
        columns, facts = self._board.columns, row.facts
        key = (steps << PRICE) - columns.rank[0 if row.request is None else 1].take(slots)
        if facts.is_priced:
            key -= facts.price[columns.kind[slots]] << _COST
        if row.cost is not None:
            key -= self._lost_steps(row, row.cost, slots) << _LOST
        row.key[slots] = key

    def _lost_steps(self, row: PlacementRow, cost: StartCost, slots: Slots) -> Ints:
        columns = self._board.columns
        seconds = row.facts.seconds[columns.kind[slots]] + cost.exposure // columns.mtbf[slots]
        if row.shape.data:
            there, loss = self._caches.with_data(row.shape.data), self._caches.loss
            whole, ids = cost.loading, columns.ids[slots].tolist()
            # Inputs that are evicted may have to be loaded again.
            seconds += [0 if id_ in there else whole + whole * loss(id_) // 4 for id_ in ids]
        lost: Ints = np.minimum(seconds // cost.step, _MOST_LOST)
        return lost


def _take_more(there: Floats, more: Ints) -> None:
    """Subtract CPU and memory beyond the least, as far as they are free."""
    both = there[CPU : MEMORY + 1]
    both -= more
    np.maximum(both, 0, out=both)

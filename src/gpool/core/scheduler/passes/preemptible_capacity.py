"""Upper bound on the room that preemption could make, on all nodes at once, before victims are searched node by node.
Groups of running allocations come from `passes.victims`. Stops nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gpool.core.ids import NodeId
from gpool.core.model import Allocation, Shape
from gpool.core.scheduler.place.index import FreeAmounts, PlacementIndex
from gpool.core.scheduler.place.pricing import Bools
from gpool.core.scheduler.state.stoppable import FreedParts
from gpool.core.scheduler.state.waiting import HeldAllocation


class PreemptibleCapacity:
    """By the board's slots: the amounts of all allocations in sight as arrays. Later takes are subtracted."""

    def __init__(
        self, index: PlacementIndex, groups: Iterable[FreedParts], stopping: FreedParts
    ) -> None:
        self._index = index
        self._taken: list[tuple[int, Allocation]] = []
        self._free: dict[bytes, FreeAmounts] = {}  # by the groups that are stopped
        all_ = [stopping, *groups]
        slot_of = index.board.slots.get
        self._lines = [line for parts in all_ for line in parts.lines]  # of each row
        self._group = np.repeat(np.arange(len(all_)), [len(parts.lines) for parts in all_])
        self._at = np.array([slot_of(id_, -1) for parts in all_ for id_ in parts.nodes], np.intp)
        self._amounts = np.concatenate([parts.amounts for parts in all_], axis=1)
        self._is_here = self._at >= 0

    def stop(self, line: HeldAllocation) -> None:
        """Count the line as stopped for every waiting task."""
        self._group[[row for row, other in enumerate(self._lines) if other is line]] = 0
        self._free.clear()

    def take(self, node: NodeId, allocation: Allocation) -> None:
        slot = self._index.board.slots.get(node)
        if slot is not None:
            self._taken.append((slot, allocation))
            for free in self._free.values():
                _take(free, slot, allocation)

    def nodes(self, shape: Shape, groups: Bools) -> Bools:
        """Nodes with room for the shape if all allocations of these groups stopped; the first group stops anyway."""
        free = self._free.get(key := groups.tobytes())
        if free is None:
            free = self._free[key] = self._index.free()
            stopped = groups[self._group] & self._is_here
            at = self._at[stopped]
            for column, amounts in zip(free, self._amounts, strict=True):
                column += np.bincount(at, amounts[stopped], len(column))
            for slot, allocation in self._taken:
                _take(free, slot, allocation)
        return self._index.would_fit(shape, free)


def _take(free: FreeAmounts, slot: int, allocation: Allocation) -> None:
    free.cpu[slot] -= allocation.cpu_milli
    free.memory[slot] -= allocation.memory_bytes
    free.disk[slot] -= allocation.disk_bytes
    free.gpus[slot] -= sum(part.share_milli >= 1000 for part in allocation.slices)

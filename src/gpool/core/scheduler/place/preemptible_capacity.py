"""What every node could have free at most, if all that may be stopped on it stopped. A bound: it promises no room, it only denies it.

Looking for the cheapest set of tasks to stop is dear, and most of those who look find none. One comparison of rows answers
for a shape on which nodes there is anything to look for.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from gpool.core.ids import NodeId
from gpool.core.model import Allocation, Shape
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.state.state import Line


class PreemptibleCapacity:
    """Rows by the board's slots, made once a pass; what is taken or promised later is taken off."""

    def __init__(self, index: PlacementIndex, lines: Iterable[Line]) -> None:
        self._index = index
        self._free = index.free()
        for line in lines:
            for part in (line, *line.members):
                self._add(part.node, part.allocation, 1)

    def take(self, node: NodeId, allocation: Allocation) -> None:
        self._add(node, allocation, -1)

    def nodes(self, shape: Shape) -> NDArray[np.bool_]:
        """By slot: whether one more allocation of this shape might have room there."""
        return self._index.would_fit(shape, self._free)

    def _add(self, node: NodeId, allocation: Allocation, sign: int) -> None:
        slot = self._index.board.slots.get(node)
        if slot is None:
            return
        free = self._free
        free.cpu[slot] += sign * allocation.cpu_milli
        free.memory[slot] += sign * allocation.memory_bytes
        free.disk[slot] += sign * allocation.disk_bytes
        if sign > 0:  # of slices of one GPU each counts as one
            free.gpus[slot] += len(allocation.slices)
        else:
            free.gpus[slot] -= sum(part.share_milli >= 1000 for part in allocation.slices)

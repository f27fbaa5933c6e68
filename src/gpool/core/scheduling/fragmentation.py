"""How much free GPU the usual tasks could not use, for many states of nodes at once. Exact: no order of adding changes it.

The measure is that of fragmentation gradient descent: for each kind of task in the mix, all free GPU of a node that cannot
take it, and on one that can, the free parts too small for it; weighted by how often the kind comes. A placement is judged
by the difference it makes. All numbers are whole and below 2**53, also where they are kept as floats for speed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpool.core.model import Node
from gpool.core.scheduling.placement import suits
from gpool.core.scheduling.pricing import Pricing, size_of
from gpool.core.scheduling.remnants import GPU

Ints = NDArray[np.int64]
Slots = NDArray[np.intp]
Floats = NDArray[np.float64]
_NEVER = 1 << 60


class Target:
    """The mix of a pricing laid out in columns, one for each of its requirements."""

    def __init__(self, pricing: Pricing) -> None:
        self._mix = [needs for needs, _ in pricing.mix]
        sizes = [size_of(needs.gpu[0]) for needs in self._mix]
        self.classes = len(sizes)
        self._counts = np.array([needs.gpu[0].count for needs in self._mix], np.int64)
        self._weights = np.array([weight for _, weight in pricing.mix], float)
        self._needs: Ints  # CPU, by kind of node
        self.forget_kinds()
        self._gpu, self._cpu, self._memory = (
            pricing.gpu_milli,
            max(1, pricing.cpu_milli),
            pricing.memory_bytes >> 20,
        )
        free = np.arange(GPU + 1)[:, None]
        enough = free >= np.array(sizes, np.int64).reshape(1, -1)
        self.table_fits: Ints = enough.astype(np.int64)  # by free thousandths: fits the class
        self.table_small: Floats = np.where(enough, 0.0, free)  # ... or is too small a rest
        self.worth: Ints = np.array(pricing.remnants, np.int64)

    def forget_kinds(self) -> None:
        """Only the first is left: nodes that take nothing."""
        self._needs = np.full((1, self.classes), _NEVER, np.int64)

    def add_kind(self, node: Node) -> None:
        """The next kind of node: how much CPU each class needs there, or never enough."""
        needs = [wanted.cpu_milli if suits(node, wanted) else _NEVER for wanted in self._mix]
        row = np.array(needs, np.int64).reshape(1, -1)
        self._needs = np.concatenate([self._needs, row])

    def fragments(self, kinds: Slots, cpu: Ints, fits: Ints, small: Floats, total: Ints) -> Ints:
        """Free GPU that the mix cannot use on nodes of these kinds in these states, times `WEIGHT`."""
        can = (fits >= self._counts) & (cpu[:, None] >= self._needs[kinds])
        lost: Ints = (np.where(can, small, total[:, None]) @ self._weights).astype(np.int64)
        return lost

    def stranded(self, cpu: Ints, memory: Ints, total: Ints) -> Ints:
        """Free GPU beyond what so much CPU and memory can feed."""
        fed = np.maximum(cpu, 0) * self._gpu // self._cpu
        if self._memory:
            fed = np.minimum(fed, np.maximum(memory >> 20, 0) * self._gpu // self._memory)
        beyond: Ints = np.maximum(total - fed, 0)
        return beyond

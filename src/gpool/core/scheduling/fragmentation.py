"""How much free GPU the usual tasks could not use, for many states of nodes at once. Exact: no order of adding changes it.

The measure is that of fragmentation gradient descent: for each kind of task in the mix, all free GPU of a node that cannot
take it, and on one that can, the free parts too small for it; weighted by how often the kind comes. A placement is judged
by the difference it makes. What is summed are whole numbers below 2**53, though kept as floats for speed.
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
_NEVER = float(1 << 60)


class Target:
    """The mix of a pricing laid out in columns, one for each of its requirements."""

    def __init__(self, pricing: Pricing) -> None:
        self._mix = [needs for needs, _ in pricing.mix]
        sizes = [size_of(needs.gpu[0]) for needs in self._mix]
        self.classes = len(sizes)
        self._counts = np.array([needs.gpu[0].count for needs in self._mix], float)
        self._weights = np.array([weight for _, weight in pricing.mix], float)
        self._needs: Floats  # CPU, by kind of node
        self.forget_kinds()
        gpu, memory = pricing.gpu_milli, pricing.memory_bytes
        self._per_cpu = gpu / max(1, pricing.cpu_milli)  # GPU that so much CPU and memory feed
        self._per_byte = gpu / memory if memory else 0.0
        free = np.arange(GPU + 1)[:, None]
        enough = free >= np.array(sizes, np.int64).reshape(1, -1)
        # By free thousandths of a GPU: whether a class fits, and the rest that is too small for it.
        self.table: Floats = np.stack([enough.astype(float), np.where(enough, 0.0, free)], axis=1)
        self.worth: Floats = np.array(pricing.remnants, float) / GPU

    def forget_kinds(self) -> None:
        """Only the first is left: nodes that take nothing."""
        self._needs = np.full((1, self.classes), _NEVER)

    def add_kind(self, node: Node) -> None:
        """The next kind of node: how much CPU each class needs there, or never enough."""
        needs = [wanted.cpu_milli if suits(node, wanted) else _NEVER for wanted in self._mix]
        row = np.array(needs, float).reshape(1, -1)
        self._needs = np.concatenate([self._needs, row])

    def fragments(
        self, kinds: Slots, cpu: Floats, mix: Floats, total: Floats, taken: int = 0
    ) -> Floats:
        """Free GPU that the mix cannot use on nodes of these kinds in these states, times `WEIGHT`; `taken`: without so many
        whole GPUs, which are in `mix` still."""
        can = mix[:, 0] >= (self._counts + taken if taken else self._counts)
        can &= cpu[:, None] >= self._needs.take(kinds, 0)
        lost: Floats = np.where(can, mix[:, 1], total[:, None]) @ self._weights
        return lost

    def fragments_of(self, kind: int, cpu: float, mix: Floats, total: float) -> float:
        """The same of one node."""
        can = mix[0] >= self._counts
        can &= self._needs[kind] <= cpu
        return float(np.where(can, mix[1], total) @ self._weights)

    def stranded(self, cpu: Floats, memory: Floats, total: Floats) -> Floats:
        """Free GPU beyond what so much CPU and memory can feed."""
        fed = cpu * self._per_cpu
        if self._per_byte:
            fed = np.minimum(fed, memory * self._per_byte)
        beyond: Floats = np.maximum(total - fed, 0.0)
        return beyond

    def stranded_of(self, cpu: float, memory: float, total: float) -> float:
        """The same of one node."""
        fed = cpu * self._per_cpu
        if self._per_byte:
            fed = min(fed, memory * self._per_byte)
        return max(total - fed, 0.0)

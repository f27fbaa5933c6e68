"""Fragmentation: free GPU that the usual tasks could not use, for many states of nodes at once.
Fragmentation gradient descent: for each class of the mix, all free GPU of a node that cannot take it, else the parts too
small for it, weighted by frequency; a placement costs the difference. Sums are exact: whole numbers below 2**53.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpool.core.model import Node
from gpool.core.scheduler.place.fit import suits
from gpool.core.scheduler.place.pricing import Pricing, size_of
from gpool.core.scheduler.place.remnants import GPU

Ints = NDArray[np.int64]
Slots = NDArray[np.intp]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_MAX_MIXES = 4096


class Mix(NamedTuple):
    """Free GPUs of a node by class: GPUs that fit, rests too small, usable free GPU times the weight; and all free GPU times
    all weights.
    """

    fits: Floats
    rests: Floats
    useful: Floats
    total: float


class FragmentationTarget:
    def __init__(self, pricing: Pricing) -> None:
        self._mix = [needs for needs, _ in pricing.mix]
        sizes = [size_of(needs.gpu[0]) for needs in self._mix]
        self.classes = len(sizes)
        self._counts = np.array([needs.gpu[0].count for needs in self._mix], float)
        self._weights = np.array([weight for _, weight in pricing.mix], float)
        needs = np.array([needs.cpu_milli for needs in self._mix], float)
        # Steps of CPU: between two of them the same classes have enough.
        self._steps: Floats = np.unique(needs)
        low = np.concatenate([[-1.0], self._steps])
        self._enough: Bools = low[:, None] >= needs  # by how many of the steps there is CPU for
        self._suits: Bools  # by kind of node
        self._mixes: dict[tuple[int, ...], Mix] = {}  # by the free parts of a node's GPUs
        self.forget_kinds()
        gpu, memory = pricing.gpu_milli, pricing.memory_bytes
        self._per_cpu = gpu / max(1, pricing.cpu_milli)  # GPU that so much CPU and memory feed
        self._per_byte = gpu / memory if memory else 0.0
        free = np.arange(GPU + 1)[:, None]
        enough = free >= np.array(sizes, np.int64).reshape(1, -1)
        # By free thousandths of a GPU: whether a class fits, and the rest that is too small for it.
        self.fits: Floats = enough.astype(float)
        self.rests: Floats = np.where(enough, 0.0, free)
        self.worth: Floats = np.array(pricing.remnants, float) / GPU

    def forget_kinds(self) -> None:
        self._suits = np.zeros((1, self.classes), bool)

    def add_kind(self, node: Node) -> None:
        row = np.array([[suits(node, wanted) for wanted in self._mix]], bool)
        self._suits = np.concatenate([self._suits, row.reshape(1, -1)])

    def fragments(
        self, kinds: Slots, cpu: Floats, mix: tuple[Floats, Floats], total: Floats, taken: int = 0
    ) -> Floats:
        """Free GPU that the mix cannot use, times `WEIGHT`, by kind.

        `mix`: GPUs that fit each class (`taken` whole ones no longer free), and rests too small for it.
        """
        fits, rests = mix
        can = fits >= (self._counts + taken if taken else self._counts)
        can &= self._suits.take(kinds, 0)
        can &= self._enough.take(self._steps.searchsorted(cpu, "right"), 0)
        lost: Floats = np.where(can, rests, total[:, None]).dot(self._weights)
        return lost

    def mix_of(self, free: tuple[int, ...]) -> Mix:
        known = self._mixes.get(free)
        if known is None:
            if len(self._mixes) >= _MAX_MIXES:
                self._mixes.clear()
            fits, rests = self.fits.take(free, 0).sum(0), self.rests.take(free, 0).sum(0)
            total = sum(free)
            useful = np.where(fits >= self._counts, (total - rests) * self._weights, 0.0)
            known = Mix(fits, rests, useful, total * float(self._weights.sum()))
            self._mixes[free] = known
        return known

    def fragments_of(self, kind: int, cpu: float, mix: Mix) -> float:
        able = self._suits[kind] & self._enough[self._steps.searchsorted(cpu, "right")]
        return mix.total - float(mix.useful.dot(able))

    def stranded(self, cpu: Floats, memory: Floats, total: Floats) -> Floats:
        fed = cpu * self._per_cpu
        if self._per_byte:
            fed = np.minimum(fed, memory * self._per_byte)
        beyond: Floats = np.maximum(total - fed, 0.0)
        return beyond

    def stranded_of(self, cpu: float, memory: float, total: float) -> float:
        fed = cpu * self._per_cpu
        if self._per_byte:
            fed = min(fed, memory * self._per_byte)
        return max(total - fed, 0.0)

"""Predicted run times, looked up once per pass. A task without a prediction counts as `UNKNOWN`."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from gpool.core.model import Allocation, Instant, Node, Shape, Span
from gpool.core.scheduler.predict.predictions import model_of
from gpool.core.scheduler.state.held import HeldAllocation, NodeState
from gpool.core.scheduler.state.state import State

UNKNOWN = Span(3600 * 1_000_000)
"""Assumed run time without a prediction: long enough to be careful, short enough to be of use."""


class Remaining(NamedTuple):
    time: int
    line: HeldAllocation


class RunTimeMemo:
    def __init__(self, state: State, now: Instant) -> None:
        self._state, self._now = state, now
        self._anywhere: dict[int, tuple[Span | None]] = {}  # by the shape's identity
        self._by_model: dict[tuple[int, str], Span] = {}
        self._remaining: dict[int, list[Remaining]] = {}  # by the node entry's identity

    def of(self, shape: Shape) -> Span | None:
        known = self._anywhere.get(id(shape))
        if known is None:
            known = self._anywhere[id(shape)] = (self._state.predictions.of(shape),)
        return known[0]

    def on(self, node: Node, shape: Shape, allocation: Allocation) -> Span:
        model = model_of(node, allocation)
        known = self._by_model.get((id(shape), model))
        if known is None:
            known = self._state.predictions.of(shape, model) or UNKNOWN
            self._by_model[id(shape), model] = known
        return known

    def remaining(self, entry: NodeState) -> list[Remaining]:
        known = self._remaining.get(id(entry))
        if known is None:
            known = [Remaining(self._left(line, entry), line) for line in entry.lines.values()]
            known.sort(key=attrgetter("time"))
            self._remaining[id(entry)] = known
        return known

    def _left(self, line: HeldAllocation, entry: NodeState) -> int:
        # A task that has outlived its prediction is expected to run for another quarter of its run time.
        node = entry.node
        lasts = UNKNOWN if node is None else self.on(node, line.shape, line.allocation)
        ran = self._now - line.since
        return max(lasts - ran, ran // 4)

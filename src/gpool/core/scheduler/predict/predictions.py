"""Predicted run times from ended tasks. A hint for ordering and backfill; lost in a rebuild.

The mean of recent run times of the same user, kind (function, or program and script), requirements and GPU model; with
fewer than three: any model, the user's other scripts of that program, anybody's with the same requirements, all. Not the
median, since run times have heavy tails and the average occupation matters.
"""

from __future__ import annotations

from collections import deque

from gpool.core.model import Allocation, Node, Requirements, Shape, Span
from gpool.core.scheduler.predict.commands import program_of

KEPT = 50
LEAST = 3
MAX_KEYS = 20_000

Kind = tuple[object, ...]


def model_of(node: Node | None, allocation: Allocation) -> str:
    if node is None or not allocation.slices:
        return ""
    index = allocation.slices[0].gpu_index
    return next((gpu.model for gpu in node.offer.gpus if gpu.index == index), "")


class _Lately:
    __slots__ = ("kept", "total")

    def __init__(self) -> None:
        self.kept: deque[int] = deque()
        self.total = 0

    def add(self, value: int, count: int) -> None:
        for _ in range(min(count, KEPT)):
            if len(self.kept) == KEPT:
                self.total -= self.kept.popleft()
            self.kept.append(value)
            self.total += value


class _HashedRequirements:
    """Requirements hashed once: they are looked up with every task."""

    __slots__ = ("_hash", "needs")

    def __init__(self, needs: Requirements) -> None:
        self.needs = needs
        self._hash = hash(needs)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HashedRequirements) and self.needs == other.needs


class Predictions:
    __slots__ = ("_asked", "_seen")

    def __init__(self) -> None:
        self._seen: dict[Kind, _Lately] = {}
        self._asked: dict[int, _HashedRequirements] = {}  # by identity

    def _kinds(self, shape: Shape, model: str) -> tuple[Kind, ...]:
        needs, own = self._needs(shape.requirements), (shape.user, shape.group)
        program = program_of(shape.group)
        wider: tuple[Kind, ...] = ((shape.user, program, needs),) if program != own[1] else ()
        if not model:
            return (*own, needs), *wider, (needs,), ()
        return (*own, needs, model), (*own, needs), *wider, (needs, model), (needs,), ()

    def _needs(self, asked: Requirements) -> _HashedRequirements:
        known = self._asked.get(id(asked))
        if known is None or known.needs is not asked:
            if len(self._asked) >= MAX_KEYS:
                self._asked.clear()
            known = self._asked[id(asked)] = _HashedRequirements(asked)
        return known

    def observe(self, shape: Shape, count: int, total: Span, model: str = "") -> None:
        for kind in self._kinds(shape, model):
            seen = self._seen.pop(kind, None) or _Lately()
            self._seen[kind] = seen  # newest last; the oldest is evicted first
            seen.add(total // count, count)
        while len(self._seen) > MAX_KEYS:
            del self._seen[next(iter(self._seen))]

    def of(self, shape: Shape, model: str = "") -> Span | None:
        if not self._seen:
            return None
        for kind in self._kinds(shape, model):
            seen = self._seen.get(kind)
            if seen is not None and len(seen.kept) >= LEAST:
                return Span(seen.total // len(seen.kept))
        return None

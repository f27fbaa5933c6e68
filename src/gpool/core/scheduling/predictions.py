"""How long a task will run, from those that ended: a guess to order and to backfill by, never needed for correctness.

The median of the last few of the same user, name and requirements; with fewer than three of them, of the same requirements,
then of all. Medians, because one run of a week says nothing about the next. A hint: lost in a rebuild.
"""

from __future__ import annotations

from collections import deque

from gpool.core.model import Shape, Span

KEPT = 15
LEAST = 3
MAX_KEYS = 20_000
_ALL = ()


class Predictions:
    __slots__ = ("_medians", "_seen")

    def __init__(self) -> None:
        self._seen: dict[tuple[object, ...], deque[int]] = {}
        self._medians: dict[tuple[object, ...], Span] = {}

    @staticmethod
    def _keys(shape: Shape) -> tuple[tuple[object, ...], ...]:
        needs = shape.requirements
        return (shape.user, shape.group, needs), (needs,), _ALL

    def observe(self, shape: Shape, count: int, total: Span) -> None:
        """`count` of them ended after `total` together."""
        for key in self._keys(shape):
            seen = self._seen.pop(key, None)
            if seen is None:
                seen = deque(maxlen=KEPT)
            self._seen[key] = seen  # the newest last: the oldest is forgotten first
            seen.extend([total // count] * min(count, KEPT))
            if len(seen) >= LEAST:
                self._medians[key] = Span(sorted(seen)[len(seen) // 2])
        if len(self._seen) > MAX_KEYS:
            gone = next(iter(self._seen))
            del self._seen[gone]
            self._medians.pop(gone, None)

    def of(self, shape: Shape) -> Span | None:
        for key in self._keys(shape):
            found = self._medians.get(key)
            if found is not None:
                return found
        return None

"""Distributions of run times from ended tasks. A hint: nothing depends on its accuracy.
Looked up from narrow to wide: same shape, same user and GPUs, same GPUs, everything. For a running task only durations
longer than its age count.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

from gpool.core.model import Shape, Span

MAX_KINDS = 10_000
_WINDOWS = (50, 200, 500, 2000)  # durations kept, narrowest kind first
_ENOUGH = 8  # longer durations needed to use a kind
_MOST_TIMES = 20.0  # times its age, for a task older than all known ones

Kind = tuple[object, ...]


class _Window:
    __slots__ = ("_order", "_size", "ascending")

    def __init__(self, size: int) -> None:
        self._size = size
        self._order: deque[int] = deque()
        self.ascending: list[int] = []

    def add(self, value: int) -> None:
        if len(self._order) == self._size:
            oldest = self._order.popleft()
            del self.ascending[bisect_right(self.ascending, oldest) - 1]
        self._order.append(value)
        insort(self.ascending, value)


class RunTimes:
    def __init__(self) -> None:
        self._kinds: dict[Kind, _Window] = {}

    def observe(self, shape: Shape, duration: Span) -> None:
        for kind, size in zip(_kinds(shape), _WINDOWS, strict=True):
            window = self._kinds.pop(kind, None) or _Window(size)
            window.add(max(1, duration))
            self._kinds[kind] = window
        while len(self._kinds) > MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]

    @property
    def is_empty(self) -> bool:
        return not self._kinds

    def left(self, shape: Shape, age: Span, fraction: float) -> Span:
        """`fraction`: quantile of the remaining run time (0 <= fraction < 1)."""
        last: list[int] = []
        for kind in _kinds(shape):
            window = self._kinds.get(kind)
            if window is None:
                continue
            first = bisect_right(window.ascending, age)
            there = len(window.ascending) - first
            if there >= _ENOUGH:
                return Span(window.ascending[first + int(fraction * there)] - age)
            if there:
                last = window.ascending[first:]
        if last:
            return Span(last[int(fraction * len(last))] - age)
        return Span(round(max(age, 1) * min(_MOST_TIMES, fraction / (1 - fraction))) + 1)

    def copy(self) -> RunTimes:
        twin = RunTimes()
        for kind, window in self._kinds.items():
            alike = twin._kinds[kind] = _Window(0)
            alike.ascending = window.ascending.copy()
        return twin


def _kinds(shape: Shape) -> tuple[Kind, ...]:
    asked = shape.requirements.gpu
    return (
        (shape.user, shape.group, shape.environment, shape.requirements),
        (shape.user, asked),
        (asked,),
        (),
    )

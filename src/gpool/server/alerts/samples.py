"""Recent samples of the series that alert rules read, in memory. Follows Prometheus: a value is valid for five minutes
or until its series disappears; ranges include both ends.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LOOKBACK_S = 300.0
Labels = tuple[tuple[str, str], ...]
"""Sorted pairs, without the name of the metric."""


@dataclass(frozen=True, slots=True)
class Selector:
    """Series of one metric whose labels match. `matchers`: (label, operator, value), as in PromQL."""

    name: str
    matchers: tuple[tuple[str, str, str], ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(
            _matches(labels.get(label, ""), sign, value) for label, sign, value in self.matchers
        )

    def promql(self) -> str:
        if not self.matchers:
            return self.name
        inner = ", ".join(f'{label}{sign}"{value}"' for label, sign, value in self.matchers)
        return f"{self.name}{{{inner}}}"


def _matches(found: str, sign: str, value: str) -> bool:
    if sign in ("=", "!="):
        return (found == value) is (sign == "=")
    return (re.fullmatch(value, found) is not None) is (sign == "=~")


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(slots=True)
class Series:
    """Samples of one series, oldest first. A value of None (NaN here) marks the end of the series."""

    labels: Labels
    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, at_s: float, value: float, keep_s: float) -> None:
        first = bisect_left(self.times, at_s - keep_s)
        if first:
            del self.times[:first], self.values[:first]
        self.times.append(at_s)
        self.values.append(value)

    def at(self, at_s: float) -> float | None:
        """Newest value at an instant; None: there is none, or the series had ended."""
        place = bisect_right(self.times, at_s) - 1
        if place < 0 or at_s - self.times[place] > LOOKBACK_S or math.isnan(self.values[place]):
            return None
        return self.values[place]

    def within(self, from_s: float, until_s: float) -> tuple[Sequence[float], Sequence[float]]:
        first, last = bisect_left(self.times, from_s), bisect_right(self.times, until_s)
        kept = [place for place in range(first, last) if not math.isnan(self.values[place])]
        return [self.times[place] for place in kept], [self.values[place] for place in kept]


class SampleStore:
    """Keeps the series that one of `ranges` selects, for as long as its range (seconds; 0: the newest value)."""

    def __init__(self, ranges: Mapping[Selector, float]) -> None:
        self._ranges: dict[str, list[tuple[Selector, float]]] = {}
        for selector, range_s in ranges.items():
            self._ranges.setdefault(selector.name, []).append((selector, range_s))
        self._series: dict[str, dict[Labels, Series]] = {name: {} for name in self._ranges}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._ranges)

    def add(self, at_s: float, samples: Iterable[Sample]) -> None:
        """Add one snapshot: series that it lacks have ended."""
        seen: set[tuple[str, Labels]] = set()
        for name, labels, value in samples:
            wanted = [keep_s for each, keep_s in self._ranges.get(name, ()) if each.matches(labels)]
            if wanted and not math.isnan(value):
                key = tuple(sorted(labels.items()))
                series = self._series[name].setdefault(key, Series(key))
                series.add(at_s, value, max(wanted))
                seen.add((name, key))
        for name, known in self._series.items():
            for key, series in list(known.items()):
                if (name, key) in seen:
                    continue
                if not math.isnan(series.values[-1]):
                    series.add(at_s, math.nan, self._longest(name))
                elif at_s - series.times[-1] > self._longest(name):
                    del known[key]

    def select(self, selector: Selector) -> Iterator[Series]:
        for labels, series in self._series.get(selector.name, {}).items():
            if selector.matches(dict(labels)):
                yield series

    def _longest(self, name: str) -> float:
        return max(keep_s for _, keep_s in self._ranges[name])

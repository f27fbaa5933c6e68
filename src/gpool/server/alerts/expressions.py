"""The part of PromQL that alert rules use, as values that print PromQL and compute the same result over `SampleStore`.

`rate` extrapolates to the ends of its range as Prometheus 2 does; tests compare the results with promtool.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from gpool.server.alerts.samples import Labels, SampleStore, Selector

Vector = Mapping[Labels, float]


class Expression(Protocol):
    def promql(self) -> str: ...

    def evaluate(self, samples: SampleStore, at_s: float) -> Vector: ...

    def ranges(self) -> Iterator[tuple[Selector, float]]:
        """Selectors it reads, with their range in seconds (0: an instant)."""
        ...


@dataclass(frozen=True, slots=True)
class Value:
    """Newest value of each series."""

    selector: Selector

    def promql(self) -> str:
        return self.selector.promql()

    def evaluate(self, samples: SampleStore, at_s: float) -> Vector:
        found = ((series.labels, series.at(at_s)) for series in samples.select(self.selector))
        return {labels: value for labels, value in found if value is not None}

    def ranges(self) -> Iterator[tuple[Selector, float]]:
        yield self.selector, 0.0


@dataclass(frozen=True, slots=True)
class CounterRate:
    """Growth of each counter per second over the range; `is_total`: over the whole range (`increase`)."""

    selector: Selector
    range_s: int
    is_total: bool = False

    def promql(self) -> str:
        function = "increase" if self.is_total else "rate"
        return f"{function}({self.selector.promql()}[{duration(self.range_s)}])"

    def evaluate(self, samples: SampleStore, at_s: float) -> Vector:
        found = {}
        for series in samples.select(self.selector):
            grown = _growth(*series.within(at_s - self.range_s, at_s), at_s - self.range_s, at_s)
            if grown is not None:
                found[series.labels] = grown if self.is_total else grown / self.range_s
        return found

    def ranges(self) -> Iterator[tuple[Selector, float]]:
        yield self.selector, float(self.range_s)


def _growth(
    times: Sequence[float], values: Sequence[float], start: float, end: float
) -> float | None:
    """`extrapolatedRate` of Prometheus: the growth between the outer samples, carried on to the ends of the range, but at
    most half an interval where samples are missing there, and not below zero. None: fewer than two samples.
    """
    if len(values) < 2:
        return None
    grown = values[-1] - values[0]
    grown += sum(before for before, after in pairwise(values) if after < before)
    sampled = times[-1] - times[0]
    interval = sampled / (len(values) - 1)
    to_start, to_end = times[0] - start, end - times[-1]
    if grown > 0 and values[0] >= 0:
        to_start = min(to_start, sampled * (values[0] / grown))
    extended = sampled
    extended += to_start if to_start < interval * 1.1 else interval / 2
    extended += to_end if to_end < interval * 1.1 else interval / 2
    return grown * extended / sampled


@dataclass(frozen=True, slots=True)
class Aggregate:
    """`sum` or `max` over all labels but those named in `by`."""

    function: str
    inner: Expression
    by: tuple[str, ...] = ()

    def promql(self) -> str:
        by = f" by ({', '.join(self.by)}) " if self.by else ""
        return f"{self.function}{by}({self.inner.promql()})"

    def evaluate(self, samples: SampleStore, at_s: float) -> Vector:
        groups: dict[Labels, list[float]] = {}
        for labels, value in self.inner.evaluate(samples, at_s).items():
            kept = tuple(pair for pair in labels if pair[0] in self.by)
            groups.setdefault(kept, []).append(value)
        fold = sum if self.function == "sum" else max
        return {labels: fold(values) for labels, values in groups.items()}

    def ranges(self) -> Iterator[tuple[Selector, float]]:
        return self.inner.ranges()


@dataclass(frozen=True, slots=True)
class Quantile:
    """Quantile of a histogram over the range, of all its series together."""

    quantile: float
    histogram: Selector  # of the `_bucket` series
    range_s: int

    @property
    def _buckets(self) -> Aggregate:
        return Aggregate("sum", CounterRate(self.histogram, self.range_s), ("le",))

    def promql(self) -> str:
        return f"histogram_quantile({self.quantile:g}, {self._buckets.promql()})"

    def evaluate(self, samples: SampleStore, at_s: float) -> Vector:
        found = self._buckets.evaluate(samples, at_s)
        buckets = sorted((float(dict(labels)["le"]), value) for labels, value in found.items())
        value = _quantile(self.quantile, buckets)
        return {} if value is None else {(): value}

    def ranges(self) -> Iterator[tuple[Selector, float]]:
        return self._buckets.ranges()


def _quantile(quantile: float, buckets: list[tuple[float, float]]) -> float | None:
    if len(buckets) < 2 or not math.isinf(buckets[-1][0]) or not buckets[-1][1]:
        return None
    rank = quantile * buckets[-1][1]
    place = next(i for i, (_, count) in enumerate(buckets) if count >= rank)
    if place == len(buckets) - 1:
        return buckets[-2][0]
    upper, count = buckets[place]
    lower, before = buckets[place - 1] if place else (0.0, 0.0)
    return lower + (upper - lower) * (rank - before) / (count - before)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Quotient of series with equal labels."""

    numerator: Expression
    denominator: Expression

    def promql(self) -> str:
        return f"{self.numerator.promql()} / {self.denominator.promql()}"

    def evaluate(self, samples: SampleStore, at_s: float) -> Vector:
        below = self.denominator.evaluate(samples, at_s)
        found = self.numerator.evaluate(samples, at_s)
        return {
            labels: _divided(value, below[labels])
            for labels, value in found.items()
            if labels in below
        }

    def ranges(self) -> Iterator[tuple[Selector, float]]:
        yield from self.numerator.ranges()
        yield from self.denominator.ranges()


def _divided(value: float, by: float) -> float:
    if by:
        return value / by
    return math.nan if not value else math.copysign(math.inf, value)


@dataclass(frozen=True, slots=True)
class Compared:
    """Elements above (`>`) or below (`<`) a limit."""

    inner: Expression
    sign: str
    limit: float

    def promql(self) -> str:
        return f"{self.inner.promql()} {self.sign} {self.limit:g}"

    def evaluate(self, samples: SampleStore, at_s: float) -> Vector:
        found = self.inner.evaluate(samples, at_s).items()
        if self.sign == ">":
            return {labels: value for labels, value in found if value > self.limit}
        return {labels: value for labels, value in found if value < self.limit}

    def ranges(self) -> Iterator[tuple[Selector, float]]:
        return self.inner.ranges()


@dataclass(frozen=True, slots=True)
class While:
    """Elements of `inner`, provided that `condition` has any."""

    inner: Expression
    condition: Expression

    def promql(self) -> str:
        return f"{self.inner.promql()} and on () {self.condition.promql()}"

    def evaluate(self, samples: SampleStore, at_s: float) -> Vector:
        holds = self.condition.evaluate(samples, at_s)
        return self.inner.evaluate(samples, at_s) if holds else {}

    def ranges(self) -> Iterator[tuple[Selector, float]]:
        yield from self.inner.ranges()
        yield from self.condition.ranges()


def duration(seconds: int) -> str:
    """Duration in PromQL, in minutes where they are whole."""
    return f"{seconds // 60}m" if seconds % 60 == 0 else f"{seconds}s"

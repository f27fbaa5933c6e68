"""Calibration of forecasts: the range into which 80 % of starts fall. Knows nothing of tasks.

The range is the middle 80 % of the ratios of actual to forecast wait among recent similar forecasts: conformal
prediction, which assumes only that errors continue alike. Two corrections: forecasts of one moment err together, so only
a few of each count (`_OF_A_MOMENT`); and pools change, so each end of the range widens with every start outside and
narrows with every start inside: in the long run 10 % fall outside on each side.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, exp, log

from gpool.core.model import SECOND, Instant, Span

KEPT = 300
_ALIKE = 150  # similar forecasts used
_OF_A_MOMENT = 2
_ENOUGH = 20
_CUT = 0.1  # cut from each end, which leaves 80 %
_STRETCH = 0.01
_LEAST_STRETCH, _MOST_STRETCH = 0.3, 8.0
_LEAST_WIDTH = 0.02  # two per cent, each side
_GROUND = 30 * SECOND  # shorter waits count as equal
_UNKNOWN = log(4)  # range without data: a quarter to four times


@dataclass(frozen=True, slots=True)
class Range:
    """Expected wait: the median, and the range of 80 %."""

    middle: Span
    low: Span
    high: Span


@dataclass(frozen=True, slots=True)
class StatedForecast:
    at: Instant
    forecast: Span
    range: Range


class Calibration:
    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, Instant]] = deque(maxlen=KEPT)
        self._below = self._above = 1.0

    def note(self, told: StatedForecast, truth: Span) -> None:
        self._below = _held(self._below, truth < told.range.low)
        self._above = _held(self._above, truth > told.range.high)
        if sum(at == told.at for _, _, at in self._seen) < _OF_A_MOMENT:
            forecast = log(told.forecast + _GROUND)
            self._seen.append((forecast, log(truth + _GROUND) - forecast, told.at))

    def told(self, forecast: Span, now: Instant) -> StatedForecast:
        said = log(forecast + _GROUND)
        alike = sorted(self._seen, key=lambda one: abs(one[0] - said))[:_ALIKE]
        if len(alike) < _ENOUGH:
            return StatedForecast(now, forecast, _range(said, -_UNKNOWN, 0.0, _UNKNOWN))
        ratios = sorted(ratio for _, ratio, _ in alike)
        count = len(ratios)
        middle = ratios[count // 2]
        low = ratios[max(0, int(_CUT * (count + 1)) - 1)]
        high = ratios[min(count, ceil((1 - _CUT) * (count + 1))) - 1]
        low = middle - (middle - low) * self._below - _LEAST_WIDTH
        high = middle + (high - middle) * self._above + _LEAST_WIDTH
        return StatedForecast(now, forecast, _range(said, low, middle, high))


def _held(stretch: float, is_outside: bool) -> float:
    stretch *= exp(_STRETCH * (is_outside - _CUT))
    return min(max(stretch, _LEAST_STRETCH), _MOST_STRETCH)


def _range(said: float, low: float, middle: float, high: float) -> Range:
    at = [Span(max(0, round(exp(said + ratio) - _GROUND))) for ratio in (middle, low, high)]
    return Range(at[0], at[1], at[2])

"""How far earlier forecasts were off, and the range that follows: eight of ten starts are to fall into it. It knows nothing of tasks.

Forecast and truth are compared as ratios of waits. A new forecast's range is what the ratios of the recent forecasts most
like it (of about as long a wait) leave when the lowest and the highest tenth are cut off: conformal prediction, which needs
no model of why a forecast errs, only that it goes on erring alike.

Two things are not alike. What was told at one moment errs together, so only a few of each moment count (`_OF_A_MOMENT`), or
one lucky hour would make everything look certain. And pools change: each side of the range is stretched a little by every
start that falls outside and drawn in by every one inside, so that in the long run one of ten is outside on each side
whatever happens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, exp, log

from gpool.core.model import SECOND, Instant, Span

KEPT = 300
_ALIKE = 150  # forecasts compared with
_OF_A_MOMENT = 2
_ENOUGH = 20
_CUT = 0.1  # off each end: what is left is the 80 % range
_STRETCH = 0.01
_LEAST_STRETCH, _MOST_STRETCH = 0.3, 8.0
_LEAST_WIDTH = 0.02  # two per cent, each side
_GROUND = 30 * SECOND  # waits are told apart beyond this only
_UNKNOWN = log(4)  # the range before anything was compared: a quarter to four times


@dataclass(frozen=True, slots=True)
class Range:
    """A wait: the middle of what is expected, and where eight of ten fall."""

    middle: Span
    low: Span
    high: Span


@dataclass(frozen=True, slots=True)
class Told:
    """What was said at one moment: the wait as the courses had it, and the range made of it."""

    at: Instant
    forecast: Span
    range: Range


class Calibration:
    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, Instant]] = deque(maxlen=KEPT)
        self._below = self._above = 1.0

    def note(self, told: Told, truth: Span) -> None:
        """It turned out to be this long."""
        self._below = _held(self._below, truth < told.range.low)
        self._above = _held(self._above, truth > told.range.high)
        if sum(at == told.at for _, _, at in self._seen) < _OF_A_MOMENT:
            forecast = log(told.forecast + _GROUND)
            self._seen.append((forecast, log(truth + _GROUND) - forecast, told.at))

    def told(self, forecast: Span, now: Instant) -> Told:
        """The range to state for a wait that the courses forecast."""
        said = log(forecast + _GROUND)
        alike = sorted(self._seen, key=lambda one: abs(one[0] - said))[:_ALIKE]
        if len(alike) < _ENOUGH:
            return Told(now, forecast, _range(said, -_UNKNOWN, 0.0, _UNKNOWN))
        ratios = sorted(ratio for _, ratio, _ in alike)
        count = len(ratios)
        middle = ratios[count // 2]
        low = ratios[max(0, int(_CUT * (count + 1)) - 1)]
        high = ratios[min(count, ceil((1 - _CUT) * (count + 1))) - 1]
        low = middle - (middle - low) * self._below - _LEAST_WIDTH
        high = middle + (high - middle) * self._above + _LEAST_WIDTH
        return Told(now, forecast, _range(said, low, middle, high))


def _held(stretch: float, is_outside: bool) -> float:
    stretch *= exp(_STRETCH * (is_outside - _CUT))
    return min(max(stretch, _LEAST_STRETCH), _MOST_STRETCH)


def _range(said: float, low: float, middle: float, high: float) -> Range:
    at = [Span(max(0, round(exp(said + ratio) - _GROUND))) for ratio in (middle, low, high)]
    return Range(at[0], at[1], at[2])

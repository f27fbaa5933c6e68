"""How far earlier forecasts were off, and the range that follows: eight of ten starts are to fall into it. It knows nothing of tasks.

Forecast and truth are compared as ratios of waits. A new forecast's range is what the ratios of the recent forecasts most
like it (of about as long a wait) leave when the lowest and the highest tenth are cut off: conformal prediction, which needs
no model of why a forecast errs, only that it goes on erring alike.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, exp, log

from gpool.core.model import SECOND, Span

KEPT = 600
_ALIKE = 80  # forecasts compared with
_ENOUGH = 20
_CUT = 0.1  # off each end: what is left is the 80 % range
_GROUND = 30 * SECOND  # waits are told apart beyond this only
_UNKNOWN = log(4)  # the range before anything was compared: a quarter to four times


@dataclass(frozen=True, slots=True)
class Range:
    """A wait: the middle of what is expected, and where eight of ten fall."""

    middle: Span
    low: Span
    high: Span


class Calibration:
    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def note(self, forecast: Span, truth: Span) -> None:
        """A forecast wait turned out to be this long."""
        told = log(forecast + _GROUND)
        self._seen.append((told, log(truth + _GROUND) - told))

    def range(self, forecast: Span) -> Range:
        told = log(forecast + _GROUND)
        alike = sorted(self._seen, key=lambda one: abs(one[0] - told))[:_ALIKE]
        if len(alike) < _ENOUGH:
            return _range(told, -_UNKNOWN, 0.0, _UNKNOWN)
        ratios = sorted(ratio for _, ratio in alike)
        low = ratios[max(0, int(_CUT * (len(ratios) + 1)) - 1)]
        high = ratios[min(len(ratios), ceil((1 - _CUT) * (len(ratios) + 1))) - 1]
        return _range(told, low, ratios[len(ratios) // 2], high)


def _range(told: float, low: float, middle: float, high: float) -> Range:
    at = [Span(max(0, round(exp(told + ratio) - _GROUND))) for ratio in (middle, low, high)]
    return Range(at[0], at[1], at[2])

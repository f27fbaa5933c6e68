"""Decides which requests are refused while the server is overloaded. Pure: times and measures are arguments.

Two delays of other work are measured: how late a timer of the event loop is, and how long reads and writes wait for
the store. Three rules refuse a request, each in the order of `SHED`:

- pressure, from 0 to 4, moves once per tick of the timer. At a delay of half the limit (0.2 s) it rises, at once and by up to
  0.5; below a quarter it falls by 0.5 a second; between the two it stays (hysteresis). A unit of pressure stands for a
  class: at 2.4 all listings and explanations are refused, and 40 % of the submissions.
- lateness: a tick that is overdue says within one turn of the event loop that it is too long, when the pressure
  cannot know yet. At 5 times the capacity each turn would otherwise take 5 times as long as the one before.
- concurrency: requests whose body has arrived and whose answer has not begun; slow clients do not count.

A delay is no overload by itself: disks and machines are slow at times. It counts if many requests came in the tick, or
if a few came and the tick before was slow too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

TICK_S = 0.1
"""Interval of the timer whose delay is measured."""
RISE = 0.5
"""Most pressure that one tick adds."""
FALL_PER_S = 0.5
MANY, FEW = 16, 4
"""Requests of one tick that make its delay a queue, not a pause; of a tick after a slow one."""


class LoadClass(StrEnum):
    LISTING = "listing"
    EXPLAIN = "explain"
    SUBMISSION = "submission"
    OTHER = "other"
    VITAL = "vital"  # the agents' channel, transfers of their tasks, probes, metrics: never refused


SHED = (LoadClass.LISTING, LoadClass.EXPLAIN, LoadClass.SUBMISSION, LoadClass.OTHER)
"""Classes in the order in which they are refused."""
RANK: Mapping[LoadClass, int] = {kind: rank for rank, kind in enumerate(SHED)}
MOST_PRESSURE = float(len(SHED))
LATE: Mapping[LoadClass, float] = dict(zip(SHED, (0.5, 0.7, 1.0, 1.5), strict=True))
"""Lateness of the tick at which a class is refused, in times of the limit."""
CROWDED: Mapping[LoadClass, float] = dict(zip(SHED, (0.125, 0.125, 1.0, 2.0), strict=True))
"""Concurrency at which a class is refused, in times of the limit; explanations wait for one another."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`delay_s`: delay that no admitted request should have. `concurrency`: submissions are refused from there."""

    delay_s: float = 0.4
    concurrency: int = 512


@dataclass(frozen=True, slots=True)
class LoadSample:
    """Delays in seconds: of the timer, of the oldest uncommitted write, of the oldest read without a reader."""

    lag_s: float = 0.0
    write_s: float = 0.0
    read_s: float = 0.0

    @property
    def delay_s(self) -> float:
        return max(self.lag_s, self.write_s, self.read_s)


@dataclass(frozen=True, slots=True)
class Shed:
    """Refusal of a request."""

    kind: LoadClass
    retry_after_s: int


class AdmissionController:
    def __init__(self, limits: AdmissionLimits = AdmissionLimits()) -> None:  # noqa: B008 - frozen
        self._limits = limits
        self.pressure = 0.0
        self.active = 0  # requests that are being processed
        self._came = 0  # requests since the last tick
        self._was_slow = False  # at the last tick
        self._ticked_s: float | None = None  # None: no timer runs, and nothing is late
        self._credit = dict.fromkeys(SHED, 0.0)

    def tick(self, sample: LoadSample, now_s: float) -> None:
        """Take the measures of one tick."""
        delay_s, limit_s = sample.delay_s, self._limits.delay_s
        is_slow = delay_s >= limit_s / 2
        least = FEW if self._was_slow else MANY
        if is_slow and max(self._came, self.active) >= least:
            self.pressure = min(MOST_PRESSURE, self.pressure + RISE * min(1.0, delay_s / limit_s))
        elif delay_s < limit_s / 4 and self._ticked_s is not None:
            passed_s = max(0.0, now_s - self._ticked_s)
            self.pressure = max(0.0, self.pressure - FALL_PER_S * passed_s)
        self._was_slow = is_slow
        self._ticked_s, self._came = now_s, 0

    def admit(self, kind: LoadClass, now_s: float) -> Shed | None:
        """Decide about a request that has just been read."""
        self._came += 1
        if kind is LoadClass.VITAL:
            return None
        if self._is_late(kind, now_s) or self.active >= CROWDED[kind] * self._limits.concurrency:
            return self._shed(kind)
        if self.pressure <= RANK[kind]:
            return None
        credit = self._credit[kind] + 1.0 - min(1.0, self.pressure - RANK[kind])
        self._credit[kind] = credit % 1.0
        return None if credit >= 1.0 else self._shed(kind)

    def _is_late(self, kind: LoadClass, now_s: float) -> bool:
        if self._ticked_s is None or self._came < MANY:
            return False
        return now_s - self._ticked_s - TICK_S >= LATE[kind] * self._limits.delay_s

    def _shed(self, kind: LoadClass) -> Shed:
        return Shed(kind, max(1, ceil(self.pressure - RANK[kind])))

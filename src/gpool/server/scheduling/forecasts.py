"""What the server remembers to tell when waiting tasks start: run times, arrivals, and how its earlier forecasts turned out.

All of it are hints, lost with the process and learnt again. The courses are computed in a thread on a frozen copy, one
computation at a time, and serve every question of the next seconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, Instant, Shape, Span
from gpool.core.scheduler.order.orders import Order, Policy
from gpool.core.scheduler.predict.calibration import Calibration, Range, StatedForecast
from gpool.core.scheduler.predict.forecast import (
    ForecastQuestion,
    SimulatedSchedule,
    courses,
    waits,
)
from gpool.core.scheduler.predict.run_times import RunTimes
from gpool.core.scheduler.state.snapshot import take
from gpool.core.scheduler.state.state import State

LIFE = Span(5 * SECOND)
"""How long courses serve."""

_LATELY = 400
_MAX_OPEN = 10_000  # forecasts whose outcome is awaited


class Scheduled(Protocol):
    """The scheduler, as far as it is asked here."""

    state: State
    policy: Policy
    orders: Mapping[str, Order]

    async def since(self) -> Mapping[TaskId, Instant]: ...


@dataclass(frozen=True, slots=True)
class Estimate:
    at: Instant
    first: Instant
    last: Instant


@dataclass(frozen=True, slots=True)
class _Made:
    at: Instant
    policy: Policy
    courses: Sequence[SimulatedSchedule]


class Forecasts:
    def __init__(self) -> None:
        self.times = RunTimes()
        self._arrived: deque[tuple[Instant, Shape]] = deque(maxlen=_LATELY)
        self._calibration = Calibration()
        self._open: dict[TaskId, StatedForecast] = {}
        self._made: _Made | None = None
        self._busy = asyncio.Lock()

    # ---- what happens

    def arrived(self, shape: Shape, at: Instant) -> None:
        """One for each submission: a batch is one arrival of work, and its tasks wait already."""
        self._arrived.append((at, shape))

    def ended(self, shape: Shape, durations: Sequence[int]) -> None:
        for duration in durations[-50:]:
            self.times.observe(shape, Span(duration))

    def started(self, tasks: Sequence[TaskId], now: Instant) -> None:
        if self._open:
            for task in tasks:
                told = self._open.pop(task, None)
                if told is not None:
                    self._calibration.note(told, Span(now - told.at))

    def gone(self, tasks: Sequence[TaskId]) -> None:
        """Cancelled: what was told of them cannot be compared."""
        for task in tasks:
            self._open.pop(task, None)

    # ---- what is asked

    async def question(self, scheduled: Scheduled, now: Instant) -> ForecastQuestion:
        """Frozen: fit for another thread."""
        since = await scheduled.since()
        snapshot = take(scheduled.state)
        return ForecastQuestion(snapshot, now, self.times.copy(), since, tuple(self._arrived))

    async def estimate(
        self, scheduled: Scheduled, now: Instant, task: TaskId, ahead: int
    ) -> Estimate | None:
        """When the task starts, and the range into which eight of ten fall; None: nothing is known, or it never does."""
        if self.times.is_empty:
            return None
        found = await self._courses(scheduled, now)
        told = waits(found.courses, task, ahead, found.at)
        if told is None:
            return None
        said = self._calibration.told(told[len(told) // 2], found.at)
        if len(self._open) < _MAX_OPEN:
            self._open.setdefault(task, said)
        return _estimate(said.range, found.at, now)

    async def _courses(self, scheduled: Scheduled, now: Instant) -> _Made:
        async with self._busy:
            made, policy = self._made, scheduled.policy
            if made is None or made.policy != policy or not 0 <= now - made.at < LIFE:
                asked = await self.question(scheduled, now)
                found = await asyncio.to_thread(courses, asked, policy, scheduled.orders)
                made = self._made = _Made(now, policy, found)
            return made


def _estimate(wait: Range, at: Instant, now: Instant) -> Estimate:
    middle, low, high = (
        Instant(max(now, at + each)) for each in (wait.middle, wait.low, wait.high)
    )
    return Estimate(middle, low, high)

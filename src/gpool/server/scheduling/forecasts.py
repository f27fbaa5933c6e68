"""Start-time forecasts of waiting tasks, from observed run times and arrivals. In memory; learnt again after a restart.

Simulated schedules are computed in a thread on a snapshot, one at a time, and reused for some seconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, Instant, Shape, Span
from gpool.core.scheduler.order.orders import Policy
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
from gpool.server.scheduling.policy import ActivePolicy
from gpool.server.store.operations.operators import rules as rules_operations
from gpool.server.store.protocol import Store

REUSED_FOR = Span(5 * SECOND)
"""Age up to which simulated schedules are reused."""

_KEPT_ARRIVALS = 400
_MAX_OPEN = 10_000  # forecasts whose outcome is awaited


class PlannerInputs(Protocol):
    state: State
    policy: ActivePolicy


@dataclass(frozen=True, slots=True)
class Estimate:
    """Forecast start, and the range that holds the start of eight tasks in ten."""

    at: Instant
    first: Instant
    last: Instant


@dataclass(frozen=True, slots=True)
class _Simulated:
    at: Instant
    policy: Policy
    courses: Sequence[SimulatedSchedule]


class Forecasts:
    def __init__(self, store: Store) -> None:
        self.times = RunTimes()
        self._store = store
        self._arrived: deque[tuple[Instant, Shape]] = deque(maxlen=_KEPT_ARRIVALS)
        self._calibration = Calibration()
        self._open: dict[TaskId, StatedForecast] = {}
        self._simulated: _Simulated | None = None
        self._simulating = asyncio.Lock()

    # ---- observations

    def arrived(self, shape: Shape, at: Instant) -> None:
        """Record one arrival per submission: the tasks of a batch arrive together."""
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
        """Drop forecasts of cancelled tasks: they have no outcome."""
        for task in tasks:
            self._open.pop(task, None)

    # ---- forecasts

    async def question(self, inputs: PlannerInputs, now: Instant) -> ForecastQuestion:
        since = await self._store.read(rules_operations.held_since())
        snapshot = take(inputs.state)
        return ForecastQuestion(snapshot, now, self.times.copy(), since, tuple(self._arrived))

    async def estimate(
        self, inputs: PlannerInputs, now: Instant, task: TaskId, ahead: int
    ) -> Estimate | None:
        if self.times.is_empty:
            return None
        simulated = await self._schedules(inputs, now)
        found = waits(simulated.courses, task, ahead, simulated.at)
        if found is None:
            return None
        told = self._calibration.told(found[len(found) // 2], simulated.at)
        if len(self._open) < _MAX_OPEN:
            self._open.setdefault(task, told)
        return _estimate(told.range, simulated.at, now)

    async def _schedules(self, inputs: PlannerInputs, now: Instant) -> _Simulated:
        async with self._simulating:
            known, policy = self._simulated, inputs.policy.current
            if known is None or known.policy != policy or not 0 <= now - known.at < REUSED_FOR:
                asked = await self.question(inputs, now)
                found = await asyncio.to_thread(courses, asked, policy, inputs.policy.orders)
                known = self._simulated = _Simulated(now, policy, found)
            return known


def _estimate(wait: Range, at: Instant, now: Instant) -> Estimate:
    middle, low, high = (
        Instant(max(now, at + each)) for each in (wait.middle, wait.low, wait.high)
    )
    return Estimate(middle, low, high)

"""Forecast of start times: the planner runs forward on a copy of the state, with sampled run times.

In a **simulated schedule** running tasks end after a sampled time, and tasks arrive as they did lately, until every
waiting task has started or the bounds are reached. Samples depend on task and schedule only, so two policies can be
compared over the same futures. Time steps grow with the simulated time (`_GRAIN`): a distant future costs hardly more.

The range is the middle 80 % of the ratios of actual to forecast wait among recent similar forecasts: conformal
prediction, which assumes only that errors continue alike. Two corrections: forecasts of one moment err together, so only
a few of each count (`_OF_A_MOMENT`); and pools change, so each end of the range widens with every start outside and
narrows with every start inside: in the long run 10 % fall outside on each side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from math import ceil, exp, log

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import SECOND, Instant, Shape, Span
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.orders import Order, Policy
from gpool.core.scheduler.passes.plan import plan
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.predict.run_times import Kind, RunTimes, own_kind
from gpool.core.scheduler.state.events import (
    Placement,
    QueuedTask,
    TasksPreempted,
    TasksQueued,
    TasksReleased,
)
from gpool.core.scheduler.state.snapshot import Snapshot

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


COURSES = 5
_GRAIN = 0.03  # of the simulated time: ends this close share one pass
_MAX_ARRIVALS = 2000  # per schedule
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_HORIZON = Span(30 * 24 * 3600 * 1_000_000)
_NEW_IDS = 1 << 61  # above the ids of real tasks


@dataclass(frozen=True, slots=True)
class Bounds:
    passes: int = 200
    horizon: Span = _HORIZON


@dataclass(frozen=True, slots=True)
class ForecastQuestion:
    """Known facts at `now`, and the tasks asked about. `arrivals`: recent ones with times, oldest first; empty: no more come."""

    snapshot: Snapshot
    now: Instant
    times: RunTimes
    since: Mapping[TaskId, Instant] = field(default_factory=dict)  # when held tasks were leased
    arrivals: Sequence[tuple[Instant, Shape]] = ()
    wanted: frozenset[TaskId] | None = (
        None  # the schedule ends when these have started; None: all waiting tasks
    )


@dataclass(frozen=True, slots=True)
class SimulatedSchedule:
    """Start times up to `until`. `is_over`: nothing would change afterwards."""

    starts: Mapping[TaskId, Instant]
    until: Instant
    is_over: bool


def courses(
    asked: ForecastQuestion,
    policy: Policy,
    orders: Mapping[str, Order] = ORDERS,
    count: int = COURSES,
    bounds: Bounds = Bounds(),  # noqa: B008 - frozen
) -> list[SimulatedSchedule]:
    return [_Run(asked, policy, orders, number / count).run(bounds) for number in range(count)]


def waits(
    found: Sequence[SimulatedSchedule], task: TaskId, ahead: int, now: Instant
) -> list[Span] | None:
    """The task's wait in each schedule, ascending, extrapolated where a schedule ended first; None: it never starts."""
    told: list[Span] = []
    for course in found:
        at = course.starts.get(task)
        if at is not None:
            told.append(Span(at - now))
            continue
        if course.is_over or not course.starts:
            continue
        passed = course.until - now
        told.append(Span(max(passed, passed * (ahead + 1) // len(course.starts))))
    return sorted(told) if 2 * len(told) > len(found) else None


class _Run:
    def __init__(
        self, asked: ForecastQuestion, policy: Policy, orders: Mapping[str, Order], offset: float
    ) -> None:
        self.asked, self.offset = asked, offset
        self.rules = policy, orders
        self.state, self.index = asked.snapshot.state(), PlacementIndex()
        self.targets = {task.id for event in asked.snapshot.queued for task in event.tasks}
        self.awaited = self.targets.copy() if asked.wanted is None else self.targets & asked.wanted
        self.ending: dict[TaskId, int] = {}  # entries of `ends` not in here were preempted
        self.left: dict[TaskId, Span] = {}  # remaining work of preempted tasks
        self.ends: list[tuple[int, TaskId]] = []
        self.lines: dict[tuple[NodeId, int], deque[tuple[TaskId, Shape]]] = {}
        self.line_of: dict[TaskId, tuple[NodeId, int]] = {}
        self.oldest: dict[Kind, Span] = {}  # age of the oldest running task of a kind
        self.starts: dict[TaskId, Instant] = {}
        self.coming = deque(self._arrivals())

    def run(self, bounds: Bounds) -> SimulatedSchedule:
        now = first = self.asked.now
        preempts_at = first + self.rules[0].restart  # when all that waits now may stop others
        self._take_up()
        is_over = False
        for _ in range(bounds.passes):
            self._plan(now)
            if not self.awaited:
                break
            upcoming = min(
                self.ends[0][0] if self.ends else bounds.horizon + first,
                self.coming[0][0] if self.coming else bounds.horizon + first,
                preempts_at
                if self.state.stoppable and now < preempts_at
                else bounds.horizon + first,
            )
            if upcoming - first >= bounds.horizon:
                is_over = not self.ends and not self.coming
                break
            upcoming = max(now, upcoming)
            now = self._advance(now, Instant(upcoming + round(_GRAIN * (upcoming - first))))
        return SimulatedSchedule(self.starts, now, is_over)

    def _take_up(self) -> None:
        """The first lease of a queue runs; the others follow."""
        now, since = self.asked.now, self.asked.since
        for held in self.asked.snapshot.held:
            key = (held.node, held.allocation.number)
            tasks = sorted((since.get(task, now), task) for task in held.tasks)
            self.lines[key] = deque((task, held.shape) for _, task in tasks)
            for _, task in tasks:
                self.line_of[task] = key
            at, task = tasks[0]
            kind, age = own_kind(held.shape), Span(max(0, now - at))
            self.oldest[kind] = max(age, self.oldest.get(kind, age))
            left = self._left(task, held.shape, age)
            self._end(task, now + left)

    def _plan(self, now: Instant) -> None:
        decided = plan(self.state, self.index, now, *self.rules)
        for place in decided.places:
            tasks = tuple(grant.task for grant in place.grants)
            self.state.fold(place.leased(tasks, now))
            self._stand(place, now)
        for each in decided.preemptions:
            self._stop(each.task, each.beneficiary, now)
        if decided.preemptions:
            for place in plan(self.state, self.index, now, *self.rules).places:
                tasks = tuple(grant.task for grant in place.grants)
                self.state.fold(place.leased(tasks, now))
                self._stand(place, now)

    def _stop(self, task: TaskId, gainer: TaskId, now: Instant) -> None:
        held, ends_at = self.state.held.get(task), self.ending.pop(task, None)
        if held is None or ends_at is None or task not in held.leases:
            return
        lease, shape = held.leases[task], held.shape
        attained = self.state.attained(task, now)
        self.left[task] = Span(max(1, ends_at - now))
        line = self.lines.pop(self.line_of.pop(task))
        self.state.fold(TasksPreempted((task,), (gainer,)))
        self.state.fold(TasksReleased((task,)))
        back = QueuedTask(task, lease.epoch, lease.queued_at, attained)
        self.state.fold(TasksQueued(shape, (back,)))
        line.popleft()
        if line:
            self.lines[held.node, held.allocation.number] = line
            self._start_first(line, now)

    def _stand(self, place: Placement, now: Instant) -> None:
        key = (place.node, place.allocation.number)
        line = self.lines.setdefault(key, deque())
        idle = not line
        for grant in place.grants:
            line.append((grant.task, place.shape))
            self.line_of[grant.task] = key
        if idle:
            self._start_first(line, now)

    def _start_first(self, line: deque[tuple[TaskId, Shape]], now: Instant) -> None:
        task, shape = line[0]
        if task in self.targets:
            self.starts.setdefault(task, now)
            self.awaited.discard(task)
        left = self.left.pop(task, None)
        self._end(task, now + (self._left(task, shape, Span(0)) if left is None else left))

    def _end(self, task: TaskId, at: int) -> None:
        self.ending[task] = at
        heappush(self.ends, (at, task))

    def _advance(self, before: Instant, until: Instant) -> Instant:
        """Events of a step happen at its midpoint, so that times are unbiased on average."""
        ended: list[TaskId] = []
        total = happened = 0
        while self.ends and self.ends[0][0] <= until:
            at, task = heappop(self.ends)
            if self.ending.get(task) != at:
                continue  # it was preempted
            del self.ending[task]
            total, happened = total + at, happened + 1
            key = self.line_of.pop(task)
            line = self.lines[key]
            line.popleft()
            ended.append(task)
            if line:
                self._start_first(line, Instant(at))
            else:
                del self.lines[key]
        if ended:
            self.state.fold(TasksReleased(tuple(ended)))
        while self.coming and self.coming[0][0] <= until:
            at, task, shape = self.coming.popleft()
            total, happened = total + at, happened + 1
            self.state.fold(TasksQueued(shape, (QueuedTask(task, 0, Instant(at)),)))
        return Instant(max(before, total // happened)) if happened else until

    def _arrivals(self) -> list[tuple[int, TaskId, Shape]]:
        """The same tasks and intervals, with another offset in each schedule."""
        lately = self.asked.arrivals
        if len(lately) < 2:
            return []
        first, now = lately[0][0], self.asked.now
        span = max(now - first, 1)
        shift = round(self.offset * span)
        once = sorted(((at - first + shift) % span, place) for place, (at, _) in enumerate(lately))
        laps = max(1, _MAX_ARRIVALS // len(lately))
        again = ((lap, after, place) for lap in range(laps) for after, place in once)
        return [
            (now + lap * span + after, TaskId(_NEW_IDS + number), lately[place][1])
            for number, (lap, after, place) in enumerate(islice(again, _MAX_ARRIVALS))
        ]

    def _left(self, task: TaskId, shape: Shape, age: Span) -> Span:
        oldest = self.oldest.get(own_kind(shape), 0)
        return self.asked.times.left(shape, age, (_fraction(task) + self.offset) % 1.0, oldest)


def _fraction(number: int) -> float:
    mixed = (number * _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 32)) * 0xBF58476D1CE4E5B9) & _MASK
    return ((mixed ^ (mixed >> 29)) >> 11) / (1 << 53)

"""Simulations with the planner: replay of arrivals, and the dry run of another policy over the same futures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, Instant, Node, Shape, Span
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.limits import gpus_of
from gpool.core.scheduler.order.orders import Order, Policy
from gpool.core.scheduler.passes.plan import plan
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.predict.forecast import (
    Bounds,
    ForecastQuestion,
    SimulatedSchedule,
    courses,
)
from gpool.core.scheduler.state.events import (
    NodeChanged,
    Placement,
    QueuedTask,
    TasksLeased,
    TasksQueued,
    TasksReleased,
    TasksWithdrawn,
)
from gpool.core.scheduler.state.state import State


class Replay:
    """Idle pool. A task that does not start at once is withdrawn."""

    def __init__(self, nodes: Iterable[Node], policy: Policy) -> None:
        self.state = State()
        self._index = PlacementIndex()
        self.policy = policy
        self.capacity_milli = 0
        self.taken_milli = 0
        self._last = 0
        self._held: dict[TaskId, int] = {}
        for node in nodes:
            self.state.fold(NodeChanged(node))
            lent = [gpu for gpu in node.offer.gpus if gpu.index not in node.gpus_withheld]
            self.capacity_milli += 1000 * len(lent)

    def arrive(self, shape: Shape, now: Instant) -> Placement | None:
        self._last += 1
        task = TaskId(self._last)
        self.state.fold(TasksQueued(shape, (QueuedTask(task, 0, now),)))
        places = plan(self.state, self._index, now, self.policy).places
        if not places:
            self.state.fold(TasksWithdrawn((task,)))
            return None
        place = places[0]
        self.state.fold(TasksLeased(place.node, place.allocation, place.shape, (task,)))
        self._held[task] = gpus_of(place.allocation)
        self.taken_milli += self._held[task]
        return place

    def end(self, task: TaskId) -> None:
        self.taken_milli -= self._held.pop(task)
        self.state.fold(TasksReleased((task,)))

    @property
    def unallocated_pct(self) -> float:
        return 100 * (1 - self.taken_milli / self.capacity_milli) if self.capacity_milli else 0.0


COURSES = 3
_SAME = 0.05  # of the wait, plus a second: smaller differences are ignored
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Shift:
    """None: beyond the simulated time."""

    task: TaskId
    before: Span | None
    after: Span | None


@dataclass(frozen=True, slots=True)
class DryRun:
    """`moved`: the largest changes first."""

    waiting: int
    sooner: int
    later: int
    same: int
    moved: tuple[Shift, ...]

    @property
    def sentence(self) -> str:
        if not self.waiting:
            return "Nothing waits: it would change nothing now."
        if not self.sooner and not self.later:
            return f"Of {_tasks(self.waiting)} that wait none would start sooner or later."
        return (
            f"Would start {_tasks(self.sooner)} sooner, {self.later} later; "
            f"{self.same} of {self.waiting} as now."
        )


def compare(
    asked: ForecastQuestion,
    before: Policy,
    after: Policy,
    orders: Mapping[str, Order] = ORDERS,
    bounds: Bounds = Bounds(),  # noqa: B008 - frozen
) -> DryRun:
    """Raises `Invalid` if a policy names an unknown order."""
    old = courses(asked, before, orders, COURSES, bounds)
    new = courses(asked, after, orders, COURSES, bounds)
    shifts = [
        Shift(task.id, _middle(old, task.id, asked.now), _middle(new, task.id, asked.now))
        for event in asked.snapshot.queued
        for task in event.tasks
    ]
    sooner = [shift for shift in shifts if _is_less(shift.after, shift.before)]
    later = [shift for shift in shifts if _is_less(shift.before, shift.after)]
    same = len(shifts) - len(sooner) - len(later)
    moved = sorted(sooner + later, key=_size, reverse=True)[:_SHOWN]
    return DryRun(len(shifts), len(sooner), len(later), same, tuple(moved))


def _middle(found: list[SimulatedSchedule], task: TaskId, now: Instant) -> Span | None:
    at = sorted(course.starts[task] for course in found if task in course.starts)
    return Span(at[len(found) // 2] - now) if len(at) > len(found) // 2 else None


def _is_less(one: Span | None, other: Span | None) -> bool:
    if one is None:
        return False
    return other is None or other - one > max(SECOND, _SAME * other)


def _size(shift: Shift) -> int:
    if shift.before is None or shift.after is None:
        return 1 << 62
    return abs(shift.before - shift.after)


def _tasks(count: int) -> str:
    return f"{count} task{'' if count == 1 else 's'}"

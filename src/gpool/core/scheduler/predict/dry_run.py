"""What another policy would do to those who wait: both are run forward over the same futures and compared. Nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, Instant, Span
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.orders import Order, Policy
from gpool.core.scheduler.predict.forecast import Bounds, Course, Question, courses

COURSES = 3
_SAME = 0.05  # of the wait, and a second: nearer than this is no difference
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Shift:
    """How long a task would wait, by the present policy and by the other; None: longer than was looked at."""

    task: TaskId
    before: Span | None
    after: Span | None


@dataclass(frozen=True, slots=True)
class DryRun:
    """Tasks that wait, by what would become of them; `moved` are those it changes most, first the greatest."""

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
    asked: Question,
    before: Policy,
    after: Policy,
    orders: Mapping[str, Order] = ORDERS,
    bounds: Bounds = Bounds(),  # noqa: B008 - frozen
) -> DryRun:
    """`Invalid` when a policy names an order that is not in the table."""
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


def _middle(found: list[Course], task: TaskId, now: Instant) -> Span | None:
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

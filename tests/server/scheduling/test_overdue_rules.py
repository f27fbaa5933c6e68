"""Overdue leases by age: lease queues, and a time of day that jumps."""

from __future__ import annotations

from gpool.core.ids import NodeId, SpecId, TaskId
from gpool.core.model import SECOND, Instant, Span, TaskKind, TaskSpec
from gpool.server.scheduling.overdue import LeaseClock, LeaseLimits, ReleaseLimits
from gpool.server.store.operations.leases.overdue import LeaseAge

DAY = 86_400 * SECOND


def at(seconds: float) -> Instant:
    return Instant(round(seconds * SECOND))


def test_a_clock_set_forward_ages_no_lease() -> None:
    clock = LeaseClock()
    clock.advance(at(100), at(0))
    started = at(110)
    clock.advance(Instant(at(160) + DAY), at(60))
    assert clock.age(started) == 50 * SECOND
    clock.advance(Instant(at(220) + DAY), at(120))
    assert clock.age(started) == 110 * SECOND
    clock.advance(Instant(at(221) + DAY), at(121))
    later = Instant(at(201) + DAY)
    assert clock.age(later) == 20 * SECOND, "a lease that started after the step"


def test_no_age_is_longer_than_the_server_runs() -> None:
    clock = LeaseClock()
    clock.advance(Instant(at(100) + DAY), at(0))  # set while no server ran
    clock.advance(Instant(at(130) + DAY), at(30))
    assert clock.age(at(90)) == 30 * SECOND


def test_a_clock_set_back_makes_leases_end_late_not_early() -> None:
    clock = LeaseClock()
    clock.advance(at(1000), at(0))
    clock.advance(at(460), at(60))
    assert clock.age(at(990)) < 0


SPEC = TaskSpec(TaskKind.COMMAND, "true", timeout=Span(100 * SECOND), grace=Span(0))


def lease(task: int, started_s: float | None = None) -> LeaseAge:
    started = None if started_s is None else at(started_s)
    return LeaseAge(TaskId(task), 1, NodeId(7), SpecId(1), 0, at(0), started, None, None)


class Limits:
    def __init__(self) -> None:
        self._limits = LeaseLimits(ReleaseLimits(Span(10 * SECOND), Span(10 * SECOND)))

    def overdue(self, seconds: float, *leases: LeaseAge) -> list[int]:
        now = at(seconds)
        return [each.task for each in self._limits.overdue(leases, lambda _: SPEC, now, now)]


def test_leases_queued_behind_a_long_one_are_left_alone() -> None:
    limits = Limits()
    assert limits.overdue(0, lease(1, 0), lease(2)) == []
    assert limits.overdue(110, lease(1, 0), lease(2)) == []
    assert limits.overdue(111, lease(1, 0), lease(2)) == [1]
    assert limits.overdue(200, lease(2)) == [], "its time counts from when it is the first"
    assert limits.overdue(310, lease(2)) == []
    assert limits.overdue(311, lease(2)) == [2]


def test_a_lease_behind_one_that_never_starts_is_not_blamed_for_it() -> None:
    limits = Limits()
    assert limits.overdue(0, lease(1), lease(2)) == []
    assert limits.overdue(111, lease(1), lease(2)) == [1]

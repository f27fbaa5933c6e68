"""The server's time of day is set forward by an hour while everything runs: nobody loses a lease by it, and no law is broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpool.server.scheduling.scheduler import Scheduler
from gpool.testing.world.parts import Parts
from gpool.testing.world.world import run

SECOND = 1_000_000
HOUR = 3600 * SECOND
STEPS = ((3 * SECOND, HOUR), (9 * SECOND, HOUR), (15 * SECOND, HOUR))
SEEDS = range(8)


class ByTheTimeOfDay(Scheduler):
    """Counts lease times as it was done before."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **{**named, "passed": None})


def test_a_clock_set_forward_never_breaks_a_promise() -> None:
    for seed in SEEDS:
        outcome = run(seed, steps=STEPS)
        assert outcome.violation is None, (seed, outcome.violation)


def test_lease_times_by_the_time_of_day_would_break_one() -> None:
    """The control."""
    parts = replace(Parts(), scheduler=ByTheTimeOfDay)
    assert any(run(seed, parts, steps=STEPS).violation is not None for seed in range(20))

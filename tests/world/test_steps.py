"""The server's time of day is set forward by an hour while everything runs: nobody loses a lease by it, and no law is broken."""

from __future__ import annotations

from dataclasses import replace

from gpool.core.model import Span
from gpool.server.metrics import Metrics
from gpool.server.nodes.registry import NodeRegistry
from gpool.testing.world.host import Parts
from gpool.testing.world.world import run

SECOND = 1_000_000
HOUR = 3600 * SECOND
STEPS = ((3 * SECOND, HOUR), (9 * SECOND, HOUR), (15 * SECOND, HOUR))
SEEDS = range(8)


class ByTheTimeOfDay(NodeRegistry):
    """Counts lease time by the time of day."""

    def __init__(self, metrics: Metrics, ttl: Span, _: object) -> None:
        super().__init__(metrics, ttl)


def test_a_clock_set_forward_never_breaks_a_promise() -> None:
    for seed in SEEDS:
        outcome = run(seed, steps=STEPS)
        assert outcome.violation is None, (seed, outcome.violation)


def test_lease_times_by_the_time_of_day_would_break_one() -> None:
    """The control."""
    parts = replace(Parts(), registry=ByTheTimeOfDay)
    assert any(run(seed, parts, steps=STEPS).violation is not None for seed in range(20))

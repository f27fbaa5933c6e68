"""Malicious nodes among honest ones: no invariant is violated, and every task ends within the stated bounds."""

from __future__ import annotations

from gpool.testing.world.liars import LiarPlan
from gpool.testing.world.world import run

SEEDS = range(12)


def test_tasks_end_although_a_node_keeps_them_and_reports_for_others() -> None:
    kept = 0
    for seed in SEEDS:
        outcome = run(seed, liars=LiarPlan(1))
        assert outcome.violation is None, (seed, outcome.violation)
        kept += outcome.kept
    assert kept > len(SEEDS), "the liars got leases"


def test_without_the_server_s_limit_they_would_not() -> None:
    """Control."""
    patient = LiarPlan(1, limit_s=1e6)
    found = [run(seed, liars=patient).violation or "" for seed in range(3)]
    assert any("not ended in time" in violation for violation in found)

"""Hundreds of small pools, each with its own bad luck: no promise is ever broken."""

from __future__ import annotations

import os

import pytest

from gpool.testing.world import run

CHUNK = 20
SEEDS = 10_000 if os.environ.get("GPOOL_SOAK") else 200


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_seed_breaks_a_promise(first: int) -> None:
    broken = {}
    for seed in range(first, first + CHUNK):
        outcome = run(seed)
        if outcome.violation:
            broken[seed] = outcome.violation
    assert not broken, (
        f"tell the story with: python -m gpool.testing.world --trace --seed {min(broken)}"
    )


def test_the_runs_are_not_idle() -> None:
    """Fourteen seeds: the statements that charge storage changed the simulated times, so ten formed fewer gangs."""
    outcomes = [run(seed) for seed in range(14)]
    assert sum(outcome.accepted for outcome in outcomes) > 200
    assert sum(outcome.attempts for outcome in outcomes) > sum(o.accepted for o in outcomes) - 50
    assert sum(outcome.crashes for outcome in outcomes) > 0
    assert sum(outcome.resumed for outcome in outcomes) > 10
    assert sum(outcome.gangs for outcome in outcomes) > 4

"""A small version of `bench.verification`, and controls that its checks fail where they must."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.verification import (
    Run,
    collusion_failures,
    liar_failures,
    probation_turns,
    spot_failures,
    spot_run,
)
from bench.verification_pool import HONEST, STRATEGIES
from bench.verification_quorum import LiarCounts, colluders, independent_liars

NODES, TASKS, SEED = 100, 400, 16


def test_independent_liars_are_refused() -> None:
    for verify in (2, 3):
        counts = independent_liars(100, 0.2, verify, 2_000, SEED)
        assert counts.wrong > 1_000
        assert liar_failures(verify, counts) == []


def test_colluders_stay_within_the_bound() -> None:
    for verify in (2, 3):
        for share in (0.05, 0.1):
            found = colluders(1_000, share, verify, 2_000, SEED)
            assert found.wrong > 0.5 * found.bound
            assert collusion_failures(verify, share, found) == []


@pytest.mark.parametrize("name", [HONEST.name, *(one.name for one in STRATEGIES)])
def test_no_strategy_earns_as_much_as_honest_work(name: str) -> None:
    figures = spot_run(Run("spot", name, NODES, TASKS, SEED))
    assert figures.punished == 0
    assert figures.stood <= 0.001
    if name != HONEST.name:
        assert max(figures.gross, figures.net) < 1


def test_boinc_accepts_most_lies_of_a_patient_liar() -> None:
    """The control: with BOINC's rule the same simulator lets a patient liar earn more than honest nodes."""
    figures = spot_run(Run("BOINC", "patient (50)", NODES, TASKS, SEED))
    assert figures.kept > 0.8
    assert figures.net > 1
    assert figures.stood > 0.001


def test_a_run_repeats_with_its_seed() -> None:
    run = Run("spot", "1 in 10", 50, 200, SEED)
    assert spot_run(run) == spot_run(run)
    assert spot_run(run) != spot_run(run._replace(seed=17))


def test_limits_that_are_exceeded_are_named() -> None:
    figures = spot_run(Run("spot", "always", 50, 50, SEED))
    bad = replace(figures, tasks=1_000, extra=0.051, stood=0.002, net=1.0, punished=0.01)
    assert len(spot_failures(bad)) == 4
    assert liar_failures(2, LiarCounts(tasks=10, siblings=20, wrong=10, stood=1, failed=0))
    found = colluders(100, 0.1, 2, 100, SEED)
    assert collusion_failures(2, 0.1, replace(found, wrong=0.0111))
    assert probation_turns() == 245

"""A pool that charges, under faults: no invariant of money is violated, and each planted bug of charging is found."""

from __future__ import annotations

import pytest

from gpool.testing.world.money import ChargingFlaw, run_priced

SEEDS = range(12)
FOUND = {
    ChargingFlaw.AGENTS_TIMES: 0,
    ChargingFlaw.CHARGED_TWICE: 0,
    ChargingFlaw.NOTHING_RESERVED: 0,
    ChargingFlaw.MAX_COST_OF_ONE_ATTEMPT: 4,
}
"""Seeds that found them first."""


def test_money_is_sound_under_faults() -> None:
    for seed in SEEDS:
        outcome = run_priced(seed)
        assert outcome.violation is None, (seed, outcome.violation)


def test_money_is_sound_beside_a_lying_node() -> None:
    for seed in SEEDS[:6]:
        outcome = run_priced(seed, liars=1)
        assert outcome.violation is None, (seed, outcome.violation)


@pytest.mark.parametrize("flaw", list(ChargingFlaw))
def test_a_planted_bug_of_charging_is_found(flaw: ChargingFlaw) -> None:
    liars = int(flaw is ChargingFlaw.AGENTS_TIMES)
    violation = run_priced(FOUND[flaw], flaw, liars=liars).violation
    assert violation is not None, f"{flaw} went unnoticed"
    assert "money:" in violation


def test_a_seed_gives_the_same_run() -> None:
    assert run_priced(3).digest == run_priced(3).digest

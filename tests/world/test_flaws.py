"""The World is only worth its seconds if it finds what is known to be wrong."""

from __future__ import annotations

import pytest

from gpool.testing.world import Flaw, parts_with, run

SEEDS = 200


@pytest.mark.parametrize("flaw", list(Flaw))
def test_a_planted_bug_is_found(flaw: Flaw) -> None:
    parts = parts_with(flaw)
    assert any(run(seed, parts).violation for seed in range(SEEDS)), f"{flaw} went unnoticed"

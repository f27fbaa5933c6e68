"""Processes are killed and frozen; nothing acknowledged is lost and nothing counts twice.

The faults themselves are in `bench.faults`, which repeats them often (`make soak`).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator

import pytest
from bench.faults import freeze_agent, kill_agent, kill_server, stale_reports

from tests.tools.processes import SHORT_LEASE, Pool

SOAKS = bool(os.environ.get("GPOOL_SOAK"))
# The promised seconds are held by bench.faults, on a machine of its own; a runner of CI has neighbours.
READY_S, SURVIVES_S, ELSEWHERE_S = 60.0, 60.0, 180.0


@pytest.fixture(scope="module")
def pool(
    tmp_path_factory: pytest.TempPathFactory, require: Callable[[str], None]
) -> Iterator[Pool]:
    """Whoever falls silent for four seconds is lost: less, and one that waits for its turn would be too."""
    require("bubblewrap")
    pool = Pool(tmp_path_factory.mktemp("pool"), {**SHORT_LEASE, "GPOOL_SERVER_TTL_S": "4"})
    try:
        pool.start()
        yield pool
    finally:
        pool.stop()


@pytest.mark.slow
@pytest.mark.alone
def test_a_killed_server_loses_nothing_and_accepts_nothing_twice(pool: Pool) -> None:
    tasks, kills = (5000, 20) if SOAKS else (1500, 3)
    outcome = kill_server(pool, tasks, kills)
    assert (outcome.lost, outcome.twice) == (0, 0)
    assert statistics.median(outcome.ready_s) <= READY_S


@pytest.mark.slow
@pytest.mark.alone
def test_a_killed_agents_task_dies_with_it_and_finishes_elsewhere(pool: Pool) -> None:
    outcome = kill_agent(pool, mark=f"gpool-mark-{os.getpid()}")
    assert outcome.survived_s <= SURVIVES_S
    assert outcome.moved_to == "second"
    assert outcome.finished_elsewhere_s <= ELSEWHERE_S


@pytest.mark.slow
def test_a_frozen_agents_late_reports_are_refused(pool: Pool) -> None:
    for _ in range(100 if SOAKS else 1):
        outcome = freeze_agent(pool)
        assert outcome.late_reports_refused, outcome


@pytest.mark.parametrize("same_node", [False, True], ids=["another_nodes", "its_own_new"])
def test_every_late_beat_log_artifact_and_result_is_refused_after(
    server_alone: Pool, same_node: bool
) -> None:
    """100 of 100, and as a control: the same under the current lease is taken, 100 of 100."""
    outcome = stale_reports(server_alone, 25, same_node=same_node)
    assert outcome.holds, outcome

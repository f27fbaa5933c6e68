"""A small version of `bench.overload`: a real server at five times its capacity, and slow connections beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.overload import RECOVERED_WITHIN_S, measure, measure_slow, served

pytestmark = [pytest.mark.alone, pytest.mark.host_speed]
SLOWER = 4
"""Times by which the host may be slower than the one of the figures."""


def test_a_server_at_five_times_its_capacity_refuses_in_order_and_recovers(tmp_path: Path) -> None:
    with served(tmp_path) as (pool, target):
        found = measure(pool, target, 5.0, 5.0)
    assert (found.failed, found.lost_nodes) == (0, 0)
    assert found.heartbeats > 0
    refused = found.refused
    assert refused["listing"] > 0
    # Explanations have a limit of their own, so they may be refused as often as listings.
    early = min(refused["listing"], refused["explain"])
    assert early >= refused["submission"] >= refused["status"]
    assert found.p99_of_all_ms <= SLOWER * 1000
    assert found.peak_mib - found.memory_mib <= 200
    assert found.recovery_s <= RECOVERED_WITHIN_S


def test_slow_connections_do_not_delay_others(tmp_path: Path) -> None:
    with served(tmp_path) as (_, target):
        found = measure_slow(target, 3.0, 120)
    assert found.p99_during_ms <= SLOWER * found.p99_before_ms + 50

"""The measurement of the whole way works, and what it submits is leased, ended and gone: a small pool, a few seconds."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import uvloop

from bench.end_to_end import Nodes, Stand, measure_all, pool_of


@pytest.mark.slow
def test_everything_a_crowd_of_nodes_is_given_is_ended_and_counted() -> None:
    options = argparse.Namespace(
        nodes=25,
        seconds=2.0,
        rate=60.0,
        hold=0.2,
        pods=Path("made-up.csv"),
        order="fair_share",
        postgres=False,
        keyed=True,
        phases=["flood:singles", "paced:mixed"],
    )
    with pool_of(options) as (pool, prepared):
        nodes = Nodes(Stand(pool.address, prepared.members, options.hold))
        try:
            nodes.ready()
            found = uvloop.run(measure_all(options, pool, prepared, nodes))
        finally:
            nodes.stop()
    assert all(each.leases_per_s > 0 and each.p50_ms > 0 for each in found)
    assert all(each.decisions_per_s > 0 for each in found)

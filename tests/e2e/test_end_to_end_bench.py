"""The measurement of the whole way works, and what it submits is leased, ended and gone: a small pool, a few seconds."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import uvloop
from bench.end_to_end import Figures, Nodes, Stand, measure_all, pool_of


def measured(seconds: float) -> list[Figures]:
    options = argparse.Namespace(
        nodes=25,
        seconds=seconds,
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
            return uvloop.run(measure_all(options, pool, prepared, nodes))
        finally:
            nodes.stop()


def is_whole(found: list[Figures]) -> bool:
    """Something of everything was seen in the time there was."""
    return all(
        each.leases_per_s > 0 and each.p50_ms > 0 and each.decisions_per_s > 0 for each in found
    )


@pytest.mark.slow
def test_everything_a_crowd_of_nodes_is_given_is_ended_and_counted() -> None:
    """A machine that is busy with other things is given more time."""
    assert any(is_whole(measured(seconds)) for seconds in (6.0, 15.0, 60.0))

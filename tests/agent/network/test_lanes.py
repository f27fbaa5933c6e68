"""Lanes of a root agent, on a host of the test's own: what they cost the host, what is left, what holds when things change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpool.agent.network.firewall_rules import BURST_BYTES
from tests.hostile.lanes_world import HOST

STAGE = Path(__file__).with_name("lanes_stage.py")
RATE_BYTES_PER_S = 1_000_000
PACKET_BYTES = 1028


@pytest.fixture
def stage(require: Callable[[str], None]) -> Callable[[str], dict[str, Any]]:
    """Runs one case of the stage."""
    require("network namespaces")
    require("nftables")

    def run(case: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(STAGE), case],
            capture_output=True,
            text=True,
            timeout=850,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 0, done.stderr[-4000:]
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])  # after log lines
        return told

    return run


Stage = Callable[[str], dict[str, Any]]


def test_what_a_killed_agent_leaves_is_swept_by_the_next(stage: Stage) -> None:
    told = stage("killed")
    assert told["left"] == {"table": True, "forwarding": "1"}  # the control: there was something
    assert told["changed"] == []


def test_an_agent_that_goes_never_closes_anothers_way(stage: Stage) -> None:
    told = stage("two")
    assert told["both"] == [True, True]
    assert told["after one went"] == [True, "1"]
    assert told["after both went"] == ["", "0"]


def test_a_table_that_drops_forwarded_packets_is_passed_and_left_as_it_was(stage: Stage) -> None:
    assert stage("dropper") == {"with our rules in it": True, "without": False, "left": False}


def test_a_lane_never_sends_faster_than_its_rate(stage: Stage) -> None:
    told = stage("rate")

    def bound(took_s: float) -> float:
        return BURST_BYTES + RATE_BYTES_PER_S * (1 + took_s) * 1.05

    assert all(packets * PACKET_BYTES <= bound(took_s) for packets, took_s in told["capped"])
    # a kernel that is kept busy by others drops packets before anybody has looked at them: but not each time
    assert max(packets for packets, _ in told["capped"]) > 500
    # the control: without the cap it is faster than that
    assert any(packets * PACKET_BYTES > bound(took_s) for packets, took_s in told["free"])


def test_a_lane_never_has_more_flows_than_allowed(stage: Stage) -> None:
    assert stage("flows") == {"5": 5, "100": 20}


def test_the_host_does_not_become_a_router_for_others(stage: Stage) -> None:
    told = stage("router")
    assert told["before"] is told["with lanes"] is False
    assert told["forwarding without our table"] is True


def test_what_the_host_is_now_is_refused_not_what_it_was(stage: Stage) -> None:
    assert stage("moved") == {"before": True, "after": False, "gone again": True}


def test_another_source_address_or_options_never_leave_a_lane(stage: Stage) -> None:
    told = stage("spoofed")
    assert told["as itself"][0] == 1
    assert told["as another"] == told["with options"] == [0, 1]


def test_a_list_may_name_the_host_and_ends_with_its_lane(stage: Stage) -> None:
    told = stage("listed")
    assert told == {"the host": True, "public": False, "an empty list": False, "left": False}


def test_the_probe_really_opens_a_lane_and_leaves_nothing(stage: Stage) -> None:
    told = stage("probed")
    assert told["said"][0] is True
    assert told["changed"] == []
    assert told["no way out"] == [False, "egress is not offered: this host has no IPv4 route out"]


def test_the_probe_for_gangs_opens_a_lane_leaves_nothing_and_needs_no_way_out(stage: Stage) -> None:
    told = stage("probed_for_gangs")
    offered = [True, "gangs are offered: a gang network was opened and closed"]
    assert told["said"] == told["no way out"] == offered
    assert told["changed"] == []
    works, why = told["no interface"]
    assert not works
    assert "gangs are not offered" in why


def test_a_machine_s_address_is_the_one_that_leads_to_the_server(stage: Stage) -> None:
    told = stage("probed_for_gangs")
    assert told["seen from the server"] == told["the server is here"] == HOST
    assert told["the server is here, no way out"] == "127.0.0.1"


def test_lanes_that_are_called_off_half_way_leave_nothing(stage: Stage) -> None:
    assert stage("called_off") == {"interfaces": [], "permitted": False, "changed": []}

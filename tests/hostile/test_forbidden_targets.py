"""What a task with egress must not reach: tried from lanes of a root agent and of one without privileges, and without the
defence, where each must be reached. Everything happens in network namespaces of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpool.agent.network.dns_resolver import BURST
from gpool.agent.network.host import nft_program
from gpool.agent.network.policy import EgressPolicy
from gpool.agent.network.sandbox_network import MOST_REPORTED
from tests.hostile.lanes_world import OF_HOST, ON_HOST, OUTSIDE, OUTSIDE_6, PUBLIC, SPOKEN
from tests.hostile.reaching import PORT
from tests.tools import components
from tests.tools.engines import shared_engine

STAGE = Path(__file__).with_name("forbidden_stage.py")
BOTH = ["tcp", "udp"]
COLUMNS = [
    *("root bubblewrap", "rootless bubblewrap", "root docker", "root podman"),
    *(pytest.param(f"{mode} microvm", marks=pytest.mark.slow) for mode in ("root", "rootless")),
]
COMPONENTS = {"microvm": "qemu"}
HEARD_ONLY = set(SPOKEN)  # nobody answers a multicast: that it arrived is what counts


@pytest.fixture(scope="module", params=COLUMNS)
def told(request: pytest.FixtureRequest, require: Callable[[str], None]) -> dict[str, Any]:
    """What happened on the stage."""
    mode, kind = request.param.split()
    require("network namespaces")
    require(COMPONENTS.get(kind, kind))
    for name in ("nft", "slirp4netns"):
        if nft_program(name) is None:
            if components.must_be_there("network namespaces"):
                pytest.fail(f"{name} must be there in CI")
            pytest.skip(f"there is no {name} here")
    if kind in ("docker", "podman"):
        shared_engine(kind)  # found by the stage
    done = subprocess.run(
        [sys.executable, str(STAGE), mode, kind],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_no_forbidden_target_answers_a_lane(told: dict[str, Any]) -> None:
    assert {name for name, how in told["from a lane"].items() if how} == set()
    assert told["host's loopback from a lane"] == {"the host's loopback": []}


def test_no_forbidden_target_answers_a_sandbox_in_a_lane(told: dict[str, Any]) -> None:
    assert {name for name, how in told["from a sandbox"].items() if how} == set()


def test_no_packet_for_a_forbidden_target_leaves(told: dict[str, Any]) -> None:
    assert told["packets out"] == []


def test_the_firewall_counts_what_it_refuses(told: dict[str, Any]) -> None:
    outside = len(OUTSIDE) + 1
    assert told["refused packets"] >= 2 * 2 * outside  # by TCP and UDP, from a lane and a sandbox


def test_every_forbidden_target_is_there_for_the_host(told: dict[str, Any]) -> None:
    """The control for all of them."""
    answering = {*OUTSIDE, *OUTSIDE_6, *ON_HOST, "public"}
    found = told["from the host"]
    assert {name: sorted(found[name]) for name in answering} == dict.fromkeys(answering, BOTH)
    heard = {address.partition("%")[0] for address in SPOKEN.values()}
    assert heard <= set(told["spoken from the host"])


def test_without_its_filter_a_lane_reaches_them(told: dict[str, Any]) -> None:
    """The control for the firewall: the same lane, nobody judging. IPv6 it has not, whatever the filter."""
    found = told["from a lane without filter"]
    near = set(found) - set(OUTSIDE) - set(OF_HOST)
    assert near  # another lane and the lane's own gateway, or the host's loopback by slirp4netns
    assert {name for name, how in found.items() if sorted(how) != BOTH} == set()
    assert set(told["packets out without filter"]) == set(OUTSIDE.values())
    refused = set(told["from a lane"]) - set(OUTSIDE_6) - HEARD_ONLY
    assert refused == set(found)


def test_a_public_machine_answers_a_lane_and_a_sandbox(told: dict[str, Any]) -> None:
    assert sorted(told["public"]["public"]) == BOTH
    assert sorted(told["public from a sandbox"]["public"]) == BOTH


def test_a_name_that_turns_inwards_resolves_to_nothing(told: dict[str, Any]) -> None:
    """Rebinding: the first answer is public, the next are not. The control asks the same server without our resolver."""
    assert told["names"]["rebind.example"] == [[PUBLIC], [], [], []]
    assert told["names without resolver"] == [
        [PUBLIC],
        ["127.0.0.1"],
        ["169.254.169.254"],
        ["192.168.77.20"],
    ]


def test_names_give_reachable_addresses_and_nothing_else(told: dict[str, Any]) -> None:
    names = told["names"]
    assert names["good.example"] == names["good.example by tcp"] == [PUBLIC]
    assert names["mixed.example"] == [PUBLIC]
    assert names["inside.example"] == names["text"] == []
    assert told["tally"]["stripped"] == 5


def test_a_sandbox_asks_its_lane_for_names(told: dict[str, Any]) -> None:
    """By its own library, as a program does."""
    assert told["names from a sandbox"] == {"good.example": [PUBLIC], "inside.example": []}


def test_a_task_is_told_which_names_and_destinations_were_refused(told: dict[str, Any]) -> None:
    """The control: the public machine and name, tried beside them, have no line."""
    private = OUTSIDE["a private machine behind the gateway"]
    assert sorted(line.partition(";")[0] for line in told["lines"]) == [
        f"tcp to {private} port {PORT} was refused",
        "the name 'inside.example' has no address that may be reached, or does not exist",
        f"udp to {private} port {PORT} was refused",
    ]
    assert len(told["many lines"]) == MOST_REPORTED + 1
    assert told["many lines"][-1].endswith("further lookups or connections were refused")


def test_a_flood_of_names_is_cut_off(told: dict[str, Any]) -> None:
    rate = EgressPolicy().queries_per_s
    assert told["tally"]["refused"] >= 50
    assert told["tally"]["forwarded"] <= rate * (BURST + told["names"]["took_s"])


def test_a_listed_lane_reaches_its_list_alone(told: dict[str, Any]) -> None:
    found = {name: sorted(how) for name, how in told["from a listed lane"].items() if how}
    assert found == {"a private machine behind the gateway": BOTH}


def test_the_host_is_as_it_was(told: dict[str, Any]) -> None:
    assert told["changed"] == []

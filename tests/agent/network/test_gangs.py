"""Gang lanes on a site of the test's own, of root agents and of ones without privileges: members reach each other and
nothing else, nobody gets in between, and nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from gpool.agent.network.gang.relay_client import UID
from tests.tools.engines import shared_engine

STAGE = Path(__file__).with_name("gang_stage.py")
BOTH = ["tcp", "udp"]
NOBODY_THERE = "nobody's rank"

Stage = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def stage(require: Callable[[str], None]) -> Stage:
    """Runs one case of the stage, once."""
    require("network namespaces")
    require("bubblewrap")
    require("nftables")
    require("slirp4netns")

    @cache
    def run(*words: str) -> dict[str, Any]:
        if words[0] == "wireguard":
            require("wireguard")
        done = subprocess.run(
            [sys.executable, str(STAGE), *words],
            capture_output=True,
            text=True,
            timeout=850,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 0, done.stderr[-4000:]
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return told

    return run


kinds = pytest.mark.parametrize("mode", ["root", "rootless", "direct", "wireguard"])
"""Relays of a root agent and of a rootless one, then the other links."""


@pytest.mark.parametrize(
    ("mode", "mtu"),
    [
        ("root", "1500"),
        ("rootless", "1500"),
        ("root", "1280"),
        ("root", "9000"),
        ("direct", "1500"),
        ("wireguard", "1500"),
        pytest.param("direct", "9000", marks=pytest.mark.slow),
        pytest.param("wireguard", "1280", marks=pytest.mark.slow),
    ],
)
def test_members_talk_by_any_port_and_nothing_is_left(stage: Stage, mode: str, mtu: str) -> None:
    told = stage(mode, "talk", mtu)
    for one, other in permutations(range(3), 2):
        assert told[f"{one} to {other}"] == [True, True, True, True]
    assert told["names"] == ["['10.211.0.1']", "['10.211.0.2']", "['10.211.0.3']", "[]"]
    assert told["refused"] == [0, 0, 0]
    assert told["left"] == [[], [], []]


@kinds
def test_a_member_never_reaches_anything_but_its_peers(stage: Stage, mode: str) -> None:
    told = stage(mode, "forbidden")
    assert {name for name, how in told["from the lane"].items() if how} == set()
    there = {name for name, how in told["from the host"].items() if how == BOTH}
    assert there == set(told["from the lane"]) - {NOBODY_THERE}  # the control
    assert told["multicast"] == {"all": []}
    assert told["strays"] is True
    interfaces, with_ipv6 = told["interfaces"]
    assert {"lo", "gang0"} <= set(interfaces)
    assert not {"eth0", "tap0"} & set(interfaces)
    assert "gang0" not in with_ipv6
    assert told["left"] == [[], []]


@kinds
def test_gangs_on_the_same_hosts_never_meet(stage: Stage, mode: str) -> None:
    told = stage(mode, "forbidden")
    assert told["its own peer"] is True  # the same address and port, in the gang it belongs to
    assert told["the other gang's"] == "ConnectionRefusedError"


@kinds
def test_a_sandbox_in_the_lane_reaches_its_peer_and_never_the_interface(
    stage: Stage, mode: str
) -> None:
    found = dict(stage(mode, "forbidden")["sandboxed"])
    assert found.pop("its peer") == 32
    assert len(found) == 4
    assert set(found.values()) <= {"FileNotFoundError", "PermissionError", "OSError"}


@pytest.mark.parametrize(
    ("engine", "mode"),
    [
        ("docker", "root"),
        ("podman", "root"),
        pytest.param("docker", "direct", marks=pytest.mark.slow),
        pytest.param("docker", "wireguard", marks=pytest.mark.slow),
    ],
)
def test_a_container_in_the_lane_reaches_its_peer_and_nothing_else(
    stage: Stage, require: Callable[[str], None], engine: str, mode: str
) -> None:
    require(engine)
    shared_engine(engine)  # found by the stage
    told = stage(mode, f"in_{engine}")
    found = told["sandboxed"]
    assert found.pop("its peer") == 32
    assert len(found) == 4
    assert set(found.values()) <= {"FileNotFoundError", "PermissionError", "OSError"}
    assert {name for name, how in told["from the container"].items() if how} == set()
    there = {name for name, how in told["from the host"].items() if how == BOTH}
    assert there == set(told["from the container"]) - {NOBODY_THERE}  # the control
    interfaces, routes, hostname = told["listed"]
    assert {"lo", "gang0"} <= set(interfaces)
    assert not {"eth0", "tap0", "br0", "up0"} & set(interfaces)
    assert routes == ["gang0"]
    assert hostname == "sandbox"
    assert "ConnectionRefusedError" in told["the other gang's"]
    assert told["left"] == [[], []]


@kinds
def test_a_gang_with_egress_has_both_and_no_more(stage: Stage, mode: str) -> None:
    told = stage(mode, "egress")
    assert told["peer"] is True
    assert sorted(told["public"]) == BOTH
    assert told["others"] == {"its host": [], "gateway": [], "metadata": []}
    assert told["left"] == [[], []]


@pytest.mark.parametrize("mode", ["root", "direct", "wireguard"])
def test_a_host_without_the_secret_never_becomes_a_member(stage: Stage, mode: str) -> None:
    told = stage(mode, "impostor")
    assert told["wrong"] == ["TimeoutError", mode == "root"]  # others do not count them
    assert told["right"][0] is True  # the control


@pytest.mark.parametrize("mode", ["root", "wireguard"])
def test_nothing_an_outsider_says_gets_in(stage: Stage, mode: str) -> None:
    told = stage(mode, "outsider")
    assert told["said"] == ["true words"]
    assert told["in the open"] is False
    assert told["then came"] == [["last"], ["last"]]
    assert told["refused"] == ([2, 4] if mode == "root" else [0, 0])  # all of it


def test_a_direct_link_lets_no_forged_frame_out_or_in(stage: Stage) -> None:
    """From a member of another gang on the same hosts with rights no task has, and from somebody on the link."""
    told = stage("direct", "spoofs")
    assert set(map(tuple, told["filtered"].values())) == {("OSError",)}
    assert told["refused"] == told["sent"] == 7
    assert told["came"] == told["came later"] == [["last"], ["last"]]
    assert told["from the link"] == [1]
    assert told["without filters"] == ["1", "2", "6"]  # the control


def test_without_the_defences_it_would(stage: Stage) -> None:
    """The control: repeated, changed and sent back, each arrives where nothing is looked at."""
    told = stage("weak", "outsider")
    assert told["said"] == ["true words"]
    assert set(told["then came"][0]) >= {"true words", "true wordr", "last"}
    assert "true words" in told["then came"][1]


@kinds
def test_members_on_one_host_have_ports_of_their_own(stage: Stage, mode: str) -> None:
    told = stage(mode, "together")
    assert told["tcp"] is told["udp"] is True
    assert "NetworkUnavailable" in told["a port that is taken"]
    if mode != "direct":  # there the MAC address is taken
        assert "47101" in told["a port that is taken"]
    assert told["left"] == [[], []]


@pytest.mark.parametrize("mode", ["root", "wireguard"])
def test_noise_in_a_member_s_name_never_ends_a_conversation(stage: Stage, mode: str) -> None:
    told = stage(mode, "flood")
    assert told["sent"] is True
    assert told["refused"] > 100 or mode == "wireguard"  # there was some
    assert told["left"] == [[], []]


@kinds
def test_members_find_each_other_again_after_a_restart(stage: Stage, mode: str) -> None:
    told = stage(mode, "restarts")
    assert told["before"] is told["its lane"] is True
    assert told["the other's relay"] == told["its own relay"]
    assert told["its own relay"] == ([] if mode == "direct" else [True, True])
    assert told["left"] == [[], []]


NET_ADMIN = f"{1 << 12:016x}"


@pytest.mark.parametrize(("mode", "held"), [("root", "0" * 16), ("wireguard", NET_ADMIN)])
def test_a_root_agent_s_relay_has_no_rights_and_wireguard_one(
    stage: Stage, mode: str, held: str
) -> None:
    rights = stage(mode, "killed")["rights"]
    assert rights["Uid"] == rights["Gid"] == [str(UID)]
    assert rights["Groups"] == []
    assert rights["CapEff"] == rights["CapPrm"] == [held]
    assert rights["NoNewPrivs"] == ["1"]
    if mode == "wireguard":
        return
    assert rights["limits"] == ["0"]
    assert rights["environment"] == ""


@kinds
def test_nothing_outlives_a_killed_agent(stage: Stage, mode: str) -> None:
    told = stage(mode, "killed")
    carriers = 0 if mode == "direct" else 1
    assert told["relays"] == [carriers, carriers]
    assert told["children"] >= carriers
    assert told["outlived"] == []
    assert told["left"] == []


def test_a_start_removes_what_a_killed_agent_left_and_nothing_of_others(stage: Stage) -> None:
    told = stage("wireguard", "swept")
    assert told["left"] == []
    assert told["alive"] == [False, True]
    assert told["alive then"] == [False, False]

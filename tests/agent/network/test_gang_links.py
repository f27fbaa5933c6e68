"""Texts from which a gang's links are made: filters, keys and sizes. Pure."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.network.gang.member_filter import mac_of, mac_text, ruleset
from gpool.agent.network.gang.wireguard import (
    LEAST_MTU,
    MOST_MTU,
    configuration,
    inner_mtu,
    private_key,
)
from gpool.agent.network.policy import Gang
from gpool.agent.runtime.devices import device_arguments, rdma_nodes
from gpool.core.gangs import address_of, variables

PEERS = tuple((f"192.0.2.{n}", 47100 + n) for n in range(1, 4))
GANG, OTHER = Gang(1, PEERS, b"a" * 32), Gang(1, PEERS, b"b" * 32)


def test_members_and_gangs_have_addresses_and_keys_of_their_own() -> None:
    both = [(gang, rank) for gang in (GANG, OTHER) for rank in range(3)]
    macs = [mac_of(gang, rank) for gang, rank in both]
    assert len(set(macs)) == len({private_key(gang, rank) for gang, rank in both}) == 6
    assert all(mac[0] & 0b11 == 0b10 for mac in macs)  # locally administered, of one interface


def test_a_filter_names_the_peers_and_nobody_else() -> None:
    macs = [mac_of(GANG, rank) for rank in range(3)]
    text = ruleset(GANG, macs)
    for rank in (0, 2):
        assert f"{mac_text(macs[rank])} . {address_of(rank)}" in text
    (elements,) = (line for line in text.splitlines() if "elements" in line)
    assert str(address_of(1)) not in elements
    assert "ether" not in ruleset(GANG)
    assert "elements" not in ruleset(Gang(0, PEERS[:1], b"a" * 32))


def test_every_peer_has_its_own_key_and_address_in_the_configuration_of_wireguard() -> None:
    text = configuration(GANG, 47102, PEERS)
    interface, *peers = (configparser.ConfigParser() for _ in range(3))
    for parser, part in zip((interface, *peers), text.split("[Peer]"), strict=True):
        parser.read_string(part if "[Interface]" in part else f"[Peer]\n{part}")
    assert interface["Interface"]["ListenPort"] == "47102"
    assert [one["Peer"]["AllowedIPs"] for one in peers] == ["10.211.0.1/32", "10.211.0.3/32"]
    assert [one["Peer"]["Endpoint"] for one in peers] == ["192.0.2.1:47101", "192.0.2.3:47103"]
    assert len({one["Peer"]["PublicKey"] for one in peers}) == 2


@given(st.integers(LEAST_MTU, 9000), st.booleans())
def test_packets_of_wireguard_always_fill_whole_packets_of_the_path(
    path_mtu: int, in_kernel: bool
) -> None:
    found = inner_mtu(path_mtu, in_kernel=in_kernel)
    assert 0 < found <= MOST_MTU
    outer = found + 40  # UDP, WireGuard
    assert outer % (path_mtu - 20) == 0
    assert (outer == path_mtu - 20) or not in_kernel


def test_a_link_that_an_older_agent_does_not_know_is_refused() -> None:
    assert "update" in Gang(0, PEERS, b"a" * 32, link="of a newer server").wrong
    assert Gang(0, PEERS, b"a" * 32, link="direct").wrong == ""


def test_rdma_devices_are_mounted_and_their_absence_is_said_to_nccl(tmp_path: Path) -> None:
    (tmp_path / "uverbs0").symlink_to("/dev/null")
    (tmp_path / "by-path").mkdir()
    assert rdma_nodes(tmp_path) == (str(tmp_path / "uverbs0"),)
    assert rdma_nodes(tmp_path / "none") == ()
    words = device_arguments({}, (), rdma_nodes(tmp_path))
    assert words[:3] == ["--dev-bind", *[str(tmp_path / "uverbs0")] * 2]
    assert device_arguments({}, ()) == []
    assert ("NCCL_IB_DISABLE", "1") in variables(0, 2)
    assert "NCCL_IB_DISABLE" not in dict(variables(0, 2, rdma=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_two_members_derive_the_same_keys(rank: int) -> None:
    own = Gang(rank, PEERS[:2], b"a" * 32)
    other = Gang(1 - rank, PEERS[:2], b"a" * 32)
    assert private_key(own, 0) == private_key(other, 0)
    assert mac_of(own, rank) == mac_of(other, rank)

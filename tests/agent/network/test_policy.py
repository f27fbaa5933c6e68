"""The owner's words are understood exactly or refused with the reason."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.network.policy import (
    ANY_PORT,
    BadPolicy,
    Egress,
    EgressPolicy,
    Gang,
    HostFacts,
    Only,
    Target,
    is_refused,
    parse_policy,
    parse_rate,
    parse_target,
    reaches,
)
from gpool.agent.network.sandbox_network import NetworkUnavailable, refuse_wrong
from gpool.core.gangs import MAX_NODES, address_of

NETWORKS = st.builds(
    lambda address, prefix: IPv4Network((int(address), prefix), strict=False),
    st.ip_addresses(v=4),
    st.integers(0, 32),
)
PORTS = st.tuples(st.integers(1, 65535), st.integers(1, 65535)).map(lambda p: (min(p), max(p)))
TARGETS = st.builds(Target, NETWORKS, PORTS | st.just(ANY_PORT))
POLICIES = st.builds(
    EgressPolicy, st.lists(TARGETS, max_size=3).map(tuple), st.lists(TARGETS, max_size=3).map(tuple)
)


@given(TARGETS)
def test_a_target_written_out_is_read_back_the_same(target: Target) -> None:
    assert parse_target(str(target)) == target


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1.2.3", "1.2.3"),
        ("1.2.3.4/24", "host bits"),
        ("1.2.3.4:0", "1 to 65535"),
        ("1.2.3.4:9-8", "smaller one first"),
        ("1.2.3.4:http", "not a port"),
        ("example.com", "does not appear"),
        ("2606:4700::1111", "no IPv6"),
        ("[2606:4700::1111]:443", "no IPv6"),
        ("", "does not appear"),
    ],
)
def test_a_target_that_is_none_is_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(BadPolicy, match=says):
        parse_target(text)


def test_a_whole_policy_is_read() -> None:
    text = """
    # what my line can bear
    allow 1.2.3.0/24:443
    allow 5.6.7.8
    deny *:22
    rate 10MB/s
    flows 64
    queries 5/s
    """
    assert parse_policy(text) == EgressPolicy(
        allow=(Target(IPv4Network("1.2.3.0/24"), (443, 443)), Target(IPv4Network("5.6.7.8/32"))),
        deny=(Target(IPv4Network("0.0.0.0/0"), (22, 22)),),
        rate_bytes_per_s=10_000_000,
        flows=64,
        queries_per_s=5,
    )


def test_nothing_said_is_the_default_and_the_default_denies_mail() -> None:
    assert parse_policy("") == EgressPolicy()
    nobody = HostFacts()
    mail = IPv4Address("11.22.33.44")
    assert not reaches(EgressPolicy(), nobody, Egress(), mail, 25)
    assert reaches(parse_policy("deny nothing"), nobody, Egress(), mail, 25)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("permit 1.2.3.4", "line 1: 'permit' is none of"),
        ("\nallow 192.168.0.0/16", "line 2: .*no policy opens private"),
        ("rate fast", "line 1: 'fast' is not a rate"),
        ("rate 1B/s", "between 16 kB/s and 4 GB/s"),
        ("flows 0", "not a number between"),
    ],
)
def test_a_line_that_means_nothing_is_named(text: str, says: str) -> None:
    with pytest.raises(BadPolicy, match=says):
        parse_policy(text)


def test_rates_have_units() -> None:
    assert parse_rate("500 kB/s") == 500_000
    assert parse_rate("1.5MB/s") == 1_500_000
    assert parse_rate("none") is None


@given(POLICIES, st.ip_addresses(), st.integers(1, 65535))
def test_no_policy_ever_opens_an_address_inside(
    policy: EgressPolicy, address: IPv4Address | IPv6Address, port: int
) -> None:
    if is_refused(address):
        assert not reaches(policy, HostFacts(), Egress(), address, port)


@given(st.lists(NETWORKS, max_size=3), st.ip_addresses(v=4), st.integers(1, 65535))
def test_the_host_and_its_neighbours_are_never_reached(
    networks: list[IPv4Network], address: IPv4Address, port: int
) -> None:
    if any(address in network for network in networks):
        host = HostFacts(tuple(networks))
        assert not reaches(EgressPolicy(), host, Egress(), address, port)


@pytest.mark.parametrize(
    "text", ["127.0.0.1:3141", "169.254.169.254", "0.0.0.0/0", "224.0.0.1", "168.63.129.16:80"]
)
def test_loopback_and_metadata_can_never_be_listed(text: str) -> None:
    with pytest.raises(BadPolicy, match="can't be listed"):
        Only((parse_target(text),))


def test_a_listed_lane_reaches_a_private_target_and_no_other_port_of_it() -> None:
    only = Only((parse_target("10.9.9.9:443"),))
    at = IPv4Address("10.9.9.9")
    assert reaches(EgressPolicy(), HostFacts(), only, at, 443)
    assert not reaches(EgressPolicy(), HostFacts(), only, at, 80)
    assert not reaches(EgressPolicy(), HostFacts(), only, IPv4Address("11.22.33.44"), 443)


def gang(size: int, rank: int = 0, *, egress: bool = False, secret: bytes = bytes(32)) -> Gang:
    return Gang(rank, (("192.168.1.1", 47100),) * size, secret, egress)


@given(
    POLICIES,
    st.ip_addresses() | st.integers(0, 9).map(address_of),
    st.integers(1, 65535),
    st.integers(1, 8),
    st.booleans(),
)
def test_a_gang_never_reaches_more_than_its_members_and_what_egress_would(
    policy: EgressPolicy,
    address: IPv4Address | IPv6Address,
    port: int,
    size: int,
    egress: bool,
) -> None:
    member = address in {address_of(rank) for rank in range(size)}
    outside = egress and reaches(policy, HostFacts(), Egress(), address, port)
    wants = gang(size, egress=egress)
    assert reaches(policy, HostFacts(), wants, address, port) == (member or outside)


@pytest.mark.parametrize(
    ("size", "rank", "secret"),
    [(0, 0, bytes(32)), (2, 2, bytes(32)), (2, -1, bytes(32)), (MAX_NODES + 1, 0, bytes(32)), (2, 0, b"short")],
)  # fmt: skip
def test_a_gang_that_makes_no_sense_has_no_lane(size: int, rank: int, secret: bytes) -> None:
    with pytest.raises(NetworkUnavailable):
        refuse_wrong(gang(size, rank, secret=secret))
    refuse_wrong(gang(2, 1))


def test_a_gang_s_secret_is_never_shown() -> None:
    assert "secret" not in repr(gang(2, secret=b"secret words of theirs"))

"""No address inside is ever taken for one outside; `ipaddress` is the other opinion."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.network.policy import REFUSED_V4, REFUSED_V6, is_refused

INSIDE = [
    "0.0.0.0",
    "10.0.0.1",
    "100.64.0.1",
    "100.100.100.200",
    "127.0.0.1",
    "168.63.129.16",
    "169.254.169.254",
    "172.31.255.255",
    "192.0.0.192",
    "192.168.1.1",
    "224.0.0.251",
    "255.255.255.255",
    "::",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "::8.8.8.8",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "2001::1",
    "2002:a9fe:a9fe::1",
    "fd00:ec2::254",
    "fe80::1",
    "fec0::1",
    "ff02::fb",
]
ANY = st.ip_addresses()
NEAR = st.sampled_from([*REFUSED_V4, *REFUSED_V6]).flatmap(
    lambda network: st.integers(-2, 2).map(
        lambda off: type(network.network_address)(
            (int(network.network_address if off < 0 else network.broadcast_address) + off)
            % 2**network.max_prefixlen
        )
    )
)


@pytest.mark.parametrize("text", INSIDE)
def test_a_known_address_inside_is_refused(text: str) -> None:
    address = IPv6Address(text) if ":" in text else IPv4Address(text)
    assert is_refused(address)


@pytest.mark.parametrize("text", ["1.1.1.1", "11.22.33.44", "2606:4700::1111", "2a00:77::44"])
def test_a_public_address_is_not_refused(text: str) -> None:
    address = IPv6Address(text) if ":" in text else IPv4Address(text)
    assert not is_refused(address)


@given(ANY | NEAR)
def test_what_python_calls_not_global_is_always_refused(address: IPv4Address | IPv6Address) -> None:
    if not address.is_global or address.is_multicast or address.is_reserved:
        assert is_refused(address)


@given(st.ip_addresses(v=4))
def test_an_address_that_carries_an_ipv4_one_is_never_reachable(inner: IPv4Address) -> None:
    number = int(inner)
    carriers = [
        (0xFFFF << 32) | number,
        number,
        (0x0064FF9B << 96) | number,
        (0x2002 << 112) | (number << 80),
        (0x20010000 << 96) | (number ^ 0xFFFFFFFF),
    ]
    assert all(is_refused(IPv6Address(carrier)) for carrier in carriers)


@given(st.ip_addresses(v=4))
def test_little_of_the_public_internet_is_refused(address: IPv4Address) -> None:
    """The other way round: we refuse what Python calls global in three places only, each for a reason."""
    extra = [IPv4Network(n) for n in ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24")]
    if is_refused(address) and address.is_global and not address.is_multicast:
        assert any(address in network for network in extra)

"""What is read from the host is what is refused, lent and left alone."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Interface, IPv4Network

from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.network import host
from gpool.agent.network.host import Route
from gpool.core import gangs

LISTING = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t014DA8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t004DA8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
tun0\t0009090A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
*\t0000000B\t00000000\t0200\t0\t0\t0\t000000FF\t0\t0\t0
"""
ROUTES = (
    Route("eth0", IPv4Network("0.0.0.0/0"), IPv4Address("192.168.77.1")),
    Route("eth0", IPv4Network("192.168.77.0/24"), None),
    Route("tun0", IPv4Network("10.9.9.0/24"), None),
)


def test_the_kernels_listing_is_read() -> None:
    assert host.parse_routes(LISTING) == ROUTES


def test_the_host_its_gateway_and_its_public_neighbours_are_facts() -> None:
    routes = (Route("eth0", IPv4Network("0.0.0.0/0"), IPv4Address("80.1.2.1")),)
    own = (IPv4Interface("80.1.2.9/24"), IPv4Interface("127.0.0.1/8"))
    networks = host.facts(routes, own).networks
    for text in ("80.1.2.1/32", "80.1.2.9/32", "80.1.2.0/24"):
        assert IPv4Network(text) in networks


def test_a_route_for_everything_is_no_neighbourhood() -> None:
    routes = (
        Route("ppp0", IPv4Network("0.0.0.0/0"), None),
        Route("ppp0", IPv4Network("0.0.0.0/1"), None),
    )
    assert host.facts(routes, ()).networks == ()


def test_the_way_to_a_listed_target_is_an_uplink_too() -> None:
    assert host.uplinks(ROUTES) == ("eth0",)
    assert host.uplinks(ROUTES, [IPv4Network("10.9.9.9/32")]) == ("eth0", "tun0")


def test_a_pool_never_overlaps_what_the_host_has_routes_to() -> None:
    first = host.free_pool("abcde", ROUTES)
    assert first == host.free_pool("abcde", ROUTES)
    taken = (*ROUTES, Route("x0", first, None))
    assert not host.free_pool("abcde", taken).overlaps(first)
    everything = (Route("vpn0", IPv4Network("10.0.0.0/8"), None),)
    assert not host.free_pool("abcde", everything).overlaps(IPv4Network("10.0.0.0/8"))


@given(st.text("0123456789abcdef", min_size=5, max_size=5))
def test_a_pool_never_overlaps_the_network_of_gangs(tag: str) -> None:
    assert not host.free_pool(tag, ROUTES).overlaps(gangs.NETWORK)

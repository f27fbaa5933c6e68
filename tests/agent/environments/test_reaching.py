"""Which servers a build may reach."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address, IPv4Network

import httpx2
import pytest

from gpool.agent.environments import Indexes, find_uv
from gpool.agent.environments.egress_targets import (
    IndexLanes,
    Place,
    built_in_index,
    place_of,
    places_on,
)
from gpool.agent.network.policy import Only, Target, Wants
from gpool.agent.network.sandbox_network import NetworkUnavailable
from gpool.agent.runtime.protocol import SandboxFailed, SandboxNetwork

LANE = SandboxNetwork((), "127.0.0.53")
ADDRESSES = {
    "index.test": ("203.0.113.1",),
    "files.test": ("203.0.113.2", "203.0.113.3"),
    "inner.test": ("127.0.0.1",),
}


class Opened:
    lane = LANE

    def __init__(self, networks: Networks) -> None:
        self._networks = networks

    async def __aenter__(self) -> Opened:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._networks.closed += 1


class Networks:
    """Opens nothing; keeps what was wanted."""

    def __init__(self) -> None:
        self.wanted: list[Wants] = []
        self.closed = 0
        self.broken = False

    async def open(self, wants: Wants) -> Opened:
        if self.broken:
            raise NetworkUnavailable("no namespaces here")
        self.wanted.append(wants)
        return Opened(self)


class Web:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.away = False

    async def __call__(self, address: str) -> tuple[str, str]:
        self.asked.append(address)
        if self.away:
            raise httpx2.ConnectError("away")
        return address, '<a href="https://files.test/x.whl">x</a> <a href="../y.whl">y</a>'


async def choose(hosts: Iterable[tuple[str, int]]) -> Only:
    """As the network's own door does, without asking a name server."""
    given = [(host, port, [IPv4Address(one) for one in ADDRESSES[host]]) for host, port in hosts]
    targets = [Target(IPv4Network(a), (port, port)) for _, port, found in given for a in found]
    return Only(tuple(sorted(targets)), {host: tuple(found) for host, _, found in given})


def lanes(networks: Networks, web: Web, built_in: str = "https://index.test/simple") -> IndexLanes:
    return IndexLanes(networks, built_in, web, choose)  # type: ignore[arg-type]


def opened(lanes: IndexLanes, indexes: Indexes) -> SandboxNetwork | None:
    async def story() -> SandboxNetwork | None:
        async with lanes.open(indexes) as lane:
            return lane

    return asyncio.run(story())


def test_a_lane_reaches_the_index_and_where_its_pages_send_for_files() -> None:
    networks, web = Networks(), Web()
    door = lanes(networks, web)
    assert opened(door, Indexes()) is LANE
    assert networks.wanted == [
        Only(
            tuple(
                Target(IPv4Network(address), (443, 443))
                for address in ("203.0.113.1", "203.0.113.2", "203.0.113.3")
            ),
            {
                "files.test": (IPv4Address("203.0.113.2"), IPv4Address("203.0.113.3")),
                "index.test": (IPv4Address("203.0.113.1"),),
            },
        )
    ]
    assert networks.closed == 1
    assert web.asked == ["https://index.test/simple/pip/"]
    opened(door, Indexes())
    assert len(web.asked) == 1


def test_packages_on_the_disk_need_no_lane() -> None:
    networks, web = Networks(), Web()
    assert opened(lanes(networks, web), Indexes("file:///pages", find_links=("/wheels",))) is None
    assert opened(lanes(networks, web), Indexes(no_index=True)) is None
    assert networks.wanted == []
    assert web.asked == []


def test_an_index_that_does_not_answer_is_asked_again_for_the_next_build() -> None:
    networks, web = Networks(), Web()
    web.away = True
    door = lanes(networks, web)
    opened(door, Indexes())
    web.away = False
    opened(door, Indexes())
    assert [len(wanted.names) for wanted in networks.wanted if isinstance(wanted, Only)] == [1, 2]


def test_an_index_on_the_machines_own_loopback_is_the_nodes_fault() -> None:
    with pytest.raises(SandboxFailed, match="cannot be reached from a sandbox"):
        opened(lanes(Networks(), Web()), Indexes("http://inner.test:3141/simple"))


def test_a_node_that_opens_no_lane_says_so() -> None:
    networks = Networks()
    networks.broken = True
    with pytest.raises(SandboxFailed, match="no namespaces here"):
        opened(lanes(networks, Web()), Indexes())


def test_a_proxy_may_be_reached() -> None:
    networks = Networks()
    indexes = Indexes(proxies=(("HTTPS_PROXY", "http://proxy.test:3128"), ("NO_PROXY", "a.test")))
    places = asyncio.run(lanes(networks, Web()).places(indexes))
    assert Place("proxy.test", 3128) in places


def test_links_are_read_relative_to_their_page() -> None:
    text = """<a HREF='//a.test:8443/x'>x</a><a href="y">y</a><a href="mailto:z">z</a>"""
    assert places_on("https://index.test/simple/pip/", text) == {
        Place("a.test", 8443),
        Place("index.test", 443),
    }
    assert place_of("file:///x") is None
    assert place_of("http://a.test/") == Place("a.test", 80)


def test_uv_says_which_index_it_asks_by_itself(require: Callable[[str], None]) -> None:
    require("uv")
    uv = find_uv()
    assert uv is not None
    assert built_in_index(uv).startswith("https://")

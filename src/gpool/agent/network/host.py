"""The host's addresses, gateways, neighbours and uplinks. Read-only."""

from __future__ import annotations

import hashlib
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from gpool.agent.network.policy import HostFacts
from gpool.core import gangs

ROUTES = Path("/proc/net/route")
RTF_UP, RTF_GATEWAY, RTF_REJECT = 1, 2, 0x200
SHORTEST_NEIGHBOURHOOD = 8  # a shorter prefix is a provider's "everywhere", not a LAN
POOLS = tuple(
    IPv4Network(text)
    for text in ("10.128.0.0/9", "172.16.0.0/12", "100.64.0.0/10", "198.18.0.0/15")
)
POOL_PREFIX = 20


@dataclass(frozen=True, slots=True)
class Route:
    interface: str
    network: IPv4Network
    gateway: IPv4Address | None


def parse_routes(text: str) -> tuple[Route, ...]:
    """Parse /proc/net/route: hexadecimal in native byte order."""
    found = []
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) < 8:
            continue
        flags = int(words[3], 16)
        if not flags & RTF_UP or flags & RTF_REJECT:
            continue
        network = IPv4Network((_address(words[1]), str(_address(words[7]))))
        gateway = _address(words[2]) if flags & RTF_GATEWAY else None
        found.append(Route(words[0], network, gateway))
    return tuple(found)


def _address(text: str) -> IPv4Address:
    return IPv4Address(struct.pack("=I", int(text, 16)))


def routes(path: Path = ROUTES) -> tuple[Route, ...]:
    try:
        return parse_routes(path.read_text())
    except OSError:
        return ()


def own_addresses(without: str = "") -> tuple[IPv4Interface, ...]:
    """Addresses of all interfaces, up or down, except names starting with `without` (sandbox networks)."""
    return tuple(
        IPv4Interface((each.address, each.netmask or 32))
        for name, several in psutil.net_if_addrs().items()
        for each in several
        if each.family == socket.AF_INET and not (without and name.startswith(without))
    )


def facts(found: Sequence[Route], own: Sequence[IPv4Interface]) -> HostFacts:
    """This host, its gateways and links: public ones are in no fixed list."""
    networks = {IPv4Network(each.ip) for each in own}
    networks |= {each.network for each in own if each.network.prefixlen >= SHORTEST_NEIGHBOURHOOD}
    for route in found:
        if route.gateway is not None:
            networks.add(IPv4Network(route.gateway))
        elif route.network.prefixlen >= SHORTEST_NEIGHBOURHOOD:
            networks.add(route.network)
    return HostFacts(tuple(sorted(networks)))


def uplinks(found: Sequence[Route], towards: Iterable[IPv4Network] = ()) -> tuple[str, ...]:
    names = {route.interface for route in found if route.network.prefixlen == 0}
    for network in towards:
        ways = [r for r in found if r.network.supernet_of(network)]
        longest = max((r.network.prefixlen for r in ways), default=0)
        names |= {r.interface for r in ways if r.network.prefixlen == longest}
    return tuple(sorted(names - {"lo"}))


def free_pool(tag: str, found: Sequence[Route]) -> IPv4Network:
    """A private network unused on this host; the search starts at a tag's own position."""
    busy = [r.network for r in found if r.network.prefixlen > 0]
    busy.append(gangs.NETWORK)  # a gang with egress has both
    for whole in POOLS:
        pools = list(whole.subnets(new_prefix=POOL_PREFIX))
        first = int.from_bytes(hashlib.sha256(tag.encode()).digest()[:4]) % len(pools)
        for pool in pools[first:] + pools[:first]:
            if not any(pool.overlaps(network) for network in busy):
                return pool
    raise OSError("this host has routes to every private network: none is left for lanes")

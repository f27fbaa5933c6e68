"""The host's network: addresses, routes and links by rtnetlink, and calls of `nft`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil  # type: ignore[import-untyped]

from gpool.agent.network import firewall_rules
from gpool.agent.network.policy import HostFacts
from gpool.core import gangs

RTM_NEWLINK, RTM_DELLINK, RTM_NEWADDR, RTM_NEWROUTE, RTM_NEWNEIGH = 16, 17, 20, 24, 28
NLMSG_ERROR, NLM_F_REQUEST, NLM_F_ACK, NLM_F_EXCL, NLM_F_CREATE = 2, 1, 4, 0x200, 0x400
IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_LINK, IFLA_LINKINFO, IFLA_NET_NS_FD = 1, 3, 4, 5, 18, 28
IFLA_INFO_KIND, IFLA_INFO_DATA, VETH_INFO_PEER = 1, 2, 1
IFLA_MACVLAN_MODE, MACVLAN_MODE_BRIDGE = 1, 4
NDA_DST, NDA_LLADDR, NUD_PERMANENT = 1, 2, 0x80
IFA_ADDRESS, IFA_LOCAL = 1, 2
RTA_DST, RTA_OIF, RTA_GATEWAY = 1, 4, 5
RT_TABLE_MAIN, RTPROT_STATIC, RTN_UNICAST = 254, 4, 1
RT_SCOPE_UNIVERSE, RT_SCOPE_LINK = 0, 253
IFF_UP, IFF_NOARP = 1, 0x80
NESTED = 1 << 15
LINK = struct.Struct("=BBHiII")


def _attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + b"\0" * (-length % 4)


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack("=I", value))


class Netlink:
    """Acts in the network namespace its socket was created in."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._last = 0

    def __enter__(self) -> Netlink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def add_pair(self, name: str, peer: str, peer_namespace: int, mtu: int) -> None:
        """The peer lies in the other namespace (a descriptor)."""
        other = (
            LINK.pack(0, 0, 0, 0, 0, 0)
            + _text(IFLA_IFNAME, peer)
            + _number(IFLA_MTU, mtu)
            + _number(IFLA_NET_NS_FD, peer_namespace)
        )
        kind = _attribute(IFLA_INFO_KIND, b"veth")
        data = _attribute(IFLA_INFO_DATA | NESTED, _attribute(VETH_INFO_PEER | NESTED, other))
        body = (
            LINK.pack(0, 0, 0, 0, 0, 0)
            + _text(IFLA_IFNAME, name)
            + _number(IFLA_MTU, mtu)
            + _attribute(IFLA_LINKINFO | NESTED, kind + data)
        )
        self._ask(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, body, f"add {name}")

    def add_macvlan(self, name: str, parent: int, namespace: int, mac: bytes) -> None:
        """Add an interface with its own MAC address on the parent (an index); it lies in the namespace, down, without ARP."""
        kind = _attribute(IFLA_INFO_KIND, b"macvlan")
        data = _attribute(IFLA_INFO_DATA | NESTED, _number(IFLA_MACVLAN_MODE, MACVLAN_MODE_BRIDGE))
        body = (
            LINK.pack(0, 0, 0, 0, IFF_NOARP, IFF_NOARP)
            + _text(IFLA_IFNAME, name)
            + _attribute(IFLA_ADDRESS, mac)
            + _number(IFLA_LINK, parent)
            + _number(IFLA_NET_NS_FD, namespace)
            + _attribute(IFLA_LINKINFO | NESTED, kind + data)
        )
        self._ask(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, body, f"add macvlan {name}")

    def add_link(self, name: str, kind: str) -> None:
        body = (
            LINK.pack(0, 0, 0, 0, 0, 0)
            + _text(IFLA_IFNAME, name)
            + _attribute(IFLA_LINKINFO | NESTED, _attribute(IFLA_INFO_KIND, kind.encode()))
        )
        self._ask(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, body, f"add {kind} {name}")

    def set_mtu(self, index: int, mtu: int) -> None:
        body = LINK.pack(0, 0, 0, index, 0, 0) + _number(IFLA_MTU, mtu)
        self._ask(RTM_NEWLINK, 0, body, f"set the MTU of {index} to {mtu}")

    def move(self, index: int, namespace: int, name: str) -> None:
        """Move an interface into a namespace (a descriptor), under a new name; it is down there."""
        body = LINK.pack(0, 0, 0, index, 0, 0)
        body += _number(IFLA_NET_NS_FD, namespace) + _text(IFLA_IFNAME, name)
        self._ask(RTM_NEWLINK, 0, body, f"move {index} to {name}")

    def add_neighbour(self, index: int, address: IPv4Address, mac: bytes) -> None:
        body = struct.pack("=BxxxiHBB", socket.AF_INET, index, NUD_PERMANENT, 0, 0)
        body += _attribute(NDA_DST, address.packed) + _attribute(NDA_LLADDR, mac)
        self._ask(RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_EXCL, body, f"neighbour {address}")

    def up(self, index: int) -> None:
        self._ask(RTM_NEWLINK, 0, LINK.pack(0, 0, 0, index, IFF_UP, IFF_UP), f"set {index} up")

    def remove(self, name: str) -> None:
        body = LINK.pack(0, 0, 0, 0, 0, 0) + _text(IFLA_IFNAME, name)
        self._ask(RTM_DELLINK, 0, body, f"remove {name}")

    def add_address(self, index: int, address: IPv4Address, prefix: int = 32) -> None:
        body = struct.pack("=BBBBI", socket.AF_INET, prefix, 0, RT_SCOPE_UNIVERSE, index)
        body += _attribute(IFA_LOCAL, address.packed) + _attribute(IFA_ADDRESS, address.packed)
        self._ask(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, body, f"give {index} {address}")

    def add_route(
        self, index: int, network: IPv4Network, gateway: IPv4Address | None = None
    ) -> None:
        scope = RT_SCOPE_LINK if gateway is None else RT_SCOPE_UNIVERSE
        body = struct.pack(
            "=BBBBBBBBI",
            socket.AF_INET,
            network.prefixlen,
            0,
            0,
            RT_TABLE_MAIN,
            RTPROT_STATIC,
            scope,
            RTN_UNICAST,
            0,
        )
        body += _number(RTA_OIF, index)
        if network.prefixlen:
            body += _attribute(RTA_DST, network.network_address.packed)
        if gateway is not None:
            body += _attribute(RTA_GATEWAY, gateway.packed)
        self._ask(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, body, f"route {network}")

    def _ask(self, kind: int, flags: int, body: bytes, what: str) -> None:
        self._last += 1
        length = 16 + len(body)
        head = struct.pack("=IHHII", length, kind, NLM_F_REQUEST | NLM_F_ACK | flags, self._last, 0)
        self._socket.send(head + body)
        answer = self._socket.recv(65536)
        (said,) = struct.unpack_from("=H", answer, 4)
        if said != NLMSG_ERROR:
            raise OSError(f"{what}: the kernel answered with message {said}")
        (code,) = struct.unpack_from("=i", answer, 16)
        if code:
            raise OSError(-code, f"{what}: {os.strerror(-code)}")


SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
WITHIN_S = 60.0


class NftFailed(Exception): ...


def nft_program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=SYSTEM_PATH)


async def answer_of(path: str, *arguments: str, given: int) -> tuple[int, bytes, bytes]:
    """Run a program of the network with `given` as its input, and close `given`. `TimeoutError` after `WITHIN_S`."""
    try:
        child = await asyncio.create_subprocess_exec(
            path,
            *arguments,
            stdin=given,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
            cwd="/",
        )
    finally:
        os.close(given)
    try:
        async with asyncio.timeout(WITHIN_S):
            out, err = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        raise
    return child.returncode or 0, out, err


async def nft(*arguments: str, text: str = "") -> str:
    path = nft_program("nft")
    if path is None:
        raise NftFailed("nft is not installed (Debian: apt-get install nftables)")
    try:
        code, out, err = await answer_of(path, *arguments, given=_enclosed(text))
    except TimeoutError as silent:
        raise NftFailed(f"nft did not answer within {WITHIN_S:g} s") from silent
    if code != 0:
        said = err.decode(errors="replace").strip().splitlines() or ["no error output"]
        raise NftFailed(said[0])
    return out.decode()


def _enclosed(text: str) -> int:
    """Text as a memory file: a pipe would have to be fed while the child reads."""
    descriptor = os.memfd_create("rules")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(text.encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


async def load(text: str) -> None:
    """nft commits a file as one transaction."""
    await nft("-f", "-", text=text)


async def listed(*what: str) -> list[dict[str, Any]]:
    document = json.loads(await nft("-j", "list", *what))
    return [each for each in document["nftables"] if "metainfo" not in each]


def packets(objects: list[dict[str, Any]], name: str) -> int:
    counters = (each["counter"] for each in objects if "counter" in each)
    return sum(counter["packets"] for counter in counters if counter["name"] == name)


async def refusals(
    naming: firewall_rules.Naming, interface: str
) -> list[firewall_rules.RefusedConnection]:
    """Read the refused connections of a root agent's network and remove them: its interface's name is used again."""
    listing = await listed("set", firewall_rules.FAMILY, naming.table, firewall_rules.REFUSALS)
    found = firewall_rules.refused_connections(listing, interface)
    if found:
        await load(firewall_rules.forget_refusals(naming, interface, found))
    return found


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

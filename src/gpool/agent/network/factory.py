"""Choice and probe of the kind of sandbox network this agent can open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, ip_address
from pathlib import Path

from gpool.agent.network.host import NftFailed, nft_program
from gpool.agent.network.policy import BadPolicy, Egress, EgressPolicy, Gang, Only, Target, Wants
from gpool.agent.network.root_networks import RootNetworks
from gpool.agent.network.rootless_networks import RootlessNetworks
from gpool.agent.network.sandbox_network import Networks, NetworkUnavailable, tag_for
from gpool.core.gangs import GangLink

RESOLVE_WITHIN_S = 10.0
TUN_FIX = "as root: modprobe tun; chmod 666 /dev/net/tun"


def networks_for(policy: EgressPolicy, place: Path, *, rdma: bool = False) -> Networks:
    """`place`: directory by which leftovers of a killed agent are found. `rdma`: for members with direct links."""
    if os.geteuid() == 0:
        return RootNetworks(policy, tag_for(place), rdma=rdma)
    return RootlessNetworks(policy)


@dataclass(frozen=True, slots=True)
class NetworkRequirement:
    """Requirement of sandbox networks: whether it is met, and the fix if not."""

    name: str
    ok: bool
    fix: str = ""


def facts() -> tuple[NetworkRequirement, ...]:
    """Check the requirements that need no trial."""
    found = [
        NetworkRequirement(
            "nft", nft_program("nft") is not None, "install nftables (apt-get install nftables)"
        )
    ]
    if os.geteuid() == 0:
        writable = os.access("/proc/sys/net/ipv4/conf/default/forwarding", os.W_OK)
        fix = "give the agent's container a writable /proc/sys/net, or run it outside"
        found.append(NetworkRequirement("network settings", writable, fix))
        return tuple(found)
    slirp = nft_program("slirp4netns") is not None
    tun = os.access("/dev/net/tun", os.R_OK | os.W_OK)
    found.append(
        NetworkRequirement("slirp4netns", slirp, "install it (apt-get install slirp4netns)")
    )
    found.append(NetworkRequirement("/dev/net/tun", tun, TUN_FIX))
    return tuple(found)


async def probe(place: Path) -> tuple[bool, str]:
    why = await _why_not(Egress(), place, facts())
    if not why and not _leads_out():
        why = "this host has no IPv4 route out"
    if why:
        return False, f"egress is not offered: {why}"
    return True, "egress is offered: a sandbox network was opened and closed"


async def probe_gangs(place: Path) -> tuple[bool, str]:
    """Probe a gang network of one member; it needs no route out."""
    tun = NetworkRequirement("/dev/net/tun", os.access("/dev/net/tun", os.R_OK | os.W_OK), TUN_FIX)
    lane = Gang(0, (("127.0.0.1", 0),), secrets.token_bytes(32))
    why = await _why_not(lane, place, (*facts(), tun))
    if why:
        return False, f"gangs are not offered: {why}"
    return True, "gangs are offered: a gang network was opened and closed"


async def probe_links(
    place: Path, address: str, *, trusted: bool
) -> tuple[frozenset[str], tuple[str, ...]]:
    """Open a gang network of one member over each link besides the relay; return those that work, and why others do not.

    `address`: for other nodes of the site. `trusted`: the owner declared their link trusted.
    """
    wanted = [GangLink.DIRECT] if trusted else []
    links, problems = set(), []
    for link in (*wanted, GangLink.WIREGUARD):
        if os.geteuid() != 0:
            problems.append(f"{link.value} gang links need an agent that runs as root")
            continue
        lane = Gang(0, ((address, 0),), secrets.token_bytes(32), link=link)
        if why := await _why_not(lane, place, facts()):
            problems.append(f"{link.value} gang links are not offered: {why}")
        else:
            links.add(link.value)
    return frozenset(links), tuple(problems)


async def _why_not(wants: Wants, place: Path, needed: Sequence[NetworkRequirement]) -> str:
    for fact in needed:
        if not fact.ok:
            return f"{fact.name} is missing; {fact.fix}"
    networks = networks_for(EgressPolicy(), place / "probe")
    try:
        await networks.start()
        lane = await networks.open(wants)
        await lane.close()
    except NetworkUnavailable as failure:
        return str(failure)
    finally:
        with contextlib.suppress(NftFailed):  # `start` failed for the same reason and reported it
            await networks.close()
    return ""


def _leads_out() -> bool:
    """Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("8.8.8.8", 53))
        except OSError:
            return False
    return True


async def only(hosts: Iterable[tuple[str, int]]) -> Only:
    """Network to these servers only, resolved now. Raises `BadPolicy` for a host without an allowed IPv4 address."""
    loop = asyncio.get_running_loop()
    targets: list[Target] = []
    names: dict[str, tuple[IPv4Address, ...]] = {}
    for host, port in hosts:
        try:
            async with asyncio.timeout(RESOLVE_WITHIN_S):
                found = await loop.getaddrinfo(
                    host, port, family=socket.AF_INET, type=socket.SOCK_STREAM
                )
        except (OSError, TimeoutError) as failure:
            raise BadPolicy(f"{host}: no IPv4 address found: {failure}") from failure
        addresses = tuple(dict.fromkeys(IPv4Address(each[4][0]) for each in found))
        targets += [Target(IPv4Network(address), (port, port)) for address in addresses]
        if not _is_address(host):
            names[host.lower().rstrip(".")] = addresses
    return Only(tuple(dict.fromkeys(targets)), names)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True

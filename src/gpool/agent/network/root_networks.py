"""Sandbox networks of a root agent: a network namespace each, joined to the host by veth, with NAT and nftables.

Changes on the host, undone by `close` (or by the next agent's `start` after a kill):
- one nftables table, `inet gpool_TAG`;
- interfaces `gpoolTAG…`, one per network;
- `net.ipv4.conf.UPLINK.forwarding` of the uplinks, where it was off. The table then drops packets that uplinks would
  forward for others, so that the host does not become a router. `ip_forward` and IPv6 settings stay;
- where another table drops forwarded packets (Docker's does), two accepting rules in that chain, marked as ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Sequence
from ipaddress import IPv4Network

import psutil  # type: ignore[import-untyped]

from gpool.agent.network import firewall_rules, host
from gpool.agent.network.dns_resolver import RESOLVER, Server, configured_servers
from gpool.agent.network.firewall_rules import FAMILY, PREFIX, Naming
from gpool.agent.network.gang import wireguard
from gpool.agent.network.gang.direct import DirectLink
from gpool.agent.network.gang.links import OpenLink, OpenLinks
from gpool.agent.network.gang.relay_client import RELAY
from gpool.agent.network.host import Netlink
from gpool.agent.network.namespaces import (
    Inside,
    in_fresh_thread,
    make_inside,
    read_sysctl,
    write_sysctl,
)
from gpool.agent.network.policy import Egress, EgressPolicy, Gang, HostFacts, Only, Wants
from gpool.agent.network.sandbox_network import (
    NetworkUnavailable,
    OpenSandboxNetwork,
    opened_whole,
    refuse_wrong,
    resolver_for,
)
from gpool.agent.runtime.devices import rdma_nodes
from gpool.agent.runtime.protocol import SandboxNetwork

INSIDE = "eth0"
EVERYWHERE = IPv4Network("0.0.0.0/0")


def forwarding(interface: str) -> str:
    return f"ipv4/conf/{interface}/forwarding"


class RootNetworks:
    """One object per tag; call `start` first."""

    def __init__(
        self,
        policy: EgressPolicy,
        tag: str,
        *,
        servers: tuple[Server, ...] | None = None,
        ahead: int = 2,
        relay: Sequence[str] = RELAY,
        rdma: bool = False,
    ) -> None:
        self._policy = policy
        self._naming = Naming(tag)
        self._servers = servers
        self._ahead = ahead
        self._pool = EVERYWHERE
        self._facts = HostFacts()
        self._mtu = 1500
        self._lent: set[str] = set()
        self._free = deque(range(firewall_rules.MAX_LANES))
        self._rdma = rdma
        self._links = OpenLinks(relay)
        self._prepared: list[OpenSandboxNetwork] = []
        self._filling: asyncio.Task[None] | None = None
        self._closing = False
        self._refreshing = asyncio.Lock()

    async def start(self) -> None:
        try:
            await self.sweep()
            found = self._routes()
            self._pool = host.free_pool(self._naming.tag, found)
            self._facts = self._seen(found)
            ups = host.uplinks(found)
            self._mtu = self._smallest_mtu(ups)
            lent = await self._to_lend(ups)
            await host.load(
                firewall_rules.host_ruleset(
                    self._naming, self._pool, self._policy, self._facts, lent
                )
            )
            self._lend(lent)
            await self._pass_droppers()
        except (OSError, host.NftFailed) as failure:
            with contextlib.suppress(OSError, host.NftFailed):  # report the first failure
                await self._undo()
            raise NetworkUnavailable(
                f"sandbox networks cannot be opened on this node: {failure}"
            ) from failure
        await self._fill()

    async def open(self, wants: Wants) -> OpenSandboxNetwork:
        refuse_wrong(wants)
        try:
            await self._keep_up(wants)
            if isinstance(wants, Egress) and self._prepared:
                opened = self._prepared.pop()
            else:
                opened = await opened_whole(self._make(wants))
        except (OSError, host.NftFailed) as failure:
            raise NetworkUnavailable(
                f"a sandbox network could not be opened: {failure}"
            ) from failure
        self._fill_behind()
        return opened

    async def refused_packets(self) -> int:
        counters = await host.listed("counters", "table", FAMILY, self._naming.table)
        return host.packets(counters, "refused") + await self._links.refused()

    async def close(self) -> None:
        """Remove the table: open networks lose their uplink, and their openers still close them."""
        self._closing = True
        if self._filling is not None:
            await self._filling
        for each in self._prepared:
            await each.close()
        self._prepared.clear()
        await self._undo()

    async def sweep(self) -> None:
        """Remove leftovers of a killed agent with this tag."""
        for _, name in socket.if_nameindex():
            if name.startswith(self._naming.interfaces):
                await self._remove(name)
        await asyncio.to_thread(wireguard.sweep, self._naming.interfaces)
        if self._naming.table in await _our_tables():
            self._lent = await _lent_by(self._naming.table)
        await self._undo()

    # ---- state that lives as long as the agent

    async def _undo(self) -> None:
        others = [await _lent_by(t) for t in await _our_tables() if t != self._naming.table]
        for interface in self._lent - set().union(*others):
            write_sysctl(forwarding(interface), "0")
        self._lent.clear()
        await self._unpass_droppers()
        if self._naming.table in await _our_tables():
            await host.load(f"delete table {FAMILY} {self._naming.table}\n")

    async def _to_lend(self, interfaces: Sequence[str]) -> list[str]:
        others = [await _lent_by(t) for t in await _our_tables() if t != self._naming.table]
        already = set().union(*others)
        return [i for i in interfaces if i in already or read_sysctl(forwarding(i)) == "0"]

    def _lend(self, interfaces: Sequence[str]) -> None:
        """Record in the table first, so that a killed agent's successor can undo it."""
        self._lent.update(interfaces)
        for interface in interfaces:
            write_sysctl(forwarding(interface), "1")

    async def _pass_droppers(self) -> None:
        ours = self._naming.interfaces
        mark = f'comment "{self._naming.table}"'
        text = ""
        for family, table, chain in await _forward_droppers():
            where = f"insert rule {family} {table} {chain}"
            text += f'{where} oifname "{ours}*" ct state established,related accept {mark}\n'
            text += f'{where} iifname "{ours}*" accept {mark}\n'
        if text:
            await host.load(text)

    async def _unpass_droppers(self) -> None:
        text = ""
        for family, table, chain in await _forward_droppers():
            for each in await host.listed("chain", family, table, chain):
                rule = each.get("rule", {})
                if rule.get("comment") == self._naming.table:
                    text += f"delete rule {family} {table} {chain} handle {rule['handle']}\n"
        if text:
            await host.load(text)

    async def _keep_up(self, wants: Wants) -> None:
        found = self._routes()
        seen = self._seen(found)
        towards = [t.network for t in wants.targets] if isinstance(wants, Only) else []
        ups = [i for i in host.uplinks(found, towards) if i not in self._lent]
        if seen == self._facts and not any(read_sysctl(forwarding(i)) == "0" for i in ups):
            return
        async with self._refreshing:
            table = f"{FAMILY} {self._naming.table}"
            lent = await self._to_lend(ups)
            text = firewall_rules.refresh(table, seen)
            if lent:
                text += f"add element {table} lent {{ {', '.join(lent)} }}\n"
            await host.load(text)
            self._facts = seen
            self._lend(lent)

    def _routes(self) -> tuple[host.Route, ...]:
        return tuple(r for r in host.routes() if not r.interface.startswith(PREFIX))

    def _seen(self, found: Sequence[host.Route]) -> HostFacts:
        return host.facts(found, host.own_addresses(without=PREFIX))

    def _smallest_mtu(self, interfaces: Sequence[str]) -> int:
        stats = psutil.net_if_stats()
        return min((stats[i].mtu for i in interfaces if i in stats), default=1500)

    # lanes

    async def _make(self, wants: Wants) -> OpenSandboxNetwork:
        if not self._free:
            raise NetworkUnavailable(
                f"{firewall_rules.MAX_LANES} sandbox networks are open, the maximum"
            )
        number = self._free.popleft()
        name = self._naming.interface(wants, number)
        inside: Inside | None = None
        link: OpenLink | None = None
        try:
            inside = await in_fresh_thread(make_inside)
            if not isinstance(wants, Gang) or wants.egress:
                await asyncio.to_thread(self._join, inside, name, number)
            if isinstance(wants, Only) and wants.targets:
                await host.load(firewall_rules.permit(self._naming, name, wants))
            if isinstance(wants, Gang):
                outside = self._naming.gang_interface(number)
                link = await self._links.begin(wants, inside, outside)
        except (OSError, host.NftFailed, asyncio.CancelledError):
            if inside is not None:
                inside.discard()
            await self._remove(name)
            self._free.append(number)
            raise

        async def undo() -> None:
            if link is not None:
                await self._links.end(link)
            await self._remove(name)
            if isinstance(wants, Only) and wants.targets:
                with contextlib.suppress(host.NftFailed):  # the table was removed first
                    await host.load(firewall_rules.revoke(self._naming, name, wants))
            self._free.append(number)

        inside.netlink.close()
        servers = self._servers if self._servers is not None else configured_servers()
        resolver = resolver_for(inside.names, self._policy, self._facts, wants, servers)
        resolver.start()
        devices = rdma_nodes() if self._rdma and isinstance(link, DirectLink) else ()
        lane = SandboxNetwork((inside.namespace,), RESOLVER, devices=devices)
        return OpenSandboxNetwork(lane, resolver, undo, lambda: host.refusals(self._naming, name))

    def _join(self, inside: Inside, name: str, number: int) -> None:
        gateway = firewall_rules.gateway_address(self._pool)
        address = firewall_rules.lane_address(self._pool, number)
        with Netlink() as outside:
            outside.add_pair(name, INSIDE, inside.namespace, self._mtu)
            write_sysctl(f"ipv6/conf/{name}/disable_ipv6", "1")
            write_sysctl(
                f"ipv4/conf/{name}/arp_ignore", "1"
            )  # answer ARP for this interface's address only
            write_sysctl(f"ipv4/conf/{name}/send_redirects", "0")
            write_sysctl(forwarding(name), "1")
            index = socket.if_nametoindex(name)
            outside.add_address(index, gateway)
            outside.up(index)
            outside.add_route(index, IPv4Network(address))
            within = inside.index(INSIDE)
            inside.netlink.add_address(within, address)
            inside.netlink.up(within)
            inside.netlink.add_route(within, IPv4Network(gateway))
            inside.netlink.add_route(within, EVERYWHERE, gateway)

    async def _remove(self, name: str) -> None:
        def remove() -> None:
            with contextlib.suppress(OSError), Netlink() as outside:
                outside.remove(name)

        await asyncio.to_thread(remove)

    def _fill_behind(self) -> None:
        if self._filling is None or self._filling.done():
            self._filling = asyncio.ensure_future(self._fill())

    async def _fill(self) -> None:
        with contextlib.suppress(OSError, host.NftFailed, NetworkUnavailable):
            while len(self._prepared) < self._ahead and not self._closing:
                self._prepared.append(await self._make(Egress()))


async def _our_tables() -> list[str]:
    tables = (each.get("table", {}) for each in await host.listed("tables", FAMILY))
    return [t["name"] for t in tables if t.get("name", "").startswith(f"{PREFIX}_")]


async def _lent_by(table: str) -> set[str]:
    try:
        found = await host.listed("set", FAMILY, table, "lent")
    except host.NftFailed:  # removed meanwhile
        return set()
    return {name for each in found for name in each.get("set", {}).get("elem", [])}


async def _forward_droppers() -> list[tuple[str, str, str]]:
    chains = (each.get("chain", {}) for each in await host.listed("chains"))
    return [
        (c["family"], c["table"], c["name"])
        for c in chains
        if c.get("hook") == "forward"
        and c.get("policy") == "drop"
        and c["family"] in ("ip", "inet")
        and not c["table"].startswith(PREFIX)
    ]

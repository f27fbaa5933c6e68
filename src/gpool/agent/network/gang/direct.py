"""Direct gang links: a macvlan interface on the site's own link, without user space or encryption. For root agents whose
owner declared the link trusted.

Members have MAC addresses derived from the gang's secret and know each other's: there is no ARP. The member filter
admits only the gang's pairs of MAC and IP address, so gangs with equal IP addresses share a link and never meet.
"""

from __future__ import annotations

import asyncio
import socket

import psutil  # type: ignore[import-untyped]

from gpool.agent.network.gang.member_filter import MemberFilter, mac_of, ruleset
from gpool.agent.network.host import Netlink
from gpool.agent.network.namespaces import Inside
from gpool.agent.network.policy import Gang
from gpool.core.gangs import INTERFACE, NETWORK, address_of


def interface_with(address: str) -> str:
    """Name of this host's interface that has the address."""
    for name, several in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == address for each in several):
            return str(name)
    raise OSError(
        f"no interface of this host has {address}, the address for other nodes of the site; "
        "a direct gang link needs it: set GPOOL_AGENT_GANG_ADDRESS, or do not declare the link trusted"
    )


class DirectLink:
    """An `OpenLink` of one member."""

    def __init__(self, member_filter: MemberFilter) -> None:
        self._filter = member_filter

    @classmethod
    async def begin(cls, gang: Gang, inside: Inside) -> DirectLink:
        macs = [mac_of(gang, rank) for rank in range(len(gang.peers))]
        parent = socket.if_nametoindex(interface_with(gang.peers[gang.rank][0]))

        def add() -> None:
            with Netlink() as outside:
                outside.add_macvlan(INTERFACE, parent, inside.namespace, macs[gang.rank])

        await asyncio.to_thread(add)
        loaded = await MemberFilter.load(inside.namespace, ruleset(gang, macs))

        def configure() -> None:
            index = inside.index(INTERFACE)
            inside.netlink.add_address(index, address_of(gang.rank), NETWORK.prefixlen)
            inside.netlink.up(index)
            for rank, mac in enumerate(macs):
                if rank != gang.rank:
                    inside.netlink.add_neighbour(index, address_of(rank), mac)

        try:
            await asyncio.to_thread(configure)
        except BaseException:
            await loaded.remove(INTERFACE)
            loaded.close()
            raise
        return cls(loaded)

    async def refused(self) -> int:
        return await self._filter.refused()

    async def end(self) -> None:
        await self._filter.remove(INTERFACE)
        self._filter.close()

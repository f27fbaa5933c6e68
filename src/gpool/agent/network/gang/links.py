"""Links of gang members to their gangs: one protocol, three transports, chosen by the server (`core.gangs.common_link`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import structlog

from gpool.agent.network.gang.direct import DirectLink
from gpool.agent.network.gang.relay_client import RELAY, begin_relay, interface_of
from gpool.agent.network.gang.wireguard import WireGuardLink
from gpool.agent.network.namespace_holder import make_interface
from gpool.agent.network.namespaces import Inside, in_namespace
from gpool.agent.network.policy import Gang
from gpool.core.gangs import GangLink

log = structlog.get_logger(__name__)


class OpenLink(Protocol):
    """A member's interface `gang0` to the other members, from the start of its sandbox network until `end`."""

    async def refused(self) -> int:
        """Packets refused so far: to or from an address that is no member's, or not authentic."""
        ...

    async def end(self) -> None: ...


class OpenLinks:
    """Open links of an agent, and the number of packets refused on ended ones."""

    def __init__(self, relay: Sequence[str] = RELAY) -> None:
        self._relay = relay
        self._open: dict[int, OpenLink] = {}
        self._gone = 0

    async def begin(self, gang: Gang, inside: Inside, name: str) -> OpenLink:
        """Begin the link of a root agent's member. `name`: unused, for an interface in the host's namespace."""
        log.info("gang_link", link=str(gang.link), rank=gang.rank, members=len(gang.peers))
        link: OpenLink
        if gang.link == GangLink.DIRECT:
            link = await DirectLink.begin(gang, inside)
        elif gang.link == GangLink.WIREGUARD:
            link = await WireGuardLink.begin(gang, name, inside)
        else:
            tun = await _relay_interface(gang, inside)
            try:
                return await self.begin_relay(gang, tun)
            except BaseException:
                os.close(tun)
                raise
        self._open[id(link)] = link
        return link

    async def begin_relay(self, gang: Gang, tun: int) -> OpenLink:
        """The relay takes ownership of the interface (a descriptor); on failure the caller keeps it."""
        link = await begin_relay(gang, tun, self._relay)
        self._open[id(link)] = link
        return link

    async def end(self, link: OpenLink) -> None:
        self._gone += await link.refused()
        self._open.pop(id(link), None)
        await link.end()

    async def refused(self) -> int:
        return self._gone + sum([await each.refused() for each in list(self._open.values())])


async def _relay_interface(gang: Gang, inside: Inside) -> int:
    try:
        return await in_namespace(inside.namespace, lambda: make_interface(**interface_of(gang)))
    except OSError as failure:
        raise OSError(failure.errno, f"a gang's interface: {failure.strerror}") from failure

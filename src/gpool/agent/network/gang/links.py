"""Links of gang members to their gangs: one protocol, three transports, chosen by the server (`core.gangs.common_link`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from gpool.agent.network.gang import wireguard
from gpool.agent.network.gang.direct import DirectLink
from gpool.agent.network.gang.relay_client import RELAY, Relaying, begin_relay, interface_of
from gpool.agent.network.namespace_holder import make_interface
from gpool.agent.network.namespaces import Inside, in_namespace
from gpool.agent.network.policy import Gang
from gpool.core.gangs import GangLink


class OpenLink(Protocol):
    """A member's interface `gang0` to the other members, from the start of its sandbox network until `end`."""

    async def refused(self) -> int:
        """Packets refused so far: to or from an address that is no member's, or not authentic."""
        ...

    async def end(self) -> None: ...


class OpenLinks:
    """Open links of an agent, and the number of packets refused on ended ones."""

    def __init__(self) -> None:
        self._open: dict[int, OpenLink] = {}
        self._gone = 0

    def add(self, link: OpenLink) -> None:
        self._open[id(link)] = link

    async def end(self, link: OpenLink) -> None:
        self._gone += await link.refused()
        self._open.pop(id(link), None)
        await link.end()

    async def refused(self) -> int:
        return self._gone + sum([await each.refused() for each in list(self._open.values())])


async def begin_link(
    gang: Gang, inside: Inside, name: str, relay: Sequence[str] = RELAY
) -> OpenLink:
    """Begin the link of a root agent's member. `name`: unused, for an interface in the host's namespace."""
    if gang.link == GangLink.DIRECT:
        return await DirectLink.begin(gang, inside)
    if gang.link == GangLink.WIREGUARD:
        return await wireguard.WireGuardLink.begin(gang, name, inside)
    return await _begin_relay(gang, inside, relay)


async def _begin_relay(gang: Gang, inside: Inside, program: Sequence[str]) -> Relaying:
    try:
        tun = await in_namespace(inside.namespace, lambda: make_interface(**interface_of(gang)))
    except OSError as failure:
        raise OSError(failure.errno, f"a gang's interface: {failure.strerror}") from failure
    try:
        return await begin_relay(gang, tun, program)
    except BaseException:
        os.close(tun)
        raise

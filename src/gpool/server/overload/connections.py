"""Open connections counted by network, and the limits of a listener."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, Protocol, runtime_checkable

from gpool.server.identity.throttle import network_of, site_of

MOST_COMPARED = 64
"""Connections that are looked at to make room for a new one: a flood of them must not cost the loop more each."""
SITE_NETWORKS = 4
"""Connections of an IPv6 /48, in times of the limit of a network."""
LEAST_HANDSHAKES = 8
"""TLS handshakes under way that a network may have, however low its limit of connections."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    per_network: int
    total: int  # without channels of proven nodes; further descriptors are reserved for them
    head_s: float
    body_bytes_per_s: int
    proxies: Sequence[str] = ()  # networks whose connections carry those of many clients

    @property
    def of_handshakes(self) -> HttpLimits:
        """Handshakes under way, beyond the connections: they take a few round trips, so a part of the number suffices."""
        most = max(LEAST_HANDSHAKES, self.per_network // 4)
        return replace(self, per_network=most, total=max(LEAST_HANDSHAKES, self.total // 8))


@runtime_checkable
class Ranked(Protocol):
    """Connection, or the protocol of one, that says how dispensable it is; None: in use."""

    @property
    def rank(self) -> int | None: ...


class AcceptedConnection(Ranked, Protocol):
    def abort(self) -> None: ...


Countable = asyncio.Transport | AcceptedConnection


class _Counted(NamedTuple):
    network: str
    site: str | None


class ConnectionCounts:
    """Open connections by network, without the channels of nodes that have proved their key.

    A network at its limit gets a new connection in exchange for a spare one of its own: a client that holds idle
    connections does not lock out its neighbours.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._proxies = [ipaddress.ip_network(each) for each in limits.proxies]
        self._of: dict[Countable, _Counted] = {}
        self._networks: dict[str, dict[Countable, None]] = {}  # oldest connection first

    def __len__(self) -> int:
        return len(self._of)

    def admit(self, connection: Countable, address: str) -> bool:
        counted = _Counted(network_of(address), site_of(address))
        if len(self._of) >= self._limits.total and not self._make_room(self._largest()):
            return False
        if not self._is_proxy(address):
            for key, most in self._bounds(counted):
                if len(self._networks.get(key, ())) >= most and not self._make_room(key):
                    return False
        self._of[connection] = counted
        for key, _ in self._bounds(counted):
            self._networks.setdefault(key, {})[connection] = None
        return True

    def release(self, connection: Countable) -> None:
        """Stop counting a connection that was closed or belongs to a proven node; unknown ones are ignored."""
        counted = self._of.pop(connection, None)
        if counted is None:
            return
        for key, _ in self._bounds(counted):
            del self._networks[key][connection]
            if not self._networks[key]:
                del self._networks[key]

    def _make_room(self, key: str) -> bool:
        """Abort the most dispensable of the network's connections, of some of the oldest; False: those are in use."""
        members = self._networks.get(key, {})
        spare: tuple[int, Countable] | None = None
        for each in list(islice(members, MOST_COMPARED)):
            rank = _rank_of(each)
            if rank is None:  # compared last the next time
                members[each] = members.pop(each)
            elif spare is None or rank < spare[0]:
                spare = (rank, each)
                if rank == 0:
                    break
        if spare is None:
            return False
        self.release(spare[1])
        spare[1].abort()
        return True

    def _largest(self) -> str:
        return max(self._networks, key=lambda key: len(self._networks[key]), default="")

    def _bounds(self, counted: _Counted) -> list[tuple[str, int]]:
        most = self._limits.per_network
        sites = [] if counted.site is None else [(counted.site, SITE_NETWORKS * most)]
        return [(counted.network, most), *sites]

    def _is_proxy(self, address: str) -> bool:
        if not self._proxies:
            return False
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(parsed in each for each in self._proxies)


def _rank_of(connection: Countable) -> int | None:
    ranked = connection if isinstance(connection, Ranked) else connection.get_protocol()
    return ranked.rank if isinstance(ranked, Ranked) else None

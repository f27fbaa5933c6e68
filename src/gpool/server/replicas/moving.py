"""Moving nodes between replicas: which nodes a full replica, or one that stops, asks to connect elsewhere.

A node that is asked keeps its leases: it reports its heartbeat and leases to the next replica. Each replica decides
for its own connections, from the numbers that the change feed gives all.

Example with three replicas and 900, 900 and 0 nodes, the third one just started: the mean is 600, so each of the
first two has 300 too many and asks 9 of its nodes every 6 s (a tenth of 900 in a minute), until it has about 600.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from gpool.core.ids import NodeId
from gpool.core.model import SECOND, Instant, Span
from gpool.observability.logs import get_logger
from gpool.server.nodes.registry import NodeConnection
from gpool.server.replicas.membership import Membership
from gpool.server.server import Server
from gpool.server.wakeups import Wake

log = get_logger(__name__)

EVERY_S = 6.0
SLACK = 0.1
"""Part of the mean by which a replica may exceed it."""

SETTLED = Span(10 * SECOND)
"""Age of a replica's registration from which it takes nodes: it listens by then."""

SILENT = Span(4 * SECOND)
"""Age of a heartbeat past which a replica gets no nodes."""

ASK_AGAIN = Span(600 * SECOND)
"""A node that comes back, e.g. because a load balancer sent it here again, is left alone for so long."""

DRAIN_STEP_S = 0.1
LEAST_STEP = 20
"""Nodes that a stopping replica asks at once, at least."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Another replica that takes nodes."""

    address: str
    nodes: int


def surplus(own: int, others: Sequence[Destination], fraction: float) -> int:
    """Number of nodes to ask in one step of `EVERY_S`; `fraction`: largest part of the own nodes in a minute."""
    if not others:
        return 0
    mean = (own + sum(each.nodes for each in others)) / (len(others) + 1)
    excess = own - mean
    if excess < max(1.0, SLACK * mean):
        return 0
    return min(int(excess), ceil(own * fraction * EVERY_S / 60))


def assigned(count: int, others: Sequence[Destination]) -> list[str]:
    """Addresses for so many nodes: each goes to the replica that has the fewest by then."""
    if not others:
        return [""] * count
    nodes = {index: each.nodes for index, each in enumerate(others)}
    chosen = []
    for _ in range(count):
        index = min(nodes, key=lambda each: (nodes[each], each))
        nodes[index] += 1
        chosen.append(others[index].address)
    return chosen


def destinations(membership: Membership, counts: Mapping[int, int]) -> list[Destination]:
    return [
        Destination(each.address, counts.get(each.id, 0))
        for each in membership.others.values()
        if not each.is_draining and each.silent_us < SILENT and each.running_us > SETTLED
    ]


class MoveNodes:
    """The loop `move` of each replica."""

    name = "move"

    def __init__(self, server: Server, membership: Membership) -> None:
        self.wake = Wake()
        self.every_s = EVERY_S
        self._server, self._membership = server, membership
        self._asked: dict[NodeId, Instant] = {}  # by lease time

    async def run_once(self, now: Instant) -> None:
        server = self._server
        passed = server.nodes.lease_time(now)
        self._asked = {node: at for node, at in self._asked.items() if passed - at < ASK_AGAIN}
        own = server.nodes.connections
        others = destinations(self._membership, server.nodes.elsewhere.counts())
        count = surplus(len(own), others, server.settings.rebalance_per_minute)
        chosen = _idle_first(server, [each for each in own if each.node not in self._asked])[:count]
        if not chosen:
            return
        log.info("nodes are asked to move", nodes=len(chosen), connected=len(own))
        for connection, address in zip(chosen, assigned(len(chosen), others), strict=True):
            self._asked[connection.node] = passed
            connection.refuse(
                "unreachable",
                "another server has fewer nodes; connect there",
                retry=True,
                to=address,
            )


def _idle_first(server: Server, found: Iterable[NodeConnection]) -> list[NodeConnection]:
    nodes = server.picture.state.nodes

    def is_busy(connection: NodeConnection) -> bool:
        entry = nodes.get(connection.node)
        return entry is not None and bool(entry.lines)

    return sorted(found, key=is_busy)


class Departure:
    """Sends the nodes of a stopping server elsewhere, within half of the time that it has left: not all at once."""

    def __init__(self, server: Server, drain_s: float) -> None:
        self._server, self._drain_s = server, drain_s
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Ask the first nodes at once, and go on in the background."""
        waiting = list(self._server.nodes.connections)
        steps = max(1, int(self._drain_s / 2 / DRAIN_STEP_S))
        size = max(LEAST_STEP, ceil(len(waiting) / steps))
        replica = self._server.replica
        counts = self._server.nodes.elsewhere.counts()
        others = destinations(replica, counts) if isinstance(replica, Membership) else []
        asked = list(zip(waiting, assigned(len(waiting), others), strict=True))
        _send_away(asked[:size])
        if asked[size:]:
            self._task = asyncio.create_task(self._go_on(asked[size:], size), name="gpool-drain")

    async def _go_on(self, asked: list[tuple[NodeConnection, str]], size: int) -> None:
        while asked:
            await asyncio.sleep(DRAIN_STEP_S)
            _send_away(asked[:size])
            asked = asked[size:]

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _send_away(asked: Collection[tuple[NodeConnection, str]]) -> None:
    for connection, address in asked:
        connection.refuse(
            "unreachable", "the server is stopping; connect again", retry=True, to=address
        )

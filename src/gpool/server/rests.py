"""Nodes that give back what they are given, and are left alone for a while; how long, `core.merits` says. A hint, lost with the process."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpool.core.ids import NodeId
from gpool.core.merits import rest_after
from gpool.core.model import Instant


class Rests:
    def __init__(self) -> None:
        self._times: dict[NodeId, int] = {}  # how much oftener they gave back than carried on
        self._until: dict[NodeId, Instant] = {}

    @property
    def is_any(self) -> bool:
        """Whether any node gave back anything."""
        return bool(self._times)

    def __contains__(self, node: NodeId) -> bool:
        return node in self._until

    def gave_back(self, nodes: Collection[NodeId], now: Instant) -> Sequence[NodeId]:
        """However much it was at once, it counts once. Those that rest from now on."""
        resting = []
        for node in nodes:
            times = self._times[node] = self._times.get(node, 0) + 1
            rest = rest_after(times)
            if rest:
                self._until[node] = Instant(now + rest)
                resting.append(node)
        return resting

    def carried(self, nodes: Collection[NodeId]) -> None:
        for node in self._times.keys() & nodes:
            self._times[node] -= 1
            if not self._times[node]:
                del self._times[node]

    def over(self, now: Instant) -> Sequence[NodeId]:
        """Those that have rested."""
        found = [node for node, until in self._until.items() if until <= now]
        for node in found:
            del self._until[node]
        return found

    def forget(self, node: NodeId) -> None:
        self._times.pop(node, None)
        self._until.pop(node, None)

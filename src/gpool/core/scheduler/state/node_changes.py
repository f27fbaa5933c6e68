"""Log of changed nodes, for caches of the state such as the placement index. Bounded: an old reader starts anew."""

from __future__ import annotations

from collections.abc import Iterable

from gpool.core.ids import NodeId

MAX_LOGGED = 100_000


class NodeChanges:
    __slots__ = ("_inputs", "_kept_from", "_rooms", "last")

    def __init__(self) -> None:
        self._rooms: dict[NodeId, int] = {}  # ascending by number
        self._inputs: dict[NodeId, int] = {}
        self._kept_from = 0  # changes before this number may have been dropped
        self.last = 0

    def note(self, node: NodeId) -> None:
        self._note(self._rooms, node)

    def note_inputs(self, nodes: Iterable[NodeId]) -> None:
        for node in nodes:
            self._note(self._inputs, node)

    def _note(self, log: dict[NodeId, int], node: NodeId) -> None:
        self.last += 1
        log.pop(node, None)
        log[node] = self.last
        if len(log) > MAX_LOGGED:
            log.clear()
            self._kept_from = self.last + 1

    def is_complete_since(self, number: int) -> bool:
        return number + 1 >= self._kept_from

    def rooms_since(self, number: int) -> list[NodeId]:
        """Latest first."""
        return _since(self._rooms, number)

    def inputs_since(self, number: int) -> list[NodeId]:
        return _since(self._inputs, number)


def _since(log: dict[NodeId, int], number: int) -> list[NodeId]:
    found = []
    for node in reversed(log):
        if log[node] <= number:
            break
        found.append(node)
    return found

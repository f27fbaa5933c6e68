"""Which large inputs lie on which nodes, from where tasks with them ran lately. A hint: a node may have thrown them out since."""

from __future__ import annotations

from collections.abc import Mapping, Set

from gpool.core.ids import NodeId

KEPT = 4
"""Sets of large inputs that a node is believed to keep: those it had last."""

_NOWHERE: frozenset[NodeId] = frozenset()


class Caches:
    __slots__ = ("_nodes", "_on")

    def __init__(self) -> None:
        self._on: dict[NodeId, tuple[str, ...]] = {}  # the one used last at the end
        self._nodes: dict[str, set[NodeId]] = {}

    def note(self, node: NodeId, data: str) -> None:
        """A task with these inputs runs there: they are fetched if they were not there."""
        before = self._on.get(node, ())
        if before and before[-1] == data:
            return
        self._put(node, (*(each for each in before if each != data), data)[-KEPT:])

    def forget(self, node: NodeId) -> None:
        self._put(node, ())

    def with_data(self, data: str) -> Set[NodeId]:
        """The nodes that have them, as far as is known."""
        return self._nodes.get(data, _NOWHERE)

    def take(self, other: Caches) -> list[NodeId]:
        """Becomes as `other` is; the nodes of which something else is known now."""
        unlike = [id_ for id_ in self._on.keys() | other._on.keys() if self._unlike(other, id_)]
        for id_ in unlike:
            self._put(id_, other._on.get(id_, ()))
        return unlike

    def _unlike(self, other: Caches, node: NodeId) -> bool:
        return self._on.get(node) != other._on.get(node)

    def _put(self, node: NodeId, data: tuple[str, ...]) -> None:
        for each in self._on.pop(node, ()):
            there = self._nodes[each]
            there.discard(node)
            if not there:
                del self._nodes[each]
        if data:
            self._on[node] = data
            for each in data:
                self._nodes.setdefault(each, set()).add(node)

    def truth(self) -> Mapping[NodeId, tuple[str, ...]]:
        return self._on

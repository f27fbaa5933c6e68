"""Large inputs cached on nodes, inferred from earlier tasks. A hint: a node may have evicted them."""

from __future__ import annotations

from collections.abc import Mapping, Set

from gpool.core.ids import NodeId

KEPT = 4
"""Sets of large inputs that a node is assumed to cache: the last ones used."""

_NOWHERE: frozenset[NodeId] = frozenset()


class InputCaches:
    __slots__ = ("_nodes", "_on")

    def __init__(self) -> None:
        self._on: dict[NodeId, tuple[str, ...]] = {}  # last used last
        self._nodes: dict[str, set[NodeId]] = {}

    def note(self, node: NodeId, data: str) -> set[NodeId]:
        """Return the nodes whose entries changed."""
        before = self._on.get(node, ())
        if before and before[-1] == data:
            return set()
        return self._put(node, (*(each for each in before if each != data), data)[-KEPT:])

    def forget(self, node: NodeId) -> set[NodeId]:
        return self._put(node, ())

    def loss(self, node: NodeId) -> int:
        """Eviction by one more fetch: 0 nothing, 1 inputs cached elsewhere too, 2 the only copy."""
        there = self._on.get(node, ())
        if len(there) < KEPT:
            return 0
        return 1 if len(self._nodes[there[0]]) > 1 else 2

    def with_data(self, data: str) -> Set[NodeId]:
        return self._nodes.get(data, _NOWHERE)

    def take(self, other: InputCaches) -> set[NodeId]:
        changed: set[NodeId] = set()
        for id_ in self._on.keys() | other._on.keys():
            if self._on.get(id_) != other._on.get(id_):
                changed |= self._put(id_, other._on.get(id_, ()))
        return changed

    def _put(self, node: NodeId, data: tuple[str, ...]) -> set[NodeId]:
        before, changed = self._on.pop(node, ()), {node}
        for each in before:
            if each not in data:
                there = self._nodes[each]
                there.discard(node)
                if len(there) == 1:
                    changed |= there
                elif not there:
                    del self._nodes[each]
        for each in data:
            if each not in before:
                there = self._nodes.setdefault(each, set())
                if len(there) == 1:
                    changed |= there
                there.add(node)
        if data:
            self._on[node] = data
        return changed

    def truth(self) -> Mapping[NodeId, tuple[str, ...]]:
        return self._on

"""Planning hints that a rebuild may lose: earlier run times, order of service, large inputs cached on nodes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Set

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import Shape, Span

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


MAX_ESTIMATES = 10_000
MAX_SERVED = 100_000
_KEEP = 0.9  # weight of the old estimate for each further attempt observed


class SchedulingHistory:
    __slots__ = ("_estimates", "_serial", "_served", "passes")

    def __init__(self) -> None:
        self.passes = 0  # that began
        self._estimates: dict[Shape, float] = {}
        self._served: dict[UserId, int] = {}
        self._serial = 0

    def copy(self) -> SchedulingHistory:
        twin = SchedulingHistory()
        twin.passes = self.passes
        twin._estimates = self._estimates.copy()
        twin._served, twin._serial = self._served.copy(), self._serial
        return twin

    def begin_pass(self) -> None:
        self.passes += 1

    def estimate(self, shape: Shape) -> Span | None:
        """Weighted to recent tasks; None if none was observed."""
        seen = self._estimates.get(shape)
        return None if seen is None else Span(max(1, round(seen)))

    def observe(self, shape: Shape, count: int, total: Span) -> None:
        before = self._estimates.pop(shape, None)
        old = 0.0 if before is None else _KEEP ** min(count, 64)
        self._estimates[shape] = (before or 0.0) * old + total / count * (1 - old)
        if len(self._estimates) > MAX_ESTIMATES:
            del self._estimates[next(iter(self._estimates))]

    def served(self, user: UserId) -> int:
        """Number of the user's last lease: the smaller, the longer ago."""
        return self._served.get(user, 0)

    def join(self, user: UserId) -> None:
        """Before the user served last and behind all others, so that a stream of new users starves nobody."""
        if user not in self._served:
            self._serve(user, self._serial - 1)

    def serve(self, user: UserId) -> None:
        self._serial += 2
        self._serve(user, self._serial)

    def _serve(self, user: UserId, number: int) -> None:
        self._served.pop(user, None)
        self._served[user] = number
        if len(self._served) > MAX_SERVED:
            del self._served[next(iter(self._served))]


class PinnedSlots:
    """Node of each pinned task (`passes.starts`); its room may be taken. A pin ends when its task leaves the queue, its node
    leaves, or a task starts there and no other is stopping.
    """

    __slots__ = ("_nodes", "_tasks")

    def __init__(self) -> None:
        self._nodes: dict[TaskId, NodeId] = {}
        self._tasks: dict[NodeId, set[TaskId]] = {}

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def items(self) -> list[tuple[TaskId, NodeId]]:
        return list(self._nodes.items())

    def pin(self, task: TaskId, node: NodeId) -> None:
        self._drop(task)
        self._nodes[task] = node
        self._tasks.setdefault(node, set()).add(task)

    def drop(self, tasks: Iterable[TaskId]) -> None:
        if self._nodes:
            for task in tasks:
                self._drop(task)

    def _drop(self, task: TaskId) -> None:
        node = self._nodes.pop(task, None)
        if node is not None:
            self._tasks[node].discard(task)
            if not self._tasks[node]:
                del self._tasks[node]

    def drop_node(self, node: NodeId) -> None:
        for task in self._tasks.pop(node, ()):
            del self._nodes[task]

    def note_start(self, node: NodeId, stopping: Iterable[bool]) -> None:
        """Record a start. If no allocation there is stopping, the pinned room is taken or was not needed."""
        if node in self._tasks and not any(stopping):
            self.drop_node(node)

    def retain(self, waiting: Container[TaskId]) -> None:
        self.drop([task for task in self._nodes if task not in waiting])

    def copy(self) -> PinnedSlots:
        twin = PinnedSlots()
        twin._nodes = self._nodes.copy()
        twin._tasks = {node: tasks.copy() for node, tasks in self._tasks.items()}
        return twin

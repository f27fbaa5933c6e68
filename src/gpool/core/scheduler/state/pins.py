"""Pinned slots: the waiting task for which room is being freed, and the node. `passes.pins` explains them. A hint.

A pin does not say that there is room; a lost pin leaves the room to the first task in the order.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from gpool.core.ids import NodeId, TaskId


class PinnedSlots:
    """The node of each pinned task.

    A pin ends when its task leaves the queue, when its node leaves, or when a task starts there and no other is stopping.
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
        """A task started on the node. If no allocation there is stopping, the room is taken or was not needed."""
        if node in self._tasks and not any(stopping):
            self.drop_node(node)

    def retain(self, waiting: Container[TaskId]) -> None:
        """Drop the pins of all other tasks."""
        self.drop([task for task in self._nodes if task not in waiting])

    def copy(self) -> PinnedSlots:
        twin = PinnedSlots()
        twin._nodes = self._nodes.copy()
        twin._tasks = {node: tasks.copy() for node, tasks in self._tasks.items()}
        return twin

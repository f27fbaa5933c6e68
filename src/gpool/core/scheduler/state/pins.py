"""For which waiting tasks room is being made, and where: a hint, kept from the pass that stops others until the one that starts them.

An exchange is decided by what both sides have and had before it. Once those who lose hold less they may come first again: they
would take the room back before whom they were stopped for, and be left alone with it. So a pass begins with what was promised
in earlier ones (`Starts.keep_promises`). Nothing here says that there is room; a promise lost is room for whoever comes first.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from gpool.core.ids import NodeId, TaskId


class Promises:
    """By task the node. One ends when its task leaves the queue, its node goes, or somebody starts there and nothing stops any more."""

    __slots__ = ("_nodes", "_tasks")

    def __init__(self) -> None:
        self._nodes: dict[TaskId, NodeId] = {}
        self._tasks: dict[NodeId, set[TaskId]] = {}

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def items(self) -> list[tuple[TaskId, NodeId]]:
        return list(self._nodes.items())

    def make(self, task: TaskId, node: NodeId) -> None:
        self._end(task)
        self._nodes[task] = node
        self._tasks.setdefault(node, set()).add(task)

    def end(self, tasks: Iterable[TaskId]) -> None:
        """They wait no longer. It costs nothing while nothing is promised."""
        if self._nodes:
            for task in tasks:
                self._end(task)

    def _end(self, task: TaskId) -> None:
        node = self._nodes.pop(task, None)
        if node is not None:
            self._tasks[node].discard(task)
            if not self._tasks[node]:
                del self._tasks[node]

    def end_on(self, node: NodeId) -> None:
        for task in self._tasks.pop(node, ()):
            del self._nodes[task]

    def start(self, node: NodeId, stopping: Iterable[bool]) -> None:
        """Somebody started there; `stopping`: whether what is there was asked to stop. Else the room is taken, or was not wanted."""
        if node in self._tasks and not any(stopping):
            self.end_on(node)

    def keep(self, waiting: Container[TaskId]) -> None:
        """Those whose tasks are among these, no others."""
        self.end([task for task in self._nodes if task not in waiting])

    def copy(self) -> Promises:
        twin = Promises()
        twin._nodes = self._nodes.copy()
        twin._tasks = {node: tasks.copy() for node, tasks in self._tasks.items()}
        return twin

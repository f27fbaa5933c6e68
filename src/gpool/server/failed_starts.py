"""Tasks that could not be started: where each was tried, and which nodes rest for it. Hints: the store has where, and the rest is
lost with the process. What counts as whose fault, `core.retries` says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Instant, Shape, TaskStatus
from gpool.core.retries import Evidence
from gpool.core.scheduling.state import Line
from gpool.server.rests import CANNOT_START, STARTS_NOTHING, Rests
from gpool.server.store.values import Recording

log = logging.getLogger(__name__)

MOST_AVOIDED = 8
"""Nodes that a shape avoids: those a task was tried on last. More are not tried."""


class FailedStarts:
    def __init__(self, rests: Rests) -> None:
        self._rests = rests
        self._evidence = Evidence()
        self._tried: dict[TaskId, tuple[NodeId, ...]] = {}

    @property
    def is_any(self) -> bool:
        """Whether any task that is open could not be started somewhere, or anything is held against a node."""
        return bool(self._tried) or self._evidence.is_any

    def tried(self, task: TaskId) -> tuple[NodeId, ...]:
        """Where it could not be started."""
        return self._tried.get(task, ())

    def shape_for(self, task: TaskId, shape: Shape) -> Shape:
        """As it waits: nodes on which it could not be started come last."""
        tried = self._tried.get(task)
        return shape if tried is None else replace(shape, avoids=tried)

    def renewed(self, tried: Iterable[tuple[TaskId, NodeId]]) -> None:
        """A new picture tells where."""
        self._tried = {}
        for task, node in tried:
            self._add(task, node)

    def _add(self, task: TaskId, node: NodeId) -> None:
        known = set(self._tried.get(task, ())) | {node}
        self._tried[task] = tuple(sorted(known))[-MOST_AVOIDED:]

    def note(
        self, recording: Recording, held: Mapping[TaskId, Line], clock: Callable[[], Instant] | None
    ) -> Iterable[NodeId]:
        """What was committed, before it is folded. The nodes that rest from now on; without a clock none does."""
        own: list[NodeId] = []
        others: list[NodeId] = []
        for task in recording.requeued:
            if task.fault is not None:
                self._add(task.task, task.node)
                if self._evidence.failed(task.task, task.user, task.node, task.fault):
                    own.append(task.node)
        began = [*recording.started]
        began += [end.task for end in recording.ended if end.status is TaskStatus.SUCCEEDED]
        for id_ in began if self._evidence.is_any else ():
            line = held.get(id_)
            if line is not None:
                others += self._evidence.began(id_, {part.node for part in (line, *line.members)})
        gone = [end.task for end in recording.ended]
        self.forget((*gone, *recording.withdrawn))
        blamed = dict.fromkeys((*own, *others)) if clock is not None else {}
        if clock is not None and blamed:
            self._rests.blame(own, clock(), CANNOT_START)
            self._rests.blame(others, clock(), STARTS_NOTHING)
        for node in blamed:
            log.warning("node %s %s; it rests for a while", node, self._rests.why(node))
        return blamed

    def forget(self, tasks: Iterable[TaskId]) -> None:
        """They are over."""
        if self.is_any:
            gone = list(tasks)
            self._evidence.ended(gone)
            for task in gone:
                self._tried.pop(task, None)

    def forget_node(self, node: NodeId) -> None:
        self._evidence.forget(node)

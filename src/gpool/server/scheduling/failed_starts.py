"""Tasks that could not be started: where each was tried, and which nodes rest for it. Hints: the store has where, and the rest is
lost with the process. What counts as whose fault, `core.retries` says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import SECOND, Instant, Shape, Span, TaskStatus
from gpool.core.retries import Evidence
from gpool.core.scheduler.state.held import HeldAllocation
from gpool.server.scheduling.backoff import CANNOT_START, STARTS_NOTHING, Rests
from gpool.server.store.values import Recording

log = logging.getLogger(__name__)

SURE_AFTER = Span(10 * SECOND)
"""A sandbox may fail a moment after it was said to run: only what ran for so long, or to a good end, has begun."""


class FailedStarts:
    def __init__(self, rests: Rests) -> None:
        self._rests = rests
        self._evidence = Evidence()
        self._tried: dict[TaskId, tuple[NodeId, ...]] = {}
        self._started: dict[
            TaskId, tuple[NodeId, Instant]
        ] = {}  # said to run, where and since when

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
        """A new picture tells where, and what is over: not all ends were told to us."""
        before, self._tried, self._started = self._tried, {}, {}
        for task, node in tried:
            self._add(task, node)
        self._evidence.ended(before.keys() - self._tried.keys())

    def _add(self, task: TaskId, node: NodeId) -> None:
        """Sorted, so that those tried on the same nodes are of one shape; no more than a task is tried at all."""
        self._tried[task] = tuple(sorted({*self._tried.get(task, ()), node}))

    def note(
        self,
        recording: Recording,
        held: Mapping[TaskId, HeldAllocation],
        clock: Callable[[], Instant] | None,
    ) -> Iterable[NodeId]:
        """What was committed, before it is folded. The nodes that rest from now on; without a clock none does."""
        own: list[NodeId] = []
        others: list[NodeId] = []
        for task in recording.requeued:
            if task.fault is not None:
                self._add(task.task, task.node)
                line = held.get(task.task)
                if line is not None and line.members:
                    continue  # that its first member starts says nothing of the others
                if self._evidence.failed(task.task, task.user, task.node, task.fault):
                    own.append(task.node)
        if clock is None:
            self.forget((*(end.task for end in recording.ended), *recording.withdrawn))
            return ()
        now = clock()
        if self._evidence.is_any:
            for id_, node in self._began(recording, held, now):
                others += self._evidence.began(id_, {node})
        self.forget((*(end.task for end in recording.ended), *recording.withdrawn))
        self._rests.blame(own, now, CANNOT_START)
        self._rests.blame(others, now, STARTS_NOTHING)
        blamed = dict.fromkeys((*own, *others))
        for node in blamed:
            log.warning("node %s %s; it rests for a while", node, self._rests.why(node))
        return blamed

    def _began(
        self, recording: Recording, held: Mapping[TaskId, HeldAllocation], now: Instant
    ) -> Iterable[tuple[TaskId, NodeId]]:
        """What is sure to have begun, and where. Of gangs nothing is: that the first member runs says nothing of the others."""
        found: dict[TaskId, NodeId] = {}
        for end in recording.ended:
            line = held.get(end.task)
            if end.status is TaskStatus.SUCCEEDED and line is not None and not line.members:
                found[end.task] = line.node
        for task in (*(end.task for end in recording.ended), *(t.task for t in recording.requeued)):
            self._started.pop(task, None)
        for id_ in recording.started:
            line = held.get(id_)
            is_telling = line is not None and (
                id_ in self._tried or line.node in self._evidence.against
            )
            if line is not None and is_telling and not line.members:
                self._started[id_] = (line.node, now)
        for id_, (node, since) in list(self._started.items()):
            if now - since >= SURE_AFTER:
                del self._started[id_]
                found[id_] = node
        return list(found.items())

    def forget(self, tasks: Iterable[TaskId]) -> None:
        """They are over."""
        if self.is_any:
            gone = list(tasks)
            self._evidence.ended(gone)
            for task in gone:
                self._tried.pop(task, None)
                self._started.pop(task, None)

    def forget_node(self, node: NodeId) -> None:
        self._evidence.forget(node)

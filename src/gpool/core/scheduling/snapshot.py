"""A frozen copy of the scheduling state, cheap to take and safe to hand to another thread. It takes no decision.

Of a long queue only the front is copied: a pass starts no more of a shape than `policy.max_places_per_pass`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from gpool.core.ids import TaskId
from gpool.core.model import Instant, Node
from gpool.core.scheduling.events import (
    Member,
    NodeChanged,
    QueuedTask,
    TasksLeased,
    TasksPreempted,
    TasksQueued,
)
from gpool.core.scheduling.queue import Entry, epoch_of
from gpool.core.scheduling.state import Line, State

FRONT = 1000
"""Tasks of one shape that are copied."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    nodes: tuple[Node, ...]
    queued: tuple[TasksQueued, ...]  # the front of each shape
    held: tuple[TasksLeased, ...]  # each line
    stopping: tuple[TaskId, ...]  # asked to make room
    hints: State
    left_out: int  # queued tasks that were not copied

    def state(self) -> State:
        """A state of one's own that plans as the one it was taken of."""
        state = State()
        for node in self.nodes:
            state.fold(NodeChanged(node))
        for queued in self.queued:
            state.fold(queued)
        for held in self.held:
            state.fold(held)
        state.fold(TasksPreempted(self.stopping))
        state.take_hints(self.hints)
        return state

    def task(self, id_: TaskId) -> QueuedTask | None:
        return next((one for event in self.queued for one in event.tasks if one.id == id_), None)


def take(state: State, also: TaskId | None = None, front: int = FRONT) -> Snapshot:
    """`also`: a task that is wanted however far back it stands."""
    mine = None if also is None else state.queue_of(also)
    queued = []
    for entry in state.waiting():
        tasks = [_queued(state, one) for one in islice(entry.queue.entries(), front)]
        if entry is mine and also is not None and all(task.id != also for task in tasks):
            found = entry.queue.entry_of(also)
            tasks += [] if found is None else [_queued(state, found)]
        queued.append(TasksQueued(entry.shape, tuple(tasks)))
    lines: dict[Line, list[TaskId]] = {}
    for id_, line in state.held.items():
        lines.setdefault(line, []).append(id_)
    held = tuple(
        TasksLeased(
            line.node,
            line.allocation,
            line.shape,
            tuple(ids),
            tuple(Member(part.node, part.allocation) for part in line.members),
            line.since,
            tuple(line.leases[id_] for id_ in ids) if len(line.leases) == len(ids) else (),
        )
        for line, ids in lines.items()
    )
    stopping = tuple(id_ for line, ids in lines.items() if line.stopping for id_ in ids)
    nodes = tuple(entry.node for entry in state.nodes.values() if entry.node is not None)
    hints = State()
    hints.take_hints(state)
    copied = sum(len(event.tasks) for event in queued)
    return Snapshot(nodes, tuple(queued), held, stopping, hints, state.queued_count - copied)


def _queued(state: State, entry: Entry) -> QueuedTask:
    at, id_ = Instant(entry[0]), TaskId(entry[1])
    return QueuedTask(id_, epoch_of(entry), at, state.attained(id_, at))

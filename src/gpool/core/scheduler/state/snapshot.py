"""Frozen copy of the scheduling state, cheap to take and safe in another thread.
Only the front of a long queue is copied, since a pass starts at most `policy.max_places_per_pass` tasks of a shape;
with very many queues, a shorter front.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

from gpool.core.ids import TaskId
from gpool.core.model import Instant, Node
from gpool.core.scheduler.state.events import (
    GangPart,
    NodeChanged,
    QueuedTask,
    TasksLeased,
    TasksPreempted,
    TasksQueued,
)
from gpool.core.scheduler.state.queue import TaskQueueEntry, epoch_of
from gpool.core.scheduler.state.state import State
from gpool.core.scheduler.state.waiting import HeldAllocation

FRONT = 1000
"""Tasks of one shape that are copied."""

MOST = 20_000
"""Of all shapes together, or one of each."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    nodes: tuple[Node, ...]
    queued: tuple[TasksQueued, ...]  # the front of each queue
    held: tuple[TasksLeased, ...]  # each allocation
    stopping: tuple[TaskId, ...]  # preempted
    hints: State
    left_out: int  # queued tasks that were not copied

    def state(self) -> State:
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


def take(state: State, also: Collection[TaskId] = (), front: int = FRONT) -> Snapshot:
    """`also`: tasks to include at any position."""
    wanted: dict[int, list[TaskId]] = {}
    for id_ in also:
        mine = state.queue_of(id_)
        if mine is not None:
            wanted.setdefault(id(mine), []).append(id_)
    queued = []
    front = min(front, _even([entry.queue.size for entry in state.queues.shapes()], MOST))
    for entry in state.queues.shapes():
        tasks = [_queued(state, one) for one in islice(entry.queue.entries(), front)]
        if id(entry) in wanted:
            there = {task.id for task in tasks}
            missing = [id_ for id_ in wanted[id(entry)] if id_ not in there]
            behind = [found for id_ in missing if (found := entry.queue.entry_of(id_)) is not None]
            tasks += [_queued(state, found) for found in sorted(behind)]
        queued.append(TasksQueued(entry.shape, tuple(tasks)))
    lines: dict[HeldAllocation, list[TaskId]] = {}
    for id_, line in state.held.items():
        lines.setdefault(line, []).append(id_)
    held = tuple(
        TasksLeased(
            line.node,
            line.allocation,
            line.shape,
            tuple(ids),
            tuple(GangPart(part.node, part.allocation) for part in line.members),
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


def _queued(state: State, entry: TaskQueueEntry) -> QueuedTask:
    at, id_ = Instant(entry.queued_at), TaskId(entry.task)
    return QueuedTask(id_, epoch_of(entry), at, state.attained(id_, at))


def _even(sizes: list[int], most: int) -> int:
    sizes.sort()
    for place, size in enumerate(sizes):
        left = len(sizes) - place
        if size * left > most:
            return max(1, most // left)
        most -= size
    return max(sizes, default=1)

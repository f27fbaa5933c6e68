"""A frozen copy of the scheduling state, cheap to take and safe to hand to another thread. It takes no decision.

Of a long queue only the front is copied: a pass starts no more of a shape than `policy.max_places_per_pass`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Allocation, Instant, Node, Shape
from gpool.core.scheduling.events import QueuedTask
from gpool.core.scheduling.queue import epoch_of
from gpool.core.scheduling.state import State, build

FRONT = 1000
"""Tasks of one shape that are copied."""


@dataclass(frozen=True, slots=True)
class HeldTask:
    """One lease."""

    node: NodeId
    allocation: Allocation
    shape: Shape
    task: TaskId


@dataclass(frozen=True, slots=True)
class Snapshot:
    nodes: tuple[Node, ...]
    queued: tuple[tuple[Shape, tuple[QueuedTask, ...]], ...]  # the front of each shape
    held: tuple[HeldTask, ...]
    hints: State
    left_out: int  # queued tasks that were not copied

    def state(self) -> State:
        """A state of one's own that plans as the one it was taken of."""
        state = build(
            self.nodes,
            ((shape, task) for shape, tasks in self.queued for task in tasks),
            ((one.node, one.allocation, one.shape, one.task) for one in self.held),
        )
        state.take_hints(self.hints)
        return state

    def shape_of(self, task: TaskId) -> Shape | None:
        """The shape under which a copied task waits."""
        for shape, tasks in self.queued:
            if any(one.id == task for one in tasks):
                return shape
        return None


def take(state: State, front: int = FRONT) -> Snapshot:
    queued = tuple(
        (
            entry.shape,
            tuple(
                QueuedTask(TaskId(one[1]), epoch_of(one), Instant(one[0]))
                for one in islice(entry.queue.entries(), front)
            ),
        )
        for entry in state.waiting()
    )
    held = tuple(
        HeldTask(line.node, line.allocation, line.shape, task) for task, line in state.held.items()
    )
    nodes = tuple(entry.node for entry in state.nodes.values() if entry.node is not None)
    hints = State()
    hints.take_hints(state)
    copied = sum(len(tasks) for _, tasks in queued)
    return Snapshot(nodes, queued, held, hints, state.queued_count - copied)

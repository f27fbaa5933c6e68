"""What can happen to the scheduling state. Folded in the order the store committed them."""

from __future__ import annotations

from dataclasses import dataclass

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Allocation, Instant, Node, Shape, Span


@dataclass(frozen=True, slots=True)
class QueuedTask:
    """A task that waits; `epoch` is that of its last lease (0: none yet)."""

    id: TaskId
    epoch: int
    queued_at: Instant


@dataclass(frozen=True, slots=True)
class TasksQueued:
    """Tasks of one shape entered (or came back to) the queue."""

    shape: Shape
    tasks: tuple[QueuedTask, ...]


@dataclass(frozen=True, slots=True)
class TasksWithdrawn:
    """Queued tasks were cancelled."""

    tasks: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True)
class TasksLeased:
    """A `Place` was applied for these tasks: they left the queue and stand in line on the allocation."""

    node: NodeId
    allocation: Allocation
    shape: Shape
    tasks: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True)
class TasksReleased:
    """Leases ended: finished, lost, handed back, or confirmed dead after a cancel."""

    tasks: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True)
class NodeChanged:
    """A node appeared, changed its offer, or (dis)connected."""

    node: Node


@dataclass(frozen=True, slots=True)
class NodeRemoved:
    node: NodeId


@dataclass(frozen=True, slots=True)
class RunTimesObserved:
    """How long `count` attempts of a shape took together: a hint for prefetch, not part of the truth."""

    shape: Shape
    count: int
    total: Span


Event = (
    TasksQueued
    | TasksWithdrawn
    | TasksLeased
    | TasksReleased
    | NodeChanged
    | NodeRemoved
    | RunTimesObserved
)


@dataclass(frozen=True, slots=True)
class Grant:
    """One task's lease to be written: `epoch` is the new one, guarded by `epoch - 1` in the store."""

    task: TaskId
    epoch: int


@dataclass(frozen=True, slots=True)
class Place:
    """Lease these tasks, in this order, on one allocation of one node."""

    node: NodeId
    allocation: Allocation
    shape: Shape
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the scheduler decided and has not yet written."""

    places: tuple[Place, ...] = ()

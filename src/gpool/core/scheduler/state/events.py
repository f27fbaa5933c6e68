"""What can happen to the scheduling state. Folded in the order the store committed them."""

from __future__ import annotations

from dataclasses import dataclass

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Allocation, Instant, Node, Shape, Span

_NONE, _NEVER = Span(0), Instant(0)


@dataclass(frozen=True, slots=True)
class QueuedTask:
    """A task that waits; `epoch` is that of its last lease (0: none yet), `attained` what it has run in earlier ones (a hint)."""

    id: TaskId
    epoch: int
    queued_at: Instant
    attained: Span = _NONE


@dataclass(frozen=True, slots=True)
class Member:
    """The part of a gang on one more node."""

    node: NodeId
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class Leased:
    """What is known of a lease beside who holds it."""

    epoch: int
    queued_at: Instant
    attained: Span = _NONE  # by its task, before this lease


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
    """A `Place` was applied for these tasks: they left the queue and stand in line on the allocation.

    `at` and `leases` are hints, for what may be stopped for others: without them it goes on to its end.
    """

    node: NodeId
    allocation: Allocation
    shape: Shape
    tasks: tuple[TaskId, ...]
    members: tuple[Member, ...] = ()  # of a gang, on further nodes
    at: Instant = _NEVER
    leases: tuple[Leased, ...] = ()  # of `tasks`, in their order


@dataclass(frozen=True, slots=True)
class TasksReleased:
    """Leases ended: finished, lost, handed back, or confirmed dead after a cancel."""

    tasks: tuple[TaskId, ...]
    at: Instant = _NEVER


@dataclass(frozen=True, slots=True)
class TasksPreempted:
    """Leases that were asked to make room: they hold it until they are released.

    `beneficiaries`: for whom, in their order; a hint.
    """

    tasks: tuple[TaskId, ...]
    beneficiaries: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeChanged:
    """A node appeared, changed its offer, or (dis)connected."""

    node: Node


@dataclass(frozen=True, slots=True)
class NodeRemoved:
    node: NodeId


@dataclass(frozen=True, slots=True)
class RunTimesObserved:
    """How long `count` attempts of a shape took together: a hint, not part of the truth."""

    shape: Shape
    count: int
    total: Span
    model: str = ""  # of the GPUs they had


Event = (
    TasksQueued
    | TasksWithdrawn
    | TasksLeased
    | TasksReleased
    | TasksPreempted
    | NodeChanged
    | NodeRemoved
    | RunTimesObserved
)


@dataclass(frozen=True, slots=True)
class Grant:
    """One task's lease to be written: `epoch` is the new one, guarded by `epoch - 1` in the store."""

    task: TaskId
    epoch: int
    queued_at: Instant = _NEVER
    attained: Span = _NONE


@dataclass(frozen=True, slots=True)
class Place:
    """Lease these tasks, in this order, on one allocation of one node."""

    node: NodeId
    allocation: Allocation
    shape: Shape
    grants: tuple[Grant, ...]
    members: tuple[Member, ...] = ()  # of a gang, on further nodes: all or nothing

    def leased(self, tasks: tuple[TaskId, ...], at: Instant) -> TasksLeased:
        """The event of its having been written for these of its tasks."""
        leases: tuple[Leased, ...] = ()
        if self.shape.preemptible:
            known = {grant.task: grant for grant in self.grants}
            leases = tuple(
                Leased(known[task].epoch, known[task].queued_at, known[task].attained)
                for task in tasks
            )
        return TasksLeased(self.node, self.allocation, self.shape, tasks, self.members, at, leases)


@dataclass(frozen=True, slots=True)
class Preempt:
    """Ask this lease to make room for `beneficiary`; guarded by its epoch in the store."""

    task: TaskId
    epoch: int
    node: NodeId
    beneficiary: TaskId


@dataclass(frozen=True, slots=True)
class Plan:
    """What the scheduler decided and has not yet written.

    `is_partial`: more might start at once, in another pass; this one would have taken too long.
    """

    places: tuple[Place, ...] = ()
    preemptions: tuple[Preempt, ...] = ()
    is_partial: bool = False

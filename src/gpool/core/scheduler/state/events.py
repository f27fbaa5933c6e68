"""Events of the scheduling state, folded in commit order; and plans, not yet written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Allocation, Instant, Node, Shape, Span

MAX_LOGGED = 100_000


class NodeChanges:
    __slots__ = ("_inputs", "_kept_from", "_rooms", "last")

    def __init__(self) -> None:
        self._rooms: dict[NodeId, int] = {}  # ascending by number
        self._inputs: dict[NodeId, int] = {}
        self._kept_from = 0  # changes before this number may have been dropped
        self.last = 0

    def note(self, node: NodeId) -> None:
        self._note(self._rooms, node)

    def note_inputs(self, nodes: Iterable[NodeId]) -> None:
        for node in nodes:
            self._note(self._inputs, node)

    def _note(self, log: dict[NodeId, int], node: NodeId) -> None:
        self.last += 1
        log.pop(node, None)
        log[node] = self.last
        if len(log) > MAX_LOGGED:
            log.clear()
            self._kept_from = self.last + 1

    def is_complete_since(self, number: int) -> bool:
        return number + 1 >= self._kept_from

    def rooms_since(self, number: int) -> list[NodeId]:
        """Latest first."""
        return _since(self._rooms, number)

    def inputs_since(self, number: int) -> list[NodeId]:
        return _since(self._inputs, number)


def _since(log: dict[NodeId, int], number: int) -> list[NodeId]:
    found = []
    for node in reversed(log):
        if log[node] <= number:
            break
        found.append(node)
    return found


_NONE, _NEVER = Span(0), Instant(0)


@dataclass(frozen=True, slots=True)
class QueuedTask:
    """Epoch of its last lease (0: none) and run time in earlier leases (a hint)."""

    id: TaskId
    epoch: int
    queued_at: Instant
    attained: Span = _NONE


@dataclass(frozen=True, slots=True)
class GangPart:
    node: NodeId
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class Leased:
    epoch: int
    queued_at: Instant
    attained: Span = _NONE  # run time of the task before this lease


@dataclass(frozen=True, slots=True)
class TasksQueued:
    shape: Shape
    tasks: tuple[QueuedTask, ...]


@dataclass(frozen=True, slots=True)
class TasksWithdrawn:
    tasks: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True)
class TasksLeased:
    """`at` and `leases` are hints: without them the tasks are not preempted."""

    node: NodeId
    allocation: Allocation
    shape: Shape
    tasks: tuple[TaskId, ...]
    members: tuple[GangPart, ...] = ()  # of a gang, on further nodes
    at: Instant = _NEVER
    leases: tuple[Leased, ...] = ()  # of `tasks`, in their order


@dataclass(frozen=True, slots=True)
class TasksReleased:
    """Leases ended: finished, lost, returned, or confirmed dead after a cancel."""

    tasks: tuple[TaskId, ...]
    at: Instant = _NEVER


@dataclass(frozen=True, slots=True)
class TasksPreempted:
    """Leases to stop; their allocations stay held until released. `beneficiaries`: a hint, in the same order."""

    tasks: tuple[TaskId, ...]
    beneficiaries: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeChanged:
    node: Node


@dataclass(frozen=True, slots=True)
class NodeRemoved:
    node: NodeId


@dataclass(frozen=True, slots=True)
class RunTimesObserved:
    """Total run time of `count` attempts; a hint."""

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
class LeaseGrant:
    """Lease to write; the store checks that the task's epoch is `epoch - 1`."""

    task: TaskId
    epoch: int
    queued_at: Instant = _NEVER
    attained: Span = _NONE


@dataclass(frozen=True, slots=True)
class Placement:
    node: NodeId
    allocation: Allocation
    shape: Shape
    grants: tuple[LeaseGrant, ...]
    members: tuple[GangPart, ...] = ()  # of a gang, on further nodes: all or nothing

    def leased(self, tasks: tuple[TaskId, ...], at: Instant) -> TasksLeased:
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
    """Lease to stop for `beneficiary`; the store checks its epoch."""

    task: TaskId
    epoch: int
    node: NodeId
    beneficiary: TaskId


@dataclass(frozen=True, slots=True)
class PassPlan:
    """`is_partial`: another pass might start more at once."""

    places: tuple[Placement, ...] = ()
    preemptions: tuple[Preempt, ...] = ()
    is_partial: bool = False

"""Difference between the scheduling state and rows that other replicas changed. Pure: reads no store, sends nothing.

Level-triggered: it compares present rows with the state, whatever happened in between, so rows may be named twice,
late, or together with others.

    row                        state        result
    queued                     nothing      queued (submitted, or missed)
    queued                     held         released and requeued, with the reason of its last attempt
    holds an allocation        queued       leased
    holds another allocation   held         released, then leased
    ended                      held         ended and released
    ended                      queued       withdrawn

Rows are in no order of time: all releases are found before the first lease. A row may be newer than the read of the
feed that named it, so a lease whose allocation is still taken in the state is left out (`left_out`): the caller reads
it again with the next changes, which contain the one that freed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from gpool.core.ids import NodeId, SpecId, TaskId
from gpool.core.model import Allocation, EndReason, Fault, Instant, Shape, Span, TaskStatus
from gpool.core.scheduler.state.events import QueuedTask, TasksLeased, TasksQueued
from gpool.core.scheduler.state.queue import epoch_of
from gpool.core.scheduler.state.state import State
from gpool.server.scheduling.backoff import RejectedPlans
from gpool.server.store.operations.replicas import ChangedRows, ChangedTask, EndedAttempt
from gpool.server.store.rows import REASON, STATUS, allocation_from
from gpool.server.store.values import EndedTask, Recording, Requeued

QUEUED = TaskStatus.QUEUED.value
CANCELLED = TaskStatus.CANCELLED.value
FAULTS = {
    EndReason.SANDBOX_FAILED.value: Fault.UNCLEAR,
    EndReason.NODE_FAILED.value: Fault.NODE,
}
"""Faults of archived attempts that never started (`core.reliability.archived_as`)."""


class UnknownSpec(LookupError):
    """A row names a spec that neither the state nor the read has: the state must be rebuilt."""


@dataclass(slots=True)
class Difference:
    """`leased` and `queued` are folded after the recording."""

    ended: list[EndedTask] = field(default_factory=list)
    requeued: list[Requeued] = field(default_factory=list)
    released: dict[TaskId, None] = field(default_factory=dict)
    withdrawn: list[TaskId] = field(default_factory=list)
    preempted: list[TaskId] = field(default_factory=list)
    leased: list[TasksLeased] = field(default_factory=list)
    left_out: list[TaskId] = field(default_factory=list)
    _queued: dict[int, tuple[Shape, list[QueuedTask]]] = field(default_factory=dict)

    def queue(self, shape: Shape, task: QueuedTask) -> None:
        self._queued.setdefault(id(shape), (shape, []))[1].append(task)

    @property
    def queued(self) -> list[TasksQueued]:
        return [TasksQueued(shape, tuple(tasks)) for shape, tasks in self._queued.values()]

    def recording(self) -> Recording:
        return Recording(
            ended=tuple(self.ended),
            requeued=tuple(self.requeued),
            released=tuple(self.released),
            withdrawn=tuple(self.withdrawn),
        )


def difference(
    state: State,
    rows: ChangedRows,
    shape_of: Callable[[TaskId, SpecId], Shape | None],
    paused: RejectedPlans,
) -> Difference:
    """Events that make the state agree with the rows. `paused`: queued tasks that the planner set aside.

    Raises `UnknownSpec`.
    """
    found = Difference()
    gangs = {gang.lease.task: gang for gang in rows.gangs}
    leases: list[TasksLeased] = []
    for row in rows.tasks:
        if row.status == QUEUED:
            _queued(found, state, row, rows.attempts.get((row.id, row.epoch)), shape_of, paused)
        elif not row.holding:
            _ended(found, state, row)
        elif row.node_id is None:
            gang = gangs.get(row.id)
            if gang is not None:
                leases += _changed(found, state, gang.leased(_shape(row, shape_of), None))
        else:
            leases += _held(found, state, row, row.node_id, shape_of)
    for leased in leases:
        if _is_free(state, leased, found.released):
            found.leased.append(leased)
        else:
            found.left_out += leased.tasks
    return found


def _queued(
    found: Difference,
    state: State,
    row: ChangedTask,
    attempt: EndedAttempt | None,
    shape_of: Callable[[TaskId, SpecId], Shape | None],
    paused: RejectedPlans,
) -> None:
    at = Instant(0) if row.queued_at is None else row.queued_at
    line = state.held.get(row.id)
    if line is not None:
        found.released[row.id] = None
        found.requeued.append(_requeued(row, attempt, line.node, at))
    elif row.id not in paused and _epoch_in_queue(state, row.id) != row.epoch:
        shape = _shape(row, shape_of)
        found.queue(shape, QueuedTask(row.id, row.epoch, at))


def _requeued(
    row: ChangedTask, attempt: EndedAttempt | None, node: NodeId, at: Instant
) -> Requeued:
    if attempt is None:
        reason, ran, fault = EndReason.LOST, Span(0), None
    else:
        started, reason, node = attempt.started_at, REASON[attempt.reason], attempt.node_id
        ran = Span(0 if started is None else max(0, attempt.ended_at - started))
        fault = FAULTS.get(attempt.reason) if started is None else None
    return Requeued(row.id, row.epoch, row.spec_id, row.user_id, at, reason, ran, node, fault)


def _ended(found: Difference, state: State, row: ChangedTask) -> None:
    if row.id in state.held:
        found.released[row.id] = None
        if row.status != CANCELLED:
            began, over = row.started_at, row.finished_at
            took = 0 if began is None or over is None else max(0, over - began)
            status = STATUS[row.status]
            found.ended.append(EndedTask(row.id, row.batch_id, row.user_id, status, Span(took)))
    elif row.id in state.queues.tickets:
        found.withdrawn.append(row.id)


def _held(
    found: Difference,
    state: State,
    row: ChangedTask,
    node: NodeId,
    shape_of: Callable[[TaskId, SpecId], Shape | None],
) -> Iterator[TasksLeased]:
    line = state.held.get(row.id)
    if row.preempting and row.status != CANCELLED and (line is None or not line.stopping):
        found.preempted.append(row.id)
    if row.allocation_number is None or row.allocation is None:
        return
    allocation = allocation_from(row.allocation_number, row.allocation)
    if line is None or (line.node, line.allocation) != (node, allocation):
        leased = TasksLeased(node, allocation, _shape(row, shape_of), (row.id,))
        yield from _changed(found, state, leased)


def _changed(found: Difference, state: State, leased: TasksLeased) -> Iterator[TasksLeased]:
    """The lease, unless the state has it; another one of the task, on other allocations, is released first."""
    [task] = leased.tasks
    line = state.held.get(task)
    if line is not None:
        held = [(line.node, line.allocation), *((one.node, one.allocation) for one in line.members)]
        if held == list(_allocations(leased)):
            return
        found.released[task] = None
    yield leased


def _is_free(state: State, leased: TasksLeased, released: Mapping[TaskId, None]) -> bool:
    """Whether each of its allocations is free, will be by then, or is the same lease queue."""
    for node, allocation in _allocations(leased):
        entry = state.nodes.get(node)
        line = None if entry is None else entry.lines.get(allocation.number)
        if line is None or (line.tasks and line.tasks <= released.keys()):
            continue
        if leased.members or line.members:
            return False
        if line.allocation != allocation or line.shape != leased.shape:
            return False
    return True


def _allocations(leased: TasksLeased) -> Iterator[tuple[NodeId, Allocation]]:
    yield leased.node, leased.allocation
    for part in leased.members:
        yield part.node, part.allocation


def _epoch_in_queue(state: State, task: TaskId) -> int | None:
    ticket = state.queues.tickets.get(task)
    return None if ticket is None else epoch_of(ticket)


def _shape(row: ChangedTask, shape_of: Callable[[TaskId, SpecId], Shape | None]) -> Shape:
    shape = shape_of(row.id, row.spec_id)
    if shape is None:
        raise UnknownSpec(f"spec {row.spec_id} of task {row.id}")
    return shape

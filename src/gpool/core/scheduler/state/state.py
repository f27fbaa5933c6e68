"""Scheduling state: queues by shape, nodes with their free room, and held allocations, folded from events.

A cache of the store: `build` makes an equal one from rows; an impossible event raises `Contradiction`, and the owner
rebuilds. A fold costs a constant per task. A rebuild may lose hints (`history`, `pins`, predictions, recent usage,
attained run times); equality ignores them. One file because every event updates the same queues, rooms and shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import assert_never

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import Allocation, Instant, Node, Shape, Span
from gpool.core.scheduler.order.fair_share import Shares, UsageValues, amounts_of, tenant_of, total
from gpool.core.scheduler.order.limits import Holder, gpus_of, holders_of
from gpool.core.scheduler.order.orders import at_level, level_of, plain
from gpool.core.scheduler.predict.run_times import Predictions
from gpool.core.scheduler.state.events import (
    Event,
    Leased,
    NodeChanged,
    NodeChanges,
    NodeRemoved,
    QueuedTask,
    RunTimesObserved,
    TasksLeased,
    TasksPreempted,
    TasksQueued,
    TasksReleased,
    TasksWithdrawn,
)
from gpool.core.scheduler.state.hints import InputCaches, PinnedSlots, SchedulingHistory
from gpool.core.scheduler.state.queue import Queue, epoch_of
from gpool.core.scheduler.state.stoppable import StoppableAllocations
from gpool.core.scheduler.state.waiting import HeldAllocation, NodeState, ShapeState, WaitingTasks


class Contradiction(AssertionError):
    """Event that cannot follow the folded ones: the state must be rebuilt."""


class State:
    """Changed by `fold` only."""

    __slots__ = (
        "_known",
        "caches",
        "changes",
        "gpus",
        "held",
        "history",
        "nodes",
        "pins",
        "predictions",
        "queues",
        "running",
        "shapes",
        "shares",
        "stoppable",
    )

    def __init__(self) -> None:
        self.shapes: dict[Shape, ShapeState] = {}  # those with waiting tasks or allocations
        self.nodes: dict[NodeId, NodeState] = {}
        self.held: dict[TaskId, HeldAllocation] = {}
        self.running: dict[UserId, int] = {}  # allocations of each user
        self.gpus: dict[Holder, int] = {}  # thousandths of GPUs that users and teams hold
        self.stoppable = StoppableAllocations()
        self.predictions = Predictions()
        self.shares = Shares(self.predictions)
        self.queues = WaitingTasks()
        self.caches = InputCaches()
        self.history = SchedulingHistory()
        self.pins = PinnedSlots()
        self.changes = NodeChanges()
        self._known: dict[int, ShapeState] = {}  # by identity: hashing a shape is slow

    @property
    def queued_count(self) -> int:
        return len(self.queues.tickets)

    def queue_of(self, task: TaskId) -> ShapeState | None:
        ticket = self.queues.tickets.get(task)
        return None if ticket is None else self.shapes[ticket.queue.shape]

    def attained(self, task: TaskId, now: Instant) -> Span:
        """Earlier leases, and the present one if it is preemptible."""
        line = self.held.get(task)
        if line is None:
            return self.queues.attained(task)
        lease = line.leases.get(task)
        if lease is None:
            return Span(0)
        return Span(lease.attained + max(0, now - line.since) if line.since else lease.attained)

    def take_hints(self, other: State) -> None:
        self.history = other.history.copy()
        self.pins = other.pins.copy()
        self.shares.usage = other.shares.usage.copy()
        self.shares.weights = other.shares.weights
        self.predictions = other.predictions  # only read by the planner of a copy
        self.shares.predictions = other.predictions
        self.changes.note_inputs(self.caches.take(other.caches))

    def inherit(self, old: State, now: Instant) -> None:
        old.shares.settle(now, old.queues.shape_count)
        mine = self.shares.usage.steps
        self.take_hints(old)
        self.pins.retain(self.queues.tickets)
        theirs = self.shares.usage.steps
        self.shares.usage.steps = {who: theirs.get(who, step) for who, step in mine.items()}

    def pass_time(self, now: Instant) -> None:
        """Count shares held until now as usage, though no event came."""
        self.history.begin_pass()
        self.shares.pass_time(now, self.queues.shape_count)

    def used(self, now: Instant) -> UsageValues:
        return self.shares.values(now, self.queues.shape_count)

    def truth(self) -> tuple[object, ...]:
        waiting: dict[Shape, list[tuple[int, int, int]]] = {}
        for entry in self.queues.shapes():
            found = waiting.setdefault(plain(entry.shape), [])
            found += [(e.queued_at, e.task, epoch_of(e)) for e in entry.queue.entries()]
        queues = {shape: sorted(found) for shape, found in waiting.items()}
        nodes = {
            id_: (
                node.node,
                node.room.truth(),
                {n: (line.allocation, line.shape, line.count) for n, line in node.lines.items()},
            )
            for id_, node in self.nodes.items()
        }
        held = {task: (line.node, line.allocation.number) for task, line in self.held.items()}
        lines = {shape: set(entry.lines) for shape, entry in self.shapes.items() if entry.lines}
        return (
            queues,
            nodes,
            held,
            lines,
            self.running,
            self.gpus,
            self.shares.truth(),
            set(self.queues.tickets),
            {plain(shape) for shape in self.shapes},
        )

    def __eq__(self, other: object) -> bool:
        return self.truth() == other.truth() if isinstance(other, State) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def fold(self, event: Event) -> None:
        """Raises `Contradiction` if the event is impossible."""
        match event:
            case TasksQueued(shape, tasks):
                self._queue(shape, tasks)
            case TasksWithdrawn(tasks):
                self._leave_queue(tasks)
            case TasksLeased():
                self._lease(event)
            case TasksReleased(tasks, at):
                if at:
                    self.shares.pass_time(at, self.queues.shape_count)
                self._release(tasks)
            case TasksPreempted(tasks, beneficiaries):
                self._preempt(tasks, beneficiaries)
            case NodeChanged(node):
                self._change(node)
            case NodeRemoved(id_):
                self._remove(id_)
            case RunTimesObserved(shape, count, total, model):
                self._observe(shape, count, total, model)
            case _:
                assert_never(event)

    def _change(self, node: Node) -> None:
        known = self.nodes.get(node.id)
        if known is None:
            self.nodes[node.id] = NodeState(node)
        elif known.node != node:
            known.change(node)
        else:
            return
        self.shares.put(node)
        self.changes.note(node.id)

    def _remove(self, id_: NodeId) -> None:
        gone = self.nodes.get(id_)
        if gone is not None and gone.lines:
            gone.change(None)  # leases are still held there
        elif gone is not None:
            del self.nodes[id_]
        self.shares.remove(id_)
        self.pins.drop_node(id_)
        self.changes.note_inputs(self.caches.forget(id_))
        self.changes.note(id_)

    def _entry(self, shape: Shape) -> ShapeState:
        entry = self._known.get(id(shape))
        if entry is not None and entry.shape is shape:
            return entry
        entry = self.shapes.get(shape)
        if entry is None:
            entry = self.shapes[shape] = ShapeState(shape, self.queues.tickets)
            self._known[id(shape)] = entry
        return entry

    def _drop_if_idle(self, entry: ShapeState) -> None:
        if not entry.queue.size and not entry.lines:
            self.shapes.pop(entry.shape, None)
            self._known.pop(id(entry.shape), None)

    def _queue(self, shape: Shape, tasks: Sequence[QueuedTask]) -> None:
        if any(task.attained for task in tasks):
            by_level: dict[int, list[QueuedTask]] = {}
            for task in tasks:
                by_level.setdefault(level_of(task.attained), []).append(task)
            for level, alike in by_level.items():
                self._queue_alike(at_level(shape, level), alike)
                self.queues.note_attained(alike)
        else:
            self._queue_alike(shape, tasks)

    def _queue_alike(self, shape: Shape, tasks: Sequence[QueuedTask]) -> None:
        entry = self._entry(shape)
        if tasks:
            self.shares.pass_time(tasks[0].queued_at, self.queues.shape_count)
        self.history.join(entry.shape.user)
        left = entry.queue.add(tasks)
        if self.queues.enter(entry):
            self.shares.begin_waiting(entry.shape)
        self._tidy(left)
        self._drop_if_idle(entry)

    def _leave_queue(self, tasks: Sequence[TaskId]) -> None:
        self.pins.drop(tasks)
        self._tidy(self.queues.remove(tasks))

    def _tidy(self, queues: set[Queue]) -> None:
        for entry in self.queues.tidy(queues):
            self.shares.end_waiting(entry.shape)
            self._drop_if_idle(entry)

    def _lease(self, event: TasksLeased) -> None:
        if not event.tasks:
            return
        entry = self._entry(plain(event.shape))
        number = event.allocation.number
        key = (event.node, number)
        if event.at:
            self.shares.pass_time(event.at, self.queues.shape_count)
        line = entry.lines.get(key)
        if line is None:
            line = self._open(entry, key, event.allocation)
            if event.members:
                parts = [(part.node, part.allocation) for part in event.members]
                line.members = tuple(
                    [self._open(entry, (node, part.number), part) for node, part in parts]
                )
                for member in line.members:
                    member.count = 1
                line.amounts = total(part.amounts for part in (line, *line.members))
        elif line.allocation != event.allocation:
            raise Contradiction(f"allocation {key} is {line.allocation}, not {event.allocation}")
        held, size_before = self.held, len(self.held)
        for task in event.tasks:
            before = held.setdefault(task, line)
            if before is not line:
                raise Contradiction(
                    f"task {task} holds {before.node}/{before.allocation.number}, not {key}"
                )
        line.count += len(held) - size_before
        line.tasks.update(event.tasks)
        line.since = event.at
        for part in line.members:
            part.since = event.at
        if event.leases:
            line.leases.update(zip(event.tasks, event.leases, strict=True))
        if line.leases:
            self.stoppable.put(line)
        self._leave_queue(event.tasks)
        if self.pins:
            there = self.nodes[event.node].lines.values()
            self.pins.note_start(event.node, (each.stopping for each in there))
        self.history.serve(event.shape.user)

    def _preempt(self, tasks: Iterable[TaskId], beneficiaries: Iterable[TaskId]) -> None:
        for task, gainer in zip_longest(tasks, beneficiaries):
            line = self.held.get(task)
            if line is not None:
                line.stopping = True
                self.stoppable.put(line)
                gains = self.queue_of(gainer)
                if gains is not None and tenant_of(gains.shape) != tenant_of(line.shape):
                    self.pins.pin(gainer, line.node)

    def _open(
        self, entry: ShapeState, key: tuple[NodeId, int], allocation: Allocation
    ) -> HeldAllocation:
        node = self.nodes.get(key[0])
        if node is None:
            node = self.nodes[key[0]] = NodeState(None)
        if key[1] in node.lines:
            raise Contradiction(f"allocation {key} is held by {node.lines[key[1]].shape}")
        line = HeldAllocation(key[0], allocation, entry.shape)
        if entry.shape.data:
            self.changes.note_inputs(self.caches.note(key[0], entry.shape.data))
        entry.lines[key] = node.lines[key[1]] = line
        user = entry.shape.user
        node.room.take(allocation, user)
        self.changes.note(key[0])
        self.running[user] = self.running.get(user, 0) + 1
        taken = gpus_of(allocation)
        if taken:
            for holder in holders_of(entry.shape):
                self.gpus[holder] = self.gpus.get(holder, 0) + taken
        self.shares.take(entry.shape, line.amounts)
        return line

    def _release(self, tasks: Iterable[TaskId]) -> None:
        held = self.held
        for task in tasks:
            line = held.pop(task, None)
            if line is not None:
                line.count -= 1
                line.tasks.discard(task)
                if line.leases:
                    line.leases.pop(task, None)
                    self.stoppable.note(line)
                if not line.count:
                    self._close(line)
                    for member in line.members:
                        self._close(member)

    def _close(self, line: HeldAllocation) -> None:
        number, user = line.allocation.number, line.shape.user
        node, entry = self.nodes[line.node], self._entry(line.shape)
        del node.lines[number]
        del entry.lines[line.node, number]
        self.stoppable.drop(line)
        node.room.give(line.allocation)
        self.shares.give(line.shape, amounts_of(line.allocation))
        if node.node is None and not node.lines:
            del self.nodes[line.node]
        self.changes.note(line.node)
        self.running[user] -= 1
        if not self.running[user]:
            del self.running[user]
        taken = gpus_of(line.allocation)
        if taken:
            for holder in holders_of(line.shape):
                self.gpus[holder] -= taken
                if not self.gpus[holder]:
                    del self.gpus[holder]
        self._drop_if_idle(entry)

    def _observe(self, shape: Shape, count: int, total: Span, model: str) -> None:
        if count <= 0:
            return
        self.predictions.observe(shape, count, total, model)
        self.history.observe(shape, count, total)


def build(
    nodes: Iterable[Node],
    queued: Iterable[tuple[Shape, QueuedTask]],
    held: Iterable[tuple[NodeId, Allocation, Shape, TaskId]],
    leases: Mapping[TaskId, tuple[Instant, Leased]] | None = None,
) -> State:
    """Rows in any order. `leases`: start time and lease of preemptible tasks."""
    state = State()
    for node in nodes:
        state.fold(NodeChanged(node))
    groups: dict[int, tuple[Shape, list[QueuedTask]]] = {}  # by identity: hashing a shape is slow
    for shape, task in queued:
        group = groups.get(id(shape))
        if group is None:
            group = groups[id(shape)] = (shape, [])
        group[1].append(task)
    by_shape: dict[Shape, list[QueuedTask]] = {}
    for shape, tasks in groups.values():
        by_shape.setdefault(shape, []).extend(tasks)
    for shape, tasks in by_shape.items():
        tasks.sort(key=lambda task: (task.queued_at, task.id))
        state.fold(TasksQueued(shape, tuple(tasks)))
    lines: dict[tuple[NodeId, Allocation, Shape], list[TaskId]] = {}
    for node_id, allocation, shape, id_ in held:
        lines.setdefault((node_id, allocation, shape), []).append(id_)
    for (node_id, allocation, shape), ids in lines.items():
        known = [leases[id_] for id_ in ids if id_ in leases] if leases else []
        hints = known if len(known) == len(ids) else []
        since = max((at for at, _ in hints), default=Instant(0))
        event = TasksLeased(
            node_id, allocation, shape, tuple(ids), (), since, tuple(lease for _, lease in hints)
        )
        state.fold(event)
    return state

"""What the scheduler sees: queues by shape, nodes with what is free, and who holds what. Folded from events, never planned upon in place.

`fold` costs a constant per task. The state is a cache of the store: `build` makes an equal one from the store's rows, and a
state that meets an impossible event says so (`Contradiction`), upon which its owner rebuilds it. Run-time estimates, the
order in which users were last served, what arrived lately, for whom room is being made, and for tasks that may be preempted
since when they run and what they ran before are hints, not truth: they may be lost in a rebuild and are left out of equality.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import assert_never

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import Allocation, Instant, Node, Shape, Span
from gpool.core.scheduler.order.fair_share import Shares, Told, amounts_of, tenant_of, total
from gpool.core.scheduler.order.levels import at_level, level_of, plain
from gpool.core.scheduler.order.limits import Holder, gpus_of, holders_of
from gpool.core.scheduler.predict.predictions import Predictions
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.events import (
    Event,
    Leased,
    Member,
    NodeChanged,
    NodeRemoved,
    QueuedTask,
    RunTimesObserved,
    TasksLeased,
    TasksPreempted,
    TasksQueued,
    TasksReleased,
    TasksWithdrawn,
)
from gpool.core.scheduler.state.input_caches import InputCaches
from gpool.core.scheduler.state.node_changes import NodeChanges
from gpool.core.scheduler.state.pins import PinnedSlots
from gpool.core.scheduler.state.queue import Queue, QueueTicket, epoch_of
from gpool.core.scheduler.state.rotation import next_of, shared_out

MAX_ESTIMATES = 10_000
MAX_SERVED = 100_000
MAX_ARRIVALS = 20_000  # remembered, batches of one shape as one
MAX_ALIKE = 50  # of one batch
_KEEP = 0.9  # weight of what was known, for each further attempt observed


class Contradiction(AssertionError):
    """An event that cannot follow what was folded before: the state is wrong and must be rebuilt from the store."""


class Line:
    """An allocation on a node and how many leases stand in line for it.

    A gang has one line a node: the first has the task, the others are its `members`.
    """

    __slots__ = (
        "allocation",
        "amounts",
        "count",
        "entry",
        "leases",
        "members",
        "node",
        "shape",
        "since",
        "stopping",
        "tasks",
    )

    def __init__(self, node: NodeId, allocation: Allocation, entry: ShapeState) -> None:
        self.node = node
        self.allocation = allocation
        self.entry = entry
        self.shape = entry.shape
        self.count = 0
        self.tasks: set[TaskId] = set()  # whose leases these are; a member's is with the first line
        self.amounts = amounts_of(allocation)  # those of its members included
        self.members: tuple[Line, ...] = ()
        self.since = Instant(0)  # when its newest lease was granted
        self.leases: dict[TaskId, Leased] = {}  # where they may be preempted
        self.stopping = False  # asked to make room


class ShapeState:
    """One shape: its waiting tasks and its lines."""

    __slots__ = ("lines", "queue", "shape")

    def __init__(self, shape: Shape, live: dict[TaskId, QueueTicket]) -> None:
        self.shape = shape
        self.queue = Queue(shape, live)
        self.lines: dict[tuple[NodeId, int], Line] = {}


class NodeState:
    """One node: what it offers (None: gone, leases still held there), what is free, its lines by allocation number."""

    __slots__ = ("lines", "node", "room")

    def __init__(self, node: Node | None) -> None:
        self.node = node
        self.room = Room(node)
        self.lines: dict[int, Line] = {}

    def change(self, node: Node | None) -> None:
        self.node = node
        self.room = Room(node)
        for line in self.lines.values():
            self.room.take(line.allocation, line.shape.user)


class State:
    """See the module. Read it freely; change it by `fold` only."""

    __slots__ = (
        "_arrived",
        "_attained",
        "_estimates",
        "_known",
        "_live",
        "_serial",
        "_served",
        "_waiting",
        "_wanting",
        "caches",
        "changes",
        "gpus",
        "held",
        "nodes",
        "passes",
        "pins",
        "predictions",
        "running",
        "shapes",
        "shares",
        "stoppable",
    )

    def __init__(self) -> None:
        self.shapes: dict[Shape, ShapeState] = {}  # only those with waiting tasks or lines
        self.nodes: dict[NodeId, NodeState] = {}
        self.held: dict[TaskId, Line] = {}
        self.running: dict[UserId, int] = {}  # allocations a user holds
        self.gpus: dict[Holder, int] = {}  # thousandths of GPUs that users and teams hold
        self.predictions = Predictions()
        self.shares = Shares(self.predictions)
        self.caches = InputCaches()
        self.changes = NodeChanges()
        self.pins = PinnedSlots()
        self.stoppable: dict[tuple[NodeId, int], Line] = {}  # what may be preempted, or is being
        self._attained: dict[TaskId, Span] = {}  # of waiting tasks that ran before
        self._live: dict[TaskId, QueueTicket] = {}
        self._estimates: dict[Shape, float] = {}
        self._served: dict[UserId, int] = {}
        self._serial = 0
        self._waiting: dict[Queue, ShapeState] = {}  # those of `shapes` that have waiting tasks
        self._wanting: dict[UserId, dict[Queue, ShapeState]] = {}  # the same, by user
        self.passes = 0  # how many began: a hint
        self._known: dict[int, ShapeState] = {}  # by identity: hashing a shape is dear
        self._arrived: deque[tuple[Shape, int]] = deque(maxlen=MAX_ARRIVALS)

    # ---- reading

    @property
    def queued_count(self) -> int:
        return len(self._live)

    def queue_of(self, task: TaskId) -> ShapeState | None:
        """The shape under which a task waits, or None."""
        ticket = self._live.get(task)
        if ticket is None:
            return None
        return self.shapes[ticket.queue.shape]

    def waiting(self) -> Iterator[ShapeState]:
        """The shapes that have waiting tasks."""
        return iter(self._waiting.values())

    @property
    def shapes_waiting(self) -> int:
        return len(self._waiting)

    def in_view(self, most: int, due: int) -> list[ShapeState]:
        """Of those at most `most` for one pass (see `turns`), and those that are due."""
        if len(self._waiting) <= most:
            return list(self._waiting.values())
        wanting = self._wanting
        found = [wanting[user][queue] for user, queue in shared_out(wanting, most, self.passes)]
        known = set(found)
        return found + [entry for entry in self.due(due).values() if entry not in known]

    def due(self, count: int) -> dict[UserId, ShapeState]:
        """So many users, in turn, and of each one shape, in turn as well."""
        found = next_of(self._wanting, count, self.passes)
        return {user: self._wanting[user][queue] for user, queue in found.items()}

    def estimate(self, shape: Shape) -> Span | None:
        """How long a task of this shape takes, as far as seen."""
        seen = self._estimates.get(shape)
        return None if seen is None else Span(max(1, round(seen)))

    def served(self, user: UserId) -> int:
        """Grows with each lease: the user with the smaller number was served less recently, or came later than that."""
        return self._served.get(user, 0)

    def attained(self, task: TaskId, now: Instant) -> Span:
        """How long a task has run so far, as far as is known: in earlier leases, and in this one if it may be preempted."""
        line = self.held.get(task)
        if line is None:
            return self._attained.get(task, Span(0))
        lease = line.leases.get(task)
        if lease is None:
            return Span(0)
        return Span(lease.attained + max(0, now - line.since) if line.since else lease.attained)

    def arrivals(self) -> list[Shape]:
        """What came lately, oldest first, to learn a pricing from; of a large batch only some."""
        return [shape for shape, count in self._arrived for _ in range(min(count, MAX_ALIKE))]

    def take_hints(self, other: State) -> None:
        """What `other` knows beyond the truth, so that both plan alike: run times, who was served when, what arrived."""
        self._estimates = other._estimates.copy()
        self._served, self._serial = other._served.copy(), other._serial
        self.passes = other.passes
        self.pins = other.pins.copy()
        self._arrived = other._arrived.copy()
        self.shares.usage = other.shares.usage.copy()
        self.shares.weights = other.shares.weights
        self.predictions = other.predictions  # only read by who plans on a copy
        self.shares.predictions = other.predictions
        self.changes.note_inputs(self.caches.take(other.caches))

    def inherit(self, old: State, now: Instant) -> None:
        """The hints of a state that this one takes the place of."""
        old.shares.settle(now, len(old._waiting))
        mine = self.shares.usage.steps
        self.take_hints(old)
        self.pins.retain(self._live)
        theirs = self.shares.usage.steps
        self.shares.usage.steps = {who: theirs.get(who, step) for who, step in mine.items()}

    def pass_time(self, now: Instant) -> None:
        """A pass begins. So late is it: what is held counts as had up to now, though nothing happened."""
        self.passes += 1
        self.shares.pass_time(now, len(self._waiting))

    def used(self, now: Instant) -> Told:
        """What users and teams had lately, to be kept for `recall`."""
        return self.shares.told(now, len(self._waiting))

    def truth(self) -> tuple[object, ...]:
        """All that is not a hint, as a plain value."""
        waiting: dict[Shape, list[tuple[int, int, int]]] = {}
        for entry in self._waiting.values():
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
            set(self._live),
            {plain(shape) for shape in self.shapes},
        )

    def __eq__(self, other: object) -> bool:
        return self.truth() == other.truth() if isinstance(other, State) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    # ---- folding

    def fold(self, event: Event) -> None:
        """Takes in one event. Raises `Contradiction` when it cannot be: rebuild the state then."""
        match event:
            case TasksQueued(shape, tasks):
                self._queue(shape, tasks)
            case TasksWithdrawn(tasks):
                self._leave_queue(tasks)
            case TasksLeased():
                self._lease(event)
            case TasksReleased(tasks, at):
                if at:
                    self.shares.pass_time(at, len(self._waiting))
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
            gone.change(None)  # its leases still have to end
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
            entry = self.shapes[shape] = ShapeState(shape, self._live)
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
                self._attained.update((t.id, t.attained) for t in alike if t.attained)
        else:
            self._queue_alike(shape, tasks)

    def _queue_alike(self, shape: Shape, tasks: Sequence[QueuedTask]) -> None:
        entry = self._entry(shape)
        if tasks:
            self.shares.pass_time(tasks[0].queued_at, len(self._waiting))
        if tasks and tasks[0].epoch == 0:
            self._arrived.append((entry.shape, len(tasks)))
        if entry.shape.user not in self._served:
            # Whoever comes new stands before the one served last and behind the others: a stream of such starves nobody.
            self._serve(entry.shape.user, self._serial - 1)
        left = entry.queue.add(tasks)
        if entry.queue.size and entry.queue not in self._waiting:
            self._waiting[entry.queue] = entry
            self._wanting.setdefault(entry.shape.user, {})[entry.queue] = entry
            self.shares.wants(entry.shape)
        self._tidy(left)
        self._drop_if_idle(entry)

    def _leave_queue(self, tasks: Sequence[TaskId]) -> None:
        self.pins.drop(tasks)
        live = self._live
        touched: set[Queue] = set()
        queue_before: Queue | None = None
        for task in tasks:
            ticket = live.pop(task, None)
            if ticket is None:
                continue
            queue = ticket.queue
            queue.size -= 1
            if self._attained:
                self._attained.pop(task, None)
            if queue is not queue_before:
                queue_before = queue
                touched.add(queue)
        self._tidy(touched)

    def _tidy(self, queues: set[Queue]) -> None:
        for queue in queues:
            queue.tidy()
            if not queue.size:
                entry = self._waiting.pop(queue, None)
                if entry is not None:
                    theirs = self._wanting[entry.shape.user]
                    del theirs[queue]
                    if not theirs:
                        del self._wanting[entry.shape.user]
                    self.shares.rests(entry.shape)
                    self._drop_if_idle(entry)

    def _lease(self, event: TasksLeased) -> None:
        if not event.tasks:
            return
        entry = self._entry(plain(event.shape))
        number = event.allocation.number
        key = (event.node, number)
        if event.at:
            self.shares.pass_time(event.at, len(self._waiting))
        line = entry.lines.get(key)
        if line is None:
            line = self._open(entry, key, event.allocation)
            if event.members:
                line.members = tuple([self._open_member(entry, part) for part in event.members])
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
            self.stoppable[key] = line
        self._leave_queue(event.tasks)
        there = self.nodes[event.node].lines.values()
        self.pins.note_start(event.node, (each.stopping for each in there))
        self._serial += 2
        self._serve(event.shape.user, self._serial)

    def _serve(self, user: UserId, number: int) -> None:
        self._served.pop(user, None)
        self._served[user] = number
        if len(self._served) > MAX_SERVED:
            del self._served[next(iter(self._served))]

    def _open_member(self, entry: ShapeState, part: Member) -> Line:
        line = self._open(entry, (part.node, part.allocation.number), part.allocation)
        line.count = 1
        return line

    def _preempt(self, tasks: Iterable[TaskId], beneficiaries: Iterable[TaskId]) -> None:
        for task, gainer in zip_longest(tasks, beneficiaries):
            line = self.held.get(task)
            if line is not None:
                line.stopping = True
                self.stoppable[line.node, line.allocation.number] = line
                gains = self.queue_of(gainer)
                if gains is not None and tenant_of(gains.shape) != tenant_of(line.shape):
                    self.pins.pin(gainer, line.node)

    def _open(self, entry: ShapeState, key: tuple[NodeId, int], allocation: Allocation) -> Line:
        node = self.nodes.get(key[0])
        if node is None:
            node = self.nodes[key[0]] = NodeState(None)
        if key[1] in node.lines:
            raise Contradiction(f"allocation {key} is held by {node.lines[key[1]].shape}")
        line = Line(key[0], allocation, entry)
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
                if not line.count:
                    self._close(line)
                    for member in line.members:
                        self._close(member)

    def _close(self, line: Line) -> None:
        number, user = line.allocation.number, line.shape.user
        node, entry = self.nodes[line.node], line.entry
        del node.lines[number]
        del entry.lines[line.node, number]
        self.stoppable.pop((line.node, number), None)
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
        mean = total / count
        before = self._estimates.pop(shape, None)
        old = 0.0 if before is None else _KEEP ** min(count, 64)
        self._estimates[shape] = (before or 0.0) * old + mean * (1 - old)
        if len(self._estimates) > MAX_ESTIMATES:
            del self._estimates[next(iter(self._estimates))]


def build(
    nodes: Iterable[Node],
    queued: Iterable[tuple[Shape, QueuedTask]],
    held: Iterable[tuple[NodeId, Allocation, Shape, TaskId]],
    leases: Mapping[TaskId, tuple[Instant, Leased]] | None = None,
) -> State:
    """The state as the store has it, in any order of rows. `leases`: since when those run that may be preempted."""
    state = State()
    for node in nodes:
        state.fold(NodeChanged(node))
    groups: dict[int, tuple[Shape, list[QueuedTask]]] = {}  # by identity: hashing a shape is dear
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

"""Waiting tasks and held allocations, by shape and user, and the shapes that a pass considers.

**Rotation.** A pass considers a bounded number of users, then of each user's shapes, so that many shapes of one user
delay nobody. Of both, the third that waited longest and the third that came last are always considered, the others in
rotation: the first in the order stays in view, a new task starts at once where there is room, and every shape is
considered within a bounded number of passes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import islice
from typing import TypeVar

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import MIB, Allocation, Instant, Node, Shape, Span, TaskKind, TaskSpec
from gpool.core.scheduler.order.fair_share import amounts_of
from gpool.core.scheduler.predict.run_times import kind_of
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.events import Leased, QueuedTask
from gpool.core.scheduler.state.queue import Queue, QueueTicket

LEAST_DATA = 256 * MIB
"""Smaller inputs load quickly: tasks that differ in them alone are one shape."""


def shape_of(spec: TaskSpec, user: UserId, team: int | None = None) -> Shape:
    group = spec.function_sha256 if spec.kind is TaskKind.FUNCTION else kind_of(spec.command)
    data, size = data_of(spec)
    return Shape(
        user,
        spec.requirements,
        spec.priority,
        spec.kind,
        spec.environment,
        group,
        team,
        spec.preemptible or bool(spec.checkpoint),
        by=spec.by,
        checkpoint_every=spec.checkpoint_every if spec.checkpoint else None,
        data=data,
        data_bytes=size,
    )


def data_of(spec: TaskSpec) -> tuple[str, int]:
    large = sorted({(one.sha256, one.size_bytes) for one in spec.inputs if one.size_bytes >= MIB})
    size = sum(each for _, each in large)
    if size < LEAST_DATA:
        return "", 0
    return sha256(" ".join(name for name, _ in large).encode()).hexdigest()[:16], size


class HeldAllocation:
    """Allocation on a node and its queued leases. A gang has one per node; the first has the task and lists the `members`."""

    __slots__ = (
        "allocation",
        "amounts",
        "count",
        "leases",
        "members",
        "node",
        "shape",
        "since",
        "stopping",
        "tasks",
    )

    def __init__(self, node: NodeId, allocation: Allocation, shape: Shape) -> None:
        self.node = node
        self.allocation = allocation
        self.shape = shape
        self.count = 0  # leases in the queue
        self.tasks: set[TaskId] = set()  # whose leases these are; of a gang with the first
        self.amounts = amounts_of(allocation)  # members included
        self.members: tuple[HeldAllocation, ...] = ()
        self.since = Instant(0)  # when its newest lease was granted
        self.leases: dict[TaskId, Leased] = {}  # of preemptible tasks
        self.stopping = False  # preempted, not yet released


class NodeState:
    """One node: its offer (None: it left, leases are still held), free room, and allocations by number."""

    __slots__ = ("lines", "node", "room")

    def __init__(self, node: Node | None) -> None:
        self.node = node
        self.room = Room(node)
        self.lines: dict[int, HeldAllocation] = {}

    def change(self, node: Node | None) -> None:
        self.node = node
        self.room = Room(node)
        for held in self.lines.values():
            self.room.take(held.allocation, held.shape.user)


K = TypeVar("K")
V = TypeVar("V")


class ShapeState:
    __slots__ = ("lines", "queue", "shape")

    def __init__(self, shape: Shape, tickets: dict[TaskId, QueueTicket]) -> None:
        self.shape = shape
        self.queue = Queue(shape, tickets)
        self.lines: dict[tuple[NodeId, int], HeldAllocation] = {}


class WaitingTasks:
    __slots__ = ("_attained", "_by_user", "_shapes", "tickets")

    def __init__(self) -> None:
        self.tickets: dict[TaskId, QueueTicket] = {}  # a task waits if and only if it has one
        self._shapes: dict[Queue, ShapeState] = {}
        self._by_user: dict[UserId, dict[Queue, ShapeState]] = {}
        self._attained: dict[TaskId, Span] = {}  # of tasks that ran before

    @property
    def shape_count(self) -> int:
        return len(self._shapes)

    def shapes(self) -> Iterator[ShapeState]:
        return iter(self._shapes.values())

    def shapes_of(self, user: UserId) -> Collection[ShapeState]:
        return self._by_user.get(user, {}).values()

    def in_view(self, most: int, due: int, turn: int) -> list[ShapeState]:
        """`turn`: number of the pass; `due`: number of users in rotation."""
        if len(self._shapes) <= most:
            return list(self._shapes.values())
        by_user = self._by_user
        found = [by_user[user][queue] for user, queue in shared_out(by_user, most, turn)]
        known = set(found)
        return found + [entry for entry in self.due(due, turn).values() if entry not in known]

    def due(self, count: int, turn: int) -> dict[UserId, ShapeState]:
        found = next_of(self._by_user, count, turn)
        return {user: self._by_user[user][queue] for user, queue in found.items()}

    def attained(self, task: TaskId) -> Span:
        return self._attained.get(task, Span(0))

    def note_attained(self, tasks: Iterable[QueuedTask]) -> None:
        self._attained.update((task.id, task.attained) for task in tasks if task.attained)

    def enter(self, entry: ShapeState) -> bool:
        """Return whether the shape is new."""
        if not entry.queue.size or entry.queue in self._shapes:
            return False
        self._shapes[entry.queue] = entry
        self._by_user.setdefault(entry.shape.user, {})[entry.queue] = entry
        return True

    def remove(self, tasks: Iterable[TaskId]) -> set[Queue]:
        tickets, touched = self.tickets, set[Queue]()
        before: Queue | None = None
        for task in tasks:
            ticket = tickets.pop(task, None)
            if ticket is None:
                continue
            queue = ticket.queue
            queue.size -= 1
            if self._attained:
                self._attained.pop(task, None)
            if queue is not before:
                before = queue
                touched.add(queue)
        return touched

    def tidy(self, queues: set[Queue]) -> list[ShapeState]:
        emptied = []
        for queue in queues:
            queue.tidy()
            if not queue.size:
                entry = self._shapes.pop(queue, None)
                if entry is not None:
                    theirs = self._by_user[entry.shape.user]
                    del theirs[queue]
                    if not theirs:
                        del self._by_user[entry.shape.user]
                    emptied.append(entry)
        return emptied


def some(items: Mapping[K, V], most: int, turn: int, stride: int = 0) -> dict[K, int]:
    """Values are rotation numbers: a third from either end, the rest in rotation. `stride`: items per turn."""
    count = len(items)
    if count <= most:
        return dict.fromkeys(items, turn)
    names = list(items)
    first, last = (most + 1) // 3, most // 3
    found = dict.fromkeys(names[:first], turn)
    step = most - first - last
    for place in range(turn * (stride or step), turn * (stride or step) + step):
        found.setdefault(names[place % count], place // count)
    for each in names[count - last :]:
        found.setdefault(each, turn)
    return found


def shared_out(
    items: Mapping[K, Mapping[V, object]], most: int, turn: int
) -> Iterator[tuple[K, V]]:
    """Each owner gets at least two items, or all it has."""
    owners = list(some(items, max(1, most // 2), turn).items())
    owners.sort(key=lambda owned: len(items[owned[0]]))
    left = most
    for place, (owner, times) in enumerate(owners):
        found = some(items[owner], left // (len(owners) - place), times, 1)
        left -= len(found)
        for each in found:
            yield owner, each


def next_of(items: Mapping[K, Mapping[V, object]], count: int, turn: int) -> dict[K, V]:
    owners = list(items)
    count = min(count, len(owners))
    found = {}
    for place in range(turn * count, (turn + 1) * count):
        owner, times = owners[place % len(owners)], place // len(owners)
        found[owner] = next(islice(items[owner], times % len(items[owner]), None))
    return found

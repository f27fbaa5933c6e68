"""Held allocations, and nodes with their free room and allocations."""

from __future__ import annotations

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Allocation, Instant, Node, Shape
from gpool.core.scheduler.order.fair_share import amounts_of
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.events import Leased


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

"""Replay of arrivals through the planner, to choose a pricing and for measurements. Has no clock."""

from __future__ import annotations

from collections.abc import Iterable

from gpool.core.ids import TaskId
from gpool.core.model import Instant, Node, Shape
from gpool.core.scheduler.order.limits import gpus_of
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.passes.plan import plan
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.state.events import (
    NodeChanged,
    Placement,
    QueuedTask,
    TasksLeased,
    TasksQueued,
    TasksReleased,
    TasksWithdrawn,
)
from gpool.core.scheduler.state.state import State


class Replay:
    """Idle pool. A task that does not start at once is withdrawn."""

    def __init__(self, nodes: Iterable[Node], policy: Policy) -> None:
        self.state = State()
        self._index = PlacementIndex()
        self.policy = policy
        self.capacity_milli = 0
        self.taken_milli = 0
        self._last = 0
        self._held: dict[TaskId, int] = {}
        for node in nodes:
            self.state.fold(NodeChanged(node))
            lent = [gpu for gpu in node.offer.gpus if gpu.index not in node.gpus_withheld]
            self.capacity_milli += 1000 * len(lent)

    def arrive(self, shape: Shape, now: Instant) -> Placement | None:
        self._last += 1
        task = TaskId(self._last)
        self.state.fold(TasksQueued(shape, (QueuedTask(task, 0, now),)))
        places = plan(self.state, self._index, now, self.policy).places
        if not places:
            self.state.fold(TasksWithdrawn((task,)))
            return None
        place = places[0]
        self.state.fold(TasksLeased(place.node, place.allocation, place.shape, (task,)))
        self._held[task] = gpus_of(place.allocation)
        self.taken_milli += self._held[task]
        return place

    def end(self, task: TaskId) -> None:
        self.taken_milli -= self._held.pop(task)
        self.state.fold(TasksReleased((task,)))

    @property
    def unallocated_pct(self) -> float:
        return 100 * (1 - self.taken_milli / self.capacity_milli) if self.capacity_milli else 0.0

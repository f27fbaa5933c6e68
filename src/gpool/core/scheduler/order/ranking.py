"""Position of a waiting task by the order in force. Decides nothing.
The n-th task of a shape is ranked as if its user and team held the n tasks before it, ignoring their other shapes:
exact at the front of the queue, an estimate behind.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from gpool.core.ids import TaskId
from gpool.core.model import Instant, Node, Shape
from gpool.core.scheduler.order.fair_share import Amounts, compared, tenant_of
from gpool.core.scheduler.order.levels import attained_at
from gpool.core.scheduler.order.limits import Holder, band, least_gpus
from gpool.core.scheduler.order.orders import Candidate, Order, Policy, Rank
from gpool.core.scheduler.place.fit import unfit
from gpool.core.scheduler.place.kinds import kind_key
from gpool.core.scheduler.state.queue import TaskQueueEntry
from gpool.core.scheduler.state.state import State
from gpool.core.scheduler.state.waiting import ShapeState

STEP = 50
"""Shapes or nodes per step of a generator."""

_LOOKS = 50_000
"""Nodes compared for all shapes together; past them a shape counts as one that could use the same nodes."""


class Ranking:
    def __init__(self, state: State, now: Instant, policy: Policy, order: Order) -> None:
        self._state, self._now, self._policy, self._order = state, now, policy, order

    def ahead(
        self, mine: ShapeState, task: TaskId, nodes: list[Node]
    ) -> Generator[None, None, int]:
        """Number of tasks ranked before this one that could use one of these nodes; in steps."""
        entry = mine.queue.entry_of(task)
        if entry is None:
            return 0
        own = mine.queue.count_while(lambda _, other: other < entry)
        own_rank = self.rank(mine.shape, own, entry)
        total, looks = own, _LOOKS
        nodes = yield from _one_per_kind(nodes)
        for number, other in enumerate(list(self._state.queues.shapes()), 1):
            if number % STEP == 0:
                yield
            if other is mine:
                continue
            shape = other.shape
            before = other.queue.count_while(
                lambda place, e, shape=shape: self.rank(shape, place, e) < own_rank  # type: ignore[misc]
            )
            if not before:
                continue
            if looks <= 0 or any(unfit(node, shape) is None for node in nodes):
                total += before
            looks -= len(nodes)
        return total

    def rank(self, shape: Shape, place: int, entry: TaskQueueEntry) -> Rank:
        state, policy = self._state, self._policy
        needs = shape.requirements
        gpus = least_gpus(shape) * needs.nodes
        memory = (needs.memory_bytes or 0) * needs.nodes
        more: Amounts = (place * gpus, place * needs.cpu_milli * needs.nodes, place * memory)

        def share(holder: Holder) -> int:
            return state.shares.of(holder, policy.weights.get(holder, 1000), more)

        def held(holder: Holder) -> int:
            return state.gpus.get(holder, 0) + more[0]

        candidate = Candidate(
            shape,
            Instant(entry.queued_at),
            TaskId(entry.task),
            state.running.get(shape.user, 0) + place * needs.nodes,
            state.history.served(shape.user),
            attained_at(shape.level),
            self._shares(shape, share),
            state.predictions.of(shape) if self._order.uses_predictions else None,
            band(policy.limits, shape, held, gpus),
        )
        return self._order.rank(candidate, self._now, policy)

    def _shares(self, shape: Shape, share: Callable[[Holder], int]) -> tuple[int, int]:
        own = share(("user", shape.user))
        if shape.team is None:
            return own, own
        return compared(shape, share(tenant_of(shape)), own, self._policy.weights)


def _one_per_kind(nodes: list[Node]) -> Generator[None, None, list[Node]]:
    kinds: dict[tuple[object, ...], Node] = {}
    for number, node in enumerate(nodes, 1):
        if number % STEP == 0:
            yield
        kinds.setdefault(kind_key(node), node)
    return list(kinds.values())

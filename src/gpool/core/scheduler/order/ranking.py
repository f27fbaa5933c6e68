"""Position of a waiting task by the order in force, and permission to stop a running task for it. Chooses no victims."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple

from gpool.core.ids import TaskId
from gpool.core.model import Instant, Node, Shape, Span
from gpool.core.scheduler.order.fair_share import Amounts, compared, tenant_of
from gpool.core.scheduler.order.limits import Holder, band, least_gpus
from gpool.core.scheduler.order.orders import Candidate, Order, Policy, Rank, attained_at
from gpool.core.scheduler.order.promotion import Promotions
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
        self._promotions = Promotions(state, now, policy)

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
        others = list(self._state.queues.shapes())
        by_owner = any(other.shape.requirements.on is not None for other in others)
        nodes = yield from _one_per_kind(nodes, by_owner)
        for number, other in enumerate(others, 1):
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
            self._promotions.of(shape.user, entry.task),
        )
        return self._order.rank(candidate, self._now, policy)

    def _shares(self, shape: Shape, share: Callable[[Holder], int]) -> tuple[int, int]:
        own = share(("user", shape.user))
        if shape.team is None:
            return own, own
        return compared(shape, share(tenant_of(shape)), own, self._policy.weights)


def _one_per_kind(nodes: list[Node], by_owner: bool) -> Generator[None, None, list[Node]]:
    kinds: dict[tuple[object, ...], Node] = {}
    for number, node in enumerate(nodes, 1):
        if number % STEP == 0:
            yield
        owner = (node.owner, node.owner_teams) if by_owner else None
        kinds.setdefault((owner, *kind_key(node)), node)
    return list(kinds.values())


NEAR_MILLI = 30
"""Recent usages of two tenants that differ by less than this are equal."""

_ONE = 1000
Pair = tuple[int, int]
"""A number of the tenant and the same of the user."""


class ExchangeSide(NamedTuple):
    """Counted as if the running task did not run. Shares in millionths of the pool."""

    rank: Rank
    shares: Pair = (0, 0)  # held now and recently used
    had: Pair = (0, 0)  # recently used
    holds: Pair = (0, 0)  # held now; of the running side with the running task


class Exchange(NamedTuple):
    waiting: ExchangeSide
    gained: Pair  # shares of the waiting side once its task runs
    running: ExchangeSide
    ran: Span  # since the running task last started
    evens: tuple[bool, bool] = (False, False)  # the waiting side holds less now, and not more after
    is_own: bool = False  # both tasks are of one user


def outranks(exchange: Exchange, order: Order, policy: Policy) -> bool:
    waiting, running = exchange.waiting, exchange.running
    if waiting.rank.band != running.rank.band:
        return waiting.rank.band < running.rank.band
    if not order.exchanges_by_share:
        return order.precedes(waiting.rank.key, running.rank.key)
    for part in (0, 1):  # tenants, then the users of one tenant
        less, more, margin = waiting.shares[part], running.shares[part], policy.margin_milli
        if less != more:
            is_ahead_after = _exceeds(more, exchange.gained[part], margin)
            if is_ahead_after or exchange.ran < policy.quantum:
                return is_ahead_after
            had, others = waiting.had[part], running.had[part]
            if _exceeds(others, had, NEAR_MILLI) and waiting.holds[part] < running.holds[part]:
                return True
            return others >= had and (exchange.evens[part] or _exceeds(more, less, margin))
    if exchange.is_own:
        return order.class_of(waiting.rank.key) < order.class_of(running.rank.key)
    return waiting.rank.key < running.rank.key


def _exceeds(more: int, less: int, margin_milli: int) -> bool:
    # The margin counts on both sides of the share that both should have.
    return more * (_ONE - margin_milli) > less * (_ONE + margin_milli)

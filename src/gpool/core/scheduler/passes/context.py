"""Values of one pass: inputs, ledgers, cursors over the queues, and the plan under construction.
Every other module of this package builds on this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import Allocation, Instant, Shape
from gpool.core.scheduler.order.fair_share import Amounts, amounts_of, tenant_of, total
from gpool.core.scheduler.order.limits import WITHIN, Holder, gpus_in
from gpool.core.scheduler.order.orders import Candidate, Order, Policy, Rank, attained_at
from gpool.core.scheduler.order.promotion import Promotions
from gpool.core.scheduler.passes.ledger import (
    CapacityLedger,
    Holding,
    NodeClaims,
    RunTimeMemo,
    TenantLedger,
)
from gpool.core.scheduler.passes.victims import VictimSearch
from gpool.core.scheduler.place.fit import Fit
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.state.events import GangPart, Preempt
from gpool.core.scheduler.state.queue import TaskQueueEntry
from gpool.core.scheduler.state.state import State
from gpool.core.scheduler.state.waiting import ShapeState

MAX_VAIN_SEARCHES = 64
"""Shapes of one user, per pass, for which victims are sought without result."""

SEARCHES_IN_ROTATION = 2
"""Users per pass that may search whatever the budget says."""

_RESERVATION_SEARCHES = 64
_PREEMPTION_WORK = 10_000  # about microseconds
_HELPED_TENANTS = 8


UNRANKED = Rank(WITHIN, ())


class QueueCursor:
    __slots__ = ("_entries", "entry", "head", "is_blocked", "left", "rank", "ranked_at", "shape")

    def __init__(self, entry: ShapeState) -> None:
        self.entry, self.shape = entry, entry.shape
        self.left = entry.queue.size
        self.head: TaskQueueEntry = entry.queue.front()
        self.is_blocked = False  # by a GPU limit, or waiting for inputs: more room would not help
        self.rank = UNRANKED
        self.ranked_at = 0  # number of the ledger's last change when the rank was computed
        self._entries: Iterator[TaskQueueEntry] | None = None  # made when it is first taken from

    def set_rank(self, rank: Rank, changes: int) -> None:
        self.rank, self.ranked_at = rank, changes

    def block(self) -> None:
        self.is_blocked = True

    def take(self, count: int) -> list[TaskQueueEntry]:
        if self.left == count == 1:
            self.left = 0
            return [self.head]
        if self._entries is None:
            self._entries = self.entry.queue.entries()
            next(self._entries)
        taken = [self.head, *islice(self._entries, count - 1)]
        self.left -= count
        if self.left:
            self.head = next(self._entries)
        return taken


class PlannedAllocation:
    __slots__ = ("allocation", "grants", "members", "node", "queued", "shape")

    def __init__(
        self,
        node: NodeId,
        allocation: Allocation,
        shape: Shape,
        queued: int = 0,
        members: tuple[GangPart, ...] = (),
    ) -> None:
        self.node = node
        self.allocation = allocation
        self.shape = shape
        self.queued = queued  # leases that were in the queue before
        self.members = members
        self.grants: list[TaskQueueEntry] = []

    @property
    def length(self) -> int:
        return self.queued + len(self.grants)

    @property
    def amounts(self) -> Amounts:
        return total(
            amounts_of(part) for part in (self.allocation, *(m.allocation for m in self.members))
        )


class PlanDraft:
    def __init__(self) -> None:
        self.allocations: list[PlannedAllocation] = []
        self.preemptions: list[Preempt] = []
        self.is_partial = False
        self._known: set[tuple[NodeId, int]] = set()

    def add(self, planned: PlannedAllocation) -> None:
        key = (planned.node, planned.allocation.number)
        if key not in self._known:
            self._known.add(key)
            self.allocations.append(planned)

    def leave_rest(self) -> None:
        self.is_partial = True


class PassBudget:
    """Bounds, so that a user with many shapes does not delay others. Past them, users in rotation (`WaitingTasks.due`) are
    still served: every user is within a bounded number of passes.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._due: dict[UserId, ShapeState] | None = None
        self._vain: dict[UserId, int] = {}
        self._helped: set[Holder] = set()
        self._work = _PREEMPTION_WORK
        self._reservations = _RESERVATION_SEARCHES

    def due(self) -> dict[UserId, ShapeState]:
        if self._due is None:
            self._due = self._state.queues.due(SEARCHES_IN_ROTATION, self._state.history.passes)
        return self._due

    def may_reserve(self) -> bool:
        return self._reservations > 0

    def use_reservation(self) -> None:
        self._reservations -= 1

    def may_help(self, tenant: Holder) -> bool:
        return tenant not in self._helped and len(self._helped) < _HELPED_TENANTS

    def help(self, tenant: Holder) -> None:
        self._helped.add(tenant)

    def may_search(self, cursor: QueueCursor) -> bool:
        vain = self._vain.get(cursor.shape.user, 0)
        if self._work > 0 and vain < MAX_VAIN_SEARCHES:
            return True
        due = self.due().get(cursor.shape.user)
        return due is not None and (not vain or due is cursor.entry)

    def use_work(self, units: int) -> None:
        self._work -= units

    def count_vain(self, user: UserId, change: int = 1) -> None:
        self._vain[user] = self._vain.get(user, 0) + change


@dataclass(frozen=True, slots=True)
class PassContext:
    state: State
    index: PlacementIndex
    now: Instant
    policy: Policy
    order: Order
    capacity: CapacityLedger
    claims: NodeClaims
    tenants: TenantLedger
    run_times: RunTimeMemo
    promotions: Promotions
    victims: VictimSearch
    budget: PassBudget
    draft: PlanDraft

    @property
    def preempts_by_order(self) -> bool:
        return self.policy.preemption and self.order.may_preempt

    @property
    def may_preempt(self) -> bool:
        limits = self.policy.limits
        return self.policy.preemption and (self.order.may_preempt or bool(limits.guaranteed))


def begin(
    state: State, index: PlacementIndex, now: Instant, policy: Policy, order: Order
) -> PassContext:
    run_times = RunTimeMemo(state, now)
    tenants = TenantLedger(state, policy, uses_shares=order.uses_shares)
    promotions = Promotions(state, now, policy)
    preempts = policy.preemption and order.may_preempt
    return PassContext(
        state,
        index,
        now,
        policy,
        order,
        CapacityLedger(state, index),
        NodeClaims(index, now, run_times, preempts=preempts),
        tenants,
        run_times,
        promotions,
        VictimSearch(state, index, now, policy, order, tenants, promotions),
        PassBudget(state),
        PlanDraft(),
    )


def rank_of(
    ctx: PassContext, cursor: QueueCursor, given_up: int = 0, without: Holding | None = None
) -> Rank:
    """Counted as if the user had released `given_up` allocations and `without`."""
    shape, head, tenants = cursor.entry.shape, cursor.head, ctx.tenants
    guaranteed = ctx.policy.limits.guaranteed
    candidate = Candidate(
        shape,
        Instant(head.queued_at),
        TaskId(head.task),
        tenants.running(shape.user) - given_up,
        ctx.state.history.served(shape.user),
        attained_at(shape.level),
        tenants.shares(shape, without),
        ctx.run_times.of(shape) if ctx.order.uses_predictions else None,
        tenants.band(shape, without) if guaranteed else WITHIN,
        ctx.promotions.of(shape.user, head.task),
    )
    return ctx.order.rank(candidate, ctx.now, ctx.policy)


def rank_beside(ctx: PassContext, other: QueueCursor, own: Holding) -> Rank:
    shape, user = other.entry.shape, own.shape.user
    if shape.user == user:
        return rank_of(ctx, other, given_up=1, without=own)
    is_shared = ctx.order.uses_shares and tenant_of(shape) == tenant_of(own.shape)
    return rank_of(ctx, other, without=own) if is_shared else other.rank


def is_within_limits(ctx: PassContext, cursor: QueueCursor, *fits: Fit) -> bool:
    """Whether user and team may run these GPUs too; if not, the cursor is blocked. After `policy.patience` the limit is saved
    for the task, or its owner's smaller tasks would always overtake it.
    """
    if not ctx.policy.limits.is_any:
        return True
    gpus = sum(gpus_in(each.slices) for each in fits)
    holder = ctx.tenants.limit_exceeded(cursor.shape, gpus)
    if holder is None:
        return True
    cursor.block()
    limit = ctx.policy.limits.of(holder) or 0
    if gpus <= limit and ctx.now - cursor.head.queued_at >= ctx.policy.patience:
        ctx.tenants.save_limit(holder)
    return False


def allocate(ctx: PassContext, cursor: QueueCursor, *found: tuple[NodeId, Fit]) -> None:
    """Several nodes are a gang, the leader's first."""
    shape = cursor.shape
    parts = [GangPart(node, ctx.capacity.take(shape, node, fits)) for node, fits in found]
    ctx.tenants.count(shape, [part.allocation for part in parts])
    leader, *members = parts
    planned = PlannedAllocation(leader.node, leader.allocation, shape, members=tuple(members))
    planned.grants += cursor.take(1)
    ctx.draft.add(planned)

"""A scheduling pass: which waiting tasks get which allocations now. Pure: the same state gives the same plan.

    look ── rank the shapes with waiting tasks (at most MAX_SHAPES, the rest in rotation)
     │
    count_stopping, keep_pins ── room freed by earlier preemptions goes to the tasks it was freed for
     │
    start ── in rank order, one allocation at a time:   start_next  or  preempt_for  or  reserve_for
     │                                                  (starts)       (preemption)     (reservations)
    fill_queues ── tasks that cannot start are prefetched behind leases of their shape (queue_fill)

Stages write only to the ledgers of a `PassContext`. No start exceeds a GPU limit; a task that waits only for a limit
reserves no node and takes no allocation from others. The cost grows with waiting shapes, grants and changed nodes;
hardly with queue lengths or the number of nodes. `PassBudget` and the limits of `starts` bound a pass; a plan cut short
is `is_partial`.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpool.core.ids import TaskId
from gpool.core.model import Instant
from gpool.core.scheduler.order.builtin import ORDERS, order_named
from gpool.core.scheduler.order.orders import Order, Policy
from gpool.core.scheduler.passes.context import PassContext, PlannedAllocation, begin
from gpool.core.scheduler.passes.preemption import count_stopping
from gpool.core.scheduler.passes.queue_fill import fill_queues
from gpool.core.scheduler.passes.reservations import contention
from gpool.core.scheduler.passes.starts import keep_pins, look, start
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.state.events import LeaseGrant, PassPlan, Placement
from gpool.core.scheduler.state.queue import TaskQueueEntry, epoch_of
from gpool.core.scheduler.state.state import State

DEFAULT = Policy()


def plan(
    state: State,
    index: PlacementIndex,
    now: Instant,
    policy: Policy = DEFAULT,
    orders: Mapping[str, Order] = ORDERS,
) -> PassPlan:
    """Raises `Invalid` if the policy names an unknown order."""
    order = order_named(policy.order, orders)
    index.follow(state, policy.pricing)
    ctx = begin(state, index, now, policy, order)
    scored = index.scored_for_new
    try:
        cursors = look(ctx)
        among = contention(ctx, cursors)
        count_stopping(ctx)
        keep_pins(ctx, cursors)
        waiting = start(ctx, cursors, among, scored)
    finally:
        index.end_pass()
    fill_queues(ctx, waiting)
    return _result(ctx)


def _result(ctx: PassContext) -> PassPlan:
    places = tuple([_place(ctx, planned) for planned in ctx.draft.allocations])
    return PassPlan(places, tuple(ctx.draft.preemptions), ctx.draft.is_partial)


def _place(ctx: PassContext, planned: PlannedAllocation) -> Placement:
    if planned.shape.preemptible:
        grants = tuple([_preemptible_grant(ctx, entry) for entry in planned.grants])
    else:
        grants = tuple(
            [
                LeaseGrant(TaskId(e.task), epoch_of(e) + 1, Instant(e.queued_at))
                for e in planned.grants
            ]
        )
    return Placement(planned.node, planned.allocation, planned.shape, grants, planned.members)


def _preemptible_grant(ctx: PassContext, entry: TaskQueueEntry) -> LeaseGrant:
    task = TaskId(entry.task)
    attained = ctx.state.attained(task, ctx.now)
    return LeaseGrant(task, epoch_of(entry) + 1, Instant(entry.queued_at), attained)

"""Reserve stage: keep a node for a task that has waited for `policy.patience` and fits nowhere.
The node is the one predicted to have room first; tasks predicted to end before may backfill it (`NodeClaims`). A wrong
prediction only delays the task: no task predicted to outlast the reservation gets in. While predictions hold, backfill
never delays the first task in the order; it may delay others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from gpool.core.ids import NodeId
from gpool.core.model import SECOND, Allocation, Instant, Node, Shape, Span
from gpool.core.scheduler.order.fair_share import asked_by, tenant_of
from gpool.core.scheduler.order.limits import Holder, gpus_of, least_gpus
from gpool.core.scheduler.passes.context import PassContext, QueueCursor
from gpool.core.scheduler.passes.ledger import UNKNOWN, BackfillReservation
from gpool.core.scheduler.passes.queue_fill import prefetch_depth
from gpool.core.scheduler.place import gangs
from gpool.core.scheduler.place.fit import fit, is_slice
from gpool.core.scheduler.state.capacity import Room

MIN_RESERVED_NODES = 8
"""Nodes that may be reserved in the smallest pool; in larger ones a quarter of the nodes."""

_FAR = Span(30 * 24 * UNKNOWN)
_BEHIND_MILLI = 20  # by which recent usage must be less to count as less
_NODES_COMPARED = 32


class Contention(NamedTuple):
    """In millionths of the pool."""

    most_share: int = 0
    most_recent: int = 0  # recent usage
    mean_held: int = 0
    is_one_user: bool = (
        False  # all waiting tasks are of one user, who may be stopped: none is kept out
    )
    is_needless: bool = False  # and none is prefetched either: a reservation has no effect


def contention(ctx: PassContext, cursors: Collection[QueueCursor]) -> Contention:
    """Empty if no task has waited long enough to get a reservation."""
    since = ctx.now - ctx.policy.patience
    if not ctx.order.uses_shares or all(cursor.head.queued_at > since for cursor in cursors):
        return Contention()
    tenants = {tenant_of(cursor.shape) for cursor in cursors}
    shares = {each: ctx.tenants.share(each) for each in tenants}
    recent = {each: ctx.tenants.recent(each) for each in tenants}
    held = sum(shares[each] - recent[each] for each in tenants)
    is_one_user = (
        ctx.preempts_by_order
        and all(cursor.shape.preemptible for cursor in cursors)
        and len({cursor.shape.user for cursor in cursors}) == 1
    )
    return Contention(
        max(shares.values(), default=0),
        max(recent.values(), default=0),
        held // max(1, len(tenants)),
        is_one_user,
        is_one_user
        and all(prefetch_depth(ctx.state, each.shape, ctx.policy) == 1 for each in cursors),
    )


def reserve_for(ctx: PassContext, cursor: QueueCursor, among: Contention) -> None:
    shape, claims, queued_at = cursor.shape, ctx.claims, Instant(cursor.head.queued_at)
    if among.is_needless or ctx.now - queued_at < ctx.policy.patience:
        return
    if cursor.entry.lines and not _is_owed(ctx, shape, among):
        return
    if cursor.is_blocked:
        return
    most = max(MIN_RESERVED_NODES, len(ctx.state.nodes) // 4)
    if not ctx.budget.may_reserve() or claims.reserved_count >= most:
        return
    ctx.budget.use_reservation()
    if shape.requirements.nodes > 1:
        nodes = gangs.nearest(ctx.index, shape, claims.closed_to_reservation_for(shape))
        if nodes:  # the whole set for a gang, or none
            at = max(_opens_at(ctx, id_, shape, among) for id_ in nodes)
            claims.reserve(nodes, BackfillReservation(shape, at, queued_at))
        return
    owed = _allocations_owed(ctx, cursor, among)
    while owed > 0 and claims.reserved_count < most:
        nearest = _nearest(ctx, cursor)
        if nearest is None:
            return
        at = _opens_at(ctx, nearest, shape, among)
        claims.reserve([nearest], BackfillReservation(shape, at, queued_at))
        gpus = 1000 * len(ctx.capacity.room(nearest).gpus)
        owed -= max(1, gpus // max(1, least_gpus(shape)))


def _opens_at(ctx: PassContext, id_: NodeId, shape: Shape, among: Contention) -> Instant:
    """`now` where no waiting task will be compared with it (`NodeClaims.closed_to`)."""
    return ctx.now if among.is_one_user else Instant(_ready_at(ctx, id_, shape))


def _allocations_owed(ctx: PassContext, cursor: QueueCursor, among: Contention) -> int:
    """Number of allocations of this shape the tenant is short of its equal share; 1 if the order ignores shares."""
    shape, tenant = cursor.shape, tenant_of(cursor.shape)
    if not ctx.order.uses_shares or shape.preemptible:
        return 1
    recent = ctx.tenants.recent(tenant)
    held = ctx.tenants.share(tenant) - recent
    one = ctx.tenants.share(tenant, None, asked_by(shape)) - recent - held
    return max(1, min(cursor.left, (among.mean_held - held) // max(1, one)))


def _is_owed(ctx: PassContext, shape: Shape, among: Contention) -> bool:
    """A shape of which some tasks run does not starve, but large allocations are part of a fair share: its tenant must have had
    less than others recently, or have less even with one more.
    """
    tenant = tenant_of(shape)
    if not ctx.budget.may_help(tenant):
        return False
    if ctx.order.uses_shares:
        gained, _ = ctx.tenants.shares(shape, None, asked_by(shape))
        is_behind = _is_less(ctx.tenants.recent(tenant), among.most_recent)
        if not is_behind and gained > among.most_share:
            return False
    ctx.budget.help(tenant)
    return True


def _is_less(had: int, other: int) -> bool:
    return 1000 * other > (1000 + _BEHIND_MILLI) * had


def _is_behind(ctx: PassContext, tenant: Holder, other: Holder) -> bool:
    return tenant != other and _is_less(ctx.tenants.recent(tenant), ctx.tenants.recent(other))


def _nearest(ctx: PassContext, cursor: QueueCursor) -> NodeId | None:
    """Ready first or, where shares count, with the least remaining work of others; for a preemptible shape, with the fewest
    allocations. The sample of nodes is the same in every pass, so that the choice is stable.
    """
    shape = cursor.shape
    taken = ctx.claims.closed_to_reservation_for(shape)
    if shape.preemptible:
        return ctx.index.nearest(shape, taken)
    slots, _ = ctx.index.could_run(shape, taken)
    ids = np.sort(ctx.index.board.columns.ids[slots])
    some: list[NodeId] = ids[:: max(1, len(ids) // _NODES_COMPARED)].tolist()
    if not ctx.order.uses_shares:
        return min(some, key=lambda id_: (_ready_at(ctx, id_, shape), id_), default=None)
    works = [(_work_before(ctx, id_, cursor), id_) for id_ in some]
    known = [(work, id_) for work, id_ in works if work is not None]
    return min(known)[1] if known else None


def _work_before(ctx: PassContext, id_: NodeId, cursor: QueueCursor) -> int | None:
    """Predicted work on the node before the shape fits; None if reserving it would not help.

    The sum of squared remaining seconds: backfilled tasks hardly count, and the sum shrinks on a reserved node, so that the
    next pass reserves it again. If tasks of the shape run already, only tenants that had more recently have to leave, and no
    single GPU is reserved where the next end frees it anyway.
    """
    shape, is_first = cursor.shape, not cursor.entry.lines
    entry, room, needs = ctx.state.nodes[id_], ctx.capacity.room(id_), shape.requirements
    gpus = min((request.count for request in needs.gpu), default=0) * 1000
    free = sum(1000 for gpu in room.gpus.values() if not gpu.holders)
    cpu, work, tenant = room.free_cpu, 0, tenant_of(shape)
    if free >= gpus and cpu >= needs.cpu_milli:
        return work
    remaining = ctx.run_times.remaining(entry)
    if not is_first:
        remaining = [
            each for each in remaining if _is_behind(ctx, tenant, tenant_of(each.line.shape))
        ]
    for number, (time, line) in enumerate(remaining):
        free, cpu = free + gpus_of(line.allocation), cpu + line.allocation.cpu_milli
        work += (time // SECOND) ** 2
        if free >= gpus and cpu >= needs.cpu_milli:
            return work if is_first or number or gpus > 1000 else None
    return None


def _ready_at(ctx: PassContext, id_: NodeId, shape: Shape) -> int:
    entry, now = ctx.state.nodes[id_], ctx.now
    node = entry.node
    if node is None:
        return now
    lasts = ctx.run_times.on
    ends = [
        PredictedEnd(line.since + lasts(node, line.shape, line.allocation), line.allocation)
        for line in entry.lines.values()
    ]
    ends += [
        PredictedEnd(now + lasts(node, kind, allocation), allocation)
        for kind, allocation in ctx.capacity.started(id_)
    ]
    found = ready_at(node, ctx.capacity.room(id_), ends, shape, now)
    return now + _FAR if found is None else found


class PredictedEnd(NamedTuple):
    at: int
    allocation: Allocation


def ready_at(
    node: Node, room: Room, ends: Iterable[PredictedEnd], shape: Shape, now: Instant
) -> Instant | None:
    """None: not even after all these ends. The room is not changed."""
    idle = _idle_gpus_needed(shape)
    if _has_room(node, room, shape, idle):
        return now
    free = room.copy()
    for end in sorted(ends, key=lambda end: (end.at, end.allocation.number)):
        free.give(end.allocation)
        if _has_room(node, free, shape, idle):
            return Instant(max(now, end.at))
    return None


def _has_room(node: Node, room: Room, shape: Shape, idle_needed: int) -> bool:
    idle = sum(1 for gpu in room.gpus.values() if not gpu.holders) if idle_needed else 0
    return idle >= idle_needed and fit(node, room, shape) is not None


def _idle_gpus_needed(shape: Shape) -> int:
    requests = shape.requirements.gpu
    if any(is_slice(request) for request in requests):
        return 0
    return min((request.count for request in requests), default=0)

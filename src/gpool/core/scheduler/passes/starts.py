"""Start stage of a pass: candidates in rank order start, preempt, or get a node reserved, one allocation at a time.

A victim stops seconds after the pass that preempts it; the beneficiary starts in a later pass. In between, the victim's
tenant has a smaller share: its next task might rank first and take the slot back under protection. A pin, made for every
preemption between tenants, binds the beneficiary to the node until it starts or leaves the queue, the node leaves, or a
task starts there and nothing is stopping any more.

Example with one GPU, shares in millionths:

    pass 1   B waits with share 750,000; A runs, share 720,000 without its task. A's task has used its quantum and A had
             more recently: it is preempted for B's task 9, which is pinned to the node
    pass 2   A's task has stopped. A's next task (720,000) ranks before task 9 (750,000), but the pin is served first:

      pins ── task 9 fits now? ── yes ── start it
                               └─ no, but fits once all has stopped ── close the node to all other shapes

A pin is a hint (`state.pins`): if it is lost, the slot goes to the first task in the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from gpool.core.ids import NodeId
from gpool.core.model import Instant
from gpool.core.scheduler.order.orders import Rank
from gpool.core.scheduler.passes.context import (
    SEARCHES_IN_ROTATION,
    UNRANKED,
    PassContext,
    QueueCursor,
    allocate,
    is_within_limits,
    rank_of,
)
from gpool.core.scheduler.passes.preemption import preempt_for
from gpool.core.scheduler.passes.reservations import Contention, reserve_for
from gpool.core.scheduler.place import gangs, input_affinity
from gpool.core.scheduler.place.fit import fit, unfit
from gpool.core.scheduler.state.queue import TaskQueueEntry


def keep_pins(ctx: PassContext, cursors: Sequence[QueueCursor]) -> None:
    """Start pinned tasks where room is free; close the other pinned nodes to other shapes.

    Tasks within a guarantee still go first. Gangs have no pins: their nodes are searched anew.
    """
    if not ctx.state.pins or not ctx.order.uses_shares or not cursors:
        return
    most = min(ctx.policy.max_places_per_pass, MAX_STARTS)
    first = min(cursor.rank.band for cursor in cursors)
    known = {id(cursor.entry): cursor for cursor in cursors if cursor.rank.band == first}
    for task, id_ in ctx.state.pins.items():
        entry, node = ctx.state.queue_of(task), ctx.capacity.node(id_)
        cursor = None if entry is None else known.get(id(entry))
        if node is None or cursor is None or not cursor.left:
            continue
        if len(ctx.draft.allocations) >= most:
            continue
        shape = cursor.shape
        if shape.requirements.nodes > 1 or unfit(node, shape):
            continue
        if id_ in ctx.claims.avoided(shape):
            continue
        found = fit(node, ctx.capacity.room(id_), shape)
        later = fit(node, ctx.capacity.future_room(id_), shape) if found is None else None
        if found is not None and is_within_limits(ctx, cursor, found):
            allocate(ctx, cursor, (id_, found))
        elif later is not None and is_within_limits(ctx, cursor, later):
            ctx.claims.pin(id_, shape)


MAX_SHAPES = 1500
"""Shapes considered in one pass; of more, some in rotation (`state.waiting`)."""

MAX_STARTS = 400
"""Starts of one pass; the next pass goes on."""

_MAX_SCORED = 500_000  # nodes scored in a pass for shapes new to the index
_MAX_CARDS_TRIED = 32  # GPUs tried for a slice whose share of them differs


class QueuePosition(NamedTuple):
    rank: Rank
    head: TaskQueueEntry
    cursor: QueueCursor


def look(ctx: PassContext) -> list[QueueCursor]:
    queues, turn = ctx.state.queues, ctx.state.history.passes
    entries = queues.in_view(MAX_SHAPES, SEARCHES_IN_ROTATION, turn)
    cursors = [QueueCursor(entry) for entry in entries]
    if len(cursors) > 1 or ctx.state.pins:  # one alone: `_ranked`, if it cannot start
        for cursor in cursors:
            cursor.set_rank(rank_of(ctx, cursor), ctx.tenants.changes)
    if len(cursors) < queues.shape_count:
        ctx.draft.leave_rest()
    return cursors


def start(
    ctx: PassContext, cursors: list[QueueCursor], contention: Contention, scored: int
) -> list[QueueCursor]:
    """Return the cursors with tasks left, in order. A shape re-enters the heap after each start, since its owner's share has
    grown. `scored`: nodes scored for new shapes before the pass.
    """
    most = min(ctx.policy.max_places_per_pass, MAX_STARTS)
    heap = [QueuePosition(cursor.rank, cursor.head, cursor) for cursor in cursors if cursor.left]
    heapify(heap)
    waiting: list[QueueCursor] = []
    awaited: dict[str, int] = {}
    while heap and len(ctx.draft.allocations) < most:
        rank, _, cursor = heap[0]
        if ctx.tenants.has_changed(cursor.shape, cursor.ranked_at):
            cursor.set_rank(rank_of(ctx, cursor), ctx.tenants.changes)
            if cursor.rank > rank:
                heapreplace(heap, QueuePosition(cursor.rank, cursor.head, cursor))
                continue
        if ctx.index.scored_for_new - scored > _MAX_SCORED and _may_be_deferred(ctx, cursor):
            ctx.draft.leave_rest()
            waiting.append(cursor)
            heappop(heap)
            continue
        if not start_next(ctx, cursor, awaited) and not preempt_for(ctx, _ranked(ctx, cursor)):
            waiting.append(cursor)
            reserve_for(ctx, cursor, contention)
            heappop(heap)
        elif cursor.left:
            cursor.set_rank(rank_of(ctx, cursor), ctx.tenants.changes)
            heapreplace(heap, QueuePosition(cursor.rank, cursor.head, cursor))
        else:
            heappop(heap)
    if heap:
        ctx.draft.leave_rest()
    while heap:
        waiting.append(heappop(heap).cursor)
    return waiting


def _ranked(ctx: PassContext, cursor: QueueCursor) -> QueueCursor:
    """Rank a shape that is alone in view: its start needs no rank, and computing it is a third of a small pass."""
    if cursor.rank is UNRANKED:
        cursor.set_rank(rank_of(ctx, cursor), ctx.tenants.changes)
    return cursor


def _may_be_deferred(ctx: PassContext, cursor: QueueCursor) -> bool:
    is_due = cursor.entry is ctx.budget.due().get(cursor.shape.user)
    return not is_due and ctx.index.is_new(cursor.shape)


def start_next(ctx: PassContext, cursor: QueueCursor, awaited: dict[str, int]) -> bool:
    shape = cursor.shape
    requests = shape.requirements.gpu
    for choice in range(len(requests) or 1):
        if ctx.index.is_full(shape, choice):
            continue
        closed = ctx.claims.closed_to(shape)
        if shape.requirements.nodes > 1:
            members = gangs.places(ctx.index, shape, choice, closed)
            if members and is_within_limits(ctx, cursor, *(found for _, found in members)):
                allocate(ctx, cursor, *members)
                return True
            continue
        tries = _MAX_CARDS_TRIED
        while (found := ctx.index.best(shape, choice, closed)) is not None:
            node, fit = found
            if is_within_limits(ctx, cursor, fit):
                if shape.data and _waits_for_inputs(ctx, cursor, node, awaited):
                    cursor.block()
                    return False
                allocate(ctx, cursor, found)
                return True
            tries -= 1
            if requests[choice].vram_bytes is None or not tries:
                break  # it takes the same share of every GPU
            closed.add(node)
    return False


def _waits_for_inputs(
    ctx: PassContext, cursor: QueueCursor, node: NodeId, awaited: dict[str, int]
) -> bool:
    """`awaited`: waiting tasks of this pass, by inputs; there must soon be nodes for all of them."""
    shape, state = cursor.shape, ctx.state
    if node in state.caches.with_data(shape.data):
        return False
    queued_at = Instant(cursor.head.queued_at)
    if not input_affinity.may_wait(shape, queued_at, ctx.now, ctx.policy.patience):
        return False
    waiting = awaited.get(shape.data, 0) + cursor.left
    if input_affinity.ready_soon(state, shape, ctx.now, ctx.capacity.room) < waiting:
        return False
    awaited[shape.data] = waiting
    return True

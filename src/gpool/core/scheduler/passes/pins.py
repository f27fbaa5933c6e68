"""Pins: a slot freed by preemption is kept for the task it was freed for.

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

from gpool.core.scheduler.passes.context import (
    PassContext,
    QueueCursor,
    allocate,
    is_within_limits,
)
from gpool.core.scheduler.passes.starts import MAX_STARTS
from gpool.core.scheduler.place.fit import fit, unfit


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

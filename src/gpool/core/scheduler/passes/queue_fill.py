"""Prefetch stage: tasks that cannot start queue behind running leases of their shape, so that nodes do not idle.
A queue holds at most `policy.prefetch_target` of work. It is fed only while its shape would win the allocation again,
counted as released; else it runs dry and the allocation changes hands.
"""

from __future__ import annotations

from gpool.core.ids import NodeId
from gpool.core.model import Node, Shape
from gpool.core.scheduler.order.limits import holders_of
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.passes.context import (
    PassContext,
    PlannedAllocation,
    QueueCursor,
    rank_beside,
    rank_of,
)
from gpool.core.scheduler.passes.ledger import Holding
from gpool.core.scheduler.place.fit import fit, unfit
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.state import State

_MAX_COMPARISONS = 200_000  # of ranks, per pass; past them queues run dry
_REFILL = 4  # a queue is fed once a quarter of it is gone: fewer, larger grants


def prefetch_depth(state: State, shape: Shape, policy: Policy) -> int:
    """1 while run times are unknown."""
    seen = state.history.estimate(shape)
    if seen is None:
        return 1
    return max(1, min(policy.max_prefetch, policy.prefetch_target // seen))


def fill_queues(ctx: PassContext, waiting: list[QueueCursor]) -> None:
    started: dict[int, list[PlannedAllocation]] = {}
    for planned in ctx.draft.allocations:
        started.setdefault(id(planned.shape), []).append(planned)
    comparisons = _MAX_COMPARISONS
    for number, cursor in enumerate(waiting):
        shape = cursor.shape
        new = started.get(id(shape), [])
        if not (new or cursor.entry.lines) or shape.requirements.nodes > 1:
            continue
        depth = prefetch_depth(ctx.state, shape, ctx.policy)
        if depth == 1 or len(ctx.draft.allocations) >= ctx.policy.max_places_per_pass:
            continue
        nodes = {planned.node for planned in new} | {node for node, _ in cursor.entry.lines}
        cost = number * (1 + len(nodes))
        if cost > comparisons:
            continue
        comparisons -= cost
        found = _queues_to_feed(ctx, cursor, new, waiting[:number], depth)
        if found:
            _spread(ctx, cursor, found, depth)


def _queues_to_feed(
    ctx: PassContext,
    cursor: QueueCursor,
    new: list[PlannedAllocation],
    earlier: list[QueueCursor],
    depth: int,
) -> list[PlannedAllocation]:
    """Allocations that no shape among `earlier` would win, shortest queue first."""
    shape, entry = cursor.shape, cursor.entry
    by_node: dict[NodeId, list[PlannedAllocation]] = {}
    for (id_, _), line in entry.lines.items():
        planned = PlannedAllocation(id_, line.allocation, shape, line.count)
        by_node.setdefault(id_, []).append(planned)
    for planned in new:
        by_node.setdefault(planned.node, []).append(planned)
    if earlier:
        own: Holding = new[0] if new else next(iter(entry.lines.values()))
        without = rank_of(ctx, cursor, given_up=1, without=own)
        holders = set(holders_of(shape))
        earlier = [
            other
            for other in earlier
            if (not other.is_blocked or holders.intersection(holders_of(other.shape)))
            and ctx.capacity.could_ever_start(other.shape)
            and rank_beside(ctx, other, own) < without
        ]
    found: list[PlannedAllocation] = []
    for id_, allocations in by_node.items():
        node = ctx.capacity.node(id_)
        if node is None or ctx.claims.is_reserved_for_other(id_, shape):
            continue
        if unfit(node, shape) is not None or _is_wanted(ctx, node, allocations, earlier):
            continue
        found += [each for each in allocations if _takes_more(node, each, depth)]
    room = ctx.policy.max_places_per_pass - len(ctx.draft.allocations)
    found.sort(key=lambda each: (each.length, each.node, each.allocation.number))
    return found[:room]


def _is_wanted(
    ctx: PassContext, node: Node, allocations: list[PlannedAllocation], by: list[QueueCursor]
) -> bool:
    room: Room | None = None
    for other in by:
        if unfit(node, other.shape) is not None:
            continue
        if room is None:
            room = ctx.capacity.room(node.id).copy()
            for each in allocations:
                room.give(each.allocation)
        if fit(node, room, other.shape) is not None:
            return True
    return False


def _takes_more(node: Node, planned: PlannedAllocation, depth: int) -> bool:
    if any(part.gpu_index in node.gpus_withheld for part in planned.allocation.slices):
        return False
    return (depth - planned.length) * _REFILL >= depth


def _spread(
    ctx: PassContext, cursor: QueueCursor, queues: list[PlannedAllocation], depth: int
) -> None:
    lengths = [queue.length for queue in queues]  # ascending
    level = _water_level(lengths, cursor.left, depth)
    needs = [max(0, level - length) for length in lengths]
    for place in range(min(cursor.left - sum(needs), len(queues))):  # the rest, one each
        if lengths[place] <= level < depth:
            needs[place] += 1
    entries = cursor.take(sum(needs)) if sum(needs) else []
    position = given = 0
    while position < len(entries):
        open_queues = [queue for queue, need in zip(queues, needs, strict=True) if need > given]
        step = min(need for need in needs if need > given) - given
        block = entries[position : position + step * len(open_queues)]
        for place, queue in enumerate(open_queues):
            queue.grants += block[place :: len(open_queues)]
        position += len(block)
        given += step
    for queue in queues:
        if queue.grants:
            ctx.draft.add(queue)


def _water_level(lengths: list[int], tasks: int, depth: int) -> int:
    """Highest level, at most `depth`, to which tasks fill the shorter queues."""
    filled = 0
    for place, length in enumerate(lengths):
        above = min(lengths[place + 1], depth) if place + 1 < len(lengths) else depth
        needed = (above - length) * (place + 1)
        if filled + needed > tasks:
            return length + (tasks - filled) // (place + 1)
        filled += needed
    return depth

"""Preemption: stopping running tasks for a waiting task that the order puts before them.

**Victims.** A task may be stopped if it allows it (`Shape.preemptible`) and the waiting task outranks it, both counted
as if the running one did not run (`order.ranking.outranks`), in this order:

1. A start within a guarantee outranks a borrowed one; tasks within a guarantee are never stopped for other tenants.
2. Between tenants (then between the users of a team), shares decide. The victim's tenant must stay ahead after the
   exchange by `margin_milli`, so that no exchange is worth undoing.
3. Allocations that do not divide into equal shares alternate by time quantum (`policy.quantum`): after it, a tenant
   that recently had less and holds less may take the slot. Equal recent usage suffices if the waiting tenant does not
   hold more afterwards either.
4. Between tasks of one user, the class decides (`Order.classes`): near its deadline, lower level of attained run time,
   promoted. Tasks of one class never stop each other, so no task is stopped for one that it could stop later.

Orders other than fair share compare their decisive key fields instead of 2 to 4.

**Protection.** A restarted task is not stopped again for `policy.protection` by its own user, for at most a quantum by
others. Without checkpoints it runs as long as its lost attempts took before another tenant may stop it. A task stops its
own user's tasks only after it has waited for `policy.restart`: a wait as long as a restart costs as much as the restart,
and most waits end before (the rule of ski rental: at most twice the cost of the best choice in hindsight).

**Example.** 8 GPUs; tenant A runs 8 tasks of 1 GPU; tenant B queues 8. Shares in millionths, without recent usage:

    A holds   without the victim   B holds   with one more   0.9 * A > 1.1 * B ?
       8           875,000            0         125,000       yes: stop one of A
       7           750,000            1         250,000       yes
       6           625,000            2         375,000       yes (562,500 > 412,500)
       5           500,000            3         500,000       no: wait for the quantum

After 10 minutes B has recently had less and holds less (3 < 5), so rule 3 gives it the fourth slot: 4 and 4.

**Choice.** Of the sets that make the whole room, the one with the fewest GPUs, then the fewest tasks (`victim_sets`).
Among a user's own tasks those of the last class come first: a victim of a better class would stop a third task in turn.

    waiting task ─ rank_of ─┐
    running tasks ─ groups ─┴─ worth_comparing ─ outranks ─ victims by node ─ cheapest set ─ Preempt
                   (victims)                                                               └ pin (`passes.starts`)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Shape, Span
from gpool.core.scheduler.order.fair_share import asked_by
from gpool.core.scheduler.order.limits import Holder, holders_of
from gpool.core.scheduler.order.ranking import Exchange, ExchangeSide, outranks
from gpool.core.scheduler.passes.context import (
    PassContext,
    QueueCursor,
    is_within_limits,
    rank_of,
)
from gpool.core.scheduler.passes.victim_sets import (
    Clearable,
    Clearing,
    cheapest,
    cheapest_for_gang,
)
from gpool.core.scheduler.passes.victims import (
    Victim,
    VictimGroup,
    protection_period,
)
from gpool.core.scheduler.place.pricing import GPU, Bools
from gpool.core.scheduler.state.events import Preempt
from gpool.core.scheduler.state.stoppable import is_protected
from gpool.core.scheduler.state.waiting import HeldAllocation

_WORK_PER_NODE, _WORK_PER_VICTIM = 15, 3  # about microseconds
MAX_NODES_SEARCHED = 128
"""Nodes on which victims are sought for one task."""


def count_stopping(ctx: PassContext) -> None:
    """Count allocations preempted by earlier passes as free in future, and no longer held."""
    for line in ctx.state.stoppable.stopping:
        parts = (line, *line.members)
        for part in parts:
            ctx.capacity.free_later(part.node, part.allocation)
        ctx.tenants.count(line.shape, [part.allocation for part in parts], -1)


def preempt_for(ctx: PassContext, cursor: QueueCursor) -> bool:
    """Stop the cheapest set of victims, or wait for tasks that stop already. The task stays queued, pinned to the freed slots."""
    if not ctx.may_preempt or not ctx.state.stoppable or cursor.is_blocked:
        return False
    shape = cursor.shape
    if not ctx.budget.may_search(cursor) or ctx.victims.is_hopeless(shape):
        return False
    possible = ctx.victims.clearable(shape, cursor.rank, is_new=_is_new(ctx, cursor))
    if possible is None or np.count_nonzero(possible) < shape.requirements.nodes:
        found = None
    else:
        ctx.budget.count_vain(shape.user)
        found = _cheapest(ctx, cursor, possible)
    is_certain = not ctx.claims.reserved_count or (shape.preemptible and ctx.preempts_by_order)
    if found is None and is_certain and not shape.avoids and not _is_new(ctx, cursor):
        ctx.victims.give_up(shape)
    if found is None or not is_within_limits(ctx, cursor, *(each.fit for each in found)):
        return False
    ctx.budget.count_vain(shape.user, -1)
    _stop(ctx, TaskId(cursor.head.task), found)
    promised = []
    for each in found:
        allocation = ctx.capacity.promise(shape, each.node, each.fit)
        ctx.victims.take(each.node, allocation)
        ctx.claims.clear(each.node, shape)
        promised.append(allocation)
    ctx.tenants.count(shape, promised)
    ctx.victims.forget_tenants(
        {shape, *(victim.line.shape for each in found for victim in each.victims)}
    )
    cursor.take(1)
    return True


def _is_new(ctx: PassContext, cursor: QueueCursor) -> bool:
    """Whether waiting has cost less than a restart."""
    return ctx.now - cursor.head.queued_at < ctx.policy.restart


def _cheapest(ctx: PassContext, cursor: QueueCursor, possible: Bools) -> list[Clearing] | None:
    shape, guaranteed = cursor.shape, ctx.policy.limits.guaranteed
    choose = cheapest_for_gang if shape.requirements.nodes > 1 else cheapest
    found = choose(shape, shape.requirements.nodes, _clearable(ctx, cursor, possible))
    if found is not None and guaranteed and not _spares_guarantees(ctx, shape, found):
        left = dict(guaranteed)
        found = choose(shape, shape.requirements.nodes, _clearable(ctx, cursor, possible, left))
    return found


def _stop(ctx: PassContext, beneficiary: TaskId, found: list[Clearing]) -> None:
    for victim in {id(v.line): v for each in found for v in each.victims}.values():
        line = victim.line
        if ctx.victims.is_stopped(line):
            continue
        ctx.victims.stop(line)
        for part in victim.parts:
            ctx.capacity.free_later(part.node, part.allocation)
        ctx.tenants.count(line.shape, [part.allocation for part in victim.parts], -1)
        ctx.draft.preemptions += [
            Preempt(id_, lease.epoch, line.node, beneficiary) for id_, lease in line.leases.items()
        ]


def _spares_guarantees(ctx: PassContext, shape: Shape, found: list[Clearing]) -> bool:
    own, lost = set(holders_of(shape)), dict[Holder, int]()
    for line in {victim.line for each in found for victim in each.victims}:
        if not ctx.victims.is_stopped(line):
            for holder in holders_of(line.shape):
                lost[holder] = lost.get(holder, 0) + line.amounts[0]
    guaranteed = ctx.policy.limits.guaranteed
    return all(
        holder in own
        or not gpus
        or ctx.tenants.gpus_held(holder) - gpus >= guaranteed.get(holder, 0)
        for holder, gpus in lost.items()
    )


def _spares_guarantee(
    ctx: PassContext, victim: Victim, shape: Shape, guaranteed: dict[Holder, int]
) -> bool:
    """Counts earlier victims; an accepted one is added to `guaranteed`."""
    gpus, own = victim.amounts[0], set(holders_of(shape))
    theirs = [
        each for each in holders_of(victim.line.shape) if each in guaranteed and each not in own
    ]
    if any(ctx.tenants.gpus_held(holder) - gpus < guaranteed[holder] for holder in theirs):
        return False
    for holder in theirs:
        guaranteed[holder] += gpus
    return True


def _clearable(
    ctx: PassContext,
    cursor: QueueCursor,
    possible: Bools,
    guaranteed: dict[Holder, int] | None = None,
) -> Iterator[Clearable]:
    """For a gang also nodes with room. `possible`: by slot; `guaranteed`: GPUs that others must keep."""
    shape = cursor.shape
    near: set[NodeId] = set(ctx.index.board.columns.ids[possible].tolist())
    at: dict[NodeId, list[Victim]] = {id_: [] for id_ in ctx.capacity.future_nodes if id_ in near}
    if shape.requirements.nodes > 1:
        able, has_room = ctx.index.could_run(shape, ())
        at |= {NodeId(int(id_)): [] for id_ in ctx.index.board.columns.ids[able[has_room]]}
    if len(ctx.draft.preemptions) < ctx.policy.max_preemptions_per_pass:
        for victim in _victims_for(ctx, cursor, near):
            line = victim.line
            if ctx.victims.is_stopped(line):
                continue
            if guaranteed and not _spares_guarantee(ctx, victim, shape, guaranteed):
                continue
            for id_ in _nodes_of(line):
                if id_ in near:
                    at.setdefault(id_, []).append(victim)
    for id_ in ctx.claims.closed_to_preemption_for(shape):
        at.pop(id_, None)
    if any(victim.line.shape.user != shape.user for victims in at.values() for victim in victims):
        at = {id_: [each._replace(regret=()) for each in victims] for id_, victims in at.items()}
    for id_ in _nodes_to_search(ctx, shape, at):
        ctx.budget.use_work(_WORK_PER_NODE)
        node = ctx.capacity.node(id_)
        if node is not None:
            yield Clearable(node, ctx.capacity.room_after_stops(id_), at[id_])


def _nodes_to_search(
    ctx: PassContext, shape: Shape, at: dict[NodeId, list[Victim]]
) -> Iterable[NodeId]:
    """Half with the most idle GPUs, half in rotation. For a gang all."""
    if len(at) <= MAX_NODES_SEARCHED or shape.requirements.nodes > 1:
        return list(at)
    board = ctx.index.board
    ids = np.fromiter(at, np.int64, len(at))
    idle = (board.columns.free[[board.slots[id_] for id_ in at]] == GPU).sum(1)
    order = ids[np.lexsort((ids, -idle))]
    half = MAX_NODES_SEARCHED // 2
    rest = np.sort(order[half:])
    first = ctx.state.history.passes * half % len(rest)
    chosen = [*order[:half].tolist(), *np.roll(rest, -first)[:half].tolist()]
    return [NodeId(id_) for id_ in chosen]


def _nodes_of(line: HeldAllocation) -> Collection[NodeId]:
    return {part.node for part in (line, *line.members)} if line.members else (line.node,)


def _victims_for(
    ctx: PassContext, cursor: QueueCursor, near: Collection[NodeId]
) -> Iterator[Victim]:
    """The user's own victims only where they run on one of the nodes `near`: others are not ranked."""
    user, has_classes = cursor.shape.user, ctx.victims.compares_classes
    if has_classes and not _is_new(ctx, cursor):
        for group in ctx.victims.of_worse_class(user, cursor.rank):
            ctx.budget.use_work(1)
            for line in _unprotected(ctx, group):
                ctx.budget.use_work(_WORK_PER_VICTIM)
                if any(id_ in near for id_ in _nodes_of(line)):
                    yield group.victim(line)
    if not has_classes or ctx.victims.has_others(user):
        for victim in _victims_by_share(ctx, cursor, with_own=not has_classes):
            ctx.budget.use_work(_WORK_PER_VICTIM)
            yield victim


def _victims_by_share(ctx: PassContext, cursor: QueueCursor, *, with_own: bool) -> Iterator[Victim]:
    """Victims of other users and, `with_own`, of the same user."""
    shape, tenants = cursor.shape, ctx.tenants
    asked = asked_by(shape)
    own = ExchangeSide(
        rank_of(ctx, cursor),
        tenants.shares(shape),
        tenants.recent_pair(shape),
        tenants.held_pair(shape),
    )
    own_gain, own_after = tenants.shares(shape, None, asked), tenants.held_pair(shape, asked)
    for group in ctx.victims.groups().worth_comparing(shape, own, ctx.order, ctx.policy):
        ctx.budget.use_work(1)
        other, line = group.shape, group.first.line
        if shape.user == other.user and (not with_own or _is_vain(ctx, cursor, own, group)):
            continue
        waiting, gained = own, own_gain
        running = ExchangeSide(
            group.first.rank,
            group.shares,
            tenants.recent_pair(other),
            tenants.held_pair(other),
        )
        left = tenants.held_pair(other, line.amounts, -1)
        evens = (
            own.holds[0] < running.holds[0] and own_after[0] <= left[0],
            own.holds[1] < running.holds[1] and own_after[1] <= left[1],
        )
        if shape.user == other.user or (shape.team is not None and shape.team == other.team):
            waiting = own._replace(
                rank=rank_of(ctx, cursor, without=line), shares=tenants.shares(shape, line)
            )
            gained = tenants.shares(shape, line, asked)
        exchange = Exchange(waiting, gained, running, Span(0), evens, shape.user == other.user)
        victims = group.victims()
        if shape.user == other.user:
            lines = set(_unprotected(ctx, group))
            victims = [each for each in victims if each.line in lines]
        found = _outranked(ctx, victims, exchange)
        is_within_band = own.rank.band == running.rank.band
        if shape.user != other.user and is_within_band and ctx.order.exchanges_by_share:
            found = (victim for victim in found if not _would_never_end(ctx, victim))
        yield from found


def _is_vain(ctx: PassContext, cursor: QueueCursor, own: ExchangeSide, group: VictimGroup) -> bool:
    """Whether a task of the same user is too new, or its class is no better than that of the group."""
    order, other = ctx.order, group.first.rank
    if not order.classes:
        return False
    if _is_new(ctx, cursor):
        return True
    if own.rank.band != other.band:
        return False
    return order.class_of(own.rank.key) >= order.class_of(other.key)


def _unprotected(ctx: PassContext, group: VictimGroup) -> list[HeldAllocation]:
    """Allocations that a task of the same user may stop."""
    period = protection_period(ctx.order, ctx.policy, is_own=True)
    return [line for line in group.lines if not is_protected(line, ctx.now, period)]


def _would_never_end(ctx: PassContext, victim: Victim) -> bool:
    """Whether a task without checkpoints has run for less than its lost attempts: always stopped, it would never end."""
    line, lease = victim.line, next(iter(victim.line.leases.values()))
    return line.shape.checkpoint_every is None and ctx.now - line.since < lease.attained


def _outranked(ctx: PassContext, victims: list[Victim], exchange: Exchange) -> Iterator[Victim]:
    """`exchange`: with a first victim that has not run yet."""
    waiting, running = exchange.waiting, exchange.running
    by_share, policy = ctx.order.exchanges_by_share, ctx.policy
    is_decided = waiting.rank.band != running.rank.band or (
        by_share and waiting.shares != running.shares
    )
    if is_decided and outranks(exchange, ctx.order, policy):
        yield from victims
        return
    for victim in victims:
        ran = Span(ctx.now - victim.line.since)
        standing = ExchangeSide(victim.rank, running.shares, running.had, running.holds)
        tried = exchange._replace(running=standing, ran=ran)
        if outranks(tried, ctx.order, policy):
            yield victim
        elif not is_decided or ran >= policy.quantum:
            return  # nor does it outrank the victims that rank before this one

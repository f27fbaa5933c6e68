"""Running tasks that a pass may preempt, grouped by user, size and level, ranked as if they waited.
See `passes.preemption` for the rules and `passes.victim_sets` for the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import lru_cache
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import (
    SECOND,
    Allocation,
    GpuRequest,
    Instant,
    Requirements,
    Shape,
    Span,
    TaskKind,
)
from gpool.core.scheduler.order.fair_share import Amounts
from gpool.core.scheduler.order.limits import WITHIN
from gpool.core.scheduler.order.orders import (
    Candidate,
    Order,
    Policy,
    Promotion,
    Rank,
    attained_at,
)
from gpool.core.scheduler.order.promotion import Promotions
from gpool.core.scheduler.order.ranking import ExchangeSide, Pair
from gpool.core.scheduler.passes.ledger import TenantLedger
from gpool.core.scheduler.passes.preemptible_capacity import PreemptibleCapacity
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.place.pricing import Bools, Ints
from gpool.core.scheduler.state.state import State
from gpool.core.scheduler.state.stoppable import (
    FreedParts,
    GroupingStage,
    GroupKey,
    RunningGroup,
    grouped,
)
from gpool.core.scheduler.state.waiting import HeldAllocation

MAX_IN_SIGHT = 2000
"""Running tasks that one pass considers as victims."""

_STRIDE = 101  # nodes by which the considered part of a large pool moves each second


def in_sight(state: State, now: Instant, most: int = MAX_IN_SIGHT) -> list[HeldAllocation]:
    """All of some nodes of a large pool, and every second of others."""
    nodes = list(state.nodes)
    first = (now // SECOND * _STRIDE) % len(nodes)
    found: list[HeldAllocation] = []
    for id_ in chain(islice(nodes, first, None), islice(nodes, first)):
        if len(found) >= most:
            break
        for number in state.nodes[id_].lines:
            line = state.stoppable.get(id_, number)
            if line is not None and not line.stopping and line.leases:
                found.append(line)
    return found


def protection_period(order: Order, policy: Policy, *, is_own: bool) -> Span:
    """`is_own`: against the same user. Against others it ends with the time quantum where tenants exchange by shares."""
    if is_own or not order.exchanges_by_share:
        return policy.protection
    return min(policy.protection, policy.quantum)


def asks_no_less(shape: Shape, other: Shape) -> bool:
    more, less = shape.requirements, other.requirements
    if (shape.user, shape.team) != (other.user, other.team):
        return False
    if shape.environment is not other.environment and shape.environment != other.environment:
        return False
    if more is less or more == less:
        return True
    if len(more.gpu) != 1 or len(less.gpu) != 1:
        return False
    if more.memory_bytes is None or less.memory_bytes is None:
        return False
    return (
        more.gpu[0].count >= less.gpu[0].count
        and more.nodes >= less.nodes
        and more.cpu_milli >= less.cpu_milli
        and more.memory_bytes >= less.memory_bytes
        and _gpu_properties(more.gpu[0]) == _gpu_properties(less.gpu[0])
        and _properties(more) == _properties(less)
    )


def _all_but(type_: type[Requirements | GpuRequest], *amounts: str) -> Callable[[object], object]:
    return attrgetter(*[each.name for each in fields(type_) if each.name not in amounts])


_properties = _all_but(Requirements, "gpu", "nodes", "cpu_milli", "memory_bytes")
_gpu_properties = _all_but(GpuRequest, "count")


class Victim(NamedTuple):
    """`regret`: negated class of the order, empty where classes do not count. Of sets of victims, the one whose first task is
    of the last class is stopped: a task of a better class would stop others in turn.
    """

    rank: Rank
    line: HeldAllocation
    regret: tuple[int, ...] = ()

    @property
    def amounts(self) -> Amounts:
        return self.line.amounts

    @property
    def parts(self) -> tuple[HeldAllocation, ...]:
        return self.line, *self.line.members


class VictimGroup:
    """Running tasks of one user, size, level and promotion: of one class in every order."""

    __slots__ = ("_known", "_rank", "_ranked", "first", "lines", "shares")

    def __init__(
        self, lines: list[HeldAllocation], shares: Pair, rank: Callable[[HeldAllocation], Victim]
    ) -> None:
        self.lines = lines
        self.shares = shares  # of tenant and user, without one of the tasks
        self._rank = rank
        self._known: dict[HeldAllocation, Victim] = {}
        self._ranked: list[Victim] | None = None
        self.first = self.victim(lines[0])

    @property
    def shape(self) -> Shape:
        return self.first.line.shape

    def victim(self, line: HeldAllocation) -> Victim:
        known = self._known.get(line)
        if known is None:
            known = self._known[line] = self._rank(line)
        return known

    def victims(self) -> list[Victim]:
        """Last in the order first."""
        if self._ranked is None:
            self._ranked = sorted(map(self.victim, self.lines), key=_rank_of, reverse=True)
        return self._ranked


class VictimGroups:
    """As arrays. `had`, `held`: recent usage and present share of each tenant."""

    def __init__(self, groups: list[VictimGroup], had: list[int], held: list[int]) -> None:
        self._groups = groups
        shapes = [group.shape for group in groups]
        self._had, self._held = _column(had), _column(held)
        self._bands = _column([group.first.rank.band for group in groups])
        self._shares = _column([group.shares[0] for group in groups])
        self._users = _column([shape.user for shape in shapes])
        self._teams = _column([-1 if shape.team is None else shape.team for shape in shapes])

    def worth_comparing(
        self, shape: Shape, waiting: ExchangeSide, order: Order, policy: Policy
    ) -> Iterator[VictimGroup]:
        """The waiting task outranks none of the other groups."""
        maybe = self._users == shape.user
        if shape.team is not None:
            maybe |= self._teams == shape.team
        is_same_band = self._bands == waiting.rank.band
        if order.exchanges_by_share:
            share, margin = waiting.shares[0], policy.margin_milli
            after = self._shares * (1000 - margin) > share * (1000 + margin)
            after |= (self._had >= waiting.had[0]) & (self._held > waiting.holds[0])
            maybe |= is_same_band & (after | (self._shares == share))
        else:
            maybe |= is_same_band
        maybe |= self._bands > waiting.rank.band
        for number in np.flatnonzero(maybe).tolist():
            yield self._groups[number]


def _column(values: list[int]) -> Ints:
    return np.array(values, np.int64)


class VictimSearch:
    """Groups are computed on demand, and again for tenants whose share changed."""

    def __init__(
        self,
        state: State,
        index: PlacementIndex,
        now: Instant,
        policy: Policy,
        order: Order,
        tenants: TenantLedger,
        promotions: Promotions,
    ) -> None:
        self._state, self._index, self._now = state, index, now
        self._policy, self._order, self._tenants = policy, order, tenants
        self._promotions = promotions
        self._stopped: set[HeldAllocation] = set()
        self._hopeless: dict[UserId, list[Shape]] = {}
        self._capacity: PreemptibleCapacity | None = None
        self._unprotected: Mapping[GroupKey, RunningGroup] | None = None
        self._groups: dict[GroupKey, VictimGroup | None] = {}
        self._all: VictimGroups | None = None
        self._reach: dict[tuple[UserId, tuple[int, ...] | None], Bools] = {}
        self._classes: dict[tuple[int, Promotion, Instant | None], tuple[int, ...]] = {}

    def is_stopped(self, line: HeldAllocation) -> bool:
        return line in self._stopped

    def stop(self, line: HeldAllocation) -> None:
        self._stopped.add(line)
        if self._capacity is not None:
            self._capacity.stop(line)

    def is_hopeless(self, shape: Shape) -> bool:
        """Whether nothing was found for a shape of the same user that asks for no more."""
        return any(asks_no_less(shape, each) for each in self._hopeless.get(shape.user, ()))

    def clearable(self, shape: Shape, rank: Rank, *, is_new: bool) -> Bools | None:
        """Nodes with room for the shape if all that it may stop were stopped: of its own user only tasks of a worse class, and
        none while it is new. An upper bound, much cheaper than the search. None: it may stop nothing and nothing stops.
        """
        reached = self._reachable(shape.user, rank, is_new=is_new)
        if self._capacity is None:
            stopping = self._state.stoppable.stopping
            if not stopping and not reached[1:].any():
                return None
            freed = [group.freed for group in self._in_sight().values()]
            self._capacity = PreemptibleCapacity(self._index, freed, FreedParts(stopping))
        return self._capacity.nodes(shape, reached)

    @property
    def compares_classes(self) -> bool:
        """Whether classes decide between the tasks of one user: without guarantees all are of one band."""
        return bool(self._order.classes) and not self._policy.limits.guaranteed

    def has_others(self, user: UserId) -> bool:
        return any(key.user != user for key in self._in_sight())

    def of_worse_class(self, user: UserId, rank: Rank) -> Iterator[VictimGroup]:
        own = self._order.class_of(rank.key)
        for key in self._in_sight():
            if key.user == user and own < self._class_of(key):
                group = self._group_of(key)
                if group is not None:
                    yield group

    def _reachable(self, user: UserId, rank: Rank, *, is_new: bool) -> Bools:
        own: tuple[int, ...] | None = None
        if self.compares_classes:
            own = () if is_new else self._order.class_of(rank.key)
        known = self._reach.get((user, own))
        if known is None:
            groups = self._in_sight()
            known = np.ones(1 + len(groups), bool)
            if own is not None:
                for number, key in enumerate(groups, 1):
                    if key.user == user:
                        known[number] = bool(own) and own < self._class_of(key)
            self._reach[user, own] = known
        return known

    def _class_of(self, key: GroupKey) -> tuple[int, ...]:
        if key.by is None:
            return _class_at(self._order, key.level, key.promotion)
        stage = (key.level, key.promotion, key.by)
        known = self._classes.get(stage)
        if known is None:
            line = next(iter(self._in_sight()[key].lines))
            victim = self._victim(line, 0, 0, (0, 0), WITHIN)
            known = self._classes[stage] = self._order.class_of(victim.rank.key)
        return known

    def give_up(self, shape: Shape) -> None:
        self._hopeless.setdefault(shape.user, []).append(shape)

    def take(self, node: NodeId, allocation: Allocation) -> None:
        """Keep room that will be free for a waiting task."""
        if self._capacity is not None:
            self._capacity.take(node, allocation)

    def groups(self) -> VictimGroups:
        if self._all is None:
            found = map(self._group_of, self._in_sight())
            groups = [group for group in found if group is not None]
            had = [self._tenants.recent_pair(group.shape)[0] for group in groups]
            held = [self._tenants.held_pair(group.shape)[0] for group in groups]
            self._all = VictimGroups(groups, had, held)
        return self._all

    def forget_tenants(self, shapes: Iterable[Shape]) -> None:
        self._hopeless, self._all = {}, None
        users, teams = {shape.user for shape in shapes}, {shape.team for shape in shapes}
        for key in list(self._groups):
            if key.user in users or (key.team is not None and key.team in teams):
                del self._groups[key]

    def _in_sight(self) -> Mapping[GroupKey, RunningGroup]:
        if self._unprotected is None:
            period = protection_period(self._order, self._policy, is_own=False)
            stage = GroupingStage(self._now, period, self._promotions)
            if len(self._state.stoppable) <= MAX_IN_SIGHT:
                self._unprotected = self._state.stoppable.groups(stage)
            else:
                self._unprotected = grouped(in_sight(self._state, self._now), stage)
        return self._unprotected

    def _group_of(self, key: GroupKey) -> VictimGroup | None:
        if key not in self._groups:
            lines = self._in_sight()[key].lines
            self._groups[key] = self._group([each for each in lines if each not in self._stopped])
        return self._groups[key]

    def _group(self, lines: list[HeldAllocation]) -> VictimGroup | None:
        if not lines:
            return None
        tenants, first = self._tenants, lines[0]
        shape, running = first.shape, tenants.running(first.shape.user)
        served, shares = self._state.history.served(shape.user), tenants.shares(shape, first)
        band = WITHIN
        if self._policy.limits.guaranteed:
            band = tenants.band(shape, first, first.amounts[0])

        def rank(line: HeldAllocation) -> Victim:
            return self._victim(line, running, served, shares, band)

        return VictimGroup(lines, shares, rank)

    def _victim(
        self, line: HeldAllocation, running: int, served: int, shares: Pair, band: int
    ) -> Victim:
        task, lease = next(iter(line.leases.items()))
        ran = Span(lease.attained + max(0, self._now - line.since))
        others = running - 1 - len(line.members)
        candidate = Candidate(
            line.shape,
            lease.queued_at,
            task,
            others,
            served,
            ran,
            shares,
            None,
            band,
            self._promotions.of(line.shape.user, task),
        )
        rank = self._order.rank(candidate, self._now, self._policy)
        return Victim(rank, line, tuple([-part for part in self._order.class_of(rank.key)]))


_POLICY = Policy()
_ANY = Shape(UserId(0), Requirements(), 0, TaskKind.COMMAND, "", "")


@lru_cache(maxsize=1024)
def _class_at(order: Order, level: int, promotion: Promotion) -> tuple[int, ...]:
    """Class of a task without deadline; nothing else counts (`Order.classes`)."""
    ran = attained_at(level)
    candidate = Candidate(_ANY, Instant(0), TaskId(0), 0, 0, ran, promotion=promotion)
    return order.class_of(order.key(candidate, Instant(0), _POLICY))


def _rank_of(victim: Victim) -> Rank:
    return victim.rank

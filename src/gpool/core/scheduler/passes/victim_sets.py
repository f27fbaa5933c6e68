"""Sets of victims on a node, or on several for a gang, that let a task fit at the least cost. Stops nothing.
The cost is the number of GPUs to restart, a gang's together, then of tasks; then the victims last in the order. Among
a user's own tasks their class comes first (`Victim.regret`). A set makes the whole room or is not chosen.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from gpool.core.ids import NodeId
from gpool.core.model import Node, Shape
from gpool.core.scheduler.passes.victims import Victim
from gpool.core.scheduler.place.fit import Fit, fit, is_slice, usable
from gpool.core.scheduler.place.pricing import GPU
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.waiting import HeldAllocation

_MAX_NODES_TRIED = 32
_MAX_GANGS_TRIED = 8
_by_rank = attrgetter("rank")


class Clearable(NamedTuple):
    """The room is free without further stops, and not changed here."""

    node: Node
    room: Room
    victims: list[Victim]


class Clearing(NamedTuple):
    node: NodeId
    fit: Fit
    victims: tuple[Victim, ...]


class ClearingCost(NamedTuple):
    regret: tuple[int, ...]
    gpus: int  # thousandths
    tasks: int
    position: tuple[int, ...]  # negated rank of the victim that is first in the order
    node: NodeId


class _Option(NamedTuple):
    cost: ClearingCost
    place: Clearable
    chosen: list[Victim]


def cheapest(shape: Shape, count: int, places: Iterable[Clearable]) -> list[Clearing] | None:
    """None if there are fewer than `count`."""
    options = []
    for place in places:
        chosen = last_victims(place, shape)
        if chosen is not None:
            options.append(_Option(cost_of(chosen, place.node.id), place, chosen))
    if len(options) < count:
        return None
    options.sort(key=attrgetter("cost"))
    found: list[Clearing] = []
    short = []
    for _, place, chosen in options[: count + _MAX_NODES_TRIED]:
        clearing = _cleared(place, shape, chosen)
        if clearing is not None:
            found.append(clearing)
            if len(found) == count:
                return found
        else:
            short.append(_completed(place, shape, chosen))
    more = [each for each in short if each is not None]
    found += sorted(more, key=lambda each: cost_of(list(each.victims), each.node))
    return found[:count] if len(found) >= count else None


def cost_of(chosen: list[Victim], node: NodeId) -> ClearingCost:
    gpus = sum(victim.amounts[0] for victim in chosen)
    position: tuple[int, ...] = ()
    if chosen:
        first = min(victim.rank for victim in chosen)
        position = (-first.band, *(-number for number in first.key))
    return ClearingCost(_regret(chosen), gpus, len(chosen), position, node)


def _regret(victims: Iterable[Victim]) -> tuple[int, ...]:
    return max([victim.regret for victim in victims], default=())


def _cleared(place: Clearable, shape: Shape, chosen: list[Victim]) -> Clearing | None:
    fits = fit(place.node, _room_without(place, chosen), shape)
    return None if fits is None else Clearing(place.node.id, fits, tuple(chosen))


def _completed(place: Clearable, shape: Shape, chosen: list[Victim]) -> Clearing | None:
    left = [victim for victim in place.victims if victim not in chosen]
    rest = Clearable(place.node, _room_without(place, chosen), left)
    more = _until_it_fits(rest, shape)
    return None if more is None else _cleared(place, shape, [*chosen, *more])


def _room_without(place: Clearable, victims: Iterable[Victim]) -> Room:
    room = place.room.copy()
    for victim in victims:
        _give(room, place.node.id, victim)
    return room


def _give(room: Room, node: NodeId, victim: Victim) -> None:
    for part in victim.parts:
        if part.node == node:
            room.give(part.allocation)


def _take(room: Room, node: NodeId, victim: Victim) -> None:
    for part in victim.parts:
        if part.node == node:
            room.take(part.allocation, victim.line.shape.user)


def last_victims(place: Clearable, shape: Shape) -> list[Victim] | None:
    """Fewest victims of the last classes that suffice."""
    regrets = {victim.regret for victim in place.victims}
    if len(regrets) < 2:
        return fewest_victims(place, shape)
    for most in sorted(regrets):
        some = [victim for victim in place.victims if victim.regret <= most]
        chosen = fewest_victims(Clearable(place.node, place.room, some), shape)
        if chosen is not None:
            return chosen
    return None


def fewest_victims(place: Clearable, shape: Shape) -> list[Victim] | None:
    """Victims whose GPUs the shape needs; `_completed` adds those for CPU, memory or disk."""
    requests = shape.requirements.gpu
    if not requests or any(is_slice(request) for request in requests):
        return _until_it_fits(place, shape)
    request, gpus = requests[0], place.room.gpus.values()
    node = place.node
    idle = sum(1 for g in gpus if not g.holders and usable(node, g.gpu, request, shape=shape))
    return _enough_gpus(place, request.count - idle)


def _until_it_fits(place: Clearable, shape: Shape) -> list[Victim] | None:
    """Stop the smallest first, of equal ones the last in the order; then drop those not needed."""
    node, trial = place.node, place.room.copy()
    chosen: list[Victim] = []
    ordered = sorted(place.victims, key=_by_rank, reverse=True)
    ordered.sort(key=lambda victim: victim.amounts)
    for victim in ordered:
        if fit(node, trial, shape) is not None:
            break
        _give(trial, node.id, victim)
        chosen.append(victim)
    if fit(node, trial, shape) is None:
        return None
    needed: list[Victim] = []
    for victim in reversed(chosen):
        _take(trial, node.id, victim)
        if fit(node, trial, shape) is None:
            _give(trial, node.id, victim)
            needed.append(victim)
    return needed[::-1]


class _Freed(NamedTuple):
    gpus: int
    tasks: int
    victims: tuple[Victim, ...]


def _enough_gpus(place: Clearable, short: int) -> list[Victim] | None:
    """Cheapest set that frees `short` GPUs: a knapsack, solved exactly since a node has few GPUs."""
    if short <= 0:
        return []
    sized = []
    for victim in sorted(place.victims, key=_by_rank, reverse=True):
        parts = [part for part in victim.parts if part.node == place.node.id]
        here = sum(len(part.allocation.slices) for part in parts)
        if victim.amounts[0] == short * GPU and here == short:
            return [victim]  # no set costs less
        sized.append((min(here, short), victim))
    best: list[_Freed | None] = [_Freed(0, 0, ()), *[None] * short]
    for here, victim in sized:
        for freed in range(short - 1, -1, -1):
            before = best[freed]
            if before is None or not here:
                continue
            gpus, tasks = before.gpus + victim.amounts[0], before.tasks + 1
            there = best[min(short, freed + here)]
            if there is None or (gpus, tasks) < (there.gpus, there.tasks):
                best[min(short, freed + here)] = _Freed(gpus, tasks, (*before.victims, victim))
    found = best[short]
    return None if found is None else list(found.victims)


def cheapest_for_gang(
    shape: Shape, count: int, places: Iterable[Clearable]
) -> list[Clearing] | None:
    """Nodes of one site; None if no site has enough."""
    by_site: dict[str, list[Clearable]] = {}
    for place in places:
        by_site.setdefault(place.node.offer.site, []).append(place)
    best: _ClearingSet | None = None
    for here in by_site.values():
        if len(here) >= count:
            best = _cheapest_at(_SiteClearings(shape, here), count, best)
    return None if best is None else best.found


class _ClearingSet(NamedTuple):
    """`cost`: regret, GPUs that stop, tasks that stop, and the node ids."""

    cost: tuple[tuple[int, ...], ...]
    gpus: int
    found: list[Clearing]


def _cheapest_at(
    site: _SiteClearings, count: int, best: _ClearingSet | None
) -> _ClearingSet | None:
    """Clear node by node where the least more has to stop; again after stopping each of the smallest gangs, which frees several
    nodes.
    """
    best = _cheaper(best, site.copy().clear(count))
    for victim in site.gangs()[:_MAX_GANGS_TRIED]:
        if best is not None and (victim.regret, victim.amounts[0]) >= (best.cost[0], best.gpus):
            continue
        without = site.copy()
        without.stop([victim])
        best = _cheaper(best, without.clear(count))
    if best is not None:
        return best
    return _cheaper(None, site.copy().clear(count, completes=True))


def _cheaper(best: _ClearingSet | None, found: list[Clearing] | None) -> _ClearingSet | None:
    if found is None:
        return best
    victims = {victim.line: victim for each in found for victim in each.victims}
    gpus = sum(victim.amounts[0] for victim in victims.values())
    nodes = sorted(each.node for each in found)
    cost = (_regret(victims.values()), (gpus, len(victims), *nodes))
    made = _ClearingSet(cost, gpus, found)
    return made if best is None or made.cost < best.cost else best


class _NodeCost(NamedTuple):
    regret: tuple[int, ...]
    gpus: int
    tasks: int
    node: NodeId


class _SiteClearings:
    """Nodes of one site with the victims each still needs."""

    def __init__(self, shape: Shape, here: list[Clearable]) -> None:
        self._shape = shape
        self._left = {place.node.id: place for place in here}
        self._stopped: dict[HeldAllocation, Victim] = {}
        self._costs: dict[NodeId, _NodeCost] = {}
        self._chosen: dict[NodeId, list[Victim]] = {}
        for id_ in self._left:
            self._weigh(id_)

    def copy(self) -> _SiteClearings:
        twin = _SiteClearings(self._shape, [])
        twin._left, twin._stopped = self._left.copy(), self._stopped.copy()
        twin._costs, twin._chosen = self._costs.copy(), self._chosen.copy()
        return twin

    def gangs(self) -> list[Victim]:
        found = {
            victim.line: victim
            for place in self._left.values()
            for victim in place.victims
            if victim.line.members
        }
        return sorted(found.values(), key=lambda victim: (victim.amounts[0], victim.line.node))

    def clear(self, count: int, *, completes: bool = False) -> list[Clearing] | None:
        """`completes`: also where more than GPUs is short."""
        found: list[Clearing] = []
        while len(found) < count and self._costs:
            id_ = min(self._costs, key=self._costs.__getitem__)
            del self._costs[id_]
            victims = self._chosen.pop(id_)
            place = self._after_stops(self._left.pop(id_))
            made = _cleared(place, self._shape, victims)
            if made is None and completes:
                made = _completed(place, self._shape, victims)
            if made is None:
                continue
            stopped = self._stopped.values()
            here = [v for v in stopped if any(part.node == id_ for part in v.parts)]
            found.append(made._replace(victims=(*here, *made.victims)))
            self.stop(list(made.victims))
        return found if len(found) == count else None

    def stop(self, victims: list[Victim]) -> None:
        self._stopped |= {victim.line: victim for victim in victims}
        for id_ in {part.node for victim in victims for part in victim.parts}:
            if id_ in self._left:
                self._weigh(id_)

    def _weigh(self, id_: NodeId) -> None:
        chosen = last_victims(self._after_stops(self._left[id_]), self._shape)
        if chosen is None:
            self._costs.pop(id_, None)
            self._chosen.pop(id_, None)
        else:
            gpus = sum(victim.amounts[0] for victim in chosen)
            self._costs[id_] = _NodeCost(_regret(chosen), gpus, len(chosen), id_)
            self._chosen[id_] = chosen

    def _after_stops(self, place: Clearable) -> Clearable:
        if not self._stopped:
            return place
        left = [victim for victim in place.victims if victim.line not in self._stopped]
        return Clearable(place.node, _room_without(place, self._stopped.values()), left)

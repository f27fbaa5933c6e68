"""Places for a task that needs several nodes at once: different nodes of one site, all of them or none. It takes nothing.

**Which nodes.** Each has all that the requirements ask for, and can be reached by the others: nodes of one site, never of
two. Every site where enough nodes have room is asked for its best set, and the sets are compared: one GPU model rather than
several (the slowest card sets a gang's pace), the least spoilt for the usual tasks (`engine`), the site with the fewest
nodes to spare (a large gang may need the others), the tightest nodes, the smallest ids. Names never matter.

**Waiting.** A gang holds nothing while it waits. After `patience` a whole set of nodes is kept clear for it, or none, so two
gangs never keep a half each; what has to stop for it stops only where that makes the whole set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from gpool.core.ids import NodeId
from gpool.core.model import GpuRequest, Node, Shape
from gpool.core.scheduler.passes.preemption import Clearing, Victim, cleared, completed, give, least
from gpool.core.scheduler.place.fit import Fit, joins_gangs, usable
from gpool.core.scheduler.place.fragmentation import Ints, Slots
from gpool.core.scheduler.place.index import Candidates, Engine
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.state import Line

Found = list[tuple[NodeId, Fit]]
Clearable = tuple[Node, Room, list[Victim]]
_MAX_GANGS_TRIED = 8


def places(engine: Engine, shape: Shape, choice: int, barred: Collection[NodeId]) -> Found:
    """As many nodes of one site as the shape needs, or nothing."""
    wanted = shape.requirements.nodes
    there = engine.candidates(shape, choice, barred)
    if len(there.slots) < wanted:
        return []
    for slots in _options(engine, shape, choice, there):
        found: Found = []
        for slot in slots.tolist():
            place = engine.fit_at(shape, choice, slot)
            if place is not None:  # a card whose hardware slices do not nest has none after all
                found.append(place)
                if len(found) == wanted:
                    return found
    return []


def _options(engine: Engine, shape: Shape, choice: int, there: Candidates) -> Iterator[Slots]:
    """Nodes of one site that would do, the best first and more than are needed; the site that is preferred first."""
    board, wanted = engine.board, shape.requirements.nodes
    requests = shape.requirements.gpu
    sites = board.site[there.slots]
    models = _models(engine, there.slots, requests[choice] if requests else None)
    several = int(models.max()) + 1
    for alike in (sites * several + models, sites) if several > 1 else (sites,):
        groups = _Groups(alike, wanted)
        best = groups.order[groups.starts]
        spare = np.bincount(sites)[sites[best]]
        rank = (board.ids[there.slots[best]], -groups.sums(there.rest), spare)
        for group in np.lexsort((*rank, -groups.sums(there.steps))).tolist():
            yield there.slots[groups.members(group)]


class _Groups:
    """Places in an array by their group, in the order they had; only groups of at least `wanted`."""

    def __init__(self, group: Slots, wanted: int) -> None:
        self.order = np.argsort(group, kind="stable")
        starts = np.flatnonzero(np.diff(group[self.order], prepend=-1))
        counts = np.diff(starts, append=len(group))
        self.wanted = wanted
        self.starts, self.counts = starts[counts >= wanted], counts[counts >= wanted]

    def sums(self, amounts: Ints) -> Ints:
        """Of the first `wanted` of each group."""
        total: Ints = np.concatenate([[0], np.cumsum(amounts[self.order])])
        return total[self.starts + self.wanted] - total[self.starts]

    def members(self, number: int) -> Slots:
        start = self.starts[number]
        return self.order[start : start + self.counts[number]]


def _models(engine: Engine, slots: Slots, request: GpuRequest | None) -> Slots:
    """For each node a number: equal where the same models of GPU would do."""
    board = engine.board
    kinds = board.kind[slots]
    distinct = np.unique(kinds)
    numbers = np.zeros(len(slots), np.intp)
    if request is None or len(distinct) == 1:
        return numbers
    known: dict[frozenset[str], int] = {}
    for kind in distinct.tolist():
        node = board.kinds[kind]
        assert node is not None, "what is closed has no room"
        models = frozenset(gpu.model for gpu in node.offer.gpus if usable(node, gpu, request))
        numbers[kinds == kind] = known.setdefault(models, len(known))
    return numbers


# ---- could it ever, and where soonest


def most_together(nodes: Iterable[Node]) -> int:
    """How many of these nodes belong to one site, at most: a gang of more cannot be placed on them."""
    counts = Counter(node.offer.site for node in nodes if joins_gangs(node.offer))
    return max(counts.values(), default=0)


def is_possible(engine: Engine, shape: Shape, barred: Collection[NodeId] = ()) -> bool:
    """Whether some site has enough nodes that could run it when idle; of what is no gang, whether there is one."""
    slots, _ = engine.could_run(shape, barred)
    if shape.requirements.nodes == 1:
        return bool(len(slots))
    return bool(len(_Groups(engine.board.site[slots], shape.requirements.nodes).starts))


def nearest(engine: Engine, shape: Shape, barred: Collection[NodeId]) -> list[NodeId]:
    """A whole set of nodes that could run it when idle, of the site where the fewest lines are in its way; or nothing."""
    board, wanted = engine.board, shape.requirements.nodes
    slots, has_room = engine.could_run(shape, barred)
    in_the_way = np.where(has_room, 0, 1 + board.lines[slots])
    order = np.lexsort((board.ids[slots], in_the_way))
    slots, in_the_way = slots[order], in_the_way[order]
    groups = _Groups(board.site[slots], wanted)
    if not len(groups.starts):
        return []
    last = in_the_way[groups.order[groups.starts + wanted - 1]]
    first = board.ids[slots[groups.order[groups.starts]]]
    best = int(np.lexsort((first, groups.sums(in_the_way), last))[0])
    return [NodeId(id_) for id_ in board.ids[slots[groups.members(best)[:wanted]]].tolist()]


# ---- what would have to stop


def cheapest(shape: Shape, count: int, there: Iterable[Clearable]) -> list[Clearing] | None:
    """The nodes of one site where the least has to stop for one allocation each; None: no site has so many.

    A room is what will be free there without stopping anything more. The rooms are not changed.
    """
    by_site: dict[str, list[Clearable]] = {}
    for place in there:
        by_site.setdefault(place[0].offer.site, []).append(place)
    best: _Set | None = None
    for here in by_site.values():
        if len(here) >= count:
            best = _cheapest_at(_Clearings(shape, here), count, best)
    return None if best is None else best.found


class _Set(NamedTuple):
    """Nodes cleared together; `cost`: GPUs that stop, tasks that stop, and the ids."""

    cost: tuple[int, ...]
    found: list[Clearing]


def _cheapest_at(site: _Clearings, count: int, best: _Set | None) -> _Set | None:
    """Node by node where the least more has to stop; and the same after each of the smallest gangs there, which gives
    way on several nodes at once."""
    best = _lesser(best, site.copy().make(count))
    for victim in site.spread_out()[:_MAX_GANGS_TRIED]:
        if best is not None and victim.amounts[0] >= best.cost[0]:
            break
        without = site.copy()
        without.stop([victim])
        best = _lesser(best, without.make(count))
    return (
        best if best is not None else _lesser(None, site.copy().make(count, whatever_is_short=True))
    )


def _lesser(best: _Set | None, found: list[Clearing] | None) -> _Set | None:
    if found is None:
        return best
    victims = {victim.line: victim for each in found for victim in each.victims}
    gpus = sum(victim.amounts[0] for victim in victims.values())
    made = _Set((gpus, len(victims), *sorted(each.node for each in found)), found)
    return made if best is None or made.cost < best.cost else best


class _Clearings:
    """Nodes of one site, and what has to stop on each beyond what stops already."""

    def __init__(self, shape: Shape, here: list[Clearable]) -> None:
        self.shape = shape
        self.left = {place[0].id: place for place in here}
        self.gone: dict[Line, Victim] = {}
        self.costs: dict[NodeId, tuple[tuple[int, int, int], list[Victim]]] = {}
        for id_ in self.left:
            self.weigh(id_)

    def copy(self) -> _Clearings:
        twin = _Clearings(self.shape, [])
        twin.left, twin.gone, twin.costs = self.left.copy(), self.gone.copy(), self.costs.copy()
        return twin

    def spread_out(self) -> list[Victim]:
        """The gangs among the victims, the smallest first."""
        gangs = {
            v.line: v for _, _, victims in self.left.values() for v in victims if v.line.members
        }
        return sorted(gangs.values(), key=lambda victim: (victim.amounts[0], victim.line.node))

    def make(self, count: int, *, whatever_is_short: bool = False) -> list[Clearing] | None:
        """`whatever_is_short`: besides GPUs."""
        found: list[Clearing] = []
        while len(found) < count and self.costs:
            id_ = min(self.costs, key=lambda id_: self.costs[id_][0])
            victims = self.costs.pop(id_)[1]
            node, room, there = self.left.pop(id_)
            room = self.after(id_, room)
            made = cleared(node, room, self.shape, victims)
            if made is None and whatever_is_short:
                others = [victim for victim in there if victim.line not in self.gone]
                made = completed(node, room, self.shape, victims, others)
            if made is None:
                continue
            here = [v for v in self.gone.values() if any(part.node == id_ for part in v.parts)]
            found.append(made._replace(victims=(*here, *made.victims)))
            self.stop(list(made.victims))
        return found if len(found) == count else None

    def stop(self, victims: list[Victim]) -> None:
        self.gone |= {victim.line: victim for victim in victims}
        for id_ in {part.node for victim in victims for part in victim.parts}:
            if id_ in self.left:
                self.weigh(id_)

    def weigh(self, id_: NodeId) -> None:
        node, room, victims = self.left[id_]
        left = [victim for victim in victims if victim.line not in self.gone]
        chosen = least(node, self.after(id_, room), self.shape, left)
        if chosen is None:
            self.costs.pop(id_, None)
        else:
            gpus = sum(victim.amounts[0] for victim in chosen)
            self.costs[id_] = (gpus, len(chosen), id_), chosen

    def after(self, id_: NodeId, room: Room) -> Room:
        """The room once those have stopped that stop for the other nodes; not to be changed."""
        if not self.gone:
            return room
        trial = room.copy()
        for victim in self.gone.values():
            give(trial, id_, victim)
        return trial

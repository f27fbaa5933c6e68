"""Places for gangs: different nodes of one site, all at once or none. Takes nothing.

Nodes must reach each other. Sets compare by: one GPU model rather than several (the slowest GPU sets the pace), price
steps (`index`), the site with the fewest nodes to spare, the tightest nodes, the smallest ids. A waiting gang holds
nothing. After `patience` a whole set is reserved for it, or none, so that two gangs never hold half a set each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import numpy as np

from gpool.core.ids import NodeId
from gpool.core.model import GpuRequest, Node, Shape
from gpool.core.scheduler.place.fit import Fit, joins_gangs, usable
from gpool.core.scheduler.place.index import Candidates, PlacementIndex
from gpool.core.scheduler.place.pricing import Ints, Slots

Found = list[tuple[NodeId, Fit]]


def places(index: PlacementIndex, shape: Shape, choice: int, barred: Collection[NodeId]) -> Found:
    wanted = shape.requirements.nodes
    there = index.candidates(shape, choice, barred)
    if len(there.slots) < wanted:
        return []
    for slots in _options(index, shape, choice, there):
        found: Found = []
        for slot in slots.tolist():
            place = index.fit_at(shape, choice, slot)
            if place is not None:  # a card whose hardware slices do not nest has none after all
                found.append(place)
                if len(found) == wanted:
                    return found
    return []


def _options(
    index: PlacementIndex, shape: Shape, choice: int, there: Candidates
) -> Iterator[Slots]:
    board, wanted = index.board, shape.requirements.nodes
    requests = shape.requirements.gpu
    sites = board.columns.site[there.slots]
    models = _models(index, there.slots, requests[choice] if requests else None)
    several = int(models.max()) + 1
    for alike in (sites * several + models, sites) if several > 1 else (sites,):
        groups = _Groups(alike, wanted)
        best = groups.order[groups.starts]
        spare = np.bincount(sites)[sites[best]]
        rank = (board.columns.ids[there.slots[best]], -groups.sums(there.rest), spare)
        for group in np.lexsort((*rank, -groups.sums(there.steps))).tolist():
            yield there.slots[groups.members(group)]


class _Groups:
    def __init__(self, group: Slots, wanted: int) -> None:
        self.order = np.argsort(group, kind="stable")
        starts = np.flatnonzero(np.diff(group[self.order], prepend=-1))
        counts = np.diff(starts, append=len(group))
        self.wanted = wanted
        self.starts, self.counts = starts[counts >= wanted], counts[counts >= wanted]

    def sums(self, amounts: Ints) -> Ints:
        total: Ints = np.concatenate([[0], np.cumsum(amounts[self.order])])
        return total[self.starts + self.wanted] - total[self.starts]

    def members(self, number: int) -> Slots:
        start = self.starts[number]
        return self.order[start : start + self.counts[number]]


def _models(index: PlacementIndex, slots: Slots, request: GpuRequest | None) -> Slots:
    board = index.board
    kinds = board.columns.kind[slots]
    distinct = np.unique(kinds)
    numbers = np.zeros(len(slots), np.intp)
    if request is None or len(distinct) == 1:
        return numbers
    known: dict[frozenset[str], int] = {}
    for kind in distinct.tolist():
        node = board.kinds.nodes[kind]
        assert node is not None, "a closed node has no room"
        models = frozenset(gpu.model for gpu in node.offer.gpus if usable(node, gpu, request))
        numbers[kinds == kind] = known.setdefault(models, len(known))
    return numbers


def most_together(nodes: Iterable[Node]) -> int:
    counts = Counter(node.offer.site for node in nodes if joins_gangs(node.offer))
    return max(counts.values(), default=0)


def is_possible(index: PlacementIndex, shape: Shape, barred: Collection[NodeId] = ()) -> bool:
    """Whether some site has enough nodes when idle."""
    slots, _ = index.could_run(shape, barred)
    if shape.requirements.nodes == 1:
        return bool(len(slots))
    return bool(len(_Groups(index.board.columns.site[slots], shape.requirements.nodes).starts))


def nearest(index: PlacementIndex, shape: Shape, barred: Collection[NodeId]) -> list[NodeId]:
    """Of the site with the fewest allocations in the way."""
    board, wanted = index.board, shape.requirements.nodes
    slots, has_room = index.could_run(shape, barred)
    in_the_way = np.where(has_room, 0, 1 + board.columns.lines[slots])
    order = np.lexsort((board.columns.ids[slots], in_the_way))
    slots, in_the_way = slots[order], in_the_way[order]
    groups = _Groups(board.columns.site[slots], wanted)
    if not len(groups.starts):
        return []
    last = in_the_way[groups.order[groups.starts + wanted - 1]]
    first = board.columns.ids[slots[groups.order[groups.starts]]]
    best = int(np.lexsort((first, groups.sums(in_the_way), last))[0])
    return [NodeId(id_) for id_ in board.columns.ids[slots[groups.members(best)[:wanted]]].tolist()]

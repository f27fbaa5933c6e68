"""Free room of all nodes as arrays, to compare many nodes at once. Mirrors rooms; decides nothing.
A node has a slot (array position) and a kind (`kinds`). Of nodes with one kind and equal room only one is measured.
Changes are numbered, so a reader looks only at slots changed since.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from gpool.core.ids import NodeId
from gpool.core.model import SECOND, Node
from gpool.core.scheduler.place.kinds import (
    CLOSED,
    MAX_GPUS,
    EqualGroups,
    GpuPattern,
    KindTable,
    lent_gpus,
    merit_of,
)
from gpool.core.scheduler.place.pricing import Floats, FragmentationTarget, Ints, Pricing, Slots
from gpool.core.scheduler.state.capacity import NOBODY, Room

HAS_GPUS = 1 << 16
"""More than the free thousandths of GPUs of any node."""

MERIT, MERIT_BITS = HAS_GPUS << 1, 7
"""Unit of a node's merit in a score: above its free GPU."""

FEW = 8  # changed slots that are looked at one by one rather than as arrays
_SLACK = 64
_MAX_PATTERNS = 8192
TWIN = -1  # share of a GPU like its neighbour, which stands for both

CPU, MEMORY, DISK, IDLE, TOTAL, FRAGMENTS, UNFED, WHOLE, LARGEST = range(9)
"""Rows of `BoardColumns.amounts`: free CPU, memory, disk, GPUs that nobody holds; thousandths of GPUs in all, those that the
mix cannot use, those without enough CPU and memory; GPUs that are lent and idle, and the most of one GPU."""

NEEDED = 4
"""The first rows, which a task may need."""

RoomAndCount = tuple[Room, int]


@dataclass(frozen=True, slots=True)
class BoardColumns:
    """Whole numbers below 2**53 (but for `UNFED`), as floats since prices are floats."""

    ids: Ints
    kind: Slots
    alike: Slots  # a number, equal where nodes are alike
    merit: Ints
    mtbf: Ints  # seconds
    site: Slots
    changed: Ints  # number of the last change
    lines: Ints  # allocations
    # Orders nodes of equal price, least first: all free GPU and above it, for tasks without GPU (0), HAS_GPUS where the node
    # has GPUs, for tasks with GPU (1) the merit.
    rank: Ints
    tight: Ints  # free CPU, then memory: orders what is equal otherwise
    amounts: Floats
    gpus: Ints  # by slot: share, memory, free thousandths and holder of each GPU
    fits: Floats  # by class of the mix: GPUs that fit it
    rests: Floats  # by class of the mix: free parts too small for it
    model: Slots
    size: int  # slots
    width: int  # GPUs of a slot
    free: Ints  # of `gpus`
    holder: Ints  # of `gpus`

    @classmethod
    def empty(cls, rows: int, gpus: int, classes: int) -> BoardColumns:
        parts = np.zeros((rows, 4, gpus), np.int64)
        parts[:, 3] = NOBODY
        return cls(
            ids=np.zeros(rows, np.int64),
            kind=np.zeros(rows, np.intp),
            alike=np.zeros(rows, np.intp),
            merit=np.zeros(rows, np.int64),
            mtbf=np.ones(rows, np.int64),
            site=np.zeros(rows, np.intp),
            changed=np.zeros(rows, np.int64),
            lines=np.zeros(rows, np.int64),
            rank=np.zeros((2, rows), np.int64),
            tight=np.zeros(rows, np.int64),
            amounts=np.zeros((9, rows)),
            gpus=parts,
            fits=np.zeros((rows, classes)),
            rests=np.zeros((rows, classes)),
            model=np.zeros(rows, np.intp),
            size=rows,
            width=gpus,
            free=parts[:, 2],
            holder=parts[:, 3],
        )


class MostFree(NamedTuple):
    at: int  # number of the last change
    cpu: int = 0
    memory: int = 0
    gpu_milli: int = 0
    idle_gpus: int = 0


class Board:
    def __init__(self, pricing: Pricing, look: Callable[[NodeId], RoomAndCount]) -> None:
        self.target = FragmentationTarget(pricing)
        self.kinds = KindTable(self.target)
        self.columns = BoardColumns.empty(64, 8, self.target.classes)
        self.slots: dict[NodeId, int] = {}
        self.nodes: list[Node | None] = []
        self.mtbfs: Counter[int] = Counter()  # nodes with each
        self.now = 0  # number of the last change
        self.generation = 1  # grows when the arrays or the kinds are others
        self._latest: deque[int] = deque(maxlen=FEW)  # slots, in the order of their changes
        self._look = look
        self._stale: set[NodeId] = set()
        self._seen: dict[int, tuple[object, ...]] = {}  # by slot: from what its columns were made
        self._alike = EqualGroups()
        self._with_gpus: set[int] = set()
        self._most = MostFree(-1)

    def expect(self, nodes: int, gpus: int) -> None:
        if nodes > self.columns.size or min(gpus, MAX_GPUS) > self.columns.width:
            self._grow(nodes, min(gpus, MAX_GPUS))

    def node(self, id_: NodeId) -> Node | None:
        slot = self.slots.get(id_)
        return None if slot is None else self.nodes[slot]

    def put(self, node: Node) -> None:
        slot = self.slots.get(node.id)
        if slot is None:
            slot = self._free_slot()
            self.slots[node.id] = slot
        self._count_mtbf(self.nodes[slot], -1)
        self._count_mtbf(node, 1)
        self.nodes[slot] = node
        if slot >= self.columns.size or lent_gpus(node) > self.columns.width:
            self._grow(slot + 1, lent_gpus(node))
        self._describe(slot, node)
        self._stale.add(node.id)
        if self.kinds.size > 2 * len(self.slots) + _SLACK:
            self._renumber_kinds()

    def _free_slot(self) -> int:
        if len(self.slots) < len(self.nodes):
            return self.nodes.index(None)
        self.nodes.append(None)
        return len(self.nodes) - 1

    def _renumber_kinds(self) -> None:
        self.kinds = KindTable(self.target)
        self._alike = EqualGroups()  # went by kinds
        self.generation += 1
        for slot, node in enumerate(self.nodes):
            if node is not None:
                self.columns.kind[slot] = self.kinds.kind(node)
                self.columns.site[slot] = self.kinds.site(node)
                self._stale.add(node.id)
            else:
                self.columns.alike[slot] = self._alike.set(slot, None)

    def _grow(self, rows: int, gpus: int) -> None:
        size, width = self.columns.size, self.columns.width
        size = max(size, 2 * rows if rows > size else 0)
        self.columns = BoardColumns.empty(size, max(width, gpus), self.target.classes)
        self.generation += 1
        for slot, node in enumerate(self.nodes):
            if node is not None:
                self._describe(slot, node)
                self._stale.add(node.id)
            else:
                self.columns.alike[slot] = self._alike.set(slot, None)

    def _describe(self, slot: int, node: Node) -> None:
        columns = self.columns
        columns.ids[slot] = node.id
        columns.kind[slot] = self.kinds.kind(node)
        columns.merit[slot] = merit_of(node) * MERIT
        columns.mtbf[slot] = max(1, node.merit.mtbf // SECOND)
        columns.site[slot] = self.kinds.site(node)
        if node.offer.gpus:
            self._with_gpus.add(slot)
        elif slot in self._with_gpus:  # it had some, or another node had this slot
            self._with_gpus.remove(slot)
            columns.gpus[slot] = 0
            columns.holder[slot] = NOBODY
            columns.amounts[IDLE:, slot] = 0
            columns.fits[slot] = columns.rests[slot] = 0
            columns.rank[:, slot] = 0

    def remove(self, id_: NodeId) -> None:
        slot = self.slots.pop(id_, None)
        if slot is None:
            return
        self._stale.discard(id_)
        self._count_mtbf(self.nodes[slot], -1)
        self.nodes[slot] = None
        self._seen.pop(slot, None)
        self.columns.kind[slot] = CLOSED
        self.columns.alike[slot] = self._alike.set(slot, None)
        self.columns.amounts[:, slot] = 0
        self._note(slot)

    def _count_mtbf(self, node: Node | None, change: int) -> None:
        if node is not None:
            mtbf = node.merit.mtbf
            self.mtbfs[mtbf] += change
            if not self.mtbfs[mtbf]:
                del self.mtbfs[mtbf]

    def touch(self, id_: NodeId, *, anew: bool = False) -> None:
        """`anew`: count as changed even if the room is not."""
        if id_ in self.slots:
            self._stale.add(id_)
            if anew:
                self._seen.pop(self.slots[id_], None)

    def refresh(self) -> None:
        """Most proposed allocations are granted; when they are folded into the state, the board has them already."""
        if not self._stale:
            return
        slots = [slot for id_ in self._stale if (slot := self._read(id_)) is not None]
        self._stale.clear()
        for slot in slots:
            self._note(slot)

    def _read(self, id_: NodeId) -> int | None:
        slot = self.slots[id_]
        (room, lines), node = self._look(id_), self.nodes[slot]
        assert node is not None
        gpus = self._pattern(slot, node, room) if slot in self._with_gpus else None
        cpu, memory, disk = room.free_cpu, room.free_memory, room.free_disk
        seen = (node, self.generation, lines, cpu, memory, disk, gpus)
        before = self._seen.get(slot)
        if before == seen:
            return None
        self._seen[slot] = seen
        columns = self.columns
        columns.lines[slot] = lines
        columns.tight[slot] = (min(max(cpu, 0), 1 << 26) << 32) + (
            min(max(memory, 0) >> 20, 1 << 31)
        )
        kind, merit = int(columns.kind[slot]), int(columns.merit[slot])
        if gpus is None:
            columns.amounts[:IDLE, slot] = cpu, memory, disk
        else:
            total = gpus.total
            columns.amounts[:, slot] = (
                *(cpu, memory, disk, gpus.idle, total),
                *(self._fragments(kind, cpu, gpus), self.target.stranded_of(cpu, memory, total)),
                *(gpus.whole, gpus.largest),
            )
            columns.rank[:, slot] = HAS_GPUS + total, merit + total
            if before is None or before[-1] is not gpus:
                columns.gpus[slot] = gpus.gpus
                columns.fits[slot], columns.rests[slot] = gpus.mix.fits, gpus.mix.rests
        value = (kind, merit, node.merit.mtbf, cpu, memory, disk, gpus)
        columns.alike[slot] = self._alike.set(slot, value)
        return slot

    def _fragments(self, kind: int, cpu: int, gpus: GpuPattern) -> float:
        step = self.target.step_of(cpu)
        known = gpus.fragments.get(step)
        if known is None:
            known = gpus.fragments[step] = self.target.fragments_of(kind, step, gpus.mix)
        return known

    def _pattern(self, slot: int, node: Node, room: Room) -> GpuPattern:
        """Nodes of one kind with equal free GPUs share it: most changes lead back to one that was seen before."""
        gpus, lent, withheld = room.gpus, node.offer.gpus[:MAX_GPUS], node.gpus_withheld
        kind, width = int(self.columns.kind[slot]), self.columns.width
        parts = tuple([gpus[device.index].offered for device in lent])
        hidden: tuple[int, ...] = ()
        if withheld:
            hidden = tuple([place for place, gpu in enumerate(lent) if gpu.index in withheld])
        patterns, key = self.kinds.patterns, (kind, width, parts, hidden)
        known = patterns.get(key)
        if known is None:
            if len(patterns) >= _MAX_PATTERNS:
                patterns.clear()
            found = _padded(parts, self.kinds.gpu_groups[kind], hidden, width)
            known = patterns[key] = GpuPattern(found, self.target, width - len(parts))
        return known

    def models(self, slots: Slots) -> tuple[Slots, Slots]:
        """One equal slot for each slot; and those slots, each once."""
        numbers = self.columns.alike.take(slots)
        self.columns.model[numbers] = slots
        models = self.columns.model.take(numbers)
        return models, slots[models == slots]

    def most_free(self) -> MostFree:
        if self._most.at != self.now:
            found = self.columns.amounts.max(1).tolist()
            most = (int(found[row]) for row in (CPU, MEMORY, LARGEST, WHOLE))
            self._most = MostFree(self.now, *most)
        return self._most

    def _note(self, slot: int) -> None:
        self.now += 1
        self.columns.changed[slot] = self.now
        self._latest.append(slot)

    def since(self, read: int) -> set[int] | Slots:
        """Slots changed after change `read`; a set if few."""
        count = self.now - read
        if count <= len(self._latest):
            return set(islice(reversed(self._latest), count))
        changed: Slots = (self.columns.changed[: len(self.nodes)] > read).nonzero()[0]
        return changed


def _padded(
    parts: Sequence[tuple[int, int, int, int]],
    groups: tuple[int, ...],
    hidden: tuple[int, ...],
    width: int,
) -> tuple[tuple[int, ...], ...]:
    """Share, memory, free thousandths and holder of each GPU. Of equal neighbours only the first offers a share to
    slices; `hidden` ones offer nothing.
    """
    share, vram, free, holder = map(list, zip(*parts, strict=True))
    for place in range(1, len(groups)):
        if parts[place] == parts[place - 1] and groups[place] == groups[place - 1]:
            share[place] = TWIN
    for place in hidden:
        free[place] = 0
    pad = (0,) * (width - len(parts))
    nobody = (NOBODY,) * len(pad)
    return (*share, *pad), (*vram, *pad), (*free, *pad), (*holder, *nobody)

"""Every node's free room as rows of numbers, so that many nodes are compared at once. It mirrors rooms; it decides nothing.

A node has a **slot**, the row it stands in, and a **kind**: what it offers when idle. Nodes of one kind answer alike to
"could you ever run this?", so that is asked once a kind. Nodes of one kind that have the same free are **alike**: one is
measured for all of them. Changes are counted, and each node's last one is noted; whoever remembers how far they have read
need only look at the nodes that changed since.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np

from gpool.core.ids import NodeId
from gpool.core.model import SECOND, Gpu, Health, Node, Tier
from gpool.core.scheduler.place.fit import is_open, joins_gangs
from gpool.core.scheduler.place.fragmentation import Mix, Slots, Target
from gpool.core.scheduler.place.pricing import Pricing
from gpool.core.scheduler.state.capacity import NOBODY, Room
from gpool.core.scheduler.state.equal_groups import Alike

CLOSED = 0
"""The kind of slots that take nothing: empty ones, and nodes that are away or paused."""

MAX_GPUS = 64
"""Of one node; further ones are not lent. A wide node makes the rows of all others as wide."""

LENDS = 1 << 16
"""More than any node has free, in thousandths of a GPU."""

MERIT, MERIT_BITS = LENDS << 1, 7
"""What a node's merit counts for in a key: above what it has free. Seven bits: trust, then speed."""

FEW = 8  # nodes that are looked at one by one before the arrays are asked
_SLACK = 64
TWIN = -1  # the share of a GPU that is like another of its node, which stands for both
_MAX_MIXES = 4096

CPU, MEMORY, DISK, IDLE, TOTAL, FRAGMENTS, UNFED, WHOLE, LARGEST = range(9)
"""Columns of `amounts`. Free: CPU, memory, disk, GPUs that nobody holds; thousandths of GPUs in all, those that the mix cannot
use, those that CPU and memory do not feed; GPUs that are lent and idle, and the most of one GPU."""

NEEDED = 4
"""So many of them, the first, are what a task may need."""

Look = Callable[[NodeId], tuple[Room, int]]


def merit_of(node: Node) -> int:
    """The less the better: first whether its GPUs are proven and healthy, then by speed in half octaves."""
    if not node.offer.gpus:
        return 0
    is_ailing = any(gpu.health is not Health.HEALTHY for gpu in node.offer.gpus)
    trust = 2 if is_ailing else 0 if node.merit.is_proven else 1
    gigaflops = node.merit.gigaflops
    slowness = 31 - min(31, (gigaflops * gigaflops >> 16).bit_length())
    return (trust << 5) + slowness


def _lent(node: Node) -> int:
    return min(len(node.offer.gpus), MAX_GPUS)


def _kind_of(gpu: Gpu) -> tuple[object, ...]:
    """What of a GPU bears on which tasks could ever use it."""
    return (
        gpu.index,
        gpu.model,
        gpu.vendor,
        gpu.memory_bytes,
        bool(gpu.closed),
        gpu.sharing,
        gpu.profiles,
    )


def _sorts_of(node: Node) -> tuple[int, ...]:
    """By GPU a number: equal where the same tasks could use them."""
    known: dict[tuple[object, ...], int] = {}
    lent, withheld = node.offer.gpus[:MAX_GPUS], node.gpus_withheld
    sorts = [(gpu.index in withheld, *_kind_of(gpu)[1:]) for gpu in lent]
    return tuple([known.setdefault(sort, len(known)) for sort in sorts])


def kind_key(node: Node) -> tuple[Any, ...]:
    """Equal for nodes that can run the same shapes when idle."""
    offer = node.offer
    is_for_some = node.audience is not None or node.reserved_for is not None
    owner = node.owner if is_for_some or Tier.NONE in offer.tiers else None
    return (
        offer.cpu_milli,
        offer.memory_bytes,
        offer.disk_bytes,
        tuple([_kind_of(gpu) for gpu in offer.gpus]),
        offer.pythons,
        offer.tiers,
        offer.environments,
        offer.builds,
        offer.networks,
        offer.runtimes,
        offer.labels,
        offer.price_microcredits,
        node.audience,
        node.reserved_for,
        node.gpus_withheld,
        owner,
        joins_gangs(offer),
    )


class Board:
    """Rows by slot. `look` tells a node's room and the lines on it at this moment; `touch` says that they have changed."""

    def __init__(self, pricing: Pricing, look: Look) -> None:
        self.target = Target(pricing)
        self.pricing = pricing
        self.slots: dict[NodeId, int] = {}
        self.nodes: list[Node | None] = []
        self.mtbfs: Counter[int] = Counter()  # how many nodes have each
        self.kinds: list[Node | None] = [None]  # one node of each kind
        self._sorts: list[tuple[int, ...]] = [()]  # of each, by GPU: equal where they are alike
        self.now = 0  # how many changes there were
        self._latest: deque[int] = deque(maxlen=FEW)  # slots, in the order of changing
        self.generation = 0  # grows when rows change their length
        self._look = look
        self._kinds_by: dict[tuple[Any, ...], int] = {}
        self._sites: dict[str, int] = {}
        self._unused: list[int] = []
        self._stale: set[NodeId] = set()
        self._said: dict[int, tuple[object, ...]] = {}  # by slot: what its row was made from
        self._alike = Alike()
        self._mixes: dict[tuple[int, ...], Mix] = {}  # by the free parts of a node's GPUs
        self._with_gpus: set[int] = set()
        self._most: tuple[int, ...] = (0, 0, 0, 0)
        self._most_at = -1
        self._lay_out(64, 8)

    def _lay_out(self, rows: int, gpus: int) -> None:
        self.size, self.width = rows, gpus
        self.ids = np.zeros(rows, np.int64)
        self.kind = np.zeros(rows, np.intp)
        self.alike = np.zeros(rows, np.intp)  # a number: equal where nodes are alike
        self.merit = np.zeros(rows, np.int64)
        self.mtbf = np.ones(rows, np.int64)  # seconds
        self.site = np.zeros(rows, np.intp)  # its number; 0: it takes no part in gangs
        self.changed = np.zeros(rows, np.int64)  # what `now` was then
        self.lines = np.zeros(rows, np.int64)
        # What orders nodes of equal price, the least first: all free GPU, and above it `LENDS` where there are GPUs, for tasks
        # without one (0), or the merit of those, for tasks with (1).
        self.rank = np.zeros((2, rows), np.int64)
        self.tight = np.zeros(rows, np.int64)  # CPU, then memory: orders what is equal otherwise
        # What is read together lies together: one `take` fetches it all.
        # Amounts are whole numbers below 2**53, but for what is not fed, kept as floats because prices are computed from them.
        self.amounts = np.zeros((9, rows))
        self.cpu, self.memory, self.disk = self.amounts[: DISK + 1]
        self.gpus = np.zeros((rows, 4, gpus), np.int64)  # share, memory, free, holder
        self.free, self.holder = self.gpus[:, 2], self.gpus[:, 3]
        self.holder[:] = NOBODY  # free: what both share and memory leave, in thousandths
        # By class of the mix: GPUs that fit it, and rests too small for it.
        self.fits = np.zeros((rows, self.target.classes))
        self.rests = np.zeros((rows, self.target.classes))
        self._model = np.zeros(rows, np.intp)
        self.generation += 1

    # ---- nodes come, change and go

    def expect(self, nodes: int, gpus: int) -> None:
        """So many nodes will come, of so many GPUs at most: to make place for them at once."""
        if nodes > self.size or min(gpus, MAX_GPUS) > self.width:
            self._grow(nodes, min(gpus, MAX_GPUS))

    def node(self, id_: NodeId) -> Node | None:
        slot = self.slots.get(id_)
        return None if slot is None else self.nodes[slot]

    def put(self, node: Node) -> None:
        slot = self.slots.get(node.id)
        if slot is None:
            slot = self._unused.pop() if self._unused else len(self.nodes)
            if slot == len(self.nodes):
                self.nodes.append(None)
            self.slots[node.id] = slot
        self._count_mtbf(self.nodes[slot], -1)
        self._count_mtbf(node, 1)
        self.nodes[slot] = node
        gpus = _lent(node)
        if slot >= self.size or gpus > self.width:
            self._grow(slot + 1, gpus)
        self._describe(slot, node)
        self._stale.add(node.id)
        if max(len(self.kinds), len(self._sites)) > 2 * len(self.slots) + _SLACK:
            self._regroup()

    def _regroup(self) -> None:
        """Offers change, and kinds and sites that no node is of any more are of no use."""
        self.kinds, self._kinds_by, self._sites, self._sorts = [None], {}, {}, [()]
        self.target.forget_kinds()
        self._alike = Alike()  # went by kinds
        self.generation += 1
        for slot, node in enumerate(self.nodes):
            if node is not None:
                self.kind[slot] = self._kind(node)
                self.site[slot] = self._site(node)
                self._stale.add(node.id)
            else:
                self.alike[slot] = self._alike.set(slot, None)

    def _grow(self, rows: int, gpus: int) -> None:
        self._lay_out(max(self.size, 2 * rows if rows > self.size else 0), max(self.width, gpus))
        for slot, node in enumerate(self.nodes):
            if node is not None:
                self._describe(slot, node)
                self._stale.add(node.id)
            else:
                self.alike[slot] = self._alike.set(slot, None)

    def _describe(self, slot: int, node: Node) -> None:
        self.ids[slot] = node.id
        self.kind[slot] = self._kind(node)
        self.merit[slot] = merit_of(node) * MERIT
        self.mtbf[slot] = max(1, node.merit.mtbf // SECOND)
        self.site[slot] = self._site(node)
        if node.offer.gpus:
            self._with_gpus.add(slot)
        elif slot in self._with_gpus:  # it had some, or another node stood here
            self._with_gpus.remove(slot)
            self._clear_gpus(slot)

    def remove(self, id_: NodeId) -> None:
        slot = self.slots.pop(id_, None)
        if slot is None:
            return
        self._stale.discard(id_)
        self._count_mtbf(self.nodes[slot], -1)
        self.nodes[slot] = None
        self._said.pop(slot, None)
        self._unused.append(slot)
        self.kind[slot] = CLOSED
        self.alike[slot] = self._alike.set(slot, None)
        self.amounts[:, slot] = 0
        self._note(slot)

    def _count_mtbf(self, node: Node | None, change: int) -> None:
        if node is not None:
            mtbf = node.merit.mtbf
            self.mtbfs[mtbf] += change
            if not self.mtbfs[mtbf]:
                del self.mtbfs[mtbf]

    def touch(self, id_: NodeId, *, anew: bool = False) -> None:
        """Its room may not be what it was; `anew`: it counts as changed even if it is."""
        if id_ in self.slots:
            self._stale.add(id_)
            if anew:
                self._said.pop(self.slots[id_], None)

    def _site(self, node: Node) -> int:
        if not joins_gangs(node.offer):
            return 0
        return self._sites.setdefault(node.offer.site, len(self._sites) + 1)

    def _kind(self, node: Node) -> int:
        if not is_open(node):
            return CLOSED
        key = kind_key(node)
        kind = self._kinds_by.get(key)
        if kind is None:
            kind = self._kinds_by[key] = len(self.kinds)
            self.kinds.append(node)
            self._sorts.append(_sorts_of(node))
            self.target.add_kind(node)
        return kind

    # ---- reading the rooms

    def refresh(self) -> None:
        """Brings the rows of all touched nodes up to date and notes those that are not as they were.

        Most that a pass takes is granted, and is what the board says already when that is folded.
        """
        if not self._stale:
            return
        slots = [slot for id_ in self._stale if (slot := self._read(id_)) is not None]
        self._stale.clear()
        if len(slots) == 1:
            self._measure(slots[0])
        elif slots:
            self._measure_all(np.array(slots, np.intp))
        for slot in slots:
            self._note(slot)

    def _read(self, id_: NodeId) -> int | None:
        slot = self.slots[id_]
        (room, lines), node = self._look(id_), self.nodes[slot]
        assert node is not None
        gpus = self._gpus_of(slot, node, room) if slot in self._with_gpus else None
        cpu, memory, disk = room.free_cpu, room.free_memory, room.free_disk
        said = (node, self.generation, lines, cpu, memory, disk, gpus)
        if self._said.get(slot) == said:
            return None
        self._said[slot] = said
        self.lines[slot] = lines
        amounts = self.amounts[:, slot]
        amounts[CPU], amounts[MEMORY], amounts[DISK] = cpu, memory, disk
        self.tight[slot] = (min(max(cpu, 0), 1 << 26) << 32) + (min(max(memory, 0) >> 20, 1 << 31))
        kind, merit = int(self.kind[slot]), int(self.merit[slot])
        if gpus is not None:
            self.gpus[slot] = gpus
            free = gpus[2]
            total = sum(free)
            amounts[TOTAL], amounts[IDLE] = total, gpus[3].count(NOBODY) - self.width + _lent(node)
            amounts[WHOLE], amounts[LARGEST] = free.count(1000), max(free)
            self.rank[0, slot], self.rank[1, slot] = LENDS + total, merit + total
        value = (kind, merit, node.merit.mtbf, cpu, memory, disk, gpus)
        self.alike[slot] = self._alike.set(slot, value)
        return slot

    def _gpus_of(self, slot: int, node: Node, room: Room) -> tuple[tuple[int, ...], ...]:
        """As they stand in `gpus`. Of neighbours that are alike the first alone has a share: what slices are offered."""
        gpus, withheld = room.gpus, node.gpus_withheld
        parts = [gpus[device.index].offered for device in node.offer.gpus[:MAX_GPUS]]
        share, vram, free, holder = map(list, zip(*parts, strict=True))
        sorts = self._sorts[self.kind[slot]]
        for place in range(1, len(sorts)):
            if parts[place] == parts[place - 1] and sorts[place] == sorts[place - 1]:
                share[place] = TWIN
        for place, device in enumerate(node.offer.gpus[:MAX_GPUS] if withheld else ()):
            if device.index in withheld:
                free[place] = 0
        pad = (0,) * (self.width - len(parts))
        nobody = (NOBODY,) * len(pad)
        return (*share, *pad), (*vram, *pad), (*free, *pad), (*holder, *nobody)

    def _clear_gpus(self, slot: int) -> None:
        self.gpus[slot] = 0
        self.holder[slot] = NOBODY
        self.amounts[IDLE:, slot] = 0
        self.fits[slot] = self.rests[slot] = 0
        self.rank[:, slot] = 0

    def _measure(self, slot: int) -> None:
        if slot not in self._with_gpus:
            return
        target, amounts = self.target, self.amounts[:, slot]
        free = tuple(self.free[slot].tolist())
        known = self._mixes.get(free)
        if known is None:
            if len(self._mixes) >= _MAX_MIXES:
                self._mixes.clear()
            known = self._mixes[free] = target.mix_of(free)
        cpu, memory, total = amounts[CPU], amounts[MEMORY], amounts[TOTAL]
        self.fits[slot], self.rests[slot] = known.fits, known.rests
        amounts[FRAGMENTS] = target.fragments_of(int(self.kind[slot]), cpu, known)
        amounts[UNFED] = target.stranded_of(cpu, memory, total)

    def _measure_all(self, slots: Slots) -> None:
        models, some = self.models(slots)
        for slot in some.tolist():
            self._measure(slot)
        self.fits[slots], self.rests[slots] = self.fits[models], self.rests[models]
        for column in (FRAGMENTS, UNFED):
            self.amounts[column, slots] = self.amounts[column, models]

    def models(self, slots: Slots) -> tuple[Slots, Slots]:
        """For each of these slots one of them that is alike; and those, without any that is alike to another."""
        numbers = self.alike.take(slots)
        self._model[numbers] = slots
        models = self._model.take(numbers)
        return models, slots[models == slots]

    def most(self) -> tuple[int, int, int, int]:
        """The most free CPU and memory of any node, free thousandths of any GPU, and idle GPUs of any node."""
        if self._most_at != self.now:
            self._most_at = self.now
            found = self.amounts.max(1).tolist()
            self._most = tuple(int(found[each]) for each in (CPU, MEMORY, LARGEST, WHOLE))
        return self._most  # type: ignore[return-value]  # four of them

    # ---- changes

    def _note(self, slot: int) -> None:
        self.now += 1
        self.changed[slot] = self.now
        self._latest.append(slot)

    def since(self, read: int) -> set[int] | Slots:
        """The slots that changed after `now` was `read`; a set when there are few."""
        count = self.now - read
        if count <= len(self._latest):
            return set(islice(reversed(self._latest), count))
        changed: Slots = (self.changed[: len(self.nodes)] > read).nonzero()[0]
        return changed

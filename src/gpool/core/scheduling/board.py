"""Every node's free room as rows of numbers, so that many nodes are compared at once. It mirrors rooms; it decides nothing.

A node has a **slot**, the row it stands in, and a **kind**: what it offers when idle. Nodes of one kind answer alike to
"could you ever run this?", so that is asked once a kind. Changes are counted, and each node's last one is noted;
whoever remembers how far they have read need only look at the nodes that changed since.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np

from gpool.core.ids import NodeId
from gpool.core.model import SECOND, Gpu, Health, Node, Sharing, Tier
from gpool.core.scheduling.fragmentation import Slots, Target
from gpool.core.scheduling.placement import is_open, joins_gangs
from gpool.core.scheduling.pricing import Pricing
from gpool.core.scheduling.room import ANYBODY, Room

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
NOBODY = -1
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


def _kind_of(gpu: Gpu) -> tuple[object, ...]:
    """What of a GPU bears on which tasks could ever use it."""
    sort = gpu.index, gpu.model, gpu.vendor, gpu.memory_bytes
    return (*sort, bool(gpu.closed), gpu.sharing, gpu.profiles)


class Board:
    """Rows by slot. `look` tells a node's room and the lines on it at this moment; `touch` says that they have changed."""

    def __init__(self, pricing: Pricing, look: Look) -> None:
        self.target = Target(pricing)
        self.pricing = pricing
        self.slots: dict[NodeId, int] = {}
        self.nodes: list[Node | None] = []
        self.mtbfs: Counter[int] = Counter()  # how many nodes have each
        self.kinds: list[Node | None] = [None]  # one node of each kind
        self.now = 0  # how many changes there were
        self._latest: deque[int] = deque(maxlen=FEW)  # slots, in the order of changing
        self.generation = 0  # grows when rows change their length
        self._look = look
        self._kinds_by: dict[tuple[Any, ...], int] = {}
        self._sites: dict[str, int] = {}
        self._unused: list[int] = []
        self._stale: set[NodeId] = set()
        self._said: dict[int, tuple[object, ...]] = {}  # by slot: what its row was made from
        self._with_gpus: set[int] = set()
        self._most: tuple[int, ...] = (0, 0, 0, 0)
        self._most_at = -1
        self._lay_out(64, 8)

    def _lay_out(self, rows: int, gpus: int) -> None:
        self.size, self.width = rows, gpus
        classes = self.target.classes
        self.ids = np.zeros(rows, np.int64)
        self.kind = np.zeros(rows, np.intp)
        self.merit = np.zeros(rows, np.int64)
        self.mtbf = np.ones(rows, np.int64)  # seconds
        self.disk = np.zeros(rows, np.int64)
        self.site = np.zeros(rows, np.intp)  # its number; 0: it takes no part in gangs
        self.changed = np.zeros(rows, np.int64)  # what `now` was then
        self.lines = np.zeros(rows, np.int64)
        self.lends = np.zeros(rows, np.int64)  # `LENDS` where there are GPUs
        self.tight = np.zeros(rows, np.int64)  # CPU, then memory: orders what is equal otherwise
        # Amounts are whole numbers below 2**53, kept as floats because prices are computed from them.
        self.cpu, self.memory, self.total = np.zeros(rows), np.zeros(rows), np.zeros(rows)
        self.fragments, self.stranded = np.zeros(rows), np.zeros(rows)
        # What is read together lies together: one `take` fetches it all.
        self.gpus = np.zeros((rows, 4, gpus), np.int64)
        self.share, self.vram, self.free, self.holder = self.gpus.swapaxes(0, 1)
        self.holder[:] = NOBODY  # free: what both share and memory leave, in thousandths
        self.mix = np.zeros(
            (rows, 2, classes)
        )  # by class: GPUs that fit it, rests too small for it
        self.generation += 1

    # ---- nodes come, change and go

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
        gpus = min(len(node.offer.gpus), MAX_GPUS)
        if slot >= self.size or gpus > self.width:
            self._grow(slot + 1, gpus)
        self._describe(slot, node)
        self._stale.add(node.id)
        if max(len(self.kinds), len(self._sites)) > 2 * len(self.slots) + _SLACK:
            self._regroup()

    def _regroup(self) -> None:
        """Offers change, and kinds and sites that no node is of any more are of no use."""
        self.kinds, self._kinds_by, self._sites = [None], {}, {}
        self.target.forget_kinds()
        self.generation += 1
        for slot, node in enumerate(self.nodes):
            if node is not None:
                self.kind[slot] = self._kind(node)
                self.site[slot] = self._site(node)

    def _grow(self, rows: int, gpus: int) -> None:
        self._lay_out(max(self.size, 2 * rows if rows > self.size else 0), max(self.width, gpus))
        for slot, node in enumerate(self.nodes):
            if node is not None:
                self._describe(slot, node)
                self._stale.add(node.id)

    def _describe(self, slot: int, node: Node) -> None:
        self.ids[slot] = node.id
        self.kind[slot] = self._kind(node)
        self.merit[slot] = merit_of(node) * MERIT
        self.mtbf[slot] = max(1, node.merit.mtbf // SECOND)
        self.site[slot] = self._site(node)
        self.lends[slot] = LENDS if node.offer.gpus else 0
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
        self.cpu[slot] = self.memory[slot] = 0
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
        offer = node.offer
        is_for_some = node.audience is not None or node.reserved_for is not None
        owner = node.owner if is_for_some or Tier.NONE in offer.tiers else None
        key = (
            offer.cpu_milli,
            offer.memory_bytes,
            offer.disk_bytes,
            tuple(_kind_of(gpu) for gpu in offer.gpus),
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
        kind = self._kinds_by.get(key)
        if kind is None:
            kind = self._kinds_by[key] = len(self.kinds)
            self.kinds.append(node)
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
        with_gpus = [slot for slot in slots if slot in self._with_gpus]
        if with_gpus:
            self._measure(np.array(with_gpus, np.intp))
        for slot in slots:
            self._note(slot)

    def _read(self, id_: NodeId) -> int | None:
        slot = self.slots[id_]
        (room, lines), node = self._look(id_), self.nodes[slot]
        assert node is not None
        gpus = self._gpus_of(node, room) if slot in self._with_gpus else None
        said = (node, self.generation, lines, room.free_cpu, room.free_memory, room.free_disk, gpus)
        if self._said.get(slot) == said:
            return None
        self._said[slot] = said
        self.lines[slot] = lines
        self.cpu[slot] = room.free_cpu
        self.memory[slot] = room.free_memory
        self.disk[slot] = room.free_disk
        self.tight[slot] = (min(max(room.free_cpu, 0), 1 << 26) << 32) + (
            min(max(room.free_memory, 0) >> 20, 1 << 31)
        )
        if gpus is not None:
            self.gpus[slot] = gpus
        return slot

    def _gpus_of(self, node: Node, room: Room) -> tuple[list[int], ...]:
        """As they stand in `gpus`."""
        devices = node.offer.gpus[:MAX_GPUS]
        pad = [0] * (self.width - len(devices))
        share, vram, holder, free = [], [], [], []
        withheld = node.gpus_withheld
        for device in devices:
            gpu = room.gpus[device.index]
            user, free_share, memory = gpu.user, gpu.free_share, gpu.free_memory
            by_memory = 1000 * memory // max(1, device.memory_bytes)
            # a card that somebody holds uncut is not cut beside them
            if device.sharing is Sharing.MIG and user not in (None, ANYBODY):
                share.append(0)
                vram.append(0)
            else:
                share.append(free_share)
                vram.append(memory)
            holder.append(NOBODY if user is None else user)
            if device.closed or device.index in withheld:
                free.append(0)
            else:
                free.append(max(0, min(free_share, by_memory)))
        return share + pad, vram + pad, free + pad, holder + [NOBODY] * len(pad)

    def _clear_gpus(self, slot: int) -> None:
        self.gpus[slot] = 0
        self.holder[slot] = NOBODY
        self.total[slot] = self.fragments[slot] = self.stranded[slot] = 0
        self.mix[slot] = 0

    def _measure(self, slots: Slots) -> None:
        target, free = self.target, self.gpus.take(slots, 0)[:, 2]
        mix = target.table.take(free, 0).sum(1)
        cpu, memory, total = self.cpu[slots], self.memory[slots], free.sum(1).astype(float)
        self.mix[slots] = mix
        self.total[slots] = total
        self.fragments[slots] = target.fragments(self.kind[slots], cpu, mix, total)
        self.stranded[slots] = target.stranded(cpu, memory, total)

    def most(self) -> tuple[int, int, int, int]:
        """The most free CPU and memory of any node, free thousandths of any GPU, and idle GPUs of any node."""
        if self._most_at != self.now:
            self._most_at = self.now
            idle = (self.free == 1000).sum(1)
            found = (self.cpu.max(), self.memory.max(), self.free.max(), idle.max())
            self._most = tuple(int(each) for each in found)
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
        changed: Slots = np.flatnonzero(self.changed[: len(self.nodes)] > read)
        return changed

"""What is free on one node: CPU, memory, disk, and each GPU's memory and share. It counts; it decides nothing."""

from __future__ import annotations

from gpool.core.ids import UserId
from gpool.core.model import Allocation, Gpu, Node, Sharing, Slice
from gpool.core.specs import gpu_slices

ANYBODY = UserId(-2)
"""Whose tasks hold a GPU that is cut into hardware slices: strangers may be neighbours there."""


NOBODY = UserId(-1)


class GpuRoom:
    """What is free of one GPU, and whose tasks hold the rest.

    Of one that is cut into hardware slices, memory and share of the largest slice that can still be made are free.
    """

    __slots__ = ("_offered", "cut", "free_memory", "free_share", "gpu", "holders", "user")

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.free_memory = gpu.memory_bytes
        self.free_share = 1000
        self.holders = 0
        self.user: UserId | None = None  # other slices are shared among one user's tasks only
        self.cut: tuple[tuple[int, int], ...] = ()  # (start, size) of hardware slices
        self._offered: tuple[int, int, int, int] | None = None

    def copy(self) -> GpuRoom:
        twin = GpuRoom.__new__(GpuRoom)  # everything is set here
        twin.gpu = self.gpu
        twin.free_memory, twin.free_share = self.free_memory, self.free_share
        twin.holders, twin.user, twin.cut = self.holders, self.user, self.cut
        twin._offered = self._offered
        return twin

    @property
    def offered(self) -> tuple[int, int, int, int]:
        """Share and memory that a slice may have, thousandths that both leave free, and who holds the rest (or `NOBODY`)."""
        if self._offered is None:
            gpu, share, memory, user = self.gpu, self.free_share, self.free_memory, self.user
            by_memory = 1000 * memory // max(1, gpu.memory_bytes)
            free = 0 if gpu.closed else max(0, min(share, by_memory))
            if gpu.sharing is Sharing.MIG and user is not None and user != ANYBODY:
                share = memory = 0  # a card that somebody holds uncut is not cut beside them
            self._offered = share, memory, free, NOBODY if user is None else user
        return self._offered

    def take(self, part: Slice, user: UserId) -> None:
        self.holders += 1
        self._offered = None
        profile = gpu_slices.named(self.gpu, part.profile)
        if profile is None:
            self.free_memory -= part.memory_bytes
            self.free_share -= part.share_milli
            self.user = user
            return
        self.cut = tuple(sorted((*self.cut, (part.start, profile.size))))
        self.user = ANYBODY
        self._measure()

    def give(self, part: Slice) -> None:
        self.holders -= 1
        self._offered = None
        if self.holders == 0:
            self.user = None
        profile = gpu_slices.named(self.gpu, part.profile)
        if profile is None:
            self.free_memory += part.memory_bytes
            self.free_share += part.share_milli
            return
        cut = list(self.cut)
        cut.remove((part.start, profile.size))
        self.cut = tuple(cut)
        self._measure()

    def _measure(self) -> None:
        if not self.cut:
            self.free_memory, self.free_share = self.gpu.memory_bytes, 1000
            return
        left = gpu_slices.largest(self.gpu, self.cut)
        self.free_memory = left.memory_bytes if left else 0
        self.free_share = gpu_slices.share_of(self.gpu, left) if left else 0


class Room:
    """Free amounts; negative where an owner took back what was already lent."""

    __slots__ = ("free_cpu", "free_disk", "free_memory", "gpus")

    def __init__(self, node: Node | None) -> None:
        self.free_cpu = node.offer.cpu_milli if node else 0
        self.free_memory = node.offer.memory_bytes if node else 0
        self.free_disk = node.offer.disk_bytes if node else 0  # less what was asked for by name
        self.gpus: dict[int, GpuRoom] = (
            {gpu.index: GpuRoom(gpu) for gpu in node.offer.gpus} if node else {}
        )

    def copy(self) -> Room:
        twin = Room(None)
        twin.free_cpu, twin.free_memory = self.free_cpu, self.free_memory
        twin.free_disk = self.free_disk
        twin.gpus = (
            self.gpus.copy()
        )  # which are replaced, never changed: most of a node's stay as they are
        return twin

    def take(self, allocation: Allocation, user: UserId) -> None:
        self.free_cpu -= allocation.cpu_milli
        self.free_memory -= allocation.memory_bytes
        self.free_disk -= allocation.disk_bytes
        for part in allocation.slices:
            gpu = self.gpus.get(part.gpu_index)
            if gpu is not None:  # the node may have lost the device meanwhile
                gpu = self.gpus[part.gpu_index] = gpu.copy()
                gpu.take(part, user)

    def give(self, allocation: Allocation) -> None:
        self.free_cpu += allocation.cpu_milli
        self.free_memory += allocation.memory_bytes
        self.free_disk += allocation.disk_bytes
        for part in allocation.slices:
            gpu = self.gpus.get(part.gpu_index)
            if gpu is not None:
                gpu = self.gpus[part.gpu_index] = gpu.copy()
                gpu.give(part)

    def truth(self) -> tuple[object, ...]:
        """The amounts as a plain value, to compare."""
        gpus = tuple(
            (index, g.free_memory, g.free_share, g.holders, g.user, g.cut)
            for index, g in sorted(self.gpus.items())
        )
        return self.free_cpu, self.free_memory, self.free_disk, gpus

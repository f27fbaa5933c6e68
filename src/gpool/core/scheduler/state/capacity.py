"""Free capacity of one node: CPU, memory, disk, and memory and share of each GPU. Decides nothing."""

from __future__ import annotations

from gpool.core.ids import UserId
from gpool.core.model import Allocation, Gpu, Node, Sharing, Slice
from gpool.core.specs import gpu_slices

ANYBODY = UserId(-2)
"""User of a GPU with hardware slices, which tasks of different users may share."""


NOBODY = UserId(-1)


class GpuRoom:
    """Free memory and share of one GPU; with hardware slices, those of the largest slice that fits."""

    __slots__ = ("_offered", "cut", "free_memory", "free_share", "gpu", "holders", "user")

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.free_memory = gpu.memory_bytes
        self.free_share = 1000
        self.holders = 0
        self.user: UserId | None = None  # software slices are shared among tasks of one user only
        self.cut: tuple[tuple[int, int], ...] = ()  # (start, size) of hardware slices
        self._offered: tuple[int, int, int, int] | None = None

    def copy(self) -> GpuRoom:
        twin = GpuRoom.__new__(GpuRoom)  # all attributes are set below
        twin.gpu = self.gpu
        twin.free_memory, twin.free_share = self.free_memory, self.free_share
        twin.holders, twin.user, twin.cut = self.holders, self.user, self.cut
        twin._offered = self._offered
        return twin

    @property
    def offered(self) -> tuple[int, int, int, int]:
        """Share and memory for a slice, thousandths that both leave free, and the user of the rest (or `NOBODY`)."""
        if self._offered is None:
            gpu, share, memory, user = self.gpu, self.free_share, self.free_memory, self.user
            by_memory = 1000 * memory // max(1, gpu.memory_bytes)
            free = 0 if gpu.closed else max(0, min(share, by_memory))
            if gpu.sharing is Sharing.MIG and user is not None and user != ANYBODY:
                share = memory = 0  # a GPU in whole use is not cut into slices
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
    """Free amounts; negative where an owner withdrew capacity in use."""

    __slots__ = ("free_cpu", "free_disk", "free_memory", "gpus")

    def __init__(self, node: Node | None) -> None:
        self.free_cpu = node.offer.cpu_milli if node else 0
        self.free_memory = node.offer.memory_bytes if node else 0
        self.free_disk = node.offer.disk_bytes if node else 0  # less the disk that tasks asked for
        self.gpus: dict[int, GpuRoom] = (
            {gpu.index: GpuRoom(gpu) for gpu in node.offer.gpus} if node else {}
        )

    def copy(self) -> Room:
        twin = Room(None)
        twin.free_cpu, twin.free_memory = self.free_cpu, self.free_memory
        twin.free_disk = self.free_disk
        twin.gpus = self.gpus.copy()  # entries are replaced, never changed
        return twin

    def take(self, allocation: Allocation, user: UserId) -> None:
        self.free_cpu -= allocation.cpu_milli
        self.free_memory -= allocation.memory_bytes
        self.free_disk -= allocation.disk_bytes
        for part in allocation.slices:
            gpu = self.gpus.get(part.gpu_index)
            if gpu is not None:  # the device may be gone
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
        gpus = tuple(
            (index, g.free_memory, g.free_share, g.holders, g.user, g.cut)
            for index, g in sorted(self.gpus.items())
        )
        return self.free_cpu, self.free_memory, self.free_disk, gpus

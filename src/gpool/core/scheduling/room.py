"""What is free on one node: CPU, memory, and each GPU's memory and share. It counts; it decides nothing."""

from __future__ import annotations

from gpool.core.ids import UserId
from gpool.core.model import Allocation, Gpu, Node


class GpuRoom:
    """What is free of one GPU, and whose tasks hold the rest."""

    __slots__ = ("free_memory", "free_share", "gpu", "holders", "user")

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.free_memory = gpu.memory_bytes
        self.free_share = 1000
        self.holders = 0
        self.user: UserId | None = None  # a GPU's slices are shared among one user's tasks only

    def copy(self) -> GpuRoom:
        twin = GpuRoom(self.gpu)
        twin.free_memory, twin.free_share = self.free_memory, self.free_share
        twin.holders, twin.user = self.holders, self.user
        return twin


class Room:
    """Free amounts; negative where an owner took back what was already lent."""

    __slots__ = ("free_cpu", "free_memory", "gpus")

    def __init__(self, node: Node | None) -> None:
        self.free_cpu = node.offer.cpu_milli if node else 0
        self.free_memory = node.offer.memory_bytes if node else 0
        self.gpus: dict[int, GpuRoom] = (
            {gpu.index: GpuRoom(gpu) for gpu in node.offer.gpus} if node else {}
        )

    def copy(self) -> Room:
        twin = Room(None)
        twin.free_cpu, twin.free_memory = self.free_cpu, self.free_memory
        twin.gpus = {index: gpu.copy() for index, gpu in self.gpus.items()}
        return twin

    def take(self, allocation: Allocation, user: UserId) -> None:
        self.free_cpu -= allocation.cpu_milli
        self.free_memory -= allocation.memory_bytes
        for part in allocation.slices:
            gpu = self.gpus.get(part.gpu_index)
            if gpu is not None:  # the node may have lost the device meanwhile
                gpu.free_memory -= part.memory_bytes
                gpu.free_share -= part.share_milli
                gpu.holders += 1
                gpu.user = user

    def give(self, allocation: Allocation) -> None:
        self.free_cpu += allocation.cpu_milli
        self.free_memory += allocation.memory_bytes
        for part in allocation.slices:
            gpu = self.gpus.get(part.gpu_index)
            if gpu is not None:
                gpu.free_memory += part.memory_bytes
                gpu.free_share += part.share_milli
                gpu.holders -= 1
                if gpu.holders == 0:
                    gpu.user = None

    def truth(self) -> tuple[object, ...]:
        """The amounts as a plain value, to compare."""
        gpus = tuple(
            (index, g.free_memory, g.free_share, g.holders, g.user)
            for index, g in sorted(self.gpus.items())
        )
        return self.free_cpu, self.free_memory, gpus

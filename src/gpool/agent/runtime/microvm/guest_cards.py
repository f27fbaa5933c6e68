"""The GPUs of guests: a lease of dedicated cards, each reset before it, and the disk with their driver."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpool.agent.runtime.devices import drm_variables
from gpool.agent.runtime.microvm.image.disks import DiskStore
from gpool.agent.runtime.microvm.image.drivers import GuestDrivers
from gpool.agent.runtime.microvm.passthrough import DedicatedCards
from gpool.agent.runtime.protocol import PartFailed, SandboxFailed
from gpool.core.model import Gpu, Slice

FindDrivers = Callable[[str, Path], GuestDrivers]
"""Vendor and a folder for unpacked modules -> kernel and drivers of a guest. Raises `PartFailed`."""
DRIVERS_AT = "/opt/gpool/drivers"  # as in guest_gpu.py


@dataclass(frozen=True, slots=True)
class CardLease:
    """Cards of one guest; `close` when its monitor has ended."""

    addresses: tuple[str, ...]
    vendor: str
    nodes: tuple[str, ...]  # device nodes of their IOMMU groups, open to the monitor's uid
    opened: contextlib.ExitStack

    def close(self) -> None:
        self.opened.close()

    @property
    def variables(self) -> tuple[tuple[str, str], ...]:
        numbers = range(len(self.addresses))
        if self.vendor != "nvidia":
            return drm_variables(self.vendor, numbers)
        listed = ",".join(str(number) for number in numbers)
        return (("CUDA_VISIBLE_DEVICES", listed), ("LD_LIBRARY_PATH", f"{DRIVERS_AT}/lib"))


@dataclass(frozen=True, slots=True)
class DriverDisk:
    drivers: GuestDrivers
    path: Path


class GuestCards:
    def __init__(
        self, cards: DedicatedCards, disks: DiskStore, unpacked: Path, find: FindDrivers
    ) -> None:
        self._cards = cards
        self._disks = disks
        self._unpacked = unpacked
        self._find = find
        self._gpus: dict[int, Gpu] = {}
        self._found: dict[str, DriverDisk] = {}
        self.has_any = bool(cards.gpus(0))

    def use(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = {gpu.index: gpu for gpu in gpus if gpu.guest}

    async def take(self, slices: Sequence[Slice], uid: int) -> CardLease | None:
        """Reset the cards and open them to the monitor's uid; None without GPUs. Raises `PartFailed`."""
        chosen = [self._gpus.get(part.gpu_index) for part in slices]
        gpus = [gpu for gpu in chosen if gpu is not None]
        if not chosen or not self.has_any:
            return None
        if len(gpus) < len(chosen) or len({gpu.vendor for gpu in gpus}) > 1:
            raise SandboxFailed("a guest gets dedicated GPUs of one vendor, and no others")
        addresses = tuple(gpu.details.bus for gpu in gpus if gpu.details is not None)
        for address in addresses:
            why = self._cards.unclean.get(address) or await asyncio.to_thread(
                self._cards.reset, address
            )
            if why:
                raise PartFailed(f"GPU {address} is set aside: {why}")
        opened = contextlib.ExitStack()
        try:
            nodes = opened.enter_context(self._cards.opened(addresses, uid))
        except OSError as refused:
            raise PartFailed(f"the GPU's IOMMU group cannot be opened: {refused}") from refused
        return CardLease(addresses, gpus[0].vendor, nodes, opened)

    def disk(self, vendor: str) -> DriverDisk:
        """Built once a vendor, which takes seconds: call it in a thread. Raises `PartFailed`."""
        known = self._found.get(vendor)
        if known is None or not known.path.exists():
            found = self._find(vendor, self._unpacked)
            made = DriverDisk(found, self._disks.path("drivers", found.disk))
            known = self._found[vendor] = made
        return known

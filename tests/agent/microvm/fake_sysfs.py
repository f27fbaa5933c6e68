"""A sysfs of PCI devices in a folder, with a kernel that reacts to writes as Linux's does."""

from __future__ import annotations

import errno
import os
from pathlib import Path


class FakeKernel:
    def __init__(self, root: Path, drivers: tuple[str, ...] = ("nvidia", "snd_hda_intel")) -> None:
        self.root = root
        self.native: dict[str, str] = {}
        self.broken: set[str] = set()  # devices that do not reset
        self.resets: list[str] = []
        (root / "bus/pci/devices").mkdir(parents=True)
        (root / "bus/pci/drivers_probe").touch()
        for name in (*drivers, "vfio-pci"):
            (root / "bus/pci/drivers" / name).mkdir(parents=True)

    def add(
        self,
        address: str,
        *,
        kind: str = "0x030200",
        vendor: str = "0x10de",
        driver: str = "nvidia",
        group: str = "7",
        **files: str | None,
    ) -> None:
        """`files`: attributes beyond the usual ones; None leaves one out."""
        device = self.root / "devices/pci0000:40" / address
        device.mkdir(parents=True)
        (self.root / "bus/pci/devices" / address).symlink_to(device)
        known: dict[str, str | None] = {"class": kind, "vendor": vendor, "boot_vga": "0"}
        known |= {"reset": "", "driver_override": "(null)", **files}
        for name, text in known.items():
            if text is not None:
                (device / name).write_text(text + "\n")
        if group:
            members = self.root / "kernel/iommu_groups" / group / "devices"
            members.mkdir(parents=True, exist_ok=True)
            (members / address).symlink_to(device)
            (device / "iommu_group").symlink_to(members.parent)
        self.native[address] = driver
        if driver:
            (device / "driver").symlink_to(self.root / "bus/pci/drivers" / driver)

    def driver(self, address: str) -> str:
        link = self.root / "bus/pci/devices" / address / "driver"
        return os.path.basename(os.readlink(link)) if link.is_symlink() else ""

    def write(self, path: Path, text: str) -> None:
        word = text.strip()
        if path.name == "driver_override":
            path.write_text((word or "(null)") + "\n")
        elif path.name == "unbind":
            link = path.parent
            if not link.is_symlink() or link.parent.name != word:
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
            link.unlink()
        elif path.name == "drivers_probe":
            device = self.root / "bus/pci/devices" / word
            override = (device / "driver_override").read_text().strip()
            chosen = self.native[word] if override == "(null)" else override
            if chosen and not (device / "driver").is_symlink():
                (device.resolve() / "driver").symlink_to(self.root / "bus/pci/drivers" / chosen)
        elif path.name == "reset":
            address = path.parent.name
            if address in self.broken:
                raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))
            self.resets.append(address)
        else:
            raise OSError(errno.EACCES, f"no such attribute: {path}")

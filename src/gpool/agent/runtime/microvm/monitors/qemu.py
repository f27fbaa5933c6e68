"""QEMU's `microvm` machine: few devices, minimal firmware, PCI only for devices of the host."""

from __future__ import annotations

import shutil
import socket
from functools import cached_property
from pathlib import Path

from gpool.agent.runtime.microvm.guest import PORT_NAME
from gpool.agent.runtime.microvm.image.build import clock_word
from gpool.agent.runtime.microvm.monitors.protocol import (
    COMMON_WORDS,
    MIB,
    GuestMachine,
    MonitorCommand,
    MonitorLine,
)

PROGRAM = "qemu-system-x86_64"
TRANSLATED_MIB = 128  # TCG's cache of translated code
TCG, KVM = "tcg", "kvm"
GUEST_NETWORK = {
    "address": "10.0.2.15",
    "mask": "255.255.255.0",
    "gateway": "10.0.2.2",
    "resolver": "10.0.2.3",
}
"""As QEMU's user network numbers it. The resolver is that of QEMU's /etc/resolv.conf; the gateway's address leads to the
loopback of QEMU's network namespace, where only that resolver listens."""
SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


def find_qemu() -> str:
    return shutil.which(PROGRAM, path="/usr/bin:/usr/local/bin:/bin") or ""


class SocketPairLine:
    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self.descriptor = theirs.detach()

    async def connect(self, machine: GuestMachine, within_s: float) -> socket.socket:
        del machine, within_s
        return self._ours

    def close(self) -> None:
        self._ours.close()


class Qemu:
    name = "qemu"
    has_network = True
    control = "port"
    unpacked_kernel = False
    passes_devices = True

    def __init__(self, program: str, accelerator: str) -> None:
        self._program = program
        self.accelerator = accelerator
        self.overhead_bytes = (160 + (TRANSLATED_MIB if accelerator == TCG else 0)) * MIB

    @property
    def description(self) -> str:
        return f"qemu ({self.accelerator})"

    @cached_property
    def kernel_words(self) -> tuple[str, ...]:
        if self.accelerator != TCG:
            return ()
        word = clock_word()
        # mitigations: an emulated processor does not speculate
        return (*([word] if word else []), "mitigations=off")

    def command(self, machine: GuestMachine, line: int) -> MonitorCommand:
        return MonitorCommand(
            tuple(command_line(self._program, self.accelerator, machine, line)),
            (*(["/dev/kvm"] if self.accelerator == KVM else []), *machine.card_nodes),
            folders=tuple(pci_folders()) if machine.cards else (),
            pins_memory=bool(machine.cards),
        )

    def open_line(self, directory: Path, uid: int) -> MonitorLine:
        del directory, uid
        return SocketPairLine()


def pci_folders(root: Path = Path("/sys")) -> list[str]:
    """Read by QEMU to find a device's IOMMU group and configuration."""
    found = [root / "bus/pci", root / "kernel/iommu_groups", *sorted(root.glob("devices/pci*"))]
    return [str(folder) for folder in found if folder.is_dir()]


def command_line(program: str, accelerator: str, machine: GuestMachine, line: int) -> list[str]:
    translated = accelerator == TCG
    accel = f"tcg,thread=multi,tb-size={TRANSLATED_MIB}" if translated else "kvm"
    # max: every feature of TCG, and the fastest to emulate; host: the machine's own processor
    words = [program, "-nodefaults", "-no-user-config", "-nographic", "-no-reboot"]
    words += ["-sandbox", SANDBOX]
    # pcie: its 64-bit window is a quarter of the processor's address space, enough for the largest cards
    kind = "microvm,pit=on,pic=on,rtc=on,isa-serial=on,x-option-roms=off,acpi=on"
    words += ["-M", f"{kind},pcie=on" if machine.cards else kind]
    words += ["-accel", accel, "-cpu", "max" if translated else "host"]
    words += ["-m", f"{machine.memory_mib}M", "-smp", str(machine.cpus)]
    words += ["-kernel", machine.kernel, "-initrd", machine.archive]
    words += ["-append", " ".join((*COMMON_WORDS, *machine.words))]
    words += ["-chardev", "stdio,id=console,signal=off,mux=off", "-serial", "chardev:console"]
    words += ["-object", "rng-random,id=entropy,filename=/dev/urandom"]
    words += ["-device", "virtio-rng-device,rng=entropy"]
    for disk in machine.disks:
        read_only = "on" if disk.read_only else "off"
        words += [
            "-drive",
            f"id={disk.name},file={disk.path},format=raw,if=none,readonly={read_only},cache=unsafe",
            "-device",
            f"virtio-blk-device,drive={disk.name}",
        ]
    if machine.network is not None:
        # QEMU's own stack: its sockets are in the network namespace that QEMU runs in, and no host interface is made.
        words += ["-netdev", "user,id=net,ipv6=off,restrict=off,net=10.0.2.0/24,dns=10.0.2.3"]
        words += ["-device", "virtio-net-device,netdev=net"]
    for at, address in enumerate(machine.cards):
        words += ["-device", f"vfio-pci,host={address},id=card{at},bus=pcie.0,rombar=0"]
    words += ["-chardev", f"socket,id=line,fd={line}"]
    words += ["-device", "virtio-serial-device,max_ports=2"]
    words += ["-device", f"virtserialport,chardev=line,name={PORT_NAME}"]
    return words

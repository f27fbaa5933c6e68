"""Which monitor boots a guest on this host: asked by booting one, and remembered with the versions it was asked for.

`/dev/kvm` may be there and boot nothing, or be there and be closed to the uid that monitors run under. So the probe
is a kernel whose first process says one line and restarts, in the very confinement that guests get.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from gpool.agent.runtime.microvm.image.boot import BootStep, archive, program
from gpool.agent.runtime.microvm.image.build import clock_word
from gpool.agent.runtime.microvm.image.kernel import Kernel
from gpool.agent.runtime.microvm.monitors.firecracker import Firecracker, find_firecracker
from gpool.agent.runtime.microvm.monitors.protocol import MachineMonitor
from gpool.agent.runtime.microvm.monitors.qemu import KVM, PROGRAM, TCG, Qemu, find_qemu
from gpool.agent.runtime.protocol import SandboxFailed

SYS_WRITE, SYS_REBOOT = 1, 169
REBOOT_WORDS = (0xFEE1DEAD, 672274793, 0x01234567)
SAID = "gpool: this boots"
PROBE_WITHIN_S = 10.0
KVM_AT = "/dev/kvm"

Boots = Callable[[MachineMonitor], Awaitable[bool]]
"""Whether a monitor boots the probe."""


@dataclass(frozen=True, slots=True)
class MonitorChoice:
    vmm: MachineMonitor
    words: tuple[str, ...] = ()  # for the kernel, beside those every guest gets


def probe_archive() -> bytes:
    steps = [
        BootStep(SYS_WRITE, (1, SAID + "\n", len(SAID) + 1)),
        BootStep(SYS_REBOOT, REBOOT_WORDS),
    ]
    return archive(program(steps), {})


def qemu_version(program: str) -> str:
    said = subprocess.run(
        [program, "--version"], capture_output=True, text=True, env={}, check=False
    )
    return said.stdout.partition("\n")[0].strip()


def of(vmm: MachineMonitor) -> MonitorChoice:
    """With the words this monitor's guests need."""
    if isinstance(vmm, Qemu) and vmm.accelerator == TCG:
        word = clock_word()
        return MonitorChoice(
            vmm, (*([word] if word else []), "mitigations=off")
        )  # what is translated runs as written
    return MonitorChoice(vmm)


async def choose(folder: Path, kernel: Kernel, boots: Boots) -> MonitorChoice:
    """QEMU, by KVM where that boots; else Firecracker where only that is installed. `SandboxFailed` when there is none."""
    found = find_qemu()
    if not found:
        other = find_firecracker()
        if other:
            return of(Firecracker(other))
        raise SandboxFailed(f"there is no {PROGRAM} here: apt-get install qemu-system-x86")
    if not os.path.exists(KVM_AT):  # noqa: ASYNC240 - a device node
        return of(Qemu(found, TCG))
    asked = " · ".join((platform.release(), kernel.version, qemu_version(found)))
    note = folder / "probe.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        said = json.loads(note.read_text())
        if said["asked"] == asked and said["accelerator"] in (KVM, TCG):
            return of(Qemu(found, said["accelerator"]))
    accelerator = KVM if await boots(Qemu(found, KVM)) else TCG
    note.write_text(json.dumps({"asked": asked, "accelerator": accelerator}))
    return of(Qemu(found, accelerator))

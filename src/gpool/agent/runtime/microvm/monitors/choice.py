"""The choice of a monitor: found by booting a probe, and remembered with the tested versions.

`/dev/kvm` may exist and boot nothing, or be closed to the uid of monitors. The probe's first process prints one line and
restarts, confined like every guest.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

from gpool.agent.runtime.microvm.image.boot import BootStep, archive, program
from gpool.agent.runtime.microvm.image.kernel import Kernel
from gpool.agent.runtime.microvm.monitors.firecracker.monitor import Firecracker, find_firecracker
from gpool.agent.runtime.microvm.monitors.protocol import MachineMonitor
from gpool.agent.runtime.microvm.monitors.qemu import KVM, PROGRAM, TCG, Qemu, find_qemu
from gpool.agent.runtime.protocol import SandboxFailed

SYS_WRITE, SYS_REBOOT = 1, 169
REBOOT_WORDS = (0xFEE1DEAD, 672274793, 0x01234567)
PROBE_LINE = "gpool: this boots"
PROBE_WITHIN_S = 10.0
KVM_AT = "/dev/kvm"

Boots = Callable[[MachineMonitor], Awaitable[bool]]
"""Whether a monitor boots the probe."""


def probe_archive() -> bytes:
    line = PROBE_LINE + "\n"
    steps = [BootStep(SYS_WRITE, (1, line, len(line))), BootStep(SYS_REBOOT, REBOOT_WORDS)]
    return archive(program(steps), {})


def qemu_version(program: str) -> str:
    ran = subprocess.run(
        [program, "--version"], capture_output=True, text=True, env={}, check=False
    )
    return ran.stdout.partition("\n")[0].strip()


async def choose(folder: Path, kernel: Kernel, boots: Boots) -> MachineMonitor:
    """QEMU, with KVM if that boots; Firecracker if only that is installed. `SandboxFailed` without either."""
    found = find_qemu()
    if not found:
        other = find_firecracker()
        if other:
            return Firecracker(other)
        raise SandboxFailed(f"there is no {PROGRAM} here: apt-get install qemu-system-x86")
    if not os.path.exists(KVM_AT):  # noqa: ASYNC240 - a device node
        return Qemu(found, TCG)
    tested = " · ".join((platform.release(), kernel.version, qemu_version(found)))
    note = folder / "probe.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(note.read_text())
        if known["asked"] == tested and known["accelerator"] in (KVM, TCG):
            return Qemu(found, known["accelerator"])
    accelerator = KVM if await boots(Qemu(found, KVM)) else TCG
    note.write_text(json.dumps({"asked": tested, "accelerator": accelerator}))
    return Qemu(found, accelerator)

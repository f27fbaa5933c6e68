"""Limits of sandboxes: control groups, version 1, 2 or hybrid, where the host permits them, and resource limits."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpool.agent.runtime.protocol import SandboxLimits

WANTED = ("memory", "pids", "cpu", "blkio", "io")  # the last two: names in version 1 and 2
CPU_PERIOD_US = 100_000
LEAST_CPU_US = 1_000
READ_BYTES = 4096  # past every file read here
LEAST_SHARES, LEAST_WEIGHT, MOST_WEIGHT = 2, 1, 10_000

UNCAPPED = {
    1: {"cpu.shares": "8192", "cpu.cfs_quota_us": "-1"},
    2: {"cpu.weight": "800", "cpu.max": f"max {CPU_PERIOD_US}"},
}

Enable = Callable[[Path, bool], set[str]]
"""Enables controllers for a group's children and returns the enabled ones; the flag: it is the agent's own group."""


@dataclass(frozen=True, slots=True)
class CgroupHierarchy:
    version: int  # 0: none
    parents: tuple[tuple[str, Path], ...]  # (controller, directory)

    @property
    def controllers(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.parents)


def find(mounts: str, membership: str, enable: Enable | None = None) -> CgroupHierarchy:
    ours = {}
    for line in membership.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            ours[name] = path
    first: list[tuple[str, Path]] = []
    second: CgroupHierarchy | None = None
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        root, place = left.split(" ")[3:5]
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup":
            for name in set(options.split(",")) & set(WANTED):
                for usable in _usable(Path(place), root, ours.get(name, "/")):
                    first.append((name, usable))
                    break
        elif kind == "cgroup2" and second is None:
            own = ours.get("", "/")
            for usable in _usable(Path(place), root, own):
                enabled = (enable or _enable)(usable, usable == _of(Path(place), root, own))
                if enabled:
                    second = CgroupHierarchy(2, tuple((name, usable) for name in sorted(enabled)))
                    break
    if first:
        return CgroupHierarchy(1, tuple(sorted(first)))
    return second or CgroupHierarchy(0, ())


def _of(place: Path, root: str, ours: str) -> Path:
    return place / os.path.relpath(ours, root) if ours.startswith(root) else place


def _usable(place: Path, root: str, ours: str) -> Iterator[Path]:
    """The agent's group, then its ancestors: a group with processes can have no limited children."""
    own = _of(place, root, ours)
    for candidate in (own, *own.parents):
        if (candidate / "cgroup.procs").exists() and os.access(candidate, os.W_OK):
            yield candidate
        if candidate == place:
            return


def _enable(parent: Path, is_own: bool) -> set[str]:
    """The agent moves into a leaf of its group if the kernel requires it."""
    available = set((parent / "cgroup.controllers").read_text().split()) & set(WANTED)
    switch = parent / "cgroup.subtree_control"
    words = " ".join(f"+{name}" for name in sorted(available))
    if available:
        try:
            switch.write_text(words)
        except OSError:
            if not is_own:
                return set()
            with contextlib.suppress(OSError):
                leaf = parent / "gpool-agent"
                leaf.mkdir(exist_ok=True)
                (leaf / "cgroup.procs").write_text(str(os.getpid()))
                switch.write_text(words)
    with contextlib.suppress(OSError):
        return set(switch.read_text().split()) & set(WANTED)
    return set()


class ControlGroup:
    """Used by successive sandboxes. `limit` writes changed values only."""

    def __init__(self, hierarchy: CgroupHierarchy, name: str, disk: str = "") -> None:
        self._version = hierarchy.version
        self._disk = disk  # "major:minor" of the work directories' disk; "": unknown
        self._paths = {controller: parent / name for controller, parent in hierarchy.parents}
        self._written: dict[Path, str] = {}
        self._limits: SandboxLimits | None = None  # those in force
        for path in set(self._paths.values()):
            path.mkdir(exist_ok=True)
        self.joins = tuple(sorted({str(path / "cgroup.procs") for path in self._paths.values()}))

    def limit(self, limits: SandboxLimits) -> None:
        """Set caps and a processor weight, so that each sandbox keeps its lease under pressure."""
        if limits == self._limits:
            return
        self._limits = None
        values = _first(limits, self._disk) if self._version == 1 else _second(limits, self._disk)
        for controller, path in self._paths.items():
            for name, value in values.get(controller, {}).items():
                self._write(path / name, value)
        self._limits = limits

    def uncap_cpu(self) -> None:
        """Before a kill: hundreds of processes must each run once more to die, which under a small cap takes a minute."""
        path = self._paths.get("cpu")
        self._limits = None
        if path is not None:
            for name, value in UNCAPPED[self._version].items():
                with contextlib.suppress(OSError):
                    self._write(path / name, value)

    def _write(self, path: Path, value: str) -> None:
        if self._written.get(path) == value:
            return
        # cpu quota and swap are kernel options; a virtual disk may not support throttling
        missing = (OSError,) if path.name.startswith(("io.", "blkio.")) else (FileNotFoundError,)
        with contextlib.suppress(*missing):
            path.write_text(value)
        self._written[path] = value

    def memory_kills(self) -> int:
        path = self._paths.get("memory")
        if path is None:
            return 0
        name = "memory.oom_control" if self._version == 1 else "memory.events"
        with contextlib.suppress(OSError):
            for line in _read(path / name).splitlines():
                word, _, count = line.partition(b" ")
                if word == b"oom_kill":
                    return int(count)
        return 0

    def memory_used(self) -> int:
        path = self._paths.get("memory")
        name = "memory.usage_in_bytes" if self._version == 1 else "memory.current"
        with contextlib.suppress(OSError):
            return int((path / name).read_text()) if path is not None else 0
        return 0

    def remove(self) -> None:
        _end(self._paths.values())


def _read(path: Path) -> bytes:
    """Three system calls: it is done twice for each sandbox."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(opened, READ_BYTES)
    finally:
        os.close(opened)


def is_in(pid: int, name: str) -> bool:
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return False  # the process has ended
    parts = {part for line in lines for part in line.split(":", 2)[2].split("/")}
    scopes = {part.removesuffix(".scope").partition("-")[2] for part in parts if ".scope" in part}
    return name in parts | scopes


def _first(limits: SandboxLimits, disk: str) -> dict[str, dict[str, str]]:
    throttle = {}
    if disk:
        rate = limits.io_bytes_per_s or 0  # 0: unlimited; version 1 does not count buffered writes
        throttle = {
            f"blkio.throttle.{way}_bps_device": f"{disk} {rate}" for way in ("read", "write")
        }
    return {
        "memory": {"memory.limit_in_bytes": str(limits.memory_bytes)},
        "pids": {"pids.max": str(limits.processes)},
        "cpu": {
            "cpu.shares": str(max(LEAST_SHARES, limits.cpu_milli * 1024 // 1000)),
            "cpu.cfs_period_us": str(CPU_PERIOD_US),
            "cpu.cfs_quota_us": str(_quota(limits)),
        },
        "blkio": throttle,
    }


def _second(limits: SandboxLimits, disk: str) -> dict[str, dict[str, str]]:
    rate = limits.io_bytes_per_s or "max"
    weight = min(MOST_WEIGHT, max(LEAST_WEIGHT, limits.cpu_milli // 10))
    return {
        "memory": {"memory.max": str(limits.memory_bytes), "memory.swap.max": "0"},
        "pids": {"pids.max": str(limits.processes)},
        "cpu": {"cpu.weight": str(weight), "cpu.max": f"{_quota(limits)} {CPU_PERIOD_US}"},
        "io": {"io.max": f"{disk} rbps={rate} wbps={rate}"} if disk else {},
    }


def _quota(limits: SandboxLimits) -> int:
    return max(LEAST_CPU_US, limits.cpu_milli * CPU_PERIOD_US // 1000)


# ---- resource limits


def rlimits(limits: SandboxLimits) -> list[tuple[int, int]]:
    """Return (kind, limit) for the processes of every sandbox; none is higher than this agent may set.

    Locked memory is bounded by the memory of the sandbox. Core files are off; the stack is that of the host.
    """
    wanted = (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_MEMLOCK, limits.memory_bytes),
    )
    return [(kind, attainable(kind, limit)) for kind, limit in wanted]


def attainable(kind: int, wanted: int) -> int:
    """Return `wanted`, or the hard limit where this agent may not raise it."""
    hard = resource.getrlimit(kind)[1]
    if hard == resource.RLIM_INFINITY or wanted <= hard or _may_raise(kind):
        return wanted
    return hard


@functools.cache
def _may_raise(kind: int) -> bool:
    """Try it: root lacks the right in many containers."""
    soft, hard = resource.getrlimit(kind)
    try:
        resource.setrlimit(kind, (soft, hard + 1))
        resource.setrlimit(kind, (soft, hard))
    except (OSError, ValueError):
        return False
    return True


def disk_of(directory: Path, sys: Path = Path("/sys/dev/block")) -> str:
    number = directory.stat().st_dev
    entry = sys / f"{os.major(number)}:{os.minor(number)}"
    if (entry / "partition").exists():
        return (entry.resolve().parent / "dev").read_text().strip()
    return entry.name if entry.exists() else ""


def sweep(hierarchy: CgroupHierarchy, prefix: str) -> None:
    for _, parent in hierarchy.parents:
        _end(parent.glob(f"{prefix}*"))


def _end(paths: Iterable[Path]) -> None:
    for path in set(paths):
        for _ in range(100):
            with contextlib.suppress(OSError):
                for word in (path / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(word), signal.SIGKILL)
            try:
                path.rmdir()
            except FileNotFoundError:
                break
            except OSError:
                os.sched_yield()  # dying processes occupy the group for a moment
            else:
                break

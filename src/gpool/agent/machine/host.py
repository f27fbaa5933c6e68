"""Facts of the host: processors, memory, disk, processes, engines and programs. Reads only."""

from __future__ import annotations

import contextlib
import os
import platform
import pwd
import shutil
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

CGROUP = Path("/sys/fs/cgroup")
PUBLIC = "8.8.8.8"  # any address outside this machine


@dataclass(frozen=True, slots=True)
class HostCapacity:
    hostname: str
    cpu_milli: int
    memory_bytes: int
    disk_bytes: int  # free on the file system of the data directory


def host_capacity(data_dir: Path, cgroup: Path = CGROUP) -> HostCapacity:
    place = data_dir
    while not place.exists():
        place = place.parent
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = _number(cgroup / name)
        if limit is not None:
            memory = min(memory, limit)
    cpu = 1000 * len(os.sched_getaffinity(0))
    quota = _cpu_quota_milli(cgroup)
    if quota is not None:
        cpu = min(cpu, quota)
    return HostCapacity(socket.gethostname(), cpu, memory, shutil.disk_usage(place).free)


def site_address(towards: str) -> str:
    """Likely address of this machine for others: the source address of packets to the server (a URL).

    If the server is here, that of the default route; else loopback. Sends nothing.
    """
    parts = urlsplit(towards)
    hosts = [parts.hostname, PUBLIC] if parts.hostname else [PUBLIC]
    for host in hosts:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((host, parts.port or 443))
            found = str(probe.getsockname()[0])
            if not IPv4Address(found).is_loopback:
                return found
    return "127.0.0.1"


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _cpu_quota_milli(cgroup: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        return max(1, int(quota) * 1000 // int(period))
    quota_us = _number(cgroup / "cpu" / "cpu.cfs_quota_us")
    period_us = _number(cgroup / "cpu" / "cpu.cfs_period_us")
    if quota_us is not None and period_us and quota_us > 0:
        return max(1, quota_us * 1000 // period_us)
    return None


PROC = Path("/proc")
YOUNG_S = 3.0
"""Age until which a process may still exec another program."""
DEEPEST = 64
KILL_BIT = 1 << 8  # SIGKILL in a signal mask of /proc


class ForeignPrograms:
    """A process is read again until it is `YOUNG_S` old."""

    def __init__(self, own: AgentProcesses, proc: Path = PROC) -> None:
        self._own = own
        self._proc = proc
        self._known: dict[int, tuple[str, float]] = {}  # pid: name ("" for ours), first seen at

    def names(self, now_s: float) -> frozenset[str]:
        try:
            pids = {int(name) for name in os.listdir(self._proc) if name.isdecimal()}
        except OSError:
            return frozenset()
        known: dict[int, tuple[str, float]] = {}
        for pid in pids:
            name, since = self._known.get(pid, ("", now_s))
            if now_s < since + YOUNG_S:
                name = "" if self._own.has(pid) else name_of(pid, self._proc)
            known[pid] = name, since
        self._known = known
        return frozenset(name for name, _ in known.values() if name)


def _no_groups() -> Iterable[str]:
    return ()


class AgentProcesses:
    """The agent's descendants and the processes in its containers' control groups.

    `groups` returns container ids, because a container's parent is its engine.
    """

    def __init__(
        self, own: int, proc: Path = PROC, groups: Callable[[], Iterable[str]] = _no_groups
    ) -> None:
        self._own = own
        self._proc = proc
        self._groups = groups

    def has(self, pid: int) -> bool:
        above = pid
        for _ in range(DEEPEST):
            if above == self._own:
                return True
            if above <= 1:
                break
            above = self._parent(above)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            words = tuple(self._groups())
            if words:
                text = (self._proc / str(pid) / "cgroup").read_text()
                return any(word in text for word in words)
        return False

    def _parent(self, pid: int) -> int:
        with contextlib.suppress(OSError, ValueError, IndexError, UnicodeDecodeError):
            stat = (self._proc / str(pid) / "stat").read_text()
            return int(stat.rpartition(")")[2].split()[1])
        return 0


def name_of(pid: int, proc: Path = PROC) -> str:
    with contextlib.suppress(OSError):
        program = os.path.basename(os.readlink(proc / str(pid) / "exe"))
        if program:
            return program.removesuffix(" (deleted)")
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (proc / str(pid) / "comm").read_text().strip()
    return ""


def is_dying(pid: int, proc: Path = PROC) -> bool:
    with contextlib.suppress(OSError, ValueError, UnicodeDecodeError):
        for line in (proc / str(pid) / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("SigPnd", "ShdPnd") and int(value, 16) & KILL_BIT:
                return True
    return False


def has_card_open(pid: int, proc: Path = PROC) -> bool:
    """Whether the driver means this process: in another process namespace the id may be another's.

    True if its descriptors cannot be listed.
    """
    folder = proc / str(pid) / "fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return (proc / str(pid)).exists()
    for name in names:
        with contextlib.suppress(OSError):
            if os.readlink(folder / name).startswith("/dev/nvidia"):
                return True
    return False


ASK_S = 2.0


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    socket: str = ""
    engine: str = ""
    version: str = ""
    refused: str = ""


def docker(sockets: tuple[str, ...] | None = None) -> ContainerEngine:
    found = ContainerEngine()
    for path in sockets if sockets is not None else _sockets():
        if not Path(path).exists():
            continue
        engine = _probe(path)
        if engine.version:
            return engine
        if not found.socket:
            found = engine
    return found


def _sockets() -> tuple[str, ...]:
    named = os.environ.get("DOCKER_HOST", "")
    first = (named.removeprefix("unix://"),) if named.startswith("unix://") else ()
    own = f"/run/user/{os.geteuid()}"
    return (
        *first,
        "/var/run/docker.sock",
        f"{own}/docker.sock",
        f"{own}/podman/podman.sock",
        "/run/podman/podman.sock",
    )


def _probe(path: str) -> ContainerEngine:
    try:
        with socket.socket(socket.AF_UNIX) as test:  # httpx2 leaves a refused socket open
            test.settimeout(ASK_S)
            test.connect(path)
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=path), timeout=ASK_S) as client:
            version = client.get("http://localhost/version").json()
        parts = version.get("Components") or [{}]
        return ContainerEngine(path, str(parts[0].get("Name", "Docker")), str(version["Version"]))
    except (OSError, httpx2.HTTPError, ValueError, LookupError, AttributeError) as error:
        return ContainerEngine(path, refused=f"{type(error).__name__}: {error}")


def find_qemu() -> str:
    return shutil.which(f"qemu-system-{platform.machine()}") or ""


def user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())

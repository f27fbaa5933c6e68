"""Processors, memory and disk that affinity and control groups leave the agent."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from urllib.parse import urlsplit

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

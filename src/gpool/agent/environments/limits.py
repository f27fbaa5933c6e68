"""Limits of builds: those of the leases that wait for them, and a share of the lent disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from gpool.agent.runtime.protocol import SandboxFailed, SandboxLimits

LEAST_BUILD_BYTES = 64 * 1024 * 1024


def covers(lease: SandboxLimits, build: SandboxLimits) -> bool:
    """Return whether a build with these limits uses no more than this lease."""
    return (
        lease.cpu_milli >= build.cpu_milli
        and lease.memory_bytes >= build.memory_bytes
        and lease.disk_bytes >= build.disk_bytes
    )


class BuildDisk:
    """`free_bytes` returns the bytes that are lent and free; all builds together stay within them."""

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self._free = free_bytes
        self._reserved = 0  # bytes that running builds may write

    @contextmanager
    def reserved(self, limits: SandboxLimits) -> Iterator[SandboxLimits]:
        """Yield the limits with the disk that is left; `SandboxFailed` if that is too little."""
        left = self._free() - self._reserved
        if left < LEAST_BUILD_BYTES:
            raise SandboxFailed(f"{max(0, left)} bytes of disk are left for a build on this node")
        limits = replace(limits, disk_bytes=min(limits.disk_bytes, left))
        self._reserved += limits.disk_bytes
        try:
            yield limits
        finally:
            self._reserved -= limits.disk_bytes

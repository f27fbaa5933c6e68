"""The protocol of machine monitors. Knows nothing of tasks."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MIB = 1 << 20
COMMON_WORDS = (
    "console=ttyS0",
    "quiet",
    "loglevel=1",
    "panic=-1",  # a guest whose first process died restarts at once, which ends the monitor
    "reboot=t",
    "random.trust_cpu=on",
    "rcupdate.rcu_expedited=1",
    "i8042.noaux",
    "i8042.nokbd",
    "ipv6.disable=1",
    "cgroup_no_v1=all",
    "rdinit=/init",
)


@dataclass(frozen=True, slots=True)
class GuestDisk:
    """`path` as the monitor sees it."""

    name: str
    path: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class GuestMachine:
    """The disks become vda, vdb, … in this order."""

    kernel: str
    archive: str  # the first file system
    words: tuple[str, ...]  # of the kernel's command line
    disks: tuple[GuestDisk, ...]
    memory_mib: int
    cpus: int


@dataclass(frozen=True, slots=True)
class MonitorCommand:
    argv: tuple[str, ...]
    devices: tuple[str, ...] = ()  # host devices it uses
    folder: bool = False  # it needs a directory shared with the agent, at FOLDER_AT


FOLDER_AT = "/vmm"
"""Mount point of the directory that a monitor shares with the agent."""


class MonitorLine(Protocol):
    descriptor: int
    """Inherited by the monitor; the launch closes it."""

    async def connect(self, machine: GuestMachine, within_s: float) -> socket.socket:
        """Agent's end once the monitor runs; `SandboxFailed` after `within_s`. Call once."""
        ...

    def close(self) -> None:
        """Close everything of an unconnected line except `descriptor`. Idempotent."""
        ...


class MachineMonitor(Protocol):
    name: str
    control: str  # "port" or "vsock": the guest's end of the line
    overhead_bytes: int  # memory of the monitor itself, beside the guest's
    unpacked_kernel: bool  # it boots an uncompressed kernel only

    @property
    def description(self) -> str: ...

    @property
    def kernel_words(self) -> tuple[str, ...]: ...

    def command(self, machine: GuestMachine, line: int) -> MonitorCommand:
        """`line` is the number of the inherited descriptor. Pure."""
        ...

    def open_line(self, directory: Path, uid: int) -> MonitorLine: ...


def guest_memory_mib(memory_bytes: int) -> int:
    return (memory_bytes + memory_bytes // 32) // MIB + 96

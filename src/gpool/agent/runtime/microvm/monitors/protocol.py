"""The door to machine monitors: what a guest is made of, and how one is started. Knows nothing of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """One guest. The disks become vda, vdb, … in this order."""

    kernel: str
    archive: str  # the first file system
    words: tuple[str, ...]  # the kernel's command line
    disks: tuple[GuestDisk, ...]
    memory_mib: int
    cpus: int


@dataclass(frozen=True, slots=True)
class MonitorCommand:
    """How a monitor is started: its command line, and what of the host it sees."""

    argv: tuple[str, ...]
    devices: tuple[str, ...] = ()  # of the host's, to be used
    folder: bool = False  # it needs a directory of its own that the agent reaches too, at FOLDER_AT


FOLDER_AT = "/vmm"
"""Where a monitor that asked for a directory of its own finds it."""


class MachineMonitor(Protocol):
    """A monitor. `start` is pure; `connect` gives the line to the guest once the monitor runs."""

    name: str
    control: str  # "port" or "vsock": which line the guest takes
    overhead_bytes: int  # what it takes itself, beside the guest's memory
    unpacked_kernel: bool  # it starts the program inside a compressed kernel only

    def start(self, machine: GuestMachine, line: int) -> MonitorCommand:
        """`line` is the descriptor the monitor inherits; a monitor with a vsock has no use for it."""
        ...

    def requests(self, machine: GuestMachine) -> Sequence[tuple[str, str, dict[str, object]]]:
        """(method, path, document) to be made in this order once it runs; none for one that takes a command line."""
        ...


def guest_memory_mib(memory_bytes: int) -> int:
    """What a guest needs for a task to have this much: its kernel's own share is on top."""
    return (memory_bytes + memory_bytes // 32) // MIB + 96

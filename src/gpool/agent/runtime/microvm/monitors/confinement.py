"""What of the host a machine monitor sees: its programs and libraries, its guest's disks, nothing else. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpool.agent.runtime.bubblewrap import layout
from gpool.agent.runtime.microvm.monitors.protocol import FOLDER_AT, MonitorCommand

INSIDE_UID = 1000


def monitor_arguments(
    confined: MonitorCommand, read_only: Sequence[str], place: str, *, disk: bool = True
) -> list[str]:
    """bwrap's arguments; `read_only` are seen where they lie, the work disk as `/work.img`."""
    words = ["--unshare-all", "--unshare-user", "--new-session", "--die-with-parent"]
    words += ["--cap-drop", "ALL", "--hostname", "monitor", "--clearenv"]
    words += ["--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID)]
    words += layout.as_arguments(layout.system_tree(()))
    words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for path in read_only:
        words += ["--ro-bind", path, path]
    if disk:
        words += ["--bind", f"{place}/work.img", "/work.img"]
    if confined.folder:
        words += ["--bind", f"{place}/vmm", FOLDER_AT]
    for device in confined.devices:
        words += ["--dev-bind", device, device]
    return [*words, "--remount-ro", "/", "--chdir", "/"]

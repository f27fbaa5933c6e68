"""Run inside a container: each probe says whether it got through. They prove reach and change nothing."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import stat
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)
NEW_USER, NEW_NAMESPACE, NEW_NET = 0x10000000, 0x00020000, 0x40000000
KEYCTL, KEYCTL_DESCRIBE, IO_URING_SETUP, BPF, PERF, USERFAULTFD = 250, 6, 425, 321, 298, 323
EPERM, ENOSYS, EACCES = 1, 38, 13


def opens(path: str, flags: int = os.O_WRONLY) -> bool:
    try:
        os.close(os.open(path, flags))
    except OSError:
        return False
    return True


def passes(number: int, *arguments: int) -> bool:
    """Whether a call gets past the permission check, with arguments that are wrong."""
    if libc.syscall(number, *arguments) >= 0:
        return True
    return ctypes.get_errno() not in (EPERM, ENOSYS, EACCES)


def in_child(act: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if act() else 1)
    return os.waitpid(pid, 0)[1] == 0


def capabilities(secret: str) -> bool:
    with open("/proc/self/status") as status:
        lines = status.read().splitlines()
    words = dict(line.split(":\t") for line in lines if line.startswith("Cap"))
    return any(int(words[name], 16) for name in ("CapEff", "CapPrm", "CapBnd") if name in words)


def makes_devices(secret: str) -> bool:
    path = "/dev/shm/probe-node"
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    except OSError:
        return False
    os.unlink(path)
    return True


def meets_host_disks(secret: str) -> bool:
    found = [f"/dev/{name}" for name in os.listdir("/dev")]
    return any(stat.S_ISBLK(os.lstat(path).st_mode) for path in found)


def finds_the_planted_file(secret: str) -> bool:
    for folder, folders, names in os.walk("/"):
        if folder == "/":
            folders[:] = [name for name in folders if name not in ("proc", "sys")]
        if secret in names:
            return True
    return False


def reaches_an_engine(secret: str) -> bool:
    for folder, folders, names in os.walk("/"):
        if folder == "/":
            folders[:] = [name for name in folders if name not in ("proc", "sys")]
        for name in names:
            path = os.path.join(folder, name)
            try:
                if not stat.S_ISSOCK(os.lstat(path).st_mode):
                    continue
                with socket.socket(socket.AF_UNIX) as channel:
                    channel.connect(path)
                    return True
            except OSError:
                continue
    return False


def has_network(secret: str) -> bool:
    with open("/proc/net/dev") as devices:
        names = [line.partition(":")[0].strip() for line in devices if ":" in line]
    return bool(set(names) - {"lo"})


NEEDED = {"writes sysrq": "/proc/sysrq-trigger", "reads kernel memory": "/proc/kcore"}
"""What a kernel may be built without: no probe of what is nowhere."""

PROBES: dict[str, Callable[[str], bool]] = {
    "capabilities": capabilities,
    "makes devices": makes_devices,
    "meets host disks": meets_host_disks,
    "finds the planted file": finds_the_planted_file,
    "reaches an engine": reaches_an_engine,
    "writes core_pattern": lambda _: opens("/proc/sys/kernel/core_pattern"),
    "writes sysrq": lambda _: opens("/proc/sysrq-trigger"),
    "reads kernel memory": lambda _: (
        opens("/proc/kcore", os.O_RDONLY) and os.stat("/proc/kcore").st_size > 0
    ),
    "sees firmware": lambda _: bool(os.listdir("/sys/firmware")),
    "sees kernel tuning": lambda _: (
        os.path.isdir("/sys/kernel") and bool(os.listdir("/sys/kernel"))
    ),
    "writes the root": lambda _: os.access("/", os.W_OK),
    "writes /etc/hosts": lambda _: opens("/etc/hosts"),
    "is root": lambda _: os.geteuid() == 0,
    "sees the host's processes": lambda _: sum(n.isdecimal() for n in os.listdir("/proc")) > 8,
    "has a network": has_network,
    "makes a user namespace": lambda _: in_child(lambda: libc.unshare(NEW_USER) == 0),
    "makes a mount namespace": lambda _: in_child(lambda: libc.unshare(NEW_NAMESPACE) == 0),
    "opens packet sockets": lambda _: _opens_socket(17, socket.SOCK_RAW, 0),
    "opens raw sockets": lambda _: _opens_socket(socket.AF_INET, socket.SOCK_RAW, 1),
    "opens netlink": lambda _: _opens_socket(16, socket.SOCK_RAW, 9),
    "asks for keys": lambda _: passes(KEYCTL, KEYCTL_DESCRIBE, -3, 0, 0),
    "uses bpf": lambda _: passes(BPF, 9999, 0, 0),
    "uses userfaultfd": lambda _: passes(USERFAULTFD, 1),
}


def _opens_socket(family: int, kind: int, protocol: int) -> bool:
    try:
        socket.socket(family, kind, protocol).close()
    except OSError:
        return False
    return True


def report(names: list[str], secret: str) -> None:
    os.write(1, json.dumps({name: PROBES[name](secret) for name in names}).encode())

"""The first process of a sandbox that the launcher makes ahead: its namespaces and mounts, then one order, never two.

It is process 1 of its process namespace and root until the order comes; it gives up every privilege before the command
starts, and stays outside the command's Landlock domain. Standard library only. Reads no task data but the variables.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import resource
import select
import signal
import socket
import stat

from gpool.agent.runtime.bubblewrap import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:  # without importing `typing`: each sandbox is a fork of this memory
    from collections.abc import Sequence
    from typing import Any, NoReturn

NODES = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_LINKS = (
    ("/proc/self/fd", "fd"),
    ("/proc/self/fd/0", "stdin"),
    ("/proc/self/fd/1", "stdout"),
    ("/proc/self/fd/2", "stderr"),
    ("/proc/kcore", "core"),
    ("pts/ptmx", "ptmx"),
)
NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)
FAILED = 125
PRIVATE = kernel.MS_NOSUID | kernel.MS_NODEV
INERT = kernel.MS_NOSUID | kernel.MS_NOEXEC
QUIET_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
)  # meant for the agent; the launcher ends after it
CHANGED_SIGNALS = (*QUIET_SIGNALS, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)


def join(groups: Sequence[str]) -> None:
    for path in groups:
        joining = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        os.write(joining, b"0")
        os.close(joining)


def arrange(descriptors: Sequence[int]) -> None:
    targets = len(descriptors)
    high = [*descriptors]
    while high and min(high) < targets:
        high = [os.dup(d) for d in high]  # past every target: no dup2 hits one still needed
    for target, descriptor in enumerate(high):
        os.dup2(descriptor, target)


def argument_area() -> tuple[int, int]:
    """Address and length of this process's command line, which forks inherit."""
    with open("/proc/self/stat", "rb") as facts:
        words = facts.read().rpartition(b")")[2].split()
    start, end = int(words[45]), int(words[46])  # fields 48 and 49 of the line
    return start, end - start


class FirstProcess:
    """`setup` is the same for all sandboxes of a launcher: "hostname", "inside_uid", "masked" (names in /proc), "stat" (text of
    /proc/stat), "overlays". `place`: the launcher's directory, with the root in `tree`.
    """

    def __init__(
        self, place: str, setup: dict[str, Any], seccomp: bytes, area: tuple[int, int]
    ) -> None:
        self._place = place
        self._setup = setup
        self._seccomp = seccomp
        self._area = area
        self._proc = -1  # the host's, which is writable

    def make(self, groups: Sequence[str], overlays: Sequence[tuple[str, str]]) -> None:
        """Join the groups, make namespaces and mounts. Runs as root in a new process namespace."""
        gc.disable()  # a collection would copy every page that is shared with the launcher
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        kernel.prctl("death signal", kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        join(groups)
        kernel.unshare(NAMESPACES)
        socket.sethostname(self._setup["hostname"])
        kernel.raise_loopback()
        self._proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        root = os.path.join(self._place, "tree")
        for source, target in overlays:
            kernel.overlay(source, target, self._place)
        os.umask(0)
        self._make_devices(root + "/dev")
        self._make_proc(root + "/proc", root + "/dev")
        os.umask(0o022)
        kernel.pivot_root(root)

    def _make_devices(self, at: str) -> None:
        kernel.mount("dev", at, b"tmpfs", INERT, b"mode=0755,size=64k")
        for name in NODES:
            number = os.stat(f"/dev/{name}").st_rdev
            os.mknod(f"{at}/{name}", stat.S_IFCHR | 0o666, number)
        for to, name in DEVICE_LINKS:
            os.symlink(to, f"{at}/{name}")
        for name in ("pts", "shm"):
            os.mkdir(f"{at}/{name}", 0o755)
        options = b"newinstance,ptmxmode=0666,mode=620"
        kernel.mount("devpts", f"{at}/pts", b"devpts", INERT, options)

    def _make_proc(self, at: str, devices: str) -> None:
        """Also seal /dev: the text of /proc/stat comes from a file there that no name leads to afterwards."""
        read_only = kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY
        kernel.mount("proc", at, b"proc", PRIVATE | kernel.MS_NOEXEC)
        text = f"{devices}/stat"
        with open(os.open(text, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444), "w") as file:
            file.write(self._setup["stat"])
        kernel.mount(text, f"{at}/stat", None, kernel.MS_BIND)
        kernel.mount("none", f"{at}/stat", None, read_only | PRIVATE | kernel.MS_NOEXEC)
        os.unlink(text)
        kernel.mount("none", devices, None, read_only | INERT)
        mask = f"{devices}/null"
        for name in self._setup["masked"]:
            kernel.mount(mask, f"{at}/{name}", None, kernel.MS_BIND)
            if mask == f"{devices}/null":  # later ones copy its flags; nodev: cannot be opened
                mask = f"{at}/{name}"
                kernel.mount("none", mask, None, read_only | PRIVATE | kernel.MS_NOEXEC)
        kernel.mount("none", at, None, read_only | PRIVATE | kernel.MS_NOEXEC)

    def run(self, order: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
        """`descriptors`: the command's, the report's pipe, then one detached mount for each of the order's "trees"."""
        count = len(descriptors) - 1 - len(order["trees"])
        given, report, trees = descriptors[:count], descriptors[count], descriptors[count + 1 :]
        try:
            if order["refused"]:
                raise OSError(order["refused"])
            for tree, (_, target) in zip(trees, order["trees"], strict=True):
                kernel.attach(tree, target)
                os.close(tree)
            self._mount_memory(order)
            os.chdir(order["cwd"])
            self._hide_command_line()
            for kind, limit in order["limits"]:
                if kind != resource.RLIMIT_DATA:  # root may raise them; Python here needs data
                    resource.setrlimit(kind, (limit, limit))
            if order["cpus"]:
                with contextlib.suppress(OSError):  # they are offline by now: any CPU will do
                    os.sched_setaffinity(0, order["cpus"])
            self._drop(order["uid"])
            kernel.prctl("death signal", kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            if orphaned(report):
                os._exit(FAILED)
            os.setsid()
            kernel.filter_system_calls(self._seccomp)
            command = os.fork()
        except BaseException as failure:  # noqa: BLE001 - a forked child must never return
            with contextlib.suppress(OSError):
                os.write(given[2], f"bwrap: gpool cannot start it: {failure}\n".encode())
            os._exit(FAILED)
        if command == 0:
            _execute(order, given)
        os.closerange(0, report)
        os.closerange(report + 1, 65536)
        _wait(command, report)

    def _mount_memory(self, order: dict[str, Any]) -> None:
        owner = f"uid={order['uid']},gid={order['uid']}"
        options = f"mode=1777,size={order['tmpfs_bytes']},{owner}".encode()
        for target in ("/tmp", "/dev/shm"):
            kernel.mount("tmpfs", target, b"tmpfs", PRIVATE, options)

    def _hide_command_line(self) -> None:
        """Overwrite the launcher's, which names paths of the host."""
        address, length = self._area
        ctypes.memset(address, 0, length)
        ctypes.memmove(address, b"init", min(length, 4))
        kernel.libc.prctl(kernel.PR_SET_NAME, b"init", 0, 0, 0)

    def _drop(self, uid: int) -> None:
        """Become the slot's uid in a user namespace that knows no other, without capabilities.

        The process is not dumpable except while it writes its own map: a task of the same uid cannot read its memory,
        a copy of the launcher's.
        """
        inside = self._setup["inside_uid"]
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        kernel.unshare(kernel.CLONE_NEWUSER)
        kernel.prctl("dumpable", kernel.PR_SET_DUMPABLE, 1)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{inside} {uid} 1"),
            ("gid_map", f"{inside} {uid} 1"),
        ):
            file = os.open(f"self/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._proc)
            os.write(file, text.encode())
            os.close(file)
        kernel.prctl("dumpable", kernel.PR_SET_DUMPABLE, 0)
        os.close(self._proc)
        kernel.drop_capabilities()
        kernel.prctl("no new privileges", kernel.PR_SET_NO_NEW_PRIVS, 1)


def orphaned(report: int) -> bool:
    """The launcher alone reads the report: without it the pipe has no reader."""
    poll = select.poll()
    poll.register(report, 0)
    return bool(poll.poll(0))


def _execute(order: dict[str, Any], given: Sequence[int]) -> NoReturn:
    name = order["argv"][0]
    try:
        arrange(given)
        os.closerange(len(given), 65536)
        variables = _variables(order["variables_at"])
        for kind, limit in order["limits"]:
            if kind == resource.RLIMIT_DATA:
                resource.setrlimit(kind, (limit, limit))
        for each in CHANGED_SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        if order["landlock"] is not None:
            kernel.enter_landlock_domain(*order["landlock"])
        code = kernel.execvpe([os.fsencode(word) for word in order["argv"]], variables)
        os.write(2, f"gpool: {name}: {os.strerror(code)}\n".encode())
        os._exit(127 if code in (errno.ENOENT, errno.ENOTDIR) else 126)
    except BaseException as failure:  # noqa: BLE001 - a forked child must never return
        with contextlib.suppress(OSError):
            os.write(2, f"gpool: {name}: {failure}\n".encode())
        os._exit(FAILED)


def _variables(descriptor: int) -> list[bytes]:
    with open(descriptor, "rb") as file:
        text = file.read()
    return text.split(b"\0") if text else []


def _wait(command: int, report: int) -> NoReturn:
    """Reap until the command ends; the kernel then kills what is left in the namespace."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == command:
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code
            os.write(report, b'{"exit-code": %d}\n' % code)
            os._exit(code)

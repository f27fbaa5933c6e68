"""The launcher: a small process beside the agent that starts sandboxes. A script, standard library only.

Small, so that forking is cheap; single-threaded, so that forking is safe. It reaps every sandbox: when the agent is
gone, the socket ends, and the launcher kills every descendant and exits. (A parent death signal alone would miss a
sandbox that has not requested one yet.) As root it moves into its own mount namespace, in which interpreter, packages
and work directories are reachable for a dropped uid; each child drops to its uid before `exec`. Reads no task data.

Messages on the socket (one JSON document each, descriptors beside it):
  in   {"start": n, "argv", "uid", "groups", "limits", "mode", "namespaces", "binds", "overlays"}  ·  {"kill": n}  ·
       {"warn": n}
  out  {"ready": true, "shared": [paths]}   ·   {"ended": n, "status": s, "ran": bool, "killed": bool}
One file because it is run by path, without imports of gpool.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
CLONE_NEWNS = 0x00020000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 1, 2, 4, 32, 4096
MS_REC, MS_SLAVE = 16384, 1 << 19
SEALED = MS_RDONLY | MS_NOSUID | MS_NODEV
MNT_DETACH = 2
EMPTY = "empty"  # the second layer of overlays
MOST_MOUNTED = 64  # every sandbox's mount namespace starts as a copy of the launcher's
MOST_SPARES = 64
SPARE_BYTES = 128 * 1024  # certainly passes through a socket in one message
MESSAGE_BYTES = 1 << 20
MAX_DESCRIPTORS = 16
QUIET_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
)  # meant for the agent; the launcher ends after it
CHANGED_SIGNALS = (*QUIET_SIGNALS, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: bytes | None, flags: int, data: bytes = b"") -> None:
    arguments = (source.encode(), target.encode(), kind, ctypes.c_ulong(flags), data)
    checked(libc.mount(*arguments), f"mount {target}")


def enter_own_namespace(
    place: str, binds: list[dict[str, Any]], tree: dict[str, Any]
) -> dict[str, bool]:
    """Return, per source of a read-only folder, whether a sandbox can have an overlay of it."""
    checked(libc.unshare(CLONE_NEWNS), "unshare")
    mount("none", "/", None, MS_REC | MS_SLAVE)
    # opened in the new namespace, and before the tmpfs, which could hide one of them
    sources = [(os.open(b["source"], os.O_PATH), b["name"], b["writable"]) for b in binds]
    mount("gpool", place, b"tmpfs", MS_NOSUID, b"mode=0755,size=1m")
    for descriptor, name, writable in sources:
        bind(descriptor, os.path.join(place, name), writable=writable)
        os.close(descriptor)
    os.makedirs(os.path.join(place, EMPTY), 0o755, exist_ok=True)
    folders = {os.path.join(place, b["name"]) for b in binds if not b["writable"]}
    folders.update(source for _, source in tree["binds"])
    can_overlay = {source: is_overlayable(source, place) for source in sorted(folders)}
    mount_root(place, tree, can_overlay)
    return can_overlay


def overlay(source: str, target: str, place: str) -> None:
    """Mount a read-only view of `source`: its inodes are the mount's own, so that neither locks nor watches of a sandbox
    reach the host's files, and the mount table names no path of the host.
    """
    layers = f"lowerdir={os.path.join(place, EMPTY)}:{source}"  # the kernel demands two
    mount("overlay", target, b"overlay", SEALED, layers.encode())


def is_overlayable(source: str, place: str) -> bool:
    """Try it: an overlay hides mounts below `source`, and some file systems cannot be a layer."""
    with open("/proc/self/mountinfo", "rb") as table:
        mounted = [line.split()[4] for line in table]
    if any(point.startswith(source.encode() + b"/") for point in mounted):
        return False
    probe = os.path.join(place, "probe")
    os.makedirs(probe, 0o755, exist_ok=True)
    try:
        overlay(source, probe, place)
    except OSError:
        return False
    checked(libc.umount2(probe.encode(), MNT_DETACH), f"umount {probe}")
    return True


def mount_root(place: str, tree: dict[str, Any], can_overlay: dict[str, bool]) -> None:
    """Seal as bwrap would: bwrap then binds one directory and remounts nothing. Overlays are mounted by each sandbox."""
    root = os.path.join(place, "tree")
    os.mkdir(root, 0o755)
    mount("tree", root, b"tmpfs", MS_NOSUID | MS_NODEV, b"mode=0755,size=1m")
    for folder in tree["folders"]:
        os.makedirs(root + folder, 0o755)
    for path, to in tree["links"]:
        os.symlink(to, root + path)
    for path, source in tree["binds"]:
        os.makedirs(root + path, 0o755, exist_ok=True)
        if can_overlay[source]:
            continue
        mount(source, root + path, None, MS_BIND | MS_REC)
        mount("none", root + path, None, MS_BIND | MS_REMOUNT | SEALED)
    mount("none", root, None, MS_REMOUNT | SEALED)


def bind(source: int, target: str, *, writable: bool) -> None:
    if os.path.isdir(f"/proc/self/fd/{source}"):
        os.makedirs(target, 0o755, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(f"/proc/self/fd/{source}", target, None, MS_BIND | MS_REC)
    if not writable:
        mount("none", target, None, MS_BIND | MS_REMOUNT | SEALED)


def children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as listing:
                found += [int(word) for word in listing.read().split()]
    return found


def descendants(root: int) -> list[int]:
    """Processes below `root`, nearest first. Races with forks: repeat until there are none."""
    found, wave = [], [root]
    while wave:
        below = [child for pid in wave for child in children(pid)]
        found += below
        wave = below
    return found


def reap_all_below(me: int) -> None:
    while True:
        for pid in descendants(me):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def exec_program(program: list[str], environment: dict[str, str]) -> NoReturn:
    try:
        os.execvpe(program[0], program, environment)
    except OSError as failure:
        missing = isinstance(failure, (FileNotFoundError, NotADirectoryError))
        os.write(2, f"gpool: {program[0]}: {failure.strerror}\n".encode())
        os._exit(127 if missing else 126)


def supervise(run: Callable[[], NoReturn]) -> NoReturn:
    """Run an unisolated command; its descendants die with it, with this process, or on SIGTERM."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wanted = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    launcher = os.getppid()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
        os.setsid()
        run()
    os.closerange(0, 1024)  # the command's pipes must end with the command
    status = 9
    while os.getppid() == launcher:
        if signal.sigwait(wanted) == signal.SIGTERM:
            break
        ended = False
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, state = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == child:
                    status, ended = state, True
        if ended:
            break
    reap_all_below(os.getpid())
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def join(groups: Sequence[str]) -> None:
    for path in groups:
        joining = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        os.write(joining, b"0")
        os.close(joining)


def arrange(descriptors: list[int]) -> None:
    targets = len(descriptors)
    high = [*descriptors]
    while high and min(high) < targets:
        high = [os.dup(d) for d in high]  # past every target: no dup2 hits one still needed
    for target, descriptor in enumerate(high):
        os.dup2(descriptor, target)


class LaunchedSandbox:
    """Live pids (0: gone), and the descriptor of bwrap's report (-1: not started by bwrap)."""

    def __init__(self, monitor: int, report: int, groups: tuple[str, ...]) -> None:
        self.monitor = monitor
        self.groups = groups
        self.inner = 0
        self.status = 0
        self.report = report
        self.ran = False  # the command started and ended, with any code
        self.killed = False


class LauncherProcess:
    def __init__(
        self, channel: socket.socket, settings: dict[str, Any], can_overlay: dict[str, bool]
    ) -> None:
        self.channel = channel
        self.can_overlay = can_overlay
        self.seccomp = bytes.fromhex(settings["seccomp"])
        self.children: dict[int, int] = {}  # pid of bwrap or the supervisor -> number
        self.inner: dict[int, int] = {}  # pid of a namespace's first process -> number
        self.known: dict[int, LaunchedSandbox] = {}  # by number
        self.place = settings["place"]
        self.mounted: dict[str, tuple[int, int]] = {}  # name -> (device, inode) mounted there
        self.spares: dict[tuple[str, ...], socket.socket] = {}  # by groups: see `prepare`
        self.spare_pids: dict[tuple[str, ...], int] = {}

    def prepare(self, groups: tuple[str, ...]) -> None:
        """Fork a spare child already in its groups: joining is slow (an RCU grace period)."""
        if not groups or groups in self.spares or len(self.spares) >= MOST_SPARES:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                os.dup2(theirs.fileno(), 0)
                os.closerange(3, 65536)
                join(groups)
                waiting = socket.socket(fileno=0)
                message, descriptors, _, _ = socket.recv_fds(
                    waiting, MESSAGE_BYTES, MAX_DESCRIPTORS
                )
                if not message:
                    os._exit(0)  # the launcher is gone
                waiting.detach()
                order = json.loads(message)
                order["groups"] = ()
                self.run_child(order, order["refused"], list(descriptors))
            except BaseException:  # noqa: BLE001 - a forked child must never return
                os._exit(125)
        theirs.close()
        self.spares[groups], self.spare_pids[groups] = ours, pid

    def use_spare(self, order: dict[str, Any], refused: str, descriptors: list[int]) -> int:
        spare = self.spares.pop(tuple(order["groups"]), None)
        if spare is None:
            return 0
        with spare:
            pid = self.spare_pids.pop(tuple(order["groups"]))
            message = json.dumps({**order, "refused": refused}).encode()
            if len(message) > SPARE_BYTES:
                return 0
            try:
                socket.send_fds(spare, [message], descriptors)
            except OSError:
                return 0
            return pid

    def expose(self, order: dict[str, Any]) -> None:
        """Mount where a dropped uid reaches it; again if another directory replaced it."""
        if not self.place:
            return  # no uid is dropped: sandboxes reach the same paths as the launcher
        name, target = order["name"], os.path.join(self.place, order["name"])
        source = os.open(order["source"], os.O_PATH | os.O_CLOEXEC)
        try:
            facts = os.fstat(source)
            identity = (facts.st_dev, facts.st_ino)
            if self.mounted.get(name) == identity:
                return
            if len(self.mounted) >= MOST_MOUNTED:
                self.unmount(next(iter(self.mounted)))
            if name in self.mounted:
                self.unmount(name)
            bind(source, target, writable=False)
            self.mounted[name] = identity
            self.can_overlay[target] = is_overlayable(target, self.place)
        finally:
            os.close(source)

    def unmount(self, name: str) -> None:
        del self.mounted[name]
        target = os.path.join(self.place, name)
        checked(libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")

    def start(self, order: dict[str, Any], descriptors: list[int]) -> None:
        number = order["start"]
        split = len(descriptors) - order["namespaces"]
        descriptors, namespaces = descriptors[:split], descriptors[split:]
        report_end = given_end = filter_end = filter_in = -1
        if order["mode"] == "bubblewrap":
            report_end, given_end = os.pipe()
            os.set_blocking(report_end, False)
            filter_end, filter_in = os.pipe()
            os.write(filter_in, self.seccomp)
            os.close(filter_in)
            descriptors = [*descriptors, filter_end, given_end]
        refused = ""
        try:
            for each in order["binds"]:
                self.expose(each)
        except OSError as failure:
            refused = str(failure)
        order["overlays"] = [each for each in order["overlays"] if self.can_overlay.get(each[0])]
        given = [*descriptors, *namespaces]
        pid = self.use_spare(order, refused, given)
        if not pid:
            pid = os.fork()
            if pid == 0:
                self.run_child(order, refused, given)
        for descriptor in given:
            os.close(descriptor)
        self.children[pid] = number
        self.known[number] = LaunchedSandbox(pid, report_end, tuple(order["groups"]))

    def run_child(self, order: dict[str, Any], refused: str, descriptors: list[int]) -> NoReturn:
        try:
            arrange(descriptors)
            if refused:
                raise OSError(refused)
            self.become(order, len(descriptors) - order["namespaces"])
        except BaseException as failure:  # noqa: BLE001 - a forked child must never return
            with contextlib.suppress(OSError):
                os.write(2, f"bwrap: gpool cannot start it: {failure}\n".encode())
        os._exit(125)

    def become(self, order: dict[str, Any], given: int) -> None:
        """In the child: join, limit, drop, exec. The program's `given` descriptors come first, then the namespaces'."""
        join(order["groups"])
        if order["overlays"]:
            checked(libc.unshare(CLONE_NEWNS), "unshare")
            for source, target in order["overlays"]:
                overlay(source, target, self.place)
        for namespace in range(given, given + order["namespaces"]):
            checked(libc.setns(namespace, 0), "setns")
        os.closerange(given, 65536)
        for kind, limit in order["limits"]:
            resource.setrlimit(kind, (limit, limit))
        os.umask(0o022)
        for each in CHANGED_SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        uid = order["uid"]
        if uid:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        os.chdir(order["cwd"])
        program = order["argv"]
        environment = order["env"]
        if order["mode"] == "process":
            supervise(lambda: exec_program(program, environment))
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        os.execve(program[0], program, environment)

    def kill(self, number: int) -> None:
        entry = self.known.get(number)
        if entry is None:
            return
        entry.killed = True
        self.learn_inner(number, entry)
        # a supervisor must live to kill the descendants of its command
        by = signal.SIGTERM if entry.report < 0 else signal.SIGKILL
        for pid, how in ((entry.inner, signal.SIGKILL), (entry.monitor, by)):
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, how)

    def warn(self, number: int) -> None:
        """SIGTERM to the child of the sandbox's first process or of the supervisor."""
        entry = self.known.get(number)
        if entry is None:
            return
        self.learn_inner(number, entry)
        above = entry.inner if entry.report >= 0 else entry.monitor
        for pid in children(above) if above else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def learn_inner(self, number: int, entry: LaunchedSandbox) -> None:
        if entry.report < 0:
            return
        text = b""
        with contextlib.suppress(BlockingIOError):
            text = os.read(entry.report, 65536)
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                report = json.loads(line)
                if "child-pid" in report:
                    entry.inner = report["child-pid"]
                    self.inner[entry.inner] = number
                if "exit-code" in report:
                    entry.ran = True

    def reap(self) -> None:
        gone = []
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                gone.append((pid, status))
        for pid, status in gone:
            number = self.children.pop(pid, None)
            if number is not None:
                entry = self.known[number]
                self.learn_inner(number, entry)
                entry.monitor = 0
                entry.status = status
                if entry.inner:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(entry.inner, signal.SIGKILL)
        for pid, _ in gone:
            number = self.inner.pop(pid, None)
            if number is not None:
                self.known[number].inner = 0
        for pid, number in list(self.inner.items()):
            if self.known[number].monitor == 0 and self.is_gone(pid):
                del self.inner[pid]
                self.known[number].inner = 0
        for number in [
            n for n, entry in self.known.items() if entry.monitor == 0 and entry.inner == 0
        ]:
            entry = self.known.pop(number)
            if entry.report >= 0:
                os.close(entry.report)
            message = {
                "ended": number,
                "status": entry.status,
                "ran": entry.ran or entry.report < 0,
                "killed": entry.killed,
            }
            self.channel.send(json.dumps(message).encode())
            self.prepare(entry.groups)  # for the next sandbox of this slot

    def is_gone(self, pid: int) -> bool:
        try:
            return os.waitpid(pid, os.WNOHANG)[0] == pid
        except ChildProcessError:
            return True

    def serve(self) -> None:
        alarm_out, alarm_in = os.pipe()
        os.set_blocking(alarm_in, False)
        os.set_blocking(alarm_out, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(alarm_in, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(alarm_out, select.POLLIN)
        shared = [path for path, can in self.can_overlay.items() if not can]
        self.channel.send(json.dumps({"ready": True, "shared": shared}).encode())
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == alarm_out:
                    with contextlib.suppress(BlockingIOError):
                        os.read(alarm_out, 4096)
                    self.reap()
                elif not self.obey():
                    return

    def obey(self) -> bool:
        room = socket.CMSG_LEN(MAX_DESCRIPTORS * 4)
        try:
            data, beside, _, _ = self.channel.recvmsg(MESSAGE_BYTES, room)
        except ConnectionResetError:
            return False
        if not data:
            return False
        descriptors = array.array("i")
        for _, _, raw in beside:
            descriptors.frombytes(raw[: len(raw) - len(raw) % 4])
        order = json.loads(data)
        if "enclosed" in order:  # too long for a message: the order is in a file
            with os.fdopen(descriptors.pop(), "rb") as enclosed:
                order = json.load(enclosed)
        if "start" in order:
            self.start(order, list(descriptors))
        elif "kill" in order:
            self.kill(order["kill"])
        elif "warn" in order:
            self.warn(order["warn"])
        return True


def main() -> int:
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for quiet in QUIET_SIGNALS:
        signal.signal(quiet, signal.SIG_IGN)
    channel = socket.socket(fileno=0)
    settings = json.loads(channel.recv(MESSAGE_BYTES))
    can_overlay: dict[str, bool] = {}
    try:
        if settings["place"]:
            can_overlay = enter_own_namespace(
                settings["place"], settings["binds"], settings["tree"]
            )
        launcher = LauncherProcess(channel, settings, can_overlay)
    except OSError as failure:
        channel.send(json.dumps({"ready": False, "detail": str(failure)}).encode())
        return 1
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the agent is gone
            launcher.serve()
    finally:
        reap_all_below(os.getpid())
    return 0


if __name__ == "__main__":
    sys.exit(main())

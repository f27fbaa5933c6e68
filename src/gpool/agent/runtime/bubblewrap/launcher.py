"""The launcher: a small process beside the agent that starts sandboxes. A script; imports the standard library and the
modules beside it that do the same.

Small, so that forking is cheap; single-threaded, so that forking is safe. It reaps every sandbox: when the agent is
gone, the socket ends, and the launcher kills every descendant and exits. (A parent death signal alone would miss a
sandbox that has not requested one yet.) As root it moves into its own mount namespace, in which interpreter, packages
and work directories are reachable for a dropped uid; each child drops to its uid before `exec`. Reads no task data.

After each end it makes the slot's next sandbox ahead (`first_process`), or if bwrap starts that slot's sandboxes, a child
that has joined the slot's groups. Either serves one order.

Messages on the socket (one JSON document each, descriptors beside it):
  in   {"start": n, "argv", "uid", "gids", "groups", "limits", "mode", "namespaces", "binds", "overlays", "cpus", "trees",
       …}  ·  {"kill": n}  ·  {"warn": n}
  out  {"ready": true, "shared": [paths], "prepares": bool}   ·   {"ended": n, "status": s, "ran": bool, "killed": bool}
One file because all of it reads and writes the table of running sandboxes.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys

if __name__ == "__main__":  # run by path and isolated: nothing of gpool is importable yet
    sys.path.append(os.path.abspath(f"{os.path.dirname(__file__)}/../../../.."))

from gpool.agent.runtime.bubblewrap import kernel
from gpool.agent.runtime.bubblewrap.first_process import (
    CHANGED_SIGNALS,
    QUIET_SIGNALS,
    FirstProcess,
    argument_area,
    arrange,
    join,
)
from gpool.agent.runtime.bubblewrap.kernel import (
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_REC,
    MS_REMOUNT,
    MS_SLAVE,
    SEALED,
    mount,
    overlay,
)
from gpool.agent.runtime.bubblewrap.process_trees import (
    children,
    exec_program,
    reap_all_below,
    supervise,
)

TYPE_CHECKING = False
if TYPE_CHECKING:  # without importing `typing`: each sandbox is a fork of this memory
    from typing import Any, NoReturn

MOST_MOUNTED = 64  # every sandbox's mount namespace starts as a copy of the launcher's
MOST_SPARES = 64
SPARE_BYTES = 128 * 1024  # certainly passes through a socket in one message
MESSAGE_BYTES = 1 << 20
MAX_DESCRIPTORS = 16
PREPARED = "prepared"  # the mode of sandboxes made ahead


def enter_own_namespace(
    place: str, binds: list[dict[str, Any]], tree: dict[str, Any]
) -> dict[str, bool]:
    """Return, per source of a read-only folder, whether a sandbox can have an overlay of it."""
    kernel.unshare(kernel.CLONE_NEWNS)
    mount("none", "/", None, MS_REC | MS_SLAVE)
    # opened in the new namespace, and before the tmpfs, which could hide one of them
    sources = [(os.open(b["source"], os.O_PATH), b["name"], b["writable"]) for b in binds]
    mount("gpool", place, b"tmpfs", MS_NOSUID, b"mode=0755,size=1m")
    for descriptor, name, writable in sources:
        bind(descriptor, os.path.join(place, name), writable=writable)
        os.close(descriptor)
    os.makedirs(os.path.join(place, kernel.EMPTY), 0o755, exist_ok=True)
    folders = {os.path.join(place, b["name"]) for b in binds if not b["writable"]}
    folders.update(source for _, source in tree["binds"])
    can_overlay = {source: is_overlayable(source, place) for source in sorted(folders)}
    mount_root(place, tree, can_overlay)
    return can_overlay


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
    kernel.unmount(probe)
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


SlotKey = tuple[tuple[str, ...], int]
"""Groups and uid."""


class Spare:
    def __init__(self, mode: str, pid: int, channel: socket.socket) -> None:
        self.mode = mode
        self.pid = pid
        self.channel = channel


class LaunchedSandbox:
    """Live pids (0: gone), and the descriptor of the report (-1: mode "process")."""

    def __init__(self, monitor: int, report: int, slot: SlotKey, mode: str) -> None:
        self.monitor = monitor  # of a prepared sandbox: its first process
        self.slot = slot
        self.mode = mode
        self.inner = 0
        self.status = 0
        self.report = report
        self.ran = False  # the command started and ended, with any code
        self.killed = False


def close_others(kept: list[int]) -> None:
    """Close all descriptors past 2 but these."""
    below = 3
    for descriptor in sorted(kept):
        os.closerange(below, descriptor)
        below = max(below, descriptor + 1)
    os.closerange(below, 65536)


def await_order() -> tuple[dict[str, Any], list[int]]:
    """Wait at the socket 0, in a spare child."""
    with socket.socket(fileno=os.dup(0)) as waiting:
        message, descriptors, _, _ = socket.recv_fds(waiting, SPARE_BYTES, MAX_DESCRIPTORS)
    if not message:
        os._exit(0)  # the launcher is gone, or has no use for this child
    return json.loads(message), list(descriptors)


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
        self.spares: dict[SlotKey, Spare] = {}  # see `prepare`
        self.own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self.first: FirstProcess | None = None
        self.overlays: list[tuple[str, str]] = []
        setup = settings["setup"]
        if setup:
            self.overlays = [(a, b) for a, b in setup["overlays"] if can_overlay.get(a)]
            first = FirstProcess(self.place, setup, self.seccomp, argument_area())
            self.first = first if self.can_prepare(first, setup["probe_uid"]) else None

    def can_prepare(self, first: FirstProcess, uid: int) -> bool:
        """Start a sandbox made by `first`; a kernel or container may forbid a step of it."""
        variables = os.memfd_create("variables")
        report_end, given_end = os.pipe()
        quiet = os.open(os.devnull, os.O_RDWR)
        order = {"argv": ["/usr/bin/true"], "cwd": "/", "uid": uid, "limits": [], "trees": []}
        order |= {"groups": [], "refused": "", "landlock": None, "cpus": []}
        order |= {"tmpfs_bytes": 1 << 20, "variables_at": 3}
        try:
            given = [quiet, quiet, quiet, variables, given_end]
            pid = self.fork_first(first, (), order, given)
            return os.waitpid(pid, 0)[1] == 0
        except OSError:
            return False
        finally:
            for descriptor in (variables, report_end, given_end, quiet):
                os.close(descriptor)

    def fork_first(
        self,
        first: FirstProcess,
        groups: tuple[str, ...],
        order: dict[str, Any] | None,
        descriptors: list[int],
    ) -> int:
        """Fork a sandbox's first process. Without an order it waits for one on the socket `descriptors[0]`."""
        kernel.unshare(kernel.CLONE_NEWPID)  # of the next child
        try:
            pid = os.fork()
        except OSError:
            kernel.setns(self.own_pids, kernel.CLONE_NEWPID)
            raise
        if pid:
            kernel.setns(self.own_pids, kernel.CLONE_NEWPID)
            return pid
        try:
            refused = ""
            if order is None:
                os.dup2(descriptors[0], 0)
            close_others([] if order is None else descriptors)
            try:
                first.make(groups, self.overlays)
            except OSError as failure:
                refused = str(failure)
            if order is None:
                order, descriptors = await_order()
            order["refused"] = order["refused"] or refused
            first.run(order, descriptors)
        finally:
            os._exit(125)

    def prepare(self, slot: SlotKey, mode: str) -> None:
        """Fork the slot's next child ahead: a whole sandbox, or one in its groups (joining takes an RCU grace period)."""
        if slot in self.spares or len(self.spares) >= MOST_SPARES:
            return
        first = self.first if mode == PREPARED else None
        groups, _ = slot
        if first is None and not groups:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                if first is None:
                    pid = self.fork_joined(groups, theirs)
                else:
                    pid = self.fork_first(first, groups, None, [theirs.fileno()])
            except OSError:
                ours.close()
                return  # the next start meets the same fault and reports it
        self.spares[slot] = Spare(mode, pid, ours)

    def fork_joined(self, groups: tuple[str, ...], theirs: socket.socket) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                os.dup2(theirs.fileno(), 0)
                os.closerange(3, 65536)
                join(groups)
                order, descriptors = await_order()
                order["groups"] = ()
                self.run_child(order, order["refused"], descriptors)
            except BaseException:  # noqa: BLE001 - a forked child must never return
                os._exit(125)
        return pid

    def use_spare(self, slot: SlotKey, order: dict[str, Any], descriptors: list[int]) -> int:
        """Return the pid of the slot's spare child, which has got the order; 0 if none could take it."""
        spare = self.spares.pop(slot, None)
        if spare is None:
            return 0
        with spare.channel:  # its end makes a child that got no order exit
            if spare.mode != order["mode"]:
                return 0
            message = json.dumps(order).encode()
            if len(message) > SPARE_BYTES:
                return 0
            try:
                socket.send_fds(spare.channel, [message], descriptors)
            except OSError:
                return 0
            return spare.pid

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
        kernel.unmount(target)

    def start(self, order: dict[str, Any], descriptors: list[int]) -> None:
        number = order["start"]
        split = len(descriptors) - order["namespaces"]
        descriptors, namespaces = descriptors[:split], descriptors[split:]
        report_end = given_end = filter_end = filter_in = -1
        mode, slot = order["mode"], (tuple(order["groups"]), order["uid"])
        if mode != "process":
            report_end, given_end = os.pipe()
            os.set_blocking(report_end, False)
        if mode == "bubblewrap":
            filter_end, filter_in = os.pipe()
            os.write(filter_in, self.seccomp)
            os.close(filter_in)
            descriptors = [*descriptors, filter_end, given_end]
        order["refused"] = ""
        trees: list[int] = []
        try:
            for each in order["binds"]:
                self.expose(each)
            for path, _ in order["trees"]:
                trees.append(kernel.detached_bind(path))
        except OSError as failure:
            order["refused"] = str(failure)
        order["overlays"] = [each for each in order["overlays"] if self.can_overlay.get(each[0])]
        given = [*descriptors, *namespaces]
        if mode == PREPARED:
            order["trees"] = order["trees"][: len(trees)]
            given = [*descriptors, given_end, *trees]
        pid = self.use_spare(slot, order, given) or self.fork(slot, order, given)
        for descriptor in given:
            os.close(descriptor)
        self.children[pid] = number
        self.known[number] = LaunchedSandbox(pid, report_end, slot, mode)

    def fork(self, slot: SlotKey, order: dict[str, Any], given: list[int]) -> int:
        if order["mode"] == PREPARED and self.first is not None:
            try:
                groups, _ = slot
                return self.fork_first(self.first, groups, order, given)
            except OSError as failure:
                order["refused"] = str(failure)
        pid = os.fork()
        if pid == 0:
            self.run_child(order, order["refused"], given)
        return pid

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
            kernel.unshare(kernel.CLONE_NEWNS)
            for source, target in order["overlays"]:
                overlay(source, target, self.place)
        for namespace in range(given, given + order["namespaces"]):
            kernel.setns(namespace)
        os.closerange(given, 65536)
        for kind, limit in order["limits"]:
            resource.setrlimit(kind, (limit, limit))
        if order["cpus"]:
            with contextlib.suppress(OSError):  # they are offline by now: any CPU will do
                os.sched_setaffinity(0, order["cpus"])
        os.umask(0o022)
        for each in CHANGED_SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        uid = order["uid"]
        if uid:
            os.setgroups(order["gids"])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        os.chdir(order["cwd"])
        program = order["argv"]
        environment = order["env"]
        if order["mode"] == "process":
            supervise(lambda: exec_program(program, environment))
        kernel.prctl("no new privileges", kernel.PR_SET_NO_NEW_PRIVS, 1)
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
        above = entry.inner if entry.mode == "bubblewrap" else entry.monitor
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
            self.prepare(entry.slot, entry.mode)

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
        ready = {"ready": True, "shared": shared, "prepares": self.first is not None}
        self.channel.send(json.dumps(ready).encode())
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
    kernel.prctl("subreaper", kernel.PR_SET_CHILD_SUBREAPER, 1)
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
        gc.collect()
        kernel.libc.malloc_trim(0)
        gc.freeze()  # a collection in a child copies no page
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

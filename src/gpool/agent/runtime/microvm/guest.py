"""The guest's first process: mounts, starts one command without privileges, reports to the agent. A script; stdlib only.

Everything travels over one connection (a virtio-serial port, or a vsock if the monitor has no such port) in frames:
length (u32, of the body), stream (u8), body; little-endian.
  0 messages  one JSON document
  1, 2        output of the command                          out, by credit
  3           calls for a runner                             in, by credit
  4           a runner's answers                             out, by credit
  5, 6        bytes of a file announced by a message         in, out
  7 credit    stream (u8), bytes (u32): the peer may send so many more on it; both directions
Messages in:  begin {argv, env, limits, runner, network, inputs …} · file {path, size, executable} · go · arguments {size} · warn
              collect {number, wanted, most} · take {number, name, most} · stop
Messages out: hello {version} · started · ended {code, oom} · output {number, path, size, executable} ·
              collected {number} · refused {number, text} · failed {text}
The agent trusts none of it; this program only ensures that an honest task's outputs are exactly its files.
One file because the guest runs it by path, without imports of gpool.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import json
import os
import resource
import runpy
import select
import signal
import socket
import stat
import struct
import sys
from collections.abc import Generator, Iterator
from typing import Any, NoReturn

WORDS, OUT, ERR, CALLS, ANSWERS, FILE_IN, FILE_OUT, CREDIT = range(8)
HEAD = struct.Struct("<IB")
CREDIT_BODY = struct.Struct("<BI")
VERSION = 1
WINDOW_BYTES = 256 * 1024
CHUNK_BYTES = 32 * 1024
AGENT_CID, AGENT_PORT = 2, 1024  # over vsock
PORT_NAME = "gpool.control"
TASK_UID = 1000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE, MS_NOATIME = 16384, 1 << 18, 1024
CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWIPC = 0x00020000, 0x20000000, 0x08000000
PR_SET_NO_NEW_PRIVS = 38
DEVICES = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}  # minors; the major is 1
GROUPS_AT = "/run/groups"
READ_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
READ_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_DEPTH = 100  # as in the agent's work_directory.py
Sending = Generator[None, None, int]  # one step at a time; returns the number of bytes

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    words = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    checked(libc.mount(*words), f"mount {target}")


def open_line(how: str) -> int:
    if how == "vsock":
        line = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
        line.connect((AGENT_CID, AGENT_PORT))
        number = line.detach()
    else:
        number = os.open(glob.glob("/dev/vport*")[0], os.O_RDWR | os.O_CLOEXEC)
    os.set_blocking(number, False)
    return number


class AgentLine:
    """Frames of the connection. Never blocks; queued output is bounded by credit and by `serve`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.inward = bytearray()
        self.outward = bytearray()

    def put(self, stream: int, body: bytes) -> None:
        self.outward += HEAD.pack(len(body), stream) + body

    def send(self, **fields: Any) -> None:
        self.put(WORDS, json.dumps(fields).encode())

    def flush(self) -> None:
        try:
            while self.outward:
                sent = os.write(self.number, memoryview(self.outward)[:65536])
                del self.outward[:sent]
        except BlockingIOError:
            return

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Yield complete frames; powers off if the agent is gone."""
        try:
            more = os.read(self.number, 1 << 18)
            if not more:
                power_off()
            self.inward += more
        except BlockingIOError:
            pass
        start = 0
        while len(self.inward) - start >= HEAD.size:
            length, stream = HEAD.unpack_from(self.inward, start)
            end = start + HEAD.size + length
            if len(self.inward) < end:
                break
            body = bytes(memoryview(self.inward)[start + HEAD.size : end])
            start = end
            yield stream, body
        del self.inward[:start]


def power_off() -> NoReturn:
    libc.reboot(0x01234567)  # a restart, on which the monitor ends
    os._exit(1)


class OutputPipe:
    def __init__(self, descriptor: int, stream: int) -> None:
        self.descriptor = descriptor
        self.stream = stream
        self.credit = WINDOW_BYTES
        self.open = True

    def forward(self, line: AgentLine) -> None:
        try:
            data = os.read(self.descriptor, min(CHUNK_BYTES, self.credit))
        except BlockingIOError:
            return
        if data:
            self.credit -= len(data)
            line.put(self.stream, data)
        else:
            os.close(self.descriptor)
            self.open = False


class Guest:
    def __init__(self, line: AgentLine) -> None:
        self.line = line
        self.task = 0  # pid of the namespace's first process
        self.status: int | None = None
        self.end_sent = False
        self.outlets: list[OutputPipe] = []
        self.calls = -1
        self.calls_waiting = bytearray()
        self.files: socket.socket | None = None
        self.receiving: tuple[int, int, str] | None = None  # descriptor, bytes to come, path
        self.sending: list[Iterator[None]] = []
        self.job: dict[str, Any] = {}

    def obey(self, stream: int, body: bytes) -> None:
        if stream == FILE_IN:
            self.receive(body)
        elif stream == CREDIT:
            which, more = CREDIT_BODY.unpack(body)
            for outlet in self.outlets:
                if outlet.stream == which:
                    outlet.credit += more
        elif stream == CALLS:
            self.calls_waiting += body
        elif stream == WORDS:
            message = json.loads(body)
            if message["word"] == "begin":
                self.job = message
            else:
                getattr(self, "do_" + message["word"])(message)

    def do_file(self, message: dict[str, Any]) -> None:
        *folders, name = message["path"].split("/")
        at = "/work"
        for folder in folders:
            at += "/" + folder
            with contextlib.suppress(FileExistsError):
                os.mkdir(at, 0o755)
                os.chown(at, TASK_UID, TASK_UID)
        mode = 0o755 if message["executable"] else 0o644
        made = os.open(f"{at}/{name}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, mode)
        os.fchown(made, TASK_UID, TASK_UID)
        self.expect(made, message["size"], message["path"])

    def do_arguments(self, message: dict[str, Any]) -> None:
        made = os.open("/values", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self.expect(made, message["size"], "")

    def expect(self, descriptor: int, size: int, path: str) -> None:
        self.receiving = (descriptor, size, path)
        self.receive(b"")

    def receive(self, body: bytes) -> None:
        if self.receiving is None:
            return
        descriptor, left, path = self.receiving
        view = memoryview(body)
        try:
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError as full:
            if self.calls < 0:
                self.line.send(word="failed", text=f"input {path}: {full.strerror}")
        left -= len(body)
        self.receiving = (descriptor, left, path)
        if left > 0:
            return
        self.receiving = None
        if not path and self.files is not None:
            os.lseek(descriptor, 0, os.SEEK_SET)
            with contextlib.suppress(OSError):
                socket.send_fds(self.files, [b"f"], [descriptor])
        os.close(descriptor)

    def do_go(self, message: dict[str, Any]) -> None:  # noqa: ARG002 - the signature of all
        try:
            self.start()
        except OSError as failure:
            self.line.send(word="failed", text=f"the guest cannot start it: {failure}")
            return
        self.line.send(word="started")

    def do_warn(self, message: dict[str, Any]) -> None:  # noqa: ARG002
        if self.task and self.status is None:
            os.kill(self.task, signal.SIGTERM)

    def do_collect(self, message: dict[str, Any]) -> None:
        self.sending.append(self.collect(message["number"], message["wanted"], message["most"]))

    def do_take(self, message: dict[str, Any]) -> None:
        self.sending.append(self.take(message["number"], message["name"], message["most"]))

    def do_stop(self, message: dict[str, Any]) -> None:  # noqa: ARG002
        self.sending.clear()  # the agent makes one request at a time and abandoned this one

    def collect(self, number: int, wanted: list[str], most: int) -> Iterator[None]:
        top = os.open("/work", READ_DIRECTORY)
        try:
            for path in wanted:
                parts = path.rstrip("/").split("/")
                above = os.dup(top)
                try:
                    for at, name in enumerate(parts[:-1]):
                        above = down(above, name, "/".join(parts[: at + 1]), path)
                    if path.endswith("/"):
                        above = down(above, parts[-1], path, path)
                        most -= yield from self.walk(number, above, "/".join(parts), most)
                    else:
                        most -= yield from self.send(number, above, parts[-1], path, most)
                finally:
                    os.close(above)
            self.line.send(word="collected", number=number)
        except (OutputRefused, OSError) as failure:
            self.line.send(word="refused", number=number, text=str(failure))
        finally:
            os.close(top)

    def take(self, number: int, name: str, most: int) -> Iterator[None]:
        top = os.open("/values", READ_DIRECTORY)
        try:
            yield from self.send(number, top, name, name, most)
            os.unlink(name, dir_fd=top)
            self.line.send(word="collected", number=number)
        except (OutputRefused, OSError) as failure:
            self.line.send(word="refused", number=number, text=str(failure))
        finally:
            os.close(top)

    def walk(self, number: int, directory: int, path: str, most: int) -> Sending:
        if path.count("/") > MAX_DEPTH:
            raise OutputRefused(
                f"an output lies more than {MAX_DEPTH} folders deep; use an archive"
            )
        left = most
        for name in sorted(os.listdir(directory)):
            facts = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISDIR(facts.st_mode):
                inner = os.open(name, READ_DIRECTORY, dir_fd=directory)
                try:
                    left -= yield from self.walk(number, inner, f"{path}/{name}", left)
                finally:
                    os.close(inner)
            else:
                left -= yield from self.send(number, directory, name, f"{path}/{name}", left)
        return most - left

    def send(self, number: int, above: int, name: str, path: str, most: int) -> Sending:
        try:
            facts = os.stat(name, dir_fd=above, follow_symlinks=False)
        except FileNotFoundError:
            raise OutputRefused(missing(above, path)) from None
        if stat.S_ISDIR(facts.st_mode):
            raise OutputRefused(f"output '{path}' is a directory; ask for '{path}/'")
        if not stat.S_ISREG(facts.st_mode):
            raise OutputRefused(
                f"output '{path}' is {kind(facts.st_mode)}; only plain files can be one"
            )
        if facts.st_size > most:
            raise OutputRefused(
                f"output '{path}' is over the disk limit by {facts.st_size - most} bytes"
            )
        held = os.open(name, READ_FILE, dir_fd=above)
        try:
            whole = size = os.fstat(held).st_size
            executable = bool(facts.st_mode & stat.S_IXUSR)
            self.line.send(
                word="output", number=number, path=path, size=size, executable=executable
            )
            while size > 0:
                data = os.read(held, min(CHUNK_BYTES, size))
                data = data or bytes(min(CHUNK_BYTES, size))  # the file shrank: zeros, as in a hole
                size -= len(data)
                self.line.put(FILE_OUT, data)
                yield
        finally:
            os.close(held)
        yield
        return whole

    def start(self) -> None:
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        given = [os.open(os.devnull, os.O_RDONLY), out_end, err_end]
        self.outlets = [OutputPipe(out, OUT), OutputPipe(err, ERR)]
        if self.job["runner"]:
            calls_end, self.calls = os.pipe()
            answers, answers_end = os.pipe()
            self.files, theirs = socket.socketpair()
            self.files.setblocking(False)
            os.set_blocking(self.calls, False)
            self.outlets.append(OutputPipe(answers, ANSWERS))
            given += [calls_end, answers_end, theirs.detach()]
        for outlet in self.outlets:
            os.set_blocking(outlet.descriptor, False)
        here, job = os.path.dirname(__file__), self.job
        job["files"] = runpy.run_path(f"{here}/guest_network.py")["configure"](job.get("network"))
        job["nodes"] = runpy.run_path(f"{here}/guest_gpu.py")["prepare"](job.get("gpu"))
        group = self.make_group()
        checked(libc.unshare(CLONE_NEWPID), "unshare")
        self.task = os.fork()
        if self.task == 0:
            try:
                supervise(self.job, given, group)
            except BaseException as failure:  # noqa: BLE001 - a forked child must never return
                with contextlib.suppress(OSError):
                    os.write(given[2], f"gpool: the guest cannot start it: {failure}\n".encode())
            os._exit(125)
        for descriptor in given:
            os.close(descriptor)

    def make_group(self) -> int:
        limits = self.job["limits"]
        try:
            with open(f"{GROUPS_AT}/cgroup.subtree_control", "w") as switch:
                switch.write("+memory +pids")
            os.mkdir(f"{GROUPS_AT}/task")
            most = {"memory.max": limits["memory_bytes"], "memory.swap.max": 0}
            most["pids.max"] = limits["processes"]
            for name, value in most.items():
                with (
                    contextlib.suppress(FileNotFoundError),
                    open(f"{GROUPS_AT}/task/{name}", "w") as limit,
                ):
                    limit.write(str(value))
            return os.open(f"{GROUPS_AT}/task/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return -1

    def memory_kills(self) -> int:
        with contextlib.suppress(OSError), open(f"{GROUPS_AT}/task/memory.events") as events:
            for line in events:
                word, _, count = line.partition(" ")
                if word == "oom_kill":
                    return int(count)
        return 0

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.task:
                    self.status = status

    def send_end(self) -> None:
        if self.end_sent or self.status is None or any(outlet.open for outlet in self.outlets):
            return
        self.end_sent = True
        code = os.waitstatus_to_exitcode(self.status)
        self.line.send(
            word="ended", code=code if code >= 0 else 128 - code, oom=self.memory_kills() > 0
        )

    def push_calls(self) -> None:
        try:
            sent = os.write(self.calls, memoryview(self.calls_waiting)[:65536])
        except BlockingIOError:
            return
        except BrokenPipeError:
            sent = len(self.calls_waiting)
        del self.calls_waiting[:sent]
        self.line.put(CREDIT, CREDIT_BODY.pack(CALLS, sent))

    def serve(self) -> NoReturn:
        alarm_out, alarm_in = os.pipe()
        os.set_blocking(alarm_in, False)
        os.set_blocking(alarm_out, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(alarm_in, warn_on_full_buffer=False)
        self.line.send(word="hello", version=VERSION)
        while True:
            self.send_end()
            self.line.flush()
            reading: list[Any] = [self.line.number, alarm_out]
            writing: list[Any] = [self.line.number] if self.line.outward else []
            room = len(self.line.outward) < WINDOW_BYTES
            if room:
                reading += [o.descriptor for o in self.outlets if o.open and o.credit > 0]
            if self.calls_waiting:
                writing.append(self.calls)
            busy = bool(self.sending) and room
            ready, able, _ = select.select(reading, writing, [], 0 if busy else None)
            if alarm_out in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(alarm_out, 4096)
                self.reap()
            for outlet in self.outlets:
                if outlet.open and outlet.descriptor in ready:
                    outlet.forward(self.line)
            if self.calls in able:
                self.push_calls()
            if self.line.number in ready:
                for stream, body in self.line.receive():
                    self.obey(stream, body)
            if busy and self.sending:  # a `stop` may have cleared it meanwhile
                try:
                    next(self.sending[0])
                except StopIteration:
                    del self.sending[0]


class OutputRefused(Exception): ...


def down(above: int, name: str, path: str, wanted: str) -> int:
    try:
        below = os.open(name, READ_DIRECTORY, dir_fd=above)
    except FileNotFoundError:
        raise OutputRefused(missing(above, wanted)) from None
    except OSError:
        found = kind(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode)
        raise OutputRefused(f"output '{wanted}': '{path}' is {found}, not a directory") from None
    os.close(above)
    return below


def missing(above: int, path: str) -> str:
    names = sorted(os.listdir(above))
    held = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
    return f"output '{path}' was not written; its directory holds {held or 'nothing'}"


def kind(mode: int) -> str:
    words = {"l": "symbolic link", "p": "FIFO", "s": "socket", "d": "directory", "-": "plain file"}
    return "a " + words.get(stat.filemode(mode)[0], "device")


def supervise(job: dict[str, Any], given: list[int], group: int) -> NoReturn:
    """Be the first process of the command's namespaces: mount, start, reap; all die with it."""
    signal.set_wakeup_fd(-1)
    checked(libc.unshare(CLONE_NEWNS | CLONE_NEWIPC), "unshare")
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    for source, target in job["files"]:
        mount(source, target, "", MS_BIND)
    mount_view(job["limits"]["memory_bytes"], job["nodes"])
    warned = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, warned)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, warned)
        become(job, given, group)
    os.closerange(0, 1024)
    while True:
        if signal.sigwait(warned) == signal.SIGTERM:
            os.kill(child, signal.SIGTERM)
            continue
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                os._exit(
                    os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
                )
            if pid == 0:
                break


def mount_view(memory_bytes: int, nodes: list[tuple[str, int, int]]) -> None:
    """No disk, agent connection or control groups; /sys only beside a GPU. `nodes`: of GPUs."""
    quiet = MS_NOSUID | MS_NODEV
    half = f"size={max(1 << 20, memory_bytes // 2)},mode=1777"
    mount("proc", "/proc", "proc", quiet | MS_NOEXEC)
    mount("run", "/run", "tmpfs", quiet | MS_RDONLY, "size=4k,mode=0755")
    mount("tmp", "/tmp", "tmpfs", quiet, half)
    mount("dev", "/dev", "tmpfs", MS_NOSUID, "size=64k,mode=0755")
    for name, major, minor in (*((name, 1, minor) for name, minor in DEVICES.items()), *nodes):
        os.makedirs(os.path.dirname(f"/dev/{name}"), exist_ok=True)
        os.mknod(f"/dev/{name}", 0o020666, os.makedev(major, minor))
        os.chmod(f"/dev/{name}", 0o666)
    if os.path.isdir("/sys/kernel"):
        mount("sys", "/sys", "", MS_REMOUNT | MS_BIND | MS_RDONLY | quiet | MS_NOEXEC)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    os.symlink("pts/ptmx", "/dev/ptmx")
    for name in ("shm", "pts"):
        os.mkdir(f"/dev/{name}")
    with contextlib.suppress(OSError):
        mount(
            "pts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620"
        )
    mount("shm", "/dev/shm", "tmpfs", quiet, half)
    mount("none", "/dev", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID)


def become(job: dict[str, Any], given: list[int], group: int) -> NoReturn:
    if group >= 0:
        os.write(group, b"0")
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 100) for descriptor in given]
    for target, descriptor in enumerate(high):
        os.dup2(descriptor, target)
    os.closerange(len(given), 1024)
    for each in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGINT):
        signal.signal(each, signal.SIG_DFL)
    open_files = job["limits"]["open_files"]
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    unlimited = resource.RLIM_INFINITY  # the guest's memory is the limit
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (unlimited, unlimited))
    if group < 0:
        processes = job["limits"]["processes"]
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    os.umask(0o022)
    os.setsid()
    os.setgroups([])
    os.setresgid(TASK_UID, TASK_UID, TASK_UID)
    os.setresuid(TASK_UID, TASK_UID, TASK_UID)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.chdir("/work")
    argv = job["argv"]
    try:
        os.execvpe(argv[0], argv, dict(job["env"]))
    except OSError as failure:
        absent = failure.errno in (errno.ENOENT, errno.ENOTDIR)
        os.write(2, f"gpool: {argv[0]}: {failure.strerror}\n".encode())
        os._exit(127 if absent else 126)


def prepare(work_disk: str) -> str:
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("run", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=0700")
    os.mkdir(GROUPS_AT)
    with contextlib.suppress(OSError):
        mount("groups", GROUPS_AT, "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    with contextlib.suppress(OSError), open("/proc/sys/vm/overcommit_memory", "w") as setting:
        setting.write("1")  # the group's limit decides, and counts its kills
    os.mkdir("/run/disk")
    mount(work_disk, "/run/disk", "ext4", MS_NOSUID | MS_NODEV | MS_NOATIME, "nobarrier")
    for name in ("work", "values"):
        os.mkdir(f"/run/disk/{name}", 0o700)
        os.chown(f"/run/disk/{name}", TASK_UID, TASK_UID)
        mount(f"/run/disk/{name}", f"/{name}", "", MS_BIND)
    with open("/proc/cmdline") as line:
        words = dict(word.partition("=")[::2] for word in line.read().split())
    socket.sethostname("sandbox")
    return words.get("gpool.control", "port")


def main() -> NoReturn:
    try:
        Guest(AgentLine(open_line(prepare("/dev/vdd")))).serve()
    except BaseException as failure:  # noqa: BLE001 - the first process must not return
        sys.stderr.write(f"gpool guest: {type(failure).__name__}: {failure}\n")
        sys.stderr.flush()
    power_off()


if __name__ == "__main__":
    main()

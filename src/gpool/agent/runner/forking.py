"""The fork server of a runner with `preload`: imports the modules, then forks a child for each function.

Loaded by `serve.py`, which it must not import. Runs no user code and opens no GPU: a child inherits modules only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import time
import warnings
from collections import deque
from typing import Any

# As in serve.py; tests/agent/runtime/test_runner.py compares the two.
DEFINE, CALL, CALL_FILE, PRELOAD, ASSIGN = 1, 2, 3, 4, 5
WARM, ENDED = 5, 6
HEAD = struct.Struct("<IB")
CALL_HEAD = struct.Struct("<Q32s")
ENDED_BODY = struct.Struct("<QBQ")
READ_BYTES = 1 << 20
DONE, LEAVING, ROOM, LIGHT = (
    b"d",
    b"l",
    b"r",
    b"s",
)  # sent by a child to its parent after each answer

AHEAD_BYTES = 32 * 1024  # of calls queued in a child's pipe; less than its capacity
MOST_CHILDREN = 4
GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
OWN = "GPOOL_GPU_OWN"  # set by the agent where no other task shares the GPU's memory; as in sharing/shares.py
CUDA = "libcuda.so.1"
CUDA_NOT_INITIALIZED, COMPUTE_MODE, ANY_PROCESS = 3, 20, 0
ROOM_PARTS, LIGHT_PARTS = 8, 32  # all but one of so many parts of the GPU's memory are free
STAY_S = 1.0  # of a process of little GPU memory beside its successor


def warm(runner: Any, names: bytes, buffer: bytes) -> bool:
    """False, without serving, if a module opened a GPU: no context survives a fork."""
    preload(runner, names.decode().split("\0"))
    forks = not holds_gpu()
    runner.write(WARM, bytes([forks]))
    if forks:
        ForkServer(runner, buffer).serve()
    return forks


def preload(runner: Any, names: list[str]) -> None:
    """Discard output and files; skip a failing module: the function will fail itself."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)
    for name in names:
        with contextlib.suppress(BaseException):
            importlib.import_module(name)
    runner.encode([])  # loads the encoder: else every child would compile it
    runner.tidy()
    runner.assign(b"")  # variables that an import has set stay
    runner.baseline.path = list(sys.path)
    gc.collect()
    gc.freeze()


def holds_gpu() -> bool:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(GPU_FILES):
                return True
    return False


def free_parts() -> int:
    """Return the largest of `ROOM_PARTS` and `LIGHT_PARTS` so that all but one of so many parts of the only GPU's memory are
    free, and the GPU admits several processes; 0 if none is. A process that never opened a GPU leaves it all free. In a
    slice of a shared GPU a predecessor never stays: both together could exceed the slice.
    """
    if not os.environ.get(VISIBLE[0]) or os.environ.get(VISIBLE[1]):
        return 0
    try:
        cuda = ctypes.CDLL(CUDA, mode=os.RTLD_NOLOAD)
    except OSError:
        return ROOM_PARTS  # never loaded
    count, device, mode = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    code = cuda.cuDeviceGetCount(ctypes.byref(count))
    if code == CUDA_NOT_INITIALIZED:
        return ROOM_PARTS
    if code or count.value != 1 or cuda.cuCtxGetDevice(ctypes.byref(device)):
        return 0
    if cuda.cuDeviceGetAttribute(ctypes.byref(mode), COMPUTE_MODE, device):
        return 0
    if cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) or mode.value != ANY_PROCESS:
        return 0
    for parts in (LIGHT_PARTS, ROOM_PARTS) if os.environ.get(OWN) else (ROOM_PARTS,):
        if parts * free.value >= (parts - 1) * total.value:
            return parts
    return 0


def after_answer(clean: bool) -> bytes:
    """Return the report of a child: `LEAVING` if the call left threads, `ROOM` if its successor need not wait for its end,
    `LIGHT` if it may stay until the successor has answered.
    """
    if not clean:
        return LEAVING
    return {LIGHT_PARTS: LIGHT, ROOM_PARTS: ROOM}.get(free_parts(), DONE)


class FunctionProcess:
    def __init__(self, pid: int, calls: int, files: socket.socket, reports: int) -> None:
        self.pid = pid
        self.calls = calls
        self.files = files
        self.reports = reports
        self.given: deque[tuple[int, bytes, int]] = deque()  # sent and not answered
        self.began = 0  # start of the oldest
        self.is_closed = False  # its report pipe has ended
        self.leaves_room = False  # for the next one, before it has ended
        self.is_light = False  # holds so little GPU memory that it may stay beside the next one
        self.leaves_at = 0.0

    def close(self) -> None:
        os.close(self.calls)
        os.close(self.reports)
        self.files.close()


class ForkServer:
    """One child works at a time, so answers come in order. Calls are kept until answered: a dying child loses one call.

    A process that releases a GPU delays another one that opens it by about 40 ms (H200). So a predecessor with little GPU
    memory is dismissed when its successor has answered once, or after `STAY_S`.
    """

    def __init__(self, runner: Any, buffer: bytes) -> None:
        self.runner = runner
        self.buffer = bytearray(buffer)
        self.pickles: dict[bytes, bytes] = {}
        self.waiting: deque[tuple[int, bytes, int]] = deque()  # kind, body, descriptor or -1
        self.children: dict[bytes, FunctionProcess] = {}  # by function, most recently used last
        self.busy: FunctionProcess | None = None
        self.leaving: FunctionProcess | None = (
            None  # a predecessor beside its successor; serves no calls
        )
        sees_gpu = any(os.environ.get(name) for name in VISIBLE)
        self.most = 1 if sees_gpu else MOST_CHILDREN  # each child holds GPU memory
        self.died, self.bell = os.pipe()
        for number in (self.died, self.bell):
            os.set_blocking(number, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.bell, warn_on_full_buffer=False)

    def serve(self) -> None:
        self.read_frames()
        while True:
            self.send_calls()
            watched = [self.runner.calls, self.died]
            busy = self.busy
            if busy is not None and not busy.is_closed:
                watched.append(busy.reports)
            wait_s = None
            if self.leaving is not None:
                wait_s = max(0.0, self.leaving.leaves_at - time.monotonic())
            ready = select.select(watched, [], [], wait_s)[0]
            if not ready:
                self.dismiss_leaving()
            if busy is not None and busy.reports in ready:
                self.receive(busy)
            if self.died in ready:
                os.read(self.died, 4096)
                self.reap()
            if self.runner.calls in ready:
                more = os.read(self.runner.calls, READ_BYTES)
                if not more:
                    return
                self.buffer += more
                self.read_frames()

    def read_frames(self) -> None:
        buffer, start = self.buffer, 0
        while len(buffer) - start >= HEAD.size:
            length, kind = HEAD.unpack_from(buffer, start)
            end = start + HEAD.size + length
            if end > len(buffer):
                break
            body = bytes(memoryview(buffer)[start + HEAD.size : end])
            start = end
            if kind == DEFINE:
                self.pickles[body[:32]] = body[32:]
            elif kind == ASSIGN:
                self.runner.assign(body)
            elif kind == CALL_FILE:
                descriptor = socket.recv_fds(self.runner.files, 1, 1)[1][0]
                self.waiting.append((kind, body, descriptor))
            elif kind == CALL:
                self.waiting.append((kind, body, -1))
        del buffer[:start]

    def send_calls(self) -> None:
        while self.waiting:
            kind, body, descriptor = self.waiting[0]
            sha256 = CALL_HEAD.unpack_from(body)[1]
            child = self.children.get(sha256)
            busy = self.busy
            if busy is not None:
                ahead = sum(len(given[1]) for given in busy.given)
                if child is not busy or ahead + len(body) > AHEAD_BYTES:
                    return
            if child is None:
                child = self.fork(sha256)
            if not child.given:
                child.began = time.perf_counter_ns()
                self.children[sha256] = self.children.pop(sha256)
            self.busy = child
            child.given.append(self.waiting.popleft())
            frame = HEAD.pack(len(body), kind) + body
            with contextlib.suppress(OSError):  # the child has ended: `reap` handles it
                if descriptor >= 0:
                    socket.send_fds(child.files, [b"f"], [descriptor])
                while frame:
                    frame = frame[os.write(child.calls, frame) :]

    def fork(self, sha256: bytes) -> FunctionProcess:
        while len(self.children) >= self.most:
            self.replace(next(iter(self.children)))
        calls, ours = os.pipe()
        reports, report_end = os.pipe()
        near, far = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about threads of libraries, which handle forks
            pid = os.fork()
        if pid:
            os.close(calls)
            os.close(report_end)
            far.close()
            self.children[sha256] = child = FunctionProcess(pid, ours, near, reports)
            return child
        try:
            self.become(sha256, (calls, report_end, far), (ours, reports))
            near.close()
            self.runner.serve()
        finally:
            os._exit(0)

    def become(
        self, sha256: bytes, own: tuple[int, int, socket.socket], parents: tuple[int, int]
    ) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        runner = self.runner
        for child in (*self.children.values(), *([self.leaving] if self.leaving else ())):
            child.close()
        for descriptor in (*parents, self.died, self.bell, runner.calls):
            os.close(descriptor)
        runner.files.close()
        runner.calls, runner.parent, runner.files = own
        runner.alone = False  # kills its descendants only
        runner.pid = os.getpid()
        runner.adopt_orphans()
        if sha256 in self.pickles:
            runner.functions[sha256] = self.pickles[sha256]
        numbers = sys.modules.get("numpy.random")
        if numbers is not None:
            numbers.seed()  # else every child would draw the same numbers

    def receive(self, child: FunctionProcess) -> bool:
        """Read the child's reports; True if it leaves: no other call sent to it has begun."""
        leaves = False
        reports = os.read(child.reports, 4096)
        child.is_closed = not reports
        for word in reports:
            if child.given:
                descriptor = child.given.popleft()[2]
                if descriptor >= 0:
                    os.close(descriptor)
                child.began = time.perf_counter_ns()
            leaves = leaves or word == LEAVING[0]
            child.leaves_room = word in ROOM + LIGHT
            child.is_light = word == LIGHT[0]
            self.dismiss_leaving()
        if leaves:
            self.forget(child)
        elif not child.given:
            self.busy = None
        return leaves

    def forget(self, child: FunctionProcess) -> None:
        self.waiting.extendleft(reversed(child.given))
        child.close()
        if self.busy is child:
            self.busy = None
        self.children = {name: one for name, one in self.children.items() if one is not child}

    def replace(self, sha256: bytes) -> None:
        child = self.children[sha256]
        self.dismiss_leaving()
        if not child.is_light:
            self.dismiss(child)
            return
        del self.children[sha256]
        child.leaves_at = time.monotonic() + STAY_S
        self.leaving = child

    def dismiss_leaving(self) -> None:
        child, self.leaving = self.leaving, None
        if child is not None:
            self.dismiss(child)

    def dismiss(self, child: FunctionProcess) -> None:
        self.forget(child)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child.pid, signal.SIGKILL)
            if not child.leaves_room:  # else `reap` waits for it, while the next one starts
                os.waitpid(child.pid, 0)

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if self.leaving is not None and self.leaving.pid == pid:
                    self.forget(self.leaving)
                    self.leaving = None
                for child in list(self.children.values()):
                    if child.pid == pid:
                        self.report_end(child, os.waitstatus_to_exitcode(status))

    def report_end(self, child: FunctionProcess, code: int) -> None:
        while not child.is_closed and select.select([child.reports], [], [], 0)[0]:
            if self.receive(child):
                return
        if not child.given:
            self.forget(child)
            return
        number = CALL_HEAD.unpack_from(child.given[0][1])[0]
        _, _, descriptor = child.given.popleft()
        if descriptor >= 0:
            os.close(descriptor)
        took = (time.perf_counter_ns() - child.began) // 1000
        self.dismiss_leaving()
        for one in list(self.children.values()):  # `tidy` kills the others too
            self.forget(one)
        self.runner.tidy(self.runner.marker)
        self.runner.write(ENDED, ENDED_BODY.pack(number, -code + 128 if code < 0 else code, took))

"""The function runner: executes calls inside the sandbox, one at a time. A script; stdlib and cloudpickle only.

`serve.py alone|guarded CALLS ANSWERS FILES`; the last three are descriptors. `alone`: in a process-id namespace of its
own, where it may kill every other process; `guarded`: under a supervisor, where it kills its descendants.

Frames in both directions: length (u32, of the body), kind (u8), body; little-endian.
  in   1 define    sha256 (32 bytes), pickled function, RESULTS_AS_DATA if its values are to be sent as data
       2 call      number (u64), sha256, pickled (args, kwargs), and of a traced call its trace and TRACE_END
       3 call      number (u64), sha256 (trace, TRACE_END); the pickle is a descriptor received over FILES
       4 preload   names of modules, a zero byte between them; at most once, before all other frames
       5 assign    variables, NAME=VALUE, a zero byte between them; at most once, before the first call
  out  1 ready     marker (16 bytes), written at the end of each call's output on stdout and stderr
       2 answer    number (u64), raised (u8), microseconds (u64), length of the text (u32), text, value
       3 answer    the same; the value is a file in the values directory, named by the number
       4 retire    no more answers will come
       5 warm      forks (u8): the modules are imported or skipped; 0: one of them opened a GPU
       6 ended     number (u64), exit code (u8), microseconds (u64): the call's process ended before it answered
       7 progress  number (u64), fraction (f64), text: of the running call

Past 400 lines because it is shipped as one script. After `preload` it runs no user code and forks a child for each function (forking.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from _thread import _count as thread_count  # also counts threads unknown to `threading`
from _thread import allocate_lock
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

DEFINE, CALL, CALL_FILE, PRELOAD, ASSIGN = 1, 2, 3, 4, 5
READY, ANSWER, ANSWER_FILE, RETIRE, PROGRESS = 1, 2, 3, 4, 7
HEAD = struct.Struct("<IB")
CALL_HEAD = struct.Struct("<Q32s")
ANSWER_HEAD = struct.Struct("<QBQI")
PROGRESS_HEAD = struct.Struct("<Qd")
PROGRESS_LETTERS = 200
INLINE_LIMIT_BYTES = 64 * 1024
READ_BYTES = 1 << 20
TEXT_LIMIT = 64 * 1024
PR_SET_CHILD_SUBREAPER = 36
UMASK = 0o022
HIGH = 200  # the runner's own descriptors, out of the reach of calls
RESULTS_AS_DATA = b"\ngpool:results=data\n"  # after the pickle's end; as in client/values.py
TRACE_END, TRACE_LENGTH = b"\ngpool:trace\n", 55
TRACE_AT = -TRACE_LENGTH - len(TRACE_END)
SHORT_TEXT, INT64 = 250, 1 << 63
INT, FLOAT = struct.Struct("<2sq"), struct.Struct("<2sd")  # frequent values; others: encoding.py
TEXT = struct.Struct("<2sI")
MOST_FIRST_PID = 16  # the first processes of a namespace have such numbers


class Baseline:
    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.environ_data: dict[Any, Any] = {}
        self.argv = [""]
        self.path = list(sys.path)

    def record_environ(self) -> None:
        self.environ = dict(os.environ)
        self.environ_data = dict(os.environ._data)  # type: ignore[attr-defined]

    def restore(self) -> None:
        if os.environ._data != self.environ_data:  # type: ignore[attr-defined]
            os.environ.clear()
            os.environ.update(self.environ)
            self.environ_data = dict(os.environ._data)  # type: ignore[attr-defined]
        if sys.argv != self.argv:
            sys.argv = list(self.argv)
        if sys.path != self.path:
            sys.path[:] = self.path


class AnswerPipe:
    """Frames to the agent. Threads of a call report progress beside the runner's answers."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.lock = allocate_lock()
        self.number, self.pid = 0, -1  # of the running call, and of the process that answers it

    def write(self, kind: int, body: bytes) -> None:
        frame = HEAD.pack(len(body), kind) + body
        with self.lock:
            written = os.write(self.descriptor, frame)
            while written < len(frame):
                written += os.write(self.descriptor, frame[written:])

    def progress(self, fraction: float, text: str) -> None:
        """Report progress of the running call; dropped while another thread writes, and in forked processes."""
        encoded = text[:PROGRESS_LETTERS].encode("utf-8", "replace")
        body = PROGRESS_HEAD.pack(self.number, fraction) + encoded
        if os.getpid() == self.pid and self.lock.acquire(False):
            try:
                os.write(
                    self.descriptor, HEAD.pack(len(body), PROGRESS) + body
                )  # whole: it is short
            finally:
                self.lock.release()


class FunctionRunner:
    def __init__(self, alone: bool, calls: int, answers: int, files: int, values: str) -> None:
        self.alone = alone
        self.calls = calls
        self.answers = AnswerPipe(answers)
        self.files = socket.socket(fileno=files)
        self.values = values
        self.functions: dict[bytes, Any] = {}
        self.as_data: set[bytes] = set()  # functions whose values are sent as data
        self.marker = b"\0\xff" + os.urandom(14)  # no text ends with its beginning
        self.home = os.getcwd()
        self.folders = [self.home, "/tmp", "/dev/shm"] if alone else [self.home]
        self.baseline = Baseline()
        self.pid = os.getpid()
        self.texts = [sys.stdout, sys.stderr]
        self.pipes = [(number, duplicate(number), identity(number)) for number in (1, 2)]
        self.parent = -1  # where a child reports its answers

    def serve(self) -> None:
        buffer = bytearray()
        start = 0
        read, head, size = os.read, HEAD.unpack_from, HEAD.size
        while True:
            held = len(buffer) - start
            if held >= size:
                length, kind = head(buffer, start)
                if held >= size + length:
                    body = bytes(memoryview(buffer)[start + size : start + size + length])
                    start += size + length
                    if kind == DEFINE:
                        self.functions[body[:32]] = body[32:]
                    elif kind == PRELOAD:
                        if beside("forking").warm(self, body, bytes(buffer[start:])):
                            return
                    elif kind == ASSIGN:
                        self.assign(body)
                    elif not self.call(kind, body):
                        self.write(RETIRE, b"")
                        return
                    continue
            if start:
                del buffer[:start]
                start = 0
            more = read(self.calls, READ_BYTES)
            if not more:
                return
            buffer += more

    def call(self, kind: int, body: bytes) -> bool:
        number, sha256 = CALL_HEAD.unpack_from(body)
        self.answers.number, self.answers.pid = number, self.pid
        threads = thread_count()
        began = time.perf_counter_ns()
        raised = 0
        text = ""
        if body.endswith(TRACE_END):  # a pickle ends with a dot
            os.environ["TRACEPARENT"] = body[TRACE_AT:].decode()[:TRACE_LENGTH]
        try:
            function = self.functions[sha256]
            if type(function) is bytes:
                if function.endswith(RESULTS_AS_DATA):
                    self.as_data.add(sha256)
                function = self.functions[sha256] = self.load_function(function)
            if kind == CALL_FILE:
                args, kwargs = self.receive()
            else:
                args, kwargs = pickle.loads(memoryview(body)[CALL_HEAD.size :])
            result = function(*args, **kwargs)
            value = self.encode(result) if sha256 in self.as_data else self.dump(result)
            del args, kwargs, result
        except BaseException as failure:  # noqa: BLE001 - any exception is the answer
            raised = 1
            value, text = self.describe(failure, sha256 in self.as_data)
            del failure
        if os.getpid() != self.pid:
            os._exit(0)  # a child forked by the function returned: the parent answers
        took = (time.perf_counter_ns() - began) // 1000
        clean = self.clean(threads)
        encoded = text.encode("utf-8", "backslashreplace") if text else b""
        head = ANSWER_HEAD.pack(number, raised, took, len(encoded))
        if len(value) > INLINE_LIMIT_BYTES:
            with open(f"{self.values}/{number}", "wb") as large:
                large.write(value)
            self.write(ANSWER_FILE, head + encoded)
        else:
            self.write(ANSWER, head + encoded + value)
        if self.parent >= 0:
            os.write(self.parent, beside("forking").after_answer(clean))
            if not clean:
                os._exit(0)
        return clean

    def adopt_orphans(self) -> None:
        """Become the parent of orphaned descendants, so that none escapes."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def assign(self, variables: bytes) -> None:
        pairs = (pair.partition(b"=") for pair in variables.split(b"\0") if pair)
        os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs})
        self.baseline.record_environ()

    def load_function(self, pickled: bytes) -> Any:
        try:
            return pickle.loads(pickled)
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                f"the function needs the module {missing.name!r}, which this node does not have",
                name=missing.name,
            ) from missing

    def receive(self) -> Any:
        _, descriptors, _, _ = socket.recv_fds(self.files, 1, 1)
        with open(descriptors[0], "rb") as arguments:
            return pickle.load(arguments)

    def encode(self, result: Any) -> bytes:
        kind = type(result)
        if kind is int and -INT64 <= result < INT64:
            return INT.pack(b"\x01i", result)
        if kind is float:
            return FLOAT.pack(b"\x01f", result)
        if kind is str and len(result) < SHORT_TEXT and result.isascii():
            return TEXT.pack(b"\x01s", len(result)) + bytes(result, "ascii")
        if result is None:
            return b"\x01N"
        return bytes(beside("encoding").encode(result, self.dump))

    def dump(self, result: object) -> bytes:
        try:
            try:
                return pickle.dumps(result, 5)
            except (pickle.PicklingError, AttributeError, TypeError, RecursionError, ImportError):
                return bytes(cloudpickle.dumps(result, 5))
        except Exception as refused:
            raise TypeError(
                f"the function returned a {type(result).__qualname__} that cannot be sent back: {refused}"
            ) from refused

    def describe(self, failure: BaseException, as_data: bool) -> tuple[bytes, str]:
        trace = failure.__traceback__.tb_next if failure.__traceback__ else None
        try:
            lines = traceback.format_exception(type(failure), failure, trace)
            text = "".join(lines)
        except Exception:  # noqa: BLE001 - `__str__` is user code too
            text = f"{type(failure).__qualname__} (its text cannot be made)"
        if len(text) > TEXT_LIMIT:
            text = text[: TEXT_LIMIT // 2] + "\n…\n" + text[-TEXT_LIMIT // 2 :]
        value = b""
        with contextlib.suppress(BaseException):  # user code runs in there too
            if as_data:
                value = beside("encoding").encode_exception(failure)
            elif isinstance(failure, Exception):  # SystemExit must not end the consumer
                pickled = cloudpickle.dumps(failure, 5)
                pickle.loads(pickled)
                value = pickled
        if not value and not as_data:
            last = text.strip().splitlines()[-1] if text.strip() else type(failure).__qualname__
            value = pickle.dumps(RuntimeError(last), 5)
        failure.__traceback__ = None
        return value, text

    def clean(self, threads: int) -> bool:
        self.tidy(self.marker)
        self.baseline.restore()
        return thread_count() <= threads

    def tidy(self, marker: bytes = b"") -> None:
        signal.alarm(0)
        os.umask(UMASK)
        self.restore_output()
        if self.alone:
            self.end_others()
        else:
            self.end_descendants()
        if marker:
            os.write(1, marker)
            os.write(2, marker)
        try:
            if os.getcwd() != self.home:
                os.chdir(self.home)
        except OSError:
            os.chdir(self.home)
        for folder in self.folders:
            names = os.listdir(folder)
            if names:
                empty(folder, names)

    def restore_output(self) -> None:
        texts = self.texts
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        for number, kept, first in self.pipes:
            if identity(number) != first:
                os.dup2(kept, number)
        if (
            sys.stdout is not texts[0]
            or sys.stderr is not texts[1]
            or texts[0].closed
            or texts[1].closed
        ):
            for at, stream in enumerate(texts):
                if stream.closed:
                    texts[at] = open(  # noqa: SIM115 - stays open
                        at + 1, "w", encoding="utf-8", errors="backslashreplace", closefd=False
                    )
                with contextlib.suppress(OSError):
                    texts[at].flush()
            sys.stdout, sys.stderr = texts
            sys.__stdout__, sys.__stderr__ = texts  # type: ignore[assignment, misc]

    def end_others(self) -> None:
        try:
            while True:
                # all of this namespace except its first process and this one
                os.kill(-1, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
                os.sched_yield()
        except ProcessLookupError:
            return

    def end_descendants(self) -> None:
        try:
            while True:
                if os.waitpid(-1, os.WNOHANG)[0]:
                    continue
                for pid in children():
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)
        except ChildProcessError:
            return

    def write(self, kind: int, body: bytes) -> None:
        self.answers.write(kind, body)


@functools.cache
def beside(name: str) -> Any:
    """Load a module that lies beside this script and on no module path."""
    path = os.path.join(os.path.dirname(__file__), f"{name}.py")
    module: Any = type(sys)(f"gpool_{name}")
    with open(path, "rb") as script:
        exec(compile(script.read(), path, "exec"), module.__dict__)
    return module


def duplicate(number: int) -> int:
    """Duplicate a pipe to a number that a call closing "all" descriptors hardly reaches."""
    return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, HIGH)


def identity(number: int) -> tuple[int, int] | None:
    try:
        facts = os.fstat(number)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def children() -> list[int]:
    found = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/children", "rb") as listing:
            found += [int(word) for word in listing.read().split()]
    return found


def empty(folder: str, names: list[str]) -> None:
    """Remove a call's files at any depth: deep directories are moved up first."""
    moved = 0
    pending = [f"{folder}/{name}" for name in names]
    while pending:
        path = pending.pop()
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
            continue
        os.chmod(path, 0o700)
        for name in os.listdir(path):
            inner = f"{path}/{name}"
            if os.path.isdir(inner) and not os.path.islink(inner):
                os.chmod(inner, 0o700)
                moved += 1
                higher = f"{folder}/.moved-{os.getpid()}-{moved}"
                os.rename(inner, higher)
                pending.append(higher)
            else:
                os.unlink(inner)
        os.rmdir(path)


def main(words: list[str]) -> int:
    alone = words[0] == "alone"
    if alone and os.getpid() > MOST_FIRST_PID:
        os.write(2, b"gpool: a runner that is alone must be in a process-id namespace of its own\n")
        return 2
    os.umask(UMASK)
    for number in words[1:4]:
        os.set_inheritable(int(number), False)
    values = "/values" if alone else os.path.join(os.path.dirname(os.getcwd()), "values")
    runner = FunctionRunner(alone, int(words[1]), int(words[2]), int(words[3]), values)
    if not alone:
        runner.adopt_orphans()
    sys.argv = [""]
    runner.baseline.record_environ()
    runner.functions[b""] = sys.modules["__main__"]  # keeps this module's globals alive
    sys.modules["__main__"] = type(sys)("__main__")  # a function's own `__main__`, not the runner's
    reports: Any = type(sys)("gpool_runner")  # found there by `gpool.progress`
    reports.progress = runner.answers.progress
    sys.modules["gpool_runner"] = reports
    gc.freeze()
    runner.write(READY, runner.marker)
    runner.serve()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads of a call must not delay the exit

"""The bridge: first process of a runner's container, between the engine's three streams and the runner's six.

`bridge.py RUNNER PACKAGES`; a script, standard library only. The engine gives a container stdin, stdout and stderr; a
runner also needs calls, answers and files, so all travel in frames: channel (u8), length (u32, little-endian), data.
  in   3 calls   ·   5 a file's bytes; an empty frame ends the file
  out  1 stdout   ·   2 stderr   ·   4 answers
Output printed before an answer is sent before it. The bridge also reaps orphans of calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import sys
import tempfile
from typing import Any

STDOUT, STDERR, CALLS, ANSWERS, FILES = 1, 2, 3, 4, 5
HEAD = struct.Struct("<BI")
READ_BYTES = 64 * 1024
PIPE_BYTES = 1 << 20
PR_SET_DUMPABLE = 4
BOOT = (
    "import sys; script, packages = sys.argv[1:3]; del sys.argv[:2]; sys.path.append(packages)\n"
    "with open(script, 'rb') as text: code = compile(text.read(), script, 'exec')\n"
    "__file__ = script; exec(code)"
)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class Bridge:
    def __init__(self, runner: str, packages: str) -> None:
        self.out, out_end = os.pipe()
        self.err, err_end = os.pipe()
        calls_end, self.calls = os.pipe()
        self.answers, answers_end = os.pipe()
        self.files, theirs = socket.socketpair()
        self.buffer = bytearray()
        self.file: Any = None
        self.open = {self.out: STDOUT, self.err: STDERR, self.answers: ANSWERS}
        for descriptor in self.open:
            os.set_blocking(descriptor, False)
        given = (calls_end, answers_end, theirs.fileno())
        self.child = os.fork()
        if self.child == 0:
            os.dup2(out_end, 1)
            os.dup2(err_end, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for descriptor in given:
                os.set_inheritable(descriptor, True)
            words = [sys.executable, "-B", "-c", BOOT, runner, packages, "alone"]
            os.execv(sys.executable, [*words, *(str(descriptor) for descriptor in given)])
        for descriptor in (out_end, err_end, calls_end, answers_end):
            os.close(descriptor)
        theirs.close()

    def send(self, channel: int, data: bytes) -> None:
        write_all(1, HEAD.pack(channel, len(data)) + data)

    def forward(self, descriptor: int, most: int) -> bool:
        moved = 0
        while moved < most and descriptor in self.open:
            try:
                data = os.read(descriptor, READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                del self.open[descriptor]
                break
            self.send(self.open[descriptor], data)
            moved += len(data)
        return moved > 0

    def pass_answers(self) -> None:
        try:
            data = os.read(self.answers, READ_BYTES)
        except BlockingIOError:
            return
        for stream in (self.out, self.err):
            self.forward(stream, 2 * PIPE_BYTES)  # printed before the answer: already in the pipe
        if data:
            self.send(ANSWERS, data)
        else:
            del self.open[self.answers]

    def take(self, channel: int, data: bytes) -> None:
        if channel == CALLS:
            with contextlib.suppress(BrokenPipeError):
                write_all(self.calls, data)
            return
        if self.file is None:
            self.file = tempfile.TemporaryFile(dir="/values")  # noqa: SIM115 - sent below
        if data:
            self.file.write(data)
            return
        self.file.flush()
        self.file.seek(0)
        with contextlib.suppress(OSError):
            socket.send_fds(self.files, [b"f"], [self.file.fileno()])
        self.file.close()
        self.file = None

    def receive(self) -> bool:
        data = os.read(0, READ_BYTES)
        self.buffer += data
        while len(self.buffer) >= HEAD.size:
            channel, length = HEAD.unpack_from(self.buffer)
            if len(self.buffer) < HEAD.size + length:
                break
            body = bytes(self.buffer[HEAD.size : HEAD.size + length])
            del self.buffer[: HEAD.size + length]
            self.take(channel, body)
        return bool(data)

    def serve(self) -> int:
        poll = select.poll()
        for descriptor in (0, *self.open):
            poll.register(descriptor, select.POLLIN)
        while self.answers in self.open:
            for descriptor, _ in poll.poll():
                if descriptor == 0:
                    if not self.receive():
                        os.kill(self.child, signal.SIGKILL)
                        poll.unregister(0)
                elif descriptor == self.answers:
                    self.pass_answers()
                else:
                    self.forward(descriptor, READ_BYTES)
                if descriptor != 0 and descriptor not in self.open:
                    poll.unregister(descriptor)
            self.reap()
        return self.finish()

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                gone = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if gone is None or gone.si_pid == self.child:
                    return
                os.waitpid(gone.si_pid, 0)

    def finish(self) -> int:
        _, status = os.waitpid(self.child, 0)
        for stream in (self.out, self.err):
            self.forward(stream, 2 * PIPE_BYTES)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code


def main(words: list[str]) -> int:
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # which the kernel does not deliver to a namespace's first process
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(
            PR_SET_DUMPABLE, 0, 0, 0, 0
        )  # functions must not write to this process
    bridge = Bridge(words[0], words[1])
    try:
        return bridge.serve()
    except BrokenPipeError:
        return 137  # the agent is gone


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)

"""The agent's end of a function runner: sends calls, receives answers and output in batches.

It loads no pickle and trusts no frame. The runner ends each call's stdout and stderr with a marker before it answers, so
the bytes between two markers belong to one call. While answers keep coming the pipes are read once per millisecond:
a busy runner costs one wake-up per batch.
One file because both classes read and write the frames of one protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpool.agent.runtime.bubblewrap.launcher_client import ProcessExit, StartedProcess
from gpool.agent.runtime.descriptors import ReadWatch, close_all, readable, writable
from gpool.agent.runtime.protocol import (
    BadOutput,
    CallAnswer,
    CallEvent,
    CallOutput,
    CallProgress,
    FunctionCall,
    SandboxExit,
    SandboxFailed,
)
from gpool.agent.runtime.work_directory import WorkDirectory
from gpool.core.model import INLINE_LIMIT_BYTES
from gpool.core.specs import progress

# As in runner/serve.py, which must not import this module; tests/agent/runtime/test_runner.py compares the two.
DEFINE, CALL, CALL_FILE, PRELOAD, ASSIGN = 1, 2, 3, 4, 5
TRACE_END = b"\ngpool:trace\n"  # as in runner/serve.py
READY, ANSWER, ANSWER_FILE, RETIRE, WARM, ENDED, PROGRESS = 1, 2, 3, 4, 5, 6, 7
HEAD = struct.Struct("<IB")
CALL_HEAD = struct.Struct("<IBQ32s")
ANSWER_HEAD = struct.Struct("<QBQI")
ENDED_BODY = struct.Struct("<QBQ")
PROGRESS_HEAD = struct.Struct("<Qd")
MARKER_BYTES = 16

MAX_FRAME_BYTES = INLINE_LIMIT_BYTES + 512 * 1024
PIPE_BYTES = 1 << 20
READ_BYTES = 256 * 1024
OUTPUT_AT_ONCE_BYTES = 64 * 1024
POLL_S = 0.001
LIVE_AFTER_S = 0.05
EXIT_WITHIN_S = 10.0  # after the last answer, to exit with its own code
READY_WITHIN_S = 180.0
WARM_WITHIN_S = 300.0  # large modules from a cold disk
CALLS_AT, ANSWERS_AT, FILES_AT = 3, 4, 5  # after stdin, stdout, stderr

ANSWERS = (ANSWER, ANSWER_FILE, ENDED)

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""Python version of runners without an environment: the agent's own."""

StartRunner = Callable[[Sequence[int], Sequence[int]], Awaitable[StartedProcess]]


def must_have(python: str) -> None:
    """Refuse another Python version, whose pickles may not load or load wrongly."""
    if python != PYTHON:
        raise SandboxFailed(f"this node has Python {PYTHON}, the function needs {python}")


class OutputStream:
    def __init__(self, descriptor: int, number: int) -> None:
        self.descriptor = descriptor
        self.number = number
        self.marker = b""
        self.segments: deque[bytes] = deque()  # complete ones, oldest first
        self.rest = b""  # of the running call
        self.ended = False

    def feed(self, data: bytes) -> None:
        parts = (self.rest + data).split(self.marker) if self.marker else [self.rest + data]
        self.rest = parts.pop()
        self.segments.extend(parts)

    def read(self, until: int) -> None:
        """Read until `until` segments are complete (0: any data), at most a full pipe.

        Markers precede the answer: its segment is in the pipe when the answer is read.
        """
        most = 2 * PIPE_BYTES if until else OUTPUT_AT_ONCE_BYTES
        while not self.ended and len(self.segments) < max(until, 1) and len(self.rest) < most:
            try:
                data = os.read(self.descriptor, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.ended = True
                return
            self.feed(data)

    def take_rest(self) -> bytes:
        cut = len(self.rest)
        for length in range(min(MARKER_BYTES - 1, cut), 0, -1):
            if self.marker and self.rest.endswith(self.marker[:length]):
                cut -= length
                break
        data, self.rest = self.rest[:cut], self.rest[cut:]
        return data


class RunnerReader:
    def __init__(self, out: int, err: int, answers: int) -> None:
        self.answers = answers
        self.streams = (OutputStream(out, 1), OutputStream(err, 2))
        self.over = False  # no more answers will come
        self.broken = False  # it violated the protocol
        self.retired = False  # it announced its end between two calls
        self._answered = False  # at least one call
        self._buffer = bytearray()

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.answers, *(stream.descriptor for stream in self.streams))

    def violation(self) -> None:
        self.over = self.broken = True

    def frames(self) -> list[bytes]:
        """Read whole frames, kind byte first; records the pipe's end and protocol violations."""
        with contextlib.suppress(BlockingIOError):
            while len(self._buffer) < READ_BYTES:
                data = os.read(self.answers, READ_BYTES)
                if not data:
                    self.over = True
                    break
                self._buffer += data
        frames = []
        start, held = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while held - start >= HEAD.size:
                length, kind = HEAD.unpack_from(view, start)
                if length > MAX_FRAME_BYTES:
                    self.violation()
                    break
                end = start + HEAD.size + length
                if end > held:
                    break
                if kind == READY and length == MARKER_BYTES and not self.streams[0].marker:
                    for stream in self.streams:
                        stream.marker = bytes(view[start + HEAD.size : end])
                elif kind == RETIRE:
                    # Only after an answer: a call that claims it would be retried for ever.
                    self.over, self.retired = True, self._answered
                elif kind in ANSWERS:
                    self._answered = True
                frames.append(bytes(view[start + HEAD.size - 1 : end]))
                start = end
        del self._buffer[:start]
        return frames

    def call_output(self) -> tuple[tuple[int, bytes], ...]:
        found = []
        for stream in self.streams:
            if not stream.segments:
                stream.read(1)
            data = stream.segments.popleft() if stream.segments else stream.take_rest()
            if data:
                found.append((stream.number, data))
        return tuple(found)

    def live_output(self, number: int) -> list[CallOutput]:
        found = []
        for stream in self.streams:
            if not stream.segments and stream.rest:
                data = stream.take_rest()
                if data:
                    found.append(CallOutput(number, stream.number, data))
        return found

    def failure_text(self) -> str:
        for stream in self.streams:
            stream.read(0)
        return self.streams[1].rest[-2000:].decode("utf-8", "replace").strip()


@dataclass(frozen=True, slots=True)
class RunnerHooks:
    place: WorkDirectory
    values: Path  # directory for large values
    quota_bytes: int
    judge: Callable[[ProcessExit, bytes], SandboxExit]
    release: Callable[[], None]
    judge_child: Callable[[int], SandboxExit] = SandboxExit
    """Turns the exit code of one function's process into its end; the sandbox lives on."""
    limit: Callable[[], None] = lambda: None
    """Sets the job's own limits on a sandbox prepared under others."""
    memory_used: Callable[[], int] = lambda: 0


class RunnerClient:
    """A `RunnerSandbox`, and a `WarmRunner` after `warm`."""

    def __init__(
        self,
        started: StartedProcess,
        reader: RunnerReader,
        calls: int,
        files: socket.socket,
        hooks: RunnerHooks,
    ) -> None:
        self._started = started
        self._reader = reader
        self._calls = calls
        self._files = files
        self._hooks = hooks
        self._watch = ReadWatch(reader.answers)
        self._waiting: deque[int] = deque()  # numbers sent and not answered
        self._writing = asyncio.Lock()
        self._assigned = False
        self.forks = False  # it has imported modules and forks a child for each function
        self._closed = False
        self._ended: SandboxExit | None = None

    async def assign(self, variables: Sequence[tuple[str, str]]) -> None:
        if self._assigned:
            raise SandboxFailed("a sandbox serves one user: this one is assigned already")
        self._assigned = True
        try:
            self._hooks.limit()
        except OSError as refused:
            raise SandboxFailed(f"cannot set limits: {refused}") from refused
        body = b"\0".join(f"{name}={value}".encode() for name, value in variables)
        await self._write(HEAD.pack(len(body), ASSIGN) + body)
        if self._started.is_over:
            raise SandboxFailed("the sandbox ended before it was needed")

    def memory_used(self) -> int:
        return self._hooks.memory_used()

    async def define(self, function: str, pickled: bytes) -> None:
        body = bytes.fromhex(function) + pickled
        await self._write(HEAD.pack(len(body), DEFINE) + body)

    async def send(self, calls: Sequence[FunctionCall]) -> None:
        frames = []
        for call in calls:
            sha256 = bytes.fromhex(call.function)
            trace = call.trace.encode() + TRACE_END if call.trace else b""
            if call.arguments_file is None:
                length = 40 + len(call.arguments) + len(trace)
                frames.append(CALL_HEAD.pack(length, CALL, call.number, sha256))
                frames.append(call.arguments)
            else:
                frames.append(CALL_HEAD.pack(40 + len(trace), CALL_FILE, call.number, sha256))
                await self._send_file(call.arguments_file)
            if trace:
                frames.append(trace)
            self._waiting.append(call.number)
        await self._write(b"".join(frames))

    async def events(self) -> AsyncIterator[Sequence[CallEvent]]:
        reader = self._reader
        live = False
        while not reader.over:
            batch = await self._drain(live)
            if batch:
                yield batch
                live = live and not any(isinstance(event, CallAnswer) for event in batch)
                if not reader.over and len(self._waiting) > 1 and not live:
                    await asyncio.sleep(POLL_S)
                    continue
            if reader.over:
                break
            if live:
                self._watch.close()  # one registration per descriptor
                streams = [s.descriptor for s in reader.streams if not s.ended]
                await readable([reader.answers, *streams])
            else:
                live = not await self._watch.wait(LIVE_AFTER_S)
        self._watch.close()
        if not reader.broken:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_WITHIN_S):
                    await self._started.exited()
        await self._started.kill()
        last = await self._drain(True)
        if last:
            yield last

    async def ended(self) -> SandboxExit:
        exit = await self._started.exited()
        if self._ended is None:
            judged = self._hooks.judge(exit, b"")
            retired = self._reader.retired and not self._reader.broken
            self._ended = replace(judged, retired=retired)
        return self._ended

    async def kill(self) -> None:
        await self._started.kill()

    async def remove(self) -> None:
        if self._closed:
            return
        self._closed = self._reader.over = True
        await self._started.kill()
        await self.ended()
        self._watch.close()
        close_all((self._calls, *self._reader.descriptors))
        self._files.close()
        await asyncio.to_thread(self._hooks.place.remove)
        self._hooks.release()

    async def wait_ready(self) -> None:
        await self._wait_for(READY, READY_WITHIN_S)

    async def warm(self, modules: Sequence[str]) -> None:
        body = b"\0".join(name.encode() for name in modules)
        await self._write(HEAD.pack(len(body), PRELOAD) + body)
        answer = await self._wait_for(WARM, WARM_WITHIN_S)
        self.forks = answer == bytes((WARM, 1))

    async def _wait_for(self, kind: int, within_s: float) -> bytes:
        try:
            async with asyncio.timeout(within_s):
                while not self._reader.over:
                    await readable([self._reader.answers])
                    for frame in self._reader.frames():
                        if frame[0] == kind:
                            return frame
        except TimeoutError:
            pass
        await self._started.kill()
        text = self._reader.failure_text()
        raise SandboxFailed(f"the runner did not start: {text or 'it printed nothing'}")

    async def _send_file(self, path: Path) -> None:
        with path.open("rb") as arguments:
            while True:
                try:
                    socket.send_fds(self._files, [b"f"], [arguments.fileno()])
                    return
                except BlockingIOError:
                    await writable(self._files.fileno())
                except OSError:
                    return  # the sandbox is ending: `events` ends

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            view = memoryview(data)
            while view and not self._reader.over:
                try:
                    view = view[os.write(self._calls, view) :]
                except BlockingIOError:
                    await writable(self._calls)
                except BrokenPipeError:
                    return  # the sandbox is ending: `events` ends

    async def _drain(self, live: bool) -> list[CallEvent]:
        reader = self._reader
        frames, newest = list[bytes](), b""
        for frame in reader.frames():
            if frame[0] in ANSWERS:
                frames.append(frame)
            elif frame[0] == PROGRESS:
                newest = frame
        if frames or live or reader.over:
            for stream in reader.streams:
                stream.read(len(frames))
        batch: list[CallEvent] = []
        for frame in frames:
            answer = self._ended_call(frame) if frame[0] == ENDED else self._answer(frame)
            if answer is None:
                reader.violation()
                break
            if frame[0] == ANSWER_FILE:
                answer = await self._with_value_file(answer)
            batch.append(answer)
        pending = sum(len(stream.rest) for stream in reader.streams)
        if self._waiting and (live or reader.over or pending >= OUTPUT_AT_ONCE_BYTES):
            batch += reader.live_output(self._waiting[0])
        if newest and self._waiting and (reported := _progress(newest, self._waiting[0])):
            batch.append(reported)
        return batch

    def _answer(self, frame: bytes) -> CallAnswer | None:
        """None if the frame is malformed or not for the oldest call."""
        at = 1 + ANSWER_HEAD.size
        if not self._waiting or len(frame) < at:
            return None
        number, raised, took, length = ANSWER_HEAD.unpack_from(frame, 1)
        if number != self._waiting[0]:
            return None
        self._waiting.popleft()
        text = frame[at : at + length].decode("utf-8", "replace") if length else ""
        value = frame[at + length :] if frame[0] == ANSWER else b""
        printed = self._reader.call_output()
        return CallAnswer(number, bool(raised), value, text, took, printed)

    def _ended_call(self, frame: bytes) -> CallAnswer | None:
        if not self._waiting or len(frame) != 1 + ENDED_BODY.size or not self.forks:
            return None
        number, code, took = ENDED_BODY.unpack_from(frame, 1)
        if number != self._waiting[0]:
            return None
        self._waiting.popleft()
        ended = self._hooks.judge_child(code)
        return CallAnswer(number, True, b"", "", took, self._reader.call_output(), ended=ended)

    async def _with_value_file(self, answer: CallAnswer) -> CallAnswer:
        hooks = self._hooks
        try:
            path = await asyncio.to_thread(
                hooks.place.take_value, str(answer.number), hooks.values, hooks.quota_bytes
            )
        except (BadOutput, OSError) as bad:
            text = f"the function's value cannot be collected: {bad}"
            return replace(answer, raised=True, value=b"", error_text=text)
        return replace(answer, value_file=path)


def _progress(frame: bytes, running: int) -> CallProgress | None:
    """None if the frame is malformed or of a call that has ended."""
    if len(frame) < 1 + PROGRESS_HEAD.size:
        return None
    number, fraction = PROGRESS_HEAD.unpack_from(frame, 1)
    text = frame[1 + PROGRESS_HEAD.size :][: progress.MAX_FILE_BYTES].decode("utf-8", "replace")
    found = progress.checked(progress.millionths(fraction), text)
    return CallProgress(number, *found) if number == running else None


async def open_runner(
    start: StartRunner, hooks: RunnerHooks, preload: Sequence[str] = ()
) -> RunnerClient:
    """Wait until it accepts calls; else release place and slot and raise `SandboxFailed`."""
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    calls_end, calls = os.pipe()
    answers, answers_end = os.pipe()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    for descriptor in (out, err, calls, answers):
        os.set_blocking(descriptor, False)
        with contextlib.suppress(OSError):  # past the user's allowance: the default size will do
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    given = (
        os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC),
        out_end,
        err_end,
        calls_end,
        answers_end,
        theirs.detach(),
    )
    try:
        started = await start(given, (CALLS_AT, ANSWERS_AT, FILES_AT))
    except BaseException:
        close_all((out, err, calls, answers))
        ours.close()
        hooks.place.remove()
        hooks.release()
        raise
    runner = RunnerClient(started, RunnerReader(out, err, answers), calls, ours, hooks)
    try:
        await runner.wait_ready()
        if preload:
            await runner.warm(preload)
    except BaseException:
        await runner.remove()
        raise
    return runner

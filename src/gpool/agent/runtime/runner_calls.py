"""The agent's end of a runner: calls out, answers and output in, by the batch. It loads no pickle and trusts no frame.

Three pipes come from the runner: answers, stdout, stderr. The runner ends each call's output with a marker on both
streams before it answers, so what lies between two markers is one call's. While answers keep coming the pipes are
looked at once a millisecond, not once a call: a busy runner costs the agent a wake-up a batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pickle
import socket
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpool.agent.runtime.bubblewrap.launcher_client import ProcessExit, StartedProcess
from gpool.agent.runtime.descriptor_wait import readable, writable
from gpool.agent.runtime.protocol import (
    BadOutput,
    CallAnswer,
    CallOutput,
    FunctionCall,
    SandboxExit,
    SandboxFailed,
)
from gpool.agent.runtime.work_directory import WorkDirectory
from gpool.core.model import INLINE_LIMIT_BYTES

# As in runner/serve.py, which must not import us; tests/agent/runtime/test_runner.py holds the two together.
DEFINE, CALL, CALL_FILE, PRELOAD, ASSIGN = 1, 2, 3, 4, 5
READY, ANSWER, ANSWER_FILE, RETIRE, WARM, ENDED = 1, 2, 3, 4, 5, 6
HEAD = struct.Struct("<IB")
CALL_HEAD = struct.Struct("<IBQ32s")
ANSWER_HEAD = struct.Struct("<QBQI")
ENDED_BODY = struct.Struct("<QBQ")
MARKER_BYTES = 16

MAX_FRAME_BYTES = INLINE_LIMIT_BYTES + 512 * 1024
PIPE_BYTES = 1 << 20
READ_BYTES = 256 * 1024
OUTPUT_AT_ONCE_BYTES = 64 * 1024
POLL_S = 0.001
LIVE_AFTER_S = 0.05
LAST_BREATH_S = 10.0  # to exit with its own code after the last answer
READY_WITHIN_S = 180.0
WARM_WITHIN_S = 300.0  # large modules from a cold disk
CALLS_AT, ANSWERS_AT, FILES_AT = 3, 4, 5  # after stdin, stdout, stderr

ANSWERS = (ANSWER, ANSWER_FILE, ENDED)

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""What runners run: the agent's own."""

Start = Callable[[Sequence[int], Sequence[int]], Awaitable[StartedProcess]]


def must_have(python: str) -> None:
    """Refuse functions for another Python: their pickles would not load, or worse, would."""
    if python != PYTHON:
        raise SandboxFailed(f"this node has Python {PYTHON}, the function needs {python}")


class OutputStream:
    """stdout or stderr: cut at the markers."""

    def __init__(self, descriptor: int, number: int) -> None:
        self.descriptor = descriptor
        self.number = number
        self.marker = b""
        self.segments: deque[bytes] = deque()  # whole ones, oldest first
        self.rest = b""  # of the call that runs now
        self.ended = False

    def feed(self, data: bytes) -> None:
        parts = (self.rest + data).split(self.marker) if self.marker else [self.rest + data]
        self.rest = parts.pop()
        self.segments.extend(parts)

    def read(self, until: int) -> None:
        """What is there; until so many segments are whole (0: whatever comes), but no more than lies in a full pipe.

        Markers are written before the answer: what belongs to one lies in the pipe when the answer is read.
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
        """All of it but what may be the beginning of a marker."""
        cut = len(self.rest)
        for length in range(min(MARKER_BYTES - 1, cut), 0, -1):
            if self.marker and self.rest.endswith(self.marker[:length]):
                cut -= length
                break
        data, self.rest = self.rest[:cut], self.rest[cut:]
        return data


@dataclass(frozen=True, slots=True)
class RunnerHooks:
    """What a runner needs of its runtime besides being started."""

    place: WorkDirectory
    values: Path  # where large values are taken to
    quota_bytes: int
    judge: Callable[[ProcessExit, bytes], SandboxExit]
    release: Callable[[], None]
    judge_child: Callable[[int], SandboxExit] = SandboxExit
    """Of one function's process that ended with this code, the sandbox being as it was."""
    limit: Callable[[], None] = lambda: None
    """Puts the job's own limits on what was prepared under others."""
    memory_used: Callable[[], int] = lambda: 0


class RunnerClient:
    """A `RunnerSandbox`."""

    def __init__(
        self,
        started: StartedProcess,
        ends: tuple[int, int, int, int, socket.socket],
        keeping: RunnerHooks,
    ) -> None:
        out, err, self._calls, self._answers, self._files = ends
        self._started = started
        self._keeping = keeping
        self._streams = (OutputStream(out, 1), OutputStream(err, 2))
        self._buffer = bytearray()
        self._waiting: deque[int] = deque()  # numbers sent and not answered
        self._writing = asyncio.Lock()
        self._over = False  # no more answers will come
        self._broken = False  # it said what no runner of ours says
        self._answered = False  # at least one call
        self._retired = False  # it said that it would end, between two calls
        self._assigned = False
        self.forks = False  # it has imported modules and forks a child for each function
        self._closed = False
        self._ended: SandboxExit | None = None

    # ---- the door

    async def assign(self, variables: Sequence[tuple[str, str]]) -> None:
        """To one user's work, once: the limits are set, then the variables handed over. `SandboxFailed` when it is gone."""
        if self._assigned:
            raise SandboxFailed("a sandbox serves one user: this one is assigned already")
        self._assigned = True
        try:
            self._keeping.limit()
        except OSError as refused:
            raise SandboxFailed(f"cannot set limits: {refused}") from refused
        body = b"\0".join(f"{name}={value}".encode() for name, value in variables)
        await self._write(HEAD.pack(len(body), ASSIGN) + body)
        if self._started.is_over:
            raise SandboxFailed("the sandbox ended before it was needed")

    def memory_used(self) -> int:
        """Bytes that all of it holds now; 0 where nobody counts."""
        return self._keeping.memory_used()

    async def define(self, function: str, pickled: bytes) -> None:
        body = bytes.fromhex(function) + pickled
        await self._write(HEAD.pack(len(body), DEFINE) + body)

    async def send(self, calls: Sequence[FunctionCall]) -> None:
        frames = []
        for call in calls:
            sha256 = bytes.fromhex(call.function)
            if call.arguments_file is None:
                length = 40 + len(call.arguments)
                frames.append(CALL_HEAD.pack(length, CALL, call.number, sha256))
                frames.append(call.arguments)
            else:
                frames.append(CALL_HEAD.pack(40, CALL_FILE, call.number, sha256))
                await self._hand_over(call.arguments_file)
            self._waiting.append(call.number)
        await self._write(b"".join(frames))

    async def events(self) -> AsyncIterator[Sequence[CallAnswer | CallOutput]]:
        live = False
        while not self._over:
            batch = await self._drain(live)
            if batch:
                yield batch
                live = live and not any(isinstance(event, CallAnswer) for event in batch)
                if not self._over and len(self._waiting) > 1 and not live:
                    await asyncio.sleep(POLL_S)
                    continue
            if self._over:
                break
            watched = [self._answers]
            if live:
                watched += [s.descriptor for s in self._streams if not s.ended]
            live = not await readable(watched, LIVE_AFTER_S if not live else None) or live
        if not self._broken:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_BREATH_S):
                    await self._started.exited()
        await self._started.kill()
        last = await self._drain(True)
        if last:
            yield last

    async def ended(self) -> SandboxExit:
        exit = await self._started.exited()
        if self._ended is None:
            judged = self._keeping.judge(exit, b"")
            self._ended = replace(judged, retired=self._retired and not self._broken)
        return self._ended

    async def kill(self) -> None:
        await self._started.kill()

    async def remove(self) -> None:
        if self._closed:
            return
        self._closed = self._over = True
        await self._started.kill()
        await self.ended()
        for descriptor in (self._calls, self._answers, *(s.descriptor for s in self._streams)):
            os.close(descriptor)
        self._files.close()
        await asyncio.to_thread(self._keeping.place.remove)
        self._keeping.release()

    # ---- how

    async def wait_ready(self) -> None:
        """Until the runner has said its marker; `SandboxFailed` with what it printed when it does not."""
        await self._wait_for(READY, READY_WITHIN_S)

    async def warm(self, modules: Sequence[str]) -> None:
        """Until it has imported what it can of them."""
        body = b"\0".join(name.encode() for name in modules)
        await self._write(HEAD.pack(len(body), PRELOAD) + body)
        said = await self._wait_for(WARM, WARM_WITHIN_S)
        self.forks = said == bytes((WARM, 1))

    async def _wait_for(self, kind: int, within_s: float) -> bytes:
        try:
            async with asyncio.timeout(within_s):
                while not self._over:
                    await readable([self._answers])
                    for frame in self._read_answers():
                        if frame[0] == kind:
                            return frame
        except TimeoutError:
            pass
        await self._started.kill()
        for stream in self._streams:
            stream.read(0)
        text = self._streams[1].rest[-2000:].decode("utf-8", "replace").strip()
        raise SandboxFailed(f"the runner did not start: {text or 'it said nothing'}")

    async def _hand_over(self, path: Path) -> None:
        with path.open("rb") as arguments:
            while True:
                try:
                    socket.send_fds(self._files, [b"f"], [arguments.fileno()])
                    return
                except BlockingIOError:
                    await writable(self._files.fileno())
                except OSError:
                    return  # the sandbox is ending: the events say so

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            view = memoryview(data)
            while view and not self._over:
                try:
                    view = view[os.write(self._calls, view) :]
                except BlockingIOError:
                    await writable(self._calls)
                except BrokenPipeError:
                    return  # the sandbox is ending: the events say so

    def _read_answers(self) -> list[bytes]:
        """Whole frames, the kind first; notes the end of the pipe and a runner that does not keep to its words."""
        with contextlib.suppress(BlockingIOError):
            while len(self._buffer) < READ_BYTES:
                data = os.read(self._answers, READ_BYTES)
                if not data:
                    self._over = True
                    break
                self._buffer += data
        frames = []
        start, held = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while held - start >= HEAD.size:
                length, kind = HEAD.unpack_from(view, start)
                if length > MAX_FRAME_BYTES:
                    self._over = self._broken = True
                    break
                end = start + HEAD.size + length
                if end > held:
                    break
                if kind == READY and length == MARKER_BYTES and not self._streams[0].marker:
                    for stream in self._streams:
                        stream.marker = bytes(view[start + HEAD.size : end])
                elif kind == RETIRE:
                    # Only after an answer: else a call that claims it would be tried again for ever.
                    self._over, self._retired = True, self._answered
                elif kind in ANSWERS:
                    self._answered = True
                frames.append(bytes(view[start + HEAD.size - 1 : end]))
                start = end
        del self._buffer[:start]
        return frames

    async def _drain(self, live: bool) -> list[CallAnswer | CallOutput]:
        frames = [f for f in self._read_answers() if f[0] in ANSWERS]
        out, err = self._streams
        if frames or live or self._over:
            out.read(len(frames))
            err.read(len(frames))
        batch: list[CallAnswer | CallOutput] = []
        for frame in frames:
            if frame[0] == ENDED:
                if not self._charge(frame, batch):
                    break
                continue
            if not self._waiting or len(frame) < 1 + ANSWER_HEAD.size:
                self._over = self._broken = True
                break
            number, raised, took, length = ANSWER_HEAD.unpack_from(frame, 1)
            if number != self._waiting[0]:
                self._over = self._broken = True
                break
            self._waiting.popleft()
            at = 1 + ANSWER_HEAD.size
            text = frame[at : at + length].decode("utf-8", "replace") if length else ""
            printed = self._printed()
            if frame[0] == ANSWER:
                value = frame[at + length :]
                batch.append(CallAnswer(number, bool(raised), value, text, took, printed))
            else:
                batch.append(await self._large(number, bool(raised), text, took, printed))
        if live or self._over or len(out.rest) + len(err.rest) >= OUTPUT_AT_ONCE_BYTES:
            for stream in self._streams:
                if self._waiting and not stream.segments and stream.rest:
                    data = stream.take_rest()
                    if data:
                        batch.append(CallOutput(self._waiting[0], stream.number, data))
        return batch

    def _charge(self, frame: bytes, batch: list[CallAnswer | CallOutput]) -> bool:
        """The child that served a call ended with it; False when the frame is none of ours."""
        size = 1 + ENDED_BODY.size
        if not self._waiting or len(frame) != size or not self.forks:
            self._over = self._broken = True
            return False
        number, code, took = ENDED_BODY.unpack_from(frame, 1)
        if number != self._waiting[0]:
            self._over = self._broken = True
            return False
        self._waiting.popleft()
        ended = self._keeping.judge_child(code)
        batch.append(CallAnswer(number, True, b"", "", took, self._printed(), ended=ended))
        return True

    def _printed(self) -> tuple[tuple[int, bytes], ...]:
        """The oldest whole segments: the markers were written before the answer."""
        found = []
        for stream in self._streams:
            if not stream.segments:
                stream.read(1)
            data = stream.segments.popleft() if stream.segments else stream.take_rest()
            if data:
                found.append((stream.number, data))
        return tuple(found)

    async def _large(
        self,
        number: int,
        raised: bool,
        text: str,
        took: int,
        printed: tuple[tuple[int, bytes], ...],
    ) -> CallAnswer:
        keeping = self._keeping
        try:
            path = await asyncio.to_thread(
                keeping.place.take_value, str(number), keeping.values, keeping.quota_bytes
            )
        except (BadOutput, OSError) as bad:
            told = f"the function's value cannot be taken: {bad}"
            return CallAnswer(number, True, pickle.dumps(RuntimeError(told)), told, took, printed)
        return CallAnswer(number, raised, b"", text, took, printed, path)


async def open_runner(
    start: Start, keeping: RunnerHooks, preload: Sequence[str] = ()
) -> RunnerClient:
    """A runner that is ready for calls; or `SandboxFailed`, and then place and slot are given back already."""
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
        for descriptor in (out, err, calls, answers):
            os.close(descriptor)
        ours.close()
        keeping.place.remove()
        keeping.release()
        raise
    runner = RunnerClient(started, (out, err, calls, answers, ours), keeping)
    try:
        await runner.wait_ready()
        if preload:
            await runner.warm(preload)
    except BaseException:
        await runner.remove()
        raise
    return runner

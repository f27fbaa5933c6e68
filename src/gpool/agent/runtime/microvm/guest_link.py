"""The agent's end of the line to a guest: words and bytes both ways, by credit. It waits for nothing without a limit.

The guest may be in the task's hands, its kernel too. So every frame has a greatest length, every stream a window that
the guest may not overrun, every answer a time, and whoever does not keep to it is `GuestViolation` about: the machine is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpool.agent.runtime.bubblewrap.launcher_client import ProcessExit
from gpool.agent.runtime.descriptor_wait import readable, writable
from gpool.agent.runtime.microvm import guest
from gpool.agent.runtime.microvm.guest_outputs import OutputCollection, printable
from gpool.agent.runtime.protocol import BadOutput, SandboxFailed, StagedInput
from gpool.core.model import OutputFile
from gpool.core.specs.paths import checked

MOST_FRAME_BYTES = 64 * 1024
MOST_BRACKETS = 5000  # more than any name can hold; deeper ones have ended a Python by its C stack
FILE_CHUNK_BYTES = 256 * 1024
STALLED_AFTER_S = 60.0
MOST_DROPPED_BYTES = 64 << 20  # of outputs that were refused while they came
KILLED = 137


class GuestViolation(Exception):
    """The guest said what ours never says."""


@dataclass(frozen=True, slots=True)
class GuestPipes:
    """The agent's ends: where what comes is written, and where what goes is read. -1: there is none."""

    out: int
    err: int
    answers: int = -1
    calls: int = -1
    files: socket.socket | None = None

    def close(self) -> None:
        for descriptor in (self.out, self.err, self.answers, self.calls):
            if descriptor >= 0:
                os.close(descriptor)
        if self.files is not None:
            self.files.close()


class _Inflow:
    """From one stream of the guest's into a pipe, and credit back for what the pipe took."""

    def __init__(
        self, stream: int, descriptor: int, credit: Callable[[int, int], Awaitable[None]]
    ) -> None:
        self._stream = stream
        self._descriptor = descriptor
        self._credit = credit
        self._waiting: deque[bytes] = deque()
        self._held = 0
        self._stirred = asyncio.Event()
        self._last = False
        os.set_blocking(descriptor, False)

    def take(self, data: bytes) -> None:
        if self._last:
            return  # it came after the end
        self._held += len(data)
        if self._held > guest.WINDOW_BYTES:
            raise GuestViolation("it sent more than it had credit for")
        self._waiting.append(data)
        self._stirred.set()

    def finish(self) -> None:
        """Nothing more will come; the pipe is closed behind the last byte."""
        self._last = True
        self._stirred.set()

    async def run(self) -> None:
        reads = True
        try:
            while self._waiting or not self._last:
                if not self._waiting:
                    self._stirred.clear()
                    await self._stirred.wait()
                    continue
                view = memoryview(self._waiting.popleft())
                size = len(view)
                while view and reads:
                    try:
                        view = view[os.write(self._descriptor, view) :]
                    except BlockingIOError:
                        await writable(self._descriptor)
                    except BrokenPipeError:
                        reads = False  # nobody wants it: the guest goes on as if
                self._held -= size
                await self._credit(self._stream, size)
        finally:
            os.close(self._descriptor)


class GuestConnection:
    """One guest's line. `over` is done when the command has ended or the machine is gone, whichever is first."""

    def __init__(self, connection: socket.socket, pipes: GuestPipes) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._pipes = pipes
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._writing = asyncio.Lock()
        loop = asyncio.get_running_loop()
        self._hello: asyncio.Future[None] = loop.create_future()
        self._started: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[ProcessExit] = loop.create_future()
        self.out_of_memory = False
        self.lie = ""
        self._inflows = {
            stream: _Inflow(stream, descriptor, self._give_credit)
            for stream, descriptor in (
                (guest.OUT, pipes.out),
                (guest.ERR, pipes.err),
                (guest.ANSWERS, pipes.answers),
            )
            if descriptor >= 0
        }
        self._call_credit = guest.WINDOW_BYTES
        self._call_room = asyncio.Event()
        self._taking: OutputCollection | None = None
        self._taken: asyncio.Future[None] | None = None
        self._stirred = asyncio.Event()
        self._number = 0
        self._stale = False  # what comes now is still of a request that was given up
        self._dropped_bytes = 0
        self._one_taking = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self.on_lie: Callable[[], Awaitable[None]] | None = None

    # ---- what the sandbox asks for

    async def open(self, within_s: float) -> None:
        """Until the guest has said hello; `SandboxFailed` when it does not."""
        self._reader, self._writer = await asyncio.open_connection(
            sock=self._connection, limit=1 << 20
        )
        self._tasks.append(asyncio.create_task(self._listen()))
        self._tasks += [asyncio.create_task(inflow.run()) for inflow in self._inflows.values()]
        await self._patiently(self._hello, within_s, "the guest did not boot")

    async def begin(
        self, job: Mapping[str, object], inputs: Sequence[StagedInput], within_s: float
    ) -> None:
        await self._say(word="begin", **job)
        for staged in inputs:
            await self._send_file(
                staged.source, word="file", path=checked(staged.path), executable=staged.executable
            )
        await self._say(word="go")
        await self._patiently(self._started, within_s, "the guest did not start the command")
        if self._pipes.calls >= 0:
            self._tasks.append(asyncio.create_task(self._pass_calls(self._pipes.calls)))
        if self._pipes.files is not None:
            self._tasks.append(asyncio.create_task(self._pass_files(self._pipes.files)))

    async def warn(self) -> None:
        await self._say(word="warn")

    async def collect(
        self, wanted: Sequence[str], into: Path, quota_bytes: int
    ) -> list[OutputFile]:
        return await self._take(
            "collect", OutputCollection(wanted, into, quota_bytes), quota_bytes, wanted=list(wanted)
        )

    async def take_value(self, name: str, into: Path, quota_bytes: int) -> Path:
        found = await self._take(
            "take", OutputCollection([name], into, quota_bytes), quota_bytes, name=name
        )
        return into / found[0].sha256

    def gone(self, exit: ProcessExit) -> None:
        """The machine has ended, whatever the guest said or did not say before."""
        if not self.over.done():
            code = KILLED if exit.killed else exit.code
            self.over.set_result(ProcessExit(code, ran=False, killed=exit.killed, lost=exit.lost))
        self._finish(SandboxFailed("the guest ended"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._tasks:  # never opened: the pipes are still ours
            self._pipes.close()
        else:
            GuestPipes(-1, -1, calls=self._pipes.calls, files=self._pipes.files).close()
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        else:
            self._connection.close()

    # ---- in

    async def _listen(self) -> None:
        reader = self._reader
        assert reader is not None
        try:
            while True:
                length, stream = guest.HEAD.unpack(await reader.readexactly(guest.HEAD.size))
                if length > MOST_FRAME_BYTES:
                    raise GuestViolation(f"it sent a frame of {length} bytes")
                self._hear(stream, await reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the monitor's end says the rest
        except (
            GuestViolation,
            struct.error,
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
        ) as lie:
            self.lie = printable(lie)
            self._finish(SandboxFailed(f"the guest does not keep to its words: {self.lie}"))
            if self.on_lie is not None:
                await self.on_lie()

    def _hear(self, stream: int, body: bytes) -> None:
        if stream in self._inflows:
            self._inflows[stream].take(body)
        elif stream == guest.FILE_OUT:
            self._hear_bytes(body)
        elif stream == guest.CREDIT:
            which, more = guest.CREDIT_BODY.unpack(body)
            self._call_credit += more
            if which != guest.CALLS or self._call_credit > guest.WINDOW_BYTES:
                raise GuestViolation("it gave credit it had not got")
            self._call_room.set()
        elif stream == guest.WORDS:
            if body.count(b"[") + body.count(b"{") > MOST_BRACKETS:
                raise GuestViolation("it sent a word too deep to read")
            word = json.loads(body)
            self._hear_word(str(word["word"]), word)
        else:
            raise GuestViolation(f"it sent on stream {stream}")

    def _hear_word(self, name: str, word: Mapping[str, object]) -> None:
        if name == "hello" and not self._hello.done():
            if word.get("version") != guest.VERSION:
                raise GuestViolation("it is of another version")
            self._hello.set_result(None)
        elif name == "started" and not self._started.done():
            self._started.set_result(None)
        elif name == "failed" and not self._started.done():
            self._started.set_exception(SandboxFailed(printable(word.get("text"))))
        elif name == "ended" and self._started.done():
            code, oom = word.get("code"), word.get("oom")
            if type(code) is not int or not 0 <= code <= 255:
                raise GuestViolation("it ended with no exit code")
            self.out_of_memory = oom is True
            if not self.over.done():
                self.over.set_result(ProcessExit(code, ran=True, killed=False))
            for inflow in self._inflows.values():
                inflow.finish()
        elif name in ("output", "collected", "refused"):
            self._hear_taking(name, word)
        else:
            raise GuestViolation(f"it said {name}")

    def _hear_taking(self, name: str, word: Mapping[str, object]) -> None:
        taking, taken = self._taking, self._taken
        if taking is None or taken is None or taken.done() or word.get("number") != self._number:
            return  # of an answer that was given up
        self._stale = False
        self._stirred.set()
        try:
            if name == "output":
                taking.announce(word)
            elif name == "collected":
                taken.set_result(None)
            else:
                raise BadOutput(printable(word.get("text")))
        except (BadOutput, OSError) as bad:
            taken.set_exception(bad)

    def _hear_bytes(self, body: bytes) -> None:
        taking, taken = self._taking, self._taken
        if taking is None or taken is None or taken.done() or self._stale:
            self._dropped_bytes += len(body)
            if self._dropped_bytes > MOST_DROPPED_BYTES:
                raise GuestViolation("it sends outputs nobody asked for")
            return
        self._stirred.set()
        try:
            taking.take(body)
        except (BadOutput, OSError) as bad:
            taken.set_exception(bad)

    async def _take(
        self, word: str, taking: OutputCollection, quota_bytes: int, **words: object
    ) -> list[OutputFile]:
        async with self._one_taking:
            self._number += 1
            self._dropped_bytes = 0
            self._taking = taking
            taken = self._taken = asyncio.get_running_loop().create_future()
            try:
                await self._say(word=word, number=self._number, most=quota_bytes, **words)
                while not taken.done():
                    self._stirred.clear()
                    if self.lie or self._reader is None or self._reader.at_eof():
                        raise BadOutput("the guest ended before its outputs were fetched")
                    stirred = asyncio.create_task(self._stirred.wait())
                    done, _ = await asyncio.wait(
                        (taken, stirred),
                        timeout=STALLED_AFTER_S,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    stirred.cancel()
                    if not done:
                        raise BadOutput(f"the guest sent nothing for {STALLED_AFTER_S:.0f} s")
                taken.result()
                return taking.finish()
            except BadOutput:
                self._stale = True
                await self._say(word="stop")  # else it goes on sending what nobody wants
                raise
            finally:
                taking.drop()
                self._taking = self._taken = None

    # ---- out

    async def _say(self, **words: object) -> None:
        await self._put(guest.WORDS, json.dumps(words).encode())

    async def _put(self, stream: int, body: bytes) -> None:
        if self._writer is None:
            return
        with contextlib.suppress(ConnectionError):  # it is ending: its end is told elsewhere
            async with self._writing:
                self._writer.write(guest.HEAD.pack(len(body), stream) + body)
                await self._writer.drain()

    async def _give_credit(self, stream: int, size: int) -> None:
        await self._put(guest.CREDIT, guest.CREDIT_BODY.pack(stream, size))

    async def _send_file(self, source: Path, **words: object) -> None:
        with source.open("rb") as data:
            await self._send_open(data.fileno(), **words)

    async def _send_open(self, descriptor: int, **words: object) -> None:
        left = os.fstat(descriptor).st_size
        await self._say(size=left, **words)
        while left > 0 and not self.over.done():
            piece = await asyncio.to_thread(os.read, descriptor, min(FILE_CHUNK_BYTES, left))
            if not piece:
                raise SandboxFailed("an input shrank while it was read")
            left -= len(piece)
            await self._put(guest.FILE_IN, piece)

    async def _pass_calls(self, descriptor: int) -> None:
        while True:
            if self._call_credit <= 0:
                self._call_room.clear()
                await self._call_room.wait()
                continue
            try:
                data = os.read(descriptor, min(MOST_FRAME_BYTES, self._call_credit))
            except BlockingIOError:
                await readable([descriptor])
                continue
            if not data:
                return
            self._call_credit -= len(data)
            await self._put(guest.CALLS, data)

    async def _pass_files(self, files: socket.socket) -> None:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(files, 1, 1)
            except BlockingIOError:
                await readable([files.fileno()])
                continue
            if not data:
                return
            try:
                await self._send_open(descriptors[0], word="arguments")
            finally:
                os.close(descriptors[0])

    # ---- ends

    async def _patiently(self, said: asyncio.Future[None], within_s: float, failed: str) -> None:
        try:
            async with asyncio.timeout(within_s):
                await asyncio.shield(said)
        except TimeoutError as silent:
            raise SandboxFailed(f"{failed} within {within_s:.0f} s") from silent

    def _finish(self, failure: SandboxFailed) -> None:
        for waiting in (self._hello, self._started):
            if not waiting.done():
                waiting.set_exception(failure)
                waiting.exception()  # whoever waits hears it; nobody need
        if self._taken is not None and not self._taken.done():
            self._taken.set_exception(BadOutput("the guest ended before its outputs were fetched"))
        for inflow in self._inflows.values():
            inflow.finish()
        self._stirred.set()

"""The agent's end of the connection to a guest, without any unlimited wait.

The guest, kernel included, may be under the task's control: frames have a maximal length, streams a window, answers a
timeout; a violation ends the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from gpool.agent.runtime.bubblewrap.launcher_client import ProcessExit
from gpool.agent.runtime.descriptors import readable
from gpool.agent.runtime.microvm import guest
from gpool.agent.runtime.microvm.guest_outputs import (
    MOST_FRAME_BYTES,
    CallOutflow,
    FrameWriter,
    GuestPipes,
    GuestViolation,
    OutputInflow,
    OutputRequests,
    printable,
)
from gpool.agent.runtime.protocol import SandboxFailed, StagedInput
from gpool.core.model import OutputFile
from gpool.core.specs.fields import checked_path

MOST_BRACKETS = 5000  # more than any message needs; deeper nesting has overflowed Python's C stack
KILLED = 137


class GuestConnection:
    """`over` is done when the command has ended or the machine is gone."""

    def __init__(self, connection: socket.socket, pipes: GuestPipes) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._pipes = pipes
        self._reader: asyncio.StreamReader | None = None
        self._writer = FrameWriter()
        loop = asyncio.get_running_loop()
        self._hello: asyncio.Future[None] = loop.create_future()
        self._started: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[ProcessExit] = loop.create_future()
        self.out_of_memory = False
        self.violation = ""
        streams = (guest.OUT, pipes.out), (guest.ERR, pipes.err), (guest.ANSWERS, pipes.answers)
        self._inflows = {
            stream: OutputInflow(stream, descriptor, self._writer.grant)
            for stream, descriptor in streams
            if descriptor >= 0
        }
        self._calls = CallOutflow(self._writer)
        self._outputs = OutputRequests(self._writer, self._is_readable)
        self._tasks: list[asyncio.Task[None]] = []
        self.on_violation: Callable[[], Awaitable[None]] | None = None

    async def open(self, within_s: float) -> None:
        self._reader, self._writer.stream = await asyncio.open_connection(
            sock=self._connection, limit=1 << 20
        )
        self._tasks.append(asyncio.create_task(self._listen()))
        self._tasks += [asyncio.create_task(inflow.run()) for inflow in self._inflows.values()]
        await _wait(self._hello, within_s, "the guest did not boot")

    async def begin(
        self, job: Mapping[str, object], inputs: Sequence[StagedInput], within_s: float
    ) -> None:
        await self._writer.send_message(word="begin", **job)
        for staged in inputs:
            path = checked_path(staged.path)
            fields = {"word": "file", "path": path, "executable": staged.executable}
            await self._writer.send_file(staged.source, self.over.done, **fields)
        await self._writer.send_message(word="go")
        await _wait(self._started, within_s, "the guest did not start the command")
        if self._pipes.calls >= 0:
            self._tasks.append(asyncio.create_task(self._calls.run(self._pipes.calls)))
        if self._pipes.files is not None:
            self._tasks.append(asyncio.create_task(self._send_files(self._pipes.files)))

    async def warn(self) -> None:
        await self._writer.send_message(word="warn")

    async def collect(
        self, wanted: Sequence[str], into: Path, quota_bytes: int
    ) -> list[OutputFile]:
        return await self._outputs.collect(wanted, into, quota_bytes)

    async def take_value(self, name: str, into: Path, quota_bytes: int) -> Path:
        return await self._outputs.take_value(name, into, quota_bytes)

    def gone(self, exit: ProcessExit) -> None:
        if not self.over.done():
            code = KILLED if exit.killed else exit.code
            self.over.set_result(ProcessExit(code, ran=False, killed=exit.killed, lost=exit.lost))
        self._finish(SandboxFailed("the guest ended"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._tasks:  # never opened: no inflow owns the pipes
            self._pipes.close()
        else:
            GuestPipes(-1, -1, calls=self._pipes.calls, files=self._pipes.files).close()
        if self._writer.stream is not None:
            self._writer.stream.close()
            with contextlib.suppress(OSError):
                await self._writer.stream.wait_closed()
        else:
            self._connection.close()

    def _is_readable(self) -> bool:
        return not self.violation and self._reader is not None and not self._reader.at_eof()

    async def _listen(self) -> None:
        reader = self._reader
        assert reader is not None
        try:
            while True:
                length, stream = guest.HEAD.unpack(await reader.readexactly(guest.HEAD.size))
                if length > MOST_FRAME_BYTES:
                    raise GuestViolation(f"it sent a frame of {length} bytes")
                self._receive(stream, await reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the monitor's end is reported by `gone`
        except (
            GuestViolation,
            struct.error,
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
        ) as bad:
            self.violation = printable(bad)
            self._finish(SandboxFailed(f"protocol violation by the guest: {self.violation}"))
            if self.on_violation is not None:
                await self.on_violation()

    def _receive(self, stream: int, body: bytes) -> None:
        if stream in self._inflows:
            self._inflows[stream].take(body)
        elif stream == guest.FILE_OUT:
            self._outputs.receive_bytes(body)
        elif stream == guest.CREDIT:
            which, more = guest.CREDIT_BODY.unpack(body)
            if which != guest.CALLS:
                raise GuestViolation(f"it granted flow-control credit for stream {which}")
            self._calls.granted(more)
        elif stream == guest.WORDS:
            if body.count(b"[") + body.count(b"{") > MOST_BRACKETS:
                raise GuestViolation("it sent a message nested too deeply")
            message = json.loads(body)
            self._receive_message(str(message["word"]), message)
        else:
            raise GuestViolation(f"it sent on stream {stream}")

    def _receive_message(self, name: str, message: Mapping[str, object]) -> None:
        if name == "hello" and not self._hello.done():
            if message.get("version") != guest.VERSION:
                raise GuestViolation("it is of another version")
            self._hello.set_result(None)
        elif name == "started" and not self._started.done():
            self._started.set_result(None)
        elif name == "failed" and not self._started.done():
            self._started.set_exception(SandboxFailed(printable(message.get("text"))))
        elif name == "ended" and self._started.done():
            code, oom = message.get("code"), message.get("oom")
            if type(code) is not int or not 0 <= code <= 255:
                raise GuestViolation("it ended without an exit code")
            self.out_of_memory = oom is True
            if not self.over.done():
                self.over.set_result(ProcessExit(code, ran=True, killed=False))
            for inflow in self._inflows.values():
                inflow.finish()
        elif name in ("output", "collected", "refused"):
            self._outputs.receive_message(name, message)
        else:
            raise GuestViolation(f"it sent the message {name!r} out of turn")

    async def _send_files(self, files: socket.socket) -> None:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(files, 1, 1)
            except BlockingIOError:
                await readable([files.fileno()])
                continue
            if not data:
                return
            try:
                await self._writer.send_open(descriptors[0], self.over.done, word="arguments")
            finally:
                os.close(descriptors[0])

    def _finish(self, failure: SandboxFailed) -> None:
        for waiting in (self._hello, self._started):
            if not waiting.done():
                waiting.set_exception(failure)
                waiting.exception()  # marked as retrieved: there may be no waiter
        self._outputs.finish()
        for inflow in self._inflows.values():
            inflow.finish()


async def _wait(event: asyncio.Future[None], within_s: float, failed: str) -> None:
    try:
        async with asyncio.timeout(within_s):
            await asyncio.shield(event)
    except TimeoutError as silent:
        raise SandboxFailed(f"{failed} within {within_s:.0f} s") from silent

"""Streams to a guest, each under credit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from gpool.agent.runtime.descriptors import readable, writable
from gpool.agent.runtime.microvm import guest
from gpool.agent.runtime.protocol import SandboxFailed

MOST_FRAME_BYTES = 64 * 1024
FILE_CHUNK_BYTES = 256 * 1024


class GuestViolation(Exception):
    """The guest violated the protocol: guest.py never sends this."""


@dataclass(frozen=True, slots=True)
class GuestPipes:
    """Outputs are written to the first three, calls and files read. -1: none."""

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


class FrameWriter:
    """Ignores errors, since the monitor's end is reported elsewhere."""

    def __init__(self) -> None:
        self.stream: asyncio.StreamWriter | None = None
        self._lock = asyncio.Lock()

    async def send(self, stream: int, body: bytes) -> None:
        if self.stream is None:
            return
        with contextlib.suppress(ConnectionError):
            async with self._lock:
                self.stream.write(guest.HEAD.pack(len(body), stream) + body)
                await self.stream.drain()

    async def send_message(self, **fields: object) -> None:
        await self.send(guest.WORDS, json.dumps(fields).encode())

    async def grant(self, stream: int, size: int) -> None:
        await self.send(guest.CREDIT, guest.CREDIT_BODY.pack(stream, size))

    async def send_file(self, source: Path, is_over: Callable[[], bool], **fields: object) -> None:
        with source.open("rb") as data:
            await self.send_open(data.fileno(), is_over, **fields)

    async def send_open(
        self, descriptor: int, is_over: Callable[[], bool], **fields: object
    ) -> None:
        left = os.fstat(descriptor).st_size
        await self.send_message(size=left, **fields)
        while left > 0 and not is_over():
            piece = await asyncio.to_thread(os.read, descriptor, min(FILE_CHUNK_BYTES, left))
            if not piece:
                raise SandboxFailed("an input shrank while it was read")
            left -= len(piece)
            await self.send(guest.FILE_IN, piece)


class OutputInflow:
    """Grants credit for the bytes the pipe took."""

    def __init__(
        self, stream: int, descriptor: int, grant: Callable[[int, int], Awaitable[None]]
    ) -> None:
        self._stream = stream
        self._descriptor = descriptor
        self._grant = grant
        self._waiting: deque[bytes] = deque()
        self._held_bytes = 0
        self._changed = asyncio.Event()
        self._last = False
        os.set_blocking(descriptor, False)

    def take(self, data: bytes) -> None:
        if self._last:
            return  # sent after the end
        self._held_bytes += len(data)
        if self._held_bytes > guest.WINDOW_BYTES:
            raise GuestViolation("it sent more than its flow-control credit")
        self._waiting.append(data)
        self._changed.set()

    def finish(self) -> None:
        self._last = True
        self._changed.set()

    async def run(self) -> None:
        has_reader = True
        try:
            while self._waiting or not self._last:
                if not self._waiting:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                view = memoryview(self._waiting.popleft())
                size = len(view)
                while view and has_reader:
                    try:
                        view = view[os.write(self._descriptor, view) :]
                    except BlockingIOError:
                        await writable(self._descriptor)
                    except BrokenPipeError:
                        has_reader = False  # dropped from now on; the guest must not block
                self._held_bytes -= size
                await self._grant(self._stream, size)
        finally:
            os.close(self._descriptor)


class CallOutflow:
    def __init__(self, writer: FrameWriter) -> None:
        self._writer = writer
        self._credit = guest.WINDOW_BYTES
        self._granted = asyncio.Event()

    def granted(self, size: int) -> None:
        self._credit += size
        if self._credit > guest.WINDOW_BYTES:
            raise GuestViolation("it granted more flow-control credit than it owns")
        self._granted.set()

    async def run(self, descriptor: int) -> None:
        while True:
            if self._credit <= 0:
                self._granted.clear()
                await self._granted.wait()
                continue
            try:
                data = os.read(descriptor, min(MOST_FRAME_BYTES, self._credit))
            except BlockingIOError:
                await readable([descriptor])
                continue
            if not data:
                return
            self._credit -= len(data)
            await self._writer.send(guest.CALLS, data)

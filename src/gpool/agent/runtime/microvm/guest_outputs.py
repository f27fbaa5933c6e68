"""Outputs sent by a guest: checked, bounded and hashed by the agent, which trusts no data of the guest."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpool.agent.runtime.descriptors import readable, writable
from gpool.agent.runtime.microvm import guest
from gpool.agent.runtime.protocol import BadOutput, SandboxFailed
from gpool.agent.runtime.work_directory import MAX_NAMES_BYTES, MAX_OUTPUTS, NAME_COST_BYTES
from gpool.core.errors import Invalid
from gpool.core.model import OutputFile
from gpool.core.specs.fields import checked_path, folded_path

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


MOST_TEXT = 500
STALLED_AFTER_S = 60.0
MOST_DROPPED_BYTES = 64 << 20  # of outputs that were refused while they arrived
ENDED = "the guest ended before its outputs were fetched"


def printable(text: object) -> str:
    return str(text)[:MOST_TEXT].encode("unicode_escape").decode()


class OutputCollection:
    def __init__(self, wanted: Sequence[str], into: Path, quota_bytes: int) -> None:
        try:
            self._wanted = [checked_path(path, directory=path.endswith("/")) for path in wanted]
        except Invalid as bad:
            raise BadOutput(bad.detail) from bad
        self._into = into
        self._quota_bytes = self._left_bytes = quota_bytes
        self._names_bytes = 0
        self._names: dict[str, str] = {}
        self.found: list[OutputFile] = []
        self._file: _IncomingFile | None = None

    def announce(self, message: Mapping[str, object]) -> None:
        path, size = message.get("path"), message.get("size")
        executable = message.get("executable")
        if not isinstance(path, str) or type(size) is not int or not isinstance(executable, bool):
            raise BadOutput("the guest announced a malformed output")
        if self._file is not None:
            raise BadOutput("the guest announced an output before the last one was complete")
        try:
            checked_path(path)
        except Invalid as bad:
            raise BadOutput(bad.detail) from bad
        if not any(
            path == one or (one.endswith("/") and path.startswith(one)) for one in self._wanted
        ):
            raise BadOutput(f"the guest sent '{printable(path)}', which was not requested")
        twin = self._names.setdefault(folded_path(path), path)
        if twin != path:
            names = f"'{printable(twin)}' and '{printable(path)}'"
            raise BadOutput(f"outputs {names} are one name on some machines")
        if len(self.found) >= MAX_OUTPUTS:
            raise BadOutput(f"more than {MAX_OUTPUTS} outputs; put them into one archive")
        self._names_bytes += len(path.encode()) + NAME_COST_BYTES
        if self._names_bytes > MAX_NAMES_BYTES:
            raise BadOutput("too many outputs with names this long; put them into one archive")
        if not 0 <= size <= self._left_bytes:
            raise BadOutput(
                f"output '{printable(path)}' of {size} bytes is over the disk limit of {self._quota_bytes}"
            )
        self._left_bytes -= size
        self._file = _IncomingFile(self._into, path, size, executable)
        self.take(b"")

    def take(self, data: bytes) -> None:
        file = self._file
        if file is None:
            raise BadOutput("the guest sent bytes of no output")
        if file.take(data):
            self._file = None
            made = file.finish()
            if all(other.path != made.path for other in self.found[-1:]):
                self.found.append(made)

    def finish(self) -> list[OutputFile]:
        if self._file is not None:
            raise BadOutput("the guest stopped in the middle of an output")
        names = {file.path for file in self.found}
        for path in self._wanted:
            if not path.endswith("/") and path not in names:
                raise BadOutput(f"output '{printable(path)}' was not sent by the guest")
        unique = {file.path: file for file in self.found}
        return list(unique.values())

    def drop(self) -> None:
        if self._file is not None:
            self._file.drop()
            self._file = None


class _IncomingFile:
    def __init__(self, into: Path, path: str, size: int, executable: bool) -> None:
        self._into = into
        self._path = path
        self._size = self._left = size
        self._executable = executable
        self._temporary = into / f"collecting-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self._temporary, flags, 0o600)
        self._digest = hashlib.sha256()

    def take(self, data: bytes) -> bool:
        if len(data) > self._left:
            raise BadOutput("the guest sent more of an output than it announced")
        self._digest.update(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]
        self._left -= len(data)
        return self._left == 0

    def finish(self) -> OutputFile:
        os.close(self._descriptor)
        sha256 = self._digest.hexdigest()
        self._temporary.rename(self._into / sha256)
        return OutputFile(self._path, sha256, self._size, self._executable)

    def drop(self) -> None:
        os.close(self._descriptor)
        with contextlib.suppress(FileNotFoundError):
            self._temporary.unlink()


class OutputRequests:
    """One at a time; each may fail and leave the connection usable."""

    def __init__(self, writer: FrameWriter, is_readable: Callable[[], bool]) -> None:
        self._writer = writer
        self._is_readable = is_readable
        self._collection: OutputCollection | None = None
        self._done: asyncio.Future[None] | None = None
        self._progress = asyncio.Event()
        self._number = 0
        self._stale = False  # arriving bytes belong to an abandoned request
        self._dropped_bytes = 0
        self._lock = asyncio.Lock()

    async def collect(
        self, wanted: Sequence[str], into: Path, quota_bytes: int
    ) -> list[OutputFile]:
        collection = OutputCollection(wanted, into, quota_bytes)
        return await self._request("collect", collection, quota_bytes, wanted=list(wanted))

    async def take_value(self, name: str, into: Path, quota_bytes: int) -> Path:
        collection = OutputCollection([name], into, quota_bytes)
        found = await self._request("take", collection, quota_bytes, name=name)
        return into / found[0].sha256

    async def _request(
        self, word: str, collection: OutputCollection, quota_bytes: int, **fields: object
    ) -> list[OutputFile]:
        async with self._lock:
            self._number += 1
            self._dropped_bytes = 0
            self._collection = collection
            done = self._done = asyncio.get_running_loop().create_future()
            send = self._writer.send_message
            try:
                await send(word=word, number=self._number, most=quota_bytes, **fields)
                await self._wait(done)
                done.result()
                return collection.finish()
            except BadOutput:
                self._stale = True
                await send(word="stop")  # else the guest goes on sending
                raise
            finally:
                collection.drop()
                self._collection = self._done = None

    async def _wait(self, done: asyncio.Future[None]) -> None:
        while not done.done():
            self._progress.clear()
            if not self._is_readable():
                raise BadOutput(ENDED)
            progress = asyncio.create_task(self._progress.wait())
            finished, _ = await asyncio.wait(
                (done, progress), timeout=STALLED_AFTER_S, return_when=asyncio.FIRST_COMPLETED
            )
            progress.cancel()
            if not finished:
                raise BadOutput(f"the guest sent nothing for {STALLED_AFTER_S:.0f} s")

    def receive_message(self, name: str, message: Mapping[str, object]) -> None:
        collection, done = self._collection, self._done
        if collection is None or done is None or done.done():
            return
        if message.get("number") != self._number:
            return  # of an abandoned request
        self._stale = False
        self._progress.set()
        try:
            if name == "output":
                collection.announce(message)
            elif name == "collected":
                done.set_result(None)
            else:
                raise BadOutput(printable(message.get("text")))
        except (BadOutput, OSError) as bad:
            done.set_exception(bad)

    def receive_bytes(self, body: bytes) -> None:
        collection, done = self._collection, self._done
        if collection is None or done is None or done.done() or self._stale:
            self._dropped_bytes += len(body)
            if self._dropped_bytes > MOST_DROPPED_BYTES:
                raise GuestViolation("it sends outputs that were not requested")
            return
        self._progress.set()
        try:
            collection.take(body)
        except (BadOutput, OSError) as bad:
            done.set_exception(bad)

    def finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(BadOutput(ENDED))
        self._progress.set()

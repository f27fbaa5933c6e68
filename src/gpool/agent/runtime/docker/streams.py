"""A container's one stream to and from the pipes that commands and runners are read by. Holds one piece at a time.

The engine sends both outputs in frames over one socket. When nobody reads the pipes, nothing is taken from the
socket, the engine's own buffer fills, and the command waits: back-pressure all the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence

from gpool.agent.runtime.descriptor_wait import readable, writable
from gpool.agent.runtime.docker.bridge import ANSWERS, CALLS, FILES, HEAD, STDERR, STDOUT

READ_BYTES = 64 * 1024
ENGINE_HEAD = struct.Struct(">BxxxI")
MOST_FILES = 16
HEAD_BYTES = 512


class FrameDecoder:
    """Cuts a stream of (channel, length, data) frames; a long one is passed on piece by piece."""

    def __init__(self, head: struct.Struct) -> None:
        self._head = head
        self._held = b""
        self._channel = 0
        self._left = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        data = self._held + data
        self._held = b""
        at = 0
        while at < len(data):
            if self._left == 0:
                if len(data) - at < self._head.size:
                    self._held = data[at:]
                    return
                self._channel, self._left = self._head.unpack_from(data, at)
                at += self._head.size
                continue
            piece = data[at : at + self._left]
            at += len(piece)
            self._left -= len(piece)
            yield self._channel, piece


async def _send(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            await writable(descriptor)


async def _received(channel: socket.socket) -> bytes:
    while True:
        try:
            return channel.recv(READ_BYTES)
        except BlockingIOError:
            await readable([channel.fileno()])


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


async def pour(
    channel: socket.socket, ends: Mapping[int, int], explain: Callable[[bytes], bytes]
) -> None:
    """A command's output, until the container's streams end; closes everything it was given.

    `explain` is given how stderr began and says what to add to it.
    """
    for descriptor in ends.values():
        os.set_blocking(descriptor, False)
    frames = FrameDecoder(ENGINE_HEAD)
    head = b""
    try:
        with contextlib.suppress(OSError):  # a reader that is gone, or an engine that is
            while data := await _received(channel):
                for stream, piece in frames.feed(data):
                    if stream == STDERR and len(head) < HEAD_BYTES:
                        head += piece[:HEAD_BYTES]
                    if stream in ends:
                        await _send(ends[stream], piece)
            await _send(ends[STDERR], explain(head))
    finally:
        channel.close()
        _close(tuple(ends.values()))


async def relay(channel: socket.socket, given: Sequence[int]) -> None:
    """A runner's six descriptors over the container's three; until its streams end. Closes everything it was given."""
    nothing, out, err, calls, answers, files = given
    os.close(nothing)
    for descriptor in (out, err, calls, answers, files):
        os.set_blocking(descriptor, False)
    inward = asyncio.create_task(_inward(channel, calls, files))
    ends = {STDOUT: out, STDERR: err, ANSWERS: answers}
    outer, inner = FrameDecoder(ENGINE_HEAD), FrameDecoder(HEAD)
    try:
        with contextlib.suppress(OSError):
            while data := await _received(channel):
                for stream, piece in outer.feed(data):
                    if stream == STDERR:  # the bridge's own words
                        await _send(err, piece)
                        continue
                    for number, part in inner.feed(piece):
                        if number not in ends:
                            return  # no bridge of ours says that
                        await _send(ends[number], part)
    finally:
        inward.cancel()
        await asyncio.wait([inward])
        channel.close()
        _close((out, err, calls, answers, files))


async def _inward(channel: socket.socket, calls: int, files: int) -> None:
    """Calls and the files they name; a file was handed over before its call was written, and goes before it."""
    with socket.socket(fileno=os.dup(files)) as letters, contextlib.suppress(OSError):
        while True:
            try:
                data = os.read(calls, READ_BYTES)
            except BlockingIOError:
                await readable([calls])
                continue
            if not data:
                channel.shutdown(socket.SHUT_WR)
                return
            for descriptor in _handed_over(letters):
                try:
                    while piece := os.read(descriptor, READ_BYTES):
                        await _send(channel.fileno(), HEAD.pack(FILES, len(piece)) + piece)
                finally:
                    os.close(descriptor)
                await _send(channel.fileno(), HEAD.pack(FILES, 0))
            await _send(channel.fileno(), HEAD.pack(CALLS, len(data)) + data)


def _handed_over(letters: socket.socket) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            data, descriptors, _, _ = socket.recv_fds(letters, 1, MOST_FILES)
            found += descriptors
            if not data:
                break
    return found

"""Copies between a container's single stream and the pipes of commands and runners.

While the pipes are not read, the socket is not read either, the engine's buffer fills and the command blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence

from gpool.agent.runtime.descriptors import close_all, readable, writable
from gpool.agent.runtime.docker.bridge import ANSWERS, CALLS, FILES, HEAD, STDERR, STDOUT

READ_BYTES = 64 * 1024
ENGINE_HEAD = struct.Struct(">BxxxI")
MOST_FILES = 16
HEAD_BYTES = 512


class FrameDecoder:
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


async def pour(
    channel: socket.socket, ends: Mapping[int, int], explain: Callable[[bytes], bytes]
) -> None:
    """Closes all descriptors. `explain` returns text to append, given the beginning of stderr."""
    for descriptor in ends.values():
        os.set_blocking(descriptor, False)
    frames = FrameDecoder(ENGINE_HEAD)
    head = b""
    try:
        with contextlib.suppress(OSError):  # the reader or the engine is gone
            while data := await _received(channel):
                for stream, piece in frames.feed(data):
                    if stream == STDERR and len(head) < HEAD_BYTES:
                        head += piece[:HEAD_BYTES]
                    if stream in ends:
                        await _send(ends[stream], piece)
            await _send(ends[STDERR], explain(head))
    finally:
        channel.close()
        close_all(tuple(ends.values()))


async def relay(channel: socket.socket, given: Sequence[int]) -> None:
    """Closes all descriptors."""
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
                    if stream == STDERR:  # messages of the bridge itself
                        await _send(err, piece)
                        continue
                    for number, part in inner.feed(piece):
                        if number not in ends:
                            return  # not sent by our bridge
                        await _send(ends[number], part)
    finally:
        inward.cancel()
        await asyncio.wait([inward])
        channel.close()
        close_all((out, err, calls, answers, files))


async def _inward(channel: socket.socket, calls: int, files: int) -> None:
    with socket.socket(fileno=os.dup(files)) as received, contextlib.suppress(OSError):
        while True:
            try:
                data = os.read(calls, READ_BYTES)
            except BlockingIOError:
                await readable([calls])
                continue
            if not data:
                channel.shutdown(socket.SHUT_WR)
                return
            for descriptor in _received_files(received):
                try:
                    while piece := os.read(descriptor, READ_BYTES):
                        await _send(channel.fileno(), HEAD.pack(FILES, len(piece)) + piece)
                finally:
                    os.close(descriptor)
                await _send(channel.fileno(), HEAD.pack(FILES, 0))
            await _send(channel.fileno(), HEAD.pack(CALLS, len(data)) + data)


def _received_files(received: socket.socket) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            data, descriptors, _, _ = socket.recv_fds(received, 1, MOST_FILES)
            found += descriptors
            if not data:
                break
    return found

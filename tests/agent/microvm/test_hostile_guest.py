"""A guest in a stranger's hands: whatever comes over the line, nothing is believed, nothing blocks, little is held."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gpool.agent.runtime.bubblewrap.launcher_client import ProcessExit
from gpool.agent.runtime.microvm import guest
from gpool.agent.runtime.microvm.guest_link import GuestConnection
from gpool.agent.runtime.microvm.guest_outputs import (
    MOST_DROPPED_BYTES,
    GuestPipes,
    OutputCollection,
)
from gpool.agent.runtime.protocol import BadOutput, SandboxFailed
from gpool.core.model import OutputFile
from tests.tools.runtimes import PATIENCE_S, within

QUOTA_BYTES = 1000


def word(**words: object) -> bytes:
    body = json.dumps(words).encode()
    return guest.HEAD.pack(len(body), guest.WORDS) + body


def frame(stream: int, body: bytes) -> bytes:
    return guest.HEAD.pack(len(body), stream) + body


HELLO = word(word="hello", version=guest.VERSION) + word(word="started")
Says = Callable[[GuestConnection, socket.socket], Awaitable[Any]]


def talking(says: Says) -> Any:
    """A line whose other end the test plays; `says` gets both. The pipes are read by nobody."""

    async def work() -> Any:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        talk = GuestConnection(ours, GuestPipes(out_end, err_end))

        async def end() -> None:
            talk.gone(ProcessExit(9, ran=False, killed=True))

        talk.on_violation = end
        try:
            with theirs:
                await asyncio.get_running_loop().sock_sendall(theirs, HELLO)
                await talk.open(PATIENCE_S)
                return await says(talk, theirs)
        finally:
            await talk.close()
            os.close(out)
            os.close(err)

    return within(work())


LIES = {
    "a frame too long": guest.HEAD.pack(1 << 30, guest.OUT),
    "a stream that is none": frame(99, b""),
    "a stream that only goes in": frame(guest.CALLS, b"x"),
    "no JSON": frame(guest.WORDS, b"\xff\xfe"),
    "JSON that is no word": frame(guest.WORDS, b"[1]"),
    "JSON too deep": frame(guest.WORDS, b"[" * 60_000),
    "a word that is none": word(word="format"),
    "a second hello": word(word="hello", version=guest.VERSION),
    "an exit code out of range": word(word="ended", code=4096, oom=False),
    "an exit code that is a text": word(word="ended", code="0", oom=False),
    "credit it had not got": frame(guest.CREDIT, guest.CREDIT_BODY.pack(guest.CALLS, 1)),
    "credit cut short": frame(guest.CREDIT, b"\1"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lie_ends_the_guest_and_nothing_else(lie: bytes) -> None:
    async def says(talk: GuestConnection, theirs: socket.socket) -> tuple[str, ProcessExit]:
        await asyncio.get_running_loop().sock_sendall(theirs, lie)
        return talk.violation, await talk.over

    _, exit = talking(says)
    assert exit.killed


def test_a_guest_that_sends_past_its_window_is_ended_not_buffered() -> None:
    async def says(talk: GuestConnection, theirs: socket.socket) -> ProcessExit:
        loop = asyncio.get_running_loop()
        for _ in range(2 * guest.WINDOW_BYTES // 32768 + 4):
            try:
                await loop.sock_sendall(theirs, frame(guest.OUT, bytes(32768)))
            except (BrokenPipeError, ConnectionResetError):
                break
            if talk.over.done():
                break
        exit = await talk.over
        assert "credit" in talk.violation
        return exit

    assert talking(says).killed


def test_a_guest_that_sends_outputs_for_ever_unasked_is_ended() -> None:
    async def says(talk: GuestConnection, theirs: socket.socket) -> ProcessExit:
        loop = asyncio.get_running_loop()
        for _ in range(MOST_DROPPED_BYTES // 60_000 + 2):
            if talk.over.done():
                break
            await loop.sock_sendall(theirs, frame(guest.FILE_OUT, bytes(60_000)))
        return await talk.over

    assert talking(says).killed


def test_a_guest_that_says_nothing_does_not_boot() -> None:
    async def work() -> None:
        ours, theirs = socket.socketpair()
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        talk = GuestConnection(ours, GuestPipes(out_end, err_end))
        try:
            with theirs:
                await talk.open(0.05)
        finally:
            await talk.close()
            os.close(out)
            os.close(err)

    with pytest.raises(SandboxFailed, match="did not boot"):
        within(work())


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (word(word="output", number=1, path="../etc/x", size=1, executable=False), r"\.\."),
        (word(word="output", number=1, path="/etc/x", size=1, executable=False), "/etc/x"),
        (word(word="output", number=1, path="b", size=1, executable=False), "not requested"),
        (
            word(word="output", number=1, path="a", size=QUOTA_BYTES + 1, executable=False),
            "disk limit",
        ),
        (word(word="output", number=1, path="a", size=-1, executable=False), "disk limit"),
        (word(word="output", number=1, path="a", size=True, executable=False), "malformed"),
        (word(word="output", number=1, path=["a"], size=1, executable=False), "malformed"),
        (frame(guest.FILE_OUT, b"x"), "of no output"),
        (
            word(word="output", number=1, path="a", size=1, executable=False)
            + frame(guest.FILE_OUT, b"xx"),
            "more of an output",
        ),
        (
            word(word="output", number=1, path="a", size=2, executable=False)
            + word(word="output", number=1, path="d/a", size=2, executable=False),
            "before the last",
        ),
        (
            word(word="output", number=1, path="a", size=2, executable=False)
            + word(word="collected", number=1),
            "in the middle",
        ),
        (word(word="collected", number=1), "was not sent"),
        (word(word="refused", number=1, text="\x1b[31m" + "x" * 9000), r"\\x1b\[31m"),
        (word(word="refused", number=1), "None"),
    ],
)
def test_outputs_that_are_not_what_was_asked_for_are_refused(
    answer: bytes, told: str, tmp_path: Path
) -> None:
    async def says(talk: GuestConnection, theirs: socket.socket) -> None:
        asking = asyncio.create_task(talk.collect(["a", "d/"], tmp_path, QUOTA_BYTES))
        await asyncio.get_running_loop().sock_recv(theirs, 65536)
        await asyncio.get_running_loop().sock_sendall(theirs, answer)
        await asking

    with pytest.raises(BadOutput, match=told) as bad:
        talking(says)
    assert len(str(bad.value)) < 1000
    assert list(tmp_path.iterdir()) == []


def test_a_guest_that_dies_in_the_middle_of_an_output_leaves_nothing(tmp_path: Path) -> None:
    async def says(talk: GuestConnection, theirs: socket.socket) -> None:
        asking = asyncio.create_task(talk.collect(["a"], tmp_path, QUOTA_BYTES))
        loop = asyncio.get_running_loop()
        await loop.sock_recv(theirs, 65536)
        announced = word(word="output", number=1, path="a", size=9, executable=False)
        await loop.sock_sendall(theirs, announced + frame(guest.FILE_OUT, b"xx"))
        talk.gone(ProcessExit(9, ran=False, killed=False))
        await asking

    with pytest.raises(BadOutput, match="ended before"):
        talking(says)
    assert list(tmp_path.iterdir()) == []


def test_an_honest_output_comes_whole_and_is_hashed_here(tmp_path: Path) -> None:
    async def says(talk: GuestConnection, theirs: socket.socket) -> list[OutputFile]:
        asking = asyncio.create_task(talk.collect(["a", "d/"], tmp_path, QUOTA_BYTES))
        loop = asyncio.get_running_loop()
        await loop.sock_recv(theirs, 65536)
        await loop.sock_sendall(
            theirs,
            word(word="output", number=1, path="a", size=2, executable=True)
            + frame(guest.FILE_OUT, b"h")
            + frame(guest.FILE_OUT, b"i")
            + word(word="output", number=1, path="d/empty", size=0, executable=False)
            + word(word="collected", number=1),
        )
        return await asking

    found = talking(says)
    assert [(f.path, f.size_bytes, f.executable) for f in found] == [
        ("a", 2, True),
        ("d/empty", 0, False),
    ]
    assert (tmp_path / found[0].sha256).read_bytes() == b"hi"


def test_names_that_are_one_name_on_some_machines_are_refused(tmp_path: Path) -> None:
    taking = OutputCollection(["d/"], tmp_path, QUOTA_BYTES)
    taking.announce({"path": "d/a", "size": 0, "executable": False})
    with pytest.raises(BadOutput, match="one name"):
        taking.announce({"path": "d/A", "size": 0, "executable": False})


def test_what_still_comes_of_a_refused_output_is_not_taken_for_the_next(tmp_path: Path) -> None:
    """A checkpoint was refused while its bytes were on their way; the next one is whole."""

    async def says(talk: GuestConnection, theirs: socket.socket) -> tuple[str, list[OutputFile]]:
        loop = asyncio.get_running_loop()
        first = asyncio.ensure_future(talk.collect(["d/"], tmp_path, QUOTA_BYTES))
        big = word(word="output", number=1, path="d/big", size=QUOTA_BYTES + 1, executable=False)
        await loop.sock_sendall(theirs, big)
        with pytest.raises(BadOutput) as refused:
            await first
        second = asyncio.ensure_future(talk.collect(["out"], tmp_path, QUOTA_BYTES))
        late = word(word="output", number=1, path="d/next", size=4, executable=False)
        late += frame(guest.FILE_OUT, b"late")
        own = word(word="output", number=2, path="out", size=3, executable=False)
        own += frame(guest.FILE_OUT, b"own") + word(word="collected", number=2)
        await asyncio.sleep(0)
        await loop.sock_sendall(theirs, frame(guest.FILE_OUT, b"more of it") + late + own)
        return str(refused.value), await second

    text, found = talking(says)
    assert "over the disk limit" in text
    assert [(one.path, one.size_bytes) for one in found] == [("out", 3)]
    assert [(tmp_path / one.sha256).read_bytes() for one in found] == [b"own"]

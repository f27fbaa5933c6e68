"""Kept connections against a server on loopback that replies with given bytes, also broken ones."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from random import Random

import pytest

from gpool.core.errors import Invalid, Unreachable
from gpool.transfer.connections import MAX_HEAD_BYTES, MOST_CONNECTIONS
from gpool.transfer.requests import Address, Patience, Request
from gpool.transfer.senders import Sender
from tests.tools.processes import PATIENCE_S

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
END = b""
"""Reply that stands for a closed connection."""


class Scripted:
    """A server that answers each request with the next reply, and closes the connection after `END`."""

    def __init__(self) -> None:
        self.replies: list[bytes] = []
        self.requests: list[bytes] = []
        self.connections = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def address(self) -> Address:
        return Address(f"http://127.0.0.1:{self._listening.getsockname()[1]}")

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for each in (self._listening, *self._open):
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                opened, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(opened)
            thread = threading.Thread(target=self._serve, args=(opened,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, opened: socket.socket) -> None:
        with opened.makefile("rb") as reader:
            while (request := _read_request(reader)) is not None:
                self.requests.append(request)
                reply = self.replies.pop(0)
                opened.sendall(reply)
                if self.replies[:1] == [END]:
                    self.replies.pop(0)
                    break
        with contextlib.suppress(OSError):
            opened.shutdown(socket.SHUT_RDWR)


def _read_request(reader: object) -> bytes | None:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = reader.readline()  # type: ignore[attr-defined]
        if not line:
            return None
        head += line
    size = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    body: bytes = reader.read(int(size[0].split(b":")[1])) if size else b""  # type: ignore[attr-defined]
    return head + body


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.close()


@pytest.fixture
def sender(server: Scripted) -> Iterator[Sender]:
    made = Sender(server.address, "k-1", Random(1), patience=Patience(PATIENCE_S))
    yield made
    made.close()


def test_requests_after_one_another_use_one_connection(server: Scripted, sender: Sender) -> None:
    server.replies = [OK, OK]
    for body in (b"{}", b"x" * 300_000):
        reply = sender.send(Request("POST", "/v1/tasks?wait=1", {"a": "b"}, body))
        assert (reply.status, reply.body) == (200, b"ok")
    assert server.connections == 1
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/tasks?wait=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: Bearer k-1\r\n" in head
    assert b"\r\na: b\r\n" in head
    assert body == b"{}"
    assert server.requests[1].endswith(b"\r\n\r\n" + b"x" * 300_000)


@pytest.mark.parametrize(
    ("reply", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n1\r\nd\r\n0\r\nx: y\r\n\r\n", b"abcd"),
        (b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)  # fmt: skip
def test_replies_of_every_framing_are_read_and_the_connection_is_kept(
    server: Scripted, sender: Sender, reply: bytes, body: bytes
) -> None:
    server.replies = [reply, OK]
    assert sender.send(Request("GET", "/")).body == body
    assert sender.send(Request("GET", "/")).body == b"ok"
    assert server.connections == 1


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nConnection: Close\r\ncontent-length: 2\r\n\r\nok",
        OK + b"HTTP/1.1 200 OK\r\n",
    ],
)
def test_a_connection_that_must_not_be_kept_is_replaced(
    server: Scripted, sender: Sender, reply: bytes
) -> None:
    server.replies = [reply, END, OK]
    assert sender.send(Request("GET", "/")).body == b"ok"
    assert sender.send(Request("GET", "/")).body == b"ok"
    assert server.connections == 2


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: +2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\n folded: x\r\ncontent-length: 2\r\n\r\nok",
        b"ICY 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"x" * (2 * MAX_HEAD_BYTES),
    ],
)
def test_a_broken_reply_is_no_reply(server: Scripted, sender: Sender, reply: bytes) -> None:
    server.replies = [reply, END, OK]
    with pytest.raises(Unreachable):
        sender.send(Request("GET", "/"))
    assert sender.send(Request("GET", "/")).body == b"ok", "the broken connection is not used again"


def test_a_connection_the_server_closed_while_idle_is_replaced(
    server: Scripted, sender: Sender
) -> None:
    server.replies = [OK, END, OK]
    assert sender.send(Request("GET", "/")).status == 200
    server._threads[1].join(PATIENCE_S)  # it has closed the connection
    assert sender.send(Request("POST", "/", {}, b"{}")).status == 200
    assert server.connections == 2


@pytest.mark.parametrize(
    "request_",
    [
        Request("GET", "/v1 /tasks"),
        Request("GET", "/v1\r\nx: y"),
        Request("GET", "/", {"a": "b\r\nc: d"}),
        Request("GET", "/", {"a": "b\nc"}),
        Request("GET", "/ü"),
    ],
)
def test_no_value_can_add_a_header(server: Scripted, sender: Sender, request_: Request) -> None:
    with pytest.raises(Invalid):
        sender.send(request_)
    assert not server.requests


def test_closing_the_sender_ends_requests_under_way(server: Scripted, sender: Sender) -> None:
    server.replies = [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n"]
    raised: list[Exception] = []

    def ask() -> None:
        try:
            sender.send(Request("GET", "/"))
        except Unreachable as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not server.requests:
        thread.join(0.001)
    sender.close()
    thread.join(PATIENCE_S)
    assert len(raised) == 1


def test_threads_share_a_bounded_number_of_connections(server: Scripted, sender: Sender) -> None:
    count = 2 * MOST_CONNECTIONS
    server.replies = [OK] * count
    threads = [
        threading.Thread(target=sender.send, args=(Request("GET", "/"),)) for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.requests) == count
    assert server.connections <= MOST_CONNECTIONS

"""Answers that nobody reads: the connection ends, and their memory with it; a slow but steady reader gets all of it."""

from __future__ import annotations

import hashlib
import re
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import pytest

from gpool.core.model import MIB
from tests.server.api.test_connections import OPEN_S, SHORT_S
from tests.server.server_desk import Live, serving
from tests.tools.processes import PATIENCE_S, eventually

pytestmark = pytest.mark.host_speed
CONTENT = bytes(16 * MIB)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@contextmanager
def unread(live: Live, buffer_bytes: int = 65_536) -> Iterator[socket.socket]:
    """A connection that has asked for 16 MiB, more than the kernel's buffers, and reads nothing."""
    url = f"{live.url}/v1/artifacts/{SHA256}"
    stored = httpx2.put(url, content=CONTENT, headers=live.headers, timeout=PATIENCE_S)
    assert stored.status_code < 300, stored.text
    host, port = live.url.rpartition("/")[2].split(":")
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        raw.settimeout(PATIENCE_S)
        raw.connect((host, int(port)))
        head = f"GET /v1/artifacts/{SHA256} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {live.key}\r\n\r\n"
        raw.sendall(head.encode())
        yield raw


def in_flight(live: Live) -> int:
    """Requests that have no complete answer, beside this one."""
    page = httpx2.get(f"{live.url}/metrics", headers=live.headers, timeout=PATIENCE_S).text
    found = re.search(r"^gpool_http_requests_in_flight (\d+)", page, re.MULTILINE)
    assert found
    return int(found[1]) - 1


def length_of(raw: socket.socket) -> int:
    received = 0
    with suppress(ConnectionResetError):
        while piece := raw.recv(4 * MIB):
            received += len(piece)
    return received


def test_an_answer_that_is_not_read_is_given_up(data: Path) -> None:
    with serving(data, request_head_s=SHORT_S) as live, unread(live) as raw:
        eventually("it is given up", lambda: in_flight(live) == 0, PATIENCE_S)
        assert length_of(raw) < len(CONTENT)


def test_without_the_limit_it_is_kept(data: Path) -> None:
    """The control."""
    with serving(data, request_head_s=3600) as live, unread(live):
        eventually("it has begun", lambda: in_flight(live) == 1, PATIENCE_S)
        select.select([], [], [], OPEN_S)
        assert in_flight(live) == 1


def test_a_slow_reader_gets_all_of_it(data: Path) -> None:
    slow = {"request_head_s": SHORT_S, "request_bytes_per_s": 1}
    with serving(data, **slow) as live, unread(live, MIB) as raw:
        received = 0
        while received < len(CONTENT):
            select.select([], [], [], SHORT_S / 2)  # between two reads
            while select.select([raw], [], [], 0)[0]:
                piece = raw.recv(4 * MIB)
                assert piece, "it was closed"
                received += len(piece)

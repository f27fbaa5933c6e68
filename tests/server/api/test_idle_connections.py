"""A connection may be closed while a request is on its way over it: our client sends it again, and it takes effect once."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Thread

import httpx2
import pytest

from gpool.client.transport import ApiTransport
from gpool.server.main import KEEP_ALIVE_S
from gpool.transfer.senders import KEPT_IDLE_S
from tests.server.server_desk import Live, serving
from tests.tools.processes import PATIENCE_S

TRUE = {"command": ["true"]}


def tasks_at(live: Live) -> int:
    answer = httpx2.get(f"{live.url}/v1/tasks?limit=200", headers=live.headers, timeout=PATIENCE_S)
    return len(answer.json()["items"])


def test_requests_survive_a_server_that_closes_idle_connections_at_once(data: Path) -> None:
    with (
        serving(data, keep_alive_s=0.002) as live,
        closing(ApiTransport(live.url, live.key)) as api,
    ):
        for number in range(60):
            api.send_json("POST", "/v1/tasks", TRUE)
            api.wait(number % 6 / 1000)  # around the moment of closing
        assert tasks_at(live) == 60


def test_a_post_whose_answer_is_cut_off_is_sent_again_and_takes_effect_once(live: Live) -> None:
    with cutting(live, cut=2) as url, closing(ApiTransport(url, live.key)) as api:
        first = api.send_json("POST", "/v1/tasks", TRUE)["ids"]
        second = api.send_json("POST", "/v1/tasks", TRUE)["ids"]
        assert first != second
        assert tasks_at(live) == 2


def test_without_a_key_the_same_would_take_effect_twice(live: Live) -> None:
    """The control: it is the key that makes sending again harmless."""
    headers = live.headers
    with (
        cutting(live, cut=2) as url,
        httpx2.Client(base_url=url, headers=headers, timeout=PATIENCE_S) as http,
    ):
        http.post("/v1/tasks", json=TRUE)
        with pytest.raises(httpx2.TransportError):
            http.post("/v1/tasks", json=TRUE)
        http.post("/v1/tasks", json=TRUE)
        assert tasks_at(live) == 3


def test_the_server_keeps_idle_connections_longer_than_its_clients() -> None:
    assert KEEP_ALIVE_S > KEPT_IDLE_S


# ---- a relay that resets a connection instead of passing on an answer


@contextmanager
def cutting(live: Live, cut: int) -> Iterator[str]:
    """The way to the server; the answer to the request with this number is taken from it and not passed on."""
    server = live.url.removeprefix("http://").split(":")
    listening = socket.create_server(("127.0.0.1", 0))

    def relay() -> None:
        number = 0
        with suppress(OSError):  # closed: the test is over
            while True:
                near, _ = listening.accept()
                with near:
                    while asked := whole(near):
                        number += 1
                        with socket.create_connection((server[0], int(server[1]))) as far:
                            far.sendall(asked)
                            told = whole(far)
                        if number == cut:
                            reset = struct.pack("ii", 1, 0)
                            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                            break
                        near.sendall(told)

    thread = Thread(target=relay)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(PATIENCE_S)


def whole(sock: socket.socket) -> bytes:
    """One message of HTTP, which says its length; nothing: the other side has closed."""
    data = b""
    while True:
        head, found, body = data.partition(b"\r\n\r\n")
        if found:
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            if len(body) >= int(length or 0):
                return data
        piece = sock.recv(65536)
        if not piece:
            return b""
        data += piece

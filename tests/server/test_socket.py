"""Over real sockets: the agent's WebSocket, streams that flush at once, and the way out."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import pytest
from server_desk import Live, an_offer, exited, returned
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from gpool.wire.frames import (
    CHANNEL_PATH,
    PROTOCOL,
    Beat,
    BeatSeen,
    Grants,
    Hello,
    Hold,
    Recorded,
    Refused,
    Reports,
    Welcome,
    decode_from_server,
    encode,
)


@contextmanager
def agent_socket(live: Live, secret: str) -> Iterator[ClientConnection]:
    address = live.url.replace("http", "ws") + CHANNEL_PATH
    headers = {"Authorization": f"Bearer {secret}"}
    with connect(address, additional_headers=headers, max_size=None) as socket:
        yield socket


def joined(live: Live, name: str = "socket") -> str:
    answer = httpx2.post(f"{live.url}/v1/nodes", json={"name": name}, headers=live.headers)
    secret: str = answer.json()["secret"]
    return secret


def hello(*holds: Hold, beat: int = 1) -> bytes:
    return encode(Hello(PROTOCOL, "boot", an_offer(), beat, holds))


def received(socket: ClientConnection) -> object:
    data = socket.recv(timeout=20)
    assert isinstance(data, bytes)
    return decode_from_server(data)


def test_a_task_runs_over_the_socket(live: Live) -> None:
    with (
        agent_socket(live, joined(live)) as socket,
        httpx2.Client(base_url=live.url, headers=live.headers) as http,
    ):
        socket.send(hello())
        assert isinstance(received(socket), Welcome)
        submitted = http.post("/v1/tasks", json={"command": ["true"]}).json()
        grants = received(socket)
        assert isinstance(grants, Grants)
        [lease] = grants.lines[0].leases
        socket.send(encode(Beat(2, (Hold(lease.task, lease.epoch),))))
        assert received(socket) == BeatSeen(2)
        socket.send(encode(Reports(1, (exited(lease),))))
        assert received(socket) == Recorded(1)
        task = http.get(f"/v1/tasks/{submitted['ids'][0]}?wait=20").json()
        assert task["status"] == "succeeded"


def test_each_result_is_flushed_while_the_batch_is_open(live: Live) -> None:
    with (
        agent_socket(live, joined(live)) as socket,
        httpx2.Client(base_url=live.url, headers=live.headers, timeout=20) as http,
    ):
        socket.send(hello())
        received(socket)
        first = {"command": ["true"], "more": True}
        batch = http.post("/v1/tasks", json=first).json()["batch"]
        with http.stream("GET", f"/v1/batches/{batch}/results") as stream:
            lines = stream.iter_lines()
            for sequence in (1, 2):
                grants = received(socket)
                assert isinstance(grants, Grants)
                socket.send(encode(Reports(sequence, (returned(grants.lines[0].leases[0]),))))
                assert json.loads(next(lines))["sequence"] == sequence
                assert isinstance(received(socket), Recorded)
                httpx2.post(
                    f"{live.url}/v1/tasks",
                    json={**first, "batch": batch, "more": sequence == 1},
                    headers=live.headers,
                )


def test_the_channel_is_for_nodes(live: Live) -> None:
    for secret, status in (("gpn_wrong", 401), (live.key, 403)):
        with pytest.raises(InvalidStatus) as refused, agent_socket(live, secret):
            pass
        assert refused.value.response.status_code == status


def test_what_is_no_frame_ends_the_channel_with_a_reason(live: Live) -> None:
    secret = joined(live)
    for data in (b"\xc1", "text", encode(Beat(1, ()))):
        with agent_socket(live, secret) as socket:
            socket.send(data)
            refused = received(socket)
            assert isinstance(refused, Refused)
            with pytest.raises(ConnectionClosed):
                socket.recv(timeout=20)


def test_a_newer_connection_closes_the_older(live: Live) -> None:
    secret = joined(live)
    with agent_socket(live, secret) as older:
        older.send(hello())
        received(older)
        with agent_socket(live, secret) as newer:
            newer.send(hello(beat=2))
            assert isinstance(received(newer), Welcome)
            assert isinstance(received(older), Refused)
            with pytest.raises(ConnectionClosed):
                older.recv(timeout=20)


def test_a_long_body_is_answered_before_it_is_sent(live: Live) -> None:
    body = b" " * 10_000_000
    answer = httpx2.post(f"{live.url}/v1/nodes", content=body, headers=live.headers)
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")


@pytest.mark.parametrize(
    "path", ["/v1/me", "/v1/me/", "/nowhere", "/%ff%00", "//", "/v1/tasks?x=%ff"]
)
def test_a_host_that_is_none_is_no_fault_of_ours(live: Live, path: str) -> None:
    where = live.url.removeprefix("http://").split(":")
    with socket.create_connection((where[0], int(where[1])), timeout=20) as raw:
        request = f"GET {path} HTTP/1.1\r\nHost: [\r\nConnection: close\r\n\r\n"
        raw.sendall(request.encode())
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 4"), answer
    assert b"application/problem+json" in answer

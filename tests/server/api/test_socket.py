"""Over real sockets: the agent's WebSocket, streams that flush at once, and the way out."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from gpool.agent.channel import AgentCredentials
from gpool.agent.daemon import boot_clock
from gpool.core.ids import encode as encode_id
from gpool.transfer.node_proofs import NodeKey
from gpool.transfer.requests import Request
from gpool.wire.frames import (
    CHANNEL_PATH,
    NODE_HEADER,
    PROTOCOL,
    Beat,
    BeatSeen,
    Challenge,
    Grants,
    Hello,
    Hold,
    Prove,
    Proven,
    Recorded,
    Refused,
    Reports,
    Welcome,
    decode_any_from_server,
    encode,
)
from tests.server.server_desk import Live, an_offer, exited, returned
from tests.tools import nodes
from tests.tools.processes import PATIENCE_S


@contextmanager
def bare_socket(live: Live, badge: AgentCredentials) -> Iterator[ClientConnection]:
    """Nothing is proved yet."""
    address = live.url.replace("http", "ws") + CHANNEL_PATH
    headers = {NODE_HEADER: badge.identity.node}
    with connect(
        address,
        additional_headers=headers,
        max_size=None,
        open_timeout=PATIENCE_S,
        ping_interval=None,  # who is slow to answer is not gone
    ) as socket:
        yield socket


@contextmanager
def agent_socket(live: Live, badge: AgentCredentials) -> Iterator[ClientConnection]:
    with bare_socket(live, badge) as socket:
        challenge = received(socket)
        assert isinstance(challenge, Challenge)
        proof = badge.answer(challenge, is_open=False)
        assert proof is not None
        socket.send(encode(proof))
        proven = received(socket)
        assert isinstance(proven, Proven)
        badge.take(proven)
        yield socket


def joined(live: Live, name: str = "socket") -> AgentCredentials:
    def ask(path: str, document: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = httpx2.post(
            f"{live.url}{path}", json=document, headers=live.headers, timeout=PATIENCE_S
        ).json()
        return answer

    return nodes.joined(ask, NodeKey(hashlib.sha256(name.encode()).digest()), name=name)


def hello(*holds: Hold, beat: int = 1) -> bytes:
    return encode(Hello(PROTOCOL, "boot", an_offer(), beat, holds))


def received(socket: ClientConnection) -> object:
    data = socket.recv(timeout=PATIENCE_S)
    assert isinstance(data, bytes)
    return decode_any_from_server(data)


def test_a_task_runs_over_the_socket(live: Live) -> None:
    badge = joined(live)
    with (
        agent_socket(live, badge) as socket,
        httpx2.Client(base_url=live.url, headers=live.headers, timeout=PATIENCE_S) as http,
    ):
        socket.send(hello())
        assert isinstance(received(socket), Welcome)
        submitted = http.post("/v1/tasks", json={"command": ["true"]}).json()
        grants = received(socket)
        assert isinstance(grants, Grants)
        [lease] = grants.lines[0].leases
        socket.send(encode(Beat(2, (Hold(lease.task, lease.epoch),))))
        assert received(socket) == BeatSeen(2)
        socket.send(encode(badge.stamped(Reports(1, (exited(lease),)))))
        assert received(socket) == Recorded(1)
        task = http.get(f"/v1/tasks/{submitted['ids'][0]}?wait=20").json()
        assert task["status"] == "succeeded"


def test_each_result_is_flushed_while_the_batch_is_open(live: Live) -> None:
    badge = joined(live)
    with (
        agent_socket(live, badge) as socket,
        httpx2.Client(base_url=live.url, headers=live.headers, timeout=PATIENCE_S) as http,
    ):
        socket.send(hello())
        received(socket)
        first = {"command": ["true"], "more": True}
        batch = http.post("/v1/tasks", json=first).json()["batch"]
        with http.stream("GET", f"/v1/batches/{batch}/results") as stream:
            lines = (line for line in stream.iter_lines() if line)  # blank ones keep it alive
            for sequence in (1, 2):
                grants = received(socket)
                assert isinstance(grants, Grants)
                report = Reports(sequence, (returned(grants.lines[0].leases[0]),))
                socket.send(encode(badge.stamped(report)))
                assert json.loads(next(lines))["sequence"] == sequence
                assert isinstance(received(socket), Recorded)
                httpx2.post(
                    f"{live.url}/v1/tasks",
                    json={**first, "batch": batch, "more": sequence == 1},
                    headers=live.headers,
                    timeout=PATIENCE_S,
                )


def test_the_channel_is_for_nodes(live: Live) -> None:
    address = live.url.replace("http", "ws") + CHANNEL_PATH
    stranger = encode_id("node", 1)
    for headers in ({}, live.headers, {NODE_HEADER: "n-?"}, {NODE_HEADER: stranger}):
        with (
            pytest.raises(InvalidStatus) as refused,
            connect(address, additional_headers=headers, open_timeout=PATIENCE_S),
        ):
            pass
        assert refused.value.response.status_code == 401


def proof_of(badge: AgentCredentials, socket: ClientConnection) -> Prove:
    challenge = received(socket)
    assert isinstance(challenge, Challenge)
    proof = badge.answer(challenge, is_open=False)
    assert proof is not None
    return proof


def refusal(socket: ClientConnection) -> Refused:
    """The last word, after which the connection is over."""
    last = received(socket)
    assert isinstance(last, Refused), last
    with pytest.raises(ConnectionClosed):
        socket.recv(timeout=PATIENCE_S)
    return last


def test_a_proof_is_good_once_and_by_the_nodes_own_key_only(live: Live) -> None:
    alice, bob = joined(live, "alice"), joined(live, "bob")
    with bare_socket(live, alice) as socket:
        heard = proof_of(alice, socket)
        socket.send(encode(heard))
        assert isinstance(received(socket), Proven)
    thief = AgentCredentials(nodes.a_key(9), alice.identity, boot_clock)
    for who in (thief, bob):
        with bare_socket(live, alice) as socket:
            socket.send(encode(proof_of(who, socket)))
            assert "join again" in refusal(socket).detail
    with bare_socket(live, alice) as socket:
        received(socket)
        socket.send(encode(heard))
        assert "join again" in refusal(socket).detail


def test_a_stolen_token_opens_neither_channel_nor_artifacts(live: Live) -> None:
    alice, bob = joined(live, "alice"), joined(live, "bob")
    with agent_socket(live, alice):
        stolen = alice.vouch(Request("GET", "/"))["Authorization"].removeprefix("Bearer ")
    with bare_socket(live, alice) as socket:
        received(socket)
        socket.send(encode(Reports(1, (), stolen)))
        refusal(socket)
    with agent_socket(live, bob) as socket:
        socket.send(hello())
        received(socket)
        socket.send(encode(Reports(1, (), stolen)))
        assert "token" in refusal(socket).detail
    path = f"{live.url}/v1/artifacts/{'0' * 64}"
    bobs = bob.vouch(Request("GET", f"/v1/artifacts/{'0' * 64}"))
    bearer = f"Bearer {stolen}"
    for headers, status in (
        ({"Authorization": bearer}, 401),
        ({**bobs, "Authorization": bearer}, 401),
        (alice.vouch(Request("GET", "/v1/artifacts/else")), 401),
        (alice.vouch(Request("GET", f"/v1/artifacts/{'0' * 64}")), 404),  # proven: it is not there
    ):
        assert httpx2.get(path, headers=headers, timeout=PATIENCE_S).status_code == status


def test_what_is_no_frame_ends_the_channel_with_a_reason(live: Live) -> None:
    badge = joined(live)
    for data in (b"\xc1", "text", encode(Beat(1, ()))):
        with agent_socket(live, badge) as socket:
            socket.send(data)
            refused = received(socket)
            assert isinstance(refused, Refused)
            with pytest.raises(ConnectionClosed):
                socket.recv(timeout=PATIENCE_S)


def test_a_newer_connection_closes_the_older(live: Live) -> None:
    badge = joined(live)
    with agent_socket(live, badge) as older:
        older.send(hello())
        received(older)
        with agent_socket(live, badge) as newer:
            newer.send(hello(beat=2))
            assert isinstance(received(newer), Welcome)
            assert isinstance(received(older), Refused)
            with pytest.raises(ConnectionClosed):
                older.recv(timeout=PATIENCE_S)


def test_a_long_body_is_answered_before_it_is_sent(live: Live) -> None:
    body = b" " * 10_000_000
    answer = httpx2.post(
        f"{live.url}/v1/nodes", content=body, headers=live.headers, timeout=PATIENCE_S
    )
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")


@pytest.mark.parametrize(
    "path", ["/v1/me", "/v1/me/", "/nowhere", "/%ff%00", "//", "/v1/tasks?x=%ff"]
)
def test_a_host_that_is_none_is_no_fault_of_ours(live: Live, path: str) -> None:
    where = live.url.removeprefix("http://").split(":")
    with socket.create_connection((where[0], int(where[1])), timeout=PATIENCE_S) as raw:
        request = f"GET {path} HTTP/1.1\r\nHost: [\r\nConnection: close\r\n\r\n"
        raw.sendall(request.encode())
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 4"), answer
    assert b"application/problem+json" in answer

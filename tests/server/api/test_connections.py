"""Connections over a real socket: heads and bodies arrive in time, a network holds so many, and an unproven channel
sends one small frame.
"""

from __future__ import annotations

import gc
import select
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

from gpool.core.errors import TooMany
from gpool.server.http import UNPROVEN_BYTES, LimitedWebSocket
from gpool.server.identity.throttle import CHANNELS
from gpool.server.overload.connections import ConnectionCounts, HttpLimits
from gpool.wire.frames import Beat, BeatSeen, Challenge, Refused, Welcome, encode
from tests.server.api.test_socket import agent_socket, bare_socket, hello, joined, received
from tests.server.server_desk import Desk, Live, serving
from tests.tools.processes import PATIENCE_S, eventually

pytestmark = pytest.mark.host_speed
SHORT_S, OPEN_S = 0.2, 2.0
HALF_HEAD = b"GET /healthz HTTP/1.1\r\nx: "
HALF_BODY = b"POST /v1/auth/password HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf"


@contextmanager
def connected(live: Live) -> Iterator[socket.socket]:
    host, port = live.url.rpartition("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
        yield raw


def is_open(raw: socket.socket) -> bool:
    """Return whether nothing arrives, not even an end, for a moment."""
    raw.settimeout(OPEN_S)
    try:
        raw.recv(1)
    except TimeoutError:
        return True
    return False


def rest_of(raw: socket.socket) -> bytes:
    found = b""
    while piece := raw.recv(65_536):
        found += piece
    return found


@pytest.mark.parametrize("sent", [b"", HALF_HEAD, b"\r\n\r\n", HALF_BODY], ids=repr)
def test_what_does_not_arrive_in_time_is_closed(data: Path, sent: bytes) -> None:
    with serving(data, request_head_s=SHORT_S) as live, connected(live) as raw:
        raw.sendall(sent)
        said = rest_of(raw)
        assert not said or said.startswith(b"HTTP/1.1 408")
        assert bool(said) is (sent in (HALF_HEAD, HALF_BODY))


@pytest.mark.parametrize("sent", [HALF_HEAD, HALF_BODY], ids=repr)
def test_without_the_limit_it_stays(data: Path, sent: bytes) -> None:
    """The control."""
    with serving(data, request_head_s=3600) as live, connected(live) as raw:
        raw.sendall(sent)
        assert is_open(raw)


def test_a_body_at_the_lowest_rate_is_read_to_its_end(data: Path) -> None:
    slow = {"request_head_s": SHORT_S, "request_bytes_per_s": 1}
    with serving(data, **slow) as live, connected(live) as raw:
        raw.sendall(HALF_BODY)
        raw.settimeout(SHORT_S / 2)
        for _ in range(12):  # twice the time over which the rate is measured
            raw.sendall(b"x")
            with pytest.raises(TimeoutError):
                raw.recv(1)
        raw.settimeout(PATIENCE_S)
        raw.sendall(b"x" * 84)
        assert raw.recv(12) == b"HTTP/1.1 400"


def test_a_request_is_not_measured_by_the_time_of_the_one_before_it(data: Path) -> None:
    """Found with 10,000 agents: the timer of an earlier body ended a request whose body was still to come."""
    head_s = 0.5  # a body has three times as long
    with serving(data, request_head_s=head_s) as live, connected(live) as raw:
        raw.sendall(HALF_BODY)
        raw.settimeout(head_s / 5)
        with pytest.raises(TimeoutError):
            raw.recv(1)
        raw.settimeout(PATIENCE_S)
        raw.sendall(b"x" * 96)
        assert raw.recv(65_536).startswith(b"HTTP/1.1 400")
        raw.settimeout(2 * head_s)
        with pytest.raises(TimeoutError):  # the connection is idle
            raw.recv(1)
        raw.sendall(HALF_BODY)
        with pytest.raises(TimeoutError):  # the time of the first body ends here
            raw.recv(1)
        raw.settimeout(PATIENCE_S)
        raw.sendall(b"x" * 96)
        assert raw.recv(12) == b"HTTP/1.1 400"


def test_a_network_at_its_limit_gets_in_again_in_exchange_for_its_idle_connections(
    data: Path,
) -> None:
    with serving(data, connections_per_network=4) as live, ExitStack() as stack:
        held = [stack.enter_context(connected(live)) for _ in range(12)]
        assert httpx2.get(f"{live.url}/healthz", timeout=PATIENCE_S).status_code == 200
        assert rest_of_reset(held[0]) == b""


def rest_of_reset(raw: socket.socket) -> bytes:
    try:
        return rest_of(raw)
    except ConnectionResetError:
        return b""


def test_connections_in_use_are_not_given_up_and_further_ones_are_refused(data: Path) -> None:
    with serving(data, connections_per_network=3) as live, ExitStack() as stack:
        task = httpx2.post(
            f"{live.url}/v1/tasks",
            json={"command": ["true"]},
            headers=live.headers,
            timeout=PATIENCE_S,
        ).json()["ids"][0]
        waiting = (
            f"GET /v1/tasks/{task}?wait=60 HTTP/1.1\r\nhost: x\r\n"
            f"authorization: Bearer {live.key}\r\n\r\n"
        ).encode()
        for _ in range(3):
            stack.enter_context(connected(live)).sendall(waiting)
        with connected(live) as raw:
            eventually("a fourth is refused", lambda: refused(live), PATIENCE_S)
            raw.close()


def refused(live: Live) -> bool:
    with connected(live) as raw:
        raw.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        try:
            return raw.recv(12) == b"HTTP/1.1 429"
        except ConnectionResetError:
            return False


def rest_of_handshake(raw: socket.socket) -> bytes:
    """All that the server sends until it ends the connection."""
    raw.settimeout(PATIENCE_S)
    return rest_of_reset(raw)


def ask_with_tls(live: Live) -> bytes:
    """First bytes of the answer to one request."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    with connected(live) as raw, trusting.wrap_socket(raw) as channel:
        channel.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        return channel.recv(12)


HALF_HELLO = bytes([22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3])  # of a longer TLS record


def test_stalled_handshakes_of_a_network_are_replaced_and_an_honest_client_is_served(
    data: Path,
) -> None:
    few = {"connections_per_network": 32, "request_head_s": 3600}
    with serving(data, tls=True, **few) as live, ExitStack() as stack:
        stalled = [stack.enter_context(connected(live)) for _ in range(100)]
        for raw in stalled:
            with suppress(ConnectionError):  # it was replaced already
                raw.sendall(HALF_HELLO)
        assert ask_with_tls(live) == b"HTTP/1.1 200"
        for raw in stalled[:92]:
            assert rest_of_handshake(raw) == b""
        assert is_open(stalled[-1])


def test_without_the_limit_stalled_handshakes_stay(data: Path) -> None:
    """The control."""
    many = {"connections_per_network": 4096, "request_head_s": 3600}
    with serving(data, tls=True, **many) as live, ExitStack() as stack:
        stalled = [stack.enter_context(connected(live)) for _ in range(100)]
        for raw in stalled:
            raw.sendall(HALF_HELLO)
        assert ask_with_tls(live) == b"HTTP/1.1 200"
        ended, _, _ = select.select(stalled, [], [], OPEN_S)
        assert ended == []


@pytest.mark.parametrize("sent", [b"", HALF_HELLO], ids=repr)
def test_a_handshake_that_does_not_end_in_time_is_closed(data: Path, sent: bytes) -> None:
    with serving(data, tls=True, request_head_s=SHORT_S) as live, connected(live) as raw:
        raw.sendall(sent)
        assert rest_of_handshake(raw) == b""


class _Connection:
    """A connection that is always in use."""

    def get_protocol(self) -> None:
        return None

    def abort(self) -> None:
        raise AssertionError("in use")


def admitted(counts: ConnectionCounts, addresses: list[str]) -> int:
    return sum(counts.admit(_Connection(), address) for address in addresses)  # type: ignore[arg-type]


def test_a_48_holds_four_times_as_many_as_a_64_and_a_proxy_as_many_as_there_are() -> None:
    limits = HttpLimits(10, 1000, 1.0, 1, proxies=["192.0.2.0/24"])
    counts = ConnectionCounts(limits)
    one = ["2001:db8::1"] * 50
    assert admitted(counts, one) == 10
    assert admitted(counts, [f"2001:db8:0:{net:x}::1" for net in range(1, 200)]) == 30
    assert admitted(counts, ["2001:db8:1::1"]) == 1
    assert admitted(counts, ["192.0.2.7"] * 100) == 100
    assert admitted(counts, [f"10.0.{net}.1" for net in range(256)] * 8) == 1000 - 141


def test_an_unproven_channel_that_sends_more_than_its_proof_is_aborted(live: Live) -> None:
    with bare_socket(live, joined(live)) as channel:
        assert isinstance(received(channel), Challenge)
        head = bytes([0x82, 0xFF]) + (7_000_000).to_bytes(8, "big") + b"\0" * 4
        channel.socket.sendall(head + b"x" * UNPROVEN_BYTES)
        with pytest.raises(ConnectionClosed):
            channel.recv(timeout=PATIENCE_S)


def test_an_unproven_channel_that_sends_fragments_is_aborted(live: Live) -> None:
    with bare_socket(live, joined(live)) as channel:
        assert isinstance(received(channel), Challenge)
        part = Frame(Opcode.BINARY, b"x" * 10, fin=False).serialize(mask=True)
        channel.socket.sendall(part)
        with pytest.raises(ConnectionClosed):
            channel.recv(timeout=PATIENCE_S)


def test_a_proven_channel_sends_large_frames_in_fragments(live: Live) -> None:
    """The control: the same bytes after the proof."""
    with agent_socket(live, joined(live)) as channel:
        channel.send(hello())
        assert isinstance(received(channel), Welcome)
        holds = encode(Beat(2, ())) + b""
        channel.send([holds[:2], holds[2:]])
        assert received(channel) == BeatSeen(2)
        channel.send(b"x" * (4 * UNPROVEN_BYTES))
        assert isinstance(received(channel), Refused)


def test_a_lost_channel_is_freed_without_a_collection(live: Live) -> None:
    badge = joined(live)
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            with bare_socket(live, badge) as channel:
                assert isinstance(received(channel), Challenge)
        eventually("the channels are freed", lambda: not protocols(), PATIENCE_S)
    finally:
        gc.enable()


def protocols() -> list[LimitedWebSocket]:
    return [each for each in gc.get_objects() if type(each) is LimitedWebSocket]


@pytest.mark.anyio
async def test_channels_without_a_proof_count_for_their_address(desk: Desk) -> None:
    guard = desk.server.guard
    for _ in range(CHANNELS.burst):
        guard.count_channel("192.0.2.1")
    with pytest.raises(TooMany, match="without a proof"):
        guard.count_channel("192.0.2.1")
    guard.count_channel("192.0.2.2")
    guard.channel_was_proven("192.0.2.1")
    guard.count_channel("192.0.2.1")

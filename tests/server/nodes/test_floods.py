"""A node that sends as fast as it can, over a real socket: it is told why it is closed, and its neighbour is heard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import SHUT_RDWR
from threading import Thread

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection

from gpool.server.http import MOST_PINGS
from gpool.server.nodes.guards import MAX_AHEAD
from gpool.wire.frames import (
    Beat,
    BeatSeen,
    Challenge,
    LogChunk,
    OfferChanged,
    Recorded,
    Refused,
    Reports,
    Welcome,
    decode_any_from_server,
    encode,
)
from tests.server.api.test_socket import agent_socket, bare_socket, hello, joined, received
from tests.server.server_desk import Live, an_offer, serving
from tests.tools.processes import PATIENCE_S

FRAMES = 4 * MAX_AHEAD


@contextmanager
def greeted(live: Live, name: str) -> Iterator[ClientConnection]:
    with agent_socket(live, joined(live, name)) as socket:
        socket.send(hello())
        assert isinstance(received(socket), Welcome)
        yield socket


def flood(socket: ClientConnection, frames: int = FRAMES) -> Thread:
    """Sends without waiting for answers."""

    def send() -> None:
        try:
            for number in range(2, frames + 2):
                socket.send(encode(Beat(number, ())))
        except ConnectionClosed:
            return

    sending = Thread(target=send, name="flood")
    sending.start()
    return sending


def answers(socket: ClientConnection, most: int) -> tuple[int, Refused | None]:
    """How many beats were seen, and how it ended."""
    seen = 0
    while seen < most:
        try:
            frame = decode_any_from_server(socket.recv(timeout=PATIENCE_S))  # type: ignore[arg-type]
        except ConnectionClosed:
            break
        if isinstance(frame, Refused):
            return seen, frame
        if isinstance(frame, BeatSeen):
            seen += 1
    return seen, None


def test_a_flood_of_beats_is_closed_with_a_reason_and_others_are_heard(data: Path) -> None:
    with (
        serving(data, node_frames_per_s=200) as live,
        greeted(live, "honest") as honest,
        greeted(live, "flooding") as flooding,
    ):
        sending = flood(flooding)
        for number in range(2, 12):
            honest.send(encode(Beat(number, ())))
            assert received(honest) == BeatSeen(number)
        seen, refused = answers(flooding, FRAMES)
        sending.join()
        assert refused is not None
        assert (refused.code, refused.retry) == ("too_many", True)
        assert "faster than they are answered" in refused.detail
        assert seen < FRAMES // 2


def test_without_the_limit_the_same_flood_is_answered_to_its_end(data: Path) -> None:
    """The control."""
    with serving(data, node_frames_per_s=0) as live, greeted(live, "flooding") as flooding:
        sending = flood(flooding)
        assert answers(flooding, FRAMES) == (FRAMES, None)
        sending.join()


def test_who_waits_for_answers_is_slowed_and_never_closed(data: Path) -> None:
    """Four under way, as an agent has."""
    with serving(data, node_frames_per_s=400) as live:
        badge = joined(live, "busy")
        with agent_socket(live, badge) as socket:
            socket.send(hello())
            assert isinstance(received(socket), Welcome)
            count = 2000  # more than can be spent at once
            for number in range(1, count + 5):
                if number <= count:
                    socket.send(encode(badge.stamped(Reports(number, ()))))
                if number > 4:
                    answer = received(socket)
                    while isinstance(answer, Challenge):
                        answer = received(socket)
                    assert answer == Recorded(number - 4)


def test_who_was_closed_for_flooding_is_not_let_in_at_once(data: Path) -> None:
    with serving(data, node_frames_per_s=200) as live:
        badge = joined(live, "flooding")
        with agent_socket(live, badge) as socket:
            socket.send(hello())
            assert isinstance(received(socket), Welcome)
            sending = flood(socket)
            assert answers(socket, FRAMES)[1] is not None
            sending.join()
        with pytest.raises(InvalidStatus) as refused, bare_socket(live, badge):
            pass
        assert refused.value.response.status_code == 429
        assert b"reconnect in" in refused.value.response.body
        with greeted(live, "another") as other:
            other.send(encode(Beat(2, ())))
            assert received(other) == BeatSeen(2)


def test_a_stranger_who_only_names_a_node_spends_nothing_of_its_budget(data: Path) -> None:
    """Nothing is proved: whatever is sent, the node itself is let in and heard."""
    with serving(data, node_frames_per_s=50) as live:  # so little that a hello is held back
        badge = joined(live, "named")
        with bare_socket(live, badge) as stranger:
            stranger.send(hello())
            sending = flood(stranger)
            refused = answers(stranger, 1)[1]
            sending.join()
            with suppress(OSError):  # closed already
                stranger.socket.shutdown(SHUT_RDWR)
        assert refused is not None
        assert refused.code == "not_signed_in"
        with agent_socket(live, badge) as socket:
            socket.send(hello())
            assert isinstance(received(socket), Welcome)


def test_a_change_of_offer_costs_more_than_a_beat(data: Path) -> None:
    with serving(data, node_frames_per_s=100) as live, greeted(live, "fickle") as socket:
        change = encode(OfferChanged(an_offer()))
        for _ in range(FRAMES):
            try:
                socket.send(change)
            except ConnectionClosed:
                break
        assert answers(socket, 1)[1] is not None


@pytest.mark.parametrize("pings", [MOST_PINGS // 2, MOST_PINGS * 50])
def test_pings_without_end_close_the_connection(live: Live, pings: int) -> None:
    with greeted(live, "pinging") as socket:
        try:
            for number in range(pings):
                socket.ping(str(number))
            socket.send(encode(Beat(2, ())))
            heard = answers(socket, 1)
        except ConnectionClosed:
            heard = 0, None
        assert heard == ((1, None) if pings < MOST_PINGS else (0, None))


@pytest.mark.parametrize("pongs", [MOST_PINGS // 2, MOST_PINGS * 50])
def test_pongs_that_nobody_asked_for_close_the_connection(live: Live, pongs: int) -> None:
    with greeted(live, "ponging") as socket:
        try:
            for _ in range(pongs):
                socket.pong()
            socket.send(encode(Beat(2, ())))
            heard = answers(socket, 1)
        except ConnectionClosed:
            heard = 0, None
        assert heard == ((1, None) if pongs < MOST_PINGS else (0, None))


def test_a_read_full_of_messages_is_taken_in_order_and_whole(data: Path) -> None:
    """Thousands of small frames in one write, and one that is larger than a read, behind one another."""
    with serving(data, node_frames_per_s=0) as live:
        badge = joined(live, "many")
        with agent_socket(live, badge) as socket:
            socket.send(hello())
            assert isinstance(received(socket), Welcome)
            items = tuple(LogChunk(number, 1, 0, 1, b"x" * 1000) for number in range(1000))
            frames = [Reports(number, items if number == 700 else ()) for number in range(1, 1500)]
            written = [
                Frame(Opcode.BINARY, encode(badge.stamped(each))).serialize(mask=True)
                for each in frames
            ]
            sending = Thread(target=socket.socket.sendall, args=(b"".join(written),))
            sending.start()
            told = [received(socket) for _ in frames]
            sending.join()
            assert [each.sequence for each in told if isinstance(each, Recorded)] == [
                each.sequence for each in frames
            ]

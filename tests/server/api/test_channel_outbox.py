"""Frames to one agent: in order, grants at once, and the acknowledgement of an idle node with its next lease."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.websockets import WebSocket
from websockets.frames import Frame, Opcode

from gpool.server.api.channel import ChannelOutbox
from gpool.server.http import WRITE_FRAMES, frame_head
from gpool.wire.frames import (
    BeatSeen,
    FromServer,
    Grants,
    Hold,
    Recorded,
    Refused,
    decode_any_from_server,
)

pytestmark = pytest.mark.anyio
LEASES = Grants(1, (), ())


class Peer:
    """The agent's end: the frames of each write, and of each ASGI message."""

    def __init__(self) -> None:
        self.writes: list[list[FromServer]] = []
        self._grown = asyncio.Event()
        self.is_idle, self.takes = True, True
        scope: Any = {"type": "websocket", "extensions": {WRITE_FRAMES: self._write}}
        self.now_s = 0.0
        self.outbox = ChannelOutbox(
            WebSocket(scope, self._receive, self._send), lambda: self.is_idle, lambda: self.now_s
        )

    def _write(self, *frames: bytes) -> bool:
        if self.takes:
            self.writes.append([decode_any_from_server(data) for data in frames])
            self._grown.set()
        return self.takes

    async def _receive(self) -> Any:
        return {"type": "websocket.connect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "websocket.send":
            self.writes.append([decode_any_from_server(message["bytes"])])
            self._grown.set()

    @classmethod
    async def after_call(cls, next_lease_s: float = 0.001) -> Peer:
        """A node whose report was acknowledged, and which got the next lease so much later."""
        peer = cls()
        peer.outbox.put(Recorded(0))
        peer.now_s += next_lease_s
        peer.outbox.put(LEASES)
        assert await peer.sent(2) == [Recorded(0), LEASES]
        peer.writes.clear()
        return peer

    async def sent(self, count: int) -> list[FromServer]:
        """All frames, once there are so many."""
        sending = asyncio.create_task(self.outbox.send_all())
        while len(found := [frame for write in self.writes for frame in write]) < count:
            self._grown.clear()
            await self._grown.wait()
        sending.cancel()
        self.outbox.close()
        return found


async def test_the_acknowledgement_of_an_idle_node_travels_with_its_next_lease() -> None:
    peer = await Peer.after_call()
    peer.outbox.put(Recorded(1))
    assert peer.writes == []
    peer.outbox.put(LEASES)
    assert peer.writes == [[Recorded(1), LEASES]]
    assert await peer.sent(2) == [Recorded(1), LEASES]


async def test_without_leases_that_follow_closely_it_is_sent_at_once() -> None:
    for peer in (Peer(), await Peer.after_call(next_lease_s=1.0)):
        peer.outbox.put(Recorded(1))
        peer.outbox.put(LEASES)
        assert await peer.sent(2) == [Recorded(1), LEASES]
        assert peer.writes == [[Recorded(1)], [LEASES]]


async def test_it_comes_by_itself_if_no_lease_does() -> None:
    peer = await Peer.after_call()
    peer.outbox.put(Recorded(1))
    assert await peer.sent(1) == [Recorded(1)]


async def test_the_later_acknowledgement_stands_for_both() -> None:
    peer = await Peer.after_call()
    peer.outbox.put(Recorded(1))
    peer.outbox.put(Recorded(2))
    assert await peer.sent(1) == [Recorded(2)]


@pytest.mark.parametrize(
    "frame", [BeatSeen(3), Recorded(2, (Hold(7, 1),)), LEASES, Refused("conflict", "again", True)]
)
async def test_no_frame_overtakes_it(frame: FromServer) -> None:
    peer = await Peer.after_call()
    peer.outbox.put(Recorded(1))
    peer.takes = False  # the peer reads slowly: frames wait
    peer.outbox.put(frame)
    peer.takes = True
    assert await peer.sent(2) == [Recorded(1), frame]


async def test_a_node_with_leases_is_answered_before_the_next_lease() -> None:
    peer = await Peer.after_call()
    peer.is_idle = False
    peer.outbox.put(Recorded(1))
    peer.outbox.put(LEASES)
    assert await peer.sent(2) == [Recorded(1), LEASES]
    assert peer.writes == [[Recorded(1)], [LEASES]]


@pytest.mark.parametrize("length", [0, 1, 125, 126, 65_535, 65_536, 70_000])
def test_a_head_is_that_of_the_library(length: int) -> None:
    data = bytes(length)
    assert frame_head(length) + data == Frame(Opcode.BINARY, data).serialize(mask=False)

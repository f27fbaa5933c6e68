"""The agent's WebSocket: carries frames between the socket, the handshake and the channel, one at a time and in order."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from fastapi import APIRouter
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from gpool.core.errors import GpoolError, Invalid, NotSignedIn
from gpool.core.ids import NodeId, decode
from gpool.server.api.problems import problem
from gpool.server.api.requests import server_of
from gpool.server.channel import Channel
from gpool.server.handshake import Handshake
from gpool.server.identity.node_gate import JOIN_AGAIN
from gpool.wire.frames import (
    CHANNEL_PATH,
    MAX_FRAME_BYTES,
    MAX_PROOF_BYTES,
    NODE_HEADER,
    FromServer,
    Malformed,
    Refused,
    decode_any_from_agent,
    encode,
)

log = logging.getLogger(__name__)
router = APIRouter()

MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Frames an agent has not taken yet; one that lets more pile up is cut off and may come again."""

PROVE_WITHIN_S = 10.0
"""Connections that have proved nothing are not kept."""


class _Outbox:
    """Frames on their way to one agent."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._waiting: deque[bytes | None] = deque()
        self._more = asyncio.Event()
        self._bytes = 0

    def put(self, frame: FromServer) -> None:
        data = encode(frame)
        self._bytes += len(data)
        self._waiting.append(data)
        if isinstance(frame, Refused) or self._bytes > MAX_WAITING_BYTES:
            self._waiting.append(None)
        self._more.set()

    async def carry(self) -> None:
        """Until the channel is over."""
        while True:
            while self._waiting:
                data = self._waiting.popleft()
                if data is None:
                    await self._socket.close()
                    return
                await self._socket.send_bytes(data)
                self._bytes -= len(data)
            self._more.clear()
            await self._more.wait()


@router.websocket(CHANNEL_PATH)
async def agent_channel(socket: WebSocket) -> None:
    server = server_of(socket)
    try:
        who = await server.gate.node(_named(socket))
        if who is None:
            raise NotSignedIn(JOIN_AGAIN)
    except GpoolError as error:
        await socket.send_denial_response(problem(error, socket.scope["path"]))
        return
    await socket.accept()
    outbox = _Outbox(socket)
    handshake = Handshake(server.gate, who, server.clock.now, outbox.put)
    channel = Channel(server, who, outbox.put)
    carrier = asyncio.create_task(outbox.carry(), name=f"gpool-channel-{who.node}")
    try:
        handshake.begin()
        await _listen(socket, handshake, channel)
        if socket.application_state is WebSocketState.CONNECTED:
            await carrier  # what is left, a refusal last
    except WebSocketDisconnect:
        pass
    finally:
        await channel.close()
        carrier.cancel()
        await asyncio.gather(carrier, return_exceptions=True)


def _named(socket: WebSocket) -> NodeId:
    """Who it says it is."""
    text = socket.headers.get(NODE_HEADER)
    if text is None:
        raise NotSignedIn(
            f"the channel is for nodes, which name themselves in '{NODE_HEADER}' and prove their key; "
            "install the same gpool version, and join with a link"
        )
    try:
        return NodeId(decode("node", text))
    except Invalid as error:
        raise NotSignedIn(JOIN_AGAIN) from error


async def _listen(socket: WebSocket, handshake: Handshake, channel: Channel) -> None:
    while not channel.closed and not handshake.is_proven:
        try:
            async with asyncio.timeout(PROVE_WITHIN_S):
                message = await socket.receive()
        except TimeoutError:
            channel.refuse("not_signed_in", "no proof came in time; connect again", retry=True)
            return
        await _pass_on(message, MAX_PROOF_BYTES, handshake, channel)
    while not channel.closed:
        await _pass_on(await socket.receive(), MAX_FRAME_BYTES, handshake, channel)


async def _pass_on(message: Message, most: int, handshake: Handshake, channel: Channel) -> None:
    """One message from the socket, as far as it may go."""
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1005))
    data = message.get("bytes")
    if data is None or len(data) > most:
        channel.refuse("invalid", f"frames are binary and at most {most} bytes", retry=False)
        return
    try:
        frame = decode_any_from_agent(data)
    except Malformed as error:
        channel.refuse("invalid", f"not a frame: {error}", retry=False)
        return
    passed = await handshake.take(frame)
    if isinstance(passed, Refused):
        channel.refuse(passed.code, passed.detail, retry=passed.retry)
    elif passed is not None:
        await channel.receive(passed)

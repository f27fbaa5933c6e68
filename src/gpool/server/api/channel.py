"""The agent's WebSocket: carries frames between the socket and `server.channel.Channel`, one at a time and in order."""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from gpool.core.errors import Forbidden, GpoolError
from gpool.server.api.problems import problem
from gpool.server.api.requests import caller, server_of
from gpool.server.channel import Channel
from gpool.server.store.values import NodeCredentials
from gpool.wire.frames import (
    CHANNEL_PATH,
    MAX_FRAME_BYTES,
    Malformed,
    Refused,
    ServerFrame,
    decode_from_agent,
    encode,
)

log = logging.getLogger(__name__)
router = APIRouter()

MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Frames an agent has not taken yet; one that lets more pile up is cut off and may come again."""


class _Outbox:
    """Frames on their way to one agent."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._bytes = 0

    def put(self, frame: ServerFrame) -> None:
        data = encode(frame)
        self._bytes += len(data)
        self._waiting.put_nowait(data)
        if isinstance(frame, Refused) or self._bytes > MAX_WAITING_BYTES:
            self._waiting.put_nowait(None)

    async def carry(self) -> None:
        """Until the channel is over."""
        while (data := await self._waiting.get()) is not None:
            await self._socket.send_bytes(data)
            self._bytes -= len(data)
        await self._socket.close()


@router.websocket(CHANNEL_PATH)
async def agent_channel(socket: WebSocket) -> None:
    try:
        who = await caller(socket)
        if not isinstance(who, NodeCredentials):
            raise Forbidden("the channel is for nodes; use a node's secret (gpn_…)")
    except GpoolError as error:
        await socket.send_denial_response(problem(error, socket.scope["path"]))
        return
    await socket.accept()
    outbox = _Outbox(socket)
    channel = Channel(server_of(socket), who, outbox.put)
    carrier = asyncio.create_task(outbox.carry(), name=f"gpool-channel-{who.node}")
    try:
        await _listen(socket, channel)
        if socket.application_state is WebSocketState.CONNECTED:
            await carrier  # what is left, a refusal last
    except WebSocketDisconnect:
        pass
    finally:
        await channel.close()
        carrier.cancel()
        await asyncio.gather(carrier, return_exceptions=True)


async def _listen(socket: WebSocket, channel: Channel) -> None:
    while not channel.closed:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1005))
        data = message.get("bytes")
        if data is None or len(data) > MAX_FRAME_BYTES:
            channel.refuse("invalid", "frames are binary and at most 8 MiB", retry=False)
            return
        try:
            frame = decode_from_agent(data)
        except Malformed as error:
            channel.refuse("invalid", f"not a frame: {error}", retry=False)
            return
        await channel.receive(frame)

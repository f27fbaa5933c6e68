"""The agents' WebSocket: passes frames between socket, handshake and channel, one at a time and in order.

A node over its frame budget (`nodes.guards`) is read slowly; a flooding node is refused and disconnected.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from gpool.core.errors import GpoolError, Invalid, NotSignedIn, TooMany, Unreachable
from gpool.core.ids import NodeId, decode
from gpool.core.ids import encode as encode_id
from gpool.core.permissions import Action
from gpool.observability.logs import get_logger
from gpool.server.api.callers import KNOWN, address_of, is_draining, server_of
from gpool.server.api.endpoints import EndpointRouter
from gpool.server.api.problems import problem
from gpool.server.http import PROVEN, WRITE_FRAMES
from gpool.server.identity.node_proofs import JOIN_AGAIN
from gpool.server.identity.throttle import RouteClass
from gpool.server.nodes.connection import NodeChannel
from gpool.server.nodes.guards import (
    FLOODING,
    MAX_AHEAD,
    MAX_AHEAD_BYTES,
    FrameBudget,
    Handshake,
    cost_of,
)
from gpool.server.server import Server
from gpool.wire.frames import (
    CHANNEL_PATH,
    MAX_FRAME_BYTES,
    MAX_PROOF_BYTES,
    NODE_HEADER,
    FromServer,
    Grants,
    Malformed,
    Recorded,
    Refused,
    encode,
)
from gpool.wire.tolerance import read_from_agent

log = get_logger(__name__)
routes = EndpointRouter("channel")

MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Limit of unsent frames to one agent; past it the agent is disconnected and may reconnect."""

ORDERLY = (1000, 1001)
"""Close codes of an agent that ended its connection itself (RFC 6455); others: it crashed or the network broke."""

RETRY_S = 1
"""Retry-After of a server that drains or has no database: behind a load balancer the next attempt meets another one."""

PROVE_WITHIN_S = 10.0
"""Time limit for the proof of a new connection."""


ACK_WAITS_S = 0.02
"""How long the acknowledgement of an idle node's reports waits for grants to travel with."""


class ChannelOutbox:
    """Sends frames in order. Grants are written at once if no other frame waits: a task's start must not wait for the
    work of the loop's current iteration.

    An idle node (`is_idle`: it holds no lease) has nothing else to report, so nothing waits for the acknowledgement of
    its last report. Where leases follow acknowledgements closely, as with calls one after another, it travels with the
    next lease, which spares both sides a wake-up.
    """

    def __init__(
        self, socket: WebSocket, is_idle: Callable[[], bool], time: Callable[[], float]
    ) -> None:
        self._socket, self._is_idle, self._time = socket, is_idle, time
        self._write: Callable[..., bool] = socket.scope.get("extensions", {}).get(
            WRITE_FRAMES, lambda *_: False
        )
        self._waiting: deque[bytes | None] = deque()
        self._more = asyncio.Event()
        self._bytes = 0
        self._ack: bytes | None = None
        self._ack_timer: asyncio.TimerHandle | None = None
        self._acked_at = float("-inf")
        self._leases_follow = False  # the last lease came soon after an acknowledgement

    def put(self, frame: FromServer) -> None:
        data = encode(frame)
        if type(frame) is Grants:
            self._leases_follow = self._time() - self._acked_at < ACK_WAITS_S
        elif type(frame) is Recorded:
            self._acked_at = self._time()
            if not frame.refused:
                if self._leases_follow and not self._waiting and self._is_idle():
                    self._hold(data)
                    return
                self._take_ack()  # this frame acknowledges as much, and more
        ack = self._take_ack()
        frames = (data,) if ack is None else (ack, data)
        if type(frame) is Grants and not self._waiting and self._write(*frames):
            return
        for each in frames:
            self._add(each)
        if isinstance(frame, Refused) or self._bytes > MAX_WAITING_BYTES:
            self._waiting.append(None)

    def _add(self, data: bytes) -> None:
        self._bytes += len(data)
        self._waiting.append(data)
        self._more.set()

    def _hold(self, ack: bytes) -> None:
        self._ack = ack
        if self._ack_timer is None:
            loop = asyncio.get_running_loop()
            self._ack_timer = loop.call_later(ACK_WAITS_S, self._send_ack)

    def _take_ack(self) -> bytes | None:
        ack, self._ack = self._ack, None
        return ack

    def _send_ack(self) -> None:
        self._ack_timer = None
        ack = self._take_ack()
        if ack is not None:
            self._add(ack)

    def close(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()

    async def send_all(self) -> None:
        while True:
            while self._waiting:
                data = self._waiting[0]  # stays until it is sent, so that no frame overtakes it
                if data is None:
                    await self._socket.close()
                    return
                if not self._write(data):
                    await self._socket.send_bytes(data)
                self._waiting.popleft()
                self._bytes -= len(data)
            self._more.clear()
            await self._more.wait()


class _Inbox:
    def __init__(self, socket: WebSocket, pace: FrameBudget) -> None:
        self._socket, self._pace = socket, pace
        self._ahead: deque[Message] = deque()
        self._ahead_bytes = 0
        self._time = asyncio.get_running_loop().time

    async def next(self) -> Message:
        if not self._ahead:
            return await self._socket.receive()
        message = self._ahead.popleft()
        self._ahead_bytes -= _size(message)
        return message

    def wait_s(self, frames: float, size_bytes: int) -> float:
        return self._pace.spend(frames, size_bytes, self._time())

    async def throttle(self, wait_s: float) -> bool:
        if await self._read_ahead(self._time() + wait_s):
            return True
        self._pace.block(self._time())
        return False

    async def _read_ahead(self, ends_s: float) -> bool:
        while self._ahead_bytes <= MAX_AHEAD_BYTES:
            if self._ahead and self._ahead[-1]["type"] == "websocket.disconnect":
                return True  # the last message
            try:
                async with asyncio.timeout_at(ends_s):
                    message = await self._socket.receive()
            except TimeoutError:
                return True
            self._ahead.append(message)
            self._ahead_bytes += _size(message)
            if len(self._ahead) > MAX_AHEAD:
                return False
        await asyncio.sleep(max(0.0, ends_s - self._time()))
        return True


def _is_idle(server: Server, node: NodeId) -> bool:
    """True if the node holds no lease."""
    entry = server.picture.state.nodes.get(node)
    return not server.picture.is_stale and (entry is None or not entry.lines)


def _size(message: Message) -> int:
    return len(message.get("bytes") or message.get("text") or b"")


@routes.websocket(CHANNEL_PATH, Action.NODE_CHANNEL, Action.NODE_REPORT, rate=RouteClass.STREAM)
async def agent_channel(socket: WebSocket) -> None:
    server = server_of(socket)
    try:
        if is_draining(socket):
            raise Unreachable("this server is stopping; connect again", retry_after=RETRY_S)
        if problem_of_database := await socket.app.state.readiness.problem():
            raise Unreachable(problem_of_database, retry_after=RETRY_S)
        server.guard.count_channel(address_of(socket))
        who = await server.gate.node(_claimed_node(socket))
        if who is None:
            raise NotSignedIn(JOIN_AGAIN)
        pace = server.paces.of(who.node, asyncio.get_running_loop().time)
        _refuse_flooder(pace)
    except GpoolError as error:
        await socket.send_denial_response(problem(error, socket.scope["path"]))
        return
    await socket.accept()
    time = asyncio.get_running_loop().time
    outbox = ChannelOutbox(socket, lambda: _is_idle(server, who.node), time)
    handshake = Handshake(server.gate, who, server.clock.now, outbox.put)
    channel = NodeChannel(server, who, outbox.put)
    sender = asyncio.create_task(outbox.send_all(), name=f"gpool-channel-{who.node}")
    is_orderly = False
    try:
        handshake.begin()
        await _listen(_Inbox(socket, pace), handshake, channel, lambda: _proven(socket, who.node))
        if socket.application_state is WebSocketState.CONNECTED:
            await sender  # the remaining frames, a refusal last
    except WebSocketDisconnect as gone:
        is_orderly = gone.code in ORDERLY
    except Unreachable as error:  # the database: another replica may reach it
        channel.refuse(error.code, error.detail, retry=True)
        await asyncio.wait([sender], timeout=RETRY_S)
    finally:
        await channel.close(is_orderly=is_orderly)
        outbox.close()
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


def _refuse_flooder(pace: FrameBudget) -> None:
    shut_s = pace.blocked_for_s(asyncio.get_running_loop().time())
    if shut_s:
        raise TooMany(
            f"this node sent frames much faster than allowed; reconnect in {shut_s:.0f} seconds"
        )


def _claimed_node(socket: WebSocket) -> NodeId:
    text = socket.headers.get(NODE_HEADER)
    if text is None:
        raise NotSignedIn(
            f"the channel is for nodes, which send their id in '{NODE_HEADER}' and prove their key; "
            "install the server's gpool version and join with a link"
        )
    try:
        return NodeId(decode("node", text))
    except Invalid as error:
        raise NotSignedIn(JOIN_AGAIN) from error


def _proven(socket: WebSocket, node: NodeId) -> None:
    """Lift the limits of a channel whose node has proved its key, and name the node in its log lines."""
    socket.scope[KNOWN] = encode_id("node", node)
    server_of(socket).guard.channel_was_proven(address_of(socket))
    lift = socket.scope.get("extensions", {}).get(PROVEN)
    if lift is not None:  # served by uvicorn
        lift()


async def _listen(
    inbox: _Inbox, handshake: Handshake, channel: NodeChannel, proven: Callable[[], None]
) -> None:
    while not channel.closed and not handshake.is_proven:
        try:
            async with asyncio.timeout(PROVE_WITHIN_S):
                message = await inbox.next()
        except TimeoutError:
            channel.refuse("not_signed_in", "no proof arrived in time; reconnect", retry=True)
            return
        await _receive(message, MAX_PROOF_BYTES, inbox, handshake, channel)
    if handshake.is_proven:
        proven()
    while not channel.closed:
        await _receive(await inbox.next(), MAX_FRAME_BYTES, inbox, handshake, channel)


async def _receive(
    message: Message, most: int, inbox: _Inbox, handshake: Handshake, channel: NodeChannel
) -> None:
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1005))
    data = message.get("bytes")
    if data is None or len(data) > most:
        channel.refuse("invalid", f"frames are binary and at most {most} bytes", retry=False)
        return
    try:
        frame = read_from_agent(data)
    except Malformed as error:
        channel.refuse("invalid", f"not a frame: {error}", retry=False)
        return
    was_proven = handshake.is_proven
    if frame is None and not was_proven:
        channel.refuse("invalid", "the first frame is not known here", retry=False)
        return
    # Before the proof the node is only claimed, so its budget is not charged; one frame is allowed.
    cost = 1.0
    if frame is not None:
        cost = cost_of(frame, channel.changed_gpus(frame)) if was_proven else cost_of(frame)
    wait_s = inbox.wait_s(cost, len(data)) if was_proven else 0.0
    if wait_s > 0 and not await inbox.throttle(wait_s):
        log.warning("node floods the server with frames; closing its connection", node=channel.node)
        channel.refuse("too_many", FLOODING, retry=True)
        return
    if frame is None:
        log.debug("a frame of another release was left out", node=channel.node)
        return
    passed = await handshake.take(frame)
    if handshake.is_proven and not was_proven:
        inbox.wait_s(cost, len(data))  # charged for the proof, so that the next frame waits
    if isinstance(passed, Refused):
        channel.refuse(passed.code, passed.detail, retry=passed.retry)
    elif passed is not None:
        await channel.receive(passed)

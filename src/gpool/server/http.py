"""uvicorn's server, HTTP and WebSocket protocols with limits that apply before the application is called: connections
and TLS handshakes per network, time for them, heads, bodies and answers, one small frame before a channel's proof. Input
must not fill memory or block the loop. One file because listener and protocols share connections, counts and buffers.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request
from websockets.protocol import State

from gpool.observability.logs import get_logger
from gpool.server.joined_head import JoinedHead
from gpool.server.overload.connections import ConnectionCounts, HttpLimits
from gpool.wire.frames import MAX_PROOF_BYTES

log = get_logger(__name__)

MAX_HEAD_BYTES = 64 * 1024
"""Limit of request line and headers over several reads; `api.callers` checks a head that came in one read."""

BODY_WINDOW = 3
"""Time over which the rate of a body is measured, in times of the limit for heads: links stall for seconds."""

MOST_PINGS = 100
"""Pings and pongs between two messages: an agent pings every ten seconds and sends heartbeats as often."""
MOST_FRAGMENTS = 10_000
MOST_UNREAD = 64
"""Parsed messages the application has not received; parsing stops there. One read may hold tens of thousands."""
MOST_LATE = 100
"""Messages accepted after our close frame, sent before the peer saw it. Then reading stops and uvicorn closes."""
PIECE_BYTES = 16 * 1024
UNPROVEN_BYTES = MAX_PROOF_BYTES + 64
"""Bytes accepted before the proof: the one frame of the proof with its head."""
PROVEN = "gpool.proven"
"""Extension of a channel's scope: called without arguments when its node has proved its key."""
WRITE_FRAMES = "gpool.write_frames"
"""Extension of a channel's scope: called with binary frames, writes them at once; False: send them the ordinary way."""

LATE_S = 1.0
"""A body that did not go on for this long may be given up for a new connection."""
ACCEPTED_AT_ONCE = 64
"""Most connections that are accepted in one turn of the event loop."""
ACCEPT_AGAIN_S = 1.0
"""Pause after an accept that failed for lack of descriptors or memory."""


def _refusal(status: str, headers: str = "") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: text/plain\r\n{headers}"
        "content-length: 0\r\nconnection: close\r\n\r\n"
    ).encode()


_TOO_LARGE = _refusal("431 Request Header Fields Too Large")
_TOO_SLOW = _refusal("408 Request Timeout")
_TOO_MANY = _refusal("429 Too Many Requests", "retry-after: 5\r\n")


class TlsHandshake:
    """Accepted connection without TLS yet, to be counted like a connection."""

    rank = 0

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def abort(self) -> None:
        """End the connection; the transport reads the end and closes it."""
        with suppress(OSError):  # closed already
            self._connection.shutdown(socket.SHUT_RDWR)


class LimitedConfig(uvicorn.Config):
    """uvicorn's configuration with the limits that both protocols apply."""

    def __init__(self, app: Any, limits: HttpLimits, **options: Any) -> None:
        super().__init__(app, http=LimitedHttp, ws=LimitedWebSocket, **options)
        self.limits = limits
        self.counts = ConnectionCounts(limits)
        self.handshakes = ConnectionCounts(limits.of_handshakes)


class LimitedServer(uvicorn.Server):
    """uvicorn's server which, with TLS, accepts connections itself: uvicorn learns of one after its handshake only, and its
    event loop accepts one in each turn, so that a busy server lets new clients wait for seconds.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config = cast("LimitedConfig", self.config)
        if config.ssl is None:
            await super().startup(sockets)
            return
        await super().startup([])  # the application; listens nowhere
        try:
            listening = sockets or await listening_sockets(config)
        except OSError as failure:
            log.error(  # noqa: TRY400
                "cannot listen", host=config.host, port=config.port, error=str(failure)
            )
            await self.lifespan.shutdown()
            sys.exit(STARTUP_FAILURE)
        acceptor = Acceptor(listening, config, self._protocol)
        self.servers = [cast("asyncio.Server", acceptor)]
        for each in listening:
            host, port = each.getsockname()[:2]
            log.info("listening", host=host, port=port, tls=config.ssl is not None)

    def _protocol(self) -> asyncio.Protocol:
        return LimitedHttp(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


async def listening_sockets(config: uvicorn.Config) -> list[socket.socket]:
    """One socket per address of the host."""
    found = await asyncio.get_running_loop().getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    made: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((family, address) for family, *_, address in found):
            made.append(socket.create_server(address, family=family, backlog=config.backlog))
    except OSError:
        for each in made:
            each.close()
        raise
    return made


class Acceptor:
    """Accepts all connections that wait, in each turn of the loop. With TLS it counts one for its network from the accept
    on, and gives its handshake the time of a head.
    """

    def __init__(
        self,
        listening: Sequence[socket.socket],
        config: LimitedConfig,
        protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        self._config, self._protocol = config, protocol
        self._listening = listening
        self._handshakes: dict[asyncio.Task[None], TlsHandshake] = {}
        for each in listening:
            each.setblocking(False)
        self._accepting = [asyncio.create_task(self._accept(each)) for each in listening]

    def close(self) -> None:
        for task in self._accepting:
            task.cancel()
        for each in self._listening:
            each.close()
        for handshake in self._handshakes.values():
            handshake.abort()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (address, *_) = await loop.sock_accept(listening)
            except OSError as failure:
                if failure.errno != errno.ECONNABORTED:  # else the peer's affair
                    log.warning("cannot accept a connection", error=str(failure))
                    await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            self._begin(connection, address)
            for _ in range(ACCEPTED_AT_ONCE):
                try:
                    connection, (address, *_) = listening.accept()
                except OSError:  # none waits, or the next `sock_accept` says why
                    break
                connection.setblocking(False)
                self._begin(connection, address)

    def _begin(self, connection: socket.socket, address: str) -> None:
        handshake = TlsHandshake(connection)
        is_tls = self._config.ssl is not None
        if is_tls and not self._config.handshakes.admit(handshake, address):
            connection.close()
            return
        task = asyncio.get_running_loop().create_task(self._shake_hands(connection))
        self._handshakes[task] = handshake
        task.add_done_callback(self._end)

    async def _shake_hands(self, connection: socket.socket) -> None:
        config = self._config
        with suppress(OSError):  # as of `ssl` and of the time limit: the transport has closed it
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                connection,
                ssl=config.ssl,
                ssl_handshake_timeout=None if config.ssl is None else config.limits.head_s,
            )

    def _end(self, task: asyncio.Task[None]) -> None:
        self._config.handshakes.release(self._handshakes.pop(task))


class LimitedHttp(HttpToolsProtocol):
    _in_head = False
    _in_body = False
    _is_upgraded = False
    _head_bytes = 0
    _body_bytes = 0
    _received_at = 0.0
    _head_timer: asyncio.TimerHandle | None = None
    _body_timer: asyncio.TimerHandle | None = None
    _answer_timer: asyncio.TimerHandle | None = None
    _unsent_bytes = 0  # when the timer was set

    @property
    def _config(self) -> LimitedConfig:
        return cast("LimitedConfig", self.config)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._config.counts.admit(transport, self.client[0] if self.client else ""):
            self._expect_head()
        else:
            transport.write(_TOO_MANY)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._config.counts.release(self.transport)
        self._stop_timers()
        self._forget_request()

    def handle_websocket_upgrade(self) -> None:
        self._is_upgraded = True
        self._stop_timers()
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body, self._body_bytes = False, True, 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = cast("Any", JoinedHead(self.transport, self.loop))

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        if self._body_timer is not None:  # it would measure the body of the next request
            self._body_timer.cancel()
            self._body_timer = None
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._received_at = self.loop.time()
        super().data_received(data)
        if self._is_upgraded:  # the WebSocket protocol has replaced this one
            self.parser = None  # type: ignore[assignment]
            self._forget_request()
            return
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_TOO_LARGE)
        elif self._in_body:
            self._expect_body()
        elif self._is_idle and self.timeout_keep_alive_task is None:
            self._expect_head()  # blank lines: uvicorn has stopped its timer, and no head has begun

    @property
    def rank(self) -> int | None:
        """Rank among connections that can be closed for a new one: without a request so far, idle, with a body that does
        not arrive; None: in use.
        """
        if self._is_idle:
            return 0 if self.cycle is None else 1
        is_late = self.loop.time() - self._received_at > LATE_S
        return 2 if self._in_body and not self.flow.read_paused and is_late else None

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        if self._head_timer is None:
            seconds = self._config.limits.head_s
            self._head_timer = self.loop.call_later(seconds, self._end_slow_head)

    def _end_slow_head(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(_TOO_SLOW if self._in_head and self._is_idle else b"")

    def _expect_body(self) -> None:
        if self._body_timer is None:
            self._body_bytes = 0
            seconds = self._config.limits.head_s * BODY_WINDOW
            self._body_timer = self.loop.call_later(seconds, self._check_body)

    def _check_body(self) -> None:
        self._body_timer = None
        if not self._in_body or self.transport.is_closing():
            return
        limits = self._config.limits
        least = limits.body_bytes_per_s * limits.head_s * BODY_WINDOW
        # Only the sender's own delay counts: the application may wait before it reads or continues.
        is_waiting = self.flow.read_paused or self.cycle.waiting_for_100_continue
        if is_waiting or self._body_bytes >= least:
            self._expect_body()
        else:
            self._refuse(b"" if self.cycle.response_started else _TOO_SLOW)

    def pause_writing(self) -> None:
        """Called while the peer reads more slowly than the answer is written; else it would keep the answer in memory."""
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

    def _expect_reader(self) -> None:
        if self._answer_timer is None:
            self._unsent_bytes = self.transport.get_write_buffer_size()
            seconds = self._config.limits.head_s * BODY_WINDOW
            self._answer_timer = self.loop.call_later(seconds, self._check_reader)

    def _check_reader(self) -> None:
        self._answer_timer = None
        limits = self._config.limits
        least = limits.body_bytes_per_s * limits.head_s * BODY_WINDOW
        if self._unsent_bytes - self.transport.get_write_buffer_size() >= least:
            self._expect_reader()
        else:
            self.transport.abort()  # `close` would wait for the reader

    def _refuse(self, response: bytes) -> None:
        if response:
            self.transport.write(response)
        self.transport.close()

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._body_timer, self._answer_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._body_timer = self._answer_timer = None

    def _forget_request(self) -> None:
        """Break the reference cycles of a request, so that its body is freed at once, not at the next collection."""
        self.cycle = self.scope = self.headers = None  # type: ignore[assignment]
        self.pipeline.clear()


def frame_head(length: int) -> bytes:
    """Head of a whole binary frame of the server, which is not masked (RFC 6455, 5.2)."""
    if length < 126:
        return bytes((0x82, length))
    if length < 1 << 16:
        return b"\x82\x7e" + length.to_bytes(2, "big")
    return b"\x82\x7f" + length.to_bytes(8, "big")


class LimitedWebSocket(WebSocketsSansIOProtocol):
    _pings = 0
    _late = 0
    _unparsed = b""
    _is_proven = False
    _unproven_bytes = 0
    _has_message = False

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            extensions = cast("Any", self.scope)["extensions"]
            extensions[PROVEN], extensions[WRITE_FRAMES] = self.prove, self.write_frames

    @property
    def rank(self) -> int | None:
        return None if self._is_proven else 0

    def prove(self) -> None:
        """Lift the limits of unproven channels; the connection no longer counts for its network."""
        if self._unproven_bytes > UNPROVEN_BYTES:  # bytes after the proof were dropped
            self.transport.abort()
        self._is_proven = True
        cast("LimitedConfig", self.config).counts.release(self.transport)

    def write_frames(self, *frames: bytes) -> bool:
        """Write binary frames, without the steps of ASGI messages; False if their send would wait or fail."""
        is_open = (
            self.handshake_complete and not self.close_sent and not self.transport.is_closing()
        )
        if not is_open or not self.writable.is_set() or self.conn.state is not State.OPEN:
            return False
        assert not self.conn.extensions, "frames are written as they are"
        parts: list[bytes] = []
        for data in frames:
            parts += (frame_head(len(data)), data)
        self.transport.write(b"".join(parts))
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop what was received: the objects refer to one another, and a collection may be minutes away."""
        super().connection_lost(exc)
        cast("LimitedConfig", self.config).counts.release(self.transport)
        self.frames, self._unparsed = [], b""
        self.conn.reader.discard()
        self.conn.parser.close()
        self.conn.events.clear()
        if self.handshake_initiated and self.response.status_code == 101:
            for name in (PROVEN, WRITE_FRAMES):
                cast("Any", self.scope)["extensions"].pop(name, None)
        if not self._is_proven:
            while self.queue.qsize() > 1:  # the last message says that the peer is gone
                self.queue.get_nowait()

    def data_received(self, data: bytes) -> None:
        if self._is_closed:
            return
        if self.handshake_initiated and not self._is_proven:
            room = max(0, UNPROVEN_BYTES - self._unproven_bytes)
            self._unproven_bytes += len(data)
            if len(data) > room:
                self._refuse_overrun(data[:room])
                return
        if not self._unparsed and len(data) <= PIECE_BYTES:
            super().data_received(data)
        else:
            self._unparsed += data
            self._parse()

    def _refuse_overrun(self, accepted: bytes) -> None:
        """Drop the bytes past the limit. The application refuses a first message that is whole, with a reason."""
        if accepted:
            super().data_received(accepted)
        if not self._has_message:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.pause_reading()

    def _parse(self) -> None:
        """Parse until `MOST_UNREAD` messages wait; uvicorn reads nothing more meanwhile."""
        while self._unparsed and not self._is_closed:
            if self.queue.qsize() >= MOST_UNREAD and not self.close_sent:
                return
            piece, self._unparsed = self._unparsed[:PIECE_BYTES], self._unparsed[PIECE_BYTES:]
            super().data_received(piece)

    async def receive(self) -> Any:
        message = await super().receive()
        if self._unparsed:
            self._parse()
        return message

    def handle_ping(self) -> None:
        self._pings += 1
        if self._pings <= MOST_PINGS:
            super().handle_ping()
        elif not self.transport.is_closing():
            self.transport.abort()

    def handle_pong(self, event: Frame) -> None:
        """Limit pongs too: the server sends no pings, so each is unsolicited."""
        self._pings += 1
        if self._pings <= MOST_PINGS:
            super().handle_pong(event)
        elif not self.transport.is_closing():
            self.transport.abort()

    def handle_bytes(self, event: Frame) -> None:
        if self._is_proven or event.fin:
            super().handle_bytes(event)
        elif not self.transport.is_closing():
            self.transport.abort()

    def handle_cont(self, event: Frame) -> None:
        if self._is_proven and len(self.frames) < MOST_FRAGMENTS:
            super().handle_cont(event)
        elif not self.transport.is_closing():
            self.transport.abort()

    def send_receive_event_to_app(self) -> None:
        self._pings = 0
        self._has_message = True
        if not self.close_sent:
            super().send_receive_event_to_app()
            return
        self.frames = []
        self._late += 1
        if self._late == MOST_LATE:  # not aborted: our close frame would be lost
            self.transport.pause_reading()

    @property
    def _is_closed(self) -> bool:
        return self._late >= MOST_LATE or self.transport.is_closing()

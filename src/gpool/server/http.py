"""HTTP and WebSockets as uvicorn speaks them, with an end to what is read before anything of ours is asked.

A request's head that never comes to its end must not fill the memory; nor may a connection keep the loop busy with what never
reaches the application: pings and pongs, fragments without end, or whatever comes after we have said goodbye.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers. What comes in one read is looked at again by `api.limits`."""

MOST_PINGS = 100
"""Between two messages: an agent pings every ten seconds, and beats as often."""
MOST_FRAGMENTS = 10_000
MOST_UNREAD = 64
"""Messages cut from what was read, and not yet taken: the rest stays uncut. A read may hold tens of thousands of them."""
MOST_LATE = 100
"""Messages after our goodbye: what was under way, until the other side has heard it. Then we read no more, and uvicorn ends it."""
PIECE_BYTES = 16 * 1024

_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class LimitedHttp(HttpToolsProtocol):
    _in_head = False
    _head_bytes = 0

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_REFUSAL)
                self.transport.close()


class LimitedWebSocket(WebSocketsSansIOProtocol):
    _pings = 0
    _late = 0
    _uncut = b""

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if not self._uncut and len(data) <= PIECE_BYTES:
            super().data_received(data)
        else:
            self._uncut += data
            self._cut()

    def _cut(self) -> None:
        """No further than the application follows. While messages wait uvicorn reads nothing more."""
        while self._uncut and not self._is_deaf:
            if self.queue.qsize() >= MOST_UNREAD and not self.close_sent:
                return
            piece, self._uncut = self._uncut[:PIECE_BYTES], self._uncut[PIECE_BYTES:]
            super().data_received(piece)

    async def receive(self) -> Any:
        message = await super().receive()
        if self._uncut:
            self._cut()
        return message

    def handle_ping(self) -> None:
        self._pings += 1
        if self._pings <= MOST_PINGS:
            super().handle_ping()
        elif not self.transport.is_closing():
            self.transport.abort()

    def handle_pong(self, event: Frame) -> None:
        """We ping nobody: it answers nothing, and costs as much to read."""
        self._pings += 1
        if self._pings <= MOST_PINGS:
            super().handle_pong(event)
        elif not self.transport.is_closing():
            self.transport.abort()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < MOST_FRAGMENTS:
            super().handle_cont(event)
        elif not self.transport.is_closing():
            self.transport.abort()

    def send_receive_event_to_app(self) -> None:
        self._pings = 0
        if not self.close_sent:
            super().send_receive_event_to_app()
            return
        self.frames = []
        self._late += 1
        if self._late == MOST_LATE:  # not cut off: what we said would be lost with the connection
            self.transport.pause_reading()

    @property
    def _is_deaf(self) -> bool:
        return self._late >= MOST_LATE or self.transport.is_closing()

"""uvicorn's HTTP and WebSocket protocols with limits that apply before the application is called.

An endless request head must not fill memory; input that the application never sees (pings, pongs, endless
fragments, messages after our close frame) must not keep the loop busy.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

MAX_HEAD_BYTES = 64 * 1024
"""Limit of request line and headers over several reads; `api.callers` checks a head that came in one read."""

MOST_PINGS = 100
"""Pings and pongs between two messages: an agent pings every ten seconds and sends heartbeats as often."""
MOST_FRAGMENTS = 10_000
MOST_UNREAD = 64
"""Parsed messages the application has not received; parsing stops there. One read may hold tens of thousands."""
MOST_LATE = 100
"""Messages accepted after our close frame, sent before the peer saw it. Then reading stops and uvicorn closes."""
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
    _unparsed = b""

    def data_received(self, data: bytes) -> None:
        if self._is_closed:
            return
        if not self._unparsed and len(data) <= PIECE_BYTES:
            super().data_received(data)
        else:
            self._unparsed += data
            self._parse()

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
        if self._late == MOST_LATE:  # not aborted: our close frame would be lost
            self.transport.pause_reading()

    @property
    def _is_closed(self) -> bool:
        return self._late >= MOST_LATE or self.transport.is_closing()

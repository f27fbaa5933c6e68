"""Response heads sent together with the first part of the body: one write, and one packet for small answers."""

from __future__ import annotations

import asyncio


class JoinedHead:
    """Transport of one response: sends its head with the first part of the body, at the latest in the next iteration."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._held, self._is_begun = transport, loop, b"", False
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if self._is_begun:
            self._transport.write(data)
        elif self._held:
            self._held += data
            self._begin()
        else:
            self._held = data
            self._loop.call_soon(self._begin)

    def close(self) -> None:
        self._begin()
        self._transport.close()

    def _begin(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            if not self._transport.is_closing():
                self._transport.write(self._held)
            self._held = b""

"""A client of `POST /v1/tasks` that costs next to nothing, because it shares the machine with the server it measures."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import msgspec


class _Accepted(msgspec.Struct):
    ids: list[str]


class _Refusal(msgspec.Struct):
    retry_after: float


_decode = msgspec.json.Decoder(_Accepted).decode
_decode_refusal = msgspec.json.Decoder(_Refusal).decode


class Shed(ConnectionError):
    """The server refused the submission because of an overload (429)."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"overloaded, try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Closed(ConnectionError):
    """No answer came: the connection is gone."""


class Door(asyncio.Protocol):
    """One HTTP/1.1 connection that is kept; as little as a client can be, because it shares the machine with the server."""

    def __init__(self, address: str, key: str, *, keyed: bool = False) -> None:
        self._keyed, self._number = keyed, 0
        self._name = secrets.token_hex(4).encode()  # an address in memory would be used again
        host, _, port = address.removeprefix("http://").partition(":")
        self._address = host, int(port)
        self._head = (
            f"POST /v1/tasks HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {key}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        self._transport: Any = None
        self._heard = b""
        self._answer: asyncio.Future[bytes] | None = None
        self.refusals = 0
        """Submissions refused because of an overload, and sent again after `Retry-After`."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Closed(f"the server closed the connection: {exc}"))

    def data_received(self, data: bytes) -> None:
        self._heard += data
        head, found, body = self._heard.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) < length or self._answer is None:
            return
        self._heard = b""
        if b" 429 " in head[:16] and b'"overloaded"' in body:
            self._answer.set_exception(Shed(_decode_refusal(body).retry_after))
        elif b" 202 " not in head[:16]:
            self._answer.set_exception(ConnectionError((head[:80] + body[:300]).decode()))
        else:
            self._answer.set_result(body)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def submit(self, body: bytes) -> list[str]:
        """Sent again, once, when a connection that was kept is closed meanwhile; under its key that is harmless."""
        key = b""
        if self._keyed:
            self._number += 1
            key = b"\r\nIdempotency-Key: %s-%d" % (self._name, self._number)
        request = b"%s%d%s\r\n\r\n%s" % (self._head, len(body), key, body)
        while True:
            kept = self._transport is not None and not self._transport.is_closing()
            try:
                return await self._ask(request)
            except Closed:
                if not kept:
                    raise
                return await self._ask(request)
            except Shed as refused:  # as the SDK does
                self.refusals += 1
                await asyncio.sleep(refused.retry_after_s)

    async def _ask(self, request: bytes) -> list[str]:
        loop = asyncio.get_running_loop()
        if self._transport is None or self._transport.is_closing():  # it rested for too long
            await loop.create_connection(lambda: self, *self._address)
        self._answer = loop.create_future()
        self._heard = b""
        self._transport.write(request)
        return _decode(await self._answer).ids

"""The one door to the server: every request of the SDK and the command line goes through it.

It raises the errors that problem documents stand for and retries `Unreachable`, nothing else. Mutations carry an
Idempotency-Key, so that a repeated one has its effect once. The sending itself is `gpool.transfer`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import SystemRandom
from typing import Any

import httpx2

from gpool.core.errors import Unreachable
from gpool.transfer.artifacts import Steps
from gpool.transfer.requests import Address, Patience, Reply, Request, error_from
from gpool.transfer.senders import READ_S, Sender

_NO_HEADERS: Mapping[str, str] = {}


class Door:
    """Sends requests over an httpx2 transport; safe to use from several threads."""

    def __init__(
        self,
        address: str | Address,
        key: str,
        transport: httpx2.BaseTransport | None = None,
        *,
        patience_s: float = 60.0,
    ) -> None:
        self.address = Address(address) if isinstance(address, str) else address
        self.url = self.address.url
        patience = Patience(patience_s)
        self._sender = Sender(
            self.address, key, SystemRandom(), patience=patience, transport=transport
        )

    @property
    def date(self) -> str | None:
        """The server's clock at its last answer, as HTTP writes it."""
        return self._sender.date

    def close(self) -> None:
        """Connections are closed; a retry that waits gives up."""
        self._sender.close()

    def send(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] = _NO_HEADERS,
        read_s: float = READ_S,
    ) -> Reply:
        """One request, repeated while the server is away; raises our error classes. `path` starts with `/`."""
        request = _keyed(Request(method, path, headers, body))
        pauses: Iterator[float] | None = None
        while True:
            try:
                return self._once(request, read_s)
            except Unreachable:
                pauses = self.pauses() if pauses is None else pauses
                pause = next(pauses, None)
                if pause is None or self.wait(pause):
                    raise

    def send_once(self, method: str, path: str) -> Reply:
        """One request, not repeated."""
        return self._once(_keyed(Request(method, path)), READ_S)

    def carry_out(self, begin: Callable[[], Steps]) -> None:
        """A transfer, patiently."""
        self._sender.carry_out(begin)

    def get_json(self, path: str, *, read_s: float = READ_S) -> Any:
        return self.send("GET", path, read_s=read_s).json()

    def send_json(self, method: str, path: str, document: object) -> Any:
        content = json.dumps(document, separators=(",", ":")).encode()
        reply = self.send(method, path, body=content, headers={"content-type": "application/json"})
        return reply.json() if reply.body else None

    def send_json_once(self, method: str, path: str, document: object) -> Any:
        """Not repeated: for what may be asked only once as it is."""
        content = json.dumps(document, separators=(",", ":")).encode()
        headers = {"content-type": "application/json"}
        return self._once(_keyed(Request(method, path, headers, content)), READ_S).json()

    @contextmanager
    def open(
        self, path: str, *, headers: Mapping[str, str] = _NO_HEADERS, read_s: float = READ_S
    ) -> Iterator[httpx2.Response]:
        """A streamed GET, not repeated: whoever reads it knows where to go on. Breaks raise `Unreachable`."""
        with self._sender.open(Request("GET", path, headers), read_s) as response:
            if response.status_code >= 400:
                raise error_from(Reply(response.status_code, response.headers, response.read()))
            yield response

    def pauses(self) -> Iterator[float]:
        """How long to wait before each further try of a stream; at its end, give up."""
        return self._sender.pauses()

    def wait(self, seconds: float) -> bool:
        """Pause between tries; True when the door was closed meanwhile."""
        return self._sender.wait(seconds)

    def _once(self, request: Request, read_s: float) -> Reply:
        reply = self._sender.send(request, read_s)
        if reply.status >= 400:
            raise error_from(reply)
        return reply


def _keyed(request: Request) -> Request:
    if request.method not in ("POST", "DELETE", "PATCH"):
        return request
    headers = {**request.headers, "idempotency-key": secrets.token_hex(16)}
    return Request(request.method, request.path, headers, request.body)

"""The one door to the server: every request of the SDK and the command line goes through it.

It turns problem documents into our error classes and retries `Unreachable`, nothing else. Mutations carry an
Idempotency-Key, so that a repeated one has its effect once.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx2

from gpool.core.errors import GpoolError, InternalFault, Unreachable
from gpool.transfer.requests import FilePart, error_from
from gpool.transfer.requests import Reply as Answered
from gpool.transfer.requests import Request as Asked

_FIRST_PATIENCE_S = 2.0
"""Until the server has answered once, it is more likely off than restarting."""

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_AWAY = frozenset({502, 503, 504})
_CONNECT_S = 10.0
_READ_S = 60.0

Body = bytes | None


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    headers: httpx2.Headers
    body: bytes

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError as exc:
            raise InternalFault(f"the server answered something that is not JSON: {exc}") from exc


class Door:
    """Sends requests over an httpx2 transport; safe to use from several threads."""

    def __init__(
        self,
        url: str,
        key: str,
        transport: httpx2.BaseTransport | None = None,
        *,
        patience_s: float = 60.0,
    ) -> None:
        self.url = url
        self._transport = transport or httpx2.HTTPTransport(
            limits=httpx2.Limits(max_connections=32, keepalive_expiry=60.0)
        )
        self._patience_s = patience_s
        self._answered = False
        self.date: str | None = None
        """The server's clock at its last answer, as HTTP writes it."""
        self._closed = threading.Event()
        base = httpx2.URL(url)
        self._base = base
        self._prefix = base.raw_path.rstrip(b"/")
        self._headers = [("host", base.netloc.decode()), ("user-agent", "gpool")]
        if key:
            self._headers.append(("authorization", f"Bearer {key}"))

    def close(self) -> None:
        """Connections are closed; a retry that waits gives up."""
        self._closed.set()
        self._transport.close()

    def send(
        self,
        method: str,
        path: str,
        *,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        read_s: float = _READ_S,
    ) -> Reply:
        """One request, repeated while the server is away; raises our error classes. `path` starts with `/`."""
        pairs = self._pairs(method, headers)
        for pause in self._pauses():
            try:
                return self._once(method, path, body, pairs, read_s)
            except Unreachable:
                if pause is None or self._closed.wait(pause):
                    raise
        raise AssertionError("the last pause is None")

    def send_once(
        self,
        method: str,
        path: str,
        *,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        read_s: float = _READ_S,
    ) -> Reply:
        """One request, not repeated."""
        return self._once(method, path, body, self._pairs(method, headers), read_s)

    def carry_out(self, steps: Generator[Asked, Answered, None]) -> None:
        """Send what a transfer asks for and give it the answers; broken off by `Unreachable`, it is begun anew."""
        try:
            asked = next(steps)
            while True:
                body = read_part(asked.body) if isinstance(asked.body, FilePart) else asked.body
                pairs = self._pairs(asked.method, asked.headers)
                response = self._handle(asked.method, asked.path, body or None, pairs, _READ_S)
                try:
                    content = _read_all(response)
                finally:
                    response.close()
                headers = {name.lower(): value for name, value in response.headers.items()}
                asked = steps.send(Answered(response.status_code, headers, content))
        except StopIteration:
            return

    def get_json(self, path: str, *, read_s: float = _READ_S) -> Any:
        return self.send("GET", path, read_s=read_s).json()

    def send_json(self, method: str, path: str, document: object) -> Any:
        content = json.dumps(document, separators=(",", ":")).encode()
        reply = self.send(method, path, body=content, headers={"content-type": "application/json"})
        return reply.json() if reply.body else None

    @contextmanager
    def open(
        self, path: str, *, headers: Mapping[str, str] | None = None, read_s: float = _READ_S
    ) -> Iterator[httpx2.Response]:
        """A streamed GET, not repeated: whoever reads it knows where to go on. Breaks raise `Unreachable`."""
        response = self._handle("GET", path, None, self._pairs("GET", headers), read_s)
        try:
            if response.status_code >= 400:
                raise problem_of(response.status_code, _read_all(response))
            yield response
        except httpx2.TransportError as exc:
            raise Unreachable(f"{self.url} broke off: {exc or type(exc).__name__}") from exc
        finally:
            with suppress(httpx2.TransportError):
                response.close()

    def pauses(self) -> Iterator[float | None]:
        """How long to wait before each further try of a stream; None: give up."""
        return self._pauses()

    def wait(self, seconds: float) -> bool:
        """Pause between tries; True when the door was closed meanwhile."""
        return self._closed.wait(seconds)

    def _pairs(self, method: str, headers: Mapping[str, str] | None) -> list[tuple[str, str]]:
        pairs = list(self._headers)
        if headers:
            pairs.extend(headers.items())
        if method in ("POST", "DELETE", "PATCH"):
            pairs.append(("idempotency-key", secrets.token_hex(16)))
        return pairs

    def _pauses(self) -> Iterator[float | None]:
        began, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            patience = (
                self._patience_s if self._answered else min(_FIRST_PATIENCE_S, self._patience_s)
            )
            left = began + patience - time.monotonic()
            if left <= 0:
                yield None
                return
            yield min(pause, left)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    def _handle(
        self, method: str, path: str, body: Body, pairs: list[tuple[str, str]], read_s: float
    ) -> httpx2.Response:
        target = self._prefix + path.encode("ascii")
        request = httpx2.Request(
            method,
            self._base.copy_with(raw_path=target),
            headers=pairs,
            content=body,
            extensions={
                "timeout": {"connect": _CONNECT_S, "read": read_s, "write": _READ_S, "pool": read_s}
            },
        )
        try:
            response = self._transport.handle_request(request)
        except httpx2.TransportError as exc:
            raise Unreachable(
                f"{self.url} does not answer ({exc or type(exc).__name__}); is the server running?"
            ) from exc
        if response.status_code in _AWAY:
            detail = _read_all(response)
            response.close()
            raise _away(self.url, response.status_code, detail)
        self._answered = True
        self.date = response.headers.get("date", self.date)
        return response

    def _once(
        self, method: str, path: str, body: Body, pairs: list[tuple[str, str]], read_s: float
    ) -> Reply:
        response = self._handle(method, path, body, pairs, read_s)
        try:
            content = _read_all(response)
        finally:
            response.close()
        if response.status_code >= 400:
            raise problem_of(response.status_code, content)
        return Reply(response.status_code, response.headers, content)


def read_part(part: FilePart) -> bytes:
    with part.file.open("rb") as stream:
        stream.seek(part.offset)
        return stream.read(part.length)


def _read_all(response: httpx2.Response) -> bytes:
    try:
        stream = response.stream
        assert isinstance(stream, httpx2.SyncByteStream)
        if "content-encoding" in response.headers:
            return response.read()
        return b"".join(stream)
    except httpx2.TransportError as exc:
        raise Unreachable(f"the answer broke off: {exc or type(exc).__name__}") from exc


def _away(url: str, status: int, content: bytes) -> Unreachable:
    """503 and its like: ours says why, a proxy's says nothing worth showing."""
    found = problem_of(status, content)
    if isinstance(found, Unreachable):
        return found
    return Unreachable(f"{url} answered {status}: the server is away, or starting")


def problem_of(status: int, content: bytes) -> GpoolError:
    """The error a problem document stands for: the same class the server raised."""
    return error_from(Answered(status, {}, content))

"""Requests of the SDK and the command line, over `gpool.transfer`.

`Unreachable` is retried, and a request refused with Retry-After. POST, PATCH and DELETE carry an Idempotency-Key, so a
repeated request takes effect once.
"""

from __future__ import annotations

import atexit
import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from random import SystemRandom
from typing import Any

import httpx2

from gpool.client.config import EXPIRED, SignInSession, Tokens
from gpool.core.errors import GpoolError, Invalid, NotSignedIn, TooMany, Unreachable
from gpool.observability.redaction import Redactor
from gpool.observability.trace_context import TRACEPARENT, TraceContext
from gpool.observability.tracing import (
    NOT_INSTALLED,
    SpanRole,
    Tracing,
    ambient_trace,
    is_requested,
    open_tracing,
)
from gpool.transfer.requests import (
    Address,
    AskedPauses,
    Patience,
    Reply,
    Request,
    Steps,
    error_from,
)
from gpool.transfer.senders import READ_S, Sender

log = logging.getLogger(__name__)
_NO_HEADERS: Mapping[str, str] = {}


class ApiTransport:
    """Thread-safe."""

    def __init__(
        self,
        address: str | Address,
        key: str,
        transport: httpx2.BaseTransport | None = None,
        *,
        patience_s: float = 60.0,
        session: SignInSession | None = None,
    ) -> None:
        """Authenticate with an API key or a sign-in session (its tokens are refreshed); with neither, anonymously."""
        self.address = Address(address) if isinstance(address, str) else address
        self.url = self.address.url
        self._transport, self._patience_s, self._random = transport, patience_s, SystemRandom()
        self._tracing = _client_tracing() if is_requested() else None
        patience = Patience(patience_s)
        if session is None:
            self._sender = Sender(
                self.address, key, self._random, patience=patience, transport=transport
            )
        else:
            self._sender = _SignedSender(session, self.address, patience, transport)

    @property
    def date(self) -> str | None:
        return self._sender.date

    def without_credentials(self) -> ApiTransport:
        """Transport for signing in, closed by the caller."""
        return ApiTransport(
            self.address, "", _borrowed(self._transport), patience_s=self._patience_s
        )

    def with_session(self, session: SignInSession) -> ApiTransport:
        """Transport closed by the caller."""
        return ApiTransport(
            self.address,
            "",
            _borrowed(self._transport),
            patience_s=self._patience_s,
            session=session,
        )

    def close(self) -> None:
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
        """Retried while the server is unreachable; `path` starts with `/`.

        A request refused with Retry-After is repeated after that time, within the patience.
        """
        request = _keyed(Request(method, path, headers, body))
        pauses: Iterator[float] | None = None
        asked: AskedPauses | None = None
        while True:
            try:
                return self._once(request, read_s)
            except (TooMany, Unreachable) as error:
                asked = asked or self._asked_pauses()
                pause = asked.after(error)
                if isinstance(error, Unreachable):
                    pauses = self.pauses() if pauses is None else pauses
                    own = next(pauses, None)
                    pause = None if own is None else max(own, pause or 0.0)
                if pause is None or self.wait(pause):
                    raise

    def send_once(self, method: str, path: str) -> Reply:
        return self._once(_keyed(Request(method, path)), READ_S)

    def carry_out(self, begin: Callable[[], Steps]) -> None:
        self._sender.carry_out(begin)

    def get_json(self, path: str, *, read_s: float = READ_S) -> Any:
        return self.send("GET", path, read_s=read_s).json()

    def send_json(self, method: str, path: str, document: object) -> Any:
        content = json_of(document)
        reply = self.send(method, path, body=content, headers={"content-type": "application/json"})
        return reply.json() if reply.body else None

    def send_json_once(self, method: str, path: str, document: object) -> Any:
        """For a body that is valid once, such as an answer to a challenge."""
        content = json_of(document)
        headers = {"content-type": "application/json"}
        return self._once(_keyed(Request(method, path, headers, content)), READ_S).json()

    @contextmanager
    def open(
        self, path: str, *, headers: Mapping[str, str] = _NO_HEADERS, read_s: float = READ_S
    ) -> Iterator[httpx2.Response]:
        """No retries: the reader knows where to resume. A broken stream raises `Unreachable`.

        Only a stream refused with Retry-After is opened again after that time, within the patience.
        """
        asked = self._asked_pauses()
        while True:
            with self._sender.open(Request("GET", path, headers), read_s) as response:
                if response.status_code < 400:
                    yield response
                    return
                reply = Reply(response.status_code, response.headers, response.read())
            error = error_from(reply)
            pause = asked.after(error) if isinstance(error, TooMany) else None
            if pause is None or self.wait(pause):
                raise error

    def pauses(self) -> Iterator[float]:
        return self._sender.pauses()

    def _asked_pauses(self) -> AskedPauses:
        return AskedPauses(self._patience_s, self._random)

    def wait(self, seconds: float) -> bool:
        """True if the transport was closed meanwhile."""
        return self._sender.wait(seconds)

    def _once(self, request: Request, read_s: float) -> Reply:
        if self._tracing is not None:
            return self._traced(self._tracing, request, read_s)
        above = ambient_trace()
        return self._reply(request if above is None else _under(request, above), read_s)

    def _traced(self, tracing: Tracing, request: Request, read_s: float) -> Reply:
        """Send within a span of its own; the server's span is beneath it."""
        path = request.path.partition("?")[0]
        attributes = {"http.request.method": request.method, "url.path": path}
        name = f"gpool {request.method}"
        span = tracing.begin(name, SpanRole.CLIENT, ambient_trace(), attributes)
        failure = "no answer"
        try:
            reply = self._reply(_under(request, span.context), read_s)
            failure = ""
        except GpoolError as error:
            failure = error.code
            raise
        finally:
            span.end(failure)
        return reply

    def _reply(self, request: Request, read_s: float) -> Reply:
        reply = self._sender.send(request, read_s)
        if reply.status >= 400:
            raise error_from(reply)
        return reply


def json_of(document: object) -> bytes:
    """Encode as UTF-8 JSON; `Invalid` names the member with unencodable text, not its value."""
    try:
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        members = document.items() if isinstance(document, dict) else ()
        name = next((name for name, value in members if not _is_text(value)), "the document")
        raise Invalid(
            f"'{name}' holds text that UTF-8 cannot encode; remove those characters"
        ) from exc


def _is_text(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


class _Borrowed(httpx2.BaseTransport):
    def __init__(self, transport: httpx2.BaseTransport) -> None:
        self._transport = transport

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        return self._transport.handle_request(request)


def _borrowed(transport: httpx2.BaseTransport | None) -> httpx2.BaseTransport | None:
    return None if transport is None else _Borrowed(transport)


class _SignedSender(Sender):
    """After a 401, refreshes the access token and sends once more."""

    def __init__(
        self,
        session: SignInSession,
        address: Address,
        patience: Patience,
        transport: httpx2.BaseTransport | None,
    ) -> None:
        super().__init__(address, None, SystemRandom(), patience=patience, transport=transport)
        self._session = session

    def exchange(self, request: Request, read_s: float) -> Reply:
        token = self._session.token
        if token is None:
            raise NotSignedIn(EXPIRED)
        reply = super().exchange(_as(request, token), read_s)
        if reply.status != 401:
            return reply
        token = self._session.renewed(token, self._renew)
        return super().exchange(_as(request, token), read_s)

    @contextmanager
    def open(self, request: Request, read_s: float = READ_S) -> Iterator[httpx2.Response]:
        token = self._session.token
        if token is None:
            raise NotSignedIn(EXPIRED)
        with super().open(_as(request, token), read_s) as answer:
            if answer.status_code != 401:
                yield answer
                return
        token = self._session.renewed(token, self._renew)
        with super().open(_as(request, token), read_s) as answer:
            yield answer

    def _renew(self, refresh_token: str) -> Tokens:
        """Retried when the response is lost: the server returns the same successor for the same token."""
        content = json.dumps({"refresh_token": refresh_token}).encode()
        request = Request("POST", "/v1/auth/refresh", {"content-type": "application/json"}, content)
        pauses = self.pauses()
        while True:
            try:
                with super().open(request, READ_S) as answer:
                    reply = Reply(answer.status_code, answer.headers, answer.read())
                if reply.status == 401:
                    raise NotSignedIn(EXPIRED)
                if reply.status >= 400:
                    raise error_from(reply)
                return Tokens.of(reply.json())
            except Unreachable:
                pause = next(pauses, None)
                if pause is None or self.wait(pause):
                    raise


def _as(request: Request, token: str) -> Request:
    return replace(request, headers={**request.headers, "Authorization": f"Bearer {token}"})


def _under(request: Request, trace: TraceContext) -> Request:
    return replace(request, headers={**request.headers, TRACEPARENT: trace.header})


@cache
def _client_tracing() -> Tracing | None:
    """Traces of this program, if OpenTelemetry's variables name an endpoint; exported until the program ends."""
    try:
        tracing = open_tracing("gpool-client", "", Redactor())
    except ImportError:
        log.warning(NOT_INSTALLED)
        return None
    if tracing is not None:
        atexit.register(tracing.close)
    return tracing


def _keyed(request: Request) -> Request:
    if request.method not in ("POST", "DELETE", "PATCH"):
        return request
    headers = {**request.headers, "idempotency-key": secrets.token_hex(16)}
    return Request(request.method, request.path, headers, request.body)

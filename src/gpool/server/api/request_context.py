"""The request id: accepted from the caller or drawn, returned in the response, added to each log line of the request.

Log fields are computed only when a line is written; the ids of user, node and lease come from the request itself.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from os import urandom

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpool.observability.context import REQUEST_ID, WORK, AtWork
from gpool.observability.logs import get_logger
from gpool.observability.trace_context import TRACEPARENT, TraceContext
from gpool.observability.tracing import OpenSpan, SpanRole, Tracing
from gpool.server.api.callers import KNOWN, address_in
from gpool.transfer.requests import LEASE_HEADER

log, _level = get_logger(__name__), logging.getLogger(__name__)

_NAME, _TRACE = REQUEST_ID.lower().encode(), TRACEPARENT.encode()
_LEASE = LEASE_HEADER.lower().encode()
_ACCEPTED = re.compile(rb"[A-Za-z0-9._~:+/=-]{1,128}")
_LEASE_FORM = re.compile(rb"(t-[0-9a-z]{13}):([0-9]{1,18})")
_ID = re.compile(r"\b[a-z]{1,2}-[0-9a-z]{13}\b|\b[0-9a-f]{64}\b")
_TASK = re.compile(r"/(t-[0-9a-z]{13})(?:/|$)")
UNTRACED = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths that monitors request every few seconds."""
_STARTS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})


class RequestWork:
    """One request or agent's channel, as log lines name it."""

    __slots__ = ("_scope", "id", "trace")

    def __init__(self, scope: Scope) -> None:
        given = b""
        self.trace: TraceContext | None = None
        for name, value in scope["headers"]:
            if name == _NAME:
                given = value
            elif name == _TRACE:
                self.trace = TraceContext.parse(value.decode("latin-1"))
        is_accepted = given and _ACCEPTED.fullmatch(given)
        self.id: str = given.decode("ascii") if is_accepted else urandom(8).hex()
        self._scope = scope

    def log_fields(self) -> Mapping[str, object]:
        scope = self._scope
        fields: dict[str, object] = {
            "request": self.id,
            "method": scope.get("method", "WEBSOCKET"),
            "path": scope["path"],
            "client": address_in(scope) or None,
        }
        known = scope.get(KNOWN)
        if known is not None:
            fields["node" if known.startswith("n-") else "user"] = known
        if named := _TASK.search(scope["path"]):
            fields["task"] = named[1]
        for name, value in scope["headers"]:
            if name == _LEASE and (lease := _LEASE_FORM.fullmatch(value)):
                fields |= {"task": lease[1].decode(), "epoch": int(lease[2])}
        if self.trace is not None:
            fields |= {"trace": self.trace.trace_id, "span": self.trace.span_id}
        return fields


class RequestContext:
    """With `tracing`, each request but those of monitors is a span."""

    def __init__(self, app: ASGIApp, tracing: Tracing | None = None) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        work = scope[WORK] = RequestWork(scope)
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] in _STARTS:
                status = message.get("status", 101)
                message["headers"] = [*message.get("headers", ()), (_NAME, work.id.encode())]
            await send(message)

        begun_ns = time.perf_counter_ns()
        span = None
        if self._tracing is not None and scope["type"] == "http" and scope["path"] not in UNTRACED:
            span = self._begin(self._tracing, work, scope)
            work.trace = span.context
        with AtWork(work):
            try:
                await self._app(scope, receive, answer)
            finally:
                if span is not None:
                    span.set("http.response.status_code", status)
                    span.end("" if 0 < status < 500 else f"status {status}")
            del scope[
                WORK
            ]  # no reference cycle is left; after an exception the fault's handler reads it
            if _level.isEnabledFor(logging.DEBUG):
                took_ns = time.perf_counter_ns() - begun_ns
                log.debug("request", status=status, duration_ns=took_ns)

    @staticmethod
    def _begin(tracing: Tracing, work: RequestWork, scope: Scope) -> OpenSpan:
        route = _ID.sub("{id}", scope["path"])
        attributes = {
            "http.request.method": scope["method"],
            "http.route": route,
            "url.path": scope["path"],
            "gpool.request.id": work.id,
        }
        return tracing.begin(f"{scope['method']} {route}", SpanRole.SERVER, work.trace, attributes)

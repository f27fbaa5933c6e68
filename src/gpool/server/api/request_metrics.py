"""ASGI middleware that counts and times requests by route template; the outermost of the application's own."""

from __future__ import annotations

import re
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpool.server.api.endpoints import DECLARED, Endpoint
from gpool.server.metrics.registry import RequestSignals

_WAITS = re.compile(rb"(?:^|&)wait=(?!0*(?:\.0*)?(?:&|$))")
"""Query of a request that waits for an event; its duration says nothing about the server."""


def waits(scope: Scope) -> bool:
    """Whether the request is answered when an event happens."""
    query = scope["query_string"]
    return bool(query) and _WAITS.search(query) is not None


class RequestMetrics:
    def __init__(self, app: ASGIApp, signals: RequestSignals) -> None:
        self._app = app
        self._signals = signals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        signals = self._signals
        status, seconds = 500, 0.0  # without a response the client sees a fault
        began = perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status, seconds
            if message["type"] == "http.response.start":
                status, seconds = message["status"], perf_counter() - began
            await send(message)

        signals.in_flight.inc()
        try:
            await self._app(scope, receive, watched)
        finally:
            signals.in_flight.dec()
            declared: Endpoint | None = scope.get(DECLARED)
            signals.count(
                None if declared is None else declared.path,
                scope["method"],
                status,
                None if waits(scope) else seconds or perf_counter() - began,
            )

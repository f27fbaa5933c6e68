"""Listener of its own for `/metrics`, without TLS and keys (setting `metrics_listen`): for Prometheus, which scrapes
every server by itself, past a load balancer. It serves nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from gpool.core.errors import Invalid
from gpool.server.http import LimitedConfig, LimitedServer, listening_sockets
from gpool.server.metrics.registry import Metrics
from gpool.server.overload.connections import HttpLimits
from gpool.server.server import Server

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATH = "/metrics"
MOST_CONNECTIONS = 64


class _MetricsServer(LimitedServer):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the server's main listener, which stops this one."""
        yield


def metrics_app(metrics: Metrics) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - ASGI
        if scope["type"] != "http":
            return
        is_known = scope["path"] == PATH and scope["method"] in ("GET", "HEAD")
        body = await metrics.rendered() if is_known else b"only GET /metrics is served here\n"
        headers = [
            (b"content-type", CONTENT_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        start = {"type": "http.response.start", "status": 200 if is_known else 404}
        await send({**start, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


@asynccontextmanager
async def metrics_listener(server: Server) -> AsyncIterator[None]:
    """Serve `/metrics` at the configured address, if there is one; `Invalid` if it cannot be listened on."""
    address = server.settings.metrics_listen
    if address is None:
        yield
        return
    host, _, port = address.rpartition(":")
    config = LimitedConfig(
        metrics_app(server.metrics),
        HttpLimits(MOST_CONNECTIONS, MOST_CONNECTIONS, server.settings.request_head_s, 1024),
        host=host.strip("[]"),
        port=int(port),
        access_log=False,
        log_config=None,
        lifespan="off",
    )
    try:
        sockets = await listening_sockets(config)
    except OSError as error:
        raise Invalid(
            f"metrics_listen={address}: cannot listen there: {error}; choose another address"
        ) from error
    listener = _MetricsServer(config)
    serving = asyncio.create_task(listener.serve(sockets), name="gpool-metrics")
    try:
        yield
    finally:
        listener.should_exit = True
        await serving

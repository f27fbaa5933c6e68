"""All REST routes, and their installation into the application with middleware and error handlers.

`FastPaths` saves matching, dependencies and exit stacks; it answers errors as the error handlers do. Submissions with
any query but `wait`, and aliases, go through FastAPI.
"""

from __future__ import annotations

import logging
import re

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from gpool.core.errors import GpoolError
from gpool.observability.logs import get_logger
from gpool.observability.tracing import Tracing
from gpool.server.api import channel, problems
from gpool.server.api.callers import RateClasses, RateLimiter
from gpool.server.api.channel import agent_channel
from gpool.server.api.endpoints import Endpoint, describe
from gpool.server.api.request_context import RequestContext
from gpool.server.api.request_metrics import RequestMetrics
from gpool.server.api.routes import (
    accounts,
    artifacts,
    earnings,
    events,
    ledger,
    market,
    nodes,
    operators,
    server,
    tasks,
    teams,
)
from gpool.server.api.routes.tasks import submit_tasks
from gpool.server.api.shedding import LoadShedder
from gpool.server.identity.throttle import Guard
from gpool.server.metrics.registry import RequestSignals
from gpool.server.overload.admission import AdmissionController
from gpool.server.web.pages import PAGES
from gpool.wire.frames import CHANNEL_PATH

log = get_logger(__name__)
TASKS_PATH = "/v1/tasks"
_SUBMISSION_QUERY = re.compile(rb"(?:wait=([0-9]{1,4}(?:\.[0-9]{1,9})?))?")
"""Nothing, or a plain `wait` that its parameter's limits allow."""


class FastPaths:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind, path = scope["type"], scope.get("path")
        if kind == "websocket" and path == CHANNEL_PATH:
            await _channel(WebSocket(scope, receive, send))
        elif (
            kind == "http"
            and path == TASKS_PATH
            and scope["method"] == "POST"
            and (found := _SUBMISSION_QUERY.fullmatch(scope["query_string"])) is not None
        ):
            await _submission(scope, receive, send, float(found[1] or 0))
        else:
            await self._app(scope, receive, send)


async def _submission(scope: Scope, receive: Receive, send: Send, wait_s: float) -> None:
    request = Request(scope, receive, send)
    try:
        response = await submit_tasks(request, wait=wait_s)
    except GpoolError as error:
        response = await problems.ours(request, error)
    except ClientDisconnect as error:
        response = await problems.gone(request, error)
    await response(scope, receive, send)


async def _channel(socket: WebSocket) -> None:
    try:
        await agent_channel(socket)
    except GpoolError as error:  # a failed commit: the agent reconnects and reports again
        log.log(
            logging.ERROR if error.status >= 500 else logging.INFO,
            "closing an agent's connection",
            error=error.detail,
        )
        await socket.close()


ROUTERS = (
    tasks.routes,
    nodes.routes,
    nodes.resource_routes,
    market.routes,
    artifacts.routes,
    accounts.routes,
    teams.routes,
    teams.user_routes,
    operators.routes,
    ledger.routes,
    earnings.routes,
    events.routes,
    server.routes,
    server.alias_routes,
    channel.routes,
    *PAGES,
)


def endpoints() -> tuple[Endpoint, ...]:
    return tuple(each for router in ROUTERS for each in router.endpoints)


def install(
    app: FastAPI,
    guard: Guard,
    admission: AdmissionController,
    version: str,
    signals: RequestSignals,
    tracing: Tracing | None = None,
) -> None:
    problems.install(app)
    for each in ROUTERS:
        app.include_router(each.router)
    describe(app, version, endpoints())
    app.add_middleware(FastPaths)
    app.add_middleware(RateLimiter, guard=guard)  # runs before FastPaths
    app.add_middleware(  # runs before both
        LoadShedder, admission=admission, rates=RateClasses(endpoints()), signals=signals
    )
    app.add_middleware(RequestMetrics, signals=signals)  # runs before these
    # The first to run: its id is in every answer and log line.
    app.add_middleware(RequestContext, tracing=tracing)

"""Rate limits, around every route: anonymous requests count for their address, others for the account once it is known.

Each route's class is looked up once, when the application is made. What is signed in does not count for its address, so
people behind one router do not slow one another, and a guesser there does not lock them out.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from gpool.core.errors import TooLarge
from gpool.server.http import MAX_HEAD_BYTES
from gpool.server.identity.guard import Guard
from gpool.server.identity.routes import ROUTES, WEBSOCKET
from gpool.server.identity.throttle import RouteClass

CLASS = "gpool.route_class"
"""Where a request's class is kept in its scope."""

FREE = frozenset({"/healthz", "/readyz"})
"""Asked by load balancers, and costs nothing."""


def install(app: FastAPI, guard: Guard) -> None:
    """After all routes are there."""
    for route in app.routes:
        if isinstance(route, Route | WebSocketRoute) and route.path not in FREE:
            route.app = _counted(route.app, class_of(route), guard)


def class_of(route: BaseRoute) -> RouteClass:
    """From the table of routes; what has no row there (a test sees to that) counts as reading."""
    if isinstance(route, Route):
        keys = [(method, route.path) for method in route.methods or ()]
    else:
        assert isinstance(route, WebSocketRoute)
        keys = [(WEBSOCKET, route.path)]
    return next((ROUTES[key].limit for key in keys if key in ROUTES), RouteClass.READ)


def _counted(app: ASGIApp, kind: RouteClass, guard: Guard) -> ASGIApp:
    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        scope[CLASS] = kind
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEAD_BYTES:
            raise TooLarge(f"headers of more than {MAX_HEAD_BYTES} bytes; send less")
        if scope["type"] == "http" and not _names_somebody(scope):
            guard.count_address(kind, address_in(scope))
        await app(scope, receive, send)

    return counted


def _names_somebody(scope: Scope) -> bool:
    return any(name == b"authorization" for name, _ in scope["headers"])


def count_account(connection: HTTPConnection, guard: Guard, account: int) -> None:
    """Once it is known who asks; `TooMany` when this account asks too fast."""
    kind = connection.scope.get(CLASS)
    if kind is not None:
        guard.count_account(kind, account)


def address_in(scope: Scope) -> str:
    """Where the request comes from, as the transport (or the proxy that is trusted) says."""
    client = scope.get("client")
    return str(client[0]) if client else ""

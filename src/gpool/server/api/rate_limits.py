"""Rate limits, before every route: anonymous requests count for their address, others for the account once it is known.

What is signed in does not count for its address, so people behind one router do not slow one another, and a guesser
there does not lock them out. A head that is too large is refused here too.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from gpool.core.errors import GpoolError, TooLarge
from gpool.server.api.problems import problem
from gpool.server.http import MAX_HEAD_BYTES
from gpool.server.identity.routes import ROUTES, Row
from gpool.server.identity.sign_in_guard import Guard
from gpool.server.identity.throttle import RouteClass

CLASS = "gpool.route_class"
"""Where a request's class is kept in its scope."""

FREE = frozenset({"/healthz", "/readyz"})
"""Asked by load balancers, and costs nothing."""


class Classes:
    """The class of each route, by method and path; what is not there counts as reading."""

    def __init__(self, routes: Mapping[tuple[str, str], Row] = ROUTES) -> None:
        self._plain: dict[tuple[str, str], RouteClass] = {}
        self._others: dict[tuple[str, int], list[tuple[list[str | None], RouteClass]]] = {}
        for (method, path), row in routes.items():
            if "{" in path:
                parts = [None if part.startswith("{") else part for part in path.split("/")]
                self._others.setdefault((method, len(parts)), []).append((parts, row.limit))
            else:
                self._plain[method, path] = row.limit

    def of(self, method: str, path: str) -> RouteClass:
        plain = self._plain.get((method, path))
        if plain is not None:
            return plain
        parts = path.split("/")
        for wanted, kind in self._others.get((method, len(parts)), ()):
            if all(want is None or want == part for want, part in zip(wanted, parts, strict=True)):
                return kind
        return RouteClass.READ


class Limits:
    """The middleware."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard
        self._classes = Classes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in FREE:
            kind = scope[CLASS] = self._classes.of(scope["method"], scope["path"])
            try:
                self._look_at(scope, kind)
            except GpoolError as error:
                await problem(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _look_at(self, scope: Scope, kind: RouteClass) -> None:
        size, named = 0, False
        for name, value in scope["headers"]:
            size += len(name) + len(value)
            named = named or name == b"authorization"
        if size > MAX_HEAD_BYTES:
            raise TooLarge(f"headers of more than {MAX_HEAD_BYTES} bytes; send less")
        if not named:
            self._guard.count_address(kind, address_in(scope))


def count_account(connection: HTTPConnection, guard: Guard, account: int) -> None:
    """Once it is known who asks; `TooMany` when this account asks too fast."""
    kind = connection.scope.get(CLASS)
    if kind is not None:
        guard.count_account(kind, account)


def address_in(scope: Scope) -> str:
    """Where the request comes from, as the transport (or the proxy that is trusted) says."""
    client = scope.get("client")
    return str(client[0]) if client else ""

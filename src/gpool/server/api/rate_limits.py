"""Rate limits and header sizes, checked before every route.

Anonymous requests count for their address, signed-in ones only for their account: users behind one router do not
slow each other, and a password guesser there does not lock them out.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from gpool.core.errors import GpoolError, TooLarge
from gpool.server.api.endpoints import Endpoint
from gpool.server.api.problems import problem
from gpool.server.http import MAX_HEAD_BYTES
from gpool.server.identity.sign_in_guard import Guard
from gpool.server.identity.throttle import RouteClass

CLASS = "gpool.route_class"
"""Key of the request scope under which the rate class is kept."""

FREE = frozenset({"/healthz", "/readyz"})
"""Paths without a limit: load balancers poll them, and they cost nothing."""


class RateClasses:
    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._plain: dict[tuple[str, str], RouteClass] = {}
        self._patterns: dict[tuple[str, int], list[tuple[list[str | None], RouteClass]]] = {}
        for each in endpoints:
            if "{" in each.path:
                parts = [None if part.startswith("{") else part for part in each.path.split("/")]
                key = (each.method, len(parts))
                self._patterns.setdefault(key, []).append((parts, each.rate))
            else:
                self._plain[each.method, each.path] = each.rate

    def of(self, method: str, path: str) -> RouteClass:
        plain = self._plain.get((method, path))
        if plain is not None:
            return plain
        parts = path.split("/")
        for wanted, rate in self._patterns.get((method, len(parts)), ()):
            if all(want is None or want == part for want, part in zip(wanted, parts, strict=True)):
                return rate
        return RouteClass.READ


class RateLimiter:
    def __init__(self, app: ASGIApp, guard: Guard, endpoints: Iterable[Endpoint]) -> None:
        self._app = app
        self._guard = guard
        self._classes = RateClasses(endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in FREE:
            rate = scope[CLASS] = self._classes.of(scope["method"], scope["path"])
            try:
                self._check(scope, rate)
            except GpoolError as error:
                await problem(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, rate: RouteClass) -> None:
        size, has_credentials = 0, False
        for name, value in scope["headers"]:
            size += len(name) + len(value)
            has_credentials = has_credentials or name == b"authorization"
        if size > MAX_HEAD_BYTES:
            raise TooLarge(f"the headers have more than {MAX_HEAD_BYTES} bytes; send fewer")
        if not has_credentials:
            self._guard.count_address(rate, address_in(scope))


def count_account(connection: HTTPConnection, guard: Guard, account: int) -> None:
    rate = connection.scope.get(CLASS)
    if rate is not None:
        guard.count_account(rate, account)


def address_in(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""

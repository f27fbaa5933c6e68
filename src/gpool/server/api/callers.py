"""Checks before a route: rate limits, header sizes, authentication by bearer token or node proof, the caller's action.

Anonymous requests count for their address, signed-in ones only for their account: users behind one router do not
slow each other, and a password guesser there does not lock them out. A header is no proof: routes for anonymous
callers, sign-ins and refreshes count for the address, and the count is taken back once a credential was valid.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from gpool.core.errors import GpoolError, NotSignedIn, TooLarge
from gpool.core.ids import encode
from gpool.core.permissions import Action
from gpool.server.api.endpoints import Endpoint, action_of
from gpool.server.api.problems import problem
from gpool.server.http import MAX_HEAD_BYTES
from gpool.server.identity.authorization import SIGN_IN, USER_PREFIX, gate
from gpool.server.identity.throttle import Guard, RouteClass
from gpool.server.overload.admission import LoadClass
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.values import NodeCredentials
from gpool.transfer.node_proofs import PROOF_HEADER
from gpool.transfer.requests import LEASE_HEADER

RATE = "gpool.route_rate"
"""Key of the request scope under which the `RouteRate` is kept."""

CLASS = "gpool.route_class"
"""Key of the request scope under which the rate class is kept."""

COUNTED = "gpool.counted_address"
"""Key of the request scope: rate class under which the address was counted, until a credential was valid."""

KNOWN = "gpool.known_caller"
"""Key of the request scope: id of the user or node, once it was authenticated."""

FREE = frozenset({"/healthz", "/readyz"})
"""Paths without a limit: load balancers poll them, and they cost nothing."""


class RouteRate(NamedTuple):
    route_class: RouteClass
    counts_address: bool  # whatever the headers say
    load: LoadClass = LoadClass.OTHER


_PROOF = PROOF_HEADER.lower().encode()
_ADDRESS_CLASSES = frozenset({RouteClass.SIGN_IN, RouteClass.REGISTER, RouteClass.REFRESH})
_UNKNOWN_ROUTE = RouteRate(RouteClass.READ, counts_address=True)


class RateClasses:
    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._plain: dict[tuple[str, str], RouteRate] = {}
        self._patterns: dict[tuple[str, int], list[tuple[list[str | None], RouteRate]]] = {}
        for each in endpoints:
            counts_address = each.is_open or each.rate in _ADDRESS_CLASSES
            rate = RouteRate(each.rate, counts_address, each.load)
            if "{" in each.path:
                parts = [None if part.startswith("{") else part for part in each.path.split("/")]
                key = (each.method, len(parts))
                self._patterns.setdefault(key, []).append((parts, rate))
            else:
                self._plain[each.method, each.path] = rate

    def of(self, method: str, path: str) -> RouteRate:
        plain = self._plain.get((method, path))
        if plain is not None:
            return plain
        parts = path.split("/")
        for wanted, rate in self._patterns.get((method, len(parts)), ()):
            if all(want is None or want == part for want, part in zip(wanted, parts, strict=True)):
                return rate
        return _UNKNOWN_ROUTE


class RateLimiter:
    """Runs within `shedding.LoadShedder`, which looks the route up."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in FREE:
            try:
                self._check(scope, scope[RATE])
            except GpoolError as error:
                await problem(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, rate: RouteRate) -> None:
        scope[CLASS] = rate.route_class
        size, has_credentials = 0, False
        for name, value in scope["headers"]:
            size += len(name) + len(value)
            has_credentials = has_credentials or name == b"authorization"
        if size > MAX_HEAD_BYTES:
            raise TooLarge(f"the headers have more than {MAX_HEAD_BYTES} bytes; send fewer")
        if rate.counts_address or not has_credentials:
            self._guard.count_address(rate.route_class, address_in(scope))
            scope[COUNTED] = rate.route_class


def count_account(connection: HTTPConnection, guard: Guard, account: int) -> None:
    rate = connection.scope.get(CLASS)
    if rate is not None:
        guard.count_account(rate, account)


def credential_was_valid(connection: HTTPConnection) -> None:
    """Take back the count of the request's address."""
    counted = connection.scope.pop(COUNTED, None)
    if counted is not None:
        server_of(connection).guard.return_address(counted, address_of(connection))


def address_in(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


def header_in(scope: Scope, name: bytes) -> str | None:
    """First header of that lower-case name. Starlette's mapping takes five times as long for one that is absent."""
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return None


def server_of(connection: HTTPConnection) -> Server:
    server: Server = connection.app.state.server
    return server


def is_draining(connection: HTTPConnection) -> bool:
    """Whether the server was told to stop and sends its nodes elsewhere (`app.drain`)."""
    return bool(getattr(connection.app.state, "draining", False))


def address_of(connection: HTTPConnection) -> str:
    return address_in(connection.scope)


async def asker(
    connection: HTTPConnection, action: Action | None = None
) -> Caller | NodeCredentials:
    """User or node behind the request, if it may do the route's action (`action`, where it declares several)."""
    found = await caller_if_any(connection)
    check(connection, found, action)
    if found is None:
        raise NotSignedIn(SIGN_IN)
    return found


async def user_of(connection: HTTPConnection, action: Action | None = None) -> Caller:
    found = await asker(connection, action)
    assert isinstance(found, Caller), f"{action_of(connection, action)} is for nodes"
    return found


def check(
    connection: HTTPConnection, who: Caller | NodeCredentials | None, action: Action | None = None
) -> None:
    """Raise unless `who` may do this declared action to some object; final where it has no object."""
    gate(who, action_of(connection, action))


async def caller(connection: HTTPConnection) -> Caller | NodeCredentials:
    found = await caller_if_any(connection)
    if found is None:
        raise NotSignedIn(SIGN_IN)
    return found


async def caller_if_any(connection: HTTPConnection) -> Caller | NodeCredentials | None:
    header = header_in(connection.scope, b"authorization")
    if header is None:
        return None
    scheme, _, secret = header.partition(" ")
    found: Caller | None = None
    proof = header_in(connection.scope, _PROOF)
    if proof is not None:
        node = await _node_of(connection, secret.strip(), proof)
        _authenticated(connection, encode("node", node.node))
        return node
    server = server_of(connection)
    if scheme.lower() != "bearer":
        server.guard.count_unknown_key(address_of(connection))
    else:
        found = server.credentials.remembered(secret)
        if found is None and not secret.startswith(USER_PREFIX):
            found = await server.credentials.who(secret)  # a token: its signature is checked first
        elif found is None:  # costs a store read, so guesses of unknown keys are rate limited
            server.guard.count_unknown_key(address_of(connection))
            found = await server.credentials.who(secret)
            if found is not None:
                server.guard.key_was_known(address_of(connection))
    if found is None:
        raise NotSignedIn(
            "this key or token is unknown, expired or revoked; check it, or sign in again"
        )
    _authenticated(connection, encode("user", found.user.id))
    count_account(connection, server.guard, found.user.id)  # a node is limited by its leases
    return replace(found, address=address_of(connection))


def _authenticated(connection: HTTPConnection, who: str) -> None:
    connection.scope[KNOWN] = who
    credential_was_valid(connection)


async def _node_of(connection: HTTPConnection, token: str, proof: str) -> NodeCredentials:
    scope = connection.scope
    path = (scope.get("raw_path") or scope["path"].encode()).decode("ascii", "replace")
    if scope["query_string"]:
        path += "?" + scope["query_string"].decode("ascii", "replace")
    lease = connection.headers.get(LEASE_HEADER, "")
    verifier = server_of(connection).gate
    return await verifier.requests(scope.get("method", ""), path, lease, token, proof)

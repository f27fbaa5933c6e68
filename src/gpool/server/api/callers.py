"""Authentication of REST requests by bearer token or node proof, and the check of their action.

The check depends on caller and action alone; the action asks `permit` about its object.
"""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import HTTPConnection

from gpool.core.errors import NotSignedIn
from gpool.core.permissions import Action
from gpool.server.api.endpoints import action_of
from gpool.server.api.rate_limits import address_in, count_account
from gpool.server.identity.authorization import SIGN_IN, gate
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.values import NodeCredentials
from gpool.transfer.artifacts import LEASE_HEADER
from gpool.transfer.node_proofs import PROOF_HEADER


def server_of(connection: HTTPConnection) -> Server:
    server: Server = connection.app.state.server
    return server


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
    header = connection.headers.get("authorization")
    if header is None:
        return None
    scheme, _, secret = header.partition(" ")
    found: Caller | None = None
    proof = connection.headers.get(PROOF_HEADER)
    if proof is not None:
        return await _node_of(connection, secret.strip(), proof)
    server = server_of(connection)
    if scheme.lower() == "bearer":
        if server.credentials.remembers(secret):
            found = await server.credentials.who(secret)
        else:  # costs a store read, so guesses of unknown keys are rate limited
            server.guard.count_unknown_key(address_of(connection))
            found = await server.credentials.who(secret)
            if found is not None:
                server.guard.key_was_known(address_of(connection))
    if found is None:
        raise NotSignedIn(
            "this key or token is unknown, expired or revoked; check it, or sign in again"
        )
    if isinstance(found, Caller):  # a node is limited by its leases
        count_account(connection, server.guard, found.user.id)
        return replace(found, address=address_of(connection))
    return found


async def _node_of(connection: HTTPConnection, token: str, proof: str) -> NodeCredentials:
    scope = connection.scope
    path = (scope.get("raw_path") or scope["path"].encode()).decode("ascii", "replace")
    if scope["query_string"]:
        path += "?" + scope["query_string"].decode("ascii", "replace")
    lease = connection.headers.get(LEASE_HEADER, "")
    verifier = server_of(connection).gate
    return await verifier.requests(scope.get("method", ""), path, lease, token, proof)

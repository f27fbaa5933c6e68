"""What routes take from a request: who asks, the body within its limit, ids, keys. Decides nothing about the matter."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, TypeVar

from fastapi import Query
from pydantic import BaseModel, ValidationError
from starlette.requests import HTTPConnection, Request

from gpool.core.errors import Invalid, NotSignedIn, TooLarge
from gpool.core.ids import decode
from gpool.core.permissions import Action
from gpool.server.api.problems import invalid
from gpool.server.api.rate_limits import address_in, count_account
from gpool.server.blobs import UploadPart
from gpool.server.identity.authorization import SIGN_IN, gate
from gpool.server.server import Once, Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.values import NodeCredentials
from gpool.transfer.artifacts import LEASE_HEADER
from gpool.transfer.node_proofs import PROOF_HEADER
from gpool.wire.documents import MAX_SMALL_BODY_BYTES
from gpool.wire.frames import Hold

M = TypeVar("M", bound=BaseModel)
MAX_KEY_LENGTH = 200
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")

Wait = Annotated[float, Query(ge=0, le=86_400, allow_inf_nan=False)]
After = Annotated[int, Query(ge=0, le=(1 << 63) - 1)]
Limit = Annotated[int, Query(ge=1, le=200)]


def server_of(connection: HTTPConnection) -> Server:
    server: Server = connection.app.state.server
    return server


async def asker(connection: HTTPConnection, action: Action) -> Caller | NodeCredentials:
    """Whoever asks for this, past the gate that looks at them and the action alone; the action asks about the object."""
    found = await caller_if_any(connection)
    gate(found, action)
    if found is None:
        raise NotSignedIn(SIGN_IN)
    return found


async def user_of(connection: HTTPConnection, action: Action) -> Caller:
    """The same, for what only users do: the gate lets no node pass."""
    found = await asker(connection, action)
    assert isinstance(found, Caller), f"{action} is for nodes"
    return found


async def caller(connection: HTTPConnection) -> Caller | NodeCredentials:
    """Whoever the bearer token belongs to; `NotSignedIn` otherwise."""
    found = await caller_if_any(connection)
    if found is None:
        raise NotSignedIn(SIGN_IN)
    return found


async def caller_if_any(connection: HTTPConnection) -> Caller | NodeCredentials | None:
    """None when no credentials were sent; wrong ones are an error."""
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
        else:  # a look into the store: keys that nobody has are not tried at any speed
            server.guard.count_unknown_key(address_of(connection))
            found = await server.credentials.who(secret)
            if found is not None:
                server.guard.key_was_known(address_of(connection))
    if found is None:
        raise NotSignedIn(
            "this key or token is not known here, or no longer good; sign in again, or check it"
        )
    if isinstance(found, Caller):  # a node is limited by its leases
        count_account(connection, server.guard, found.user.id)
        return replace(found, address=address_of(connection))
    return found


async def _node_of(connection: HTTPConnection, token: str, proof: str) -> NodeCredentials:
    """The node whose token this is, by its proof for this very request."""
    scope = connection.scope
    path = (scope.get("raw_path") or scope["path"].encode()).decode("ascii", "replace")
    if scope["query_string"]:
        path += "?" + scope["query_string"].decode("ascii", "replace")
    lease = connection.headers.get(LEASE_HEADER, "")
    gate = server_of(connection).gate
    return await gate.requests(scope.get("method", ""), path, lease, token, proof)


def address_of(connection: HTTPConnection) -> str:
    return address_in(connection.scope)


async def body_of(request: Request, limit: int = MAX_SMALL_BODY_BYTES) -> bytes:
    """The whole body; one that says it is too long is not read at all."""
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > limit:
        raise TooLarge(f"a body of {told[:20]} bytes; at most {limit} are taken here")
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise TooLarge(f"a body of more than {limit} bytes, the most that is taken here")
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def parsed(model: type[M], raw: bytes) -> M:
    try:
        return model.model_validate_json(raw or b"{}")
    except ValidationError as error:
        raise invalid(error.errors(include_url=False)) from None


def once_of(request: Request, raw: bytes = b"") -> Once | None:
    """The Idempotency-Key, with what it stands for."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not key or len(key) > MAX_KEY_LENGTH or not key.isprintable():
        raise Invalid(f"an Idempotency-Key has 1 to {MAX_KEY_LENGTH} printable characters")
    asked = f"{request.method} {request.scope['path']}".encode()
    # A keyed hash: what was asked may hold a password or a secret, and must not be guessed from the store.
    return Once(key, server_of(request).sealer.mark(b"request", asked, raw))


def sha256_of(text: str) -> str:
    if not _SHA256.fullmatch(text):
        raise Invalid(f"{text[:80]!r} is not a SHA-256: 64 hexadecimal digits, lower case")
    return text


def lease_of(request: Request) -> Hold | None:
    """`Gpool-Lease: t-…:EPOCH`, under which a node uploads."""
    header = request.headers.get(LEASE_HEADER)
    if header is None:
        return None
    task, _, epoch = header.rpartition(":")
    if not (epoch.isascii() and epoch.isdigit() and len(epoch) < 18):
        raise Invalid(f"'Gpool-Lease: {header[:60]}' is not TASK:EPOCH")
    return Hold(decode("task", task), int(epoch))


def part_of(request: Request) -> UploadPart | None:
    header = request.headers.get("content-range")
    if header is None:
        return None
    match = _CONTENT_RANGE.fullmatch(header)
    if match is None:
        raise Invalid(f"'Content-Range: {header[:60]}' is not 'bytes FIRST-LAST/TOTAL'")
    part = UploadPart(*(int(group) for group in match.groups()))
    if not part.first <= part.last < part.total:
        raise Invalid(f"'Content-Range: {header[:60]}' does not lie within its total")
    return part


def range_of(request: Request, size: int) -> tuple[int, int] | None:
    """(first, length) of the one range asked for; None: all of it. What is not one plain range is ignored."""
    match = _RANGE.fullmatch(request.headers.get("range", ""))
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        length = min(int(match[2]), size)
        return size - length, length
    first = int(match[1])
    last = min(int(match[2]), size - 1) if match[2] else size - 1
    return first, last - first + 1

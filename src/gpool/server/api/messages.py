"""HTTP messages of routes: request bodies, parameters and headers in; JSON, tagged and streamed responses out.

Depends on pydantic models of `wire`; decides nothing about permissions.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated, TypeVar

from fastapi import Path, Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gpool.core.errors import Invalid, TooLarge
from gpool.core.ids import decode
from gpool.server.api.bodies import parsed
from gpool.server.api.callers import KNOWN, header_in, server_of
from gpool.server.api.endpoints import JSON
from gpool.server.blobs import UploadPart
from gpool.server.server import Once
from gpool.transfer.requests import LEASE_HEADER
from gpool.wire.documents import MAX_ANONYMOUS_BODY_BYTES, MAX_SMALL_BODY_BYTES
from gpool.wire.frames import Hold

M = TypeVar("M", bound=BaseModel)
MAX_KEY_LENGTH = 200
PARSED_ON_LOOP_BYTES = 64 * 1024
"""Larger bodies are parsed in a thread."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

# ---- parameters

Wait = Annotated[
    float,
    Query(ge=0, le=86_400, allow_inf_nan=False, description="Seconds to wait for an end"),
]
After = Annotated[
    int, Query(ge=0, le=(1 << 63) - 1, description="Position after which to continue")
]
Limit = Annotated[int, Query(ge=1, le=200, description="Most items on the page")]
LargeLimit = Annotated[int, Query(ge=1, le=1000, description="Most items on the page")]
Cursor = Annotated[str | None, Query(description="`next` of the page before")]
TASK = Annotated[str, Path(description="Task id, t-…")]
BATCH = Annotated[str, Path(description="Batch id, b-…")]
NODE = Annotated[str, Path(description="Node id, n-…")]
GPU = Annotated[str, Path(description="GPU id, g-…, or a node id for the node's CPUs")]
SHA256 = Annotated[str, Path(description="SHA-256 in lower-case hexadecimal")]
USER = Annotated[str, Path(description="User id, u-…")]
TEAM = Annotated[str, Path(description="Team id, tm-…")]


# ---- requests


async def body_of(request: Request, limit: int, held: AsyncExitStack) -> bytes:
    """The whole body; `TooLarge` past `limit`, before reading if Content-Length says so.

    Until `callers` has authenticated the caller, at most `MAX_ANONYMOUS_BODY_BYTES` are read. A large body of a caller
    is read when few others of the same caller are in memory; `held` ends its turn.
    """
    who = request.scope.get(KNOWN)
    if who is None:
        limit = min(limit, MAX_ANONYMOUS_BODY_BYTES)
    declared = header_in(request.scope, b"content-length") or ""
    if declared.isdigit() and int(declared) > limit:
        raise TooLarge(f"the body has {declared[:20]} bytes; at most {limit} are accepted here")
    body = b""
    large: bytearray | None = None  # one buffer: many pieces would leave gaps in the heap
    async for piece in request.stream():
        size = len(piece) + len(body if large is None else large)
        if large is None and size > PARSED_ON_LOOP_BYTES:
            await held.enter_async_context(server_of(request).turns.large_bodies.turn(who))
            large = bytearray(body)
        if size > limit:
            raise TooLarge(f"the body has more than {limit} bytes, the limit of this route")
        if large is not None:
            large += piece
        else:
            body = body + piece if body else piece
    return body if large is None else bytes(large)


async def document_of(
    request: Request, model: type[M], limit: int = MAX_SMALL_BODY_BYTES
) -> tuple[M, Once | None]:
    async with AsyncExitStack() as held:
        content = await body_of(request, limit, held)
        found = await parsed_body(request, model, content, held)
    return found, once_of(request, content)


async def parsed_body(request: Request, model: type[M], content: bytes, held: AsyncExitStack) -> M:
    if len(content) <= PARSED_ON_LOOP_BYTES:
        return parsed(model, content)
    # one at a time: pydantic keeps the interpreter's lock, and the loop must get it in between
    await held.enter_async_context(server_of(request).turns.parsing)
    return await asyncio.to_thread(parsed, model, content)


def once_of(request: Request, raw: bytes = b"") -> Once | None:
    key = header_in(request.scope, b"idempotency-key")
    if key is None:
        return None
    if not key or len(key) > MAX_KEY_LENGTH or not key.isprintable():
        raise Invalid(f"an Idempotency-Key has 1 to {MAX_KEY_LENGTH} printable characters")
    line = f"{request.method} {request.scope['path']}".encode()
    # Keyed, because a body may hold a password that must not be guessed from the stored fingerprint.
    return Once(key, server_of(request).sealer.mark(b"request", line, raw))


def sha256_of(text: str) -> str:
    if not _SHA256.fullmatch(text):
        raise Invalid(f"{text[:80]!r} is not a SHA-256: 64 hexadecimal digits, lower case")
    return text


def lease_of(request: Request) -> Hold | None:
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
    """(first, length) of the range; None: all bytes. A header that is not one plain range is ignored."""
    match = _RANGE.fullmatch(request.headers.get("range", ""))
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        length = min(int(match[2]), size)
        return size - length, length
    first = int(match[1])
    last = min(int(match[2]), size - 1) if match[2] else size - 1
    return first, last - first + 1


# ---- responses


def answer(document: BaseModel, status: int = 200) -> Response:
    return Response(document.model_dump_json(), status, media_type=JSON)


def raw(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type=JSON)


def no_content() -> Response:
    return Response(status_code=204)


def uncached(document: BaseModel, status: int = 200) -> Response:
    response = answer(document, status)
    response.headers["Cache-Control"] = "no-store"
    return response


def tagged(request: Request, document: BaseModel | bytes) -> Response:
    body = document if isinstance(document, bytes) else document.model_dump_json().encode()
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    known = request.headers.get("if-none-match", "")
    if tag in (part.strip().removeprefix("W/") for part in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(body, 200, headers, JSON)


def stream(pieces: AsyncIterator[bytes], media_type: str) -> Response:
    return StreamingResponse(pieces, headers=_STREAM_HEADERS, media_type=media_type)

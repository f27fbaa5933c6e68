"""Answers as bytes: JSON with an ETag for what is read often, streams that no proxy keeps back."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

JSON = "application/json"
_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def answer(document: BaseModel, status: int = 200) -> Response:
    return Response(document.model_dump_json(), status, media_type=JSON)


def raw(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type=JSON)


def tagged(request: Request, document: BaseModel | bytes) -> Response:
    """200 with an ETag, or 304 when the reader has it already."""
    body = document if isinstance(document, bytes) else document.model_dump_json().encode()
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    known = request.headers.get("if-none-match", "")
    if tag in (part.strip().removeprefix("W/") for part in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(body, 200, headers, JSON)


def stream(pieces: AsyncIterator[bytes], media_type: str) -> Response:
    return StreamingResponse(pieces, headers=_STREAM_HEADERS, media_type=media_type)

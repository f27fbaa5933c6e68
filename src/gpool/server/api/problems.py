"""RFC 9457 problem documents for every error. An internal fault names only its log entry."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gpool.core.errors import Conflict, GpoolError, InternalFault, Invalid, NotFound, TooLarge
from gpool.server.api.validation_errors import finding

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
MAX_ERRORS = 10
_TITLES = {405: "Method not allowed", 404: NotFound.title, 400: Invalid.title}
_CODES = {405: "method_not_allowed", 404: NotFound.code, 400: Invalid.code}


def problem(error: GpoolError, instance: str = "") -> Response:
    headers = {}
    offset = error.members.get("offset")
    if isinstance(offset, int):
        headers["Upload-Offset"] = str(offset)
    if isinstance(error, TooLarge):
        headers["Connection"] = "close"  # the rest of the body stays unread
    wait = error.members.get("retry_after")
    if isinstance(wait, int):
        headers["Retry-After"] = str(wait)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _document(
        error.status,
        {**error.members, "title": error.title, "detail": error.detail, "code": error.code},
        instance,
        headers,
    )


def _document(
    status: int, members: Mapping[str, object], instance: str, headers: Mapping[str, str]
) -> Response:
    document = {
        "type": "about:blank",
        "status": status,
        "instance": instance,
        "errors": [],
        **members,
    }
    body = json.dumps(document, default=str, ensure_ascii=True).encode()
    return Response(body, status, dict(headers), MEDIA_TYPE)


def invalid(errors: Sequence[Any]) -> Invalid:
    found = [finding(error) for error in errors[:MAX_ERRORS]]
    field, message = found[0]
    subject = f"'{field}'" if field else "the body"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    listed = [{"field": field, "message": message} for field, message in found]
    return Invalid(f"{subject} {message}{more}", errors=listed)


def install(app: FastAPI) -> None:
    app.add_exception_handler(GpoolError, ours)
    app.add_exception_handler(RequestValidationError, _form)
    app.add_exception_handler(ValidationError, _form)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, _fault)


async def ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, GpoolError)
    if error.status >= 500:
        log.error("request failed: %s", error.detail, exc_info=error)
    return problem(error, request.scope["path"])


async def _form(request: Request, error: Exception) -> Response:
    assert isinstance(error, (RequestValidationError, ValidationError))
    return problem(invalid(list(error.errors())), request.scope["path"])


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    detail = str(error.detail)
    if status == 404:
        detail = f"no route {request.scope['path'][:200]}; /openapi.json lists all routes"
    elif status == 405:
        detail = f"{request.scope['path'][:200]} does not support {request.method}"
    members = {
        "title": _TITLES.get(status, detail),
        "detail": detail,
        "code": _CODES.get(status, Conflict.code if status == 409 else "error"),
    }
    return _document(status, members, request.scope["path"], error.headers or {})


async def gone(request: Request, error: Exception) -> Response:  # noqa: ARG001 - the signature of handlers
    return problem(
        Invalid("the connection closed before the end of the body"), request.scope["path"]
    )


async def _fault(request: Request, error: Exception) -> Response:
    entry = secrets.token_hex(6)
    log.error("fault %s at %s %s", entry, request.method, request.scope["path"], exc_info=error)
    return problem(
        InternalFault(f"internal fault; the server's log has the details under {entry}"),
        request.scope["path"],
    )

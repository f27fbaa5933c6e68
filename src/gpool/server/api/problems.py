"""Every error as an RFC 9457 problem document. A fault of ours says no more than where to look."""

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
    """The document for an error of ours, its extra members beside it."""
    headers = {}
    offset = error.members.get("offset")
    if isinstance(offset, int):
        headers["Upload-Offset"] = str(offset)
    if isinstance(error, TooLarge):
        headers["Connection"] = "close"  # the rest of the body is not read
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
    """What pydantic found, said once in a sentence and once as a list."""
    told = [finding(error) for error in errors[:MAX_ERRORS]]
    field, message = told[0]
    subject = f"'{field}'" if field else "the body"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    listed = [{"field": field, "message": message} for field, message in told]
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
        detail = f"nothing is at {request.scope['path'][:200]}; /openapi.json lists what there is"
    elif status == 405:
        detail = f"{request.method} does not go with {request.scope['path'][:200]}"
    members = {
        "title": _TITLES.get(status, detail),
        "detail": detail,
        "code": _CODES.get(status, Conflict.code if status == 409 else "error"),
    }
    return _document(status, members, request.scope["path"], error.headers or {})


async def gone(request: Request, error: Exception) -> Response:  # noqa: ARG001 - a handler's shape
    return problem(Invalid("the connection ended before the body did"), request.scope["path"])


async def _fault(request: Request, error: Exception) -> Response:
    entry = secrets.token_hex(6)
    log.error("fault %s at %s %s", entry, request.method, request.scope["path"], exc_info=error)
    return problem(
        InternalFault(f"a fault of gpool; the server's log has it as {entry}"),
        request.scope["path"],
    )

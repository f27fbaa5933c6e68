"""RFC 9457 problem documents for every error, with the texts of validation errors. Secrets are never repeated."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gpool.core.errors import Conflict, GpoolError, InternalFault, Invalid, NotFound, TooLarge
from gpool.observability.context import REQUEST_ID, WORK, AtWork, NamedWork, Work
from gpool.observability.logs import get_logger

MAX_SHOWN = 80
NEVER_SHOWN = frozenset(
    {"secrets", "env", "password", "old", "new", "refresh_token", "access_token", "signature"}
    | {"token", "invite", "proof", "state", "code"}  # links, wallets, OpenID Connect
    | {"calls", "value"}  # arguments of functions, stored secrets
)
"""Fields whose values are left out of error texts, which may end up in logs and screenshots."""

_WHOLE, _NUMBER, _TRUTH = "must be a whole number", "must be a number", "must be true or false"
_TEXT, _LIST, _OBJECT = "must be text", "must be a list", "must be an object"
_MOMENT = "must be a time with its zone, like 2026-12-31T18:00:00Z"
_MESSAGES = {
    "int_parsing": _WHOLE,
    "int_parsing_size": _WHOLE,
    "int_type": _WHOLE,
    "int_from_float": _WHOLE,
    "float_parsing": _NUMBER,
    "float_type": _NUMBER,
    "finite_number": _NUMBER,
    "bool_parsing": _TRUTH,
    "bool_type": _TRUTH,
    "string_type": _TEXT,
    "string_unicode": _TEXT,
    "string_too_long": "must have at most {max_length} letters",
    "string_too_short": "must have at least {min_length} letters",
    "string_pattern_mismatch": "must have the form {pattern}",
    "list_type": _LIST,
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be {le} or less",
    "datetime_type": _MOMENT,
    "datetime_parsing": _MOMENT,
    "datetime_from_date_parsing": _MOMENT,
    "datetime_object_invalid": _MOMENT,
    "timezone_aware": _MOMENT,
}
_COMPLETE = {
    "missing": "is required",
    "extra_forbidden": "is not a field of this document; check its spelling",
    "too_long": "must have at most {max_length} members, not {actual_length}",
    "too_short": "must have at least {min_length} members, not {actual_length}",
    "json_invalid": "is not JSON: {error}",
}
"""Error types whose text does not repeat the given value."""

_SOURCES = frozenset({"body", "query", "path", "header"})
_ALTERNATIVE = re.compile(r"str|int|float|bool|\w+Document|(?:constrained-|list\[|dict\[).*")
"""Type names that pydantic appends to the location in a union."""


def finding(error: Mapping[str, Any]) -> tuple[str, str]:
    place = [str(part) for part in error.get("loc", ())]
    if place and place[0] in _SOURCES:
        place = place[1:]
    if len(place) > 1 and _ALTERNATIVE.fullmatch(place[-1]) and not NEVER_SHOWN & {place[-2]}:
        place = place[:-1]
    return ".".join(place)[:200], _message(error, place)[:500]


def _message(error: Mapping[str, Any], place: list[str]) -> str:
    kind = str(error.get("type", ""))
    limits = {name: _limit(value) for name, value in (error.get("ctx") or {}).items()}
    if kind in _COMPLETE:
        return _COMPLETE[kind].format_map(_ErrorLimits(limits))
    text = _MESSAGES.get(kind)
    if text is None:
        message = str(error.get("msg", "")).removeprefix("Value error, ")
        text = f"is not valid: {message[:1].lower()}{message[1:]}" if message else "is not valid"
    else:
        text = text.format_map(_ErrorLimits(limits))
    return f"{text}{_given(error, place)}"


class _ErrorLimits(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "?"


def _limit(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.12g}"
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _given(error: Mapping[str, Any], place: list[str]) -> str:
    given = error.get("input")
    is_plain = given is None or isinstance(given, (str, int, float))
    if "input" not in error or not is_plain or not place or NEVER_SHOWN.intersection(place):
        return ""
    if isinstance(given, float) and given.is_integer():
        return f", not {given:.0f}"
    if isinstance(given, str) and len(given) > MAX_SHOWN:
        given = f"{given[:MAX_SHOWN]}…"
    return f", not {json.dumps(given, ensure_ascii=False)[: MAX_SHOWN + 3]}"


log = get_logger(__name__)

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
        log.error("request failed", exc_info=error)
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
    """Answer outside the middleware: name the request and set its header here."""
    work: Work | None = request.scope.get(WORK)
    entry = secrets.token_hex(8) if work is None else str(work.log_fields()["request"])
    with AtWork(work or NamedWork({"request": entry})):
        log.error("internal fault", exc_info=error)
    answer = problem(
        InternalFault(f"internal fault; the server's log has the details under {entry}"),
        request.scope["path"],
    )
    answer.headers[REQUEST_ID] = entry
    return answer

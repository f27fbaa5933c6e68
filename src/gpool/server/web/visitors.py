"""Visitors of pages: sessions by cookie, and the double check of forms (origin and token) against other sites.

REST routes never come here: they accept no cookies. A request with an API key or token is not a browser's and needs no
form token, since no other site can add the header.
"""

from __future__ import annotations

import hmac
import platform
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import Forbidden, Invalid, NotSignedIn
from gpool.core.ids import encode
from gpool.core.permissions import Action
from gpool.server.actions.accounts import sessions
from gpool.server.api import problems
from gpool.server.api.callers import (
    KNOWN,
    address_of,
    caller_if_any,
    check,
    count_account,
    credential_was_valid,
    server_of,
)
from gpool.server.api.endpoints import action_of
from gpool.server.api.messages import body_of
from gpool.server.identity.authorization import SIGN_IN
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.values import NodeCredentials
from gpool.server.web.origins import Origin, OwnNames, is_same_origin, own_origin
from gpool.wire.documents import MAX_SMALL_BODY_BYTES

M = TypeVar("M", bound=BaseModel)
FIELD = "csrf"
"""Name of the hidden field with the session's form token."""

VISITOR = "gpool.visitor"
"""Key of the request scope under which the caller of a page is kept, for the frame around it."""

FLOW = "-flow"
"""Ending of the name of the cookie that binds a sign-in at a provider to its browser."""

_FORM = "gpool.form"
_SAFE = frozenset({"GET", "HEAD"})
MAX_FIELDS = 1000
FOREIGN = "this form was not sent by a page of this pool; open the page again and repeat"


@dataclass(frozen=True, slots=True)
class Form:
    fields: Mapping[str, tuple[str, ...]]

    def text(self, name: str, otherwise: str = "") -> str:
        found = self.fields.get(name, ())
        return found[-1].strip() if found else otherwise

    def raw(self, name: str) -> str:
        """As typed, with its spaces: passwords and scripts."""
        found = self.fields.get(name, ())
        return found[-1] if found else ""

    def all(self, name: str) -> tuple[str, ...]:
        return self.fields.get(name, ())

    def is_set(self, name: str) -> bool:
        return bool(self.text(name))


async def visitor(request: Request, action: Action | None = None) -> Caller:
    """User behind a page's request, if they may do its action; checks the origin and token of forms."""
    found = await visitor_if_any(request)
    check(request, found, action)
    if found is None:
        raise NotSignedIn(SIGN_IN)
    assert isinstance(found, Caller), f"{action_of(request, action)} is for nodes"
    return found


async def visitor_if_any(request: Request) -> Caller | NodeCredentials | None:
    """Caller by credentials in a header, else by cookie."""
    if "authorization" in request.headers:
        known = await caller_if_any(request)
        request.scope[VISITOR] = known
        return known
    found = await cookie_caller(request)
    if found is None:
        return None
    if request.method not in _SAFE:
        require_same_origin(request)
        token = (await form_of(request)).text(FIELD)
        if not hmac.compare_digest(token.encode(), form_token(server_of(request), found).encode()):
            raise Forbidden(FOREIGN)
    request.scope[VISITOR] = found
    return found


async def cookie_caller(request: Request) -> Caller | None:
    """Caller of the request's cookie. `NotSignedIn` if there are several cookies."""
    server, origin = server_of(request), origin_of_request(request)
    values = [] if origin is None else _cookies(request, cookie_name(origin))
    if not values:
        return None
    if len(set(values)) > 1:
        # another service of this host, or of its domain, planted a second one: neither is trusted
        raise NotSignedIn("the browser sent several sessions of this pool; sign in again")
    if server.credentials.cached(values[0]) is None:
        server.guard.count_unknown_key(address_of(request))
    found = await sessions.browser_caller(server, values[0])
    if found is None:
        return None
    server.guard.key_was_known(address_of(request))
    request.scope[KNOWN] = encode("user", found.user.id)
    credential_was_valid(request)
    count_account(request, server.guard, found.user.id)
    return replace(found, address=address_of(request))


async def is_signed_in_still(request: Request) -> bool:
    """Whether the session of an open stream lasts."""
    if "authorization" in request.headers:
        return await caller_if_any(request) is not None
    return await cookie_caller(request) is not None


# ---- forms


async def form_of(request: Request) -> Form:
    """The request's form, `application/x-www-form-urlencoded`; read once."""
    known: Form | None = request.scope.get(_FORM)
    if known is not None:
        return known
    async with AsyncExitStack() as held:
        content = await body_of(request, MAX_SMALL_BODY_BYTES, held)
    try:
        pairs = parse_qsl(
            content.decode("ascii"), keep_blank_values=True, max_num_fields=MAX_FIELDS
        )
    except ValueError as error:
        raise Invalid("the body is not a form; send the form of a page") from error
    fields: dict[str, tuple[str, ...]] = {}
    for name, value in pairs:
        fields[name] = (*fields.get(name, ()), value)
    form = request.scope[_FORM] = Form(fields)
    return form


def validated(model: type[M], members: Mapping[str, object]) -> M:
    """The document of a form's values; `Invalid` with the name of a wrong one."""
    try:
        return model.model_validate(members)
    except ValidationError as error:
        raise problems.invalid(list(error.errors())) from error


def form_token(server: Server, who: Caller) -> str:
    """Token that every form of this session contains; derived, so that replicas agree on it."""
    return server.credentials.derived("", "form token", who.session or "")


def require_same_origin(request: Request) -> None:
    public = server_of(request).settings.origin
    if not is_same_origin(request.headers, origin_of_request(request), public):
        raise Forbidden(FOREIGN)


# ---- cookies


def origin_of_request(request: Request) -> Origin | None:
    settings = server_of(request).settings
    names = OwnNames(settings.origin, frozenset({platform.node().lower()}) - {""})
    return own_origin(names, request.scope["scheme"], request.headers.get("host", ""))


def cookie_name(origin: Origin) -> str:
    """Cookies of one host are shared by its ports: plain HTTP names the port, TLS keeps other hosts from setting it."""
    return "__Host-gpool" if origin.is_secure else f"gpool-{origin.port}"


def set_cookie(request: Request, response: Response, value: str) -> None:
    """Keep the session's cookie; with an empty value remove it. `Forbidden` under a name that is not the pool's."""
    origin = origin_of_request(request)
    if origin is None:
        raise Forbidden(f"open the pool at {server_of(request).settings.origin}")
    life = round(server_of(request).settings.session_days * 86_400) if value else 0
    response.set_cookie(
        cookie_name(origin),
        value,
        max_age=life,
        path="/",
        secure=origin.is_secure,
        httponly=True,
        samesite="lax" if origin.is_secure else "strict",
    )


def set_flow_cookie(request: Request, response: Response, value: str) -> None:
    """Keep the secret of a sign-in that was begun in this browser; with an empty value remove it."""
    origin = origin_of_request(request)
    if origin is None:
        raise Forbidden(f"open the pool at {server_of(request).settings.origin}")
    life = round(server_of(request).settings.nonce_s) if value else 0
    response.set_cookie(
        cookie_name(origin) + FLOW,
        value,
        max_age=life,
        path="/",
        secure=origin.is_secure,
        httponly=True,
        samesite="strict",
    )


def flow_cookie(request: Request) -> str:
    """Secret of the sign-in that was begun in this browser; empty if there is none, or several."""
    origin = origin_of_request(request)
    found = set() if origin is None else set(_cookies(request, cookie_name(origin) + FLOW))
    return found.pop() if len(found) == 1 else ""


def is_public_origin(request: Request) -> bool:
    """Whether the page is open under the pool's public origin, the only one that wallets sign for."""
    origin = origin_of_request(request)
    return origin is not None and origin.text == server_of(request).settings.origin


def _cookies(request: Request, name: str) -> list[str]:
    """All values under this name: Starlette would keep one of them."""
    found = []
    for header in request.headers.getlist("cookie"):
        for part in header.split(";"):
            key, _, value = part.strip().partition("=")
            if key == name:
                found.append(value.strip('"'))
    return found

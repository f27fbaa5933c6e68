"""Sign-in with a password or a one-time link, registration, sign-out, and the static files."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import GpoolError, Invalid, NotSignedIn
from gpool.core.permissions import Action
from gpool.server.actions.accounts import accounts, sessions, sign_in_links
from gpool.server.api.callers import address_of, credential_was_valid, server_of
from gpool.server.identity.throttle import RouteClass
from gpool.server.overload.admission import LoadClass
from gpool.server.web.origins import safe_next
from gpool.server.web.rendering import page, static_answer
from gpool.server.web.routing import PageRouter, see
from gpool.server.web.visitors import (
    cookie_caller,
    form_of,
    require_same_origin,
    set_cookie,
    validated,
    visitor,
)
from gpool.wire.identity import UserRequest

routes = PageRouter("pages")

MAX_CODE = 200
_BROWSERS = (
    ("Firefox/", "Firefox"),
    ("Edg/", "Edge"),
    ("Chrome/", "Chrome"),
    ("Safari/", "Safari"),
)
_SYSTEMS = (
    ("Android", "Android"),
    ("iPhone", "iPhone"),
    ("iPad", "iPad"),
    ("Windows", "Windows"),
    ("Mac OS", "macOS"),
    ("Linux", "Linux"),
)


@routes.page("/static/{name}", Action.PAGE_READ, load=LoadClass.OTHER)
async def get_static_file(request: Request, name: str) -> Response:
    """Read a script, style or image."""
    return static_answer(request, name)


@routes.page("/sign-in", Action.PAGE_READ, load=LoadClass.OTHER)
async def show_sign_in(request: Request) -> Response:
    """Show the sign-in page."""
    target = safe_next(request.query_params.get("next", ""))
    try:
        is_known = await cookie_caller(request) is not None
    except GpoolError:  # of an invalid session: sign in again
        is_known = False
    return see(target) if is_known else _sign_in_page(request, target)


@routes.form("/sign-in", Action.SIGN_IN, rate=RouteClass.SIGN_IN)
async def sign_in(request: Request) -> Response:
    """Sign in with name and password."""
    require_same_origin(request)
    form = await form_of(request)
    target, name = safe_next(form.text("next")), form.text("name")
    server, address = server_of(request), address_of(request)
    try:
        account = await sessions.account_with_password(
            server, name[:200], form.raw("password")[:2000], address
        )
        cookie = await sessions.open_browser_session(
            server, account, _label(request), address, "password"
        )
    except GpoolError as error:
        return _sign_in_page(request, target, error, name)
    return _signed_in(request, target, cookie)


@routes.form("/register", Action.REGISTER, rate=RouteClass.REGISTER)
async def register(request: Request) -> Response:
    """Create an account with a password, and sign in."""
    require_same_origin(request)
    form = await form_of(request)
    target, name, password = safe_next(form.text("next")), form.text("name"), form.raw("password")
    server, address = server_of(request), address_of(request)
    try:
        if password != form.raw("again"):
            raise Invalid("the two passwords differ; type the same one twice")
        invite = form.text("invite") or None
        wanted = validated(UserRequest, {"name": name, "password": password, "invite": invite})
        await accounts.register(server, wanted)
        account = await sessions.account_with_password(server, name, password, address)
        cookie = await sessions.open_browser_session(
            server, account, _label(request), address, "registration"
        )
    except GpoolError as error:
        return _sign_in_page(request, target, error, name, is_new=True)
    return _signed_in(request, target, cookie)


@routes.page("/in/{code}", Action.PAGE_READ, load=LoadClass.OTHER)
async def show_link(request: Request, code: str) -> Response:
    """Open a one-time link: the page sends the code, so that no preview of the link can use it up."""
    return page(request, "link.html", code=code[:MAX_CODE])


@routes.form("/in", Action.SIGN_IN, rate=RouteClass.SIGN_IN)
async def use_link(request: Request) -> Response:
    """Sign in with the code of a one-time link."""
    require_same_origin(request)
    code = (await form_of(request)).text("code")[:MAX_CODE]
    try:
        cookie = await sign_in_links.open_link(
            server_of(request), code, _label(request), address_of(request)
        )
    except NotSignedIn as error:
        return _sign_in_page(request, "/", error)
    return _signed_in(request, "/", cookie)


@routes.form("/sign-out", Action.SIGN_OUT, rate=RouteClass.SIGN_IN)
async def sign_out_browser(request: Request) -> Response:
    """End this session, or all sessions of the account."""
    who = await visitor(request)
    everywhere = (await form_of(request)).is_set("everywhere")
    await sessions.sign_out(server_of(request), who, None, everywhere)
    response = see("/sign-in")
    set_cookie(request, response, "")
    return response


def _sign_in_page(
    request: Request,
    target: str,
    error: GpoolError | None = None,
    name: str = "",
    *,
    is_new: bool = False,
) -> Response:
    status = 200 if error is None else error.status
    return page(
        request,
        "sign_in.html",
        status,
        next=target,
        error=error,
        name=name,
        registers=server_of(request).settings.registers,
        is_new=is_new,
    )


def _signed_in(request: Request, target: str, cookie: str) -> Response:
    credential_was_valid(request)
    response = see(target)
    set_cookie(request, response, cookie)
    return response


def _label(request: Request) -> str:
    """Browser and system, for the list of sessions."""
    agent = request.headers.get("user-agent", "")
    browser = next((name for word, name in _BROWSERS if word in agent), "a browser")
    system = next((name for word, name in _SYSTEMS if word in agent), "")
    return f"{browser} on {system}" if system else browser

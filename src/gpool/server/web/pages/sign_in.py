"""Sign-in with a password, a one-time link or an identity provider, registration, sign-out, and the static files.

A provider sends the browser back by a navigation of another site. The page it returns to sends code and state in a
form of its own, so that cookies of this site only are sent with it and no preview of the address uses the code up.
"""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import Forbidden, GpoolError, Invalid, NotSignedIn
from gpool.core.permissions import Action
from gpool.server.actions.accounts import accounts, oidc, sessions, sign_in_links
from gpool.server.api.callers import address_of, credential_was_valid, server_of
from gpool.server.identity.throttle import RouteClass
from gpool.server.overload.admission import LoadClass
from gpool.server.web.origins import safe_next
from gpool.server.web.rendering import page, static_answer
from gpool.server.web.routing import PageRouter, see
from gpool.server.web.visitors import (
    cookie_caller,
    flow_cookie,
    form_of,
    is_public_origin,
    origin_of_request,
    require_same_origin,
    set_cookie,
    set_flow_cookie,
    validated,
    visitor,
)
from gpool.wire.identity import OidcFinish, UserRequest

routes = PageRouter("pages")

MAX_CODE = 200
MAX_STATE = 4096
OIDC_BACK = "/sign-in/oidc/back"
"""Path of the redirect URI that is registered at a provider."""

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
    return see(target) if is_known else sign_in_page(request, target)


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
            server, account, browser_label(request), address, "password"
        )
    except GpoolError as error:
        return sign_in_page(request, target, error, name)
    return signed_in(request, target, cookie)


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
            server, account, browser_label(request), address, "registration"
        )
    except GpoolError as error:
        return sign_in_page(request, target, error, name, is_new=True)
    return signed_in(request, target, cookie)


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
            server_of(request), code, browser_label(request), address_of(request)
        )
    except NotSignedIn as error:
        return sign_in_page(request, "/", error)
    return signed_in(request, "/", cookie)


@routes.form("/sign-in/oidc", Action.SIGN_IN_PROVE, rate=RouteClass.SIGN_IN)
async def begin_oidc(request: Request) -> Response:
    """Begin a sign-in with an OpenID Connect provider and go there."""
    require_same_origin(request)
    form = await form_of(request)
    target, secret = safe_next(form.text("next")), secrets.token_urlsafe(32)
    flow = oidc.BrowserFlow(secret, target, form.text("invite")[:MAX_CODE] or None)
    try:
        origin = origin_of_request(request)
        if origin is None:
            raise Forbidden(f"open the pool at {server_of(request).settings.origin}")
        back, provider = origin.text + OIDC_BACK, form.text("provider")[:MAX_CODE]
        started = await oidc.start(server_of(request), provider, back, flow)
    except GpoolError as error:
        return sign_in_page(request, target, error)
    # Not a redirect: browsers apply `form-action` of the page to redirects of its forms.
    response = page(request, "provider.html", url=started.url, provider=started.provider)
    response.headers["Refresh"] = f"0;url={started.url}"
    set_flow_cookie(request, response, secret)
    return response


@routes.page(OIDC_BACK, Action.PAGE_READ, load=LoadClass.OTHER)
async def return_from_oidc(request: Request) -> Response:
    """Return from a provider: the page sends code and state in a form."""
    query = request.query_params
    if "error" in query or "code" not in query:
        why = query.get("error_description") or query.get("error", "no code")
        error = NotSignedIn(f"the provider did not sign you in: {why[:MAX_CODE]}")
        return sign_in_page(request, "/", error)
    code, state = query["code"][:MAX_STATE], query.get("state", "")[:MAX_STATE]
    return page(request, "oidc.html", code=code, state=state)


@routes.form("/sign-in/oidc/finish", Action.SIGN_IN, Action.REGISTER, rate=RouteClass.SIGN_IN)
async def finish_oidc_on_page(request: Request) -> Response:
    """Sign in with the code of a provider, in the browser that began it."""
    require_same_origin(request)
    form, server, address = await form_of(request), server_of(request), address_of(request)
    try:
        secret = flow_cookie(request)
        if not secret:
            raise NotSignedIn(
                "this sign-in was begun in another browser, or it expired; start again"
            )
        wanted = validated(OidcFinish, {"state": form.text("state"), "code": form.raw("code")})
        found = await oidc.account_of(server, wanted, secret)
        cookie = await sessions.open_browser_session(
            server, found.account, browser_label(request), address, f"oidc {found.provider}"
        )
    except GpoolError as error:
        return sign_in_page(request, "/", error)
    response = signed_in(request, safe_next(found.next), cookie)
    set_flow_cookie(request, response, "")
    return response


@routes.form("/sign-out", Action.SIGN_OUT, rate=RouteClass.SIGN_IN)
async def sign_out_browser(request: Request) -> Response:
    """End this session, or all sessions of the account."""
    who = await visitor(request)
    everywhere = (await form_of(request)).is_set("everywhere")
    await sessions.sign_out(server_of(request), who, None, everywhere)
    response = see("/sign-in")
    set_cookie(request, response, "")
    return response


def sign_in_page(
    request: Request,
    target: str,
    error: GpoolError | None = None,
    name: str = "",
    *,
    is_new: bool = False,
) -> Response:
    status, settings = 200 if error is None else error.status, server_of(request).settings
    return page(
        request,
        "sign_in.html",
        status,
        next=target,
        error=error,
        name=name,
        registers=settings.registers,
        is_new=is_new,
        providers=[each.name for each in settings.oidc],
        wallets_at="" if is_public_origin(request) else settings.origin,
    )


def signed_in(request: Request, target: str, cookie: str) -> Response:
    credential_was_valid(request)
    response = see(target)
    set_cookie(request, response, cookie)
    return response


def browser_label(request: Request) -> str:
    """Browser and system, for the list of sessions."""
    agent = request.headers.get("user-agent", "")
    browser = next((name for word, name in _BROWSERS if word in agent), "a browser")
    system = next((name for word, name in _SYSTEMS if word in agent), "")
    return f"{browser} on {system}" if system else browser

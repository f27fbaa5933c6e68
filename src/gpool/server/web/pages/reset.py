"""Password reset: a form that asks for a mail, and the page of a one-time link that sets the new password."""

from __future__ import annotations

from typing import Literal

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import GpoolError, Invalid, NotSignedIn
from gpool.core.permissions import Action
from gpool.server.actions.accounts import password_resets
from gpool.server.api.callers import address_of, server_of
from gpool.server.identity.throttle import RouteClass
from gpool.server.overload.admission import LoadClass
from gpool.server.web.rendering import page
from gpool.server.web.routing import PageRouter
from gpool.server.web.visitors import form_of, require_same_origin

routes = PageRouter("pages")

MAX_CODE = 200
MAX_NAME = 200


@routes.page("/reset", Action.PAGE_READ, load=LoadClass.OTHER)
async def show_reset(request: Request) -> Response:
    """Show the form that asks for a reset link."""
    return _reset_page(request, "name")


@routes.form("/reset", Action.PASSWORD_RESET, rate=RouteClass.REGISTER)
async def ask_for_reset(request: Request) -> Response:
    """Mail a reset link, if the account has a confirmed address; the answer does not depend on it."""
    require_same_origin(request)
    name = (await form_of(request)).text("name")[:MAX_NAME]
    response = _reset_page(request, "asked")
    # After the answer: neither its content nor its time tells whether there is such an account.
    response.background = BackgroundTask(
        password_resets.mail, server_of(request), name, address_of(request)
    )
    return response


@routes.page("/reset/{code}", Action.PAGE_READ, load=LoadClass.OTHER, rate=RouteClass.SIGN_IN)
async def show_new_password(request: Request, code: str) -> Response:
    """Open a reset link; it is used up by its form only."""
    if not await password_resets.is_open(server_of(request), code[:MAX_CODE]):
        return _reset_page(request, "name", NotSignedIn(password_resets.USED))
    return _reset_page(request, "password", code=code[:MAX_CODE])


@routes.form("/reset/password", Action.PASSWORD_RESET, rate=RouteClass.SIGN_IN)
async def set_new_password(request: Request) -> Response:
    """Set the password with the code of a reset link. All sessions of the account end."""
    require_same_origin(request)
    form = await form_of(request)
    code, password = form.text("code")[:MAX_CODE], form.raw("password")
    try:
        if password != form.raw("again"):
            raise Invalid("the two passwords differ; type the same one twice")
        await password_resets.set_password(server_of(request), code, password, address_of(request))
    except NotSignedIn as error:
        return _reset_page(request, "name", error)
    except GpoolError as error:
        return _reset_page(request, "password", error, code)
    return _reset_page(request, "done")


def _reset_page(
    request: Request,
    step: Literal["name", "asked", "password", "done"],
    error: GpoolError | None = None,
    code: str = "",
) -> Response:
    return page(
        request,
        "reset.html",
        200 if error is None else error.status,
        step=step,
        error=error,
        code=code,
        mails=server_of(request).settings.mail_server is not None,
    )

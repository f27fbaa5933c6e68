"""Declaration of pages: like REST routes, with the headers and error pages of browsers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from gpool.core.errors import GpoolError, NotSignedIn
from gpool.core.permissions import Action
from gpool.observability.logs import get_logger
from gpool.server.api.endpoints import EndpointRouter, SuccessReply
from gpool.server.identity.throttle import RouteClass
from gpool.server.overload.admission import LoadClass
from gpool.server.web.rendering import SECURITY_HEADERS, page

log = get_logger(__name__)
H = TypeVar("H", bound=Callable[..., Awaitable[Any]])
HTML = SuccessReply(description="A page", media_types=("text/html",))


class PageRouter(EndpointRouter):
    """Pages of one subject. Errors are pages too, for requests that accept HTML."""

    def page(
        self, path: str, *actions: Action, load: LoadClass = LoadClass.LISTING, **declared: Any
    ) -> Callable[[H], H]:
        return self._page("GET", path, actions, load=load, **declared)

    def live(self, path: str, *actions: Action) -> Callable[[H], H]:
        """A stream of changes of a page; its views are shared, so it costs less than a listing."""
        return self._page("GET", path, actions, rate=RouteClass.STREAM, load=LoadClass.OTHER)

    def form(self, path: str, *actions: Action, **declared: Any) -> Callable[[H], H]:
        """The target of a form."""
        return self._page("POST", path, actions, **declared)

    def _page(
        self, method: str, path: str, actions: tuple[Action, ...], **declared: Any
    ) -> Callable[[H], H]:
        declared |= {"returns": HTML, "include_in_schema": False, "is_page": True}
        return self._route(method, path, actions, **declared)

    async def _respond(
        self, handler: Callable[..., Awaitable[Any]], request: Request, parameters: dict[str, Any]
    ) -> Any:
        try:
            response: Response = await super()._respond(handler, request, parameters)
        except GpoolError as error:
            if "text/html" not in request.headers.get("accept", ""):
                raise
            response = _error_page(request, error)
        for name, value in SECURITY_HEADERS.items():
            response.headers.setdefault(name, value)
        return response


def _error_page(request: Request, error: GpoolError) -> Response:
    if isinstance(error, NotSignedIn):
        return sign_in_first(request)
    if error.status >= 500:
        log.error("page failed", exc_info=error)
    response = page(request, "error.html", error.status, error=error)
    wait = error.members.get("retry_after")
    if isinstance(wait, int):
        response.headers["Retry-After"] = str(wait)
    return response


def sign_in_first(request: Request) -> Response:
    """Send to the sign-in page and from there back, unless the request was a form."""
    target = "/sign-in"
    if request.method == "GET" and not request.scope["path"].startswith(
        ("/sign-in", "/in/", "/reset")
    ):
        query = request.scope["query_string"].decode("ascii", "replace")
        path = request.scope["path"] + (f"?{query}" if query else "")
        target += "" if path == "/" else f"?next={quote(path, safe='/')}"
    if "hx-request" in request.headers:
        return Response(status_code=401, headers={"HX-Redirect": "/sign-in"})
    return RedirectResponse(target, 303)


def see(path: str) -> Response:
    """The answer to a form that was carried out."""
    return RedirectResponse(path, 303)

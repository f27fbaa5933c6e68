"""Templates, static files and the headers of every page. Values are escaped; text of others loses control characters."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import NotFound
from gpool.core.model import Permission
from gpool.server.api.callers import server_of
from gpool.server.server import VERSION
from gpool.server.store.identity_values import Caller
from gpool.server.web import values
from gpool.server.web.previews import preview_type
from gpool.server.web.visitors import VISITOR, form_token
from gpool.wire.documents import instant_to_datetime

HERE = Path(__file__).parent
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
"""`same-origin` referrers, not none: browsers then name the origin of forms."""

SANDBOX = "default-src 'none'; style-src 'unsafe-inline'; sandbox; frame-ancestors 'none'"
"""Policy of text that a task wrote: it is shown without scripts and without the pool's origin."""

_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class StaticFile:
    content: bytes
    zipped: bytes
    media_type: str
    version: str


@cache
def static_files() -> Mapping[str, StaticFile]:
    """Every script, style and image by name, read once and compressed."""
    found = {}
    for path in sorted((HERE / "static").iterdir()):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            version = hashlib.blake2b(content, digest_size=6).hexdigest()
            zipped = gzip.compress(content, 9, mtime=0)
            found[path.name] = StaticFile(content, zipped, _TYPES[path.suffix], version)
    return found


def static_url(name: str) -> str:
    return f"/static/{name}?v={static_files()[name].version}"


def static_answer(request: Request, name: str) -> Response:
    file = static_files().get(name)
    if file is None:
        raise NotFound(f"there is no file {name[:80]}")
    is_zipped = "gzip" in request.headers.get("accept-encoding", "")
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
    if is_zipped:
        headers["Content-Encoding"] = "gzip"
    return Response(file.zipped if is_zipped else file.content, 200, headers, file.media_type)


@cache
def environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.filters.update(values.FILTERS)
    found.tests["previewed"] = lambda file: bool(preview_type(file.path, file.size_bytes))
    found.globals["static"] = static_url
    return found


def moment(request: Request) -> datetime:
    return instant_to_datetime(server_of(request).now)


def rendered(template: str, **members: Any) -> str:
    return environment().get_template(template).render(**members)


def page(request: Request, template: str, status: int = 200, /, **members: Any) -> Response:
    """A whole page with its frame: navigation, the visitor's name, the form token."""
    server, found = server_of(request), request.scope.get(VISITOR)
    who = found if isinstance(found, Caller) else None
    text = rendered(
        template,
        visitor=None if who is None else who.user.name,
        is_operator=who is not None and Permission.OPERATOR in who.user.permissions,
        token="" if who is None else form_token(server, who),
        path=request.scope["path"],
        version=VERSION,
        now=moment(request),
        read_only=server.read_only.reason if server.read_only.is_on else None,
        **members,
    )
    return html(text, status)


def html(text: str, status: int = 200) -> Response:
    return Response(text, status, {"Cache-Control": "no-store"}, "text/html; charset=utf-8")

"""All outgoing HTTP and mail of the server. URLs an operator configured (OIDC, chain, mail) are used as they are.

A user's URL is resolved first and refused if any address is not public; the checked address is dialled.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.message import EmailMessage
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import aiosmtplib
import httpx2

from gpool.core.addresses import is_public
from gpool.core.errors import Invalid, Unreachable
from gpool.core.model import SECOND, Instant, Span

TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1024 * 1024
_PUBLIC = {4: (socket.AF_INET, "192.0.2.1"), 6: (socket.AF_INET6, "2001:db8::1")}
"""Documentation addresses (RFC 5737, RFC 3849): a route to one is the default route."""
KEPT_FOR = Span(600 * SECOND)
"""Life of a cached response: a provider's discovery document changes in weeks."""
FAILED_FOR = Span(10 * SECOND)
_HEADERS = {"accept": "application/json", "user-agent": "gpool"}


Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class OutboundResponse:
    status: int
    body: bytes
    retry_after: str = ""

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise Unreachable(f"the response is not JSON: {error}") from error


@dataclass(frozen=True, slots=True)
class CheckedDestination:
    url: str
    host: str
    port: int
    address: str


@dataclass(frozen=True, slots=True)
class _CachedResponse:
    found: OutboundResponse | Unreachable
    until: Instant


class Outbound:
    """HTTP client without redirects or environment proxies, with bounded time and response size."""

    def __init__(
        self, transport: httpx2.AsyncBaseTransport | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._transport, self._timeout_s = transport, timeout_s
        self._http: httpx2.AsyncClient | None = None
        self._kept: dict[str, _CachedResponse] = {}
        self._fetching = asyncio.Lock()

    async def get_cached(self, url: str, now: Instant) -> OutboundResponse:
        """Like `get`, at most one request per `KEPT_FOR`, after a failure per `FAILED_FOR`. Only for configured URLs."""
        known = self._kept.get(url)
        if known is None or known.until <= now:
            async with self._fetching:
                known = self._kept.get(url)
                if known is None or known.until <= now:
                    known = self._kept[url] = await self._fetch(url, now)
        if isinstance(known.found, Unreachable):
            raise Unreachable(known.found.detail)
        return known.found

    async def _fetch(self, url: str, now: Instant) -> _CachedResponse:
        try:
            found: OutboundResponse | Unreachable = await self.get(url)
        except Unreachable as error:
            found = error
        failed = isinstance(found, Unreachable) or found.status != 200
        return _CachedResponse(found, Instant(now + (FAILED_FOR if failed else KEPT_FOR)))

    async def get(self, url: str, headers: Mapping[str, str] | None = None) -> OutboundResponse:
        return await self._send("GET", url, headers=headers)

    async def post_form(
        self, url: str, form: Mapping[str, str], auth: tuple[str, str] | None = None
    ) -> OutboundResponse:
        return await self._send("POST", url, data=dict(form), auth=auth)

    async def post_json(
        self, url: str, document: object, most_bytes: int = MAX_ANSWER_BYTES
    ) -> OutboundResponse:
        return await self._send("POST", url, most_bytes, json=document)

    async def _send(
        self, method: str, url: str, most_bytes: int = MAX_ANSWER_BYTES, **options: Any
    ) -> OutboundResponse:
        if self._http is None:
            self._http = httpx2.AsyncClient(
                transport=self._transport,
                timeout=self._timeout_s,
                headers=_HEADERS,
                trust_env=False,
            )
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                async with self._http.stream(method, url, **options) as answer:
                    body = bytearray()
                    async for piece in answer.aiter_bytes():
                        body += piece
                        if len(body) > most_bytes:
                            raise Unreachable(f"{_origin(url)} sent more than {most_bytes} bytes")
                    return OutboundResponse(
                        answer.status_code, bytes(body), answer.headers.get("retry-after", "")
                    )
        except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError) as error:
            what = str(error) or type(error).__name__
            raise Unreachable(f"{_origin(url)} does not respond ({what})") from error

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()


async def _addresses(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


async def checked(
    url: str, allowed: Sequence[Network] = (), resolve: Resolve = _addresses
) -> CheckedDestination:
    """Resolve a user's URL; `Invalid` unless every address is public or in a network that the operator allows."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise Invalid(f"{url[:200]!r} is not a URL: {error}") from error
    host = parts.hostname
    if parts.scheme not in ("http", "https") or not host or parts.username is not None:
        raise Invalid(f"{url[:200]!r} is not an http(s) URL without a user name")
    if "#" in url:
        raise Invalid(f"{url[:200]!r} has a fragment, which is never sent; leave it out")
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise Invalid(f"{url[:200]!r} has characters that a URL must encode")
    try:
        addresses = await resolve(host, port)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise Invalid(f"{host[:200]!r} has no address: {why}") from error
    if not addresses:
        raise Invalid(f"{host[:200]!r} has no address")
    for address in addresses:
        if not is_public(address) and not _is_in(address, allowed):
            raise Invalid(f"{host[:200]!r} is at {address}, which is not a public address")
    return CheckedDestination(url, host, port, addresses[0])


def _is_in(address: str, networks: Sequence[Network]) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return any(parsed in network for network in networks)


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return httpx2.create_ssl_context(trust_env=False)


async def post_checked(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    allowed: Sequence[Network] = (),
    *,
    timeout_s: float = TIMEOUT_S,
    resolve: Resolve = _addresses,
) -> OutboundResponse:
    """Post to a user's URL: the checked address is dialled, with the name in TLS and in `Host`.

    `Invalid` for a refused URL, `Unreachable` without an answer. A connection is used once: another host at the same
    address must prove its own name.
    """
    to = await checked(url, allowed, resolve)
    parts = urlsplit(url)
    literal = f"[{to.address}]" if ":" in to.address else to.address
    dialled = urlunsplit((parts.scheme, f"{literal}:{to.port}", parts.path or "/", parts.query, ""))
    # a context of its own for each client would cost ten milliseconds
    transport = httpx2.AsyncHTTPTransport(verify=_tls(), trust_env=False)
    outbound = Outbound(transport, timeout_s)
    try:
        return await outbound._send(
            "POST",
            dialled,
            content=body,
            headers={**headers, "host": parts.netloc, "connection": "close"},
            extensions={"sni_hostname": to.host},
        )
    except Unreachable as error:
        raise Unreachable(error.detail.replace(_origin(dialled), _origin(url))) from error
    finally:
        await outbound.close()


# ---- mail


@dataclass(frozen=True, slots=True)
class MailServer:
    """The operator's SMTP server. `security`: `tls` from the first byte, `starttls`, or `none`."""

    host: str
    port: int
    security: Literal["tls", "starttls", "none"]
    sender: str
    user: str = ""
    password: str = field(default="", repr=False)
    timeout_s: float = 30.0


async def send_mail(server: MailServer, message: EmailMessage) -> None:
    """Hand a message to the mail server; `Unreachable` if it is not accepted."""
    try:
        await aiosmtplib.send(
            message,
            hostname=server.host,
            port=server.port,
            use_tls=server.security == "tls",
            start_tls=server.security == "starttls",
            username=server.user or None,
            password=server.password or None,
            timeout=server.timeout_s,
        )
    except (aiosmtplib.SMTPException, OSError) as error:
        what = str(error) or type(error).__name__
        raise Unreachable(
            f"the mail server {server.host} did not take the mail ({what})"
        ) from error


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


@lru_cache(maxsize=2)
def own_address(version: Literal[4, 6]) -> str:
    """Address of this machine on the default route, "" without one. Sends nothing.

    Kept while the process runs: sign-in messages must name the same server from nonce to signature.
    """
    family, target = _PUBLIC[version]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 443))
            found = ipaddress.ip_address(probe.getsockname()[0])
    except (OSError, ValueError):
        return ""
    return "" if found.is_unspecified or found.is_link_local else str(found)

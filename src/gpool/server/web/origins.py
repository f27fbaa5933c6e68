"""The pool's own origin, requests of other sites, and safe targets of redirects. Pure.

A pool is opened under several addresses: the public URL, loopback, an address of the machine. Names that are none of
these are refused for cookies, so that a site cannot rebind its own name to the server's address.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from gpool.transfer.requests import is_loopback

HOME = "/"
MAX_NEXT = 500
_HOST = re.compile(r"(?:\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::[0-9]{1,5})?")
_PATH = re.compile(r"/(?![/\\])[\x21-\x5b\x5d-\x7e]*")
"""A path of this server: no second slash or backslash at its begin, which browsers read as another host."""


@dataclass(frozen=True, slots=True)
class OwnNames:
    """`public`: origin for others (`Settings.origin`); `names`: host names of this machine."""

    public: str
    names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin under which a browser opened the pool. `is_secure`: it came by TLS, here or at the proxy."""

    text: str

    @property
    def is_secure(self) -> bool:
        return self.text.startswith("https://")

    @property
    def is_local(self) -> bool:
        return is_loopback(urlsplit(self.text).hostname or "")

    @property
    def port(self) -> int:
        return urlsplit(self.text).port or (443 if self.is_secure else 80)


def own_origin(names: OwnNames, scheme: str, host: str) -> Origin | None:
    """Origin of a request by its scheme and Host header; None if the host is not this server's."""
    if not _HOST.fullmatch(host):
        return None
    host = host.lower()
    public, _, public_host = names.public.partition("://")
    if public_host == host:  # a proxy may end TLS
        return Origin(f"{'https' if 'https' in (public, scheme) else 'http'}://{host}")
    name = urlsplit(f"//{host}").hostname or ""
    is_known = name in names.names or is_loopback(name) or _is_address(name)
    return Origin(f"{scheme}://{host}") if is_known else None


def _is_address(name: str) -> bool:
    """A name can be rebound to any address; an address cannot."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_same_origin(headers: Mapping[str, str], own: Origin | None, public: str) -> bool:
    """Whether a form was sent by a page of this pool. Every browser sends `Origin` with a POST."""
    site = headers.get("sec-fetch-site")
    if site is not None and site != "same-origin":
        return False
    origin = headers.get("origin", "").lower()
    return origin == public or (own is not None and origin == own.text)


def safe_next(text: str) -> str:
    """Path to go to after the sign-in; the pool page for everything that is not a path of this server."""
    is_safe = len(text) <= MAX_NEXT and _PATH.fullmatch(text) is not None
    return text if is_safe and not text.startswith(("/sign-in", "/in/")) else HOME

"""Rules for dialling an object store whose URL a server has sent, and the request as it is sent there.

A server must not make its agents and clients send requests into their own networks: only public addresses are dialled,
origins that the owner listed, and loopback if the server itself is there. The checked address itself is dialled.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import httpx2

from gpool.core.addresses import is_public
from gpool.core.errors import Invalid, Unreachable
from gpool.transfer.requests import Address, Request, is_loopback, origin_of

AWAY_S = 300.0
"""Time for which a store that could not be reached is not tried again."""
STORES_VARIABLE = "GPOOL_STORES"


def listed_origins(text: str) -> frozenset[str]:
    """Origins of a list with commas; `Invalid` for one that is no URL."""
    return frozenset(origin_of(each.strip()) for each in text.split(",") if each.strip())


@dataclass(frozen=True, slots=True)
class StoreDestination:
    """`address`: to be dialled instead of the name; empty: dial the name."""

    url: httpx2.URL
    address: str = ""


class StoreAccess:
    """Thread-safe. `listed`: origins that are dialled wherever they are; None: those of GPOOL_STORES."""

    def __init__(self, server: Address, listed: frozenset[str] | None = None) -> None:
        if listed is None:
            listed = listed_origins(os.environ.get(STORES_VARIABLE, ""))
        self._listed = listed
        self._server_is_local = is_loopback(httpx2.URL(server.url).host)
        self._away: dict[str, float] = {}
        self._lock = threading.Lock()

    def failed(self, url: str) -> None:
        """Remember that the store could not be reached."""
        with self._lock:
            self._away[origin_of(url)] = time.monotonic() + AWAY_S

    def destination(self, url: str) -> StoreDestination:
        """Check and resolve a URL; blocks. `Unreachable` if it must not be dialled or failed a moment ago."""
        try:
            origin, parsed = origin_of(url), httpx2.URL(url)
        except (Invalid, httpx2.InvalidURL) as error:
            raise Unreachable(f"the server named an object store by no URL: {error}") from error
        with self._lock:
            if self._away.get(origin, 0.0) > time.monotonic():
                raise Unreachable(f"the object store at {origin} was not reachable a moment ago")
        host = parsed.host
        if origin in self._listed or (self._server_is_local and is_loopback(host)):
            return StoreDestination(parsed)
        if parsed.scheme != "https":
            raise Unreachable(f"the object store at {origin} is not encrypted; {_how(origin)}")
        try:
            found = socket.getaddrinfo(host, parsed.port or 443, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Unreachable(f"the object store {host} has no address: {error}") from error
        addresses = [str(entry[4][0]) for entry in found]
        for address in addresses:
            if not is_public(address):
                raise Unreachable(
                    f"the object store at {origin} has the private address {address}; {_how(origin)}"
                )
        return StoreDestination(parsed, addresses[0])


def _how(origin: str) -> str:
    return f"to use it, list {origin} in {STORES_VARIABLE} (agents: GPOOL_AGENT_STORES)"


def request_to(
    destination: StoreDestination, request: Request, body: bytes, timeout: Mapping[str, float]
) -> httpx2.Request:
    """Request without credentials; of the headers only those that a presigned URL needs."""
    url = destination.url
    kept = {
        name: value
        for name, value in request.headers.items()
        if name.lower() in ("content-length", "range", "accept-encoding")
        or name.lower().startswith("x-amz-")
    }
    extensions: dict[str, object] = {"timeout": dict(timeout)}
    headers = {"Host": url.netloc.decode("ascii"), "User-Agent": "gpool", **kept}
    if destination.address:
        extensions["sni_hostname"] = url.host
        url = url.copy_with(host=destination.address)
    return httpx2.Request(
        request.method, url, headers=headers, content=body or None, extensions=extensions
    )

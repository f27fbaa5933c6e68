"""Servers that a build may reach: the node's indexes and the file servers their pages name.

The sandbox network permits and resolves no others. A spec adds no target.
"""

from __future__ import annotations

import re
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx2
import structlog

from gpool.agent.environments.indexes import Indexes
from gpool.agent.network.factory import only
from gpool.agent.network.policy import BadPolicy, Only
from gpool.agent.network.sandbox_network import Networks, NetworkUnavailable
from gpool.agent.runtime.protocol import SandboxFailed, SandboxNetwork

log = structlog.get_logger(__name__)

LOOKED_UP = "pip"  # a package every index has; other packages' files lie on the same servers
PAGE_BYTES = 8 * 1024 * 1024
ASK_S = 20.0
_LINK = re.compile(r"""href\s*=\s*["']([^"']+)""", re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, order=True)
class Place:
    host: str
    port: int


Ask = Callable[[str], Awaitable[tuple[str, str]]]
"""Fetches a page; returns the final address and the text."""

Choose = Callable[[Iterable[tuple[str, int]]], Awaitable[Only]]
"""Resolves hosts to the targets of a network; raises `BadPolicy` for an impossible one."""


def place_of(address: str) -> Place | None:
    parts = urlsplit(address)
    if parts.scheme not in _PORTS or not parts.hostname:
        return None
    return Place(parts.hostname, parts.port or _PORTS[parts.scheme])


def places_on(page: str, text: str) -> frozenset[Place]:
    found = {place_of(urljoin(page, link)) for link in _LINK.findall(text)}
    return frozenset(place for place in found if place is not None)


def built_in_index(uv: Path) -> str:
    try:
        told = subprocess.run(
            [
                uv,
                "pip",
                "compile",
                "--emit-index-url",
                "--no-header",
                "--offline",
                "--no-cache",
                "-",
            ],
            env={"UV_NO_CONFIG": "1", "PATH": "/usr/bin:/bin"},
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
        ).stdout.decode()
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(r"--index-url\s+(\S+)", told)
    return found[1] if found else ""


def asking(indexes: Indexes) -> Ask:

    async def ask(address: str) -> tuple[str, str]:
        certificate = indexes.certificate
        verify = ssl.create_default_context(cafile=str(certificate) if certificate else None)
        async with (
            httpx2.AsyncClient(verify=verify, follow_redirects=True, timeout=ASK_S) as client,
            client.stream("GET", address, headers={"Accept": "text/html"}) as answer,
        ):
            answer.raise_for_status()
            text = b""
            async for piece in answer.aiter_bytes():
                text += piece
                if len(text) > PAGE_BYTES:
                    break
            return str(answer.url), text.decode("utf-8", "replace")

    return ask


class IndexLanes:
    def __init__(self, networks: Networks, built_in: str, ask: Ask, choose: Choose = only) -> None:
        self._networks = networks
        self._built_in = built_in
        self._ask = ask
        self._choose = choose
        self._known: dict[str, frozenset[Place]] = {}

    @asynccontextmanager
    async def open(self, indexes: Indexes) -> AsyncIterator[SandboxNetwork | None]:
        places = await self.places(indexes)
        if not places:
            yield None
            return
        try:
            wants = await self._choose((place.host, place.port) for place in sorted(places))
            opened = await self._networks.open(wants)
        except BadPolicy as exc:
            raise SandboxFailed(
                f"a package index of this node cannot be reached from a sandbox: {exc}"
            ) from exc
        except NetworkUnavailable as exc:
            raise SandboxFailed(f"no network for a build: {exc}") from exc
        async with opened:
            yield opened.lane

    async def places(self, indexes: Indexes) -> frozenset[Place]:
        """Return all servers of a build; the proxy alone where there is one."""
        proxies = {place_of(value) for name, value in indexes.proxies if name != "NO_PROXY"}
        found = {place for place in proxies if place is not None}
        pages = {address: address for address in indexes.find_links}
        for index in (indexes.default or self._built_in, *indexes.extra):
            if index and not indexes.no_index:
                pages[index] = f"{index.rstrip('/')}/{LOOKED_UP}/"
        for address, page in pages.items():
            place = place_of(address)
            if place is not None:
                found |= {place, *await self._led_to(page)}
        return frozenset(found)

    async def _led_to(self, page: str) -> frozenset[Place]:
        known = self._known.get(page)
        if known is None:
            try:
                known = places_on(*await self._ask(page))
            except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
                shown = urlsplit(page).hostname
                log.warning("index_not_asked", host=shown, error=type(error).__name__)
                return frozenset()  # retried by the next build
            self._known[page] = known
        return known

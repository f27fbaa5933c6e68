"""Keys and secrets: made here, hashed before they are stored, looked up by hash and remembered for a few seconds."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from gpool.core.model import Instant, Span
from gpool.server.store.operations import nodes, people
from gpool.server.store.protocol import Store
from gpool.server.store.values import NodeCredentials, User

USER_PREFIX, NODE_PREFIX, INVITE_PREFIX = "gpk_", "gpn_", "gpi_"
MAX_REMEMBERED = 10_000


def hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def fresh(prefix: str) -> str:
    return prefix + secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class _Remembered:
    who: User | NodeCredentials | None
    until: Instant


class Credentials:
    def __init__(
        self, store: Store, now: Callable[[], Instant], remember: Span, root_key: bytes
    ) -> None:
        self._store = store
        self._now = now
        self._remember = remember
        self._root_key = root_key
        self._known: dict[str, _Remembered] = {}

    async def who(self, secret: str) -> User | NodeCredentials | None:
        """Whom the secret belongs to; None for one we do not know."""
        digest = hashed(secret)
        now = self._now()
        known = self._known.get(digest)
        if known is not None and known.until > now:
            return known.who
        found: User | NodeCredentials | None = None
        if secret.startswith(USER_PREFIX):
            found = await self._store.read(people.user_by_key(digest))
        elif secret.startswith(NODE_PREFIX):
            found = await self._store.read(nodes.node_by_secret(digest))
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        if found is not None:
            self._known[digest] = _Remembered(found, Instant(now + self._remember))
        return found

    def remembers(self, secret: str) -> bool:
        """Whether `who` answers without looking into the store."""
        known = self._known.get(hashed(secret))
        return known is not None and known.until > self._now()

    def forget(self) -> None:
        """Somebody was removed: the next look-up asks the store."""
        self._known.clear()

    def derived(self, prefix: str, *context: str) -> str:
        """A secret that can be told again for the same request, and is never stored."""
        message = "\0".join(context).encode()
        digest = hmac.new(self._root_key, message, hashlib.sha256).digest()
        return prefix + base64.urlsafe_b64encode(digest).decode().rstrip("=")

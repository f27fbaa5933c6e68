"""Authentication of users by API key or access token. Keys are stored as hashes; results are cached for seconds."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from gpool.core.ids import encode
from gpool.core.model import Instant, Span
from gpool.server.identity.tokens.access import Claims, TokenType
from gpool.server.identity.tokens.signing_keys import TokenSigner
from gpool.server.store.identity_values import Caller
from gpool.server.store.operation import operation
from gpool.server.store.operations.identity import sessions, users
from gpool.server.store.protocol import Operation, Store

USER_PREFIX, INVITE_PREFIX = "gpk_", "gpi_"
MAX_REMEMBERED = 10_000


def hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def fresh(prefix: str) -> str:
    return prefix + secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class _CachedCaller:
    who: Caller
    until: Instant


class Credentials:
    def __init__(
        self,
        store: Store,
        now: Callable[[], Instant],
        remember: Span,
        root_key: bytes,
        signing: TokenSigner | None = None,
    ) -> None:
        self._store = store
        self._now = now
        self._remember = remember
        self._root_key = root_key
        self._signing = signing
        self._known: dict[str, _CachedCaller] = {}
        self._used: dict[int, Instant] = {}

    async def who(self, secret: str) -> Caller | None:
        if not secret.startswith(USER_PREFIX):
            return await self._by_token(secret)
        digest = hashed(secret)
        now = self._now()
        known = self._known.get(digest)
        if known is not None and known.until > now:
            found: Caller | None = known.who
        else:
            found = await self._store.read(users.caller_by_key(digest, now))
            self._keep(digest, found, now)
        if found is not None and found.key is not None:
            self._used[found.key] = now
        return found

    async def _by_token(self, token: str) -> Caller | None:
        """Caller of a token; every few seconds the store is asked whether its session has ended."""
        if self._signing is None:
            return None
        now = self._now()
        claims = await self._signing.read(token, TokenType.USER, now)
        if not isinstance(claims, Claims) or claims.session is None:
            return None
        known = self._known.get(claims.session)
        if known is not None and known.until > now:
            found: Caller | None = known.who
        else:
            found = await self._store.read(_in_session(claims.session, now))
            self._keep(claims.session, found, now)
        if found is None or encode("user", found.user.id) != claims.subject:
            return None
        return found

    def _keep(self, name: str, found: Caller | None, now: Instant) -> None:
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        if found is not None:
            self._known[name] = _CachedCaller(found, Instant(now + self._remember))

    def used_keys(self) -> list[tuple[int, Instant]]:
        used, self._used = self._used, {}
        return list(used.items())

    def remembers(self, secret: str) -> bool:
        """Whether `who` needs no read of the store for an unknown secret."""
        if not secret.startswith(USER_PREFIX):
            return True  # a token: its signature is checked first
        known = self._known.get(hashed(secret))
        return known is not None and known.until > self._now()

    def forget(self) -> None:
        self._known.clear()

    def derived(self, prefix: str, *context: str) -> str:
        """Secret derived from the root key: the same for the same context, so it need not be stored."""
        message = "\0".join(context).encode()
        digest = hmac.new(self._root_key, message, hashlib.sha256).digest()
        return prefix + base64.urlsafe_b64encode(digest).decode().rstrip("=")


@operation
def _in_session(id_: str, at: Instant) -> Operation[Caller | None]:
    session = yield from sessions.session(id_)
    if session is None or session.ended_at is not None or session.expires_at <= at:
        return None
    found = yield from users.caller(session.user)
    return None if found is None else replace(found, session=id_)

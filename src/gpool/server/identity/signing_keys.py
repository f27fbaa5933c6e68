"""Signing keys of access tokens: created at first start, rotated (`tokens.access`), reloaded when another replica
rotates. Private halves are open in memory only; the store holds them sealed.
"""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass

from gpool.core.model import SECOND, Instant, Span
from gpool.server.identity.access_tokens import (
    Claims,
    KeySet,
    RejectedToken,
    RejectionReason,
    TokenAudience,
    TokenGrant,
    TokenKey,
    TokenReader,
    TokenType,
    issue,
    last_use,
    new_key,
)
from gpool.server.identity.envelope import FieldLocation
from gpool.server.identity.sealer import Sealer
from gpool.server.store.identity_values import SigningKey
from gpool.server.store.operations.identity import sessions
from gpool.server.store.protocol import Operation, Store, operation

RELOAD_EVERY = Span(5 * SECOND)
"""Shortest interval between reloads for an unknown `kid`, which may be a new key of another replica or a forgery."""


@dataclass(frozen=True, slots=True)
class KeyRotation:
    every: Span  # life of a signing key
    lead: Span  # from publishing a key to signing with it


class TokenSigner:
    def __init__(
        self, store: Store, sealer: Sealer, place: TokenAudience, rotating: KeyRotation
    ) -> None:
        self._store, self._sealer, self._place, self._rotating = store, sealer, place, rotating
        self._keys = KeySet(())
        self._reader = TokenReader(self._keys, place)
        self._loaded_at = Instant(0)

    @property
    def keys(self) -> KeySet:
        return self._keys

    @property
    def place(self) -> TokenAudience:
        return self._place

    async def ready(self, now: Instant) -> None:
        await self._load(now)
        if not self._keys.keys:
            await self._store.write(sessions.put_signing_key(await self._fresh(now, now), ()))
            await self._load(now)

    async def look(self, now: Instant) -> None:
        await self._load(now)
        newest = self._keys.keys[-1]
        if now - newest.signs_from >= self._rotating.every:
            await self.rotate(now)
        await self._store.write(_tidy(self._retired(now), now))

    async def rotate(self, now: Instant) -> bool:
        """Add a key that signs after the lead; False if another replica rotated first."""
        fresh = await self._fresh(now, Instant(now + self._rotating.lead))
        known = tuple(key.kid for key in self._keys.keys)
        done = await self._store.write(_rotate(fresh, known, last_use(fresh.signs_from)))
        await self._load(now)
        return done

    def issue(self, grant: TokenGrant, now: Instant) -> str:
        return issue(self._keys, self._place, grant, secrets.token_urlsafe(16), now)

    async def read(self, token: str, wanted: TokenType, now: Instant) -> Claims | RejectedToken:
        found = self._reader.read(token, wanted, now)
        unknown = isinstance(found, RejectedToken) and found.why is RejectionReason.KEY
        if unknown and now - self._loaded_at >= RELOAD_EVERY:
            await self._load(now)
            found = self._reader.read(token, wanted, now)
        return found

    def jwks(self, now: Instant) -> list[dict[str, str]]:
        return self._keys.jwks(now)

    async def _load(self, now: Instant) -> None:
        self._loaded_at = now
        rows = await self._store.read(sessions.signing_keys())
        known = {key.kid: key for key in self._keys.keys}
        keys = [await self._opened(row, known.get(row.kid)) for row in rows]
        self._keys = KeySet(tuple(keys))
        self._reader.use(self._keys)

    async def _opened(self, row: SigningKey, known: TokenKey | None) -> TokenKey:
        private = None
        if row.sealed is not None:
            private = known.private if known is not None else None
            private = private or await self._sealer.open(_place(row.kid), row.sealed)
        return TokenKey(row.kid, _unb64(row.public), private, row.signs_from, row.verifies_until)

    async def _fresh(self, now: Instant, signs_from: Instant) -> SigningKey:
        key = new_key(secrets.token_bytes(32), signs_from)
        assert key.private is not None
        sealed = await self._sealer.seal(_place(key.kid), key.private)
        return SigningKey(key.kid, sealed, _b64(key.public), now, signs_from)

    def _retired(self, now: Instant) -> tuple[str, ...]:
        signer = self._keys.signer(now)
        return tuple(
            key.kid
            for key in self._keys.keys
            if key.private is not None and key.signs_from < signer.signs_from
        )


@operation
def _rotate(fresh: SigningKey, known: tuple[str, ...], ends: Instant) -> Operation[bool]:
    if not (yield from sessions.put_signing_key(fresh, known)):
        return False
    for kid in known:
        yield from sessions.retire_signing_key(kid, ends)
    return True


@operation
def _tidy(retired: tuple[str, ...], now: Instant) -> Operation[None]:
    for kid in retired:
        yield from sessions.forget_private_half(kid)
    yield from sessions.forget_signing_keys(now)


def _place(kid: str) -> FieldLocation:
    return FieldLocation("signing_keys", kid, "sealed")


def _b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))

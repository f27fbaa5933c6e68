"""The keys that sign access tokens, as the store has them: made at the first start, rotated, looked at again now and then.

Holds the private halves opened in memory, and never writes one unsealed. What a token must look like is `tokens`' matter.
"""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass

from gpool.core.model import SECOND, Instant, Span
from gpool.server.identity.secrets.envelope import FieldLocation
from gpool.server.identity.secrets.sealer import Sealer
from gpool.server.identity.tokens.access import (
    LIFE_S,
    SKEW_S,
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
    new_key,
)
from gpool.server.store.identity_values import SigningKey
from gpool.server.store.operation import operation
from gpool.server.store.operations.identity import sessions
from gpool.server.store.protocol import Operation, Store

LOOK_AGAIN = Span(5 * SECOND)
"""A key we do not know may be another replica's new one; strangers' tokens make us look no oftener than this."""


@dataclass(frozen=True, slots=True)
class KeyRotation:
    every: Span  # a new key so often
    lead: Span  # how long a key is known before it signs


class TokenSigner:
    def __init__(
        self, store: Store, sealer: Sealer, place: TokenAudience, rotating: KeyRotation
    ) -> None:
        self._store, self._sealer, self._place, self._rotating = store, sealer, place, rotating
        self._keys = KeySet(())
        self._reader = TokenReader(self._keys, place)
        self._looked_at = Instant(0)

    @property
    def keys(self) -> KeySet:
        return self._keys

    @property
    def place(self) -> TokenAudience:
        return self._place

    async def ready(self, now: Instant) -> None:
        """Keys to sign with, from the store; the first is made when there is none."""
        await self._load(now)
        if not self._keys.keys:
            await self._store.write(sessions.put_signing_key(await self._fresh(now, now), ()))
            await self._load(now)

    async def look(self, now: Instant) -> None:
        """What a loop does: learn of others' keys, rotate when it is time, drop what is over."""
        await self._load(now)
        newest = self._keys.keys[-1]
        if now - newest.signs_from >= self._rotating.every:
            await self.rotate(now)
        await self._store.write(_tidy(self._retired(now), now))

    async def rotate(self, now: Instant) -> bool:
        """A new key signs after the lead; False when another replica was faster."""
        fresh = await self._fresh(now, Instant(now + self._rotating.lead))
        known = tuple(key.kid for key in self._keys.keys)
        ends = Instant(fresh.signs_from + (max(LIFE_S.values()) + SKEW_S) * SECOND)
        done = await self._store.write(_rotate(fresh, known, ends))
        await self._load(now)
        return done

    def issue(self, grant: TokenGrant, now: Instant) -> str:
        return issue(self._keys, self._place, grant, secrets.token_urlsafe(16), now)

    async def read(self, token: str, wanted: TokenType, now: Instant) -> Claims | RejectedToken:
        found = self._reader.read(token, wanted, now)
        unknown = isinstance(found, RejectedToken) and found.why is RejectionReason.KEY
        if unknown and now - self._looked_at >= LOOK_AGAIN:
            await self._load(now)
            found = self._reader.read(token, wanted, now)
        return found

    def jwks(self, now: Instant) -> list[dict[str, str]]:
        """The public halves, for whoever wants to check our tokens (RFC 8037)."""
        return [
            {
                "kty": "OKP",
                "crv": "Ed25519",
                "alg": "EdDSA",
                "use": "sig",
                "kid": key.kid,
                "x": _b64(key.public),
            }
            for key in self._keys.keys
            if key.verifies_until is None or now < key.verifies_until
        ]

    # ---- inside

    async def _load(self, now: Instant) -> None:
        self._looked_at = now
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
        """Those whose private half will not be needed again."""
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

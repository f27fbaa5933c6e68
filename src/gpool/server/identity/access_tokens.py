"""Access tokens: EdDSA JWTs that only gpool servers issue and read. Any other form is rejected.

Written on `cryptography`, not on a JWT library (decision 0006), which must read several algorithms, optional headers,
lenient JSON and base64; each freedom is a way to forge. Here the header has three fixed members, `kid` selects a key
of our own set, the signature is checked before the claims are parsed, and JSON with a repeated name or base64 with a
spare bit is no token. Tests read our tokens with PyJWT as an oracle.

Key rotation without a gap on several replicas: a new key is published some seconds before it signs (`signs_from`);
the old key verifies, without its private half, until its last token has expired (`verifies_until`). With a lead of
60 s, a token life of 300 s and 10 s of skew, a rotation at 12:00:00 signs with the new key from 12:01:00 and drops
the old key at 12:06:10.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gpool.core.errors import Invalid
from gpool.core.ids import decode
from gpool.core.model import SECOND, Instant

ALGORITHM, FORM = "EdDSA", "gpool+jwt"
MAX_TOKEN_LETTERS = 2048
MAX_HEADER_LETTERS = 256
SKEW_S = 10
"""How far the issuing replica's clock may be ahead of ours."""

_JTI = re.compile(r"[A-Za-z0-9_-]{16,64}")
_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_THUMBPRINT = re.compile(r"[A-Za-z0-9_-]{43}")


class TokenType(StrEnum):
    USER = "user-access"
    NODE = "node"


LIFE_S = {TokenType.USER: 300, TokenType.NODE: 300}
"""Life of a token; a longer one is rejected even with a valid signature."""

_SUBJECT_KIND = {TokenType.USER: "user", TokenType.NODE: "node"}


# ---- keys


@dataclass(frozen=True, slots=True)
class TokenKey:
    kid: str
    public: bytes
    private: bytes | None = field(repr=False)  # None once the key only verifies
    signs_from: Instant
    verifies_until: Instant | None = None


def new_key(seed: bytes, signs_from: Instant) -> TokenKey:
    public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    return TokenKey(thumbprint(public), public, seed, signs_from)


def thumbprint(public: bytes) -> str:
    """RFC 7638 thumbprint of an Ed25519 public key: the `kid`, and the key a node's token is bound to."""
    members = f'{{"crv":"Ed25519","kty":"OKP","x":"{_b64(public)}"}}'
    return _b64(hashlib.sha256(members.encode()).digest())


@dataclass(frozen=True, slots=True)
class KeySet:
    keys: tuple[TokenKey, ...]  # oldest first

    def signer(self, now: Instant) -> TokenKey:
        for key in reversed(self.keys):
            if key.private is not None and key.signs_from <= now:
                return key
        raise LookupError("no signing key is active yet; create one before serving")

    def verifier(self, kid: str, now: Instant) -> bytes | None:
        for key in self.keys:
            if key.kid == kid and (key.verifies_until is None or now < key.verifies_until):
                return key.public
        return None

    def jwks(self, now: Instant) -> list[dict[str, str]]:
        return [
            {
                "kty": "OKP",
                "crv": "Ed25519",
                "alg": ALGORITHM,
                "use": "sig",
                "kid": key.kid,
                "x": _b64(key.public),
            }
            for key in self.keys
            if key.verifies_until is None or now < key.verifies_until
        ]


def last_use(replaced_at: Instant) -> Instant:
    """When a key may be dropped whose successor signs from `replaced_at`: its last token has expired."""
    return Instant(replaced_at + (max(LIFE_S.values()) + SKEW_S) * SECOND)


# ---- issuing


@dataclass(frozen=True, slots=True)
class TokenAudience:
    issuer: str
    audience: str


@dataclass(frozen=True, slots=True)
class Claims:
    """Checked claims. `session`: refresh family of a user's token; `key`: thumbprint of a node's key."""

    type: TokenType
    subject: str  # as `core.ids.encode` writes it
    id: str
    issued_at_s: int
    expires_at_s: int
    session: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class TokenGrant:
    type: TokenType
    subject: str
    session: str | None = None
    key: str | None = None


def issue(
    keys: KeySet, place: TokenAudience, grant: TokenGrant, token_id: str, now: Instant
) -> str:
    issued = now // SECOND
    payload: dict[str, object] = {
        "iss": place.issuer,
        "aud": place.audience,
        "sub": grant.subject,
        "iat": issued,
        "exp": issued + LIFE_S[grant.type],
        "jti": token_id,
        "type": grant.type.value,
    }
    if grant.session is not None:
        payload["sid"] = grant.session
    if grant.key is not None:
        payload["cnf"] = {"jkt": grant.key}
    made = _claims(payload, place)
    if isinstance(made, RejectedToken):
        raise Invalid(f"the claims are invalid: {made.why} ({made.detail})")
    key = keys.signer(now)
    assert key.private is not None
    header = {"alg": ALGORITHM, "kid": key.kid, "typ": FORM}
    return signed(header, payload, key.private)


def signed(header: object, payload: object, private: bytes) -> str:
    message = f"{_b64(_json(header))}.{_b64(_json(payload))}"
    signature = Ed25519PrivateKey.from_private_bytes(private).sign(message.encode())
    return f"{message}.{_b64(signature)}"


# ---- verifying


class RejectionReason(StrEnum):
    """For tests and metrics; the client only learns that it is not signed in."""

    FORM = "form"
    HEADER = "header"
    KEY = "key"
    SIGNATURE = "signature"
    CLAIMS = "claims"
    PLACE = "place"
    TYPE = "type"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class RejectedToken:
    why: RejectionReason
    detail: str = ""


def verify(
    token: str, keys: KeySet, place: TokenAudience, wanted: TokenType, now: Instant
) -> Claims | RejectedToken:
    """Check form, header, key, signature, claims, type and time, in this order."""
    if len(token) > MAX_TOKEN_LETTERS:
        return RejectedToken(RejectionReason.FORM, "too long")
    parts = token.split(".")
    if len(parts) != 3 or len(parts[0]) > MAX_HEADER_LETTERS:
        return RejectedToken(RejectionReason.FORM, "not three parts")
    try:
        header_raw, payload_raw, signature = (_canonical(part) for part in parts)
    except ValueError as error:
        return RejectedToken(RejectionReason.FORM, str(error))
    try:
        header = _object(header_raw)
    except ValueError as error:
        return RejectedToken(RejectionReason.HEADER, str(error))
    kid = header.get("kid")
    if header != {"alg": ALGORITHM, "kid": kid, "typ": FORM} or not isinstance(kid, str):
        return RejectedToken(RejectionReason.HEADER, "not our header")
    public = keys.verifier(kid, now)
    if public is None:
        return RejectedToken(RejectionReason.KEY, "unknown kid")
    try:
        message = f"{parts[0]}.{parts[1]}".encode("ascii")
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except InvalidSignature:
        return RejectedToken(RejectionReason.SIGNATURE)
    try:
        payload = _object(payload_raw)
    except ValueError as error:
        return RejectedToken(RejectionReason.CLAIMS, str(error))
    claims = _claims(payload, place)
    if isinstance(claims, RejectedToken):
        return claims
    if claims.type is not wanted:
        return RejectedToken(
            RejectionReason.TYPE, f"a {claims.type} token where a {wanted} one is needed"
        )
    seconds = now // SECOND
    if claims.issued_at_s > seconds + SKEW_S:
        return RejectedToken(RejectionReason.TIME, "issued in the future")
    if claims.expires_at_s <= seconds:
        return RejectedToken(RejectionReason.TIME, "expired")
    return claims


class TokenReader:
    """`verify` with a cache of accepted tokens: a signature check costs a hundred look-ups. Expiry is checked each time."""

    def __init__(self, keys: KeySet, place: TokenAudience, most: int = 10_000) -> None:
        self._keys, self._place, self._most = keys, place, most
        self._taken: dict[str, Claims] = {}

    def use(self, keys: KeySet) -> None:
        self._keys = keys
        self._taken.clear()

    def read(self, token: str, wanted: TokenType, now: Instant) -> Claims | RejectedToken:
        known = self._taken.get(token)
        if known is not None and known.type is wanted and now // SECOND < known.expires_at_s:
            return known
        found = verify(token, self._keys, self._place, wanted, now)
        if isinstance(found, Claims):
            if len(self._taken) >= self._most:
                self._taken.clear()
            self._taken[token] = found
        return found


_REQUIRED = frozenset({"iss", "aud", "sub", "iat", "exp", "jti", "type"})
_ALLOWED = {TokenType.USER: _REQUIRED | {"sid"}, TokenType.NODE: _REQUIRED | {"cnf"}}


def _claims(payload: dict[str, Any], place: TokenAudience) -> Claims | RejectedToken:
    """Check everything but time and wanted type: exactly the claims of the type, each well-formed."""
    names = frozenset(payload)
    if not names >= _REQUIRED:
        return RejectedToken(
            RejectionReason.CLAIMS, f"missing {', '.join(sorted(_REQUIRED - names))}"
        )
    try:
        type_ = TokenType(payload["type"])
    except ValueError:
        return RejectedToken(RejectionReason.TYPE, "unknown type")
    if names != _ALLOWED[type_]:
        odd = sorted(names ^ _ALLOWED[type_])
        return RejectedToken(
            RejectionReason.CLAIMS, f"wrong claims for a {type_} token: {', '.join(odd)[:80]}"
        )
    issuer, audience, subject, id_ = (payload[name] for name in ("iss", "aud", "sub", "jti"))
    if not (isinstance(issuer, str) and issuer == place.issuer):
        return RejectedToken(RejectionReason.PLACE, "another issuer")
    if not (isinstance(audience, str) and audience == place.audience):
        return RejectedToken(RejectionReason.PLACE, "another audience")
    issued, expires = payload["iat"], payload["exp"]
    # `type is int`: True and 1.0 equal 1.
    if type(issued) is not int or type(expires) is not int:
        return RejectedToken(RejectionReason.CLAIMS, "times are whole seconds")
    if not 0 < expires - issued <= LIFE_S[type_] or issued < 0:
        return RejectedToken(RejectionReason.TIME, "life exceeds that of its type")
    if not (isinstance(id_, str) and _JTI.fullmatch(id_)):
        return RejectedToken(RejectionReason.CLAIMS, "malformed jti")
    if not isinstance(subject, str):
        return RejectedToken(RejectionReason.CLAIMS, "no subject")
    try:
        decode(_SUBJECT_KIND[type_], subject)
    except Invalid:
        return RejectedToken(
            RejectionReason.CLAIMS, f"the subject is not a {_SUBJECT_KIND[type_]} id"
        )
    session, bound = payload.get("sid"), payload.get("cnf")
    if type_ is TokenType.USER:
        if not (isinstance(session, str) and _SESSION.fullmatch(session)):
            return RejectedToken(RejectionReason.CLAIMS, "no session")
        return Claims(type_, subject, id_, issued, expires, session=session)
    jkt = bound.get("jkt") if isinstance(bound, dict) and set(bound) == {"jkt"} else None
    if not (isinstance(jkt, str) and _THUMBPRINT.fullmatch(jkt)):
        return RejectedToken(RejectionReason.CLAIMS, "no key in cnf.jkt")
    return Claims(type_, subject, id_, issued, expires, key=jkt)


# ---- encoding


def _b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _canonical(text: str) -> bytes:
    """Decode base64url without padding; `ValueError` for any but the canonical spelling."""
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("not base64url") from error
    if _b64(raw) != text:
        raise ValueError("base64url is not canonical")
    return raw


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _object(raw: bytes) -> dict[str, Any]:
    """Parse a UTF-8 JSON object without repeated names or NaN; else `ValueError`."""
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - a stranger's text, not a caller's bug
    return value


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    listed: Sequence[tuple[str, Any]] = list(pairs)
    found = dict(listed)
    if len(found) != len(listed):
        raise ValueError("a name is repeated")
    return found


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")

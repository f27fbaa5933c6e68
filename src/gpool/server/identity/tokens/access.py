"""Access tokens: EdDSA JWTs that only we make and only we read. Refuses everything that is not exactly in our form.

Written on `cryptography` rather than on a JWT library: a library's job is to read what others write (several algorithms,
optional headers, lenient JSON and base64), and every such freedom is a way to forge. Here the header is one of three
fixed members, the key comes from our own set by `kid`, the signature is checked before the claims are even parsed, and
JSON with a repeated name or base64 with a spare bit is no token. Tests read our tokens with PyJWT as an oracle.

Keys rotate without a gap on many replicas: a new key is known some seconds before it signs (`signs_from`), an old one
goes on verifying until the last token under it has expired (`verifies_until`), by then without its private half.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gpool.core.errors import Invalid
from gpool.core.ids import decode
from gpool.core.model import SECOND, Instant, Span

ALGORITHM, FORM = "EdDSA", "gpool+jwt"
MAX_TOKEN_LETTERS = 2048
MAX_HEADER_LETTERS = 256
SKEW_S = 10
"""How far another replica's clock may be ahead of ours when it issued a token."""

_JTI = re.compile(r"[A-Za-z0-9_-]{16,64}")
_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_THUMBPRINT = re.compile(r"[A-Za-z0-9_-]{43}")


class TokenType(StrEnum):
    USER = "user-access"
    NODE = "node"


LIFE_S = {TokenType.USER: 300, TokenType.NODE: 300}
"""How long a token lives. A longer one is refused, whoever signed it."""

_SUBJECT_KIND = {TokenType.USER: "user", TokenType.NODE: "node"}


# ---- keys


@dataclass(frozen=True, slots=True)
class TokenKey:
    """One signing key. `private` is gone once it only verifies."""

    kid: str
    public: bytes
    private: bytes | None = field(repr=False)
    signs_from: Instant
    verifies_until: Instant | None = None


def new_key(seed: bytes, signs_from: Instant) -> TokenKey:
    """A key from 32 random bytes."""
    public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    return TokenKey(thumbprint(public), public, seed, signs_from)


def thumbprint(public: bytes) -> str:
    """RFC 7638 of an Ed25519 key: our `kid`, and what a node's token is bound to."""
    members = f'{{"crv":"Ed25519","kty":"OKP","x":"{_b64(public)}"}}'
    return _b64(hashlib.sha256(members.encode()).digest())


@dataclass(frozen=True, slots=True)
class KeySet:
    """Oldest first. A value: rotation gives a new one."""

    keys: tuple[TokenKey, ...]

    def signer(self, now: Instant) -> TokenKey:
        """The newest key whose time to sign has come."""
        for key in reversed(self.keys):
            if key.private is not None and key.signs_from <= now:
                return key
        raise LookupError("no key may sign yet: make one before serving")

    def verifier(self, kid: str, now: Instant) -> bytes | None:
        for key in self.keys:
            if key.kid == kid and (key.verifies_until is None or now < key.verifies_until):
                return key.public
        return None

    def rotated(self, seed: bytes, now: Instant, lead: Span) -> KeySet:
        """A new key signs after `lead`, time for every replica to hear of it; the others end when their tokens have."""
        starts = Instant(now + lead)
        ends = Instant(starts + (max(LIFE_S.values()) + SKEW_S) * SECOND)
        older = (
            replace(key, verifies_until=min(ends, key.verifies_until or ends)) for key in self.keys
        )
        return KeySet((*older, new_key(seed, starts)))

    def pruned(self, now: Instant) -> KeySet:
        """Without what verifies nothing any more, and without private halves that will not sign again."""
        signer = self.signer(now)
        kept = (key for key in self.keys if key.verifies_until is None or now < key.verifies_until)
        return KeySet(
            tuple(
                replace(key, private=None) if key.signs_from < signer.signs_from else key
                for key in kept
            )
        )

    def jwks(self, now: Instant) -> dict[str, object]:
        """The public halves (RFC 7517, RFC 8037), for whoever wants to check our tokens."""
        return {
            "keys": [
                {
                    "kty": "OKP",
                    "crv": "Ed25519",
                    "x": _b64(key.public),
                    "kid": key.kid,
                    "alg": ALGORITHM,
                    "use": "sig",
                }
                for key in self.keys
                if key.verifies_until is None or now < key.verifies_until
            ]
        }

    def to_json(self) -> bytes:
        """For the store, sealed: it holds private keys."""
        rows = [
            {
                "private": _b64(key.private) if key.private is not None else None,
                "public": _b64(key.public),
                "signs_from": key.signs_from,
                "verifies_until": key.verifies_until,
            }
            for key in self.keys
        ]
        return json.dumps({"version": 1, "keys": rows}, separators=(",", ":")).encode()

    @staticmethod
    def from_json(raw: bytes) -> KeySet:
        """`Invalid` when it is not what `to_json` wrote."""
        try:
            document = json.loads(raw)
            if document["version"] != 1:
                raise ValueError("another version")
            keys = tuple(_key_from(row) for row in document["keys"])
        except (ValueError, KeyError, TypeError) as error:
            raise Invalid(f"the stored signing keys cannot be read: {error}") from error
        return KeySet(keys)


def _key_from(row: dict[str, Any]) -> TokenKey:
    public = _canonical(row["public"])
    private = _canonical(row["private"]) if row["private"] is not None else None
    if private is not None and new_key(private, Instant(0)).public != public:
        raise ValueError("a private key that does not belong to its public one")
    until = row["verifies_until"]
    return TokenKey(
        thumbprint(public),
        public,
        private,
        Instant(int(row["signs_from"])),
        None if until is None else Instant(int(until)),
    )


# ---- issuing


@dataclass(frozen=True, slots=True)
class TokenAudience:
    """Where tokens are good: whose they are (`issuer`), for which server (`audience`)."""

    issuer: str
    audience: str


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says. `session` is the refresh family a user's token came from; `key` the node's thumbprint."""

    type: TokenType
    subject: str  # as `core.ids.encode` writes it
    id: str
    issued_at_s: int
    expires_at_s: int
    session: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class TokenGrant:
    """Who gets a token: a user in a session, or a node with its key."""

    type: TokenType
    subject: str
    session: str | None = None
    key: str | None = None


def issue(
    keys: KeySet, place: TokenAudience, grant: TokenGrant, token_id: str, now: Instant
) -> str:
    """A token that lives as long as its type says, from now."""
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
        raise Invalid(f"no token can say this: {made.why} ({made.detail})")
    key = keys.signer(now)
    assert key.private is not None
    header = {"alg": ALGORITHM, "kid": key.kid, "typ": FORM}
    return signed(header, payload, key.private)


def signed(header: object, payload: object, private: bytes) -> str:
    """The compact form of any header and payload; what is in them is the caller's matter."""
    message = f"{_b64(_json(header))}.{_b64(_json(payload))}"
    signature = Ed25519PrivateKey.from_private_bytes(private).sign(message.encode())
    return f"{message}.{_b64(signature)}"


# ---- verifying


class RejectionReason(StrEnum):
    """Why a token is refused: for metrics and tests; the caller only hears `not signed in`."""

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
    """The claims of a token of ours of this type that is good here and now, or why it is not."""
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
        return RejectedToken(RejectionReason.KEY, "no such key of ours")
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
        return RejectedToken(RejectionReason.TIME, "from the future")
    if claims.expires_at_s <= seconds:
        return RejectedToken(RejectionReason.TIME, "expired")
    return claims


class TokenReader:
    """`verify`, remembering tokens it took: a signature costs a hundred times a look-up. Expiry is asked every time."""

    def __init__(self, keys: KeySet, place: TokenAudience, most: int = 10_000) -> None:
        self._keys, self._place, self._most = keys, place, most
        self._taken: dict[str, Claims] = {}

    def use(self, keys: KeySet) -> None:
        """Keys have changed: what an old one signed is asked about again."""
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
    """Everything but time and wanted type. Exactly the claims of the type, each in its own form."""
    names = frozenset(payload)
    if not names >= _REQUIRED:
        return RejectedToken(
            RejectionReason.CLAIMS, f"without {', '.join(sorted(_REQUIRED - names))}"
        )
    try:
        type_ = TokenType(payload["type"])
    except ValueError:
        return RejectedToken(RejectionReason.TYPE, "no type of ours")
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
        return RejectedToken(RejectionReason.TIME, "lives longer than its type may")
    if not (isinstance(id_, str) and _JTI.fullmatch(id_)):
        return RejectedToken(RejectionReason.CLAIMS, "no id of a token")
    if not isinstance(subject, str):
        return RejectedToken(RejectionReason.CLAIMS, "no subject")
    try:
        decode(_SUBJECT_KIND[type_], subject)
    except Invalid:
        return RejectedToken(RejectionReason.CLAIMS, f"its subject is no {_SUBJECT_KIND[type_]}")
    session, bound = payload.get("sid"), payload.get("cnf")
    if type_ is TokenType.USER:
        if not (isinstance(session, str) and _SESSION.fullmatch(session)):
            return RejectedToken(RejectionReason.CLAIMS, "no session")
        return Claims(type_, subject, id_, issued, expires, session=session)
    jkt = bound.get("jkt") if isinstance(bound, dict) and set(bound) == {"jkt"} else None
    if not (isinstance(jkt, str) and _THUMBPRINT.fullmatch(jkt)):
        return RejectedToken(RejectionReason.CLAIMS, "bound to no key")
    return Claims(type_, subject, id_, issued, expires, key=jkt)


# ---- encoding


def _b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _canonical(text: str) -> bytes:
    """Base64url as RFC 7515 has it; one spelling per value. `ValueError` for every other."""
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("not base64url") from error
    if _b64(raw) != text:
        raise ValueError("base64url in another spelling")
    return raw


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _object(raw: bytes) -> dict[str, Any]:
    """A JSON object in UTF-8, no name twice, no NaN. `ValueError` for anything else."""
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
        raise ValueError("a name twice")
    return found


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is no JSON")

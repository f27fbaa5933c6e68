"""OpenID Connect, the pure parts: reading a provider's discovery document and keys, and judging its ID tokens.

Only signatures by a key that the provider itself publishes count, under the algorithm that belongs to that key's type:
a token cannot choose how it is checked.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from gpool.core.errors import NotSignedIn, Unreachable
from gpool.core.model import SECOND, Instant

SKEW_S = 60
MAX_TOKEN_LETTERS = 16_384
MIN_RSA_BITS = 2048
_ALGORITHM = {"RSA": "RS256", "EC": "ES256", "OKP": "EdDSA"}


@dataclass(frozen=True, slots=True)
class Provider:
    """Where its doors are."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str


@dataclass(frozen=True, slots=True)
class Expected:
    issuer: str
    client_id: str
    nonce: str


@dataclass(frozen=True, slots=True)
class Identity:
    issuer: str
    subject: str


# ---- the way there


def discovery_url(issuer: str) -> str:
    return issuer.rstrip("/") + "/.well-known/openid-configuration"


def read_discovery(document: object, issuer: str) -> Provider:
    """`Unreachable` when it is not this issuer's: everything after it would be somebody else's."""
    if not isinstance(document, dict) or document.get("issuer") != issuer:
        raise Unreachable(f"what {issuer} publishes is not its own discovery document")
    found = []
    for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
        value = document.get(name)
        if not isinstance(value, str) or not _is_as_safe(value, issuer):
            raise Unreachable(f"the discovery document of {issuer} has no usable {name}")
        found.append(value)
    return Provider(issuer, *found)


def _is_as_safe(url: str, issuer: str) -> bool:
    """Over TLS whenever the issuer is."""
    scheme = urlsplit(url).scheme
    return scheme == "https" or (scheme == "http" and urlsplit(issuer).scheme == "http")


def challenge_of(verifier: str) -> str:
    """PKCE (RFC 7636), method S256."""
    return _b64(hashlib.sha256(verifier.encode()).digest())


def authorization_url(provider: Provider, parameters: Mapping[str, str]) -> str:
    joint = "&" if "?" in provider.authorization_endpoint else "?"
    return provider.authorization_endpoint + joint + urlencode(parameters)


# ---- the ID token


def verify(token: object, keys: object, expected: Expected, now: Instant) -> Identity:
    """Whom the provider says it is; `NotSignedIn` says what is wrong with the token."""
    if not isinstance(token, str) or len(token) > MAX_TOKEN_LETTERS or token.count(".") != 2:
        raise _no("the provider sent no ID token")
    head, payload, signature = token.split(".")
    try:
        header, claims = _object(_unb64(head)), _object(_unb64(payload))
        signed = _unb64(signature)
    except ValueError as error:
        raise _no(f"the ID token cannot be read: {error}") from None
    if "crit" in header:
        raise _no("the ID token asks for what is not understood here")
    message = f"{head}.{payload}".encode("ascii")
    if not any(_is_by(key, header, message, signed) for key in _keys(keys, header.get("kid"))):
        raise _no("the ID token is not signed by the provider")
    return _judged(claims, expected, now // SECOND)


def _judged(claims: Mapping[str, Any], expected: Expected, seconds: int) -> Identity:
    if claims.get("iss") != expected.issuer:
        raise _no("the ID token is another issuer's")
    audience = claims.get("aud")
    audiences = audience if isinstance(audience, list) else [audience]
    if expected.client_id not in audiences:
        raise _no("the ID token is for somebody else")
    party = claims.get("azp")
    if (len(audiences) > 1 or party is not None) and party != expected.client_id:
        raise _no("the ID token was given to somebody else")
    if claims.get("nonce") != expected.nonce:
        raise _no("the ID token belongs to another sign-in")
    expires, issued = claims.get("exp"), claims.get("iat")
    if type(expires) is not int or type(issued) is not int:
        raise _no("the ID token has no times")
    if expires <= seconds - SKEW_S or issued > seconds + SKEW_S:
        raise _no("the ID token has expired, or is not valid yet; are the clocks right?")
    not_before = claims.get("nbf")
    if not_before is not None and (type(not_before) is not int or not_before > seconds + SKEW_S):
        raise _no("the ID token is not valid yet; are the clocks right?")
    subject = claims.get("sub")
    if not isinstance(subject, str) or not 0 < len(subject) <= 255 or "\0" in subject:
        raise _no("the ID token names nobody")
    return Identity(expected.issuer, subject)


def _keys(document: object, kid: object) -> list[Mapping[str, Any]]:
    found = document.get("keys") if isinstance(document, dict) else None
    listed: Sequence[Any] = found if isinstance(found, list) else []
    usable: list[Mapping[str, Any]] = [
        key
        for key in listed
        if isinstance(key, dict) and key.get("use", "sig") == "sig" and "d" not in key
    ]
    if kid is None:
        return usable if len(usable) == 1 else []
    return [key for key in usable if key.get("kid") == kid]


def _is_by(
    key: Mapping[str, Any], header: Mapping[str, Any], message: bytes, signature: bytes
) -> bool:
    algorithm = _ALGORITHM.get(str(key.get("kty")))
    if algorithm is None or header.get("alg") != algorithm:
        return False
    if key.get("alg", algorithm) != algorithm:
        return False
    try:
        if algorithm == "RS256":
            public = rsa.RSAPublicNumbers(_number(key["e"]), _number(key["n"])).public_key()
            if public.key_size < MIN_RSA_BITS:
                return False
            public.verify(signature, message, padding.PKCS1v15(), SHA256())
        elif algorithm == "ES256":
            if key.get("crv") != "P-256" or len(signature) != 64:
                return False
            point = ec.EllipticCurvePublicNumbers(
                _number(key["x"]), _number(key["y"]), ec.SECP256R1()
            ).public_key()
            r, s = (int.from_bytes(half, "big") for half in (signature[:32], signature[32:]))
            point.verify(encode_dss_signature(r, s), message, ec.ECDSA(SHA256()))
        else:
            if key.get("crv") != "Ed25519":
                return False
            Ed25519PublicKey.from_public_bytes(_unb64(key["x"])).verify(signature, message)
    except (InvalidSignature, ValueError, KeyError, TypeError):
        return False
    return True


def _number(text: str) -> int:
    return int.from_bytes(_unb64(text), "big")


def _b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _unb64(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("not base64url") from error


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - a stranger's text, not a caller's bug
    return value


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice")
    return found


def _no(why: str) -> NotSignedIn:
    return NotSignedIn(f"{why}; sign in again")

"""OpenID Connect without I/O: discovery documents, provider keys, ID tokens (read by joserfc, claims checked here).

A token does not choose how it is checked: the key comes from the provider's published set, and its type determines
the only accepted algorithm (RSA: RS256, P-256: ES256, Ed25519: EdDSA).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from joserfc import jwk, jwt
from joserfc.errors import InvalidPayloadError, JoseError, UnsupportedAlgorithmError
from joserfc.jws import JWSRegistry
from joserfc.util import urlsafe_b64decode
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from gpool.core.errors import NotSignedIn, Unreachable
from gpool.core.model import SECOND, Instant

SKEW_S = 60
MAX_TOKEN_LETTERS = 16_384
MIN_RSA_BITS = 2048
_ALGORITHM = {"RSA": "RS256", "EC": "ES256", "OKP": "EdDSA"}


class OidcProvider(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        pattern=r"^[a-z0-9-]{1,32}$", description="Name of the provider in URLs and account names."
    )
    issuer: str = Field(
        pattern=r"^https?://",
        description="Issuer URL; the discovery document is at ISSUER/.well-known/openid-configuration.",
    )
    client_id: str = Field(
        min_length=1, description="Client id under which this server is registered there."
    )
    client_secret: SecretStr | None = Field(
        default=None, description="Client secret; unset: a public client that uses PKCE alone."
    )
    scope: str = Field(default="openid", description="Scopes to request, separated by spaces.")


@dataclass(frozen=True, slots=True)
class ProviderEndpoints:
    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str


@dataclass(frozen=True, slots=True)
class ExpectedClaims:
    issuer: str
    client_id: str
    nonce: str


@dataclass(frozen=True, slots=True)
class ProviderIdentity:
    issuer: str
    subject: str


# ---- discovery and redirect


def discovery_url(issuer: str) -> str:
    return issuer.rstrip("/") + "/.well-known/openid-configuration"


def read_discovery(document: object, issuer: str) -> ProviderEndpoints:
    """Check the discovery document; `Unreachable` if it names another issuer, lacks an endpoint, or an `https` issuer has
    a plain `http` endpoint.
    """
    if not isinstance(document, dict) or document.get("issuer") != issuer:
        raise Unreachable(f"the discovery document of {issuer} names another issuer")
    found = []
    for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
        value = document.get(name)
        if not isinstance(value, str) or not _is_as_safe(value, issuer):
            raise Unreachable(f"the discovery document of {issuer} has no usable {name}")
        found.append(value)
    return ProviderEndpoints(issuer, *found)


def _is_as_safe(url: str, issuer: str) -> bool:
    scheme = urlsplit(url).scheme
    return scheme == "https" or (scheme == "http" and urlsplit(issuer).scheme == "http")


def challenge_of(verifier: str) -> str:
    digest = hashlib.sha256(verifier.encode()).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def authorization_url(provider: ProviderEndpoints, parameters: Mapping[str, str]) -> str:
    joint = "&" if "?" in provider.authorization_endpoint else "?"
    return provider.authorization_endpoint + joint + urlencode(parameters)


# ---- the ID token


class _StrictJson(json.JSONDecoder):
    """JSON without repeated names: joserfc would take the last."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_unique)


class _ProviderAlgorithms(JWSRegistry):
    """The algorithms of `_ALGORITHM`; `JWSRegistry` would warn about the name EdDSA, which providers use."""

    max_header_length = max_signature_length = MAX_TOKEN_LETTERS

    def get_alg(self, name: str) -> Any:
        if name not in _ALGORITHM.values():
            raise UnsupportedAlgorithmError(f"algorithm {name!r}")
        return self.algorithms[name]


_ALGORITHMS = _ProviderAlgorithms(strict_check_header=False)


def verify(token: object, keys: object, expected: ExpectedClaims, now: Instant) -> ProviderIdentity:
    """Account named by an ID token; `keys`: the provider's JWKS. `NotSignedIn` names the failed check."""
    if not isinstance(token, str) or len(token) > MAX_TOKEN_LETTERS or token.count(".") != 2:
        raise _refused("the provider sent no ID token")
    try:
        first = token.partition(".")[0].encode("ascii")
        header = json.loads(urlsafe_b64decode(first), cls=_StrictJson)
    except (ValueError, RecursionError) as error:
        raise _refused(f"the ID token's header cannot be read: {error}") from None
    if not isinstance(header, dict):
        raise _refused("the ID token's header is not a JSON object")
    if "crit" in header:
        raise _refused("the ID token requires header extensions (crit), none is supported")
    for key in _keys(keys, header):
        try:
            claims = jwt.decode(token, key, registry=_ALGORITHMS, decoder_cls=_StrictJson).claims
        except (InvalidPayloadError, RecursionError):
            raise _refused(
                "the ID token's claims are not a JSON object with unique names"
            ) from None
        except (JoseError, ValueError):
            continue
        return _checked(claims, expected, now // SECOND)
    raise _refused("the ID token is not signed by a key of the provider")


def _checked(claims: Mapping[str, Any], expected: ExpectedClaims, seconds: int) -> ProviderIdentity:
    if claims.get("iss") != expected.issuer:
        raise _refused("the ID token is from another issuer")
    audience = claims.get("aud")
    audiences = audience if isinstance(audience, list) else [audience]
    if expected.client_id not in audiences:
        raise _refused("the ID token is for another audience")
    party = claims.get("azp")
    if (len(audiences) > 1 or party is not None) and party != expected.client_id:
        raise _refused("the ID token was issued to another client (azp)")
    if claims.get("nonce") != expected.nonce:
        raise _refused("the ID token has the nonce of another sign-in")
    expires, issued = claims.get("exp"), claims.get("iat")
    if type(expires) is not int or type(issued) is not int:  # True and 1.0 equal 1
        raise _refused("the ID token has no exp and iat in whole seconds")
    if expires <= seconds - SKEW_S or issued > seconds + SKEW_S:
        raise _refused("the ID token has expired or is not valid yet; check both clocks")
    not_before = claims.get("nbf")
    if not_before is not None and (type(not_before) is not int or not_before > seconds + SKEW_S):
        raise _refused("the ID token is not valid yet; check both clocks")
    subject = claims.get("sub")
    if not isinstance(subject, str) or not 0 < len(subject) <= 255 or "\0" in subject:
        raise _refused("the ID token has no usable subject")
    return ProviderIdentity(expected.issuer, subject)


def _keys(document: object, header: Mapping[str, Any]) -> Iterator[jwk.Key]:
    found = document.get("keys") if isinstance(document, dict) else None
    listed: Sequence[Any] = found if isinstance(found, list) else []
    usable = [
        key
        for key in listed
        if isinstance(key, dict) and key.get("use", "sig") == "sig" and "d" not in key
    ]
    kid, algorithm = header.get("kid"), header.get("alg")
    if kid is not None:
        usable = [key for key in usable if key.get("kid") == kid]
    elif len(usable) != 1:
        return
    for key in usable:
        if (
            _ALGORITHM.get(str(key.get("kty"))) != algorithm
            or key.get("alg", algorithm) != algorithm
        ):
            continue
        if algorithm == "EdDSA" and key.get("crv") != "Ed25519":  # joserfc takes Ed448 too
            continue
        try:
            public = jwk.import_key(key)
        except (JoseError, ValueError, KeyError, TypeError):
            continue
        if not isinstance(public, jwk.RSAKey) or public.public_key.key_size >= MIN_RSA_BITS:
            yield public


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is repeated")
    return found


def _refused(why: str) -> NotSignedIn:
    return NotSignedIn(f"{why}; sign in again")

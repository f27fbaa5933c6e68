"""OpenID Connect: a sign-in through a real provider process, and every way an ID token can be wrong."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from joserfc.errors import SecurityWarning

from gpool.core.errors import NotSignedIn, Unreachable
from gpool.core.model import SECOND, Instant, Permission
from gpool.server.clock import SystemClock
from gpool.server.identity import oidc
from gpool.server.identity.oidc import ExpectedClaims, ProviderIdentity
from tests.server.identity_routes.people_desk import PASSWORD, bearer
from tests.server.server_desk import Desk, open_desk
from tests.tools.oidc_provider import oidc_provider
from tests.tools.processes import PATIENCE_S

pytestmark = pytest.mark.anyio
BACK = "http://127.0.0.1:1/back"


# ---- a real provider


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    with oidc_provider() as url:
        yield url


@asynccontextmanager
async def a_desk(data: Path, issuer: str, **settings: Any) -> AsyncIterator[Desk]:
    """By the same clock as the provider: what it issues must not be from a future that is too far away."""
    known = {"name": "mock", "issuer": issuer, "client_id": "gpool", "client_secret": "hush"}
    clock: Any = SystemClock()
    desk = await open_desk(data, clock, oidc=(known,), **settings)
    try:
        yield desk
    finally:
        await desk.server.identity.close()
        await desk.server.store.close()


async def consented(url: str, subject: str) -> dict[str, str]:
    """What somebody does in the browser: they say who they are, and are sent back."""
    async with httpx2.AsyncClient(timeout=PATIENCE_S) as browser:
        answer = await browser.post(url, data={"sub": subject, "action": "authorize"})
    assert answer.status_code in (302, 303), answer.text
    back = urlsplit(answer.headers["location"])
    assert f"{back.scheme}://{back.netloc}{back.path}" == BACK
    return {name: values[0] for name, values in parse_qs(back.query).items()}


async def signed_in(desk: Desk, subject: str) -> dict[str, Any]:
    started = await desk.bare.get("/v1/auth/oidc/start", params={"redirect_uri": BACK})
    assert started.status_code == 200, started.text
    came = await consented(started.json()["url"], subject)
    assert came["state"] == started.json()["state"]
    wanted = {"state": came["state"], "code": came["code"]}
    done = await desk.bare.post("/v1/auth/oidc/finish", json=wanted)
    assert done.status_code == 200, done.text
    again = await desk.bare.post("/v1/auth/oidc/finish", json=wanted)
    assert again.status_code == 401  # a sign-in is finished once
    me = await desk.bare.get("/v1/me", headers=bearer(done.json()["access_token"]))
    found: dict[str, Any] = me.json()
    return found


async def test_somebody_signs_in_with_a_providers_account(data: Path, provider: str) -> None:
    async with a_desk(data, provider) as desk:
        ada = await signed_in(desk, "ada")
        assert ada["identities"] == [provider]
        assert ada["name"].startswith("mock-")
        assert (await signed_in(desk, "ada"))["id"] == ada["id"]
        assert (await signed_in(desk, "bob"))["id"] != ada["id"]


async def test_a_name_taken_beforehand_does_not_keep_a_providers_account_out(
    data: Path, provider: str
) -> None:
    """Finding 25: whoever registered the computed name locked that person out for ever."""
    mark = hashlib.sha256(f"{provider}\0bob".encode()).hexdigest()[:12]
    async with a_desk(data, provider) as desk:
        taken = {"name": f"mock-{mark}", "password": PASSWORD}
        refused = await desk.bare.post("/v1/users", json=taken)
        assert (refused.status_code, "identity provider" in refused.json()["detail"]) == (409, True)
        # An account from before the provider was configured has the name all the same.
        squatter = await desk.person(f"mock-{mark}", Permission.CONSUMER)
        assert (await desk.bare.get("/v1/me", headers=squatter)).json()["name"] == f"mock-{mark}"
        me = await signed_in(desk, "bob")
        assert me["name"].startswith(f"mock-{mark}-")
        assert (await signed_in(desk, "bob"))["id"] == me["id"]
        free = hashlib.sha256(f"{provider}\0cy".encode()).hexdigest()[:12]
        assert (await signed_in(desk, "cy"))["name"] == f"mock-{free}"  # the control


async def test_a_providers_account_needs_an_invite_where_registration_does(
    data: Path, provider: str
) -> None:
    async with a_desk(data, provider, registration="invite") as desk:
        started = (await desk.bare.get("/v1/auth/oidc/start", params={"redirect_uri": BACK})).json()
        came = await consented(started["url"], "ada")
        wanted = {"state": came["state"], "code": came["code"]}
        assert (await desk.bare.post("/v1/auth/oidc/finish", json=wanted)).status_code == 403


async def test_a_code_of_another_sign_in_is_refused(data: Path, provider: str) -> None:
    """Its ID token carries the other one's nonce."""
    async with a_desk(data, provider) as desk:
        mine, theirs = [
            (await desk.bare.get("/v1/auth/oidc/start", params={"redirect_uri": BACK})).json()
            for _ in range(2)
        ]
        code = (await consented(theirs["url"], "eve"))["code"]
        wanted = {"state": mine["state"], "code": code}
        assert (await desk.bare.post("/v1/auth/oidc/finish", json=wanted)).status_code == 401


async def test_a_state_that_is_not_ours_is_refused(data: Path, provider: str) -> None:
    async with a_desk(data, provider) as desk:
        started = (await desk.bare.get("/v1/auth/oidc/start", params={"redirect_uri": BACK})).json()
        came = await consented(started["url"], "ada")
        for state in ("", "x", came["state"][:-4], "A" * 200):
            wanted = {"state": state, "code": came["code"]}
            assert (await desk.bare.post("/v1/auth/oidc/finish", json=wanted)).status_code == 401


@pytest.mark.parametrize(
    "back",
    [
        "http://elsewhere.example/back",
        "https://127.0.0.1.elsewhere.example/",
        "http://127.0.0.1@elsewhere.example/",
        "javascript:alert(1)",
        "//127.0.0.1/",
    ],
)
async def test_the_browser_comes_back_to_nobody_else(data: Path, back: str) -> None:
    async with a_desk(data, "http://127.0.0.1:1") as desk:
        answer = await desk.bare.get("/v1/auth/oidc/start", params={"redirect_uri": back})
        assert answer.status_code == 400


# ---- ID tokens

NOW = Instant(1_790_000_000 * SECOND)
EXPECTED = ExpectedClaims("https://id.example", "gpool", "the nonce")
CLAIMS: dict[str, Any] = {
    "iss": EXPECTED.issuer,
    "aud": EXPECTED.client_id,
    "sub": "ada",
    "nonce": EXPECTED.nonce,
    "iat": NOW // SECOND - 5,
    "exp": NOW // SECOND + 300,
}
Signer = tuple[str, dict[str, Any], Callable[[bytes], bytes]]


def b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def number(value: int) -> str:
    return b64(value.to_bytes((value.bit_length() + 7) // 8, "big"))


def rs256(bits: int = 2048) -> Signer:
    key = rsa.generate_private_key(65537, bits)
    public = key.public_key().public_numbers()
    jwk = {"kty": "RSA", "kid": "r", "n": number(public.n), "e": number(public.e)}
    return "RS256", jwk, lambda message: key.sign(message, padding.PKCS1v15(), SHA256())


def es256() -> Signer:
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_numbers()
    jwk = {
        "kty": "EC",
        "crv": "P-256",
        "kid": "e",
        "x": b64(public.x.to_bytes(32, "big")),
        "y": b64(public.y.to_bytes(32, "big")),
    }

    def sign(message: bytes) -> bytes:
        r, s = decode_dss_signature(key.sign(message, ec.ECDSA(SHA256())))
        return r.to_bytes(32, "big") + s.to_bytes(32, "big")

    return "ES256", jwk, sign


def eddsa() -> Signer:
    key = Ed25519PrivateKey.generate()
    jwk = {
        "kty": "OKP",
        "crv": "Ed25519",
        "kid": "o",
        "x": b64(key.public_key().public_bytes_raw()),
    }
    return "EdDSA", jwk, key.sign


def token(signer: Signer, header: dict[str, Any] | None = None, **changes: Any) -> str:
    algorithm, jwk, sign = signer
    head = {"alg": algorithm, "kid": jwk["kid"], **(header or {})}
    claims = {name: value for name, value in {**CLAIMS, **changes}.items() if value is not ...}
    message = ".".join(b64(json.dumps(part).encode()) for part in (head, claims))
    return f"{message}.{b64(sign(message.encode()))}"


@pytest.fixture(scope="module", params=[rs256, es256, eddsa])
def signer(request: pytest.FixtureRequest) -> Signer:
    made: Signer = request.param()
    return made


def test_a_providers_token_is_taken(signer: Signer) -> None:
    keys = {"keys": [signer[1]]}
    assert oidc.verify(token(signer), keys, EXPECTED, NOW) == ProviderIdentity(
        EXPECTED.issuer, "ada"
    )
    listed = token(signer, aud=["gpool", "other"], azp="gpool")
    assert oidc.verify(listed, keys, EXPECTED, NOW).subject == "ada"


@pytest.mark.parametrize(
    "changes",
    [
        {"iss": "https://elsewhere.example"},
        {"aud": "another"},
        {"aud": ["gpool", "another"]},
        {"azp": "another"},
        {"nonce": "another"},
        {"nonce": ...},
        {"sub": ...},
        {"sub": ""},
        {"sub": 7},
        {"exp": NOW // SECOND - 100},
        {"exp": ...},
        {"exp": "2099"},
        {"iat": NOW // SECOND + 1000},
        {"iat": ...},
        {"nbf": NOW // SECOND + 1000},
    ],
)
def test_a_token_that_says_something_else_is_refused(
    signer: Signer, changes: dict[str, Any]
) -> None:
    with pytest.raises(NotSignedIn):
        oidc.verify(token(signer, **changes), {"keys": [signer[1]]}, EXPECTED, NOW)


def test_a_token_that_chooses_how_it_is_checked_is_refused(signer: Signer) -> None:
    keys = {"keys": [signer[1]]}
    genuine = token(signer)
    forged = [
        token(signer, {"alg": "none"}),
        token(signer, {"alg": "HS256"}),
        token(signer, {"kid": "another"}),
        token(signer, {"crit": ["exp"]}),
        token((signer[0], signer[1], eddsa()[2])),
        genuine.rsplit(".", 1)[0] + ".",
        genuine[:-8],
        genuine + "A",
        "",
        "a.b.c",
    ]
    for each in forged:
        with pytest.raises(NotSignedIn):
            oidc.verify(each, keys, EXPECTED, NOW)
    with pytest.raises(NotSignedIn):
        oidc.verify(genuine, {"keys": []}, EXPECTED, NOW)
    with pytest.raises(NotSignedIn):
        oidc.verify(None, keys, EXPECTED, NOW)


def raw_token(signer: Signer, header: str, claims: str) -> str:
    message = f"{b64(header.encode())}.{b64(claims.encode())}"
    return f"{message}.{b64(signer[2](message.encode()))}"


def test_a_signed_token_with_malformed_json_is_refused(signer: Signer) -> None:
    header = json.dumps({"alg": signer[0], "kid": signer[1]["kid"]})
    claims = json.dumps(CLAIMS)
    deep = "[" * 3000 + "]" * 3000
    assert oidc.verify(raw_token(signer, header, claims), {"keys": [signer[1]]}, EXPECTED, NOW)
    malformed = [
        (header, claims.replace("{", '{"sub": "eve", ', 1)),
        (header.replace("{", '{"alg": "none", ', 1), claims),
        (header.replace("}", ', "b64": false}', 1), claims),
        (header, "[]"),
        (header, deep),
        (deep, claims),
        ('["alg"]', claims),
        ('"alg"', claims),
        ("7", claims),
    ]
    for head, body in malformed:
        with pytest.raises(NotSignedIn):
            oidc.verify(raw_token(signer, head, body), {"keys": [signer[1]]}, EXPECTED, NOW)


@pytest.mark.parametrize(
    "change",
    [
        {"use": "enc"},
        {"alg": "RS512"},
        {"key_ops": ["encrypt"]},
        {"d": "AAAA"},
        {"kty": "oct", "k": "AAAA"},
        {"kty": ["RSA"]},
        {"x": 7, "n": 7},
        {"x": "?", "n": "?"},
        {"crv": "Ed448", "e": ...},
    ],
)
def test_a_key_that_is_not_a_public_key_for_signatures_is_ignored(
    signer: Signer, change: dict[str, Any]
) -> None:
    key = {name: value for name, value in {**signer[1], **change}.items() if value is not ...}
    with pytest.raises(NotSignedIn, match="not signed by a key of the provider"):
        oidc.verify(token(signer), {"keys": [key]}, EXPECTED, NOW)


def test_an_rsa_key_of_1024_bits_is_ignored() -> None:
    weak = rs256(1024)
    with (
        pytest.warns(SecurityWarning),
        pytest.raises(NotSignedIn, match="not signed by a key of the provider"),
    ):
        oidc.verify(token(weak), {"keys": [weak[1]]}, EXPECTED, NOW)


def test_the_challenge_is_that_of_rfc_7636() -> None:
    verifier = "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"
    assert oidc.challenge_of(verifier) == "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM"


@pytest.mark.parametrize(
    "document",
    [
        None,
        {},
        {"issuer": "https://elsewhere.example"},
        {"issuer": "https://id.example", "authorization_endpoint": "https://id.example/a"},
        {
            "issuer": "https://id.example",
            "authorization_endpoint": "https://id.example/a",
            "token_endpoint": "http://id.example/t",  # without TLS
            "jwks_uri": "https://id.example/k",
        },
    ],
)
def test_a_discovery_document_that_is_not_the_issuers_is_refused(document: object) -> None:
    with pytest.raises(Unreachable):
        oidc.read_discovery(document, "https://id.example")

"""Kinds of forged tokens by name, each with the careless verifier that would take it. For the verifier and for every route."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gpool.core.ids import encode
from gpool.core.model import SECOND, Instant
from gpool.server.identity.access_tokens import (
    FORM,
    LIFE_S,
    SKEW_S,
    KeySet,
    TokenAudience,
    TokenGrant,
    TokenType,
    issue,
    last_use,
    new_key,
    signed,
    thumbprint,
)

ORDER = 2**252 + 27742317777372353535851937790883648493  # of the group signatures live in


@dataclass(frozen=True, slots=True)
class Bench:
    """A server's keys at a moment, and a genuine token of each type, as a forger would get hold of them."""

    keys: KeySet
    private: bytes  # of the key that signs
    retired: bytes  # of one that verifies nothing any more
    place: TokenAudience
    now: Instant

    @property
    def seconds(self) -> int:
        return self.now // SECOND

    @property
    def kid(self) -> str:
        return self.keys.signer(self.now).kid

    def token(self, type_: TokenType = TokenType.USER) -> str:
        return issue(self.keys, self.place, GRANTS[type_], "jti-0123456789abcdef", self.now)


NODE_KEY = thumbprint(
    Ed25519PrivateKey.from_private_bytes(b"n" * 32).public_key().public_bytes_raw()
)
GRANTS = {
    TokenType.USER: TokenGrant(TokenType.USER, encode("user", 7), session="s-1"),
    TokenType.NODE: TokenGrant(TokenType.NODE, encode("node", 9), key=NODE_KEY),
}


def rotated(keys: KeySet, seed: bytes, signs_from: Instant) -> KeySet:
    """As the store rotates: one more key, and an end for the others."""
    end = last_use(signs_from)
    older = (replace(key, verifies_until=min(end, key.verifies_until or end)) for key in keys.keys)
    return KeySet((*older, new_key(seed, signs_from)))


def bench(place: TokenAudience, now: Instant) -> Bench:
    """Three generations of keys: one retired, one retiring, one that signs."""
    day = 86_400 * SECOND
    seeds = [hashlib.sha256(text).digest() for text in (b"first", b"second", b"third")]
    keys = KeySet((new_key(seeds[0], Instant(now - 3 * day)),))
    keys = rotated(keys, seeds[1], Instant(now - 2 * day))
    keys = rotated(keys, seeds[2], Instant(now - SECOND))
    return Bench(keys, seeds[2], seeds[0], place, now)


# ---- the ways of a forger

Json = dict[str, Any]
Verifier = Callable[[str, Bench], bool]


def b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def unb64(text: str) -> bytes:
    """As lenient as they come: padding or none, strange letters skipped."""
    letters = "".join(c for c in text if c.isalnum() or c in "-_+/").replace("+", "-")
    letters = letters.replace("/", "_")
    letters = letters[: len(letters) - (len(letters) % 4 == 1)]
    return base64.urlsafe_b64decode(letters + "=" * (-len(letters) % 4))


def raw_json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def put_together(header: bytes, payload: bytes, private: bytes) -> str:
    message = f"{b64(header)}.{b64(payload)}"
    return f"{message}.{b64(Ed25519PrivateKey.from_private_bytes(private).sign(message.encode()))}"


def read(token: str) -> tuple[Json, Json]:
    head, body, _ = token.split(".")
    return json.loads(unb64(head)), json.loads(unb64(body))


class Forger:
    """Bends a genuine token; `sign=True` uses our own key, as a bug elsewhere (a signing oracle) might."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.header, self.payload = read(bench.token())
        self.genuine = bench.token()
        self.parts = self.genuine.split(".")
        self.mine = hashlib.sha256(b"forger").digest()
        self.my_public = (
            Ed25519PrivateKey.from_private_bytes(self.mine).public_key().public_bytes_raw()
        )
        self.public = (
            Ed25519PrivateKey.from_private_bytes(bench.private).public_key().public_bytes_raw()
        )

    def head(self, private: bytes | None = None, **members: object) -> str:
        header = {k: v for k, v in (self.header | members).items() if v is not ...}
        return signed(header, self.payload, private or self.mine)

    def claims(self, **members: object) -> str:
        """Signed by our own key."""
        payload = {k: v for k, v in (self.payload | members).items() if v is not ...}
        return signed(self.header, payload, self.bench.private)

    def hmac(self, secret: bytes, **members: object) -> str:
        message = f"{b64(raw_json(self.header | members))}.{self.parts[1]}"
        return f"{message}.{b64(hmac.new(secret, message.encode(), hashlib.sha256).digest())}"

    def unsigned(self, **members: object) -> str:
        header = self.header | members
        return f"{b64(raw_json(header))}.{self.parts[1]}."

    def body(self, text: str) -> str:
        """A payload spelt out, signed by our own key."""
        return put_together(raw_json(self.header), text.encode(), self.bench.private)

    def signature(self, change: Callable[[bytes], bytes]) -> str:
        return f"{self.parts[0]}.{self.parts[1]}.{b64(change(unb64(self.parts[2])))}"


def _spliced(text: str, members: str) -> str:
    return text[:-1] + "," + members + "}"


def algorithm(f: Forger) -> Mapping[str, str]:
    """The token says how it is to be checked."""
    pem = (
        b"-----BEGIN PUBLIC KEY-----\n"
        + base64.b64encode(f.public)
        + b"\n-----END PUBLIC KEY-----\n"
    )
    return {
        "alg none": f.unsigned(alg="none"),
        "alg None": f.unsigned(alg="None"),
        "alg NONE": f.unsigned(alg="NONE"),
        "alg nOnE": f.unsigned(alg="nOnE"),
        "alg none, old signature kept": f.unsigned(alg="none") + f.parts[2],
        "alg empty": f.unsigned(alg=""),
        "alg null": f.unsigned(alg=None),
        "HS256 keyed with our public key": f.hmac(f.public, alg="HS256"),
        "HS256 keyed with our public key as PEM": f.hmac(pem, alg="HS256"),
        "HS256 keyed with our public key as base64url": f.hmac(b64(f.public).encode(), alg="HS256"),
        "HS256 keyed with nothing": f.hmac(b"", alg="HS256"),
        "HS256 keyed with our kid": f.hmac(f.bench.kid.encode(), alg="HS256"),
    }


def takes_the_tokens_word(token: str, bench: Bench) -> bool:
    """Careless: the header chooses the algorithm, and any key we have may serve as a secret."""
    head, body, signature = token.split(".")
    header = json.loads(unb64(head))
    if str(header["alg"] or "none").lower() in ("none", ""):
        return True
    key = bench.keys.verifier(bench.kid, bench.now) or b""
    pem = b"-----BEGIN PUBLIC KEY-----\n" + base64.b64encode(key) + b"\n-----END PUBLIC KEY-----\n"
    secrets = (key, pem, b64(key).encode(), b"", bench.kid.encode())
    digests = (hmac.new(s, f"{head}.{body}".encode(), hashlib.sha256).digest() for s in secrets)
    return unb64(signature) in digests


def header_keys(f: Forger) -> Mapping[str, str]:
    """The token brings the key it is to be checked with, or says where to find it."""
    jwk = {"kty": "OKP", "crv": "Ed25519", "x": b64(f.my_public)}
    mine = thumbprint(f.my_public)
    return {
        "jwk in the header": f.head(jwk=jwk),
        "jwk in the header, our kid kept out": f.head(jwk=jwk, kid=...),
        "jwk in the header under its own kid": f.head(jwk=jwk | {"kid": mine}, kid=mine),
        "jku": f.head(jku="https://forger.example/keys.json"),
        "jku on our own host": f.head(jku="https://pool.example/v1/artifacts/keys.json"),
        "x5u": f.head(x5u="https://forger.example/cert.pem"),
        "x5c": f.head(x5c=[base64.b64encode(f.my_public).decode()]),
        "x5t": f.head(x5t=b64(hashlib.sha1(f.my_public).digest())),
        "kid of the forger's key": f.head(kid=mine),
        "kid as a path": f.head(kid="../../../dev/null"),
        "kid as SQL": f.head(kid="' UNION SELECT 'x"),
        "kid as a shell command": f.head(kid="key|touch pwned"),
        "kid empty": f.head(kid=""),
        "kid missing": f.head(kid=...),
        "kid null": f.head(kid=None),
        "kid a list": f.head(kid=[f.bench.kid]),
        "kid a number": f.head(kid=0),
        "another server's key under our kid": f.head(),
    }


def trusts_the_header(token: str, bench: Bench) -> bool:
    """Careless: whatever key the header leads to (embedded, fetched, named, defaulted) is taken."""
    return checks_out(token, Forger(bench).my_public)


def extensions(f: Forger) -> Mapping[str, str]:
    """Signed by our key, with headers we never write: a reader that skips them reads another token than was meant."""
    private = f.bench.private
    return {
        "crit": f.head(private, crit=["exp"], exp=0),
        "crit unknown": f.head(private, crit=["gpool"], gpool=True),
        "b64 false": f.head(private, crit=["b64"], b64=False),
        "typ missing": f.head(private, typ=...),
        "typ JWT": f.head(private, typ="JWT"),
        "typ at+jwt": f.head(private, typ="at+jwt"),
        "typ in capitals": f.head(private, typ=FORM.upper()),
        "cty": f.head(private, cty="JWT"),
        "zip": f.head(private, zip="DEF"),
        "alg Ed25519": f.head(private, alg="Ed25519"),
        "alg eddsa": f.head(private, alg="eddsa"),
        "alg in a list": f.head(private, alg=["EdDSA"]),
        "our jwk as well": f.head(private, jwk={"kty": "OKP", "x": b64(f.public)}),
    }


def only_the_signature(token: str, bench: Bench) -> bool:
    """Careless: signed by us is good enough."""
    return checks_out(token, Forger(bench).public)


def claims(f: Forger) -> Mapping[str, str]:
    """Signed by our key, and saying what we would not have said."""
    at, life = f.bench.seconds, LIFE_S[TokenType.USER]
    needed = ("iss", "aud", "sub", "iat", "exp", "jti", "type", "sid")
    return {
        **{f"without {name}": f.claims(**{name: ...}) for name in needed},
        "another audience": f.claims(aud="another"),
        "audiences in a list": f.claims(aud=[f.bench.place.audience]),
        "ours among other audiences": f.claims(aud=["another", f.bench.place.audience]),
        "audience null": f.claims(aud=None),
        "audience with a slash": f.claims(aud=f.bench.place.audience + "/"),
        "another issuer": f.claims(iss="https://forger.example"),
        "issuer in capitals": f.claims(iss=f.bench.place.issuer.upper()),
        "expired a second ago": f.claims(iat=at - life - 1, exp=at - 1),
        "expires now": f.claims(iat=at - life, exp=at),
        "lives for a year": f.claims(exp=at + 365 * 86_400),
        "never expires": f.claims(exp=2**63),
        "expires as text": f.claims(exp=str(at + 60)),
        "expires at a fraction": f.claims(exp=at + 60.5),
        "expires at a round fraction": f.claims(exp=float(at + 60)),
        "expires null": f.claims(exp=None),
        "expires true": f.claims(exp=True),
        "expires before it was issued": f.claims(iat=at, exp=at - 1),
        "issued in the future": f.claims(iat=at + SKEW_S + 1, exp=at + SKEW_S + 60),
        "issued as text": f.claims(iat=str(at)),
        "issued before time": f.claims(iat=-1, exp=at + 60),
        "not before tomorrow": f.claims(nbf=at + 86_400),
        "type of another token": f.claims(type="refresh"),
        "type null": f.claims(type=None),
        "type a list": f.claims(type=["user-access"]),
        "a node's token bound to nobody": f.claims(type="node", sid=...),
        "a user's token called a node's": f.claims(type="node"),
        "a user's token with a node's binding": f.claims(cnf={"jkt": NODE_KEY}),
        "subject a node": f.claims(sub=encode("node", 9)),
        "subject a number": f.claims(sub=7),
        "subject empty": f.claims(sub=""),
        "subject with a NUL": f.claims(sub=encode("user", 7) + "\0"),
        "subject too large": f.claims(sub="u-" + "z" * 13),
        "jti empty": f.claims(jti=""),
        "jti a number": f.claims(jti=1),
        "session a list": f.claims(sid=["s-1"]),
        "a claim of the forger's": f.claims(permissions=["operator"]),
    }


def types(f: Forger) -> Mapping[str, str]:
    """Genuine, and for somebody else."""
    return {"a node's own token": f.bench.token(TokenType.NODE)}


def spelling(f: Forger) -> Mapping[str, str]:
    """Signed by our key or carrying its signature, in a second spelling."""
    head, body, signature = f.parts
    text = json.dumps(f.payload, separators=(",", ":"))
    header = json.dumps(f.header, separators=(",", ":"))
    operator = encode("user", 1)
    private = f.bench.private
    last = signature[-1]
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    spare = alphabet[alphabet.index(last) ^ 1]
    return {
        "subject twice": f.body(_spliced(text, f'"sub":"{operator}"')),
        "subject twice, once escaped": f.body(_spliced(text, f'"s\\u0075b":"{operator}"')),
        "expiry twice": f.body(_spliced(text, f'"exp":{f.bench.seconds + 60}')),
        "alg twice": put_together(
            _spliced(header, '"alg":"EdDSA"').encode(), text.encode(), private
        ),
        "typ twice": put_together(
            _spliced(header, f'"typ":"{FORM}"').encode(), text.encode(), private
        ),
        "signature padded": f"{head}.{body}.{signature}==",
        "spare bits set in the signature": f"{head}.{body}.{signature[:-1]}{spare}",
        "signature with a line break": f"{head}.{body}.{signature[:40]}\n{signature[40:]}",
        "signature with a blank before": f"{head}.{body}. {signature}",
        "signature with a blank after": f"{head}.{body}.{signature} ",
        "a letter from another script in the signature": f"{head}.{body}.{signature}\u200b",
        "plain base64 letters": f"{head}.{body}."
        + signature.replace("-", "+").replace("_", "/")
        + "=",
        "a payload that is a list": f.body("[" + text + "]"),
        "a payload that is text": f.body(json.dumps(text)),
        "a payload with NaN": f.body(_spliced(text, '"x":NaN')),
        "a payload with a byte order mark": put_together(
            header.encode(), b"\xef\xbb\xbf" + text.encode(), private
        ),
        "a payload in UTF-16": put_together(header.encode(), text.encode("utf-16"), private),
        "a header with a byte order mark": put_together(
            b"\xef\xbb\xbf" + header.encode(), text.encode(), private
        ),
        "nested deep": f.body(_spliced(text, '"x":' + "[" * 500 + "]" * 500)),
        "a long one": f.claims(jti="x" * 3000),
    }


def reads_leniently(token: str, bench: Bench) -> bool:
    """Careless: decodes whatever can be decoded, and asks only about the signature."""
    head, body, signature = token.split(".")
    clean = f"{head}.{body}".encode()
    return verifies(Forger(bench).public, unb64(signature), clean)


def signatures(f: Forger) -> Mapping[str, str]:
    """Not signed by us at all."""
    head, body, _ = f.parts
    operator = b64(raw_json(f.payload | {"sub": encode("user", 1)}))
    node = f.bench.token(TokenType.NODE)
    shifted = f.signature(
        lambda raw: (
            raw[:32] + (int.from_bytes(raw[32:], "little") + ORDER).to_bytes(33, "little")[:32]
        )
    )
    return {
        "signature empty": f"{head}.{body}.",
        "signature of nothing but zeros": f.signature(lambda raw: bytes(len(raw))),
        "signature cut short": f.signature(lambda raw: raw[:-1]),
        "signature cut to its half": f.signature(lambda raw: raw[:32]),
        "signature with a byte more": f.signature(lambda raw: raw + b"\0"),
        "signature twice": f.signature(lambda raw: raw + raw),
        "first bit of the signature": f.signature(lambda raw: bytes([raw[0] ^ 1]) + raw[1:]),
        "last bit of the signature": f.signature(lambda raw: raw[:-1] + bytes([raw[-1] ^ 128])),
        "signature shifted by the group's order": shifted,
        "halves of the signature swapped": f.signature(lambda raw: raw[32:] + raw[:32]),
        "signature of another token": f"{head}.{body}.{node.split('.')[2]}",
        "payload of an operator under our signature": f"{head}.{operator}.{f.parts[2]}",
        "header of another under our signature": f"{b64(raw_json(f.header | {'x': 1}))}.{body}.{f.parts[2]}",
        "signed by a key long retired": signed(
            f.header | {"kid": new_key(f.bench.retired, f.bench.now).kid},
            f.payload,
            f.bench.retired,
        ),
        "signed by a key long retired, under the kid of today": signed(
            f.header, f.payload, f.bench.retired
        ),
    }


def never_looks(token: str, bench: Bench) -> bool:
    """Careless: reads the claims and forgets the signature."""
    return "sub" in read(token)[1]


def shapes(f: Forger) -> Mapping[str, str]:
    """No token at all: these must be refused without a fault."""
    head, body, signature = f.parts
    return {
        "nothing": "",
        "dots": "..",
        "one part": head,
        "two parts": f"{head}.{body}",
        "four parts": f"{f.genuine}.{signature}",
        "five parts, as an encrypted one": f"{head}.{body}.{signature}.{body}.{signature}",
        "JSON form": json.dumps({"protected": head, "payload": body, "signature": signature}),
        "letters beyond ASCII": f"{head}.{body}.ü",
        "a lone surrogate": f"{head}.{body}.\ud800",
        "NUL after it": f.genuine + "\0",
        "two tokens": f"{f.genuine},{f.genuine}",
    }


def takes_what_starts_right(token: str, bench: Bench) -> bool:
    """Careless: digs the three parts it knows out of anything."""
    return not token or any(part in token for part in bench.token().split(".")) or "." in token


def checks_out(token: str, public: bytes) -> bool:
    head, body, signature = token.split(".")
    return verifies(public, unb64(signature), f"{head}.{body}".encode())


def verifies(public: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except InvalidSignature:
        return False
    return True


GROUPS: Mapping[str, tuple[Callable[[Forger], Mapping[str, str]], Verifier]] = {
    "algorithm": (algorithm, takes_the_tokens_word),
    "header keys": (header_keys, trusts_the_header),
    "extensions": (extensions, only_the_signature),
    "claims": (claims, only_the_signature),
    "types": (types, only_the_signature),
    "spelling": (spelling, reads_leniently),
    "signatures": (signatures, never_looks),
    "shapes": (shapes, takes_what_starts_right),
}


def forgeries(bench: Bench) -> dict[str, str]:
    """Every kind, as `group: name` → token. None of them may open any door of this server."""
    forger = Forger(bench)
    return {
        f"{group}: {name}": token
        for group, (make, _) in GROUPS.items()
        for name, token in make(forger).items()
    }

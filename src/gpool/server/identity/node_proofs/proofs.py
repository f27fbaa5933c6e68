"""Proofs that a node holds its private key, server side: challenges on the channel, signed requests. Reads no clock.

Challenge. To join, to open the channel or to renew its token, a node signs a nonce of the server:

    nonce = 16 random bytes | expiry (8 bytes, µs) | first 16 bytes of HMAC(secret, nonce so far, purpose, server, node)

No list of challenges is kept: the tag shows that the nonce is the server's, for this node and purpose, and expires
30 s after creation. A million unanswered challenges cost no memory. Only nonces of accepted answers are remembered,
until they expire: a node that proves itself once a minute keeps half an entry on average.

Request. A request carries the node's token and a signature of method, path, token, lease, time and a random nonce by
the key the token is bound to; it is accepted once, within 60 s of its time. A stolen token is useless without the
key, a recorded request because its nonce is used.

Challenge and answer travel over one connection, so one process sees both. If an answer could reach another replica,
the memory would have to be a table with the nonce as primary key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections import deque
from dataclasses import dataclass, replace
from enum import StrEnum

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from gpool.core.model import SECOND, Instant, Span
from gpool.server.identity.tokens.access import Claims, thumbprint
from gpool.transfer.node_proofs import (
    ChallengeStatement,
    RequestStatement,
    parse_request_proof,
    signature_from,
)

LIFE = Span(30 * SECOND)
REQUEST_LIFE = Span(60 * SECOND)
"""Largest difference between a request's own time and ours, either way."""
MAX_REMEMBERED = 500_000
_RANDOM_BYTES, _TIME_BYTES, _TAG_BYTES = 16, 8, 16
_NONCE_BYTES = _RANDOM_BYTES + _TIME_BYTES + _TAG_BYTES


_WEAK = frozenset(
    bytes.fromhex(text)
    for text in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
)
"""Points of small order, sign bit cleared: anybody can sign under such a key, so it proves nothing."""


class NotProven(StrEnum):
    FORM = "form"
    FOREIGN = "foreign"  # a challenge of another server, node or purpose
    STALE = "stale"
    USED = "used"
    SIGNATURE = "signature"
    KEY = "key"  # an unusable key, or not the one the token is bound to
    FULL = "full"  # the memory of used nonces is full; try again


@dataclass(frozen=True, slots=True)
class KeyProof:
    thumbprint: str


class UsedNonces:
    """Nonces of accepted proofs, until their expiry rejects a repeat anyway."""

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self._used: set[tuple[str, str]] = set()
        self._order: deque[tuple[Instant, tuple[str, str]]] = deque()
        self._most = most

    def __len__(self) -> int:
        return len(self._used)

    def take(self, key: tuple[str, str], expires: Instant, now: Instant) -> NotProven | None:
        while self._order and self._order[0][0] <= now:
            self._used.discard(self._order.popleft()[1])
        if key in self._used:
            return NotProven.USED
        if len(self._used) >= self._most:
            return NotProven.FULL
        self._used.add(key)
        self._order.append((expires, key))
        return None


class Proofs:
    def __init__(self, secret: bytes, server: str, memory: UsedNonces | None = None) -> None:
        self._secret, self._server = secret, server
        self._memory = memory if memory is not None else UsedNonces()

    def challenge(self, purpose: str, node: str, entropy: bytes, now: Instant) -> str:
        """Nonce for one node and purpose, valid for `LIFE`; `entropy`: 16 random bytes."""
        if len(entropy) != _RANDOM_BYTES:
            raise ValueError(f"entropy must have {_RANDOM_BYTES} bytes, not {len(entropy)}")
        body = entropy + (now + LIFE).to_bytes(_TIME_BYTES, "big")
        raw = body + self._tag(body, purpose, node)
        return base64.urlsafe_b64encode(raw).decode().rstrip("=")

    def answered(
        self, statement: ChallengeStatement, signature: str, now: Instant
    ) -> KeyProof | NotProven:
        """Whether the answer proves possession of `statement.public`, for this purpose and for the first time.

        The caller builds the statement from its store (node, key) and route (purpose); only the nonce is the peer's.
        """
        raw = signature_from(signature)
        nonce = _nonce(statement.nonce)
        if raw is None or nonce is None:
            return NotProven.FORM
        if not is_sound(statement.public):
            return NotProven.KEY
        body, tag = nonce[:-_TAG_BYTES], nonce[-_TAG_BYTES:]
        ours = self._tag(body, statement.purpose, statement.node)
        if statement.server != self._server or not hmac.compare_digest(tag, ours):
            return NotProven.FOREIGN
        expires = Instant(int.from_bytes(body[_RANDOM_BYTES:], "big"))
        if now >= expires:
            return NotProven.STALE
        if not _signed(statement.public, raw, statement.message()):
            return NotProven.SIGNATURE
        used = self._memory.take(("challenge", statement.nonce), expires, now)
        return used or KeyProof(thumbprint(statement.public))

    def request(
        self, statement: RequestStatement, header: str, public: bytes, claims: Claims, now: Instant
    ) -> KeyProof | NotProven:
        """Check the proof header of a request, which supplies time and nonce, against the key its token is bound to."""
        proof = parse_request_proof(header)
        raw = signature_from(proof.signature) if proof else None
        if proof is None or raw is None:
            return NotProven.FORM
        if claims.key is None or not hmac.compare_digest(claims.key, thumbprint(public)):
            return NotProven.KEY
        at = proof.at_s * SECOND
        if abs(now - at) > REQUEST_LIFE:
            return NotProven.STALE
        signed = replace(statement, at_s=proof.at_s, nonce=proof.nonce)
        if statement.server != self._server:
            return NotProven.FOREIGN
        if not _signed(public, raw, signed.message()):
            return NotProven.SIGNATURE
        expires = Instant(at + REQUEST_LIFE + SECOND)
        used = self._memory.take((claims.key, proof.nonce), expires, now)
        return used or KeyProof(claims.key)

    def _tag(self, body: bytes, purpose: str, node: str) -> bytes:
        facts = "\0".join((str(purpose), self._server, node)).encode("utf-8", "surrogatepass")
        digest = hmac.new(self._secret, b"gpool challenge 1\0" + body + facts, hashlib.sha256)
        return digest.digest()[:_TAG_BYTES]


def is_sound(public: bytes) -> bool:
    """Whether the key has 32 bytes and is not a point of small order."""
    return len(public) == 32 and public[:31] + bytes([public[31] & 0x7F]) not in _WEAK


def _nonce(text: str) -> bytes | None:
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    canonical = base64.urlsafe_b64encode(raw).decode().rstrip("=")
    return raw if len(raw) == _NONCE_BYTES and canonical == text else None


def _signed(public: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True

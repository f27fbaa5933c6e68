"""Node's Ed25519 key and the statements it signs. Shared with the server.

The signed bytes hold everything a proof is good for: purpose, the server's name *as the node knows it* (never as
the challenge says it), node, key and nonce; or, for one request, its method, path, lease, token and time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gpool.core.errors import Invalid
from gpool.transfer.keys import read_private, write_private

PROOF_HEADER = "Gpool-Proof"
KEY_BYTES = 32
KEY_LETTERS, SIGNATURE_LETTERS = 43, 86
_REQUEST_PROOF = re.compile(r"([0-9]{1,12})\.([A-Za-z0-9_-]{22})\.([A-Za-z0-9_-]{86})")


class Purpose(StrEnum):
    JOIN = "join"  # possession of the key while joining
    CHANNEL = "channel"  # opening the channel
    TOKEN = "token"  # a fresh short-lived token


@dataclass(frozen=True, slots=True)
class ChallengeStatement:
    """`node` is empty while joining: the node has no id yet."""

    purpose: Purpose
    server: str
    node: str
    public: bytes
    nonce: str

    def message(self) -> bytes:
        return _message("challenge", self.purpose, self.server, self.node, self.public, self.nonce)


@dataclass(frozen=True, slots=True)
class RequestStatement:
    server: str
    method: str
    path: str  # with its query
    token: str
    at_s: int
    nonce: str
    lease: str = ""  # the `Gpool-Lease` header, as it is sent

    def message(self) -> bytes:
        digest = hashlib.sha256(self.token.encode("utf-8", "surrogatepass")).digest()
        target = (self.server, self.method, self.path, self.lease)
        return _message("request", *target, digest, str(self.at_s), self.nonce)


def _message(*parts: str | bytes) -> bytes:
    """Encode with lengths first: no two lists of parts encode alike."""
    raw = [
        part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass") for part in parts
    ]
    return b"gpool proof 1\0" + b"".join(len(part).to_bytes(4, "big") + part for part in raw)


class NodeKey:
    """Its private half never leaves the machine."""

    __slots__ = ("_private", "public")

    def __init__(self, seed: bytes) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._private.public_key().public_bytes_raw()

    @staticmethod
    def from_file(path: Path) -> NodeKey:
        """Load the key, creating it if missing; `Invalid` if others could read it."""
        if not path.exists():
            seed = base64.urlsafe_b64encode(secrets.token_bytes(KEY_BYTES)) + b"\n"
            write_private(path, seed, replace=False)
        try:
            raw = base64.urlsafe_b64decode(read_private(path).strip())
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != KEY_BYTES:
            raise Invalid(f"{path} contains no node key; move it away and join again")
        return NodeKey(raw)

    def sign(self, statement: ChallengeStatement | RequestStatement) -> str:
        return _b64(self._private.sign(statement.message()))

    def sign_work(self, message: bytes) -> bytes:
        """Sign the work of a priced lease: the message of a `ReceiptWork`, which begins like no statement."""
        return self._private.sign(message)

    def request_proof(self, statement: RequestStatement) -> str:
        """Value of the `Gpool-Proof` header."""
        return f"{statement.at_s}.{statement.nonce}.{self.sign(statement)}"


def public_text(public: bytes) -> str:
    return _b64(public)


def public_from(text: str) -> bytes | None:
    if len(text) != KEY_LETTERS or not text.isascii():
        return None
    try:
        raw = base64.b64decode(text + "=", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    return raw if _b64(raw) == text else None


def new_nonce() -> str:
    return _b64(secrets.token_bytes(16))


@dataclass(frozen=True, slots=True)
class RequestProof:
    at_s: int
    nonce: str
    signature: str


def parse_request_proof(header: str) -> RequestProof | None:
    match = _REQUEST_PROOF.fullmatch(header)
    return RequestProof(int(match[1]), match[2], match[3]) if match else None


def signature_from(text: str) -> bytes | None:
    if len(text) != SIGNATURE_LETTERS or not text.isascii():
        return None
    try:
        raw = base64.b64decode(text + "==", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    return raw if _b64(raw) == text else None


def _b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")

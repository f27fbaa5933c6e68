"""Addresses, signatures of personal messages (EIP-191), and calls of contract wallets (EIP-1271). No I/O; non-canonical
spellings are rejected.

A message and a key have one signature, up to the counting of v (0, 1 or 27, 28): s is in the lower half (EIP-2),
r and s are scalars of the curve, the text is `0x` and 130 lower-case hex digits.

An answer counts only from a successful call, at the message's address, on its chain.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NewType

from gpool.wallet import crypto
from gpool.wallet.crypto import keccak256
from gpool.wallet.errors import BadAddress, BadKey, BadSignature, shown

Address = NewType("Address", str)
"""`0x` and 40 hex digits with EIP-55 capitals."""

ADDRESS_LENGTH = 20
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}")


def parse(text: str) -> Address:
    if not _ADDRESS.fullmatch(text):
        raise BadAddress(f"{shown(text)} is not an address; one is 0x and 40 hex digits")
    right = _spelled(text[2:].lower())
    if text == right:
        return right
    if text[2:].islower() or text[2:].isupper():
        raise BadAddress(f"{text} has no checksum (EIP-55); write it as {right}")
    raise BadAddress(f"{text} has a wrong checksum (EIP-55): check it for a typing error")


def from_bytes(raw: bytes) -> Address:
    if len(raw) != ADDRESS_LENGTH:
        raise BadAddress(f"an address has {ADDRESS_LENGTH} bytes, not {len(raw)}")
    return _spelled(raw.hex())


def to_bytes(text: Address) -> bytes:
    return bytes.fromhex(text[2:])


def of_public_key(point: bytes) -> Address:
    """Address of an uncompressed public key: x and y, 64 bytes, without the leading 4."""
    if len(point) != 64:
        raise BadAddress(f"a public key has 64 bytes, not {len(point)}")
    return from_bytes(keccak256(point)[-ADDRESS_LENGTH:])


def _spelled(digits: str) -> Address:
    marks = keccak256(digits.encode()).hex()
    return Address(
        "0x"
        + "".join(
            digit.upper() if mark >= "8" else digit
            for digit, mark in zip(digits, marks, strict=False)
        )
    )


SIGNATURE_LENGTH = 65
DIGEST_LENGTH = 32
_PARITY = {0: 0, 1: 1, 27: 0, 28: 1}
_TEXT = re.compile(r"0x[0-9a-f]{130}")
_KEY_TEXT = re.compile(r"(?:0x)?([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class Signature:
    """Low-s signature, checked on construction."""

    r: int
    s: int
    parity: int

    def __post_init__(self) -> None:
        for name, value in (("r", self.r), ("s", self.s)):
            if not 0 < value < crypto.ORDER:
                raise BadSignature(
                    f"{name} of the signature is zero or not below the curve's order"
                )
        if self.s > crypto.ORDER // 2:
            raise BadSignature(
                "s of the signature is in the upper half (EIP-2): a copy of another signature"
            )
        if self.parity not in (0, 1):
            raise BadSignature(f"the signature's parity is {self.parity}, not 0 or 1")

    @classmethod
    def from_bytes(cls, raw: bytes) -> Signature:
        """r, s (32 bytes each) and v (0, 1, 27 or 28)."""
        if len(raw) != SIGNATURE_LENGTH:
            raise BadSignature(f"a signature has {SIGNATURE_LENGTH} bytes, not {len(raw)}")
        parity = _PARITY.get(raw[64])
        if parity is None:
            raise BadSignature(f"v of the signature is {raw[64]}, not 0, 1, 27 or 28")
        return cls(int.from_bytes(raw[:32], "big"), int.from_bytes(raw[32:64], "big"), parity)

    @classmethod
    def parse(cls, text: str) -> Signature:
        if not _TEXT.fullmatch(text):
            raise BadSignature(
                f"{shown(text)} is not a signature; one is 0x and 130 lower-case hex digits"
            )
        return cls.from_bytes(bytes.fromhex(text[2:]))

    def to_bytes(self) -> bytes:
        """v is 27 or 28, as wallets write it."""
        return self._scalars() + bytes([27 + self.parity])

    def __str__(self) -> str:
        return "0x" + self.to_bytes().hex()

    def _scalars(self) -> bytes:
        return self.r.to_bytes(32, "big") + self.s.to_bytes(32, "big")

    def recover(self, digest: bytes) -> Address:
        """Return the signer of this digest. Almost every signature yields some address: compare it."""
        if len(digest) != DIGEST_LENGTH:
            raise BadSignature(f"a digest has {DIGEST_LENGTH} bytes, not {len(digest)}")
        point = crypto.recover(self._scalars() + bytes([self.parity]), digest)
        if point is None:
            raise BadSignature("no key can have made this signature")
        return of_public_key(point)


@dataclass(frozen=True, slots=True)
class WalletKey:
    """Private key: in no repr, error or log."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != 32:
            raise BadKey(f"a private key has 32 bytes, not {len(self.secret)}")
        if not 0 < int.from_bytes(self.secret, "big") < crypto.ORDER:
            raise BadKey("the private key is zero or not below the curve's order")

    @classmethod
    def parse(cls, text: str) -> WalletKey:
        """64 hex digits, with or without 0x. No error repeats the text."""
        found = _KEY_TEXT.fullmatch(text)
        if found is None:
            raise BadKey("a private key is 64 hex digits, with or without 0x before them")
        return cls(bytes.fromhex(found[1]))

    @property
    def address(self) -> Address:
        return of_public_key(crypto.public_key(self.secret))

    def sign(self, message: bytes) -> Signature:
        """Sign as a wallet's `personal_sign`."""
        return Signature.from_bytes(crypto.sign(self.secret, personal_hash(message)))


def personal_hash(message: bytes) -> bytes:
    """EIP-191 version 0x45: the prefix keeps a message from being a transaction."""
    return keccak256(b"\x19Ethereum Signed Message:\n%d" % len(message) + message)


def recover(message: bytes, signature: Signature) -> Address:
    return signature.recover(personal_hash(message))


def verify(message: bytes, signature: Signature, signer: Address) -> bool:
    try:
        return recover(message, signature) == signer
    except BadSignature:
        return False


MAGIC = bytes.fromhex("1626ba7e")
"""Selector of `isValidSignature(bytes32,bytes)` and its positive answer."""

MAX_SIGNATURE_BYTES = 8192
_YES = MAGIC.ljust(32, b"\0")
_HEX = re.compile(r"0x(?:[0-9a-f]{2})*")


def parse_signature(text: str) -> bytes:
    """Any bytes, also none (`0x`), up to a limit."""
    if len(text) > 2 + 2 * MAX_SIGNATURE_BYTES:
        raise BadSignature(f"the signature has more than {MAX_SIGNATURE_BYTES} bytes")
    if not _HEX.fullmatch(text):
        raise BadSignature(
            f"{shown(text)} is not a signature; one is 0x and lower-case hex digits in pairs"
        )
    return bytes.fromhex(text[2:])


def call_data(digest: bytes, signature: bytes) -> bytes:
    if len(digest) != 32:
        raise BadSignature(f"a digest has 32 bytes, not {len(digest)}")
    if len(signature) > MAX_SIGNATURE_BYTES:
        raise BadSignature(f"the signature has more than {MAX_SIGNATURE_BYTES} bytes")
    tail = signature + bytes(-len(signature) % 32)
    return MAGIC + digest + _word(0x40) + _word(len(signature)) + tail


def says_yes(answer: bytes) -> bool:
    """Exactly the magic value and 28 zero bytes. An address without code answers nothing."""
    return answer == _YES


def _word(number: int) -> bytes:
    return number.to_bytes(32, "big")

"""EIP-191 personal messages: hash, sign, recover. Non-canonical signatures are rejected.

A message and a key have one signature, up to the counting of v (0, 1 or 27, 28): s is in the lower half (EIP-2),
r and s are scalars of the curve, the text is `0x` and 130 lower-case hex digits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from gpool.wallet import address, curve
from gpool.wallet.address import Address
from gpool.wallet.errors import BadKey, BadSignature, shown
from gpool.wallet.keccak import keccak256

LENGTH = 65
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
            if not 0 < value < curve.ORDER:
                raise BadSignature(
                    f"{name} of the signature is zero or not below the curve's order"
                )
        if self.s > curve.ORDER // 2:
            raise BadSignature(
                "s of the signature is in the upper half (EIP-2): a copy of another signature"
            )
        if self.parity not in (0, 1):
            raise BadSignature(f"the signature's parity is {self.parity}, not 0 or 1")

    @classmethod
    def from_bytes(cls, raw: bytes) -> Signature:
        """r, s (32 bytes each) and v (0, 1, 27 or 28)."""
        if len(raw) != LENGTH:
            raise BadSignature(f"a signature has {LENGTH} bytes, not {len(raw)}")
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
        point = curve.recover(self._scalars() + bytes([self.parity]), digest)
        if point is None:
            raise BadSignature("no key can have made this signature")
        return address.of_public_key(point)


@dataclass(frozen=True, slots=True)
class WalletKey:
    """Private key: in no repr, error or log."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != 32:
            raise BadKey(f"a private key has 32 bytes, not {len(self.secret)}")
        if not 0 < int.from_bytes(self.secret, "big") < curve.ORDER:
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
        return address.of_public_key(curve.public_key(self.secret))

    def sign(self, message: bytes) -> Signature:
        """Sign as a wallet's `personal_sign`."""
        return Signature.from_bytes(curve.sign(self.secret, personal_hash(message)))


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

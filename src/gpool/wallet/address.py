"""Addresses: 20 bytes in contracts, EIP-55 text elsewhere. Every other spelling is rejected."""

from __future__ import annotations

import re
from typing import NewType

from gpool.wallet.errors import BadAddress, shown
from gpool.wallet.keccak import keccak256

Address = NewType("Address", str)
"""`0x` and 40 hex digits with EIP-55 capitals."""

LENGTH = 20
_HEX = re.compile(r"0x[0-9a-fA-F]{40}")


def parse(text: str) -> Address:
    if not _HEX.fullmatch(text):
        raise BadAddress(f"{shown(text)} is not an address; one is 0x and 40 hex digits")
    right = _spelled(text[2:].lower())
    if text == right:
        return right
    if text[2:].islower() or text[2:].isupper():
        raise BadAddress(f"{text} has no checksum (EIP-55); write it as {right}")
    raise BadAddress(f"{text} has a wrong checksum (EIP-55): check it for a typing error")


def from_bytes(raw: bytes) -> Address:
    if len(raw) != LENGTH:
        raise BadAddress(f"an address has {LENGTH} bytes, not {len(raw)}")
    return _spelled(raw.hex())


def to_bytes(address: Address) -> bytes:
    return bytes.fromhex(address[2:])


def of_public_key(point: bytes) -> Address:
    """Address of an uncompressed public key: x and y, 64 bytes, without the leading 4."""
    if len(point) != 64:
        raise BadAddress(f"a public key has 64 bytes, not {len(point)}")
    return from_bytes(keccak256(point)[-LENGTH:])


def _spelled(digits: str) -> Address:
    marks = keccak256(digits.encode()).hex()
    return Address(
        "0x"
        + "".join(
            digit.upper() if mark >= "8" else digit
            for digit, mark in zip(digits, marks, strict=False)
        )
    )

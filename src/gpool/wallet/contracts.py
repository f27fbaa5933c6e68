"""EIP-1271: call to a contract wallet and its answer, encoded and decoded. No I/O.

An answer counts only from a successful call, at the message's address, on its chain.
"""

from __future__ import annotations

import re

from gpool.wallet.errors import BadSignature, shown

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

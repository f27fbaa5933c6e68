"""EIP-1271, the pure halves: what to ask a contract wallet, and how to read its answer. Dialling the chain is the server's.

The answer counts only from a call that succeeded, at the address in the message, on the message's chain.
"""

from __future__ import annotations

import re

from gpool.wallet.errors import BadSignature, shown

MAGIC = bytes.fromhex("1626ba7e")
"""Both the selector of `isValidSignature(bytes32,bytes)` and what it answers for yes."""

MAX_SIGNATURE_BYTES = 8192
_YES = MAGIC.ljust(32, b"\0")
_HEX = re.compile(r"0x(?:[0-9a-f]{2})*")


def parse_signature(text: str) -> bytes:
    """A contract's signature is its own affair: any bytes, none included (`0x`), up to a limit."""
    if len(text) > 2 + 2 * MAX_SIGNATURE_BYTES:
        raise BadSignature(f"the signature has more than {MAX_SIGNATURE_BYTES} bytes")
    if not _HEX.fullmatch(text):
        raise BadSignature(
            f"{shown(text)} is not a signature; one is 0x and lower-case hex digits in pairs"
        )
    return bytes.fromhex(text[2:])


def call_data(digest: bytes, signature: bytes) -> bytes:
    """The ABI encoding of `isValidSignature(digest, signature)`."""
    if len(digest) != 32:
        raise BadSignature(f"a digest has 32 bytes, not {len(digest)}")
    if len(signature) > MAX_SIGNATURE_BYTES:
        raise BadSignature(f"the signature has more than {MAX_SIGNATURE_BYTES} bytes")
    tail = signature + bytes(-len(signature) % 32)
    return MAGIC + digest + _word(0x40) + _word(len(signature)) + tail


def says_yes(answer: bytes) -> bool:
    """Exactly one word: the magic value, then 28 zero bytes. An address without code answers nothing, which is a no."""
    return answer == _YES


def _word(number: int) -> bytes:
    return number.to_bytes(32, "big")

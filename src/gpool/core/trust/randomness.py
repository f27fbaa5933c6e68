"""Keyed randomness: draws that nodes cannot predict and the server can repeat. Pure.

A draw is HMAC-SHA-256 of a purpose and integers under a secret of the server. It depends on nothing a node can vary to
its advantage except its commitment, and without the secret a node cannot evaluate the effect of a commitment.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from enum import Enum

PPM = 1_000_000
"""Probabilities are integers in millionths."""

_SIXTY_FOUR_BITS = 1 << 64


class DrawPurpose(Enum):
    """Separation of draws: equal integers give independent draws for different purposes."""

    SPOT = b"gpool.spot\0"
    SIBLING = b"gpool.sibling\0"
    AUDIT = b"gpool.audit\0"


def draw(
    secret: bytes, purpose: DrawPurpose, numbers: Sequence[int], committed: bytes = b""
) -> int:
    """Return a number uniform in 0 … 2^64 - 1; `numbers` are 64-bit ids or counters."""
    message = purpose.value + struct.pack(f">{len(numbers)}Q", *numbers) + committed
    return int.from_bytes(hmac.digest(secret, message, "sha256")[:8])


def below(drawn: int, limit: int) -> int:
    """Map a draw to 0 … limit - 1; the bias is at most limit / 2^64."""
    return drawn * limit // _SIXTY_FOUR_BITS


def happens(drawn: int, probability_ppm: int) -> bool:
    """Return whether an event of this probability occurs for this draw."""
    return drawn * PPM < probability_ppm * _SIXTY_FOUR_BITS

"""Progress that a task reports: a fraction and a short text, in millionths on the wire. Neither task nor node is trusted.

A progress file of a command is plain text; its last line counts: `0.4 epoch 4`, or `40% epoch 4`.
"""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

from gpool.core.model import Instant
from gpool.core.terminal import printable

WHOLE = 1_000_000
MAX_FILE_BYTES = 4096
"""Bytes read at the end of a progress file."""
MAX_NUMBER_LETTERS = 40


class StoredProgress(NamedTuple):
    """`epoch`: the attempt that reported it."""

    epoch: int
    millionths: int
    at: Instant
    text: str


def millionths(fraction: float) -> int:
    """Fraction in millionths, limited to 0 to 1; 0 for what is no number."""
    return round(min(max(fraction, 0.0), 1.0) * WHOLE) if fraction == fraction else 0


def checked(value: int, text: str) -> tuple[int, str]:
    """Fraction and text as they are stored: within limits, without control characters."""
    return min(max(value, 0), WHOLE), printable(text)


def parsed(data: bytes) -> tuple[int, str] | None:
    """Progress in the last line of a progress file that is not blank; None: the line does not begin with a number."""
    lines = data[-MAX_FILE_BYTES:].decode("utf-8", "replace").strip().splitlines()
    word, _, text = (lines[-1] if lines else "").strip().partition(" ")
    scale = 0.01 if word.endswith("%") else 1.0
    try:
        fraction = float(word.removesuffix("%")[:MAX_NUMBER_LETTERS]) * scale
    except ValueError:
        return None
    return checked(millionths(fraction), text.strip()) if isfinite(fraction) else None


def stored_text(progress: StoredProgress) -> str:
    return " ".join(map(str, progress))


def from_stored(text: str) -> StoredProgress:
    epoch, value, at, said = text.split(" ", 3)
    return StoredProgress(int(epoch), int(value), Instant(int(at)), said)

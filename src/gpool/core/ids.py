"""Ids: 63-bit integers inside, prefixed text outside. New ids come from an `IdSource`."""

from __future__ import annotations

from typing import NewType, Protocol

from gpool.core.errors import Invalid

TaskId = NewType("TaskId", int)
BatchId = NewType("BatchId", int)
SpecId = NewType("SpecId", int)
NodeId = NewType("NodeId", int)
GpuId = NewType("GpuId", int)
UserId = NewType("UserId", int)

# Crockford's alphabet: no i, l, o, u; sorts as the numbers do.
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
DIGITS = 13  # 13 x 5 bits hold 63
_PAIRS = [first + second for first in ALPHABET for second in ALPHABET]
_VALUE = {letter: number for number, letter in enumerate(ALPHABET)}
PREFIXES = {
    "task": "t",
    "batch": "b",
    "node": "n",
    "gpu": "g",
    "user": "u",
    "key": "k",
    "team": "tm",
    "reservation": "rs",
    "account": "ac",
    "receipt": "rc",
    "event": "ev",
    "webhook": "wh",
    "notice": "nt",
}


class IdSource(Protocol):
    """Increasing ids, never repeated, safe with many replicas."""

    def next(self) -> int: ...

    def take(self, count: int) -> range | list[int]: ...


def encode(kind: str, number: int) -> str:
    """Format an id: `encode("task", 7)` is `t-0000000000007`. Fixed width: text sorts like ids."""
    return (
        f"{PREFIXES[kind]}-{ALPHABET[number >> 60 & 31]}{_PAIRS[number >> 50 & 1023]}"
        f"{_PAIRS[number >> 40 & 1023]}{_PAIRS[number >> 30 & 1023]}{_PAIRS[number >> 20 & 1023]}"
        f"{_PAIRS[number >> 10 & 1023]}{_PAIRS[number & 1023]}"
    )


def decode(kind: str, text: str) -> int:
    """Parse an id; raise `Invalid` with an example."""
    prefix = PREFIXES[kind] + "-"
    body = text.removeprefix(prefix)
    if not text.startswith(prefix) or len(body) != DIGITS:
        raise Invalid(f"{text[:40]!r} is not a {kind} id; one looks like {prefix}{'0' * DIGITS}")
    number = 0
    for letter in body:
        value = _VALUE.get(letter)
        if value is None:
            raise Invalid(f"{text[:40]!r} is not a {kind} id: {letter!r} is not a letter of an id")
        number = number << 5 | value
    if number >= 1 << 63:
        raise Invalid(f"{text[:40]!r} is not a {kind} id: the number is too large")
    return number

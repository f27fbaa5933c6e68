"""Ids as text, thousands at once: neighbours share all but their last letters. Says the same as `core.ids.encode`."""

from __future__ import annotations

from collections.abc import Iterable

from gpool.core.ids import ALPHABET, encode

_LAST_TWO = [a + b for a in ALPHABET for b in ALPHABET]


def spell(kind: str, numbers: Iterable[int]) -> list[str]:
    spelled = []
    stem, stem_of = "", -1
    for number in numbers:
        high = number >> 10
        if high != stem_of:
            stem_of, stem = high, encode(kind, number)[:-2]
        spelled.append(stem + _LAST_TWO[number & 1023])
    return spelled

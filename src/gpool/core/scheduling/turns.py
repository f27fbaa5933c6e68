"""Who is looked at in a pass when very many wait: some of them, and within so many passes all. It orders and decides nothing.

A pass has to end soon however many shapes wait, so past a number of them it looks at a part. Users come first, then each
one's shapes, so that nobody is passed over for what another has submitted. Of either, those that have waited longest and those
that came last are looked at in every pass, the others in turn: what stands first stays in sight until it starts, what is new
starts at once where there is room, and nobody is left out for longer than it takes to go round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def some(those: Mapping[K, V], most: int, turn: int) -> Iterator[tuple[K, int]]:
    """At most so many of them, each with how often it was its turn: a third from either end, the rest in turn."""
    count = len(those)
    if count <= most:
        for each in those:
            yield each, turn
        return
    first, last = (most + 1) // 3, most // 3
    for each in islice(those, first):
        yield each, turn
    between = list(islice(those, first, count - last))
    step = most - first - last
    for place in range(turn * step, (turn + 1) * step):
        yield between[place % len(between)], place // len(between)
    for each in islice(those, count - last, None):
        yield each, turn


def shared_out(
    those: Mapping[K, Mapping[V, object]], most: int, turn: int
) -> Iterator[tuple[K, V]]:
    """Of everyone's at most so many in all: of nobody less than two, or than they have, so that others have more."""
    owners = list(some(those, max(1, most // 2), turn))
    owners.sort(key=lambda owner: len(those[owner[0]]))
    left = most
    for place, (owner, times) in enumerate(owners):
        for each, _ in some(those[owner], left // (len(owners) - place), times):
            left -= 1
            yield owner, each


def next_of(those: Mapping[K, Mapping[V, object]], count: int, turn: int) -> dict[K, V]:
    """Of so many owners, in turn, one of each: theirs in turn as well."""
    found = {}
    if those:
        owners = list(those)
        for place in range(turn * count, turn * count + min(count, len(owners))):
            theirs, times = those[owners[place % len(owners)]], place // len(owners)
            found[owners[place % len(owners)]] = next(islice(theirs, times % len(theirs), None))
    return found

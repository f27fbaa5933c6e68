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


def some(those: Mapping[K, V], most: int, turn: int, stride: int = 0) -> dict[K, int]:
    """At most so many of them, each with how often it was its turn: a third from either end, the rest in turn.

    `stride`: how far to go in a turn, where `most` is not always the same; all that are looked at, if not given.
    """
    count = len(those)
    if count <= most:
        return dict.fromkeys(those, turn)
    names = list(those)
    first, last = (most + 1) // 3, most // 3
    found = dict.fromkeys(names[:first], turn)
    step = most - first - last
    for place in range(turn * (stride or step), turn * (stride or step) + step):
        found.setdefault(names[place % count], place // count)
    for each in names[count - last :]:
        found.setdefault(each, turn)
    return found


def shared_out(
    those: Mapping[K, Mapping[V, object]], most: int, turn: int
) -> Iterator[tuple[K, V]]:
    """Of everyone's at most so many in all: of nobody less than two, or than they have, so that others have more."""
    owners = list(some(those, max(1, most // 2), turn).items())
    owners.sort(key=lambda owner: len(those[owner[0]]))
    left = most
    for place, (owner, times) in enumerate(owners):
        found = some(those[owner], left // (len(owners) - place), times, 1)
        left -= len(found)
        for each in found:
            yield owner, each


def next_of(those: Mapping[K, Mapping[V, object]], count: int, turn: int) -> dict[K, V]:
    """Of so many owners, in turn, one of each: theirs in turn as well."""
    owners = list(those)
    count = min(count, len(owners))
    found = {}
    for place in range(turn * count, (turn + 1) * count):
        owner, times = owners[place % len(owners)], place // len(owners)
        found[owner] = next(islice(those[owner], times % len(those[owner]), None))
    return found

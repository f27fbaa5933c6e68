"""The audit log's chain: every entry carries a hash over the one before it, so none can be changed or taken out unseen.

Pure. Appending is the store's: one row per entry with `sequence` as its primary key, the hash linked to the row before
it inside the same transaction, so two replicas that append at once collide on `sequence` and the later one tries again.

The chain alone shows changes to somebody who knows its head. Whoever can rewrite the whole table could also link it
anew, or cut off its end; so heads are put where that person cannot reach (`AuditAnchor`: the log, a notice to operators,
the nightly backup) and a check takes the anchors along.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpool.core.model import Instant

LABEL = b"gpool audit 1\n"
GENESIS = hashlib.sha256(LABEL).digest()
"""What the first entry is linked to."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Who did what, when, from where, and whether it was allowed. `facts` hold no secrets: names, ids, scopes."""

    sequence: int  # 1, 2, … without a gap
    at: Instant
    actor: str  # `u-…`, `n-…` or "" for nobody
    action: str
    thing: str
    outcome: str
    address: str
    facts: tuple[tuple[str, str], ...] = ()  # sorted by name, no name twice


@dataclass(frozen=True, slots=True)
class AuditLink:
    entry: AuditEntry
    hash: bytes


@dataclass(frozen=True, slots=True)
class AuditAnchor:
    """A head that was put out of reach."""

    sequence: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class ChainIntact:
    """Nothing is wrong up to here."""

    head: AuditAnchor


@dataclass(frozen=True, slots=True)
class ChainBroken:
    """The first place that is wrong; everything before it is as it was written."""

    sequence: int
    why: str


def facts(given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Facts in the order entries keep them."""
    return tuple(sorted(given.items()))


def canonical(entry: AuditEntry) -> bytes:
    """One spelling per entry and no other: an array in fixed order, ASCII, no blanks."""
    fields = [
        entry.sequence,
        int(entry.at),
        entry.actor,
        entry.action,
        entry.thing,
        entry.outcome,
        entry.address,
        [list(fact) for fact in entry.facts],
    ]
    return json.dumps(fields, ensure_ascii=True, separators=(",", ":")).encode()


def link(previous_hash: bytes, entry: AuditEntry) -> bytes:
    """The entry's hash. Fixed-length parts come first, so nothing can slide from one part into the next."""
    return hashlib.sha256(LABEL + previous_hash + canonical(entry)).digest()


def appended(head: AuditAnchor | None, entry: AuditEntry) -> AuditLink:
    """The entry linked to the head; raises when it is not the next one."""
    sequence, previous = (head.sequence, head.hash) if head else (0, GENESIS)
    if entry.sequence != sequence + 1:
        raise AssertionError(f"entry {entry.sequence} cannot follow {sequence}")
    if entry.facts != facts(dict(entry.facts)):
        raise AssertionError(
            f"the facts of entry {entry.sequence} are not sorted, or name one twice"
        )
    return AuditLink(entry, link(previous, entry))


def check(
    links: Iterable[AuditLink],
    start: AuditAnchor | None = None,
    anchors: Iterable[AuditAnchor] = (),
) -> ChainIntact | ChainBroken:
    """Walks the links in order, from the beginning or from a head known to be good; finds the first that is wrong."""
    pinned = {anchor.sequence: anchor.hash for anchor in anchors}
    sequence, previous = (start.sequence, start.hash) if start else (0, GENESIS)
    for found in links:
        entry = found.entry
        if entry.sequence != sequence + 1:
            return ChainBroken(
                sequence + 1, f"entry {sequence + 1} is missing; {entry.sequence} follows"
            )
        if found.hash != link(previous, entry):
            return ChainBroken(entry.sequence, f"entry {entry.sequence} is not what was written")
        if pinned.get(entry.sequence, found.hash) != found.hash:
            return ChainBroken(
                entry.sequence, f"entry {entry.sequence} is not the one that was anchored"
            )
        sequence, previous = entry.sequence, found.hash
    beyond = [number for number in pinned if number > sequence]
    if beyond:
        return ChainBroken(
            sequence + 1, f"the log ends at {sequence}; entry {min(beyond)} was anchored"
        )
    return ChainIntact(AuditAnchor(sequence, previous))

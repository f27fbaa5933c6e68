"""Hash chain of the audit log: every entry's hash covers the previous one, so changes and deletions show. Pure.

`sequence` is the primary key: of two replicas that append at once one fails and retries. An intruder with write
access can relink or truncate the whole table; so heads are also copied outside (`AuditAnchor`: logs, notices,
backups) and checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpool.core.model import SECOND, Instant
from gpool.server.identity.throttle import network_of

LABEL = b"gpool audit 1\n"
GENESIS = hashlib.sha256(LABEL).digest()
"""Hash before the first entry."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An action with its outcome. `facts` (names, ids, scopes) hold no secrets."""

    sequence: int  # 1, 2, … without a gap
    at: Instant
    actor: str  # `u-…`, `n-…`, or "" for an anonymous caller
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
    sequence: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class ChainIntact:
    head: AuditAnchor


@dataclass(frozen=True, slots=True)
class ChainBroken:
    sequence: int
    why: str


class RecentReads:
    """Reads recorded within the last hour: an operator that polls an object leaves one row per hour."""

    def __init__(self, span: int = 3600 * SECOND, most: int = 10_000) -> None:
        self._span, self._most = span, most
        self._until: dict[tuple[int, str, str], int] = {}

    def is_new(self, actor: int, action: str, thing: str, now: Instant) -> bool:
        key = (actor, action, thing)
        if self._until.get(key, now) > now:
            return False
        if len(self._until) >= self._most:
            self._until.clear()  # further rows are recorded rather than fewer
        self._until[key] = now + self._span
        return True


def facts(given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(given.items()))


def canonical(entry: AuditEntry) -> bytes:
    """Canonical bytes: a JSON array in fixed order, ASCII, no white space."""
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
    """Hash of the entry. Fixed-length parts come first, so the input is unambiguous."""
    return hashlib.sha256(LABEL + previous_hash + canonical(entry)).digest()


def appended(head: AuditAnchor | None, entry: AuditEntry) -> AuditLink:
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
    pinned: dict[int, set[bytes]] = {}  # several anchors of one entry must all fit
    for anchor in anchors:
        pinned.setdefault(anchor.sequence, set()).add(anchor.hash)
    sequence, previous = (start.sequence, start.hash) if start else (0, GENESIS)
    for found in links:
        entry = found.entry
        if entry.sequence != sequence + 1:
            return ChainBroken(
                sequence + 1, f"entry {sequence + 1} is missing; {entry.sequence} follows"
            )
        if found.hash != link(previous, entry):
            return ChainBroken(entry.sequence, f"entry {entry.sequence} was changed")
        if pinned.get(entry.sequence, {found.hash}) != {found.hash}:
            return ChainBroken(entry.sequence, f"entry {entry.sequence} differs from its anchor")
        sequence, previous = entry.sequence, found.hash
    beyond = [number for number in pinned if number > sequence]
    if beyond:
        return ChainBroken(
            sequence + 1, f"the log ends at {sequence}, but entry {min(beyond)} was anchored"
        )
    return ChainIntact(AuditAnchor(sequence, previous))


# ---- refused sign-ins

OK, REFUSED = "ok", "refused"
EXPIRED = "audit.expire"
"""Action of the entry that names the last expired entry before it (`through`, `hash`)."""
SINGLE_ENTRIES = 3
"""Refused sign-ins of one address and minute that are recorded one by one."""
MOST_NETWORKS = 64
"""Addresses of one minute that are told apart; refusals from further ones are one count."""
_MINUTE = 60 * SECOND


class RefusedSignIns:
    """Refused sign-ins as counts per minute and address: anonymous requests must not fill the append-only log."""

    def __init__(self) -> None:
        self._minute = 0
        self._counts: dict[str, int] = {}

    def add(self, at: Instant, address: str, via: str, thing: str) -> list[AuditEntry]:
        """Count a refusal; return the entries to append now, those of earlier minutes included."""
        found = self.take(at)
        self._minute = at // _MINUTE
        network = network_of(address)
        if network not in self._counts and len(self._counts) >= MOST_NETWORKS:
            network = ""
        self._counts[network] = self._counts.get(network, 0) + 1
        if network and self._counts[network] <= SINGLE_ENTRIES:
            members = facts({"via": via})
            found.append(AuditEntry(0, at, "", "sign_in", thing, REFUSED, address, members))
        return found

    def take(self, at: Instant) -> list[AuditEntry]:
        """Counts of a minute that is over, one entry per address."""
        if at // _MINUTE == self._minute:
            return []
        ended = Instant((self._minute + 1) * _MINUTE)
        counts, self._counts = self._counts, {}
        entries = []
        for network, count in counts.items():
            more = count - SINGLE_ENTRIES if network else count
            if more > 0:
                members = facts({"count": str(more)})
                where = network or "other addresses"
                entries.append(
                    AuditEntry(0, ended, "", "sign_in", "further attempts", REFUSED, where, members)
                )
        return entries

"""The audit log: append-only, numbers without gaps; `identity.audit` chains the hashes.

Appending locks the head until the commit (on PostgreSQL its row), so it comes last in an operation. The oldest entries
expire; the last expired one is kept as the start of the chain, and an entry of the chain says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

import msgspec

from gpool.core.model import SECOND, Instant, Span
from gpool.server.identity.audit import (
    EXPIRED,
    OK,
    AuditAnchor,
    AuditEntry,
    AuditLink,
    appended,
    facts,
)
from gpool.server.store.generated_rows import AuditHeadRecord, AuditRecord
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import relation_columns, select, storable

COLUMNS = ", ".join(AuditRecord._fields)
START = 2
"""Row of `audit_head` that has the last expired entry."""
SLACK = Span(86_400 * SECOND)
"""Entries expire in portions of a day: each portion leaves an entry."""


def _plain(text: str) -> str:
    """The text as both databases can store it; this text is hashed."""
    return storable(text.encode("utf-8", "replace").decode())


def _storable(entry: AuditEntry, sequence: int) -> AuditEntry:
    return replace(
        entry,
        sequence=sequence,
        actor=_plain(entry.actor),
        action=_plain(entry.action),
        thing=_plain(entry.thing),
        outcome=_plain(entry.outcome),
        address=_plain(entry.address),
        facts=facts({_plain(name): _plain(value) for name, value in entry.facts}),
    )


def append_all(entries: Sequence[AuditEntry]) -> Operation[int]:
    """Append as the last step of another operation; assigns sequences, returns the last."""
    head = yield from _head("/*postgresql FOR UPDATE*/")
    if not entries:
        return head.sequence if head else 0
    linked: list[AuditRecord] = []
    for entry in entries:
        link = appended(head, _storable(entry, head.sequence + 1 if head else 1))
        head = AuditAnchor(link.entry.sequence, link.hash)
        linked.append(_row(link))
    yield Statement(
        f"INSERT INTO audit ({COLUMNS}) SELECT {COLUMNS} FROM {{entries}} AS e",  # noqa: S608
        {},
        {"entries": Relation(relation_columns(AuditRecord), linked)},
    )
    assert head is not None
    yield Statement(
        "UPDATE audit_head SET number = :number, hash = :hash WHERE id = 1",
        {"number": head.sequence, "hash": head.hash},
    )
    return head.sequence


@operation
def append(entries: Sequence[AuditEntry]) -> Operation[int]:
    return (yield from append_all(entries))


@operation
def entries(after: int, limit: int) -> Operation[tuple[AuditLink, ...]]:
    rows = yield from select(
        AuditRecord,
        f"SELECT {COLUMNS} FROM audit WHERE number > :after ORDER BY number LIMIT :limit",  # noqa: S608
        {"after": after, "limit": limit},
    )
    return tuple(_link(row) for row in rows)


@operation
def newest(before: int | None, limit: int) -> Operation[tuple[AuditLink, ...]]:
    rows = yield from select(
        AuditRecord,
        f"SELECT {COLUMNS} FROM audit WHERE number < :before ORDER BY number DESC LIMIT :limit",  # noqa: S608
        {"before": (1 << 63) - 1 if before is None else before, "limit": limit},
    )
    return tuple(_link(row) for row in rows)


class _AuditTime(NamedTuple):
    number: int
    at: Instant
    hash: bytes


@operation
def forget_entries(before: Instant, at: Instant, limit: int) -> Operation[int]:
    """Delete up to `limit` entries that are older than `before` and older than all others; return their number.

    `audit_head` keeps the last of them, and a new entry names it: a log that was cut otherwise does not verify.
    """
    yield from _head("/*postgresql FOR UPDATE*/")
    oldest = yield from select(
        _AuditTime,
        "SELECT number, at, hash FROM audit ORDER BY number LIMIT :limit",
        {"limit": limit},
    )
    if not oldest or oldest[0].at >= before - SLACK:
        return 0
    expired = list(takewhile(lambda row: row.at < before, oldest))
    last = expired[-1]
    yield Statement("DELETE FROM audit WHERE number <= :number", {"number": last.number})
    yield Statement(
        "INSERT INTO audit_head (id, number, hash) VALUES (:id, :number, :hash) "
        "ON CONFLICT (id) DO UPDATE SET number = excluded.number, hash = excluded.hash",
        {"id": START, "number": last.number, "hash": last.hash},
    )
    told = facts({"through": str(last.number), "hash": bytes(last.hash).hex()})
    yield from append_all([AuditEntry(0, at, "", EXPIRED, "audit", OK, "", told)])
    return len(expired)


@operation
def start() -> Operation[AuditAnchor | None]:
    """Last expired entry, with which the chain begins; None: none has expired."""
    rows = yield from select(
        AuditHeadRecord, "SELECT id, number, hash FROM audit_head WHERE id = :id", {"id": START}
    )
    return AuditAnchor(rows[0].number, bytes(rows[0].hash or b"")) if rows else None


@operation
def head() -> Operation[AuditAnchor | None]:
    return (yield from _head(""))


def _head(lock: str) -> Operation[AuditAnchor | None]:
    [row] = yield from select(
        AuditHeadRecord,
        f"SELECT id, number, hash FROM audit_head WHERE id = 1 {lock}",  # noqa: S608
    )
    return None if row.hash is None else AuditAnchor(row.number, bytes(row.hash))


def _row(link: AuditLink) -> AuditRecord:
    entry = link.entry
    return AuditRecord(
        entry.sequence,
        entry.at,
        entry.actor,
        entry.action,
        entry.thing,
        entry.outcome,
        entry.address,
        msgspec.json.encode(entry.facts).decode(),
        link.hash,
    )


def _link(row: AuditRecord) -> AuditLink:
    facts = msgspec.json.decode(row.facts, type=tuple[tuple[str, str], ...])
    entry = AuditEntry(
        row.number, row.at, row.actor, row.action, row.thing, row.outcome, row.address, facts
    )
    return AuditLink(entry, bytes(row.hash))

"""The audit record: appended to, read, never changed. Numbers have no gaps; `identity.audit` links each entry to the last.

Whoever appends locks the head to the commit, on PostgreSQL by its row; so appending comes last in an operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from gpool.server.identity.audit import AuditAnchor, AuditEntry, AuditLink, appended, facts
from gpool.server.store.operation import operation
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.rows import storable

ENTRIES = (
    ("number", "int"),
    ("at", "int"),
    ("actor", "text"),
    ("action", "text"),
    ("thing", "text"),
    ("outcome", "text"),
    ("address", "text"),
    ("facts", "text"),
    ("hash", "blob"),
)
COLUMNS = ", ".join(name for name, _ in ENTRIES)


def _plain(text: str) -> str:
    """As both databases can hold it: it is this text that is hashed."""
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
    """For other operations to include, as their last step. Whatever `sequence` the entries have, they get the next."""
    rows = yield Statement(
        "SELECT number, hash FROM audit_head WHERE id = 1 /*postgresql FOR UPDATE*/"
    )
    head = _anchor(rows[0])
    if not entries:
        return rows[0][0] if head else 0
    linked: list[Row] = []
    for entry in entries:
        link = appended(head, _storable(entry, head.sequence + 1 if head else 1))
        head = AuditAnchor(link.entry.sequence, link.hash)
        linked.append(_row(link))
    yield Statement(
        f"INSERT INTO audit ({COLUMNS}) SELECT {COLUMNS} FROM {{entries}} AS e",  # noqa: S608
        {},
        {"entries": Relation(ENTRIES, linked)},
    )
    assert head is not None
    yield Statement(
        "UPDATE audit_head SET number = :number, hash = :hash WHERE id = 1",
        {"number": head.sequence, "hash": head.hash},
    )
    return head.sequence


@operation
def append(entries: Sequence[AuditEntry]) -> Operation[int]:
    """In this order; gives the last number."""
    return (yield from append_all(entries))


@operation
def entries(after: int, limit: int) -> Operation[tuple[AuditLink, ...]]:
    rows = yield Statement(
        f"SELECT {COLUMNS} FROM audit WHERE number > :after ORDER BY number LIMIT :limit",  # noqa: S608
        {"after": after, "limit": limit},
    )
    return tuple(_link(row) for row in rows)


@operation
def newest(before: int | None, limit: int) -> Operation[tuple[AuditLink, ...]]:
    """Backwards, for a page."""
    rows = yield Statement(
        f"SELECT {COLUMNS} FROM audit WHERE number < :before ORDER BY number DESC LIMIT :limit",  # noqa: S608
        {"before": (1 << 63) - 1 if before is None else before, "limit": limit},
    )
    return tuple(_link(row) for row in rows)


@operation
def head() -> Operation[AuditAnchor | None]:
    """None while the record is empty."""
    rows = yield Statement("SELECT number, hash FROM audit_head WHERE id = 1")
    return _anchor(rows[0])


def _anchor(row: Row) -> AuditAnchor | None:
    return None if row[1] is None else AuditAnchor(row[0], bytes(row[1]))


def _row(link: AuditLink) -> Row:
    entry = link.entry
    told = msgspec.json.encode(entry.facts).decode()
    return (
        entry.sequence,
        entry.at,
        entry.actor,
        entry.action,
        entry.thing,
        entry.outcome,
        entry.address,
        told,
        link.hash,
    )


def _link(row: Row) -> AuditLink:
    told = msgspec.json.decode(row[7], type=tuple[tuple[str, str], ...])
    number, at, actor, action, thing, outcome, address = row[:7]
    entry = AuditEntry(number, at, actor, action, thing, outcome, address, told)
    return AuditLink(entry, bytes(row[8]))

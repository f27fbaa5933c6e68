"""The audit log: append-only, numbers without gaps; `identity.audit` chains the hashes.

Appending locks the head until the commit (on PostgreSQL its row), so it comes last in an operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from gpool.server.identity.audit import AuditAnchor, AuditEntry, AuditLink, appended, facts
from gpool.server.store.generated_rows import AuditHeadRecord, AuditRecord
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import relation_columns, select, storable

COLUMNS = ", ".join(AuditRecord._fields)


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

"""Readings of GPUs and tasks that replicas exchange: a few rows a minute for each. Nothing here runs on SQLite."""

from __future__ import annotations

from collections.abc import Mapping

from gpool.core.model import Instant
from gpool.server.store.generated_rows import ReadingsRecord
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import columns, select

READING = columns(ReadingsRecord, ReadingsRecord, "r")
SEEN = (("id", "int"), ("number", "int"))


@operation
def put(row: ReadingsRecord, forget_before: Instant) -> Operation[None]:
    """Store a row, and delete those of all replicas that are too old to be read."""
    yield Statement(
        "INSERT INTO readings (replica_id, number, at, body) VALUES (:replica, :number, :at, :body)",
        {"replica": row.replica_id, "number": row.number, "at": row.at, "body": row.body},
    )
    yield Statement("DELETE FROM readings WHERE at < :before", {"before": forget_before})


@operation
def of_others(replica: int, seen: Mapping[int, int]) -> Operation[tuple[ReadingsRecord, ...]]:
    """Rows of other replicas, in order; `seen`: by replica, the last number that was read."""
    rows = yield from select(
        ReadingsRecord,
        f"SELECT {READING} FROM readings r LEFT JOIN {{seen}} AS s ON s.id = r.replica_id "  # noqa: S608
        "WHERE r.replica_id <> :replica AND r.number > COALESCE(s.number, 0) ORDER BY r.at, r.number",
        {"replica": replica},
        {"seen": Relation(SEEN, sorted(seen.items()))},
    )
    return tuple(rows)

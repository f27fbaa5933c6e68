"""History of the keys that sign receipts: it only grows, and only its newest key can sign."""

from __future__ import annotations

from collections.abc import Collection

from gpool.core.errors import Conflict
from gpool.server.store.generated_rows import ReceiptKeysRecord
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.server.store.rows import columns, exists, select, values

RECEIPT_KEYS_LOCK = 0x67707265637074  # "gprecpt"
RECEIPT_KEY = columns(ReceiptKeysRecord, ReceiptKeysRecord, "k")


@operation
def receipt_keys() -> Operation[tuple[ReceiptKeysRecord, ...]]:
    """All keys, oldest first."""
    rows = yield from select(
        ReceiptKeysRecord,
        f"SELECT {RECEIPT_KEY} FROM receipt_keys k ORDER BY k.from_ms",  # noqa: S608
    )
    return tuple(
        row._replace(sealed=None if row.sealed is None else bytes(row.sealed)) for row in rows
    )


@operation
def put_receipt_key(key: ReceiptKeysRecord, known: Collection[str]) -> Operation[None]:
    """Add the next key and erase the private halves of all others.

    `Conflict` unless `known` are all the others: of two concurrent rotations one succeeds.
    """
    # rows that another transaction adds cannot be locked, so an advisory lock comes before the read
    yield Statement(f"SELECT 1 /*postgresql FROM pg_advisory_xact_lock({RECEIPT_KEYS_LOCK})*/")  # noqa: S608
    ids = yield from values(str, "SELECT id FROM receipt_keys")
    if set(ids) != set(known):
        raise Conflict("another request has just replaced the receipt key; try again")
    newer = yield from exists(
        "SELECT 1 FROM receipts r WHERE r.issued_at >= :from_us LIMIT 1",
        {"from_us": key.from_ms * 1000},
    )
    if newer:  # the older key has just signed it, and must have been valid then
        raise Conflict("a receipt was issued at this moment; try again")
    yield Statement("UPDATE receipt_keys SET sealed = NULL WHERE sealed IS NOT NULL")
    yield Statement(
        "INSERT INTO receipt_keys (id, sealed, public, from_ms, endorsement) "
        "VALUES (:id, :sealed, :public, :from_ms, :endorsement)",
        key._asdict(),
    )

"""Receipts: signatures of ended leases, and the receipts issued for posted charges."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import msgspec

from gpool.core.errors import Conflict
from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Instant
from gpool.server.store.generated_rows import ReceiptsRecord
from gpool.server.store.operations.identity.receipt_keys import RECEIPT_KEYS_LOCK
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import (
    columns,
    exists,
    insert,
    of_ids,
    relation_columns,
    select,
    values,
)
from gpool.wallet.receipt_keys import NO_RESULT, ReceiptGpu, result_hash
from gpool.wire.frames import Finished, Hold, Released, ReportItem, SignedGpu

RECEIPT = columns(ReceiptsRecord, ReceiptsRecord, "r")
LEASES = (("task", "int"), ("epoch", "int"), ("node", "int"))


class _NewSignature(NamedTuple):
    task_id: int
    epoch: int
    node_id: int
    node_key: str
    signature: bytes
    result: str
    gpus: str
    at: int
    path: bytes | None


class _NodeKey(NamedTuple):
    id: NodeId
    public_key: str


@lru_cache(maxsize=4096)
def _stored_gpus(gpus: tuple[SignedGpu, ...]) -> str:
    """JSON of GPUs; a node reports the same ones with each of its leases."""
    return msgspec.json.encode(
        [ReceiptGpu(each.gpu, each.model, each.slice) for each in gpus]
    ).decode()


def put_signatures(
    reported: Iterable[tuple[NodeId, ReportItem]],
    refused: Collection[tuple[NodeId, Hold]],
    at: Instant,
) -> Operation[None]:
    """Keep the signatures of reported ends, with their node's key, as a step of the operation that records them.

    They are verified when the receipt is issued: the path of reports does not wait for it.
    """
    ends: list[tuple[NodeId, Finished | Released]] = [
        (node, item)
        for node, item in reported
        if (type(item) is Finished or type(item) is Released)
        and item.work is not None
        and (node, Hold(item.task, item.epoch)) not in refused
    ]
    if not ends:
        return
    found = yield from select(
        _NodeKey,
        "SELECT n.id, n.public_key FROM {nodes} AS i JOIN nodes n ON n.id = i.id WHERE n.public_key IS NOT NULL",
        {},
        {"nodes": of_ids(node for node, _ in ends)},
    )
    keys = {row.id: row.public_key for row in found}
    rows: dict[tuple[int, int, int], _NewSignature] = {}
    for node, item in ends:
        work = item.work
        if work is None or node not in keys:
            continue
        result = NO_RESULT
        if type(item) is Finished:
            files = [(file.path, file.sha256) for file in item.outputs]
            result = result_hash(item.value, item.value_sha256, files)
        gpus, path = _stored_gpus(work.gpus), work.path or None
        key = (item.task, item.epoch, node)
        rows[key] = _NewSignature(*key, keys[node], work.signature, result, gpus, at, path)
    if rows:
        conflict = "ON CONFLICT (task_id, epoch, node_id) DO NOTHING"
        yield insert("work_signatures", _NewSignature, list(rows.values()), conflict)


# ---- issuing


class IssuableCharge(NamedTuple):
    """A posted charge without a receipt, with the node's signature."""

    task_id: TaskId
    epoch: int
    node_id: NodeId
    payer_id: int
    owner_id: int
    started_at: Instant | None
    ended_at: Instant
    charged_us: int
    microcredits: int
    fee: int
    rate: int
    reason: str
    transfer_id: str
    node_key: str
    signature: bytes
    result: str
    gpus: str
    charged_gpus: str
    path: bytes | None


@operation
def has_issuable() -> Operation[bool]:
    return (
        yield from exists(
            "SELECT 1 FROM charges c WHERE c.state = 'posted' AND c.vests_at IS NULL LIMIT 1"
        )
    )


@operation
def has_signatures(before: Instant) -> Operation[bool]:
    sql = "SELECT 1 FROM work_signatures s WHERE s.at < :before LIMIT 1"
    return (yield from exists(sql, {"before": before}))


@operation
def issuable(limit: int) -> Operation[tuple[IssuableCharge, ...]]:
    """Posted charges without a receipt, oldest first."""
    rows = yield from select(
        IssuableCharge,
        "SELECT c.task_id, c.epoch, c.node_id, c.payer_id, c.owner_id, c.started_at, c.ended_at, c.charged_us, "
        "c.microcredits, c.fee, c.rate, c.reason, c.transfer_id, s.node_key, s.signature, s.result, s.gpus, "
        "c.gpus, s.path FROM charges c JOIN work_signatures s ON s.task_id = c.task_id AND s.epoch = c.epoch "
        "AND s.node_id = c.node_id WHERE c.state = 'posted' AND c.vests_at IS NULL "
        "ORDER BY c.ended_at, c.task_id LIMIT :limit",
        {"limit": limit},
    )
    return tuple(
        row._replace(signature=bytes(row.signature), path=bytes(row.path or b"")) for row in rows
    )


@dataclass(frozen=True, slots=True)
class IssuedReceipts:
    """`key`: id of the receipt key that signed them. `window_us`: from the end of a lease until its earning vests."""

    key: str
    rows: Sequence[ReceiptsRecord]
    window_us: int


@operation
def put_receipts(issued: IssuedReceipts) -> Operation[None]:
    """Store receipts and let their earnings vest; `Conflict` if another key signs by now."""
    # a rotation that commits meanwhile would make these receipts older than their key's successor
    yield Statement(f"SELECT 1 /*postgresql FROM pg_advisory_xact_lock({RECEIPT_KEYS_LOCK})*/")  # noqa: S608
    newest = yield from values(str, "SELECT id FROM receipt_keys ORDER BY from_ms DESC LIMIT 1")
    if newest != [issued.key]:
        raise Conflict("the receipt key was replaced; the receipts are signed again")
    names = ", ".join(ReceiptsRecord._fields)
    rows = {"rows": Relation(relation_columns(ReceiptsRecord), issued.rows)}
    yield Statement(
        f"INSERT INTO receipts ({names}) SELECT {names} FROM {{rows}} AS r WHERE TRUE "  # noqa: S608
        "ON CONFLICT (task_id, epoch, node_id) DO NOTHING",
        {},
        rows,
    )
    leases = [(row.task_id, row.epoch, row.node_id) for row in issued.rows]
    yield Statement(
        "UPDATE charges SET vests_at = charges.ended_at + :window FROM {leases} AS l "
        "WHERE charges.task_id = l.task AND charges.epoch = l.epoch AND charges.node_id = l.node "
        "AND charges.state = 'posted' AND charges.vests_at IS NULL",
        {"window": issued.window_us},
        {"leases": Relation(LEASES, leases)},
    )
    yield from _delete_signatures(leases)


def _delete_signatures(leases: Sequence[tuple[int, int, int]]) -> Operation[None]:
    yield Statement(
        "DELETE FROM work_signatures WHERE EXISTS (SELECT 1 FROM {leases} AS l WHERE l.task = work_signatures.task_id "
        "AND l.epoch = work_signatures.epoch AND l.node = work_signatures.node_id)",
        {},
        {"leases": Relation(LEASES, sorted(leases))},
    )


@operation
def reject_signatures(leases: Sequence[tuple[int, int, int]]) -> Operation[None]:
    """Delete signatures, (task, epoch, node) each, that are not those of their work."""
    yield from _delete_signatures(leases)


class _SignedLease(NamedTuple):
    task_id: int
    epoch: int
    node_id: int


@operation
def forget_signatures(before: Instant, limit: int) -> Operation[int]:
    """Delete old signatures of leases that get no receipt any more: free, void, or reported again; return their number."""
    rows = yield from select(
        _SignedLease,
        "SELECT s.task_id, s.epoch, s.node_id FROM work_signatures s WHERE s.at < :before AND NOT EXISTS "
        "(SELECT 1 FROM charges c WHERE c.task_id = s.task_id AND c.epoch = s.epoch AND c.node_id = s.node_id "
        "AND c.state IN ('metered', 'held', 'posted') AND c.vests_at IS NULL) ORDER BY s.at LIMIT :limit",
        {"before": before, "limit": limit},
    )
    if rows:
        yield Statement(
            "DELETE FROM work_signatures WHERE EXISTS (SELECT 1 FROM {leases} AS l WHERE l.task = work_signatures.task_id "
            "AND l.epoch = work_signatures.epoch AND l.node = work_signatures.node_id)",
            {},
            {"leases": Relation(LEASES, [tuple(row) for row in rows])},
        )
    return len(rows)


# ---- reading


@dataclass(frozen=True, slots=True)
class ReceiptQuery:
    """Receipts of these accounts, as payer or owner; `before`: older than this receipt."""

    accounts: Sequence[int]
    before: int
    limit: int
    task: TaskId | None = None
    month: int | None = None


@operation
def receipts(query: ReceiptQuery) -> Operation[tuple[ReceiptsRecord, ...]]:
    """Receipts, newest first."""
    narrowed = "" if query.task is None else "AND r.task_id = :task "
    narrowed += "" if query.month is None else "AND r.month = :month "
    parts = [
        f"SELECT {RECEIPT} FROM {{accounts}} AS i JOIN receipts r ON r.{column} = i.id "  # noqa: S608
        f"WHERE r.id < :before {narrowed}"
        for column in ("payer_id", "owner_id")
    ]
    parameters: dict[str, object] = {"before": query.before, "limit": query.limit}
    if query.task is not None:
        parameters["task"] = query.task
    if query.month is not None:
        parameters["month"] = query.month
    rows = yield from select(
        ReceiptsRecord,
        f"{' UNION '.join(parts)} ORDER BY 1 DESC LIMIT :limit",
        parameters,
        {"accounts": of_ids(query.accounts)},
    )
    return tuple(row._replace(body=bytes(row.body)) for row in rows)


@operation
def receipt(id_: int) -> Operation[ReceiptsRecord | None]:
    rows = yield from select(
        ReceiptsRecord,
        f"SELECT {RECEIPT} FROM receipts r WHERE r.id = :id",  # noqa: S608
        {"id": id_},
    )
    return rows[0]._replace(body=bytes(rows[0].body)) if rows else None


class _Body(NamedTuple):
    id: int
    body: bytes


@operation
def bodies(month: int, after: int, limit: int) -> Operation[tuple[int, tuple[bytes, ...]]]:
    """Receipts issued in a month, by id: the last id and the canonical bytes; none: 0."""
    rows = yield from select(
        _Body,
        "SELECT r.id, r.body FROM receipts r WHERE r.month = :month AND r.id > :after ORDER BY r.id LIMIT :limit",
        {"month": month, "after": after, "limit": limit},
    )
    return (rows[-1].id if rows else 0), tuple(bytes(row.body) for row in rows)

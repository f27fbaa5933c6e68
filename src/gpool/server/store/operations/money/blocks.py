"""Sealing of transfers into blocks, and the pages that verification reads.

A transfer is sealed after its commit, by a loop of the leader: no transaction that moves money waits for a head of the
chain. A page of verification is complete in itself, so that a serving pool can be verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpool.core.model import Instant
from gpool.core.money.blocks import BookedTransfer, LedgerBlock, SealedEntry, sealed
from gpool.core.money.ledger import LedgerEntry, PendingTransfer, RecordedTransfer
from gpool.core.money.transfers import LedgerAccountId, TransferId, TransferKind
from gpool.core.money.verification import LedgerFinding, PendingRecord, SpendingRecord
from gpool.server.store.generated_rows import (
    LedgerAccountsRecord,
    LedgerBlocksRecord,
    PendingTransfersRecord,
)
from gpool.server.store.operations.money.transfers import ACCOUNT, PENDING, pending_of
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import columns, exists, of_names, relation_columns, select

BLOCK = columns(LedgerBlocksRecord, LedgerBlocksRecord, "b")


class TransferRow(NamedTuple):
    id: str
    kind: str
    at: Instant
    digest: str
    refers_to: str | None


TRANSFER = "t.id, t.kind, t.at, t.digest, t.refers_to"


class _Place(NamedTuple):
    id: str
    leaf: int


class _EntryRow(NamedTuple):
    transfer_id: str
    account_id: int
    kind: str
    sequence: int
    amount: int
    balance: int


def _booked(rows: Sequence[TransferRow]) -> Operation[list[BookedTransfer]]:
    """Add the entries to transfers whose kinds are known."""
    if not rows:
        return []
    found = yield from select(
        _EntryRow,
        "SELECT e.transfer_id, e.account_id, a.kind, e.sequence, e.amount, e.balance FROM {names} AS n "
        "JOIN ledger_entries e ON e.transfer_id = n.name JOIN ledger_accounts a ON a.id = e.account_id "
        "ORDER BY e.transfer_id, e.account_id, e.sequence",
        {},
        {"names": of_names(row.id for row in rows)},
    )
    by_transfer: dict[str, list[SealedEntry]] = {row.id: [] for row in rows}
    for entry in found:
        by_transfer[entry.transfer_id].append(SealedEntry(*entry[1:]))
    return [BookedTransfer(_recorded(row), tuple(by_transfer[row.id])) for row in rows]


def _recorded(row: TransferRow) -> RecordedTransfer:
    refers = None if row.refers_to is None else TransferId(row.refers_to)
    return RecordedTransfer(TransferId(row.id), TransferKind(row.kind), row.at, row.digest, refers)


# ---- sealing


@operation
def has_unsealed() -> Operation[bool]:
    return (yield from exists("SELECT 1 FROM ledger_transfers WHERE block IS NULL LIMIT 1"))


@operation
def seal(at: Instant, limit: int) -> Operation[int]:
    """Seal up to `limit` transfers into the next block, oldest first; return their number."""
    rows = yield from select(
        TransferRow,
        f"SELECT {TRANSFER} FROM ledger_transfers t WHERE t.block IS NULL ORDER BY t.at, t.id LIMIT :limit",  # noqa: S608
        {"limit": limit},
    )
    if not rows:
        return 0
    booked = yield from _booked(rows)
    block = sealed((yield from _head()), booked, at)
    yield Statement(
        "INSERT INTO ledger_blocks (number, previous, root, transfers, sealed_at, hash) "
        "VALUES (:number, :previous, :root, :transfers, :at, :hash)",
        {
            "number": block.number,
            "previous": block.previous,
            "root": block.root,
            "transfers": block.transfers,
            "at": block.sealed_at,
            "hash": block.hash,
        },
    )
    places = [_Place(row.id, leaf) for leaf, row in enumerate(rows)]
    yield Statement(
        "UPDATE ledger_transfers SET block = :number, leaf = p.leaf FROM {places} AS p "
        "WHERE ledger_transfers.id = p.id AND ledger_transfers.block IS NULL",
        {"number": block.number},
        {"places": Relation(relation_columns(_Place), places)},
    )
    return len(rows)


@operation
def head() -> Operation[LedgerBlock | None]:
    return (yield from _head())


def _head() -> Operation[LedgerBlock | None]:
    rows = yield from select(
        LedgerBlocksRecord,
        f"SELECT {BLOCK} FROM ledger_blocks b ORDER BY b.number DESC LIMIT 1",  # noqa: S608
    )
    return LedgerBlock(*rows[0]) if rows else None


# ---- pages of verification


@dataclass(frozen=True, slots=True)
class BookedPage:
    """Transfers with the pending transfers that they make or resolve. `unknown`: those of an unknown kind."""

    transfers: tuple[BookedTransfer, ...]
    pending: dict[TransferId, PendingTransfer]
    unknown: tuple[LedgerFinding, ...]
    last: str

    def pending_of(self, transfer: RecordedTransfer) -> PendingTransfer | None:
        about = transfer.id if transfer.kind is TransferKind.RESERVE else transfer.refers_to
        return None if about is None else self.pending.get(about)


@operation
def block(number: int) -> Operation[tuple[LedgerBlock, BookedPage] | None]:
    """The first block from `number` on, with its transfers; None: there is none."""
    blocks = yield from select(
        LedgerBlocksRecord,
        f"SELECT {BLOCK} FROM ledger_blocks b WHERE b.number >= :number ORDER BY b.number LIMIT 1",  # noqa: S608
        {"number": number},
    )
    if not blocks:
        return None
    found = LedgerBlock(*blocks[0])
    rows = yield from select(
        TransferRow,
        f"SELECT {TRANSFER} FROM ledger_transfers t WHERE t.block = :number "  # noqa: S608
        "AND t.leaf >= 0 AND t.leaf < :transfers ORDER BY t.leaf",
        {"number": found.number, "transfers": found.transfers},
    )
    return found, (yield from _page(rows))


@operation
def unsealed(after: str, limit: int) -> Operation[BookedPage]:
    """Transfers that no block has: those of the last seconds, and any whose block is gone."""
    rows = yield from select(
        TransferRow,
        f"SELECT {TRANSFER} FROM ledger_transfers t WHERE t.id > :after AND (t.block IS NULL "  # noqa: S608
        "OR NOT EXISTS (SELECT 1 FROM ledger_blocks b WHERE b.number = t.block)) ORDER BY t.id LIMIT :limit",
        {"after": after, "limit": limit},
    )
    return (yield from _page(rows))


def _page(rows: Sequence[TransferRow]) -> Operation[BookedPage]:
    kinds = set(TransferKind.__members__.values())
    known = [row for row in rows if row.kind in kinds]
    booked = yield from _booked(known)
    about = {row.id for row in known} | {row.refers_to for row in known if row.refers_to}
    pending = yield from select(
        PendingTransfersRecord,
        f"SELECT {PENDING} FROM {{names}} AS n JOIN pending_transfers p ON p.id = n.name",  # noqa: S608
        {},
        {"names": of_names(about)},
    )
    return BookedPage(
        tuple(booked),
        {TransferId(row.id): pending_of(row) for row in pending},
        tuple(
            LedgerFinding(f"transfer {row.id}", f"{row.kind!r} is no kind of transfer")
            for row in rows
            if row.kind not in kinds
        ),
        rows[-1].id if rows else "",
    )


@operation
def orphans() -> Operation[tuple[LedgerFinding, ...]]:
    """Rows that name a missing one, or differ from it: a block, transfer, account, month of spending or charge."""
    findings: list[LedgerFinding] = []
    for thing, why, sql in ORPHANS:
        rows = yield from select(_Orphan, sql)
        findings += [LedgerFinding(f"{thing} {row.id}", why) for row in rows]
    return tuple(findings)


class _Orphan(NamedTuple):
    id: str


ORPHANS = (
    (
        "transfer",
        "the block that it was sealed in is missing",
        "SELECT t.id FROM ledger_transfers t WHERE t.block IS NOT NULL AND NOT EXISTS "
        "(SELECT 1 FROM ledger_blocks b WHERE b.number = t.block) ORDER BY t.id LIMIT 20",
    ),
    (
        "entry",
        "its transfer is missing",
        "SELECT CAST(e.account_id AS TEXT) || '/' || CAST(e.sequence AS TEXT) FROM ledger_entries e WHERE NOT EXISTS "
        "(SELECT 1 FROM ledger_transfers t WHERE t.id = e.transfer_id) ORDER BY 1 LIMIT 20",
    ),
    (
        "entry",
        "its account is missing",
        "SELECT CAST(e.account_id AS TEXT) || '/' || CAST(e.sequence AS TEXT) FROM ledger_entries e WHERE NOT EXISTS "
        "(SELECT 1 FROM ledger_accounts a WHERE a.id = e.account_id) ORDER BY 1 LIMIT 20",
    ),
    (
        "account",
        "its holder has it, and it is missing or of another kind",
        "SELECT CAST(h.account_id AS TEXT) FROM ledger_holders h WHERE NOT EXISTS (SELECT 1 FROM ledger_accounts a "
        "WHERE a.id = h.account_id AND a.kind = h.purpose) ORDER BY 1 LIMIT 20",
    ),
    (
        "pending transfer",
        "its spending is not recorded",
        "SELECT p.id FROM pending_transfers p WHERE NOT EXISTS (SELECT 1 FROM ledger_spending s "
        "WHERE s.account_id = p.payer_id AND s.month = p.month) ORDER BY 1 LIMIT 20",
    ),
    (
        "transfer",
        "its postings to owner and fee differ from the charges that it paid",
        "SELECT c.transfer_id FROM charges c WHERE c.transfer_id IS NOT NULL GROUP BY c.transfer_id HAVING "
        "SUM(c.microcredits) <> (SELECT COALESCE(SUM(e.amount), 0) FROM ledger_entries e JOIN ledger_accounts a "
        "ON a.id = e.account_id WHERE e.transfer_id = c.transfer_id AND a.kind IN ('owner', 'fee')) OR SUM(c.fee) <> "
        "(SELECT COALESCE(SUM(e.amount), 0) FROM ledger_entries e WHERE e.transfer_id = c.transfer_id "
        "AND e.account_id = 2) ORDER BY 1 LIMIT 20",
    ),
    (
        "charge",
        "it is posted, and names no transfer; or the other way round",
        "SELECT CAST(c.task_id AS TEXT) || '/' || CAST(c.epoch AS TEXT) FROM charges c WHERE "
        "(c.state IN ('metered', 'held', 'void')) <> (c.transfer_id IS NULL) ORDER BY 1 LIMIT 20",
    ),
    (
        "charge",
        "the funds that it counts on are not set aside",
        "SELECT CAST(c.task_id AS TEXT) || '/' || CAST(c.epoch AS TEXT) FROM charges c WHERE c.state IN ('metered', 'held') "
        "AND NOT EXISTS (SELECT 1 FROM pending_transfers p WHERE p.id = c.reserve_id AND p.resolved_by IS NULL) "
        "ORDER BY 1 LIMIT 20",
    ),
    (
        "meter",
        "it charged more than is set aside, or its allocation has no lease and it is open",
        "SELECT CAST(m.task_id AS TEXT) || '/' || CAST(m.epoch AS TEXT) FROM meters m WHERE m.charged > m.reserved "
        "OR m.closed_at IS NULL AND NOT EXISTS (SELECT 1 FROM tasks t WHERE t.holding = 1 AND t.node_id = m.node_id "
        "AND t.allocation_number = m.number) AND NOT EXISTS (SELECT 1 FROM tasks t WHERE t.id = m.task_id "
        "AND t.epoch = m.epoch AND t.holding = 1 AND t.node_id IS NULL) ORDER BY 1 LIMIT 20",
    ),
)


@operation
def accounts(after: int, limit: int) -> Operation[tuple[LedgerAccountsRecord, ...]]:
    rows = yield from select(
        LedgerAccountsRecord,
        f"SELECT {ACCOUNT} FROM ledger_accounts a WHERE a.id > :after ORDER BY a.id LIMIT :limit",  # noqa: S608
        {"after": after, "limit": limit},
    )
    return tuple(rows)


@operation
def account_entries(
    account: LedgerAccountId, after: int, limit: int
) -> Operation[tuple[LedgerEntry, ...]]:
    rows = yield from select(
        LedgerEntry,
        "SELECT e.account_id, e.sequence, e.transfer_id, e.amount, e.balance FROM ledger_entries e "
        "WHERE e.account_id = :account AND e.sequence > :after ORDER BY e.sequence LIMIT :limit",
        {"account": account, "after": after, "limit": limit},
    )
    return tuple(rows)


@operation
def pending_records(after: str, limit: int) -> Operation[tuple[PendingRecord, ...]]:
    """Pending transfers by id, each with the transfers that reserved and resolved it."""
    pending = yield from select(
        PendingTransfersRecord,
        f"SELECT {PENDING} FROM pending_transfers p WHERE p.id > :after ORDER BY p.id LIMIT :limit",  # noqa: S608
        {"after": after, "limit": limit},
    )
    names = of_names(row.id for row in pending)
    rows = yield from select(
        TransferRow,
        f"SELECT {TRANSFER} FROM {{names}} AS n JOIN ledger_transfers t ON t.id = n.name AND t.kind = 'reserve' "  # noqa: S608
        f"UNION ALL SELECT {TRANSFER} FROM {{names}} AS n JOIN ledger_transfers t ON t.refers_to = n.name "
        "AND t.kind IN ('post', 'void', 'expire')",
        {},
        {"names": names},
    )
    booked = yield from _booked(rows)
    made = {each.transfer.id: each for each in booked if each.transfer.refers_to is None}
    resolved: dict[str, list[BookedTransfer]] = {}
    for each in booked:
        if each.transfer.kind is not TransferKind.RESERVE and each.transfer.refers_to is not None:
            resolved.setdefault(each.transfer.refers_to, []).append(each)
    return tuple(
        PendingRecord(pending_of(row), made.get(TransferId(row.id)), _ordered(resolved, row.id))
        for row in pending
    )


def _ordered(resolved: dict[str, list[BookedTransfer]], id_: str) -> tuple[BookedTransfer, ...]:
    found: Iterable[BookedTransfer] = resolved.get(id_, ())
    return tuple(sorted(found, key=lambda each: each.transfer.id))


class _SpendingRow(NamedTuple):
    account_id: int
    month: int
    stored: int
    computed: int


@operation
def spending_records(after: tuple[int, int], limit: int) -> Operation[tuple[SpendingRecord, ...]]:
    rows = yield from select(
        _SpendingRow,
        "SELECT s.account_id, s.month, s.amount, CAST(COALESCE((SELECT SUM(p.amount - p.returned) "
        "FROM pending_transfers p WHERE p.payer_id = s.account_id AND p.month = s.month), 0) AS BIGINT) "
        "FROM ledger_spending s WHERE s.account_id > :account OR (s.account_id = :account AND s.month > :month) "
        "ORDER BY s.account_id, s.month LIMIT :limit",
        {"account": after[0], "month": after[1], "limit": limit},
    )
    return tuple(
        SpendingRecord(LedgerAccountId(row.account_id), row.month, row.stored, row.computed)
        for row in rows
    )

"""Transfers of the ledger, many in one statement. `core.money.ledger` decides; this module reads what it needs and writes.

`record_transfers` is a step of other operations: a charge is written in the transaction of the event that caused it, so
that neither exists without the other. Rows are locked in one order (pending transfers, then accounts, each by id), and
everything that the decision depends on is read after the locks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpool.core.model import Instant
from gpool.core.money.budgets import BudgetWarning
from gpool.core.money.ledger import (
    Charge,
    LedgerAccount,
    LedgerChanges,
    LedgerView,
    PendingTransfer,
    Spending,
    apply,
    apply_bundles,
)
from gpool.core.money.transfers import (
    FEE,
    TREASURY,
    AccountKind,
    Expire,
    Forfeit,
    Grant,
    LedgerAccountId,
    Payout,
    Post,
    Refund,
    Reserve,
    TransferId,
    TransferOutcome,
    TransferRequest,
    Vest,
    Void,
    month_of,
)
from gpool.server.store.generated_rows import (
    LedgerAccountsRecord,
    LedgerEntriesRecord,
    LedgerSpendingRecord,
    PendingTransfersRecord,
)
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import columns, exists, of_ids, of_names, relation_columns, select

ACCOUNT = columns(LedgerAccountsRecord, LedgerAccountsRecord, "a")
PENDING = columns(PendingTransfersRecord, PendingTransfersRecord, "p")
EXPIRY_PREFIX = "expire:"


@dataclass(frozen=True, slots=True)
class RecordedTransfers:
    """`outcomes`: in the order of the requests. `warnings`: payers that reached 80 % or all of their budget."""

    outcomes: tuple[TransferOutcome, ...]
    warnings: tuple[BudgetWarning, ...]


def record_transfers(
    requests: Sequence[TransferRequest], at: Instant
) -> Operation[RecordedTransfers]:
    """Record transfers as a step of another operation; refused ones write nothing and are named by their outcome.

    A caller that must not do its own write without the transfer looks at the outcomes first: this step comes before.
    """
    changes = apply((yield from _view(requests, at)), requests, at)
    yield from _write(changes)
    return RecordedTransfers(changes.outcomes, changes.warnings)


def record_bundles(
    bundles: Sequence[Sequence[TransferRequest]], at: Instant
) -> Operation[RecordedTransfers]:
    """Record bundles, each whole or not at all; `outcomes` has one for each bundle, MOVED also if it was repeated."""
    requests = [each for bundle in bundles for each in bundle]
    if not requests:
        return RecordedTransfers(tuple(TransferOutcome.MOVED for _ in bundles), ())
    changes, outcomes = apply_bundles((yield from _view(requests, at)), bundles, at)
    yield from _write(changes)
    return RecordedTransfers(outcomes, changes.warnings)


def _view(requests: Sequence[TransferRequest], at: Instant) -> Operation[LedgerView]:
    pending = yield from _pending(requests)
    payers = yield from _charge_payers(requests)
    accounts = yield from _accounts(_named_accounts(requests, pending.values(), payers.values()))
    return LedgerView(
        accounts,
        pending,
        (yield from _digests(requests)),
        (yield from _charges(payers)),
        (yield from _spending(requests, at)),
    )


@operation
def record(requests: Sequence[TransferRequest], at: Instant) -> Operation[RecordedTransfers]:
    return (yield from record_transfers(requests, at))


@operation
def has_expired(at: Instant) -> Operation[bool]:
    return (
        yield from exists(
            "SELECT 1 FROM pending_transfers p WHERE p.resolved_by IS NULL AND p.expires_at <= :at LIMIT 1",
            {"at": at},
        )
    )


@operation
def expire_pending(at: Instant, limit: int) -> Operation[int]:
    """Return funds of up to `limit` pending transfers whose time is over; return their number."""
    rows = yield from select(
        _TransferName,
        "SELECT p.id FROM pending_transfers p WHERE p.resolved_by IS NULL AND p.expires_at <= :at "
        "ORDER BY p.expires_at, p.id LIMIT :limit",
        {"at": at, "limit": limit},
    )
    expiries = [Expire(TransferId(EXPIRY_PREFIX + row.id), TransferId(row.id)) for row in rows]
    if expiries:
        yield from record_transfers(expiries, at)
    return len(expiries)


# ---- reading


class _TransferName(NamedTuple):
    id: str


class _KnownDigest(NamedTuple):
    id: str
    digest: str


class _ChargeRow(NamedTuple):
    id: str
    payer_id: int
    amount: int


class _ReturnedRow(NamedTuple):
    """Sums of a charge: forfeited, and returned to its payer by refunds and forfeits."""

    id: str
    forfeited: int
    returned: int


class _BudgetRow(NamedTuple):
    account_id: int
    cap: int
    spent: int


def _pending(
    requests: Sequence[TransferRequest],
) -> Operation[dict[TransferId, PendingTransfer]]:
    names = [each.pending for each in requests if isinstance(each, Post | Void | Expire)]
    if not names:
        return {}
    rows = yield from select(
        PendingTransfersRecord,
        f"SELECT {PENDING} FROM {{names}} AS n JOIN pending_transfers p ON p.id = n.name "  # noqa: S608
        "/*postgresql ORDER BY p.id FOR UPDATE OF p*/",
        {},
        {"names": of_names(names)},
    )
    return {TransferId(row.id): pending_of(row) for row in rows}


def pending_of(row: PendingTransfersRecord) -> PendingTransfer:
    return PendingTransfer(
        TransferId(row.id),
        LedgerAccountId(row.payer_id),
        LedgerAccountId(row.account_id),
        row.amount,
        row.month,
        row.expires_at,
        None if row.resolved_by is None else TransferId(row.resolved_by),
        row.returned,
    )


def _charge_payers(requests: Sequence[TransferRequest]) -> Operation[dict[TransferId, Charge]]:
    """Charges that are refunded or forfeited, without their refunds."""
    names = [each.charge for each in requests if isinstance(each, Refund | Forfeit)]
    if not names:
        return {}
    rows = yield from select(
        _ChargeRow,
        "SELECT t.id, p.payer_id, p.amount - p.returned FROM {names} AS n JOIN ledger_transfers t ON t.id = n.name "
        "JOIN pending_transfers p ON p.id = t.refers_to WHERE t.kind = 'post'",
        {},
        {"names": of_names(names)},
    )
    return {TransferId(row.id): Charge(LedgerAccountId(row.payer_id), row.amount) for row in rows}


def _charges(payers: dict[TransferId, Charge]) -> Operation[dict[TransferId, Charge]]:
    """The same charges with their refunds so far; the payers' accounts are locked by now."""
    if not payers:
        return {}
    rows = yield from select(
        _ReturnedRow,
        "SELECT n.name, "
        "CAST(COALESCE(SUM(CASE WHEN e.amount < 0 AND t.kind = 'forfeit' THEN -e.amount END), 0) AS BIGINT), "
        "CAST(COALESCE(SUM(CASE WHEN e.amount > 0 AND e.account_id <> :treasury THEN e.amount END), 0) AS BIGINT) "
        "FROM {names} AS n JOIN ledger_transfers t ON t.refers_to = n.name AND t.kind IN ('refund', 'forfeit') "
        "JOIN ledger_entries e ON e.transfer_id = t.id GROUP BY n.name",
        {"treasury": TREASURY},
        {"names": of_names(payers)},
    )
    found = {row.id: row for row in rows}
    none = _ReturnedRow("", 0, 0)
    return {
        id_: Charge(
            charge.payer,
            charge.amount,
            found.get(id_, none).returned,
            found.get(id_, none).forfeited,
        )
        for id_, charge in payers.items()
    }


def _named_accounts(
    requests: Sequence[TransferRequest],
    pending: Iterable[PendingTransfer],
    charges: Iterable[Charge],
) -> set[LedgerAccountId]:
    found = {each.payer for each in charges}
    for resolved in pending:
        found |= {resolved.payer, resolved.account}
    for request in requests:
        match request:
            case Grant():
                found |= {TREASURY, request.to}
            case Refund():
                found.add(TREASURY)
            case Reserve():
                found |= {request.payer, request.pending}
            case Post():
                found |= {posting.account for posting in request.postings}
            case Vest():
                found |= {request.vesting, request.owner}
            case Payout():
                found |= {request.owner, request.paid}
            case Forfeit():
                found |= {request.vesting, FEE, TREASURY}
            case Void() | Expire():
                pass
    return found


def _accounts(
    named: Iterable[LedgerAccountId],
) -> Operation[dict[LedgerAccountId, LedgerAccount]]:
    rows = yield from select(
        LedgerAccountsRecord,
        f"SELECT {ACCOUNT} FROM {{ids}} AS i JOIN ledger_accounts a ON a.id = i.id "  # noqa: S608
        "/*postgresql ORDER BY a.id FOR UPDATE OF a*/",
        {},
        {"ids": of_ids(named)},
    )
    return {LedgerAccountId(row.id): account_of(row) for row in rows}


def account_of(row: LedgerAccountsRecord) -> LedgerAccount:
    return LedgerAccount(LedgerAccountId(row.id), AccountKind(row.kind), row.balance, row.sequence)


def _digests(requests: Sequence[TransferRequest]) -> Operation[dict[TransferId, str]]:
    rows = yield from select(
        _KnownDigest,
        "SELECT t.id, t.digest FROM {names} AS n JOIN ledger_transfers t ON t.id = n.name",
        {},
        {"names": of_names(each.id for each in requests)},
    )
    return {TransferId(row.id): row.digest for row in rows}


def _spending(
    requests: Sequence[TransferRequest], at: Instant
) -> Operation[dict[LedgerAccountId, Spending]]:
    payers = {each.payer for each in requests if isinstance(each, Reserve)}
    if not payers:
        return {}
    rows = yield from select(
        _BudgetRow,
        "SELECT b.account_id, b.cap, COALESCE(s.amount, 0) FROM {ids} AS i "
        "JOIN budgets b ON b.account_id = i.id "
        "LEFT JOIN ledger_spending s ON s.account_id = b.account_id AND s.month = :month",
        {"month": month_of(at)},
        {"ids": of_ids(payers)},
    )
    return {LedgerAccountId(row.account_id): Spending(row.cap, row.spent) for row in rows}


# ---- writing


class _NewTransfer(NamedTuple):
    id: str
    kind: str
    at: int
    digest: str
    refers_to: str | None


class _NewBalance(NamedTuple):
    id: int
    balance: int
    sequence: int


class _Resolution(NamedTuple):
    id: str
    resolved_by: str | None
    returned: int


def _write(changes: LedgerChanges) -> Operation[None]:
    if not changes.transfers:
        return
    transfers = [
        _NewTransfer(each.id, each.kind.value, each.at, each.digest, each.refers_to)
        for each in changes.transfers
    ]
    yield from _insert("ledger_transfers", _NewTransfer, transfers)
    yield from _insert("ledger_entries", LedgerEntriesRecord, changes.entries)
    balances = [_NewBalance(each.id, each.balance, each.sequence) for each in changes.accounts]
    yield Statement(
        "UPDATE ledger_accounts SET balance = c.balance, sequence = c.sequence FROM {changed} AS c "
        "WHERE ledger_accounts.id = c.id",
        {},
        {"changed": Relation(relation_columns(_NewBalance), balances)},
    )
    if changes.reserved:
        reserved = [
            PendingTransfersRecord(
                each.id,
                each.payer,
                each.account,
                each.amount,
                each.month,
                each.expires_at,
                each.resolved_by,
                each.returned,
            )
            for each in changes.reserved
        ]
        yield from _insert("pending_transfers", PendingTransfersRecord, reserved)
    if changes.resolved:
        resolved = [
            _Resolution(each.id, each.resolved_by, each.returned) for each in changes.resolved
        ]
        yield Statement(
            "UPDATE pending_transfers SET resolved_by = r.resolved_by, returned = r.returned "
            "FROM {resolved} AS r WHERE pending_transfers.id = r.id AND pending_transfers.resolved_by IS NULL",
            {},
            {"resolved": Relation(relation_columns(_Resolution), resolved)},
        )
    if changes.spent:
        spent = [
            LedgerSpendingRecord(account, month, amount)
            for (account, month), amount in sorted(changes.spent.items())
        ]
        yield Statement(
            "INSERT INTO ledger_spending (account_id, month, amount) "
            "SELECT account_id, month, amount FROM {spent} AS s WHERE TRUE "
            "ON CONFLICT (account_id, month) DO UPDATE SET amount = ledger_spending.amount + excluded.amount",
            {},
            {"spent": Relation(relation_columns(LedgerSpendingRecord), spent)},
        )


def _insert(table: str, row: type[NamedTuple], rows: Sequence[NamedTuple]) -> Operation[None]:
    names = ", ".join(row._fields)
    yield Statement(
        f"INSERT INTO {table} ({names}) SELECT {names} FROM {{rows}} AS r",  # noqa: S608
        {},
        {"rows": Relation(relation_columns(row), rows)},
    )

"""Accounts of users and teams in the ledger, their entries and budgets.

The row in `ledger_holders` is the only link from an account to a person; deleting it leaves the books unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpool.core.model import Instant
from gpool.core.money.transfers import AccountKind, LedgerAccountId, month_of
from gpool.core.scheduler.order.limits import Holder
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import exists, select

HOLDERS = (("kind", "text"), ("id", "int"), ("purpose", "text"), ("account_id", "int"))


@dataclass(frozen=True, slots=True)
class NewAccount:
    """An account that is opened unless the holder has one of this kind. `id`: from the server's `IdSource`."""

    holder: Holder
    kind: AccountKind
    id: LedgerAccountId


class _HeldAccount(NamedTuple):
    kind: str
    id: int
    purpose: str
    account_id: int


def open_accounts(
    wanted: Sequence[NewAccount],
) -> Operation[dict[tuple[Holder, AccountKind], LedgerAccountId]]:
    """Open missing accounts as a step of another operation; return all, by holder and kind.

    Two replicas may open the same account: the second insert finds the first one's row and opens nothing.
    """
    rows = [(*each.holder, each.kind.value, each.id) for each in wanted]
    relation = {"wanted": Relation(HOLDERS, sorted(rows))}
    there = (
        "SELECT h.kind, h.id, h.purpose, h.account_id FROM {wanted} AS w JOIN ledger_holders h "
        "ON h.kind = w.kind AND h.id = w.id AND h.purpose = w.purpose"
    )
    found = yield from select(_HeldAccount, there, {}, relation)
    if len(found) < len({row[:3] for row in rows}):
        yield Statement(
            "INSERT INTO ledger_holders (kind, id, purpose, account_id) "
            "SELECT kind, id, purpose, account_id FROM {wanted} AS w WHERE TRUE "
            "ON CONFLICT (kind, id, purpose) DO NOTHING",
            {},
            relation,
        )
        yield Statement(
            "INSERT INTO ledger_accounts (id, kind) SELECT h.account_id, h.purpose FROM {wanted} AS w "
            "JOIN ledger_holders h ON h.account_id = w.account_id WHERE TRUE ON CONFLICT (id) DO NOTHING",
            {},
            relation,
        )
        found = yield from select(_HeldAccount, there, {}, relation)
    ids = {(row.kind, row.id, row.purpose): LedgerAccountId(row.account_id) for row in found}
    return {(each.holder, each.kind): ids[*each.holder, each.kind.value] for each in wanted}


def forget_holder(holder: Holder) -> Operation[None]:
    """Delete the links from a user's or team's accounts to it, its budgets, project labels and totals of use; entries stay."""
    names = {"kind": holder[0], "id": holder[1]}
    yield Statement(
        "DELETE FROM budgets WHERE account_id IN "
        "(SELECT account_id FROM ledger_holders WHERE kind = :kind AND id = :id)",
        names,
    )
    yield Statement(
        "UPDATE payout_lines SET payee = '' WHERE account_id IN "
        "(SELECT account_id FROM ledger_holders WHERE kind = :kind AND id = :id)",
        names,
    )
    yield Statement(
        "UPDATE deposits SET sender = '' WHERE account_id IN "
        "(SELECT account_id FROM ledger_holders WHERE kind = :kind AND id = :id)",
        names,
    )
    yield Statement(
        "UPDATE charges SET project = '' WHERE project <> '' AND payer_id IN "
        "(SELECT account_id FROM ledger_holders WHERE kind = :kind AND id = :id)",
        names,
    )
    yield Statement("DELETE FROM ledger_holders WHERE kind = :kind AND id = :id", names)
    yield Statement("DELETE FROM projects WHERE kind = :kind AND id = :id", names)
    yield Statement("DELETE FROM usage_totals WHERE kind = :kind AND id = :id", names)


# ---- balances


class AccountBalance(NamedTuple):
    account_id: int
    kind: str
    balance: int
    sequence: int


class AccountEntry(NamedTuple):
    """An entry with its transfer."""

    account_id: int
    sequence: int
    kind: str  # of the transfer
    transfer_id: str
    at: Instant
    amount: int
    balance: int


@operation
def balances(holder: Holder) -> Operation[tuple[AccountBalance, ...]]:
    """Accounts of a user or team; none before its first transfer."""
    rows = yield from select(
        AccountBalance,
        "SELECT a.id, a.kind, a.balance, a.sequence FROM ledger_holders h "
        "JOIN ledger_accounts a ON a.id = h.account_id WHERE h.kind = :kind AND h.id = :id ORDER BY a.id",
        {"kind": holder[0], "id": holder[1]},
    )
    return tuple(rows)


@operation
def entries(
    account: LedgerAccountId, before: int, limit: int
) -> Operation[tuple[AccountEntry, ...]]:
    """Entries of an account whose sequence is below `before`, newest first."""
    rows = yield from select(
        AccountEntry,
        "SELECT e.account_id, e.sequence, t.kind, t.id, t.at, e.amount, e.balance FROM ledger_entries e "
        "JOIN ledger_transfers t ON t.id = e.transfer_id "
        "WHERE e.account_id = :account AND e.sequence < :before ORDER BY e.sequence DESC LIMIT :limit",
        {"account": account, "before": before, "limit": limit},
    )
    return tuple(rows)


class Uncleared(NamedTuple):
    """Open pending transfers: their sum, and when the oldest one was reserved."""

    amount: int
    oldest_at: Instant | None


@operation
def uncleared() -> Operation[Uncleared]:
    [found] = yield from select(
        Uncleared,
        "SELECT CAST(COALESCE(SUM(p.amount), 0) AS BIGINT), MIN(t.at) FROM pending_transfers p "
        "JOIN ledger_transfers t ON t.id = p.id WHERE p.resolved_by IS NULL",
    )
    return found


# ---- budgets


class MonthlySpending(NamedTuple):
    """Micro-credits set aside in the month, less what returned. `cap` None: no budget."""

    spent: int
    cap: int | None


@operation
def spending(holder: Holder, kind: AccountKind, at: Instant) -> Operation[MonthlySpending]:
    """Spending of a user or team in the month of `at`, and its budget."""
    rows = yield from select(
        MonthlySpending,
        "SELECT COALESCE(s.amount, 0), b.cap FROM ledger_holders h "
        "LEFT JOIN budgets b ON b.account_id = h.account_id "
        "LEFT JOIN ledger_spending s ON s.account_id = h.account_id AND s.month = :month "
        "WHERE h.kind = :kind AND h.id = :id AND h.purpose = :purpose",
        {"kind": holder[0], "id": holder[1], "purpose": kind.value, "month": month_of(at)},
    )
    return rows[0] if rows else MonthlySpending(0, None)


@operation
def set_budget(payer: NewAccount, cap: int | None, at: Instant) -> Operation[None]:
    """Set the monthly cap of a payer; None removes it. The caller has checked that the holder exists."""
    if cap is None and not (yield from _has_account(payer)):
        return
    opened = yield from open_accounts([payer])
    account = opened[payer.holder, payer.kind]
    if cap is None:
        yield Statement("DELETE FROM budgets WHERE account_id = :id", {"id": account})
        return
    yield Statement(
        "INSERT INTO budgets (account_id, cap, changed_at) VALUES (:id, :cap, :at) "
        "ON CONFLICT (account_id) DO UPDATE SET cap = excluded.cap, changed_at = excluded.changed_at",
        {"id": account, "cap": cap, "at": at},
    )


def _has_account(wanted: NewAccount) -> Operation[bool]:
    kind, number = wanted.holder
    return (
        yield from exists(
            "SELECT 1 FROM ledger_holders WHERE kind = :kind AND id = :id AND purpose = :purpose",
            {"kind": kind, "id": number, "purpose": wanted.kind.value},
        )
    )

"""Vesting of earnings: a charge is posted to its owner's vesting account and moves on when its window is over.

A charge is one row of `charges`; many of them may be paid by one transfer. So a vest moves the sum of an owner's charges,
and a forfeit names the transfer that paid its charge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Instant
from gpool.core.money.transfers import (
    AccountKind,
    Forfeit,
    LedgerAccountId,
    TransferId,
    TransferOutcome,
    Vest,
)
from gpool.core.scheduler.order.limits import Holder
from gpool.server.store.operations.money.accounts import NewAccount, open_accounts
from gpool.server.store.operations.money.receipts import LEASES
from gpool.server.store.operations.money.transfers import record_transfers
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import exists, of_ids, select


class UnvestedCharge(NamedTuple):
    task_id: TaskId
    epoch: int
    node_id: NodeId
    owner_id: int
    microcredits: int
    fee: int
    transfer_id: str


UNVESTED = "c.task_id, c.epoch, c.node_id, c.owner_id, c.microcredits, c.fee, c.transfer_id"


class _AccountHolder(NamedTuple):
    account_id: int
    kind: str
    id: int


@operation
def has_vested(at: Instant) -> Operation[bool]:
    return (
        yield from exists(
            "SELECT 1 FROM charges c WHERE c.state = 'posted' AND c.vests_at IS NOT NULL AND c.vests_at <= :at LIMIT 1",
            {"at": at},
        )
    )


@operation
def vest(at: Instant, limit: int, ids: Sequence[int]) -> Operation[int]:
    """Move up to `limit` charges whose window is over to their owners; return their number.

    `ids`: new ids, one for each account to open and one for the transfers; at least `limit` + 1. The earnings of a
    deleted owner stay where they are: nobody can be paid.
    """
    rows = yield from select(
        UnvestedCharge,
        f"SELECT {UNVESTED} FROM charges c WHERE c.state = 'posted' AND c.vests_at IS NOT NULL "  # noqa: S608
        "AND c.vests_at <= :at ORDER BY c.vests_at, c.task_id, c.epoch, c.node_id LIMIT :limit "
        "/*postgresql FOR UPDATE OF c*/",
        {"at": at, "limit": limit},
    )
    if not rows:
        return 0
    holders = yield from holders_of(sorted({row.owner_id for row in rows}))
    wanted = [
        NewAccount(holder, AccountKind.OWNER, LedgerAccountId(id_))
        for holder, id_ in zip(sorted(set(holders.values())), ids[1:], strict=False)
    ]
    opened = yield from open_accounts(wanted)
    sums: dict[int, int] = {}
    for row in rows:
        sums[row.owner_id] = sums.get(row.owner_id, 0) + row.microcredits - row.fee
    vests = [
        Vest(
            TransferId(f"vest:{ids[0]}:{account}"),
            LedgerAccountId(account),
            opened[holders[account], AccountKind.OWNER],
            amount,
        )
        for account, amount in sorted(sums.items())
        if account in holders and amount
    ]
    if vests:
        done = yield from record_transfers(vests, at)
        assert all(each.is_done for each in done.outcomes), "unvested charges are in the account"
    yield from _set_state([row[:3] for row in rows], "vested")
    return len(rows)


def holders_of(accounts: Sequence[int]) -> Operation[dict[int, Holder]]:
    """Users and teams of accounts; deleted ones are absent."""
    rows = yield from select(
        _AccountHolder,
        "SELECT h.account_id, h.kind, h.id FROM {accounts} AS i JOIN ledger_holders h ON h.account_id = i.id",
        {},
        {"accounts": of_ids(accounts)},
    )
    return {row.account_id: (row.kind, row.id) for row in rows}


@dataclass(frozen=True, slots=True)
class Forfeited:
    """`leases`: (task, epoch) of the charges that returned to their payers. `microcredits`: their sum."""

    leases: tuple[tuple[TaskId, int], ...]
    microcredits: int


def forfeit(node: NodeId, at: Instant, checked: Sequence[TaskId] = ()) -> Operation[Forfeited]:
    """Return the unvested charges of a caught node to their payers, fee included, as a step of another operation.

    `checked`: tasks whose result a check has found right; their payers keep the result and pay for it.
    """
    rows = yield from select(
        UnvestedCharge,
        f"SELECT {UNVESTED} FROM charges c WHERE c.node_id = :node AND c.state = 'posted' "  # noqa: S608
        "ORDER BY c.task_id, c.epoch /*postgresql FOR UPDATE OF c*/",
        {"node": node},
    )
    right = set(checked)
    rows = [row for row in rows if row.task_id not in right and row.microcredits > row.fee]
    if not rows:
        return Forfeited((), 0)
    requests = [
        Forfeit(
            TransferId(f"forfeit:{row.task_id}:{row.epoch}:{row.node_id}"),
            TransferId(row.transfer_id),
            LedgerAccountId(row.owner_id),
            row.microcredits - row.fee,
            row.fee,
        )
        for row in rows
    ]
    done = yield from record_transfers(requests, at)
    moved = [
        row
        for row, outcome in zip(rows, done.outcomes, strict=True)
        if outcome in (TransferOutcome.MOVED, TransferOutcome.REPEATED)
    ]
    yield from _set_state([row[:3] for row in moved], "forfeited")
    leases = tuple((row.task_id, row.epoch) for row in moved)
    return Forfeited(leases, sum(row.microcredits for row in moved))


def _set_state(leases: Sequence[tuple[int, ...]], state: str) -> Operation[None]:
    yield Statement(
        "UPDATE charges SET state = :state FROM {leases} AS l WHERE charges.task_id = l.task "
        "AND charges.epoch = l.epoch AND charges.node_id = l.node AND charges.state = 'posted'",
        {"state": state},
        {"leases": Relation(LEASES, sorted(leases))},
    )

"""Deposits by chain transfers: the cursor, and what was found up to it. A deposit is credited once, by its ledger id.

Every write locks the cursor's row first, so that deposits are recorded and credited by one transaction at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpool.core.errors import Conflict, NotFound
from gpool.core.ids import UserId
from gpool.core.model import Instant
from gpool.core.money.transfers import (
    MAX_AMOUNT,
    AccountKind,
    Grant,
    LedgerAccountId,
    TransferId,
)
from gpool.server.store.generated_rows import DepositCursorsRecord, DepositsRecord
from gpool.server.store.operations.money.accounts import NewAccount, open_accounts
from gpool.server.store.operations.money.transfers import record_transfers
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import columns, exists, of_names, relation_columns, select

CREDITED, UNMATCHED, HELD = "credited", "unmatched", "held"
CURSOR = columns(DepositCursorsRecord, DepositCursorsRecord, "c")
DEPOSIT = columns(DepositsRecord, DepositsRecord, "d")
OF_SOURCE = "c.chain_id = :chain AND c.token = :token AND c.address = :address"
AT_SOURCE = OF_SOURCE.replace("c.", "")


class DepositSource(NamedTuple):
    """Token and receiver on a chain, in lower case."""

    chain_id: int
    token: str
    address: str

    def named(self, **more: object) -> dict[str, object]:
        return {"chain": self.chain_id, "token": self.token, "address": self.address, **more}


class ChainDeposit(NamedTuple):
    tx: str
    log_index: int
    block: int
    block_hash: str
    sender: str
    amount: int


@dataclass(frozen=True, slots=True)
class ScannedBlocks:
    """Blocks after `after` up to `block` with all their deposits. `ids`: new ids, one for each deposit."""

    source: DepositSource
    after: int
    block: int
    block_hash: str
    deposits: Sequence[ChainDeposit]
    ids: Sequence[int]


def transfer_id(row: DepositsRecord) -> TransferId:
    return TransferId(f"deposit:{row.chain_id}:{row.tx}:{row.log_index}")


# ---- the cursor


@operation
def cursor(source: DepositSource) -> Operation[DepositCursorsRecord | None]:
    rows = yield from select(
        DepositCursorsRecord,
        f"SELECT {CURSOR} FROM deposit_cursors c WHERE {OF_SOURCE}",  # noqa: S608
        source.named(),
    )
    return rows[0] if rows else None


@operation
def open_cursor(source: DepositSource, block: int, at: Instant) -> Operation[None]:
    """Begin after `block`, unless blocks were scanned before."""
    if (yield from cursor(source)) is None:
        yield Statement(
            "INSERT INTO deposit_cursors (chain_id, token, address, block, changed_at) "
            "VALUES (:chain, :token, :address, :block, :at) "
            "ON CONFLICT (chain_id, token, address) DO NOTHING",
            source.named(block=block, at=at),
        )


def _locked(source: DepositSource) -> Operation[DepositCursorsRecord | None]:
    rows = yield from select(
        DepositCursorsRecord,
        f"SELECT {CURSOR} FROM deposit_cursors c WHERE {OF_SOURCE} /*postgresql FOR UPDATE*/",  # noqa: S608
        source.named(),
    )
    return rows[0] if rows else None


@operation
def halt(source: DepositSource, block: int, why: str, at: Instant) -> Operation[None]:
    """Stop crediting until `resume`, if `block` is still the last one scanned."""
    yield Statement(
        "UPDATE deposit_cursors SET halted_at = :at, why = :why, changed_at = :at "  # noqa: S608
        f"WHERE {AT_SOURCE} AND block = :block AND halted_at IS NULL",
        source.named(block=block, why=why, at=at),
    )


@operation
def resume(source: DepositSource, from_block: int, at: Instant) -> Operation[None]:
    """Scan again from `from_block` on. `NotFound` before the first scan.

    Credited deposits stay, so that they are not credited again; others are forgotten until they are found again.
    """
    now = yield from _locked(source)
    if now is None:
        raise NotFound("no block was scanned for deposits yet")
    if from_block > now.block + 1:
        raise Conflict(f"blocks from {now.block + 1} on were not scanned; begin there or earlier")
    yield Statement(
        f"DELETE FROM deposits WHERE {AT_SOURCE} AND block >= :block AND status <> 'credited'",  # noqa: S608
        source.named(block=from_block),
    )
    yield Statement(
        "UPDATE deposit_cursors SET block = :block, block_hash = '', halted_at = NULL, why = '', "  # noqa: S608
        f"changed_at = :at WHERE {AT_SOURCE}",
        source.named(block=from_block - 1, at=at),
    )


# ---- crediting


@operation
def record_scanned(scanned: ScannedBlocks, at: Instant) -> Operation[bool]:
    """Move the cursor, and record and credit the deposits before it; False if another scan or an operator was faster."""
    source = scanned.source
    now = yield from _locked(source)
    if now is None or now.halted_at is not None or now.block != scanned.after:
        return False
    found = [
        DepositsRecord(
            source.chain_id,
            each.tx,
            each.log_index,
            source.token,
            source.address,
            each.block,
            each.block_hash,
            each.sender,
            str(each.amount),
            UNMATCHED,
            None,
            at,
        )
        for each in scanned.deposits
    ]
    known = yield from _known(found)
    there = {(row.tx, row.log_index) for row in known}
    mined = {row.tx: row.block_hash for row in known}
    new = [row for row in found if (row.tx, row.log_index) not in there]
    # a transaction that was mined again has other numbers of its logs, and may have been credited by the old ones
    again = [row for row in new if mined.get(row.tx, row.block_hash) != row.block_hash]
    rows = yield from _credited([row for row in new if row not in again], scanned.ids, at)
    rows += [row._replace(status=HELD) for row in again]
    if rows:
        names = ", ".join(DepositsRecord._fields)
        yield Statement(
            f"INSERT INTO deposits ({names}) SELECT {names} FROM {{rows}} AS r",  # noqa: S608
            {},
            {"rows": Relation(relation_columns(DepositsRecord), rows)},
        )
    yield Statement(
        "UPDATE deposit_cursors SET block = :block, block_hash = :hash, changed_at = :at "  # noqa: S608
        f"WHERE {AT_SOURCE} AND block = :after",
        source.named(block=scanned.block, hash=scanned.block_hash, after=scanned.after, at=at),
    )
    return True


class _DepositName(NamedTuple):
    tx: str
    log_index: int
    block_hash: str


def _known(rows: Sequence[DepositsRecord]) -> Operation[list[_DepositName]]:
    """Recorded deposits of the same transactions."""
    if not rows:
        return []
    return (
        yield from select(
            _DepositName,
            "SELECT d.tx, d.log_index, d.block_hash FROM {names} AS n JOIN deposits d ON d.tx = n.name "
            "WHERE d.chain_id = :chain",
            {"chain": rows[0].chain_id},
            {"names": of_names(row.tx for row in rows)},
        )
    )


class _WalletOwner(NamedTuple):
    address: str
    user_id: UserId


def _credited(
    rows: Sequence[DepositsRecord], ids: Sequence[int], at: Instant
) -> Operation[list[DepositsRecord]]:
    """The rows as they are after crediting those of a bound wallet."""
    if not rows:
        return []
    bound = yield from select(
        _WalletOwner,
        "SELECT w.address, w.user_id FROM {names} AS n JOIN wallets w ON w.address = n.name",
        {},
        {"names": of_names(row.sender for row in rows)},
    )
    owners = {each.address: each.user_id for each in bound}
    due = [row for row in rows if row.sender in owners and int(row.amount) <= MAX_AMOUNT]
    accounts = yield from _accounts([owners[row.sender] for row in due], ids)
    grants = [Grant(transfer_id(row), accounts[owners[row.sender]], int(row.amount)) for row in due]
    outcomes = (yield from record_transfers(grants, at)).outcomes if grants else ()
    moved = {
        grant.id: grant.to for grant, done in zip(grants, outcomes, strict=True) if done.is_done
    }
    changed = []
    for row in rows:
        account = moved.get(transfer_id(row))
        if account is not None:
            changed.append(row._replace(status=CREDITED, account_id=account, changed_at=at))
        elif row.sender in owners:
            changed.append(row._replace(status=HELD, changed_at=at))
        else:
            changed.append(row)
    return changed


def _accounts(
    users: Sequence[UserId], ids: Sequence[int]
) -> Operation[dict[UserId, LedgerAccountId]]:
    wanted = [
        NewAccount(("user", user), AccountKind.USER, LedgerAccountId(id_))
        for user, id_ in zip(sorted(set(users)), ids, strict=False)
    ]
    if not wanted:
        return {}
    opened = yield from open_accounts(wanted)
    return {UserId(each.holder[1]): opened[each.holder, each.kind] for each in wanted}


BOUND = (
    "FROM deposits d JOIN wallets w ON w.address = d.sender "
    "WHERE d.chain_id = :chain AND d.status = 'unmatched'"
)


@operation
def has_bound(source: DepositSource) -> Operation[bool]:
    """Whether a wallet of an unmatched deposit was bound since, and crediting is not halted."""
    if not (yield from exists(f"SELECT 1 {BOUND} LIMIT 1", {"chain": source.chain_id})):
        return False
    now = yield from cursor(source)
    return now is not None and now.halted_at is None


@operation
def credit_bound(source: DepositSource, ids: Sequence[int], at: Instant) -> Operation[int]:
    """Credit unmatched deposits whose wallet was bound since, at most one for each of `ids`; return their number."""
    now = yield from _locked(source)
    if now is None or now.halted_at is not None:
        return 0
    rows = yield from select(
        DepositsRecord,
        f"SELECT {DEPOSIT} {BOUND} ORDER BY d.block, d.tx, d.log_index LIMIT :limit",
        {"chain": source.chain_id, "limit": len(ids)},
    )
    changed = yield from _credited(rows, ids, at)
    if changed:
        yield Statement(
            "UPDATE deposits SET status = r.status, account_id = r.account_id, changed_at = r.changed_at "
            "FROM {rows} AS r WHERE deposits.chain_id = r.chain_id AND deposits.tx = r.tx "
            "AND deposits.log_index = r.log_index AND deposits.status = 'unmatched'",
            {},
            {"rows": Relation(relation_columns(DepositsRecord), changed)},
        )
    return len(changed)


# ---- listing


@operation
def deposits_of(user: UserId, limit: int) -> Operation[tuple[DepositsRecord, ...]]:
    """Deposits to the account of a user, and those of its wallets that are not credited, newest first."""
    rows = yield from select(
        DepositsRecord,
        f"SELECT {DEPOSIT} FROM ledger_holders h JOIN deposits d ON d.account_id = h.account_id "  # noqa: S608
        "WHERE h.kind = 'user' AND h.id = :user UNION ALL "
        f"SELECT {DEPOSIT} FROM wallets w JOIN deposits d ON d.sender = w.address AND d.status <> 'credited' "
        "WHERE w.user_id = :user ORDER BY block DESC, tx, log_index DESC LIMIT :limit",
        {"user": user, "limit": limit},
    )
    return tuple(rows)


@operation
def open_deposits(limit: int) -> Operation[tuple[DepositsRecord, ...]]:
    """Deposits that are not credited, newest first."""
    rows = yield from select(
        DepositsRecord,
        f"SELECT {DEPOSIT} FROM deposits d WHERE d.status <> 'credited' "  # noqa: S608
        "ORDER BY d.block DESC, d.tx, d.log_index DESC LIMIT :limit",
        {"limit": limit},
    )
    return tuple(rows)

"""Statements: charges of a payer or owner by month, earnings by node and GPU, history of payout wallets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import Instant
from gpool.core.permissions import TeamId
from gpool.server.store.generated_rows import WalletChangesRecord
from gpool.server.store.protocol import Operation, Relation, operation
from gpool.server.store.rows import columns, of_ids, select, values

MONTHS = (("month", "int"), ("since", "int"), ("until", "int"))


class StatementLine(NamedTuple):
    """A charge. `receipt_id` None: not issued (yet). `user_id` None: the task was deleted; then `team_id` is None too."""

    ended_at: Instant
    task_id: TaskId
    epoch: int
    node_id: NodeId
    payer_id: int
    owner_id: int
    started_at: Instant | None
    charged_us: int
    microcredits: int
    fee: int
    rate: int
    reason: str
    gpus: str
    state: str
    receipt_id: int | None
    user_id: UserId | None
    team_id: TeamId | None
    project: str


class LinePosition(NamedTuple):
    """Place of a line in its month: those after it are on the next page."""

    ended_at: int
    task: int
    epoch: int
    node: int


FIRST = LinePosition(-1, 0, 0, 0)


@operation
def statement(
    accounts: Sequence[int], span: tuple[Instant, Instant], after: LinePosition, limit: int
) -> Operation[tuple[StatementLine, ...]]:
    """Charges of these accounts, as payer or owner, that ended in the span, oldest first; void ones are left out."""
    parts = [
        "SELECT c.ended_at, c.task_id, c.epoch, c.node_id, c.payer_id, c.owner_id, c.started_at, c.charged_us, "  # noqa: S608
        "c.microcredits, c.fee, c.rate, c.reason, c.gpus, c.state, r.id, t.user_id, t.team_id, c.project FROM {accounts} AS i "
        f"JOIN charges c ON c.{column} = i.id LEFT JOIN receipts r ON r.task_id = c.task_id AND r.epoch = c.epoch "
        "AND r.node_id = c.node_id LEFT JOIN tasks t ON t.id = c.task_id "
        "WHERE c.ended_at >= :since AND c.ended_at < :until AND c.state <> 'void' "
        "AND (c.ended_at, c.task_id, c.epoch, c.node_id) > (:ended_at, :task, :epoch, :node)"
        for column in ("payer_id", "owner_id")
    ]
    rows = yield from select(
        StatementLine,
        f"{' UNION '.join(parts)} ORDER BY 1, 2, 3, 4 LIMIT :limit",
        {"since": span[0], "until": span[1], "limit": limit, **after._asdict()},
        {"accounts": of_ids(accounts)},
    )
    return tuple(rows)


class EarningRow(NamedTuple):
    month: int
    node_id: NodeId
    gpus: str
    state: str
    attempts: int
    charged_us: int
    microcredits: int


@operation
def earnings(
    account: int, months: Sequence[tuple[int, Instant, Instant]]
) -> Operation[tuple[EarningRow, ...]]:
    """Earnings of a vesting account in months, (number, begin, end) each, by node, GPUs and state; fees are not in them."""
    rows = yield from select(
        EarningRow,
        "SELECT m.month, c.node_id, c.gpus, c.state, COUNT(*), CAST(SUM(c.charged_us) AS BIGINT), "
        "CAST(SUM(c.microcredits - c.fee) AS BIGINT) FROM {months} AS m JOIN charges c ON c.owner_id = :account "
        "AND c.ended_at >= m.since AND c.ended_at < m.until WHERE c.state <> 'void' "
        "GROUP BY m.month, c.node_id, c.gpus, c.state ORDER BY m.month DESC, c.node_id, c.gpus, c.state",
        {"account": account},
        {"months": Relation(MONTHS, list(months))},
    )
    return tuple(rows)


class RewardRow(NamedTuple):
    month: int
    microcredits: int


@operation
def rewards_of(account: int) -> Operation[tuple[RewardRow, ...]]:
    rows = yield from select(
        RewardRow,
        "SELECT r.month, r.microcredits FROM rewards r WHERE r.account_id = :account ORDER BY r.month DESC",
        {"account": account},
    )
    return tuple(rows)


@operation
def wallet_history(user: UserId) -> Operation[tuple[WalletChangesRecord, ...]]:
    """Changes of a user's payout wallet, oldest first."""
    rows = yield from select(
        WalletChangesRecord,
        f"SELECT {columns(WalletChangesRecord, WalletChangesRecord, 'w')} FROM wallet_changes w "  # noqa: S608
        "WHERE w.user_id = :user ORDER BY w.number",
        {"user": user},
    )
    return tuple(rows)


@operation
def own_accounts(kind: str, id_: int) -> Operation[tuple[int, ...]]:
    """Accounts of a user or team."""
    found = yield from values(
        int,
        "SELECT h.account_id FROM ledger_holders h WHERE h.kind = :kind AND h.id = :id ORDER BY h.account_id",
        {"kind": kind, "id": id_},
    )
    return tuple(found)

"""Closed periods: what each owner is paid, the payout file, and rewards that the operator adds to earnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpool.core.errors import Conflict
from gpool.core.ids import NodeId, UserId
from gpool.core.model import Instant
from gpool.core.money.transfers import (
    AccountKind,
    Grant,
    LedgerAccountId,
    Payout,
    TransferId,
    format_month,
)
from gpool.core.specs.events import EventKind
from gpool.server.store.generated_rows import PayoutLinesRecord, PayoutsRecord, RewardsRecord
from gpool.server.store.operations.events.outbox import NewEvent, add_events, subscribers
from gpool.server.store.operations.money.accounts import NewAccount, open_accounts
from gpool.server.store.operations.money.transfers import record_transfers
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import columns, exists, relation_columns, select
from gpool.wire.events import PayoutEventData

PAYOUT = columns(PayoutsRecord, PayoutsRecord, "p")


class OwnerBalance(NamedTuple):
    """Vested earnings of an owner that were not paid. `wallet` None: no payout wallet."""

    account_id: int
    user_id: UserId
    microcredits: int
    wallet: str | None


@operation
def owner_balances() -> Operation[tuple[OwnerBalance, ...]]:
    rows = yield from select(
        OwnerBalance,
        "SELECT a.id, h.id, a.balance, w.address FROM ledger_holders h JOIN ledger_accounts a ON a.id = h.account_id "
        "LEFT JOIN wallets w ON w.user_id = h.id AND w.payout = 1 "
        "WHERE h.kind = 'user' AND h.purpose = 'owner' AND a.balance > 0 ORDER BY a.id",
    )
    return tuple(rows)


@operation
def payouts(before: int, limit: int) -> Operation[tuple[PayoutsRecord, ...]]:
    """Closed periods with a number below `before`, newest first."""
    rows = yield from select(
        PayoutsRecord,
        f"SELECT {PAYOUT} FROM payouts p WHERE p.number < :before ORDER BY p.number DESC LIMIT :limit",  # noqa: S608
        {"before": before, "limit": limit},
    )
    return tuple(row._replace(body=bytes(row.body)) for row in rows)


@operation
def lines_of(accounts: Sequence[int]) -> Operation[tuple[PayoutLinesRecord, ...]]:
    """What these accounts were paid, newest first."""
    rows = yield from select(
        PayoutLinesRecord,
        f"SELECT {columns(PayoutLinesRecord, PayoutLinesRecord, 'l')} FROM {{accounts}} AS i "  # noqa: S608
        "JOIN payout_lines l ON l.account_id = i.id ORDER BY l.number DESC LIMIT 1000",
        {},
        {"accounts": Relation((("id", "int"),), [(each,) for each in sorted(accounts)])},
    )
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class ClosedPeriod:
    """`paid`: owners of the lines. `ids`: new ids, one for each line."""

    period: PayoutsRecord
    lines: Sequence[PayoutLinesRecord]
    paid: Mapping[int, UserId]
    ids: Sequence[int]


@operation
def put_payout(closed: ClosedPeriod, at: Instant) -> Operation[None]:
    """Store a closed period and move its amounts out of the books; `Conflict` if anything has changed since it was built."""
    number = closed.period.number
    others = yield from exists(
        "SELECT 1 FROM payouts p WHERE p.number >= :number OR p.month >= :month LIMIT 1",
        {"number": number, "month": closed.period.month},
    )
    if others:
        month = format_month(closed.period.month)
        raise Conflict(f"the period {month} or a later one is closed already: gpool payout ls")
    wanted = [
        NewAccount(("user", closed.paid[line.account_id]), AccountKind.PAID, LedgerAccountId(id_))
        for line, id_ in zip(closed.lines, closed.ids, strict=True)
    ]
    opened = yield from open_accounts(wanted)
    moves = [
        Payout(
            TransferId(f"payout:{number}:{line.account_id}"),
            LedgerAccountId(line.account_id),
            opened[new.holder, AccountKind.PAID],
            line.microcredits,
        )
        for line, new in zip(closed.lines, wanted, strict=True)
    ]
    done = yield from record_transfers(moves, at)
    if not all(each.is_done for each in done.outcomes):
        raise Conflict("balances have changed meanwhile; close the period again")
    yield from _insert("payouts", PayoutsRecord, [closed.period])
    yield from _insert("payout_lines", PayoutLinesRecord, closed.lines)
    told = yield from subscribers(at)
    new = [
        NewEvent(at, EventKind.PAYOUT_READY, *whose, number, 0, _event_data(closed.period, line))
        for line in closed.lines
        if (whose := ("user", closed.paid[line.account_id])) in told
    ]
    if new:
        yield from add_events(new)


def _event_data(period: PayoutsRecord, line: PayoutLinesRecord) -> str:
    return PayoutEventData(
        month=format_month(period.month),
        number=period.number,
        payee=line.payee,
        microcredits=line.microcredits,
    ).model_dump_json()


def _insert(table: str, row: type[NamedTuple], rows: Sequence[NamedTuple]) -> Operation[None]:
    names = ", ".join(row._fields)
    yield Statement(
        f"INSERT INTO {table} ({names}) SELECT {names} FROM {{rows}} AS r",  # noqa: S608
        {},
        {"rows": Relation(relation_columns(row), rows)},
    )


# ---- rewards


class NodeUse(NamedTuple):
    """Use of one node in a month. `measured`: JSON of its fastest verified GPU, or None. `verified_us`: of vested charges."""

    node_id: NodeId
    owner_id: UserId
    gpu_us: int
    up_us: int
    losses: int


class VerifiedUse(NamedTuple):
    node_id: NodeId
    charged_us: int


class MeasuredGpu(NamedTuple):
    node_id: NodeId
    measured: str


@operation
def node_use(month: int) -> Operation[tuple[NodeUse, ...]]:
    """GPU time that nodes of the pool served in a month, for others than their owners."""
    rows = yield from select(
        NodeUse,
        "SELECT n.id, n.owner_id, CAST(SUM(u.gpu_us) AS BIGINT), COALESCE(MAX(r.up_us), 0), COALESCE(MAX(r.losses), 0) "
        "FROM usage_totals u JOIN nodes n ON n.id = u.node_id LEFT JOIN node_records r ON r.node_id = n.id "
        "WHERE u.month = :month AND NOT (u.kind = 'user' AND u.id = n.owner_id) GROUP BY n.id, n.owner_id ORDER BY n.id",
        {"month": month},
    )
    return tuple(rows)


@operation
def verified_use(since: Instant, until: Instant) -> Operation[tuple[VerifiedUse, ...]]:
    """Time of charges that ended in the span and have vested, by node."""
    rows = yield from select(
        VerifiedUse,
        "SELECT c.node_id, CAST(SUM(c.charged_us) AS BIGINT) FROM charges c WHERE c.state = 'vested' "
        "AND c.ended_at >= :since AND c.ended_at < :until GROUP BY c.node_id",
        {"since": since, "until": until},
    )
    return tuple(rows)


@operation
def measured_gpus() -> Operation[tuple[MeasuredGpu, ...]]:
    """Measured speeds of GPUs that passed their verification."""
    rows = yield from select(
        MeasuredGpu,
        "SELECT g.node_id, g.measured FROM gpus g WHERE g.measured IS NOT NULL AND g.verdict = 'passed' AND g.gone = 0",
    )
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class NewReward:
    owner: UserId
    weight: int
    microcredits: int


@operation
def put_rewards(
    month: int, rewards: Sequence[NewReward], ids: Sequence[int], at: Instant
) -> Operation[None]:
    """Grant the shares of a reward pool to their owners; `Conflict` if the month has rewards already."""
    if (
        yield from exists(
            "SELECT 1 FROM rewards r WHERE r.month = :month LIMIT 1", {"month": month}
        )
    ):
        raise Conflict(f"the rewards of {format_month(month)} are paid already")
    wanted = [
        NewAccount(("user", each.owner), AccountKind.OWNER, LedgerAccountId(id_))
        for each, id_ in zip(rewards, ids, strict=True)
    ]
    opened = yield from open_accounts(wanted)
    accounts = [opened[new.holder, AccountKind.OWNER] for new in wanted]
    grants = [
        Grant(TransferId(f"reward:{format_month(month)}:{account}"), account, each.microcredits)
        for each, account in zip(rewards, accounts, strict=True)
        if each.microcredits
    ]
    done = yield from record_transfers(grants, at)
    if not all(each.is_done for each in done.outcomes):
        raise Conflict("the treasury cannot issue the rewards")
    rows = [
        RewardsRecord(month, account, each.weight, each.microcredits, at)
        for each, account in zip(rewards, accounts, strict=True)
    ]
    yield from _insert("rewards", RewardsRecord, rows)

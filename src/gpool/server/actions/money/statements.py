"""Receipts, statements and earnings of a user or team, for its members and operators."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from datetime import UTC, datetime

from gpool.core.errors import Forbidden, Invalid, NotFound
from gpool.core.ids import TaskId, UserId, encode
from gpool.core.model import SECOND, Instant
from gpool.core.money.transfers import AccountKind, format_month, month_of
from gpool.core.permissions import Action
from gpool.core.scheduler.order.limits import Holder
from gpool.server.actions.audit import note_read
from gpool.server.actions.money.ledger import account_thing
from gpool.server.identity.authorization import permit
from gpool.server.server import Server
from gpool.server.store.generated_rows import ReceiptsRecord
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.money import accounts as ledger_accounts
from gpool.server.store.operations.money import earnings as operations
from gpool.server.store.operations.money import receipts as stored
from gpool.server.store.operations.money import usage as use
from gpool.server.store.operations.money import vesting
from gpool.server.store.operations.money.earnings import (
    FIRST,
    EarningRow,
    LinePosition,
    RewardRow,
    StatementLine,
)
from gpool.server.store.operations.money.receipts import ReceiptQuery
from gpool.server.store.operations.money.usage import (
    FIRST_TOTAL,
    MonthRange,
    TotalsBy,
    TotalsPosition,
)
from gpool.wallet import receipts as formats
from gpool.wire.documents import instant_to_datetime
from gpool.wire.earnings import (
    EarningDocument,
    EarningsDocument,
    ReceiptPage,
    ReceiptSummaryDocument,
    RewardOfMonth,
    StatementLineDocument,
    UsagePage,
    UseDocument,
    UsePage,
    WalletChangeDocument,
)

MOST_MONTHS = 24
FIRST_YEAR, LAST_YEAR = 1973, 9000
"""Months `MOST_MONTHS` before and after them exist too."""
_MONTH = re.compile(r"([0-9]{4})-(0[1-9]|1[0-2])")
LAST = (1 << 63) - 1


def parse_month(text: str) -> int:
    """`2026-11` to the number of the month; `Invalid` otherwise."""
    found = _MONTH.fullmatch(text)
    if found is None or not FIRST_YEAR <= int(found[1]) <= LAST_YEAR:
        raise Invalid(f"{text[:20]!r} is not a month; write it like 2026-11")
    return int(found[1]) * 12 + int(found[2]) - 1


def span_of(month: int) -> tuple[Instant, Instant]:
    """Begin and end of a month, UTC."""
    return _begin(month), _begin(month + 1)


def _begin(month: int) -> Instant:
    at = datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC)
    return Instant(int(at.timestamp()) * SECOND)


async def accounts_of(server: Server, who: Caller, holder: Holder) -> tuple[int, ...]:
    """Accounts of a holder, after the check that the caller may read them."""
    thing = await account_thing(server, who, holder)
    permit(who, Action.LEDGER_READ, thing, encode(*holder))
    await note_read(server, who, Action.LEDGER_READ, thing, encode(*holder))
    return await server.store.read(operations.own_accounts(*holder))


# ---- receipts


async def receipts(server: Server, own: tuple[int, ...], query: ReceiptQuery) -> ReceiptPage:
    """Receipts of accounts that `accounts_of` returned."""
    found = await server.store.read(stored.receipts(query)) if own else ()
    items = [_summary(row, own) for row in found]
    after = encode("receipt", found[-1].id) if len(found) == query.limit else None
    return ReceiptPage(items=items, next=after)


def _summary(row: ReceiptsRecord, own: tuple[int, ...]) -> ReceiptSummaryDocument:
    charge = formats.parse(row.body).charge
    return ReceiptSummaryDocument(
        id=encode("receipt", row.id),
        side="paid" if row.payer_id in own else "earned",
        task=encode("task", row.task_id),
        attempt=row.epoch,
        node=encode("node", row.node_id),
        issued_at=instant_to_datetime(row.issued_at),
        amount_microcredits=charge.amount,
        fee_microcredits=charge.fee,
    )


async def receipt(server: Server, who: Caller, id_: int) -> bytes:
    """Canonical bytes of a receipt that the caller, or a team of the caller, paid or earned; operators read any."""
    row = await server.store.read(stored.receipt(id_))
    if row is not None:
        sides = await server.store.read(vesting.account_holders((row.payer_id, row.owner_id)))
        for holder in sides:
            with suppress(Forbidden, NotFound):
                await accounts_of(server, who, holder)
                return row.body
    raise NotFound(f"no receipt {encode('receipt', id_)} of yours on this server")


def receipt_query(
    own: tuple[int, ...], cursor: int | None, limit: int, task: TaskId | None, month: int | None
) -> ReceiptQuery:
    return ReceiptQuery(own, LAST if cursor is None else cursor, limit, task, month)


# ---- statements


def position_of(text: str | None) -> LinePosition:
    """Cursor of a page; `Invalid` if it is none."""
    if text is None:
        return FIRST
    parts = text.split("-")
    if len(parts) != 4 or not all(part.isdecimal() and len(part) < 20 for part in parts):
        raise Invalid(f"{text[:40]!r} is not a cursor of this list")
    return LinePosition(*map(int, parts))


async def usage(
    server: Server, own: tuple[int, ...], months: MonthRange, after: LinePosition, limit: int
) -> UsagePage:
    """Charges of months, as payer and as owner."""
    lines: tuple[StatementLine, ...] = ()
    if own:
        span = _begin(months.first), _begin(months.last + 1)
        lines = await server.store.read(operations.statement(own, span, after, limit))
    items = [line_document(line, own) for line in lines]
    more = "-".join(map(str, lines[-1][:4])) if len(lines) == limit else None
    return UsagePage(month=format_month(months.last), items=items, next=more)


def line_document(line: StatementLine, own: tuple[int, ...]) -> StatementLineDocument:
    is_payer = line.payer_id in own
    return StatementLineDocument(
        side="spent" if is_payer else "earned",
        ended_at=instant_to_datetime(line.ended_at),
        started_at=None if line.started_at is None else instant_to_datetime(line.started_at),
        task=encode("task", line.task_id),
        attempt=line.epoch,
        node=encode("node", line.node_id),
        user=None if line.user_id is None else encode("user", line.user_id),
        team=None if line.team_id is None else encode("team", line.team_id),
        project=(line.project or None) if is_payer else None,
        gpus=gpu_names(line.gpus),
        charged_s=line.charged_us / SECOND,
        price_microcredits=line.rate,
        amount_microcredits=line.microcredits,
        fee_microcredits=line.fee,
        end_reason=line.reason,
        state=line.state,
        receipt=None if line.receipt_id is None else encode("receipt", line.receipt_id),
    )


def months_to(server: Server, last: str | None, count: int) -> MonthRange:
    """`count` months up to `last`; None: up to this one."""
    month = month_of(server.now) if last is None else parse_month(last)
    return MonthRange(month - count + 1, month)


def totals_position(text: str | None) -> TotalsPosition:
    """Cursor of a page of totals; `Invalid` if it is none."""
    if text is None:
        return FIRST_TOTAL
    side, colon, name = text.partition(":")
    if side not in ("used", "served") or not colon or "\0" in name:
        raise Invalid(f"{text[:40]!r} is not a cursor of this list")
    return TotalsPosition(side, name)


async def totals(
    server: Server,
    holder: Holder,
    months: MonthRange,
    by: TotalsBy,
    after: TotalsPosition,
    limit: int,
) -> UsePage:
    """Use of a holder that `accounts_of` permitted, in groups."""
    found = await server.store.read(use.totals(holder, months, by, after, limit))
    return UsePage(
        first_month=format_month(months.first),
        month=format_month(months.last),
        items=[
            UseDocument(
                side="used" if row.side == "used" else "served",
                group=_group(by, row.name),
                attempts=row.attempts,
                run_s=row.task_us / SECOND,
                gpu_s=row.gpu_us / SECOND,
            )
            for row in found
        ],
        next=f"{found[-1].side}:{found[-1].name}" if len(found) == limit else None,
    )


def _group(by: TotalsBy, name: str) -> str:
    match by:
        case TotalsBy.NODE:
            return encode("node", int(name))
        case TotalsBy.MONTH:
            return format_month(int(name))
        case TotalsBy.TEAM:
            return encode("team", int(name)) if name else ""
        case TotalsBy.GPU | TotalsBy.PROJECT:
            return name


def gpu_names(text: str) -> list[str]:
    """`H100` or `H100/0.5` for each GPU of a charge."""
    found = json.loads(text)
    return [
        each["model"] if each["slice"] == "1" else f"{each['model']}/{each['slice']}"
        for each in found
    ]


# ---- earnings


async def earnings(
    server: Server, who: Caller, user: UserId, newest: int | None, count: int
) -> EarningsDocument:
    """Earnings of a user's nodes, kept after a node is removed, in up to `count` months."""
    holder: Holder = ("user", user)
    await accounts_of(server, who, holder)
    found = {row.kind: row for row in await server.store.read(ledger_accounts.balances(holder))}
    last = month_of(server.now) if newest is None else newest
    months = [(month, *span_of(month)) for month in range(last, last - count, -1)]
    unvested, owner = found.get(AccountKind.VESTING.value), found.get(AccountKind.OWNER.value)
    rows: tuple[EarningRow, ...] = ()
    if unvested is not None:
        rows = await server.store.read(operations.earnings(unvested.account_id, months))
    rewards: tuple[RewardRow, ...] = ()
    if owner is not None:
        rewards = await server.store.read(operations.rewards_of(owner.account_id))
    paid = found.get(AccountKind.PAID.value)
    return EarningsDocument(
        unvested_microcredits=0 if unvested is None else unvested.balance,
        vested_microcredits=0 if owner is None else owner.balance,
        paid_microcredits=0 if paid is None else paid.balance,
        items=[
            EarningDocument(
                month=format_month(row.month),
                node=encode("node", row.node_id),
                gpus=gpu_names(row.gpus),
                state=row.state,
                attempts=row.attempts,
                charged_s=row.charged_us / SECOND,
                microcredits=row.microcredits,
            )
            for row in rows
        ],
        rewards=[
            RewardOfMonth(month=format_month(row.month), microcredits=row.microcredits)
            for row in rewards
        ],
        wallets=[
            WalletChangeDocument(at=instant_to_datetime(row.at), address=row.address)
            for row in await server.store.read(operations.wallet_history(user))
        ],
    )

"""Balances, grants, refunds and budgets. Operators grant and refund with transfers of their own; no entry is ever edited."""

from __future__ import annotations

from gpool.core.errors import Conflict, NotFound
from gpool.core.ids import UserId, encode
from gpool.core.model import Instant
from gpool.core.money.budgets import budget_level
from gpool.core.money.transfers import (
    FEE,
    TREASURY,
    AccountKind,
    Grant,
    LedgerAccountId,
    Refund,
    TransferId,
    TransferKind,
    TransferOutcome,
    TransferRequest,
    format_credits,
    format_month,
    month_of,
)
from gpool.core.permissions import Action, ObjectKind, TeamId, Thing, missing
from gpool.core.scheduler.order.limits import Holder
from gpool.server.actions.audit import audited, entry, note_read
from gpool.server.identity.authorization import permit
from gpool.server.server import Once, Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.identity import accounts as identities
from gpool.server.store.operations.identity import teams
from gpool.server.store.operations.money import accounts as operations
from gpool.server.store.operations.money import blocks
from gpool.server.store.operations.money.accounts import (
    AccountEntry,
    MonthlySpending,
    NewAccount,
)
from gpool.server.store.operations.money.funding import payer_kind
from gpool.server.store.operations.money.transfers import record_transfers
from gpool.server.store.protocol import Operation, operation
from gpool.wire.documents import instant_to_datetime
from gpool.wire.ledger import (
    BlockDocument,
    BudgetDocument,
    GrantRequest,
    LedgerDocument,
    LedgerEntryDocument,
    PoolLedgerDocument,
    RefundRequest,
    TransferDocument,
)

LAST = (1 << 63) - 1
"""Above every number of an entry."""

REASONS = {
    TransferOutcome.ID_REUSED: "the id {id} belongs to another transfer; choose another id",
    TransferOutcome.NO_CHARGE: "{about} is no charge; a charge is a transfer of the kind `post`",
    TransferOutcome.TOO_MUCH: "{amount} credits are more than is left of the charge {about}",
    TransferOutcome.NO_FUNDS: "the treasury cannot issue {amount} more credits",
}


# ---- reading


async def ledger(
    server: Server, who: Caller, holder: Holder, before: int | None, limit: int
) -> LedgerDocument:
    """Balances and entries of a user or team, for its members and operators."""
    thing = await _thing(server, who, holder)
    permit(who, Action.LEDGER_READ, thing, encode(*holder))
    await note_read(server, who, Action.LEDGER_READ, thing, encode(*holder))
    found = {row.kind: row for row in await server.store.read(operations.balances(holder))}
    own = found.get(payer_kind(holder).value)
    page: tuple[AccountEntry, ...] = ()
    if own is not None:
        account = LedgerAccountId(own.account_id)
        page = await server.store.read(operations.entries(account, before or LAST, limit))
    budget = await budget_of(server, holder)
    return LedgerDocument(
        balance_microcredits=0 if own is None else own.balance,
        pending_microcredits=found[AccountKind.PENDING].balance
        if AccountKind.PENDING in found
        else 0,
        earned_microcredits=found[AccountKind.OWNER].balance if AccountKind.OWNER in found else 0,
        month=budget.month,
        spent_microcredits=budget.spent_microcredits,
        budget_microcredits=budget.budget_microcredits,
        budget_level=budget.budget_level,
        entries=[entry_document(row) for row in page],
        next=str(page[-1].sequence) if len(page) == limit else None,
    )


async def _thing(server: Server, who: Caller, holder: Holder) -> Thing:
    """The account; one that is neither the caller's nor of a team of the caller's is looked up, as it may not exist."""
    kind, number = holder
    known: object
    if kind == "user":
        known = number == who.user.id or await server.store.read(identities.account(UserId(number)))
        return (
            Thing(ObjectKind.ACCOUNT, owner=UserId(number))
            if known
            else missing(ObjectKind.ACCOUNT)
        )
    team = TeamId(number)
    known = team in who.teams or await server.store.read(teams.team(team))
    return Thing(ObjectKind.ACCOUNT, team=team) if known else missing(ObjectKind.ACCOUNT)


def entry_document(row: AccountEntry) -> LedgerEntryDocument:
    return LedgerEntryDocument(
        number=row.sequence,
        kind=TransferKind(row.kind),
        transfer=row.transfer_id,
        at=instant_to_datetime(row.at),
        amount_microcredits=row.amount,
        balance_microcredits=row.balance,
    )


async def pool_ledger(server: Server) -> PoolLedgerDocument:
    """The route has checked LEDGER_VERIFY."""
    rows = await server.store.read(blocks.accounts(0, FEE))
    balances = {row.id: row.balance for row in rows}
    uncleared = await server.store.read(operations.uncleared())
    head = await server.store.read(blocks.head())
    return PoolLedgerDocument(
        treasury_microcredits=balances.get(TREASURY, 0),
        fee_microcredits=balances.get(FEE, 0),
        uncleared_microcredits=uncleared.amount,
        uncleared_since=None
        if uncleared.oldest_at is None
        else instant_to_datetime(uncleared.oldest_at),
        head=None
        if head is None
        else BlockDocument(
            number=head.number, hash=head.hash, sealed_at=instant_to_datetime(head.sealed_at)
        ),
    )


# ---- grants and refunds


async def grant(
    server: Server, who: Caller, to: Holder, wanted: GrantRequest, once: Once | None
) -> TransferDocument:
    """The route has checked LEDGER_GRANT."""
    account = NewAccount(to, payer_kind(to), LedgerAccountId(server.ids.next()))
    id_ = TransferId(wanted.id or f"grant:{server.ids.next()}")
    facts = _facts(id_, wanted.amount_microcredits, wanted.note)
    note = entry(server.now, who, "ledger.grant", encode(*to), **facts)
    change = _grant(account, id_, wanted.amount_microcredits, server.now)
    answered = await server.write_once(who.user, once, audited(change, [note]), _encoded)
    return TransferDocument.model_validate_json(answered.body)


@operation
def _grant(
    to: NewAccount, id_: TransferId, amount: int, at: Instant
) -> Operation[TransferDocument]:
    yield from check_holder(to.holder)
    opened = yield from operations.open_accounts([to])
    return (yield from _moved(Grant(id_, opened[to.holder, to.kind], amount), amount, "", at))


async def refund(
    server: Server, who: Caller, wanted: RefundRequest, once: Once | None
) -> TransferDocument:
    """The route has checked LEDGER_REFUND."""
    id_ = TransferId(wanted.id or f"refund:{server.ids.next()}")
    facts = _facts(id_, wanted.amount_microcredits, wanted.note)
    note = entry(server.now, who, "ledger.refund", wanted.charge, **facts)
    change = _refund(Refund(id_, TransferId(wanted.charge), wanted.amount_microcredits), server.now)
    answered = await server.write_once(who.user, once, audited(change, [note]), _encoded)
    return TransferDocument.model_validate_json(answered.body)


@operation
def _refund(request: Refund, at: Instant) -> Operation[TransferDocument]:
    return (yield from _moved(request, request.amount, request.charge, at))


def _moved(
    request: TransferRequest, amount: int, about: str, at: Instant
) -> Operation[TransferDocument]:
    """Record one transfer; a refusal is raised with its reason."""
    done = yield from record_transfers([request], at)
    [outcome] = done.outcomes
    if not outcome.is_done:
        reason = REASONS.get(outcome, "the transfer {id} is not possible: " + outcome.value)
        detail = reason.format(id=request.id, amount=format_credits(amount), about=about)
        raise Conflict(detail)
    is_new = outcome is TransferOutcome.MOVED
    return TransferDocument(id=request.id, outcome="moved" if is_new else "repeated")


def _encoded(document: TransferDocument) -> bytes:
    return document.model_dump_json().encode()


def _facts(id_: TransferId, amount: int, note: str) -> dict[str, str]:
    facts = {"transfer": id_, "microcredits": str(amount)}
    return {**facts, "note": note} if note else facts


def check_holder(holder: Holder) -> Operation[None]:
    """`NotFound` if there is no such user or team."""
    kind, number = holder
    there: object = (
        (yield from identities.account(UserId(number)))
        if kind == "user"
        else (yield from teams.team(TeamId(number)))
    )
    if there is None:
        raise NotFound(f"no {kind} {encode(kind, number)} on this server")


# ---- budgets


async def budget_of(server: Server, holder: Holder) -> BudgetDocument:
    """The caller's permission was checked earlier in the request."""
    now = server.now
    reading = operations.spending(holder, payer_kind(holder), now)
    found: MonthlySpending = await server.store.read(reading)
    level = None if found.cap is None else budget_level(found.cap, found.spent)
    return BudgetDocument(
        month=format_month(month_of(now)),
        spent_microcredits=found.spent,
        budget_microcredits=found.cap,
        budget_level=level,
    )


async def set_budget(
    server: Server, who: Caller, holder: Holder, cap: int | None, once: Once | None
) -> BudgetDocument:
    permit(who, Action.BUDGET_SET, await _thing(server, who, holder), encode(*holder))
    payer = NewAccount(holder, payer_kind(holder), LedgerAccountId(server.ids.next()))
    facts = {"cap_microcredits": "none" if cap is None else str(cap)}
    note = entry(server.now, who, "budget.set", encode(*holder), **facts)
    change = audited(_set_budget(payer, cap, server.now), [note])
    await server.write_once(who.user, once, change, lambda _: b"")
    return await budget_of(server, holder)


@operation
def _set_budget(payer: NewAccount, cap: int | None, at: Instant) -> Operation[None]:
    yield from check_holder(payer.holder)
    yield from operations.set_budget(payer, cap, at)

"""Routes of the ledger: balances and budgets of users and teams; grants, refunds and verification by operators."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import Invalid
from gpool.core.ids import decode
from gpool.core.permissions import Action
from gpool.core.scheduler.order.limits import Holder
from gpool.server.actions.money import deposits, ledger, verification
from gpool.server.actions.money.verification import BlockAnchor, LedgerReport
from gpool.server.api.callers import server_of, user_of
from gpool.server.api.endpoints import EndpointRouter, created
from gpool.server.api.messages import Limit, answer, document_of
from gpool.server.overload.admission import LoadClass
from gpool.server.store.identity_values import Caller
from gpool.wire.ledger import (
    BudgetDocument,
    BudgetRequest,
    DepositsDocument,
    DepositsResume,
    GrantRequest,
    LedgerCheckDocument,
    LedgerDocument,
    LedgerFindingDocument,
    PoolDepositsDocument,
    PoolLedgerDocument,
    RefundRequest,
    TransferDocument,
)

routes = EndpointRouter("money")

OfTeam = Annotated[str | None, Query(description="Team id: account of this team")]
OfUser = Annotated[str | None, Query(description="User id: account of this user, for operators")]
_ANCHOR = re.compile(r"([0-9]{1,18}):([0-9a-f]{64})")


@routes.get(
    "/v1/ledger",
    Action.LEDGER_READ,
    load=LoadClass.LISTING,
    returns=LedgerDocument,
    problems=(400,),
)
async def read_ledger(
    request: Request,
    limit: Limit = 20,
    cursor: Annotated[int | None, Query(ge=1, le=(1 << 63) - 1)] = None,
    team: OfTeam = None,
    user: OfUser = None,
) -> Response:
    """Read balance, funds set aside, spending of the month and entries, newest first."""
    who = await user_of(request)
    holder = holder_of(who, team, user)
    return answer(await ledger.ledger(server_of(request), who, holder, cursor, limit))


@routes.put("/v1/budget", Action.BUDGET_SET, body=BudgetRequest, returns=BudgetDocument)
async def set_budget(request: Request, team: OfTeam = None, user: OfUser = None) -> Response:
    """Set the monthly budget of your account or of a team that you own; operators set any. Null removes it."""
    who = await user_of(request)
    wanted, once = await document_of(request, BudgetRequest)
    holder = holder_of(who, team, user)
    cap = wanted.cap_microcredits
    return answer(await ledger.set_budget(server_of(request), who, holder, cap, once))


@routes.get("/v1/admin/ledger", Action.LEDGER_VERIFY, returns=PoolLedgerDocument)
async def read_pool_ledger(request: Request) -> Response:
    """Read the pool's own accounts, the uncleared funds and the last sealed block."""
    await user_of(request)
    return answer(await ledger.pool_ledger(server_of(request)))


@routes.post(
    "/v1/admin/ledger/grants",
    Action.LEDGER_GRANT,
    body=GrantRequest,
    returns=created(TransferDocument, "Granted, now or earlier under the same id"),
    problems=(404,),
)
async def grant_credits(request: Request) -> Response:
    """Grant credits of the treasury to a user or team."""
    who = await user_of(request)
    wanted, once = await document_of(request, GrantRequest)
    to = _named(wanted.to)
    return answer(await ledger.grant(server_of(request), who, to, wanted, once), 201)


@routes.post(
    "/v1/admin/ledger/refunds",
    Action.LEDGER_REFUND,
    body=RefundRequest,
    returns=created(TransferDocument, "Refunded, now or earlier under the same id"),
)
async def refund_charge(request: Request) -> Response:
    """Refund part or all of a charge to its payer, from the treasury."""
    who = await user_of(request)
    wanted, once = await document_of(request, RefundRequest)
    return answer(await ledger.refund(server_of(request), who, wanted, once), 201)


@routes.get(
    "/v1/admin/ledger/check",
    Action.LEDGER_VERIFY,
    returns=LedgerCheckDocument,
    load=LoadClass.LISTING,
    problems=(400,),
)
async def check_ledger(
    request: Request,
    anchor: Annotated[
        list[str] | None,
        Query(max_length=100, description="NUMBER:HASH of blocks kept earlier, to compare with"),
    ] = None,
) -> Response:
    """Recompute the ledger from its first entry."""
    await user_of(request)
    anchors = [_anchor(text) for text in anchor or []]
    return answer(_check(await verification.verify(server_of(request).store, anchors)))


@routes.get(
    "/v1/deposits",
    Action.DEPOSITS_READ,
    load=LoadClass.LISTING,
    returns=DepositsDocument,
    problems=(404,),
)
async def read_deposits(request: Request, limit: Limit = 20) -> Response:
    """Read where to send tokens, and your deposits, newest first; 404 if the pool takes no deposits."""
    who = await user_of(request)
    return answer(await deposits.own_deposits(server_of(request), who, limit))


@routes.get(
    "/v1/admin/deposits",
    Action.DEPOSITS_LIST_ALL,
    load=LoadClass.LISTING,
    returns=PoolDepositsDocument,
    problems=(404,),
)
async def read_open_deposits(request: Request, limit: Limit = 100) -> Response:
    """Read the state of the scan and the deposits that are not credited, newest first."""
    await user_of(request)
    return answer(await deposits.open_deposits(server_of(request), limit))


@routes.post(
    "/v1/admin/deposits/resume",
    Action.DEPOSITS_RESUME,
    body=DepositsResume,
    returns=PoolDepositsDocument,
    problems=(404,),
)
async def resume_deposits(request: Request) -> Response:
    """Scan the chain again from a block on, and end a halt."""
    who = await user_of(request)
    wanted, once = await document_of(request, DepositsResume)
    return answer(await deposits.resume(server_of(request), who, wanted.from_block, once))


def holder_of(who: Caller, team: str | None, user: str | None) -> Holder:
    if team is not None and user is not None:
        raise Invalid("'team' and 'user' name two accounts; send one of them")
    if team is not None:
        return "team", decode("team", team)
    return "user", who.user.id if user is None else decode("user", user)


def _named(text: str) -> Holder:
    if text.startswith("tm-"):
        return "team", decode("team", text)
    return "user", decode("user", text)


def _anchor(text: str) -> BlockAnchor:
    found = _ANCHOR.fullmatch(text)
    if found is None:
        raise Invalid(f"{text[:80]!r} is not an anchor; give NUMBER:HASH, as the check returns it")
    return BlockAnchor(int(found[1]), found[2])


def _check(report: LedgerReport) -> LedgerCheckDocument:
    head = report.head
    return LedgerCheckDocument(
        sound=report.is_sound,
        transfers=report.transfers,
        entries=report.entries,
        unsealed=report.unsealed,
        head=None if head is None else f"{head.number}:{head.hash}",
        findings=[
            LedgerFindingDocument(thing=each.thing, why=each.why) for each in report.findings
        ],
    )

"""Routes of receipts, statements, earnings and payouts; closing of periods and rewards by operators."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.ids import TaskId, UserId, decode
from gpool.core.permissions import Action
from gpool.server.actions.money import payouts, statements
from gpool.server.api.callers import server_of, user_of
from gpool.server.api.endpoints import EndpointRouter
from gpool.server.api.messages import Cursor, LargeLimit, Limit, answer, document_of, raw
from gpool.server.api.routes.ledger import OfTeam, OfUser, holder_of
from gpool.server.overload.admission import LoadClass
from gpool.server.store.operations.money.usage import TotalsBy
from gpool.wire.earnings import (
    ClosedPeriodDocument,
    ClosePeriodRequest,
    EarningsDocument,
    PayoutFileDocument,
    PayoutPage,
    ReceiptDocument,
    ReceiptPage,
    RewardsDocument,
    RewardsRequest,
    UsagePage,
    UsePage,
)

routes = EndpointRouter("money")

OfMonth = Annotated[str | None, Query(description="Month in UTC, 2026-11")]
Months = Annotated[
    int, Query(ge=1, le=statements.MOST_MONTHS, description="Number of months up to `month`")
]
OfTask = Annotated[str | None, Query(description="Task id, t-…")]
RECEIPT = Annotated[str, Path(description="Receipt id, rc-…")]
PERIOD = Annotated[str, Path(description="Number of a closed period")]


@routes.get(
    "/v1/receipts",
    Action.LEDGER_READ,
    load=LoadClass.LISTING,
    returns=ReceiptPage,
    problems=(400,),
)
async def list_receipts(
    request: Request,
    limit: Limit = 50,
    cursor: Cursor = None,
    task: OfTask = None,
    month: OfMonth = None,
    team: OfTeam = None,
    user: OfUser = None,
) -> Response:
    """List receipts that your account, or a team of yours, paid or earned, newest first."""
    who, server = await user_of(request), server_of(request)
    own = await statements.accounts_of(server, who, holder_of(who, team, user))
    query = statements.receipt_query(
        own,
        None if cursor is None else decode("receipt", cursor),
        limit,
        None if task is None else TaskId(decode("task", task)),
        None if month is None else statements.parse_month(month),
    )
    return answer(await statements.receipts(server, own, query))


@routes.get("/v1/receipts/{id}", Action.LEDGER_READ, returns=ReceiptDocument)
async def read_receipt(request: Request, id: RECEIPT) -> Response:
    """Read the canonical bytes of a receipt, which `gpool receipt verify` checks offline."""
    who = await user_of(request)
    return raw(await statements.receipt(server_of(request), who, decode("receipt", id)))


@routes.get(
    "/v1/usage", Action.LEDGER_READ, load=LoadClass.LISTING, returns=UsagePage, problems=(400,)
)
async def read_usage(
    request: Request,
    limit: LargeLimit = 200,
    cursor: Cursor = None,
    month: OfMonth = None,
    months: Months = 1,
    team: OfTeam = None,
    user: OfUser = None,
) -> Response:
    """Read the charges of one or more months, spent and earned, oldest first."""
    who, server = await user_of(request), server_of(request)
    own = await statements.accounts_of(server, who, holder_of(who, team, user))
    asked = statements.months_to(server, month, months)
    after = statements.position_of(cursor)
    return answer(await statements.usage(server, own, asked, after, limit))


@routes.get(
    "/v1/usage/totals", Action.LEDGER_READ, load=LoadClass.LISTING, returns=UsePage, problems=(400,)
)
async def read_usage_totals(
    request: Request,
    by: Annotated[TotalsBy, Query(description="Grouping of the totals")] = TotalsBy.GPU,
    limit: LargeLimit = 200,
    cursor: Cursor = None,
    month: OfMonth = None,
    months: Months = 1,
    team: OfTeam = None,
    user: OfUser = None,
) -> Response:
    """Read the run time and GPU time that your tasks used and your nodes served, with and without prices."""
    who, server = await user_of(request), server_of(request)
    holder = holder_of(who, team, user)
    await statements.accounts_of(server, who, holder)
    asked = statements.months_to(server, month, months)
    after = statements.totals_position(cursor)
    return answer(await statements.totals(server, holder, asked, by, after, limit))


@routes.get(
    "/v1/earnings",
    Action.LEDGER_READ,
    load=LoadClass.LISTING,
    returns=EarningsDocument,
    problems=(400,),
)
async def read_earnings(
    request: Request,
    months: Months = 12,
    month: OfMonth = None,
    user: OfUser = None,
) -> Response:
    """Read the earnings of your nodes by month, node and GPU, rewards, and the history of your payout wallet."""
    who, server = await user_of(request), server_of(request)
    _, number = holder_of(who, None, user)
    newest = None if month is None else statements.parse_month(month)
    return answer(await statements.earnings(server, who, UserId(number), newest, months))


@routes.get(
    "/v1/payouts", Action.LEDGER_READ, load=LoadClass.LISTING, returns=PayoutPage, problems=(400,)
)
async def list_payouts(
    request: Request,
    limit: Limit = 50,
    cursor: Annotated[int | None, Query(ge=1, le=(1 << 53) - 1)] = None,
    user: OfUser = None,
) -> Response:
    """List closed periods, newest first, with your part of each."""
    who, server = await user_of(request), server_of(request)
    own = await statements.accounts_of(server, who, holder_of(who, None, user))
    before = statements.LAST if cursor is None else cursor
    return answer(await payouts.payouts(server, own, before, limit))


@routes.get("/v1/payouts/{id}", Action.LEDGER_READ, returns=PayoutFileDocument)
async def read_payout(request: Request, id: PERIOD) -> Response:
    """Read the payout file of a closed period, byte by byte, from which claims are made."""
    who, server = await user_of(request), server_of(request)
    return raw(await payouts.payout_file(server, who, id))


@routes.post(
    "/v1/admin/payouts",
    Action.LEDGER_GRANT,
    body=ClosePeriodRequest,
    returns=ClosedPeriodDocument,
    problems=(400, 409),
)
async def close_period(request: Request) -> Response:
    """Close a month: build the payout file from vested earnings and rewards, and record them as paid."""
    who = await user_of(request)
    wanted, once = await document_of(request, ClosePeriodRequest)
    return answer(await payouts.close(server_of(request), who, wanted, once))


@routes.post(
    "/v1/admin/rewards",
    Action.LEDGER_GRANT,
    body=RewardsRequest,
    returns=RewardsDocument,
    problems=(400, 409),
)
async def share_rewards(request: Request) -> Response:
    """Share a reward pool by the contributions of a month."""
    who = await user_of(request)
    wanted, once = await document_of(request, RewardsRequest)
    return answer(await payouts.rewards(server_of(request), who, wanted, once))

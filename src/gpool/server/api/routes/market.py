"""Routes of prices: offers of the pool, and quotes for submissions that are not made."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.model import SECOND, GpuRequest, Requirements, Span, Tier
from gpool.core.money.offers import OfferFilter
from gpool.core.permissions import Action
from gpool.core.specs import fields
from gpool.core.specs import gpu as gpuspec
from gpool.server.actions.market import offers as offers_actions
from gpool.server.actions.market import quote as quote_actions
from gpool.server.api.callers import server_of, user_of
from gpool.server.api.endpoints import EndpointRouter
from gpool.server.api.messages import Cursor, Limit, answer, document_of, tagged
from gpool.server.identity.throttle import RouteClass
from gpool.server.overload.admission import LoadClass
from gpool.wire.documents import MAX_SMALL_BODY_BYTES, TaskRequest
from gpool.wire.market import OfferPage, QuoteDocument

routes = EndpointRouter("market")

_ANY = (GpuRequest(),)


@routes.get(
    "/v1/offers", Action.NODES_LIST, load=LoadClass.LISTING, returns=OfferPage, problems=(400,)
)
async def list_offers(
    request: Request,
    limit: Limit = 50,
    cursor: Cursor = None,
    gpu: Annotated[
        str | None, Query(max_length=200, description="GPU requirement, like H100:2 or 24GB")
    ] = None,
    max_price: Annotated[
        str | None,
        Query(max_length=40, description="Most credits per hour for the requirement, like 0.40/h"),
    ] = None,
    tier: Annotated[
        Literal["container", "vm"], Query(description="Minimum isolation")
    ] = "container",
    min_mtbf_hours: Annotated[
        float,
        Query(
            ge=0,
            le=1e6,
            allow_inf_nan=False,
            description="Least mean time between losses of the node",
        ),
    ] = 0,
    min_tflops_per_credit: Annotated[
        float,
        Query(
            ge=0,
            le=1e9,
            allow_inf_nan=False,
            description="Least measured TFLOP/s for one credit an hour",
        ),
    ] = 0,
    min_memory_gb_per_s: Annotated[
        int, Query(ge=0, le=1_000_000, description="Least measured bandwidth of the GPU's memory")
    ] = 0,
    free: Annotated[bool, Query(description="Only nodes with a GPU that is free now")] = False,
) -> Response:
    """List what GPUs cost you, grouped by model and price, the cheapest first."""
    who = await user_of(request)
    needs = Requirements(
        gpu=_ANY if gpu is None else gpuspec.parse(gpu),
        cpu_milli=0,
        memory_bytes=0,
        tier=Tier(tier),
        max_price_microcredits=None if max_price is None else fields.parse_price(max_price),
    )
    wanted = OfferFilter(
        Span(round(min_mtbf_hours * 3600 * SECOND)),
        min_tflops_per_credit,
        min_memory_gb_per_s,
        free,
    )
    after = offers_actions.parse_cursor(cursor) if cursor else None
    page = await offers_actions.offers(server_of(request), who, needs, wanted, after, limit)
    return tagged(request, page)


@routes.post(
    "/v1/quotes",
    Action.TASK_QUOTE,
    rate=RouteClass.READ,
    load=LoadClass.EXPLAIN,
    body=TaskRequest,
    returns=QuoteDocument,
    problems=(422,),
)
async def create_quote(request: Request) -> Response:
    """Estimate cost and start of a submission without making it."""
    who = await user_of(request)
    wanted, _ = await document_of(request, TaskRequest, MAX_SMALL_BODY_BYTES)
    return answer(await quote_actions.quote(server_of(request), who, wanted))

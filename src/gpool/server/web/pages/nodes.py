"""The visitor's machines: health, findings, what runs there, pause and drain, and the link that joins another one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import segno
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import GpoolError, Invalid
from gpool.core.ids import GpuId, NodeId, decode
from gpool.core.model import Availability
from gpool.core.permissions import Action
from gpool.server.actions import joining, lending, listing, node_tasks
from gpool.server.actions.money import statements
from gpool.server.api.callers import server_of
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.node_pages import NodeFilter
from gpool.server.web.parts import part
from gpool.server.web.rendering import page
from gpool.server.web.routing import PageRouter, see
from gpool.server.web.visitors import form_of, visitor
from gpool.wire.earnings import EarningsDocument
from gpool.wire.nodes import InviteDocument

routes = PageRouter("pages")

PAGE = 20
ENDED = 5
LINK_LIFE_S = 3600
MONTHS = 6


@routes.page("/nodes", Action.NODES_LIST)
async def show_nodes(request: Request) -> Response:
    """Show the visitor's machines."""
    return await _nodes(request, await visitor(request))


async def _nodes(
    request: Request,
    who: Caller,
    *,
    link: InviteDocument | None = None,
    error: GpoolError | None = None,
) -> Response:
    server = server_of(request)
    cursor = request.query_params.get("cursor", "")
    after = NodeId(decode("node", cursor)) if cursor else None
    found = await listing.nodes(server, who, NodeFilter(owner=who.user.id), after, PAGE)
    tasks = {
        node.id: await part(
            node_tasks.node_tasks(server, who, NodeId(decode("node", node.id)), ENDED)
        )
        for node in found.items
    }
    money = await part(statements.earnings(server, who, who.user.id, None, MONTHS))
    return page(
        request,
        "nodes.html",
        200 if error is None else error.status,
        nodes=found.items,
        next=found.next,
        tasks=tasks,
        money=money.value,
        months=[] if money.value is None else earned_months(money.value),
        link=link,
        qr=None if link is None else qr(link.link),
        error=error,
    )


@dataclass(frozen=True, slots=True)
class EarnedMonth:
    """`share`: part of the best month, for its bar."""

    month: str
    microcredits: int
    share: float


def earned_months(money: EarningsDocument) -> list[EarnedMonth]:
    """Charges and rewards by month, oldest first; forfeited charges are not counted."""
    found: Counter[str] = Counter()
    for item in money.items:
        if item.state != "forfeited":
            found[item.month] += item.microcredits
    for reward in money.rewards:
        found[reward.month] += reward.microcredits
    months = sorted(found.items())[-MONTHS:]
    most = max((amount for _, amount in months), default=0) or 1
    return [EarnedMonth(month, amount, amount / most) for month, amount in months]


def qr(text: str) -> Markup:
    """QR code as inline SVG without styles, which the content policy would refuse."""
    code = segno.make(text, error="m")
    svg = code.svg_inline(svgclass="qr", lineclass=None, omitsize=True)
    return Markup(svg)


@routes.form("/nodes/invite", Action.NODE_INVITE)
async def create_join_link(request: Request) -> Response:
    """Create a link with which one machine joins, and show it."""
    who = await visitor(request)
    made = await joining.invite(server_of(request), who, LINK_LIFE_S, None)
    return await _nodes(request, who, link=made)


@routes.form("/nodes/{id}/availability", Action.NODE_CHANGE)
async def change_node_on_page(request: Request, id: str) -> Response:
    """Pause, drain or resume a machine."""
    who, form = await visitor(request), await form_of(request)
    try:
        wanted = Availability(form.text("to", "paused"))
    except ValueError:
        raise Invalid("a machine can be available, paused or draining") from None
    await lending.set_availability(
        server_of(request), who, NodeId(decode("node", id)), wanted, None
    )
    return see("/nodes")


@routes.form("/gpus/{gpu}/availability", Action.GPU_CHANGE)
async def change_gpu_on_page(request: Request, gpu: str) -> Response:
    """Pause a GPU, take it back at once (its tasks are preempted), or lend it again."""
    who, form, server = await visitor(request), await form_of(request), server_of(request)
    id_ = GpuId(decode("gpu", gpu))
    to = form.text("to", "paused")
    if to == "available" and form.is_set("quarantined"):
        await lending.quarantine(server, who, id_, None, None)
    await lending.set_gpu_available(server, who, id_, to == "available", None)
    if to == "reclaim":
        await lending.reclaim(server, id_)
    return see("/nodes")

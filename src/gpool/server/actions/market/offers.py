"""Offers of the pool, grouped by GPU model and price, from the scheduling state. Only reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gpool.core.errors import Invalid
from gpool.core.model import Requirements, Shape, TaskKind
from gpool.core.money.offers import (
    OfferFilter,
    OfferGroup,
    OfferKey,
    OfferTable,
    tflops_per_credit,
)
from gpool.core.specs.fields import DEFAULT_ENVIRONMENT
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.wire.market import OfferDocument, OfferPage

NODES_AT_ONCE = 50
"""Nodes that are grouped before others get the loop."""

_HOUR = 3600 * 1_000_000


async def offers(
    server: Server,
    who: Caller,
    needs: Requirements,
    wanted: OfferFilter,
    after: OfferKey | None,
    limit: int,
) -> OfferPage:
    """Offers that match for the caller's own tasks or those of one of the caller's teams, the cheapest first."""
    shapes = [
        Shape(who.user.id, needs, 0, TaskKind.COMMAND, DEFAULT_ENVIRONMENT, "", team)
        for team in (None, *who.teams)
    ]
    async with server.turns.listings.turn(who.user.id):
        table = await grouped(server, shapes, wanted)
    found = table.page(after, limit + 1)
    more = cursor_of(found[limit - 1][0]) if len(found) > limit else None
    return OfferPage(items=[offer_document(*each) for each in found[:limit]], next=more)


async def grouped(server: Server, shapes: Sequence[Shape], wanted: OfferFilter) -> OfferTable:
    table = OfferTable(shapes, wanted)
    nodes = list(server.picture.state.nodes.values())
    for place, entry in enumerate(nodes):
        if entry.node is not None:
            table.add(entry.node, entry.room)
        if place % NODES_AT_ONCE == NODES_AT_ONCE - 1:
            await asyncio.sleep(0)
    return table


def offer_document(key: OfferKey, group: OfferGroup) -> OfferDocument:
    value = tflops_per_credit(group.gigaflops, key.price_microcredits)
    return OfferDocument(
        model=key.model,
        vendor=key.vendor,
        memory_bytes=key.memory_bytes,
        simulated=key.simulated,
        price_microcredits=key.price_microcredits,
        min_charge_microcredits=group.min_charge_microcredits,
        gpus=group.gpus,
        free=group.free,
        nodes=group.nodes,
        verified=group.proven,
        tiers=[tier.value for tier in sorted(group.tiers, key=lambda tier: tier.strength)],
        notice_s=group.notice_s,
        mtbf_hours=round(group.mtbf / _HOUR, 1),
        gigaflops=group.gigaflops or None,
        memory_gb_per_s=group.memory_gb_per_s or None,
        tflops_per_credit=None if value is None else round(value, 3),
    )


def cursor_of(key: OfferKey) -> str:
    return (
        f"{key.price_microcredits}.{key.memory_bytes}.{int(key.simulated)}.{key.vendor}.{key.model}"
    )


def parse_cursor(text: str) -> OfferKey:
    price, memory, simulated, vendor, model = (*text.split(".", 4), "", "", "", "")[:5]
    numbers = (price, memory, simulated)
    if not model or any(not (n.isascii() and n.isdigit() and len(n) < 20) for n in numbers):
        raise Invalid(f"'cursor' is {text[:60]!r}; give the `next` of the page before")
    return OfferKey(int(price), model, int(memory), simulated == "1", vendor)

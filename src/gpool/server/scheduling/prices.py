"""Prices of planned allocations, as the planner sees them; `charging` has the loop that follows.

A task whose payer lacks the funds for the first five minutes is not started: it leaves the queue until the payer's
balance or budget allows it (`backoff.RejectedPlans`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from gpool.core.ids import IdSource
from gpool.core.model import Allocation, Node
from gpool.core.money.budgets import BudgetWarning
from gpool.core.money.charging import FrozenPrice
from gpool.core.money.prices import is_free_for, is_priced
from gpool.core.money.transfers import AccountKind, LedgerAccountId
from gpool.core.scheduler.order.limits import Holder
from gpool.core.scheduler.place.fit import price_of
from gpool.core.scheduler.state.events import GangPart, Placement
from gpool.core.scheduler.state.state import State
from gpool.server.store.operations.money.accounts import NewAccount
from gpool.server.store.operations.money.funding import Funding, PlaceTerms, payer_kind, payer_of

MOST_WARNINGS = 1000


class PlanPrices:
    """Prices of plans. `warnings`: budgets that a grant brought to 80 % or to their end, for the loop to record."""

    def __init__(self, ids: IdSource, fee_ppm: int) -> None:
        self._ids, self._fee_ppm = ids, fee_ppm
        self.warnings: deque[BudgetWarning] = deque(maxlen=MOST_WARNINGS)

    def add_warnings(self, warnings: Iterable[BudgetWarning]) -> None:
        self.warnings.extend(warnings)

    def is_any(self, places: Iterable[Placement], state: State) -> bool:
        return any(True for place in places for _ in _priced(place, state))

    def funding(self, places: Sequence[Placement], state: State) -> Funding | None:
        """None: no allocation of the plan has a price."""
        terms = {}
        holders: dict[tuple[Holder, AccountKind], None] = {}
        for place in places:
            for part, node, price in _priced(place, state):
                key = (part.node, part.allocation.number)
                terms[key] = PlaceTerms(price, node.owner, gpus_text(node, part.allocation))
                payer = payer_of(place.shape.user, place.shape.team)
                holders[payer, payer_kind(payer)] = None
                holders[payer, AccountKind.PENDING] = None
                holders[("user", node.owner), AccountKind.OWNER] = None
        if not terms:
            return None
        new = zip(holders, self._ids.take(len(holders)), strict=True)
        accounts = tuple(NewAccount(*each, LedgerAccountId(id_)) for each, id_ in new)
        return Funding(terms, accounts, self._fee_ppm)


def _priced(place: Placement, state: State) -> Iterator[tuple[GangPart, Node, FrozenPrice]]:
    for part in (GangPart(place.node, place.allocation), *place.members):
        entry = state.nodes.get(part.node)
        node = None if entry is None else entry.node
        if node is None or not is_priced(node.offer):
            continue
        if is_free_for(node, place.shape.user, place.shape.team):
            continue
        rate = price_of(node, part.allocation, place.shape)
        minimum = node.offer.min_charge_microcredits
        if rate or minimum:
            yield part, node, FrozenPrice(rate, minimum)


def gpus_text(node: Node, allocation: Allocation) -> str:
    """JSON of the GPUs of an allocation: model, slice (profile, or its part of the GPU), position."""
    models = {gpu.index: gpu.model for gpu in node.offer.gpus}
    return json.dumps(
        [
            {
                "model": models.get(part.gpu_index, ""),
                "slice": part.profile or f"{part.share_milli / 1000:g}",
                "position": part.gpu_index,
            }
            for part in allocation.slices
        ],
        separators=(",", ":"),
    )

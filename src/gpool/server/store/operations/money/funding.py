"""Funds of planned allocations: set aside with the grant, in the transaction that writes the leases.

The price is that of the plan: what the task's own limit was compared with. A further lease on an allocation that has
a meter joins it and sets nothing aside: `meters.extend` does, when less than half of the reservation is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.lifecycle import Move, sources
from gpool.core.model import Instant, Span
from gpool.core.money.budgets import BudgetWarning
from gpool.core.money.charging import AllocationMeter, FrozenPrice, set_aside
from gpool.core.money.metering import renew_at
from gpool.core.money.transfers import (
    AccountKind,
    LedgerAccountId,
    Reserve,
    TransferOutcome,
)
from gpool.core.scheduler.order.limits import Holder
from gpool.core.scheduler.state.events import GangPart, Placement
from gpool.server.store.generated_rows import MetersRecord
from gpool.server.store.operations.money.accounts import NewAccount, open_accounts
from gpool.server.store.operations.money.charges import (
    METER,
    PLACES,
    spent_by,
)
from gpool.server.store.operations.money.meters import reserve_of, shares_of
from gpool.server.store.operations.money.transfers import record_bundles
from gpool.server.store.protocol import Operation, Relation, Statement
from gpool.server.store.rows import relation_columns, select
from gpool.server.store.values import UnfundedPlace

GRANTABLE = ", ".join(f"'{status.value}'" for status in sources(Move.GRANTED))
LOCKED = "/*postgresql ORDER BY m.task_id, m.epoch, m.rank FOR UPDATE OF m*/"


@dataclass(frozen=True, slots=True)
class PlaceTerms:
    """Price of one allocation as planned. `gpus`: JSON of model, slice and position."""

    price: FrozenPrice
    owner: UserId
    gpus: str


@dataclass(frozen=True, slots=True)
class Funding:
    """Prices of a plan's allocations, by node and number; those without a price are absent.

    `accounts`: of payers and owners, with new ids for those that have none yet.
    """

    terms: Mapping[tuple[NodeId, int], PlaceTerms]
    accounts: tuple[NewAccount, ...]
    fee_ppm: int = 0


@dataclass(frozen=True, slots=True)
class FundedPlaces:
    """`metered`: tasks on allocations with a meter. `refused`: all others of places with a price."""

    metered: frozenset[TaskId] = frozenset()
    refused: frozenset[TaskId] = frozenset()
    unfunded: tuple[UnfundedPlace, ...] = ()
    warnings: tuple[BudgetWarning, ...] = ()


def payer_of(user: int, team: int | None) -> Holder:
    return ("user", user) if team is None else ("team", team)


def payer_kind(holder: Holder) -> AccountKind:
    """Kind of the account that a user or team pays from."""
    return AccountKind.USER if holder[0] == "user" else AccountKind.TEAM


# ---- grants


class _Grantable(NamedTuple):
    id: TaskId
    max_cost: int | None


class _WantedLease(NamedTuple):
    id: int
    epoch: int


@dataclass(slots=True)
class _PricedPlace:
    place: Placement
    parts: list[tuple[int, GangPart]]  # with a price; the rank of each
    tasks: list[TaskId]
    left: int | None = None  # of all their `max_cost`; None: unlimited
    joins: list[MetersRecord] = field(default_factory=list)


def fund(places: Sequence[Placement], funding: Funding, at: Instant) -> Operation[FundedPlaces]:
    """Set funds aside for the planned allocations with a price, as a step before their leases are written."""
    priced = [(place, parts) for place in places if (parts := _priced_parts(place, funding))]
    if not priced:
        return FundedPlaces()
    named = {grant.task for place, _ in priced for grant in place.grants}
    wanted: list[_PricedPlace] = []
    grantable = yield from _grantable([place for place, _ in priced])
    spent = yield from spent_by(id_ for id_, cap in grantable.items() if cap is not None)
    taken: set[TaskId] = set()
    for place, parts in priced:
        tasks = []
        for grant in place.grants:
            cap = grantable.get(grant.task, 0)
            if grant.task not in taken and (cap is None or cap > spent.get(grant.task, 0)):
                tasks.append(grant.task)
                taken.add(grant.task)
        if tasks:
            caps = [grantable[task] for task in tasks]
            lefts = [
                cap - spent.get(task, 0)
                for task, cap in zip(tasks, caps, strict=True)
                if cap is not None
            ]
            left = sum(lefts) if len(lefts) == len(tasks) else None
            wanted.append(_PricedPlace(place, parts, tasks, left))
    yield from _join(wanted)
    new = [each for each in wanted if not each.joins]
    accounts: Mapping[tuple[Holder, AccountKind], LedgerAccountId] = {}
    if new:
        accounts = yield from open_accounts(funding.accounts)
    opened = [_new_meters(each, funding, accounts, at) for each in new]
    done = yield from record_bundles([[reserve for _, reserve in each] for each in opened], at)
    rows: list[MetersRecord] = []
    metered: set[TaskId] = {task for each in wanted if each.joins for task in each.tasks}
    unfunded: list[UnfundedPlace] = []
    for each, meters, outcome in zip(new, opened, done.outcomes, strict=True):
        if outcome is TransferOutcome.MOVED:
            rows += [meter for meter, _ in meters]
            metered.update(each.tasks)
        else:
            shape, needed = each.place.shape, sum(reserve.amount for _, reserve in meters)
            payer = payer_of(shape.user, shape.team)
            unfunded.append(UnfundedPlace(tuple(each.tasks), payer, outcome, needed))
    yield from _insert(rows)
    yield from _add_leases([each for each in wanted if each.joins])
    refused = frozenset(named - metered)
    return FundedPlaces(frozenset(metered), refused, tuple(unfunded), done.warnings)


def _priced_parts(place: Placement, funding: Funding) -> list[tuple[int, GangPart]]:
    parts = (GangPart(place.node, place.allocation), *place.members)
    return [
        (rank, part)
        for rank, part in enumerate(parts)
        if (part.node, part.allocation.number) in funding.terms
    ]


def _grantable(places: Sequence[Placement]) -> Operation[dict[TaskId, int | None]]:
    wanted = {grant.task: grant.epoch for place in places for grant in place.grants}
    rows = yield from select(
        _Grantable,
        "SELECT t.id, t.max_cost FROM {wanted} AS w JOIN tasks t ON t.id = w.id "  # noqa: S608
        f"WHERE t.epoch = w.epoch - 1 AND t.status IN ({GRANTABLE}) /*postgresql ORDER BY t.id FOR UPDATE OF t*/",
        {},
        {"wanted": Relation(relation_columns(_WantedLease), sorted(wanted.items()))},
    )
    return {row.id: row.max_cost for row in rows}


def _join(wanted: Sequence[_PricedPlace]) -> Operation[None]:
    """Find open meters of allocations that further leases are added to; never of a gang, which has one lease."""
    alone = {
        (part.node, part.allocation.number): each
        for each in wanted
        if not each.place.members
        for _, part in each.parts
    }
    if not alone:
        return
    rows = yield from select(
        MetersRecord,
        f"SELECT {METER} FROM {{places}} AS p JOIN meters m ON m.node_id = p.node AND m.number = p.number "  # noqa: S608
        f"WHERE m.closed_at IS NULL {LOCKED}",
        {},
        {"places": Relation(PLACES, sorted(alone))},
    )
    for row in rows:
        alone[row.node_id, row.number].joins.append(row)


def _new_meters(
    wanted: _PricedPlace,
    funding: Funding,
    accounts: Mapping[tuple[Holder, AccountKind], LedgerAccountId],
    at: Instant,
) -> list[tuple[MetersRecord, Reserve]]:
    shape = wanted.place.shape
    payer = payer_of(shape.user, shape.team)
    epochs = {grant.task: grant.epoch for grant in wanted.place.grants}
    first = wanted.tasks[0]
    terms = [
        (rank, part, funding.terms[part.node, part.allocation.number])
        for rank, part in wanted.parts
    ]
    shares = shares_of(wanted.left, [each.price for _, _, each in terms])
    found = []
    for (rank, part, each), share in zip(terms, shares, strict=True):
        meter = AllocationMeter(each.price, at)
        amount = max(1, set_aside(each.price, Span(0)))
        if share is not None:
            amount = max(1, min(amount, share))
        row = MetersRecord(
            first,
            epochs[first],
            rank,
            part.node,
            part.allocation.number,
            accounts[payer, payer_kind(payer)],
            accounts[payer, AccountKind.PENDING],
            accounts[("user", each.owner), AccountKind.OWNER],
            each.price.rate_microcredits,
            each.price.minimum_microcredits,
            funding.fee_ppm,
            each.gpus,
            at,
            0,
            0,
            0,
            amount,
            0,
            len(wanted.tasks),
            renew_at(meter, amount),
            None,
        )
        found.append((row, reserve_of(row, amount, at)))
    return found


def _insert(rows: Sequence[MetersRecord]) -> Operation[None]:
    if rows:
        names = ", ".join(MetersRecord._fields)
        yield Statement(
            f"INSERT INTO meters ({names}) SELECT {names} FROM {{rows}} AS r",  # noqa: S608
            {},
            {"rows": Relation(relation_columns(MetersRecord), rows)},
        )


class _MoreLeases(NamedTuple):
    task: int
    epoch: int
    rank: int
    leases: int


def _add_leases(joining: Sequence[_PricedPlace]) -> Operation[None]:
    more = [
        _MoreLeases(row.task_id, row.epoch, row.rank, len(each.tasks))
        for each in joining
        for row in each.joins
    ]
    if more:
        yield Statement(
            "UPDATE meters SET leases = meters.leases + a.leases FROM {added} AS a "
            "WHERE meters.task_id = a.task AND meters.epoch = a.epoch AND meters.rank = a.rank",
            {},
            {"added": Relation(relation_columns(_MoreLeases), sorted(more))},
        )

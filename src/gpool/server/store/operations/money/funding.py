"""Funds of planned allocations: set aside with the grant, in the transaction that writes the leases.

The price is that of the plan: what the task's own limit was compared with. A further lease on an allocation that has
a meter joins it and sets nothing aside: `meters.extend` does, when less than half of the reservation is left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
    MeterKey,
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
    """`metered`: tasks on allocations with a meter. `refused`: all others of places with a price. `joined`: open meters."""

    metered: frozenset[TaskId] = frozenset()
    refused: frozenset[TaskId] = frozenset()
    unfunded: tuple[UnfundedPlace, ...] = ()
    warnings: tuple[BudgetWarning, ...] = ()
    joined: Mapping[tuple[NodeId, int], MeterKey] = field(default_factory=dict)


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


def fund(places: Sequence[Placement], funding: Funding, at: Instant) -> Operation[FundedPlaces]:
    """Set funds aside for the planned allocations with a price, as a step before their leases are written.

    Leases that join a meter need none; the caller counts those that it wrote (`add_leases`).
    """
    priced = [(place, parts) for place in places if (parts := _priced_parts(place, funding))]
    if not priced:
        return FundedPlaces()
    joins = yield from _open_meters([place for place, _ in priced if not place.members])
    joining = {_key(place) for place, _ in priced if not place.members and _key(place) in joins}
    metered = {g.task for place, _ in priced if _key(place) in joining for g in place.grants}
    new = [(place, parts) for place, parts in priced if _key(place) not in joining]
    wanted = yield from _wanted(new, metered)
    accounts: Mapping[tuple[Holder, AccountKind], LedgerAccountId] = {}
    if wanted:
        accounts = yield from open_accounts(funding.accounts)
    opened = [_new_meters(each, funding, accounts, at) for each in wanted]
    done = yield from record_bundles([[reserve for _, reserve in each] for each in opened], at)
    rows: list[MetersRecord] = []
    named = {grant.task for place, _ in new for grant in place.grants} - metered
    unfunded: list[UnfundedPlace] = []
    for each, meters, outcome in zip(wanted, opened, done.outcomes, strict=True):
        if outcome is TransferOutcome.MOVED:
            rows += [meter for meter, _ in meters]
            metered.update(each.tasks)
        else:
            shape, needed = each.place.shape, sum(reserve.amount for _, reserve in meters)
            payer = payer_of(shape.user, shape.team)
            unfunded.append(UnfundedPlace(tuple(each.tasks), payer, outcome, needed))
    yield from _insert(rows)
    refused = frozenset(named - metered)
    joined = {place: joins[place] for place in joining}
    return FundedPlaces(frozenset(metered), refused, tuple(unfunded), done.warnings, joined)


def _key(place: Placement) -> tuple[NodeId, int]:
    return place.node, place.allocation.number


def _wanted(
    places: Sequence[tuple[Placement, list[tuple[int, GangPart]]]], granted: Collection[TaskId]
) -> Operation[list[_PricedPlace]]:
    """Places that need a new meter, with their tasks that can be granted and may cost more."""
    if not places:
        return []
    grantable = yield from _grantable([place for place, _ in places])
    spent = yield from spent_by(id_ for id_, cap in grantable.items() if cap is not None)
    taken: set[TaskId] = set(granted)
    wanted: list[_PricedPlace] = []
    for place, parts in places:
        tasks = []
        for grant in place.grants:
            cap = grantable.get(grant.task, 0)
            if grant.task not in taken and (cap is None or cap > spent.get(grant.task, 0)):
                tasks.append(grant.task)
                taken.add(grant.task)
        if tasks:
            caps = [(task, grantable[task]) for task in tasks]
            lefts = [cap - spent.get(task, 0) for task, cap in caps if cap is not None]
            left = sum(lefts) if len(lefts) == len(tasks) else None
            wanted.append(_PricedPlace(place, parts, tasks, left))
    return wanted


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


def _open_meters(places: Sequence[Placement]) -> Operation[dict[tuple[NodeId, int], MeterKey]]:
    """Open meters of allocations that further leases may be added to; never of a gang, which has one lease."""
    if not places:
        return {}
    rows = yield from select(
        MetersRecord,
        f"SELECT {METER} FROM {{places}} AS p JOIN meters m ON m.node_id = p.node AND m.number = p.number "  # noqa: S608
        f"WHERE m.closed_at IS NULL {LOCKED}",
        {},
        {"places": Relation(PLACES, sorted({_key(place) for place in places}))},
    )
    return {(row.node_id, row.number): (row.task_id, row.epoch, row.rank) for row in rows}


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
            accounts[("user", each.owner), AccountKind.VESTING],
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


def add_leases(written: Mapping[MeterKey, int]) -> Operation[None]:
    """Count leases that joined a meter, by meter."""
    more = [_MoreLeases(*key, count) for key, count in sorted(written.items())]
    if more:
        yield Statement(
            "UPDATE meters SET leases = meters.leases + a.leases FROM {added} AS a "
            "WHERE meters.task_id = a.task AND meters.epoch = a.epoch AND meters.rank = a.rank",
            {},
            {"added": Relation(relation_columns(_MoreLeases), more)},
        )

"""Meters of allocations with a price: extended while they run, settled after their last lease. `funding` opens them.

One pending transfer belongs to a meter at any time. Extending resolves it (owner and fee are paid what was charged so
far) and sets the next amount aside, both or neither. A meter that is closed or due is found by a query, so a server that was
killed between two steps continues with the next one; ids of transfers make a repeated step move nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import SECOND, Instant, Span
from gpool.core.money.budgets import BudgetWarning
from gpool.core.money.charging import AllocationMeter, FrozenPrice
from gpool.core.money.metering import renew_at, runs_out_at, wanted_total
from gpool.core.money.transfers import (
    LedgerAccountId,
    Post,
    Reserve,
    TransferId,
    TransferOutcome,
    TransferRequest,
    Void,
)
from gpool.server.store.generated_rows import ChargesRecord, MetersRecord
from gpool.server.store.operations.money.charges import (
    CHARGE,
    METER,
    METER_KEYS,
    MeterKey,
    held_id,
    meter_of,
    postings_of,
    reserve_id,
    spent_by,
)
from gpool.server.store.operations.money.transfers import record_bundles
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import exists, of_names, relation_columns, select

KEPT = Span(30 * 86_400 * SECOND)
"""Time after which a pending transfer of a meter expires; far longer than any stop of the server."""

RETRY = Span(5 * SECOND)
"""Until a refused extension is tried again."""


def shares_of(left: int | None, prices: Sequence[FrozenPrice]) -> list[int | None]:
    """Divide what is left of a task's `max_cost` between the members of a gang, by their prices."""
    if left is None:
        return [None] * len(prices)
    weights = [max(1, price.rate_microcredits) for price in prices]
    return [left * weight // sum(weights) for weight in weights]


def reserve_of(row: MetersRecord, amount: int, at: Instant) -> Reserve:
    payer, pending = LedgerAccountId(row.payer_id), LedgerAccountId(row.pending_id)
    return Reserve(reserve_id(row), payer, pending, amount, Instant(at + KEPT))


# ---- reservations that roll


@dataclass(frozen=True, slots=True)
class ShortReservation:
    """A reservation that could not be extended: it covers charges until `until`."""

    node: NodeId
    number: int
    task: TaskId  # of the lease that opened the meter
    epoch: int
    outcome: TransferOutcome | None  # None: the tasks' own max_cost
    until: Instant


@dataclass(frozen=True, slots=True)
class Extended:
    """`count`: meters looked at."""

    count: int = 0
    short: tuple[ShortReservation, ...] = ()
    warnings: tuple[BudgetWarning, ...] = ()


@operation
def due(at: Instant) -> Operation[bool]:
    """Whether a meter is to be extended or settled."""
    return (
        yield from exists(
            "SELECT 1 FROM meters m WHERE m.renew_at <= :at OR m.closed_at IS NOT NULL LIMIT 1",
            {"at": at},
        )
    )


@operation
def extend(at: Instant, limit: int) -> Operation[Extended]:
    """Extend the reservations of up to `limit` meters of which less than half is left."""
    rows = yield from select(
        MetersRecord,
        f"SELECT {METER} FROM meters m WHERE m.closed_at IS NULL AND m.renew_at <= :at "  # noqa: S608
        "ORDER BY m.task_id, m.epoch, m.rank LIMIT :limit /*postgresql FOR UPDATE*/",
        {"at": at, "limit": limit},
    )
    if not rows:
        return Extended()
    lefts = yield from _lefts(rows)
    open_charges = yield from _open_charges(rows)
    plans: list[tuple[MetersRecord, MetersRecord, list[TransferRequest]]] = []
    changed: list[MetersRecord] = []
    short: list[ShortReservation] = []
    for row in rows:
        meter = meter_of(row)
        wanted = wanted_total(meter, at)
        left = lefts.get((row.task_id, row.epoch, row.rank))
        if left is not None:
            wanted = min(wanted, row.charged + left)
        if wanted <= row.reserved:
            again = renew_at(meter, row.reserved)
            if again <= at:  # its tasks may not cost more
                short.append(_short(row, meter, None))
                again = Instant(at + RETRY)
            changed.append(row._replace(renew_at=again))
            continue
        after = row._replace(roll=row.roll + 1, posted=row.charged, reserved=wanted)
        after = after._replace(renew_at=renew_at(meter, wanted))
        requests = _resolution(row, open_charges.get(reserve_id(row), _OpenCharges()), at)
        plans.append((row, after, [*requests, reserve_of(after, wanted - row.charged, at)]))
    done = yield from record_bundles([requests for _, _, requests in plans], at)
    rolled: list[MetersRecord] = []
    for (row, after, _), outcome in zip(plans, done.outcomes, strict=True):
        if outcome is TransferOutcome.MOVED:
            changed.append(after)
            rolled.append(row)
        else:
            changed.append(row._replace(renew_at=Instant(at + RETRY)))
            short.append(_short(row, meter_of(row), outcome))
    yield from _write_rolled(changed)
    yield from _write_posted(rolled, open_charges)
    return Extended(len(rows), tuple(short), done.warnings)


def _short(
    row: MetersRecord, meter: AllocationMeter, outcome: TransferOutcome | None
) -> ShortReservation:
    until = runs_out_at(meter, row.reserved)
    return ShortReservation(row.node_id, row.number, row.task_id, row.epoch, outcome, until)


class _LeaseCap(NamedTuple):
    task_id: TaskId
    epoch: int
    rank: int
    held_id: TaskId
    max_cost: int | None


def _lefts(rows: Sequence[MetersRecord]) -> Operation[dict[MeterKey, int]]:
    """What is left of the `max_cost` of the tasks on each meter; meters with a task without a cap are absent."""
    keys = {"keys": Relation(METER_KEYS, [(row.task_id, row.epoch, row.rank) for row in rows])}
    found = yield from select(
        _LeaseCap,
        "SELECT m.task_id, m.epoch, m.rank, t.id, t.max_cost FROM {keys} AS k "
        "JOIN meters m ON m.task_id = k.task AND m.epoch = k.epoch AND m.rank = k.rank "
        "JOIN tasks t ON t.node_id = m.node_id AND t.allocation_number = m.number "
        "WHERE t.holding = 1 AND t.metered = 1 UNION ALL "
        "SELECT m.task_id, m.epoch, m.rank, t.id, t.max_cost FROM {keys} AS k "
        "JOIN meters m ON m.task_id = k.task AND m.epoch = k.epoch AND m.rank = k.rank "
        "JOIN tasks t ON t.id = m.task_id AND t.epoch = m.epoch "
        "WHERE t.holding = 1 AND t.metered = 1 AND t.node_id IS NULL",
        {},
        keys,
    )
    spent = yield from spent_by(row.held_id for row in found if row.max_cost is not None)
    rates: dict[MeterKey, int] = {(row.task_id, row.epoch, row.rank): row.rate for row in rows}
    of_task: dict[TaskId, list[MeterKey]] = {}
    for row in found:
        of_task.setdefault(row.held_id, []).append((row.task_id, row.epoch, row.rank))
    lefts: dict[MeterKey, int] = {}
    unlimited: set[MeterKey] = set()
    for row in found:
        key = (row.task_id, row.epoch, row.rank)
        if row.max_cost is None:
            unlimited.add(key)
            continue
        left = max(0, row.max_cost - spent.get(row.held_id, 0))
        members = of_task[row.held_id]
        prices = [FrozenPrice(rates[each]) for each in members]
        share = shares_of(left, prices)[members.index(key)] or 0
        lefts[key] = lefts.get(key, 0) + share
    return {key: left for key, left in lefts.items() if key not in unlimited}


@dataclass(slots=True)
class _OpenCharges:
    """Charges within one reservation: the sum of those to post, and the held ones."""

    owner: int = 0
    microcredits: int = 0
    fee: int = 0
    held: list[ChargesRecord] = field(default_factory=list)


class _ChargeSum(NamedTuple):
    reserve_id: str
    owner_id: int
    microcredits: int
    fee: int


def _open_charges(rows: Sequence[MetersRecord]) -> Operation[dict[str, _OpenCharges]]:
    names = {"names": of_names(reserve_id(row) for row in rows)}
    sums = yield from select(
        _ChargeSum,
        "SELECT c.reserve_id, MIN(c.owner_id), CAST(SUM(c.microcredits) AS BIGINT), CAST(SUM(c.fee) AS BIGINT) "
        "FROM {names} AS n JOIN charges c ON c.reserve_id = n.name WHERE c.state = 'metered' GROUP BY c.reserve_id",
        {},
        names,
    )
    found = {row.reserve_id: _OpenCharges(row.owner_id, row.microcredits, row.fee) for row in sums}
    held = yield from select(
        ChargesRecord,
        f"SELECT {CHARGE} FROM {{names}} AS n JOIN charges c ON c.reserve_id = n.name "  # noqa: S608
        "WHERE c.state = 'held' ORDER BY c.task_id, c.epoch, c.node_id /*postgresql FOR UPDATE OF c*/",
        {},
        names,
    )
    for charge in held:
        found.setdefault(charge.reserve_id, _OpenCharges()).held.append(charge)
    return found


def _resolution(row: MetersRecord, charges: _OpenCharges, at: Instant) -> list[TransferRequest]:
    """Pay the charges within the meter's pending transfer, and set the held ones aside by themselves."""
    id_ = reserve_id(row)
    first: TransferRequest
    if charges.microcredits:
        postings = postings_of(charges.owner, charges.microcredits, charges.fee)
        first = Post(_post_id(id_), id_, postings)
    else:
        first = Void(TransferId(f"void:{id_}"), id_)
    payer, pending = LedgerAccountId(row.payer_id), LedgerAccountId(row.pending_id)
    expires = Instant(at + KEPT)
    return [
        first,
        *(
            Reserve(held_id(each), payer, pending, each.microcredits, expires, is_counted=True)
            for each in charges.held
        ),
    ]


def _post_id(reserve: str) -> TransferId:
    return TransferId(f"post:{reserve}")


class _RolledMeter(NamedTuple):
    task: int
    epoch: int
    rank: int
    roll: int
    posted: int
    reserved: int
    renew_at: int


def _write_rolled(rows: Sequence[MetersRecord]) -> Operation[None]:
    changed = [
        _RolledMeter(
            row.task_id, row.epoch, row.rank, row.roll, row.posted, row.reserved, row.renew_at
        )
        for row in rows
    ]
    if changed:
        yield Statement(
            "UPDATE meters SET roll = c.roll, posted = c.posted, reserved = c.reserved, renew_at = c.renew_at "
            "FROM {changed} AS c WHERE meters.task_id = c.task AND meters.epoch = c.epoch AND meters.rank = c.rank",
            {},
            {"changed": Relation(relation_columns(_RolledMeter), sorted(changed))},
        )


class _PostedCharges(NamedTuple):
    reserve: str
    transfer: str


class _MovedCharge(NamedTuple):
    task: int
    epoch: int
    node: int
    reserve: str


def _write_posted(
    rows: Sequence[MetersRecord], charges: Mapping[str, _OpenCharges]
) -> Operation[None]:
    ids = [reserve_id(row) for row in rows if reserve_id(row) in charges]
    posted = [_PostedCharges(id_, _post_id(id_)) for id_ in ids if charges[id_].microcredits]
    if posted:
        yield Statement(
            "UPDATE charges SET state = 'posted', transfer_id = p.transfer FROM {posted} AS p "
            "WHERE charges.reserve_id = p.reserve AND charges.state = 'metered'",
            {},
            {"posted": Relation(relation_columns(_PostedCharges), sorted(posted))},
        )
    moved = [
        _MovedCharge(each.task_id, each.epoch, each.node_id, held_id(each))
        for id_ in ids
        for each in charges[id_].held
    ]
    if moved:
        yield Statement(
            "UPDATE charges SET reserve_id = m.reserve FROM {moved} AS m WHERE charges.task_id = m.task "
            "AND charges.epoch = m.epoch AND charges.node_id = m.node AND charges.state = 'held'",
            {},
            {"moved": Relation(relation_columns(_MovedCharge), sorted(moved))},
        )


# ---- settling


@operation
def settle(at: Instant, limit: int) -> Operation[int]:
    """Resolve the pending transfers of up to `limit` closed meters and delete these; return their number."""
    rows = yield from select(
        MetersRecord,
        f"SELECT {METER} FROM meters m WHERE m.closed_at IS NOT NULL "  # noqa: S608
        "ORDER BY m.task_id, m.epoch, m.rank LIMIT :limit /*postgresql FOR UPDATE*/",
        {"limit": limit},
    )
    if not rows:
        return 0
    charges = yield from _open_charges(rows)
    bundles = [_resolution(row, charges.get(reserve_id(row), _OpenCharges()), at) for row in rows]
    done = yield from record_bundles(bundles, at)
    is_done = [outcome is TransferOutcome.MOVED for outcome in done.outcomes]
    paid = [row for row, is_paid in zip(rows, is_done, strict=True) if is_paid]
    yield from _write_posted(paid, charges)
    expired = [reserve_id(row) for row, is_paid in zip(rows, is_done, strict=True) if not is_paid]
    if expired:  # nothing is set aside any more: the pending transfer has expired
        yield Statement(
            "UPDATE charges SET state = 'void' WHERE reserve_id IN (SELECT name FROM {names} AS n) "
            "AND state IN ('metered', 'held')",
            {},
            {"names": of_names(expired)},
        )
    yield Statement(
        "DELETE FROM meters WHERE EXISTS (SELECT 1 FROM {keys} AS k WHERE k.task = meters.task_id "
        "AND k.epoch = meters.epoch AND k.rank = meters.rank)",
        {},
        {"keys": Relation(METER_KEYS, [(row.task_id, row.epoch, row.rank) for row in rows])},
    )
    return len(rows)


_UNHELD = (
    "closed_at IS NULL AND NOT EXISTS (SELECT 1 FROM tasks t WHERE t.holding = 1 AND t.metered = 1 "
    "AND t.node_id = meters.node_id AND t.allocation_number = meters.number) AND NOT EXISTS (SELECT 1 FROM tasks t "
    "WHERE t.id = meters.task_id AND t.epoch = meters.epoch AND t.holding = 1 AND t.node_id IS NULL)"
)


@operation
def has_unheld() -> Operation[bool]:
    return (yield from exists(f"SELECT 1 FROM meters WHERE {_UNHELD} LIMIT 1"))  # noqa: S608


@operation
def close_unheld(at: Instant) -> Operation[None]:
    """Close meters whose leases ended without them: of a restored store, or while prices were off."""
    yield Statement(
        f"UPDATE meters SET closed_at = :at WHERE {_UNHELD}",  # noqa: S608
        {"at": at},
    )

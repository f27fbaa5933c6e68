"""Charges of ended leases: computed from their meters in the transaction of the end, posted later (`meters`).

An end updates its meter and inserts a row of `charges` if anything is charged, a few statements for any number of
ends. Rows are locked in one order everywhere: tasks, meters, pending transfers, accounts.

A task of the settlement `verdict` has its charges held until its result is accepted or rejected: the amount stays set
aside, first within the meter's reservation, then as a pending transfer of its own.
One file because charging and holding are the two ways in which one row of `charges` is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from gpool.core.ids import NodeId, SpecId, TaskId
from gpool.core.model import EndReason, Instant, Phase, Span
from gpool.core.money.charging import AllocationMeter, FrozenPrice, LeaseEnd, charge
from gpool.core.money.metering import divided_ends, fee_between
from gpool.core.money.transfers import FEE, LedgerAccountId, Post, Posting, TransferId, Void
from gpool.server.store.generated_rows import ChargesRecord, MetersRecord
from gpool.server.store.operations.money.transfers import record_transfers
from gpool.server.store.protocol import Operation, Relation, Statement
from gpool.server.store.rows import columns, insert, of_ids, relation_columns, select
from gpool.server.store.values import PREEMPTING, RECLAIMING, UNFUNDED

METER = columns(MetersRecord, MetersRecord, "m")
CHARGE = columns(ChargesRecord, ChargesRecord, "c")
METER_KEYS = (("task", "int"), ("epoch", "int"), ("rank", "int"))
PLACES = (("node", "int"), ("number", "int"))
LEASES = (("task", "int"), ("epoch", "int"))
HELD_PREFIX = "held:"
MeterKey = tuple[int, int, int]
"""Task, epoch and rank of the lease that opened a meter."""


class ChargeState(StrEnum):
    METERED = "metered"  # to be posted with its meter's reservation
    HELD = "held"  # until the task's result is accepted or rejected
    POSTED = "posted"
    VOID = "void"  # was held, and the result was rejected
    VESTED = "vested"
    FORFEITED = "forfeited"


class Settlement(StrEnum):
    END = "end"
    VERDICT = "verdict"


_METERED, _HELD = ChargeState.METERED.value, ChargeState.HELD.value
_VERDICT = Settlement.VERDICT.value


class MemberStart(NamedTuple):
    node: NodeId
    started_at: Instant | None


class EndedLease(NamedTuple):
    """End of a lease on a metered allocation, as recorded.

    `number`: of the allocation; None: of a gang, whose `members` have one each. `duration`: as its node claims; it only
    divides the time between leases that are reported together. `ended_at`: earlier than now for a cancelled task.
    `has_reported_start`: False if `started_at` was computed from `duration`.
    """

    task: TaskId
    epoch: int
    node: NodeId
    number: int | None
    started_at: Instant | None
    ended_at: Instant
    reason: EndReason
    duration: Span
    max_cost: int | None
    settlement: str
    spec: SpecId
    members: tuple[MemberStart, ...] = ()
    has_reported_start: bool = True

    def start_on(self, node: NodeId) -> Instant | None:
        """Start of a gang's member on this node."""
        return next((each.started_at for each in self.members if each.node == node), None)


@dataclass(slots=True)
class RunningMeter:
    """A stored meter, with the leases so far charged to it. `ended`: their number."""

    row: MetersRecord
    meter: AllocationMeter
    reserve: TransferId
    ended: int = 0


class NewCharge(NamedTuple):
    """Columns of an inserted charge."""

    task_id: int
    epoch: int
    node_id: int
    payer_id: int
    owner_id: int
    started_at: int | None
    ended_at: int
    charged_us: int
    microcredits: int
    fee: int
    rate: int
    minimum: int
    reason: str
    gpus: str
    reserve_id: str
    state: str
    project: str = ""


_NOT_ASKED: frozenset[str] = frozenset()


@dataclass(slots=True)
class MeteredEnds:
    """Rows to write. `stopped`: tasks that were stopped for lack of funds. `used_up`: nothing is left of their max_cost.

    `free`: task and epoch of leases that are charged nothing. They have no row: charges are kept for ever, and a call of
    microseconds often costs less than a micro-credit.
    """

    rows: list[NewCharge] = field(default_factory=list)
    free: set[tuple[TaskId, int]] = field(default_factory=set)
    meters: list[RunningMeter] = field(default_factory=list)
    stopped: set[TaskId] = field(default_factory=set)
    used_up: set[TaskId] = field(default_factory=set)


def meter_of(row: MetersRecord) -> AllocationMeter:
    price = FrozenPrice(row.rate, row.minimum)
    return AllocationMeter(price, row.until, Span(row.charged_us), row.charged)


def reserve_id(row: MetersRecord) -> TransferId:
    """Id of the meter's open pending transfer."""
    return TransferId(f"alloc:{row.task_id}:{row.epoch}:{row.rank}:{row.roll}")


# ---- ends of leases


class _Noted(NamedTuple):
    task_id: TaskId
    epoch: int
    note: str


class _Saved(NamedTuple):
    task_id: TaskId
    epoch: int
    saved_at: Instant


class _Labelled(NamedTuple):
    id: SpecId
    project: str


class _Spent(NamedTuple):
    task_id: TaskId
    microcredits: int


def meter_ends(ended: Sequence[EndedLease]) -> Operation[MeteredEnds]:
    """Charge ended leases, in the order of their reports; the caller has locked their tasks and writes the result."""
    meters = yield from _meters(ended)
    places, gangs = _by_place(meters), _by_gang(meters)
    notes = yield from _notes(ended)
    result = MeteredEnds()
    preempted = []
    for lease in ended:
        if lease.reason is EndReason.PREEMPTED and lease.started_at is not None:
            if UNFUNDED in notes.get((lease.task, lease.epoch), ()):
                result.stopped.add(lease.task)
            else:
                preempted.append(lease)
    saved = yield from _checkpoints(preempted)
    spent = yield from spent_by(lease.task for lease in ended if lease.max_cost is not None)
    specs: list[SpecId] = []  # of each charge
    ends = _divided(ended, meters)
    for lease in ended:
        key = (lease.task, lease.epoch)
        reason = EndReason.OUT_OF_FUNDS if lease.task in result.stopped else lease.reason
        asked = notes.get(key, _NOT_ASKED) if notes else _NOT_ASKED
        is_reclaim = PREEMPTING not in asked or RECLAIMING in asked
        found: Sequence[RunningMeter]
        if lease.number is not None:
            found = places.get((lease.node, lease.number), ())
        else:
            found = gangs.get(key, ())
        result.free.add(key)
        for running in found:
            row = running.row
            end_at = ends[key]
            if lease.number is None:
                started_at = lease.start_on(row.node_id)
            elif lease.has_reported_start or lease.started_at is None:
                started_at = lease.started_at
            else:  # its start was computed as if it ended last of those reported with it
                started_at = Instant(min(lease.started_at, end_at - lease.duration))
            left = row.reserved
            if lease.max_cost is not None:
                free = max(0, lease.max_cost - spent.get(lease.task, 0))
                left = min(left, running.meter.charged_microcredits + free)
            phase = Phase.START if started_at is None else Phase.RUN
            end = LeaseEnd(started_at, end_at, reason, phase, saved.get(key), is_reclaim)
            done = charge(running.meter, end, left)
            amount = done.microcredits
            if amount:
                result.free.discard(key)
                if lease.max_cost is not None:
                    spent[lease.task] = spent.get(lease.task, 0) + amount
                before, after = running.meter.charged_microcredits, done.meter.charged_microcredits
                result.rows.append(
                    NewCharge(
                        lease.task,
                        lease.epoch,
                        row.node_id,
                        row.payer_id,
                        row.owner_id,
                        started_at,
                        end_at,
                        done.time,
                        amount,
                        fee_between(before, after, row.fee_ppm) if row.fee_ppm else 0,
                        row.rate,
                        row.minimum,
                        reason.value,
                        row.gpus,
                        running.reserve,
                        _HELD if lease.settlement == _VERDICT else _METERED,
                    )
                )
                specs.append(lease.spec)
            running.meter = done.meter
            running.ended += 1
        if lease.max_cost is not None and spent.get(lease.task, 0) >= lease.max_cost:
            result.used_up.add(lease.task)
    if projects := (yield from _projects(set(specs))):
        result.rows = [
            row._replace(project=projects.get(spec, ""))
            for row, spec in zip(result.rows, specs, strict=True)
        ]
    result.meters = [each for found in gangs.values() for each in found if each.ended]
    return result


def _meters(ended: Sequence[EndedLease]) -> Operation[list[RunningMeter]]:
    places = {(lease.node, lease.number) for lease in ended if lease.number is not None}
    gangs = {(lease.task, lease.epoch) for lease in ended if lease.number is None}
    found: list[MetersRecord] = []
    locks = "/*postgresql ORDER BY m.task_id, m.epoch, m.rank FOR UPDATE OF m*/"
    if places:
        found += yield from select(
            MetersRecord,
            f"SELECT {METER} FROM {{places}} AS p JOIN meters m ON m.node_id = p.node AND m.number = p.number "  # noqa: S608
            f"WHERE m.closed_at IS NULL {locks}",
            {},
            {"places": Relation(PLACES, sorted(places))},
        )
    if gangs:
        found += yield from select(
            MetersRecord,
            f"SELECT {METER} FROM {{gangs}} AS g JOIN meters m ON m.task_id = g.task AND m.epoch = g.epoch "  # noqa: S608
            f"WHERE m.closed_at IS NULL {locks}",
            {},
            {"gangs": Relation(LEASES, sorted(gangs))},
        )
    found.sort(key=lambda row: (row.task_id, row.epoch, row.rank))
    return [RunningMeter(row, meter_of(row), reserve_id(row)) for row in found]


def _by_place(meters: Sequence[RunningMeter]) -> dict[tuple[int, int], list[RunningMeter]]:
    return {(each.row.node_id, each.row.number): [each] for each in meters}


def _by_gang(meters: Sequence[RunningMeter]) -> dict[tuple[int, int], list[RunningMeter]]:
    found: dict[tuple[int, int], list[RunningMeter]] = {}
    for each in meters:
        found.setdefault((each.row.task_id, each.row.epoch), []).append(each)
    return found


def _divided(
    ended: Sequence[EndedLease], meters: Sequence[RunningMeter]
) -> dict[tuple[TaskId, int], Instant]:
    together: dict[tuple[NodeId, int], list[EndedLease]] = {}
    found: dict[tuple[TaskId, int], Instant] = {}
    for lease in ended:
        if lease.number is None:
            found[lease.task, lease.epoch] = lease.ended_at
        else:
            together.setdefault((lease.node, lease.number), []).append(lease)
    until = {(each.row.node_id, each.row.number): each.row.until for each in meters}
    for place, leases in together.items():
        at = max(lease.ended_at for lease in leases)
        ends = divided_ends(until.get(place, at), at, [lease.duration for lease in leases])
        for lease, end in zip(leases, ends, strict=True):
            found[lease.task, lease.epoch] = Instant(min(lease.ended_at, end))
    return found


def _projects(specs: AbstractSet[SpecId]) -> Operation[dict[SpecId, str]]:
    """Project labels by spec: a batch of ends has few specs."""
    if not specs:
        return {}
    rows = yield from select(
        _Labelled,
        "SELECT s.id, s.project FROM {specs} AS i JOIN specs s ON s.id = i.id WHERE s.project <> ''",
        {},
        {"specs": of_ids(specs)},
    )
    return {row.id: row.project for row in rows}


def _notes(ended: Sequence[EndedLease]) -> Operation[dict[tuple[TaskId, int], frozenset[str]]]:
    wanted = {
        (lease.task, lease.epoch)
        for lease in ended
        if lease.reason is EndReason.PREEMPTED and lease.started_at is not None
    }
    if not wanted:
        return {}
    rows = yield from select(
        _Noted,
        "SELECT n.task_id, n.epoch, n.note FROM {leases} AS l JOIN attempt_notes n "
        "ON n.task_id = l.task AND n.epoch = l.epoch",
        {},
        {"leases": Relation(LEASES, sorted(wanted))},
    )
    found: dict[tuple[TaskId, int], frozenset[str]] = {}
    for row in rows:
        key = (row.task_id, row.epoch)
        found[key] = found.get(key, frozenset()) | {row.note}
    return found


def _checkpoints(ended: Sequence[EndedLease]) -> Operation[dict[tuple[TaskId, int], Instant]]:
    if not ended:
        return {}
    rows = yield from select(
        _Saved,
        "SELECT c.task_id, c.epoch, c.saved_at FROM {tasks} AS i JOIN checkpoints c ON c.task_id = i.id",
        {},
        {"tasks": of_ids(lease.task for lease in ended)},
    )
    return {(row.task_id, row.epoch): row.saved_at for row in rows}


def spent_by(tasks: Iterable[TaskId]) -> Operation[dict[TaskId, int]]:
    """Micro-credits charged for each task, over all its attempts; tasks without charges are absent."""
    wanted = of_ids(tasks)
    if not wanted.rows:
        return {}
    rows = yield from select(
        _Spent,
        "SELECT c.task_id, CAST(SUM(c.microcredits) AS BIGINT) FROM {tasks} AS i JOIN charges c ON c.task_id = i.id "
        "WHERE c.state <> 'void' GROUP BY c.task_id",
        {},
        {"tasks": wanted},
    )
    return {row.task_id: row.microcredits for row in rows}


class _ChangedMeter(NamedTuple):
    task_id: int
    epoch: int
    rank: int
    until: Instant
    charged_us: int
    charged: int
    leases: int


def write_ends(done: MeteredEnds, at: Instant) -> Operation[None]:
    """Write what `meter_ends` computed; a meter without leases is closed."""
    if not done.meters:
        return
    if done.rows:
        yield insert("charges", NewCharge, done.rows)
    changed = [
        _ChangedMeter(
            each.row.task_id,
            each.row.epoch,
            each.row.rank,
            each.meter.until,
            each.meter.charged_time,
            each.meter.charged_microcredits,
            each.row.leases - each.ended,
        )
        for each in done.meters
    ]
    yield Statement(
        "UPDATE meters SET until = c.until, charged_us = c.charged_us, charged = c.charged, leases = c.leases, "
        "closed_at = CASE WHEN c.leases <= 0 THEN CAST(:at AS BIGINT) END FROM {changed} AS c "
        "WHERE meters.task_id = c.task_id AND meters.epoch = c.epoch AND meters.rank = c.rank "
        "AND meters.closed_at IS NULL",
        {"at": at},
        {"changed": Relation(relation_columns(_ChangedMeter), changed)},
    )


# ---- held charges


def held_id(row: ChargesRecord) -> TransferId:
    """Pending transfer of a held charge; of a gang, the first member has the short form."""
    more = f":{row.node_id}" if meter_key(row.reserve_id)[2] else ""
    return TransferId(f"{HELD_PREFIX}{row.task_id}:{row.epoch}{more}")


def meter_key(reserve: str) -> MeterKey:
    """Task, epoch and rank of the meter whose pending transfer has this id (`reserve_id`)."""
    task, epoch, rank = reserve.split(":")[1:4]
    return int(task), int(epoch), int(rank)


def postings_of(owner: int, microcredits: int, fee: int) -> tuple[Posting, ...]:
    """Owner's part and the pool's fee of a charge above 0."""
    parts = ((LedgerAccountId(owner), microcredits - fee), (FEE, fee))
    return tuple(Posting(account, amount) for account, amount in parts if amount)


def accept_held(tasks: Sequence[TaskId], at: Instant) -> Operation[int]:
    """Pay the held charges of these tasks to owners and fee, as a step; return their number.

    Charges that are still within their meter's reservation become `metered`: they are posted with it.
    """
    rows = yield from _held(tasks)
    apart = [row for row in rows if row.reserve_id.startswith(HELD_PREFIX)]
    posts = [
        Post(
            TransferId(f"post:{row.reserve_id}"),
            TransferId(row.reserve_id),
            postings_of(row.owner_id, row.microcredits, row.fee),
        )
        for row in apart
    ]
    if posts:
        yield from record_transfers(posts, at)
        yield from _resolve(
            [
                (row.task_id, row.epoch, row.node_id, ChargeState.POSTED.value, post.id)
                for row, post in zip(apart, posts, strict=True)
            ]
        )
    yield from _resolve(
        [
            (row.task_id, row.epoch, row.node_id, ChargeState.METERED.value, None)
            for row in rows
            if row not in apart
        ]
    )
    return len(rows)


def reject_held(tasks: Sequence[TaskId], at: Instant) -> Operation[int]:
    """Return the held charges of these tasks to their payers, as a step; return their number."""
    rows = yield from _held(tasks)
    voids = [
        Void(TransferId(f"void:{row.reserve_id}"), TransferId(row.reserve_id))
        for row in rows
        if row.reserve_id.startswith(HELD_PREFIX)
    ]
    if voids:
        yield from record_transfers(voids, at)
    yield from _resolve(
        [(row.task_id, row.epoch, row.node_id, ChargeState.VOID.value, None) for row in rows]
    )
    return len(rows)


RESOLVED = (*LEASES, ("node", "int"), ("state", "text"), ("transfer", "text"))


def _resolve(rows: Sequence[tuple[int, int, int, str, str | None]]) -> Operation[None]:
    if rows:
        yield Statement(
            "UPDATE charges SET state = r.state, transfer_id = r.transfer FROM {resolved} AS r "
            "WHERE charges.task_id = r.task AND charges.epoch = r.epoch AND charges.node_id = r.node "
            "AND charges.state = 'held'",
            {},
            {"resolved": Relation(RESOLVED, sorted(rows))},
        )


def _held(tasks: Sequence[TaskId]) -> Operation[list[ChargesRecord]]:
    """Held charges, read after their meters are locked: settling may be moving them into transfers of their own."""
    wanted = {"tasks": of_ids(tasks)}
    found = yield from _held_rows(wanted)
    keys = {
        meter_key(row.reserve_id) for row in found if not row.reserve_id.startswith(HELD_PREFIX)
    }
    if not keys:
        return found
    yield Statement(
        "SELECT m.task_id FROM {keys} AS k JOIN meters m ON m.task_id = k.task AND m.epoch = k.epoch "
        "AND m.rank = k.rank /*postgresql ORDER BY m.task_id, m.epoch, m.rank FOR UPDATE OF m*/",
        {},
        {"keys": Relation(METER_KEYS, sorted(keys))},
    )
    return (yield from _held_rows(wanted))


def _held_rows(wanted: Mapping[str, Relation]) -> Operation[list[ChargesRecord]]:
    return (
        yield from select(
            ChargesRecord,
            f"SELECT {CHARGE} FROM {{tasks}} AS i JOIN charges c ON c.task_id = i.id "  # noqa: S608
            "WHERE c.state = 'held' /*postgresql ORDER BY c.task_id, c.epoch, c.node_id FOR UPDATE OF c*/",
            {},
            wanted,
        )
    )

"""Conditions: states of nodes, GPUs, budgets and alerts whose begin and end are events.

The leader compares the states that hold now with the stored ones; begin and end of a condition are written in one
transaction with their events. So each is sent once, also over a restart and by another leader.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from gpool.core.ids import BatchId, GpuId, NodeId, UserId, encode
from gpool.core.model import SECOND, Instant, Span
from gpool.core.money.budgets import BudgetLevel, budget_level
from gpool.core.money.transfers import format_month, month_of
from gpool.core.specs.events import EventKind
from gpool.server.store.operations.events.outbox import (
    OPEN_BATCH,
    POOL,
    EventHolder,
    NewEvent,
    add_events,
)
from gpool.server.store.operations.leases.grants import is_current_term
from gpool.server.store.protocol import Operation, Relation, operation
from gpool.server.store.rows import of_ids, relation_columns, select, values
from gpool.wire.events import (
    BalanceEventData,
    BudgetEventData,
    GpuEventData,
    NodeEventData,
)

NODE, GPU, BUDGET, BALANCE, ALERT = "node", "gpu", "budget", "balance", "alert"
OLD = Span(3600 * SECOND)
"""A node that was silent for longer when it is first seen is recorded without an event."""


class ConditionEvents(msgspec.Struct, frozen=True):
    """Events of a condition; `ends` empty: its end is none. `data`: JSON."""

    begins: str
    ends: str
    subject: int
    holders: tuple[EventHolder, ...]
    data: str
    data_at_end: str = ""


@dataclass(frozen=True, slots=True)
class PoolCondition:
    kind: str
    object: str
    events: ConditionEvents
    is_silent: bool = False  # its begin is no event


@dataclass(frozen=True, slots=True)
class SurveyTerms:
    """`holders`: subscribed accounts. `lost_before`: nodes last heard before then are lost."""

    holders: frozenset[EventHolder]
    now: Instant
    lost_before: Instant
    low_balance: int


@dataclass(frozen=True, slots=True)
class ConditionSurvey:
    """`stored`: (kind, object) of stored conditions; `gone`: those of deleted objects; `done`: batches that are closed."""

    held: tuple[PoolCondition, ...]
    stored: frozenset[tuple[str, str]]
    gone: frozenset[tuple[str, str]]
    done: frozenset[tuple[str, str]]


class _Owned(NamedTuple):
    id: int


class _SilentNode(NamedTuple):
    id: NodeId
    owner_id: UserId
    name: str
    last_beat_at: Instant


class _SickGpu(NamedTuple):
    id: GpuId
    node_id: NodeId
    owner_id: UserId
    name: str
    quarantined: str


class _Budget(NamedTuple):
    kind: str
    id: int
    cap: int
    spent: int


class _Balance(NamedTuple):
    kind: str
    id: int
    balance: int


class _Stored(NamedTuple):
    kind: str
    object: str


class _Closed(NamedTuple):
    id: BatchId
    total: int
    done: int
    closed: int


HOLDERS = (("kind", "text"), ("id", "int"))
PAYERS = ("user", "team")


@operation
def survey(terms: SurveyTerms) -> Operation[ConditionSurvey]:
    """Conditions that hold now, for subscribed accounts."""
    stored = yield from select(_Stored, "SELECT c.kind, c.object FROM conditions c")
    held = [*(yield from _nodes(terms)), *(yield from _gpus(terms)), *(yield from _money(terms))]
    names = {(row.kind, row.object) for row in stored}
    gone = yield from _gone(names)
    done, extended = yield from _batches(names)
    return ConditionSurvey(
        tuple(held), frozenset(names), frozenset(gone | extended), frozenset(done)
    )


def _owners(terms: SurveyTerms) -> dict[str, Relation]:
    """Relation that `_of_owners` names; operators see the nodes of all."""
    if POOL in terms.holders:
        return {}
    return {"owners": of_ids(sorted(id_ for kind, id_ in terms.holders if kind == "user"))}


def _of_owners(terms: SurveyTerms) -> str:
    return "true" if POOL in terms.holders else "n.owner_id IN (SELECT id FROM {owners} AS w)"


def _to(terms: SurveyTerms, owner: UserId) -> tuple[EventHolder, ...]:
    return tuple(each for each in (("user", owner), POOL) if each in terms.holders)


def _nodes(terms: SurveyTerms) -> Operation[list[PoolCondition]]:
    rows = yield from select(
        _SilentNode,
        "SELECT n.id, n.owner_id, n.name, n.last_beat_at FROM nodes n "  # noqa: S608
        f"WHERE n.last_beat_at < :before AND {_of_owners(terms)}",
        {"before": terms.lost_before},
        _owners(terms),
    )
    return [
        PoolCondition(
            NODE,
            str(row.id),
            ConditionEvents(
                EventKind.NODE_LOST,
                EventKind.NODE_BACK,
                row.id,
                _to(terms, row.owner_id),
                NodeEventData(node=encode("node", row.id), name=row.name).model_dump_json(),
            ),
            is_silent=row.last_beat_at < terms.now - OLD,
        )
        for row in rows
    ]


def _gpus(terms: SurveyTerms) -> Operation[list[PoolCondition]]:
    rows = yield from select(
        _SickGpu,
        "SELECT g.id, g.node_id, n.owner_id, n.name, g.quarantined FROM gpus g JOIN nodes n ON n.id = g.node_id "  # noqa: S608
        f"WHERE g.quarantined IS NOT NULL AND g.gone = 0 AND {_of_owners(terms)}",
        {},
        _owners(terms),
    )
    found = []
    for row in rows:
        data = GpuEventData(
            gpu=encode("gpu", row.id),
            node=encode("node", row.node_id),
            node_name=row.name,
            why=row.quarantined,
        )
        healthy = data.model_copy(update={"why": ""})
        events = ConditionEvents(
            EventKind.GPU_UNHEALTHY,
            EventKind.GPU_HEALTHY,
            row.id,
            _to(terms, row.owner_id),
            data.model_dump_json(),
            healthy.model_dump_json(),
        )
        found.append(PoolCondition(GPU, str(row.id), events))
    return found


def _money(terms: SurveyTerms) -> Operation[list[PoolCondition]]:
    payers = sorted(each for each in terms.holders if each[0] in PAYERS)
    if not payers:
        return []
    month, relations = month_of(terms.now), {"payers": Relation(HOLDERS, payers)}
    budgets = yield from select(
        _Budget,
        "SELECT w.kind, w.id, b.cap, s.amount FROM {payers} AS w JOIN ledger_holders h ON h.kind = w.kind AND h.id = w.id "
        "JOIN budgets b ON b.account_id = h.account_id "
        "JOIN ledger_spending s ON s.account_id = b.account_id AND s.month = :month",
        {"month": month},
        relations,
    )
    found: list[PoolCondition] = []
    for row in budgets:
        level = budget_level(row.cap, row.spent)
        data = BudgetEventData(
            month=format_month(month), spent_microcredits=row.spent, cap_microcredits=row.cap
        ).model_dump_json()
        reached = (EventKind.BUDGET_WARNING, EventKind.BUDGET_REACHED)[
            : {BudgetLevel.WITHIN: 0, BudgetLevel.WARNING: 1, BudgetLevel.REACHED: 2}[level]
        ]
        found += [
            PoolCondition(
                BUDGET,
                f"{kind}/{month}/{row.kind}/{row.id}",
                ConditionEvents(kind, "", row.id, ((row.kind, row.id),), data),
            )
            for kind in reached
        ]
    balances = yield from select(
        _Balance,
        "SELECT w.kind, w.id, a.balance FROM {payers} AS w JOIN ledger_holders h ON h.kind = w.kind AND h.id = w.id "
        "AND h.purpose = w.kind JOIN ledger_accounts a ON a.id = h.account_id "
        "WHERE a.sequence > 0 AND a.balance < :low",
        {"low": terms.low_balance},
        relations,
    )
    for each in balances:
        data = BalanceEventData(
            balance_microcredits=each.balance, threshold_microcredits=terms.low_balance
        ).model_dump_json()
        events = ConditionEvents(EventKind.BALANCE_LOW, "", each.id, ((each.kind, each.id),), data)
        found.append(PoolCondition(BALANCE, f"{each.kind}/{each.id}", events))
    return found


def _gone(stored: Collection[tuple[str, str]]) -> Operation[set[tuple[str, str]]]:
    """Conditions of nodes and GPUs that do not exist any more."""
    gone: set[tuple[str, str]] = set()
    for kind, table, there in ((NODE, "nodes", "true"), (GPU, "gpus", "o.gone = 0")):
        objects = {int(name) for each, name in stored if each == kind}
        if objects:
            present = yield from values(
                int,
                f"SELECT o.id FROM {{ids}} AS i JOIN {table} o ON o.id = i.id WHERE {there}",  # noqa: S608
                {},
                {"ids": of_ids(objects)},
            )
            gone |= {(kind, str(each)) for each in objects - set(present)}
    return gone


def _batches(
    stored: Collection[tuple[str, str]],
) -> Operation[tuple[set[tuple[str, str]], set[tuple[str, str]]]]:
    """Batches all of whose tasks have ended that are closed now; and those that were extended or deleted."""
    names = {name: int(name.partition("/")[0]) for kind, name in stored if kind == OPEN_BATCH}
    if not names:
        return set(), set()
    rows = yield from select(
        _Closed,
        "SELECT b.id, b.total, b.done, b.closed FROM {ids} AS i JOIN batches b ON b.id = i.id",
        {},
        {"ids": of_ids(set(names.values()))},
    )
    known = {int(row.id): row for row in rows}
    done, extended = set(), set()
    for name, batch in names.items():
        row = known.get(batch)
        if row is None or row.done < row.total:
            extended.add((OPEN_BATCH, name))
        elif row.closed:
            done.add((OPEN_BATCH, name))
    return done, extended


# ---- changes


class _NewCondition(NamedTuple):
    kind: str
    object: str
    since: Instant
    data: str


class _EndedCondition(NamedTuple):
    kind: str
    object: str
    data: str


@operation
def change_conditions(
    begun: Sequence[PoolCondition],
    ended: Collection[tuple[str, str]],
    gone: Collection[tuple[str, str]],
    term: int,
    now: Instant,
) -> Operation[int | None]:
    """Store begins and ends with their events; return the number of events. None: another leader has taken over.

    `gone`: deleted without an event.
    """
    if not (yield from is_current_term(term)):
        return None
    new: list[NewEvent] = []
    rows = [
        _NewCondition(each.kind, each.object, now, msgspec.json.encode(each.events).decode())
        for each in begun
    ]
    inserted = yield from select(
        _Stored,
        "INSERT INTO conditions (kind, object, since, data) SELECT n.kind, n.object, n.since, n.data "
        "FROM {new} AS n WHERE true ON CONFLICT (kind, object) DO NOTHING RETURNING kind, object",
        {},
        {"new": Relation(relation_columns(_NewCondition), rows)},
    )
    for condition in begun:
        if (condition.kind, condition.object) in inserted and not condition.is_silent:
            said = condition.events
            new += [
                NewEvent(now, said.begins, *holder, said.subject, 0, said.data)
                for holder in said.holders
            ]
    deleted = yield from select(
        _EndedCondition,
        "DELETE FROM conditions WHERE EXISTS (SELECT 1 FROM {ended} AS e WHERE e.kind = conditions.kind "
        "AND e.object = conditions.object) RETURNING kind, object, data",
        {},
        {"ended": Relation(relation_columns(_Stored), sorted({*ended, *gone}))},
    )
    for row in deleted:
        if (row.kind, row.object) not in gone:
            new += _end_events(row, now)
    if new:
        yield from add_events(new)
    return len(new)


def _end_events(row: _EndedCondition, now: Instant) -> list[NewEvent]:
    if row.kind == OPEN_BATCH:
        batch, kind, holder = row.object.split("/")
        return [NewEvent(now, EventKind.BATCH_DONE, kind, int(holder), int(batch), 0, row.data)]
    said = msgspec.json.decode(row.data, type=ConditionEvents)
    if not said.ends:
        return []
    return [
        NewEvent(now, said.ends, *holder, said.subject, 0, said.data_at_end or said.data)
        for holder in said.holders
    ]

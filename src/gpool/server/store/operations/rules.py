"""State that schedulers share: operators' rules, learnt placement prices, usage of each user and team.

`core.scheduler.state.operator_rules` defines the rules, stored as JSON. Usage (`core.scheduler.order.fair_share`) is
kept so that a restart does not reset the shares.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Audience, Instant, Span
from gpool.core.scheduler.order.limits import Holder
from gpool.core.scheduler.place.portfolio import Learnt
from gpool.core.scheduler.state.operator_rules import OperatorRules, PolicyChange, Reservation
from gpool.server.store.generated_rows import RulesRecord, UsageRecord
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import columns, exists, select

RuleKind = Literal["policy", "cordon", "reservation", "learnt", "certified"]
READ_ONLY = "read_only"
"""Kind of the row with the reason of the read-only mode."""
POLICY = 0
"""The id of the policy and of the learnt prices, of which there is one each."""
USAGE = (("kind", "text"), ("id", "int"), ("value", "int"))


class _StoredPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    order: str | None = None
    ageing: int | None = None
    patience: int | None = None
    users: dict[int, int] = {}
    teams: dict[int, int] = {}


class _StoredReservation(msgspec.Struct, frozen=True):
    nodes: list[int]
    users: list[int]
    teams: list[int]
    first: int
    last: int
    why: str = ""


class _HeldSince(NamedTuple):
    id: TaskId
    at: Instant | None


@operation
def rules() -> Operation[OperatorRules]:
    rows = yield from select(
        RulesRecord,
        f"SELECT {columns(RulesRecord, RulesRecord, 'r')} FROM rules r ORDER BY r.kind, r.id",  # noqa: S608
    )
    policy, cordons, reservations, learnt = PolicyChange(), {}, [], None
    read_only = ""
    certified: dict[NodeId, frozenset[str]] = {}
    for row in rows:
        if row.kind == "policy":
            policy = _policy(row.value)
        elif row.kind == "cordon":
            cordons[NodeId(row.id)] = msgspec.json.decode(row.value, type=str)
        elif row.kind == "reservation":
            reservations.append(_reservation(row.id, row.value))
        elif row.kind == "learnt":
            learnt = learnt_from(row.value)
        elif row.kind == "certified":
            certified[NodeId(row.id)] = msgspec.json.decode(row.value, type=frozenset[str])
        elif row.kind == READ_ONLY:
            read_only = msgspec.json.decode(row.value, type=str)
    return OperatorRules(policy, cordons, tuple(reservations), learnt, certified, read_only)


@operation
def put_policy(change: PolicyChange, at: Instant) -> Operation[None]:
    users = {id_: weight for (kind, id_), weight in change.weights.items() if kind == "user"}
    teams = {id_: weight for (kind, id_), weight in change.weights.items() if kind == "team"}
    value = _StoredPolicy(change.order, change.ageing, change.patience, users, teams)
    yield from _put("policy", POLICY, msgspec.json.encode(value).decode(), at)


@operation
def put_learnt(learnt: Learnt, at: Instant) -> Operation[None]:
    yield from _put("learnt", POLICY, msgspec.json.encode(learnt).decode(), at)


@operation
def put_cordon(node: NodeId, why: str, at: Instant) -> Operation[None]:
    yield from _put("cordon", node, msgspec.json.encode(why).decode(), at)


@operation
def put_certified(node: NodeId, labels: Collection[str], at: Instant) -> Operation[None]:
    yield from _put("certified", node, msgspec.json.encode(sorted(labels)).decode(), at)


@operation
def put_reservation(one: Reservation, at: Instant) -> Operation[None]:
    value = _StoredReservation(
        sorted(one.nodes),
        sorted(one.audience.users),
        sorted(one.audience.teams),
        one.first,
        one.last,
        one.why,
    )
    yield from _put("reservation", one.id, msgspec.json.encode(value).decode(), at)


@operation
def drop(kind: RuleKind, id_: int) -> Operation[bool]:
    return (
        yield from exists(
            "DELETE FROM rules WHERE kind = :kind AND id = :id RETURNING id",
            {"kind": kind, "id": id_},
        )
    )


@operation
def held_since() -> Operation[Mapping[TaskId, Instant]]:
    rows = yield from select(
        _HeldSince, "SELECT id, COALESCE(started_at, leased_at) FROM tasks WHERE holding = 1"
    )
    return {row.id: row.at for row in rows if row.at is not None}


def _put(kind: RuleKind, id_: int, value: str, at: Instant) -> Operation[None]:
    yield Statement(
        "INSERT INTO rules (kind, id, value, changed_at) VALUES (:kind, :id, :value, :at) "
        "ON CONFLICT (kind, id) DO UPDATE SET value = excluded.value, changed_at = excluded.changed_at",
        {"kind": kind, "id": id_, "value": value, "at": at},
    )


def _policy(value: str) -> PolicyChange:
    stored = msgspec.json.decode(value, type=_StoredPolicy)
    weights: dict[Holder, int] = {("user", id_): weight for id_, weight in stored.users.items()}
    weights |= {("team", id_): weight for id_, weight in stored.teams.items()}
    return PolicyChange(
        stored.order,
        None if stored.ageing is None else Span(stored.ageing),
        None if stored.patience is None else Span(stored.patience),
        weights,
    )


@lru_cache(maxsize=1)
def learnt_from(value: str) -> Learnt:
    """Cached, since prices are read every minute and change daily."""
    return msgspec.json.decode(value, type=Learnt)


def _reservation(id_: int, value: str) -> Reservation:
    stored = msgspec.json.decode(value, type=_StoredReservation)
    return Reservation(
        id_,
        frozenset(NodeId(node) for node in stored.nodes),
        Audience(frozenset(stored.users), frozenset(stored.teams)),
        Instant(stored.first),
        Instant(stored.last),
        stored.why,
    )


# ---- usage of users and teams


@operation
def usage() -> Operation[dict[tuple[str, int], tuple[int, Instant]]]:
    rows = yield from select(
        UsageRecord,
        f"SELECT {columns(UsageRecord, UsageRecord, 'u')} FROM usage u",  # noqa: S608
    )
    return {(row.kind, row.id): (row.value, row.at) for row in rows}


@operation
def put_usage(values: Mapping[tuple[str, int], int], at: Instant) -> Operation[None]:
    """Store values; one with a later time, of a scheduler that has taken over, stays."""
    rows = [(kind, id_, value) for (kind, id_), value in sorted(values.items())]
    yield Statement(
        "INSERT INTO usage (kind, id, value, at) SELECT n.kind, n.id, n.value, :at FROM {new} AS n WHERE true "
        "ON CONFLICT (kind, id) DO UPDATE SET value = excluded.value, at = excluded.at "
        "WHERE usage.at < excluded.at",
        {"at": at},
        {"new": Relation(USAGE, rows)},
    )


@operation
def forget_usage(before: Instant) -> Operation[None]:
    yield Statement("DELETE FROM usage WHERE at < :before", {"before": before})

"""What operators laid upon the pool, and since when leases are held. Values are JSON here; `core.scheduling.rules` knows what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

import msgspec

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Audience, Instant, Span
from gpool.core.scheduler.order.limits import Holder
from gpool.core.scheduler.place.portfolio import Learnt
from gpool.core.scheduler.state.operator_rules import OperatorRules, PolicyChange, Reservation
from gpool.server.store.operation import operation
from gpool.server.store.protocol import Operation, Statement

Kind = Literal["policy", "cordon", "reservation", "learnt"]
POLICY = 0
"""The id of the one policy, and of what was learnt."""


class _Policy(msgspec.Struct, frozen=True, omit_defaults=True):
    order: str | None = None
    ageing: int | None = None
    patience: int | None = None
    users: dict[int, int] = {}
    teams: dict[int, int] = {}


class _Reservation(msgspec.Struct, frozen=True):
    nodes: list[int]
    users: list[int]
    teams: list[int]
    first: int
    last: int
    why: str = ""


@operation
def rules() -> Operation[OperatorRules]:
    """All of them."""
    rows = yield Statement("SELECT kind, id, value FROM rules ORDER BY kind, id", {})
    policy, cordons, reservations, learnt = PolicyChange(), {}, [], None
    for kind, id_, value in rows:
        if kind == "policy":
            policy = _policy(value)
        elif kind == "cordon":
            cordons[NodeId(id_)] = msgspec.json.decode(value, type=str)
        elif kind == "reservation":
            reservations.append(_reservation(id_, value))
        elif kind == "learnt":
            learnt = learnt_from(value)
    return OperatorRules(policy, cordons, tuple(reservations), learnt)


@operation
def put_policy(change: PolicyChange, at: Instant) -> Operation[None]:
    users = {id_: weight for (kind, id_), weight in change.weights.items() if kind == "user"}
    teams = {id_: weight for (kind, id_), weight in change.weights.items() if kind == "team"}
    value = _Policy(change.order, change.ageing, change.patience, users, teams)
    yield from _put("policy", POLICY, msgspec.json.encode(value).decode(), at)


@operation
def put_learnt(learnt: Learnt, at: Instant) -> Operation[None]:
    yield from _put("learnt", POLICY, msgspec.json.encode(learnt).decode(), at)


@operation
def put_cordon(node: NodeId, why: str, at: Instant) -> Operation[None]:
    yield from _put("cordon", node, msgspec.json.encode(why).decode(), at)


@operation
def put_reservation(one: Reservation, at: Instant) -> Operation[None]:
    value = _Reservation(
        sorted(one.nodes),
        sorted(one.audience.users),
        sorted(one.audience.teams),
        one.first,
        one.last,
        one.why,
    )
    yield from _put("reservation", one.id, msgspec.json.encode(value).decode(), at)


@operation
def drop(kind: Kind, id_: int) -> Operation[bool]:
    """False: there was none."""
    rows = yield Statement(
        "DELETE FROM rules WHERE kind = :kind AND id = :id RETURNING id", {"kind": kind, "id": id_}
    )
    return bool(rows)


@operation
def held_since() -> Operation[Mapping[TaskId, Instant]]:
    """Since when each held lease runs, or was granted."""
    rows = yield Statement(
        "SELECT id, COALESCE(started_at, leased_at) FROM tasks WHERE holding = 1", {}
    )
    return {TaskId(id_): Instant(at) for id_, at in rows if at is not None}


def _put(kind: Kind, id_: int, value: str, at: Instant) -> Operation[None]:
    yield Statement(
        "INSERT INTO rules (kind, id, value, changed_at) VALUES (:kind, :id, :value, :at) "
        "ON CONFLICT (kind, id) DO UPDATE SET value = excluded.value, changed_at = excluded.changed_at",
        {"kind": kind, "id": id_, "value": value, "at": at},
    )


def _policy(value: str) -> PolicyChange:
    told = msgspec.json.decode(value, type=_Policy)
    weights: dict[Holder, int] = {("user", id_): weight for id_, weight in told.users.items()}
    weights |= {("team", id_): weight for id_, weight in told.teams.items()}
    return PolicyChange(
        told.order,
        None if told.ageing is None else Span(told.ageing),
        None if told.patience is None else Span(told.patience),
        weights,
    )


@lru_cache(maxsize=1)
def learnt_from(value: str) -> Learnt:
    """Read every minute, changed every day."""
    return msgspec.json.decode(value, type=Learnt)


def _reservation(id_: int, value: str) -> Reservation:
    told = msgspec.json.decode(value, type=_Reservation)
    return Reservation(
        id_,
        frozenset(NodeId(node) for node in told.nodes),
        Audience(frozenset(told.users), frozenset(told.teams)),
        Instant(told.first),
        Instant(told.last),
        told.why,
    )

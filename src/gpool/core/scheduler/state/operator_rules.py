"""Operators' run-time rules: policy changes, cordons, reservations, a learnt pricing. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpool.core.errors import Invalid
from gpool.core.ids import NodeId
from gpool.core.model import Audience, Instant, Node, Span
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.limits import Holder
from gpool.core.scheduler.order.orders import Order, Policy
from gpool.core.scheduler.place.portfolio import Learnt
from gpool.core.specs import fields

MAX_WEIGHT = 1_000_000
_DAY = 24 * 3600 * 1_000_000


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """None: as configured."""

    order: str | None = None
    ageing: Span | None = None
    patience: Span | None = None
    weights: Mapping[Holder, int] = field(default_factory=dict)  # thousandths, of fair share

    def applied(self, policy: Policy, orders: Mapping[str, Order] = ORDERS) -> Policy:
        """Raises `Invalid` if a value is out of range."""
        if self.order is not None and self.order not in orders:
            there = ", ".join(sorted(orders))
            raise Invalid(f"no order is called {self.order!r}; there are: {there}")
        if self.ageing is not None and not 0 < self.ageing <= 365 * _DAY:
            raise Invalid("'ageing' is more than nothing and at most a year")
        if self.patience is not None and not 0 <= self.patience <= 365 * _DAY:
            raise Invalid("'patience' is at most a year")
        if not all(0 < weight <= MAX_WEIGHT for weight in self.weights.values()):
            raise Invalid(f"a weight is more than 0 and at most {MAX_WEIGHT // 1000}")
        return replace(
            policy,
            weights={**policy.weights, **self.weights},
            order=policy.order if self.order is None else self.order,
            ageing=policy.ageing if self.ageing is None else self.ageing,
            patience=policy.patience if self.patience is None else self.patience,
        )


@dataclass(frozen=True, slots=True)
class Reservation:
    """From `first` until `last` these nodes start only tasks of the allowed users and of their owners."""

    id: int
    nodes: frozenset[NodeId]
    audience: Audience
    first: Instant
    last: Instant
    why: str = ""

    def holds(self, now: Instant) -> bool:
        return self.first <= now < self.last


@dataclass(frozen=True, slots=True)
class OperatorRules:
    policy: PolicyChange = PolicyChange()
    cordons: Mapping[NodeId, str] = field(default_factory=dict)  # with the reason
    reservations: tuple[Reservation, ...] = ()
    learnt: Learnt | None = None  # None: the usual pricing
    certified: Mapping[NodeId, frozenset[str]] = field(default_factory=dict)  # labels
    read_only: str = ""  # reason of the read-only mode; empty: it is off

    def policy_upon(self, configured: Policy, orders: Mapping[str, Order] = ORDERS) -> Policy:
        """Raises `Invalid` if a value is out of range."""
        policy = self.policy.applied(configured, orders)
        return policy if self.learnt is None else replace(policy, pricing=self.learnt.pricing)

    def upon(self, node: Node, now: Instant) -> Node:
        """The same object if nothing changes."""
        cordoned = node.id in self.cordons
        reserved = self._reserved(node.id, now)
        labels = fields.with_certified(node.offer.labels, self.certified.get(node.id, frozenset()))
        if labels != node.offer.labels:
            node = replace(node, offer=replace(node.offer, labels=labels))
        if node.cordoned == cordoned and node.reserved_for == reserved:
            return node
        return replace(node, cordoned=cordoned, reserved_for=reserved)

    def _reserved(self, node: NodeId, now: Instant) -> Audience | None:
        held = [one for one in self.reservations if node in one.nodes and one.holds(now)]
        if not held:
            return None
        return Audience(
            frozenset().union(*(one.audience.users for one in held)),
            frozenset().union(*(one.audience.teams for one in held)),
        )

    def changes_between(self, before: Instant, now: Instant) -> bool:
        return any(before < at <= now for one in self.reservations for at in (one.first, one.last))


NO_RULES = OperatorRules()

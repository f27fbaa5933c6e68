"""The scheduling policy in force: configured, then changed by quotas and operators' rules. It plans and stores nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import entry_points

from gpool.core.model import Instant, Node
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.limits import GpuLimits
from gpool.core.scheduler.order.orders import Order, Policy
from gpool.core.scheduler.state.operator_rules import NO_RULES, OperatorRules

ORDERS_GROUP = "gpool.orders"


def known_orders() -> Mapping[str, Order]:
    """Built-in orders and those of installed packages (an `Order` or a key function), which cannot replace a built-in one."""
    entries = entry_points(group=ORDERS_GROUP)
    return {**{entry.name: _order(entry.name, entry.load()) for entry in entries}, **ORDERS}


def _order(name: str, loaded: object) -> Order:
    if isinstance(loaded, Order):
        return loaded
    if not callable(loaded):
        raise TypeError(
            f"entry point {name!r} of {ORDERS_GROUP} is {loaded!r}: give an Order or a key function"
        )
    return Order(name, loaded)


class ActivePolicy:
    def __init__(self, configured: Policy, orders: Mapping[str, Order] = ORDERS) -> None:
        self.configured = configured  # before operators changed it
        self.current = configured
        self.orders = orders
        self.rules = NO_RULES
        self._applied_at = Instant(0)

    def use_limits(self, limits: GpuLimits) -> bool:
        if limits == self.current.limits:
            return False
        self.current = replace(self.current, limits=limits)
        return True

    def use_rules(self, rules: OperatorRules, now: Instant) -> bool:
        configured = replace(self.configured, limits=self.current.limits)
        policy = rules.policy_upon(configured, self.orders)
        if rules == self.rules and policy == self.current:
            return False
        self.current, self.rules, self._applied_at = policy, rules, now
        return True

    def apply_rules_at(self, now: Instant) -> None:
        self._applied_at = now

    def has_due_changes(self, now: Instant) -> bool:
        return self.rules.changes_between(self._applied_at, now)

    def ruled(self, node: Node) -> Node:
        return self.rules.upon(node, self._applied_at)

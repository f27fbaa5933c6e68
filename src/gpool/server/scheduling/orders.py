"""The orders this server may be told to use: the house's own, and those of installed packages (`gpool.orders`)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from gpool.core.scheduler.order.orders import ORDERS, Order

GROUP = "gpool.orders"


def known_orders() -> Mapping[str, Order]:
    """An order of the house is not replaced by another of the same name."""
    found = {entry.name: entry.load() for entry in entry_points(group=GROUP)}
    return {**found, **ORDERS}

"""The orders that this server offers: gpool's own and those of installed packages (entry point group `gpool.orders`)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.orders import Order

GROUP = "gpool.orders"


def known_orders() -> Mapping[str, Order]:
    """Orders by name. An entry point is an `Order`, or a key function; it cannot replace one of gpool's own."""
    found = {entry.name: _order(entry.name, entry.load()) for entry in entry_points(group=GROUP)}
    return {**found, **ORDERS}


def _order(name: str, loaded: object) -> Order:
    if isinstance(loaded, Order):
        return loaded
    if not callable(loaded):
        raise TypeError(
            f"entry point {name!r} of {GROUP} is {loaded!r}: give an Order or a key function"
        )
    return Order(name, loaded)

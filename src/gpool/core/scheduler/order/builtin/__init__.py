"""Orders that come with gpool: every `Order` in a module of this folder; a new order is a new module here.
Installed packages add orders by the entry point group `gpool.orders` (`server.scheduling.policy`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules

from gpool.core.errors import Invalid
from gpool.core.scheduler.order.orders import Order


def _orders() -> Iterator[Order]:
    for found in iter_modules(__path__):
        for value in vars(import_module(f"{__name__}.{found.name}")).values():
            if isinstance(value, Order):
                yield value


ORDERS: Mapping[str, Order] = {order.name: order for order in _orders()}


def order_named(name: str, orders: Mapping[str, Order] = ORDERS) -> Order:
    order = orders.get(name)
    if order is None:
        raise Invalid(f"no order is called {name!r}; there are: {', '.join(sorted(orders))}")
    return order

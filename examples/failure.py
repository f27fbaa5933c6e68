"""Catch an exception that a function raised in the pool; its cause is the traceback from the node."""

from __future__ import annotations

import traceback

import gpool


class OutOfStock(Exception):
    """An exception of this script: local modules are sent with the function."""


@gpool.task
def order(item: str, stock: dict[str, int]) -> int:
    if not stock.get(item):
        raise OutOfStock(item)
    return stock[item] - 1


if __name__ == "__main__":
    run = order.submit("apples", {"apples": 3})
    print(run.id, run.result(timeout=60))
    try:
        order.remote("pears", {"apples": 3})
    except OutOfStock as error:
        traceback.print_exception(error)
        print("out of stock:", error)

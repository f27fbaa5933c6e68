"""Whether a running task may be stopped for a waiting one. Chooses no victims.
Reasons and an example in numbers: `passes.preemption`.
"""

from __future__ import annotations

from typing import NamedTuple

from gpool.core.model import Span
from gpool.core.scheduler.order.orders import Order, Policy, Rank

NEAR_MILLI = 30
"""Recent usages of two tenants that differ by less than this are equal."""

_ONE = 1000
Pair = tuple[int, int]
"""A number of the tenant and the same of the user."""


class ExchangeSide(NamedTuple):
    """Counted as if the running task did not run. Shares in millionths of the pool."""

    rank: Rank
    shares: Pair = (0, 0)  # held now and recently used
    had: Pair = (0, 0)  # recently used
    holds: Pair = (0, 0)  # held now; of the running side with the running task


class Exchange(NamedTuple):
    waiting: ExchangeSide
    gained: Pair  # shares of the waiting side once its task runs
    running: ExchangeSide
    ran: Span  # since the running task last started
    evens: tuple[bool, bool] = (False, False)  # the waiting side holds less now, and not more after


def outranks(exchange: Exchange, order: Order, policy: Policy) -> bool:
    waiting, running = exchange.waiting, exchange.running
    if waiting.rank.band != running.rank.band:
        return waiting.rank.band < running.rank.band
    if not order.exchanges_by_share:
        return order.precedes(waiting.rank.key, running.rank.key)
    for part in (0, 1):  # tenants, then the users of one tenant
        less, more, margin = waiting.shares[part], running.shares[part], policy.margin_milli
        if less != more:
            is_ahead_after = _exceeds(more, exchange.gained[part], margin)
            if is_ahead_after or exchange.ran < policy.quantum:
                return is_ahead_after
            had, others = waiting.had[part], running.had[part]
            if _exceeds(others, had, NEAR_MILLI) and waiting.holds[part] < running.holds[part]:
                return True
            return others >= had and (exchange.evens[part] or _exceeds(more, less, margin))
    return waiting.rank.key < running.rank.key


def _exceeds(more: int, less: int, margin_milli: int) -> bool:
    # The margin counts on both sides of the share that both should have.
    return more * (_ONE - margin_milli) > less * (_ONE + margin_milli)

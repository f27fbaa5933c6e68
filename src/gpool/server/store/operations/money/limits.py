"""Running leases whose cap or reservation ends, funds of payers, cost of a task. Reads only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpool.core.ids import NodeId, SpecId, TaskId
from gpool.core.model import Instant, Span
from gpool.core.money.charging import AllocationMeter, FrozenPrice
from gpool.core.money.metering import reaches_cap_at
from gpool.core.money.transfers import (
    month_of,
)
from gpool.core.scheduler.order.limits import Holder
from gpool.server.store.operations.money.charges import (
    PLACES,
    spent_by,
)
from gpool.server.store.operations.money.meters import ShortReservation, shares_of
from gpool.server.store.protocol import Operation, Relation, operation
from gpool.server.store.rows import select
from gpool.server.store.values import TaskCost


class MeteredLease(NamedTuple):
    """A started lease on a meter. Members of a gang have a row each."""

    id: TaskId
    epoch: int
    spec_id: SpecId
    started_at: Instant
    max_cost: int | None
    node_id: NodeId
    number: int
    rate: int
    minimum: int
    until: Instant
    charged_us: int
    charged: int


_LEASE = (
    "t.id, t.epoch, t.spec_id, t.started_at, t.max_cost, m.node_id, m.number, m.rate, m.minimum, m.until, "
    "m.charged_us, m.charged"
)
_RUNNING = "t.holding = 1 AND t.metered = 1 AND t.started_at IS NOT NULL AND t.finished_at IS NULL"


@operation
def capped_leases() -> Operation[dict[TaskId, list[tuple[MeteredLease, int]]]]:
    """Running leases of tasks with a `max_cost`, each with what is left of it for that allocation."""
    rows = yield from select(
        MeteredLease,
        f"SELECT {_LEASE} FROM tasks t JOIN meters m ON m.node_id = t.node_id AND m.number = t.allocation_number "  # noqa: S608
        f"WHERE {_RUNNING} AND t.max_cost IS NOT NULL AND m.closed_at IS NULL UNION ALL "
        f"SELECT {_LEASE} FROM tasks t JOIN meters m ON m.task_id = t.id AND m.epoch = t.epoch "
        f"WHERE {_RUNNING} AND t.max_cost IS NOT NULL AND t.node_id IS NULL AND m.closed_at IS NULL",
    )
    spent = yield from spent_by(row.id for row in rows)
    found: dict[TaskId, list[MeteredLease]] = {}
    for row in rows:
        found.setdefault(row.id, []).append(row)
    result: dict[TaskId, list[tuple[MeteredLease, int]]] = {}
    for task, leases in found.items():
        left = max(0, (leases[0].max_cost or 0) - spent.get(task, 0))
        shares = shares_of(left, [FrozenPrice(each.rate) for each in leases])
        result[task] = [(each, share or 0) for each, share in zip(leases, shares, strict=True)]
    return result


def cap_at(lease: MeteredLease, left: int) -> Instant:
    """When the lease has used up what is left of its task's max_cost on this allocation."""
    price = FrozenPrice(lease.rate, lease.minimum)
    meter = AllocationMeter(price, lease.until, Span(lease.charged_us), lease.charged)
    return reaches_cap_at(meter, lease.started_at, left)


@operation
def running_on(short: Sequence[ShortReservation]) -> Operation[list[MeteredLease]]:
    """Running leases on these allocations."""
    keys = Relation(
        (*PLACES, ("task", "int"), ("epoch", "int")),
        sorted({(e.node, e.number, e.task, e.epoch) for e in short}),
    )
    return (
        yield from select(
            MeteredLease,
            f"SELECT {_LEASE} FROM {{keys}} AS k JOIN meters m ON m.node_id = k.node AND m.number = k.number "  # noqa: S608
            "AND m.closed_at IS NULL JOIN tasks t ON t.node_id = m.node_id AND t.allocation_number = m.number "
            f"WHERE {_RUNNING} UNION ALL SELECT {_LEASE} FROM {{keys}} AS k JOIN meters m ON m.task_id = k.task "
            "AND m.epoch = k.epoch AND m.node_id = k.node JOIN tasks t ON t.id = m.task_id AND t.epoch = m.epoch "
            f"WHERE {_RUNNING} AND t.node_id IS NULL",
            {},
            {"keys": keys},
        )
    )


# ---- funds of payers


class PayerFunds(NamedTuple):
    """Balance, monthly cap (None: no budget) and spending of the month."""

    kind: str
    id: int
    balance: int
    cap: int | None
    spent: int

    def allows(self, amount: int) -> bool:
        return self.balance >= amount and (self.cap is None or self.spent + amount <= self.cap)


@operation
def funds(payers: Iterable[Holder], at: Instant) -> Operation[dict[Holder, PayerFunds]]:
    """Funds of these users and teams; those without an account are absent."""
    rows = yield from select(
        PayerFunds,
        "SELECT h.kind, h.id, a.balance, b.cap, COALESCE(s.amount, 0) FROM {payers} AS p "
        "JOIN ledger_holders h ON h.kind = p.kind AND h.id = p.id AND h.purpose = p.kind "
        "JOIN ledger_accounts a ON a.id = h.account_id LEFT JOIN budgets b ON b.account_id = a.id "
        "LEFT JOIN ledger_spending s ON s.account_id = a.id AND s.month = :month",
        {"month": month_of(at)},
        {"payers": Relation((("kind", "text"), ("id", "int")), sorted(set(payers)))},
    )
    return {("user" if row.kind == "user" else "team", row.id): row for row in rows}


def cost_of(task: TaskId) -> Operation[TaskCost]:
    """Cost of one task, as a step. What is set aside for an allocation counts for each task on it."""
    spent = yield from spent_by((task,))
    rows = yield from select(
        TaskCost,
        "SELECT 0, CAST(COALESCE(SUM(m.reserved - m.charged), 0) AS BIGINT) FROM tasks t JOIN meters m "
        "ON m.node_id = t.node_id AND m.number = t.allocation_number AND m.closed_at IS NULL "
        "OR m.task_id = t.id AND m.epoch = t.epoch AND t.node_id IS NULL "
        "WHERE t.id = :task AND t.holding = 1 AND t.metered = 1",
        {"task": task},
    )
    return TaskCost(spent.get(task, 0), rows[0].reserved if rows else 0)

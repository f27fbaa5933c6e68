"""Totals of use: attempts, run time and GPU time by account, month, node, model and project.

They are updated with the ends of leases, and kept with and without prices.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from gpool.core.ids import NodeId, SpecId
from gpool.core.model import Instant
from gpool.core.money.transfers import month_of
from gpool.core.scheduler.order.limits import Holder
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import (
    allocation_from,
    of_ids,
    offer_from,
    relation_columns,
    select,
)


class UsedAllocation(NamedTuple):
    """Allocation of one account on a node. `allocation`: as stored; None: unknown, and without GPUs.

    `spec`: of its tasks, which have its project.
    """

    holder: Holder
    node: NodeId
    allocation: str | None
    spec: SpecId


class LeaseTotals(NamedTuple):
    attempts: int
    ran_us: int


class _UsedRow(NamedTuple):
    kind: str
    id: int
    month: int
    node_id: NodeId
    model: str
    spec_id: SpecId
    attempts: int
    task_us: int
    gpu_us: int


class _LendingNode(NamedTuple):
    id: NodeId
    offer: str


def add_usage(used: Mapping[UsedAllocation, LeaseTotals], at: Instant) -> Operation[None]:
    """Add leases that ended now to the totals, as a step."""
    shares = {each: _shares(each.allocation) for each in used}
    models = yield from _models({each.node for each in used if shares[each]})
    month = month_of(at)
    totals: dict[tuple[str, int, int, NodeId, str, SpecId], list[int]] = {}
    for each, (attempts, ran) in used.items():
        parts = shares[each]
        known = models.get(each.node, {})
        names = sorted({known.get(index, "") for index, _ in parts})
        key = (*each.holder, month, each.node, "+".join(filter(None, names)), each.spec)
        total = totals.setdefault(key, [0, 0, 0])
        total[0] += attempts
        total[1] += ran
        total[2] += ran * sum(share for _, share in parts) // 1000
    rows = [_UsedRow(*key, *total) for key, total in sorted(totals.items())]
    if rows:
        yield Statement(
            "INSERT INTO usage_totals (kind, id, month, node_id, model, project, attempts, task_us, gpu_us) "
            "SELECT u.kind, u.id, u.month, u.node_id, u.model, COALESCE(s.project, ''), SUM(u.attempts), "
            "SUM(u.task_us), SUM(u.gpu_us) FROM {used} AS u LEFT JOIN specs s ON s.id = u.spec_id WHERE TRUE "
            "GROUP BY u.kind, u.id, u.month, u.node_id, u.model, COALESCE(s.project, '') "
            "ORDER BY 1, 2, 3, 4, 5, 6 "  # one lock order for all
            "ON CONFLICT (kind, id, month, node_id, model, project) DO UPDATE SET "
            "attempts = usage_totals.attempts + excluded.attempts, "
            "task_us = usage_totals.task_us + excluded.task_us, gpu_us = usage_totals.gpu_us + excluded.gpu_us",
            {},
            {"used": Relation(relation_columns(_UsedRow), rows)},
        )


def _shares(allocation: str | None) -> tuple[tuple[int, int], ...]:
    """GPU index and thousandths of each slice."""
    if allocation is None:
        return ()
    return tuple(
        (part.gpu_index, part.share_milli) for part in allocation_from(0, allocation).slices
    )


def _models(nodes: set[NodeId]) -> Operation[dict[NodeId, dict[int, str]]]:
    if not nodes:
        return {}
    rows = yield from select(
        _LendingNode,
        "SELECT n.id, n.offer FROM {nodes} AS i JOIN nodes n ON n.id = i.id",
        {},
        {"nodes": of_ids(nodes)},
    )
    return {row.id: {gpu.index: gpu.model for gpu in offer_from(row.offer).gpus} for row in rows}


# ---- listings


class TotalsBy(StrEnum):
    """Columns by which totals are grouped."""

    GPU = "gpu"
    NODE = "node"
    MONTH = "month"
    TEAM = "team"
    PROJECT = "project"


_GROUPS = {
    TotalsBy.GPU: "u.model",
    TotalsBy.NODE: "CAST(u.node_id AS TEXT)",
    TotalsBy.MONTH: "CAST(u.month AS TEXT)",
    TotalsBy.TEAM: "CASE WHEN u.kind = 'team' THEN CAST(u.id AS TEXT) ELSE '' END",
    TotalsBy.PROJECT: "u.project",
}
_SERVED = _GROUPS | {TotalsBy.PROJECT: "SUBSTR(u.project, 1, 0)"}
"""Owners do not see the labels of other accounts. PostgreSQL refuses a constant in GROUP BY."""


class TotalsPosition(NamedTuple):
    """Place of a group in its list: those after it are on the next page."""

    side: str
    name: str


FIRST_TOTAL = TotalsPosition("", "")


class UsedGroup(NamedTuple):
    """Use of one group. `side`: `used` by the account, or `served` to others by nodes of the account."""

    side: str
    name: str
    attempts: int
    task_us: int
    gpu_us: int


class MonthRange(NamedTuple):
    """Months from `first` to `last`, both included."""

    first: int
    last: int


@operation
def totals(
    holder: Holder, months: MonthRange, by: TotalsBy, after: TotalsPosition, limit: int
) -> Operation[tuple[UsedGroup, ...]]:
    """Use by a user or team, and of a user's nodes by other accounts, in groups."""
    group = _GROUPS[by]
    sums = "SUM(u.attempts) AS attempts, SUM(u.task_us) AS task_us, SUM(u.gpu_us) AS gpu_us"
    parts = [
        f"SELECT 'used' AS side, {group} AS name, {sums} FROM usage_totals u WHERE u.kind = :kind AND u.id = :id "  # noqa: S608
        f"AND u.month >= :first AND u.month <= :last GROUP BY {group}"
    ]
    if holder[0] == "user":
        group = _SERVED[by]
        parts.append(
            f"SELECT 'served' AS side, {group} AS name, {sums} FROM nodes n JOIN usage_totals u "  # noqa: S608
            "ON u.node_id = n.id AND u.month >= :first AND u.month <= :last WHERE n.owner_id = :id "
            f"AND NOT (u.kind = 'user' AND u.id = :id) GROUP BY {group}"
        )
    rows = yield from select(
        UsedGroup,
        "SELECT g.side, g.name, CAST(g.attempts AS BIGINT), CAST(g.task_us AS BIGINT), CAST(g.gpu_us AS BIGINT) "  # noqa: S608
        f"FROM ({' UNION ALL '.join(parts)}) AS g WHERE (g.side, g.name) > (:side, :name) "
        "ORDER BY g.side, g.name LIMIT :limit",
        {
            "kind": holder[0],
            "id": holder[1],
            "limit": limit,
            **months._asdict(),
            **after._asdict(),
        },
    )
    return tuple(rows)

"""Totals of use, updated with the ends of leases: attempts, run time and GPU time by account, month, node and model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpool.core.ids import NodeId
from gpool.core.model import Instant
from gpool.core.money.transfers import month_of
from gpool.core.scheduler.order.limits import Holder
from gpool.server.store.generated_rows import UsageTotalsRecord
from gpool.server.store.protocol import Operation, Relation, Statement
from gpool.server.store.rows import (
    allocation_from,
    of_ids,
    offer_from,
    relation_columns,
    select,
)


class UsedAllocation(NamedTuple):
    """A lease that ended now. `allocation`: as stored; None: unknown, and without GPUs."""

    holder: Holder
    node: NodeId
    allocation: str | None
    started_at: int | None


class _LendingNode(NamedTuple):
    id: NodeId
    offer: str


def add_usage(used: Sequence[UsedAllocation], at: Instant) -> Operation[None]:
    """Add ended leases to the totals, as a step."""
    shares = {each.allocation: _shares(each.allocation) for each in used}
    models = yield from _models({each.node for each in used if shares[each.allocation]})
    month = month_of(at)
    totals: dict[tuple[str, int, int, NodeId, str], list[int]] = {}
    for each in used:
        ran = 0 if each.started_at is None else max(0, at - each.started_at)
        parts = shares[each.allocation]
        known = models.get(each.node, {})
        names = sorted({known.get(index, "") for index, _ in parts})
        key = (*each.holder, month, each.node, "+".join(filter(None, names)))
        total = totals.setdefault(key, [0, 0, 0])
        total[0] += 1
        total[1] += ran
        total[2] += ran * sum(share for _, share in parts) // 1000
    rows = [UsageTotalsRecord(*key, *total) for key, total in sorted(totals.items())]
    if rows:
        yield Statement(
            "INSERT INTO usage_totals (kind, id, month, node_id, model, attempts, task_us, gpu_us) "
            "SELECT kind, id, month, node_id, model, attempts, task_us, gpu_us FROM {used} AS u WHERE TRUE "
            "ON CONFLICT (kind, id, month, node_id, model) DO UPDATE SET "
            "attempts = usage_totals.attempts + excluded.attempts, "
            "task_us = usage_totals.task_us + excluded.task_us, gpu_us = usage_totals.gpu_us + excluded.gpu_us",
            {},
            {"used": Relation(relation_columns(UsageTotalsRecord), rows)},
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

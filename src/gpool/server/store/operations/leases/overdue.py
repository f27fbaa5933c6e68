"""Leases by age, and their end by the server. `scheduling.overdue` decides which ones; fencing is that of reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpool.core.ids import NodeId, SpecId, TaskId
from gpool.core.model import EndReason, Instant
from gpool.server.store.operations.leases.reports import record_if_current
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.rows import select
from gpool.server.store.values import PREEMPTING, Recording
from gpool.wire.frames import Finished, ReportItem


class LeaseAge(NamedTuple):
    id: TaskId
    epoch: int
    node_id: NodeId
    spec_id: SpecId
    allocation_number: int | None  # None: a member of a gang
    leased_at: Instant
    started_at: Instant | None
    cancelled_at: Instant | None
    preempted_at: Instant | None


@dataclass(frozen=True, slots=True)
class OverdueLease:
    node: NodeId
    task: TaskId
    epoch: int
    reason: EndReason
    text: str


@operation
def old_leases(before: Instant) -> Operation[tuple[LeaseAge, ...]]:
    """Held leases granted before then: those of single-node tasks in the order of their lease queues, then members.

    Members of cancelled gangs are left out: `gang_members.overdue` has them.
    """
    preempted = (
        "(SELECT n.at FROM attempt_notes n WHERE n.task_id = t.id AND n.epoch = t.epoch "
        "AND n.note = :note)"
    )
    single = yield from select(
        LeaseAge,
        "SELECT t.id, t.epoch, t.node_id, t.spec_id, t.allocation_number, t.leased_at, t.started_at, t.finished_at, "  # noqa: S608
        f"{preempted} FROM tasks t WHERE t.holding = 1 AND t.node_id IS NOT NULL AND t.leased_at < :before "
        "ORDER BY t.node_id, t.allocation_number, t.leased_at, t.id",
        {"before": before, "note": PREEMPTING},
    )
    members = yield from select(
        LeaseAge,
        "SELECT t.id, t.epoch, m.node_id, t.spec_id, NULL, t.leased_at, m.started_at, t.finished_at, "  # noqa: S608
        f"{preempted} FROM members m JOIN tasks t ON t.id = m.task_id AND t.epoch = m.epoch "
        "WHERE m.holding = 1 AND t.finished_at IS NULL AND t.leased_at < :before ORDER BY t.id, m.rank",
        {"before": before, "note": PREEMPTING},
    )
    return (*single, *members)


@operation
def end_overdue(found: Sequence[OverdueLease], term: int, at: Instant) -> Operation[Recording]:
    """End these leases as if their nodes had reported it; nothing, if another scheduler has taken over."""
    items: dict[NodeId, list[ReportItem]] = {}
    for lease in found:
        end = Finished(lease.task, lease.epoch, lease.reason, error_text=lease.text)
        items.setdefault(lease.node, []).append(end)
    return (yield from record_if_current(list(items.items()), term, at))

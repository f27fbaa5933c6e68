"""Preemption requests to nodes, recorded as the attempt's note `PREEMPTING`. The node releases the lease, the task is
queued again. `core.scheduler.passes` chooses the victims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Instant, TaskStatus
from gpool.server.store.operation import operation
from gpool.server.store.operations.gangs.members import preemptible
from gpool.server.store.operations.leases.grants import is_current_term
from gpool.server.store.operations.tasks.checkpoints import add_notes
from gpool.server.store.protocol import Operation, Relation
from gpool.server.store.queries import select
from gpool.server.store.rows import of_ids
from gpool.server.store.values import PREEMPTING, Recording
from gpool.wire.frames import Hold

HOLDS = (("id", "int"), ("epoch", "int"))
ACTIVE = ", ".join(repr(status.value) for status in (TaskStatus.LEASED, TaskStatus.RUNNING))


class _HeldLease(NamedTuple):
    id: TaskId
    epoch: int
    node_id: NodeId | None  # None: a gang


class _Preempting(NamedTuple):
    id: TaskId
    epoch: int


@operation
def preempt(ids: Sequence[TaskId], at: Instant) -> Operation[Recording]:
    """Ask the nodes that hold these tasks to stop them. Recorded, so that a node that reconnects is asked again."""
    rows = yield from select(
        _HeldLease,
        "SELECT t.id, t.epoch, t.node_id FROM {wanted} AS w JOIN tasks t ON t.id = w.id "  # noqa: S608
        f"WHERE t.holding = 1 AND t.status IN ({ACTIVE}) "
        "/*postgresql ORDER BY t.id FOR UPDATE OF t*/",
        {},
        {"wanted": of_ids(ids)},
    )
    return (yield from _ask_to_stop(rows, at))


@operation
def preempt_if_current(holds: Sequence[Hold], term: int, at: Instant) -> Operation[Recording]:
    if not (yield from is_current_term(term)):
        return Recording()
    rows = yield from select(
        _HeldLease,
        "SELECT t.id, t.epoch, t.node_id FROM {wanted} AS w JOIN tasks t ON t.id = w.id AND t.epoch = w.epoch "  # noqa: S608
        f"WHERE t.holding = 1 AND t.status IN ({ACTIVE}) "
        "/*postgresql ORDER BY t.id FOR UPDATE OF t*/",
        {},
        {"wanted": Relation(HOLDS, [(hold.task, hold.epoch) for hold in holds])},
    )
    return (yield from _ask_to_stop(rows, at))


def _ask_to_stop(rows: Sequence[_HeldLease], at: Instant) -> Operation[Recording]:
    gangs = yield from preemptible(row.id for row in rows if row.node_id is None)
    asked: list[tuple[NodeId, Hold]] = []
    for row in rows:
        nodes = gangs.get(row.id, ()) if row.node_id is None else (row.node_id,)
        asked += [(node, Hold(row.id, row.epoch)) for node in nodes]
    holds = dict.fromkeys((hold.task, hold.epoch) for _, hold in asked)
    if not holds:
        return Recording()
    yield from add_notes([(*hold, PREEMPTING) for hold in holds], at)
    return Recording(to_preempt=tuple(asked), noted=tuple(TaskId(task) for task, _ in holds))


def preempting(node: NodeId) -> Operation[tuple[Hold, ...]]:
    rows = yield from select(
        _Preempting,
        "SELECT t.id, t.epoch FROM tasks t JOIN attempt_notes n ON n.task_id = t.id AND n.epoch = t.epoch "  # noqa: S608
        f"WHERE t.node_id = :node AND t.holding = 1 AND t.status IN ({ACTIVE}) "
        "AND n.note = :note ORDER BY t.id",
        {"node": node, "note": PREEMPTING},
    )
    return tuple(Hold(row.id, row.epoch) for row in rows)

"""State of a sibling from the rows of the store."""

from __future__ import annotations

from gpool.core.model import Instant, Span, TaskStatus
from gpool.core.trust import rounds
from gpool.core.trust.rounds import RunState, SiblingRun
from gpool.server.store.operations.verification.siblings import SiblingRow
from gpool.server.store.rows import REASON


def run_of(row: SiblingRow) -> SiblingRun:
    """State of a sibling: an end that says nothing about the answer is void, and so are deleted and expired ones."""
    since = row.queued_at or Instant(0)
    if row.state == "void" or row.status is None or row.shrunk_at is not None:
        return SiblingRun(row.task_id, row.node_id, RunState.VOID, since)
    if row.status == TaskStatus.QUEUED:
        return SiblingRun(row.task_id, row.node_id, RunState.WAITING, since)
    leased = row.leased_at or since
    if row.finished_at is None:
        return SiblingRun(row.task_id, row.node_id, RunState.RUNNING, leased)
    is_answer = row.reason is not None and REASON[row.reason] not in rounds.NO_ANSWERS
    state = RunState.ANSWERED if is_answer else RunState.VOID
    return SiblingRun(row.task_id, row.node_id, state, leased, Span(row.finished_at - leased))

"""Results of caught nodes: read, run again with a quorum, or refunded; and what a node would lose."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from gpool.core.errors import InternalFault
from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
from gpool.core.model import Instant
from gpool.core.permissions import TeamId
from gpool.server.store.operations.leases.grants import is_current_term
from gpool.server.store.operations.tasks.submissions import (
    NewTask,
    Submission,
    SubmittedTasks,
    submit,
)
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.server.store.rows import select, spec_from, values
from gpool.server.store.sealing import BODY_OF_TASK, PAYLOAD, opened


class _WithdrawnPayload(NamedTuple):
    id: TaskId
    payload: bytes | None
    payload_sha256: str
    project: str


class WithdrawnResult(NamedTuple):
    """A delivered result that is run again; `shrunk_at`: its arguments are gone."""

    task_id: TaskId
    user_id: UserId
    team_id: TeamId | None
    spec_id: SpecId
    body: str
    shrunk_at: Instant | None


@operation
def withdrawn_results(limit: int) -> Operation[list[WithdrawnResult]]:
    """Read withdrawn results that have not been run again."""
    rows = yield from select(
        WithdrawnResult,
        "SELECT t.id, t.user_id, t.team_id, t.spec_id, s.body, t.shrunk_at FROM verifications v "
        "JOIN tasks t ON t.id = v.task_id JOIN specs s ON s.id = t.spec_id "
        "WHERE v.outcome = 'withdrawn' AND v.rerun_id IS NULL ORDER BY v.task_id LIMIT :limit",
        {"limit": limit},
    )
    return (yield from opened(rows, BODY_OF_TASK))


@operation
def rerun(
    result: WithdrawnResult, task: TaskId, batch: BatchId, spec_id: SpecId, term: int, at: Instant
) -> Operation[tuple[Submission, SubmittedTasks] | None]:
    """Submit a withdrawn result's task again, verified by two owners; None: its inputs are gone, so it is refunded."""
    if not (yield from is_current_term(term)):
        return None
    rows = yield from select(
        _WithdrawnPayload,
        "SELECT t.id, t.payload, t.payload_sha256, s.project FROM tasks t JOIN specs s ON s.id = t.spec_id "
        "WHERE t.id = :id AND t.shrunk_at IS NULL",
        {"id": result.task_id},
    )
    rows = yield from opened(rows, PAYLOAD)
    if not rows:
        yield Statement(
            "UPDATE verifications SET outcome = 'refunded' WHERE task_id = :id",
            {"id": result.task_id},
        )
        return None
    spec = spec_from(result.body)
    wanted = Submission(
        batch=batch,
        is_new_batch=True,
        closes_batch=True,
        spec_id=spec_id,
        spec=replace(spec, requirements=replace(spec.requirements, siblings=2)),
        user=result.user_id,
        tasks=[NewTask(task, 0, bytes(rows[0].payload or b""), rows[0].payload_sha256)],
        at=at,
        team=result.team_id,
        project=rows[0].project,
    )
    [outcome] = yield from submit([wanted])
    if not isinstance(outcome, SubmittedTasks):
        raise InternalFault(f"task {result.task_id} could not be run again: {outcome}")
    yield Statement(
        "UPDATE verifications SET rerun_id = :task WHERE task_id = :id",
        {"task": task, "id": result.task_id},
    )
    return wanted, outcome


class Stake(NamedTuple):
    """Price of a result, and the unvested earnings that its node would lose with it. Micro-credits."""

    price: int
    stake: int


@operation
def stake_of(task: TaskId, node: NodeId) -> Operation[Stake]:
    [price] = yield from values(
        int,
        "SELECT COALESCE(SUM(c.microcredits), 0) FROM charges c WHERE c.task_id = :task AND c.state = 'held'",
        {"task": task},
    )
    [stake] = yield from values(
        int,
        "SELECT COALESCE(SUM(c.microcredits - c.fee), 0) FROM charges c WHERE c.node_id = :node AND c.state = 'posted'",
        {"node": node},
    )
    return Stake(int(price), int(stake))

"""Verdicts: a parent ends with the accepted answer, or without a quorum. One transaction ends the parent, records who
agreed and who differed, tells the owners of the latter, and drops what the siblings returned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpool.core.ids import BatchId, NodeId, TaskId, UserId
from gpool.core.lifecycle import Move
from gpool.core.model import EndReason, Instant, Span, TaskStatus
from gpool.core.permissions import TeamId
from gpool.core.trust.spot import DEFAULT_SPOT
from gpool.server.store.generated_rows import TasksRecord
from gpool.server.store.operations.leases.ends import take_sequences, target
from gpool.server.store.operations.leases.grants import is_current_term
from gpool.server.store.operations.money.charges import accept_held, reject_held
from gpool.server.store.operations.money.vesting import forfeit
from gpool.server.store.operations.tasks.artifacts import keep
from gpool.server.store.operations.tasks.deletion import shrink_tasks
from gpool.server.store.operations.tasks.progress import EPOCH_SHIFT, append_chunks, logs
from gpool.server.store.operations.tasks.storage import END_BYTES, change, holder_of
from gpool.server.store.operations.verification.standings import (
    ComparedSibling,
    record_comparisons,
)
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import columns, of_ids, outputs_from, select, values
from gpool.server.store.sealing import (
    ERROR_TEXT,
    VALUE,
    opened,
    sealing,
)
from gpool.server.store.values import EndedTask, Recording
from gpool.wire.frames import LogChunk

EPOCH = 1
"""Of an ended parent: its log has the chunks of one attempt."""

PAID = frozenset({"agreed", "unchecked", "open"})
"""States of siblings whose charges are paid when the verification is over; `open`: the consumer cancelled the task."""

_LOG_ROWS = 500
_STATES = (("id", "int"), ("state", "text"), ("digest", "text"))


class _VerifiedTask(NamedTuple):
    id: TaskId
    batch_id: BatchId
    user_id: UserId
    team_id: TeamId | None
    status: str


class _Accepted(NamedTuple):
    """End of the sibling whose answer is accepted."""

    id: TaskId
    epoch: int
    status: str
    reason: str | None
    exit_code: int | None
    started_at: Instant | None
    leased_at: Instant | None
    finished_at: Instant | None
    error_text: str | None
    value: bytes | None
    value_sha256: str
    outputs: str | None


PARENT = columns(_VerifiedTask, TasksRecord, "t")
ACCEPTED = columns(_Accepted, TasksRecord, "t")


@dataclass(frozen=True, slots=True)
class ComparedAnswer:
    """Sibling with its part in a verdict: `agreed`, `differed`, `unchecked`, or `void` if nobody is blamed."""

    task: TaskId
    node: NodeId
    state: str
    digest: str
    summary: str  # for the node's owner
    wanted: str = ""  # instead of the accepted answer's summary


@dataclass(frozen=True, slots=True)
class Verdict:
    """`accepted`: the sibling whose answer the parent gets; None: none, for the reason in `text`."""

    parent: TaskId
    compared: Sequence[ComparedAnswer]
    accepted: TaskId | None = None
    text: str = ""
    keys: Mapping[NodeId, tuple[str, str]] | None = None  # GPU model and environment of each node
    own: TaskId | None = None  # the sibling whose result the others checked
    refusal: str = "no_quorum"  # outcome if none is accepted


@dataclass(frozen=True, slots=True)
class WrittenVerdict:
    recording: Recording
    artifacts: tuple[str, ...]  # whose files are to be removed


NOTHING = WrittenVerdict(Recording(), ())


@operation
def decide(verdict: Verdict, term: int, at: Instant) -> Operation[WrittenVerdict]:
    """End the parent, unless it has ended or another scheduler has taken over."""
    if not (yield from is_current_term(term)):
        return NOTHING
    parents = yield from select(
        _VerifiedTask,
        f"SELECT {PARENT} FROM tasks t WHERE t.id = :id AND t.status = 'queued' /*postgresql FOR UPDATE*/",  # noqa: S608
        {"id": verdict.parent},
    )
    if not parents:
        return NOTHING
    [parent] = parents
    if verdict.accepted is None:
        status = target(parent.status, Move.REFUSED)
        ended = _Accepted(
            *(parent.id, EPOCH, status.value, EndReason.NO_QUORUM.value, None, None, None, None),
            *(verdict.text, None, "", None),
        )
    else:
        found = yield from _accepted(verdict.accepted)
        if found is None:
            return NOTHING
        ended = found
        is_success = ended.status == TaskStatus.SUCCEEDED.value
        status = target(parent.status, Move.VERIFIED if is_success else Move.REFUSED)
    yield from _end(parent, ended, status, at)
    if verdict.accepted is not None:
        yield from _copy_log(verdict.accepted, ended.epoch, parent.id)
    yield from _record(verdict, at)
    yield from _settle(at)
    dropped = yield from shrink_tasks([one.task for one in verdict.compared], at)
    spent = 0
    if ended.leased_at is not None and ended.finished_at is not None:
        spent = max(0, ended.finished_at - (ended.started_at or ended.leased_at))
    over = EndedTask(parent.id, parent.batch_id, parent.user_id, status, Span(spent))
    return WrittenVerdict(Recording(ended=(over,), withdrawn=(parent.id,)), dropped.artifacts)


def _accepted(task: TaskId) -> Operation[_Accepted | None]:
    rows = yield from select(
        _Accepted,
        f"SELECT {ACCEPTED} FROM tasks t WHERE t.id = :id AND t.finished_at IS NOT NULL AND t.shrunk_at IS NULL",  # noqa: S608
        {"id": task},
    )
    rows = yield from opened(rows, VALUE, ERROR_TEXT)
    return rows[0] if rows else None


def _end(
    parent: _VerifiedTask, ended: _Accepted, status: TaskStatus, at: Instant
) -> Operation[None]:
    account = holder_of(parent.user_id, parent.team_id)
    last = yield from take_sequences([parent.batch_id])
    seal = yield from sealing({account})
    value, text = ended.value, ended.error_text
    size = len(value or b"") + len((text or "").encode()) + len((ended.outputs or "").encode())
    more = max(0, size - END_BYTES)
    if value:
        value = seal.data(account, VALUE.place_of(parent.id), bytes(value))
    if text:
        text = seal.text(account, ERROR_TEXT.place_of(parent.id), text)
    yield Statement(
        "UPDATE tasks SET status = :status, reason = :reason, exit_code = :exit_code, started_at = :started_at, "
        "finished_at = :at, sequence = :sequence, error_text = :error_text, value = :value, "
        "value_sha256 = :value_sha256, outputs = :outputs, epoch = :epoch, "
        "stored_bytes = stored_bytes + :more WHERE id = :id AND status = 'queued'",
        {
            "status": status.value,
            "reason": ended.reason,
            "exit_code": ended.exit_code,
            "started_at": ended.started_at,
            "at": at,
            "sequence": last[parent.batch_id] + 1,
            "error_text": text,
            "value": value,
            "value_sha256": ended.value_sha256,
            "outputs": ended.outputs,
            "epoch": EPOCH,
            "more": more,
            "id": parent.id,
        },
    )
    yield from change({account: more})
    named = [ended.value_sha256] if ended.value_sha256 else []
    named += [file.sha256 for file in outputs_from(ended.outputs)]
    yield from keep(
        "result", [(sha256, parent.id) for sha256 in named], parent.user_id, parent.team_id
    )


def _copy_log(task: TaskId, epoch: int, parent: TaskId) -> Operation[None]:
    """Give the parent the accepted sibling's output of its last attempt."""
    after = (epoch << EPOCH_SHIFT) - 1
    while lines := (yield from logs(task, after, _LOG_ROWS)):
        mask = (1 << EPOCH_SHIFT) - 1
        yield from append_chunks(
            [LogChunk(parent, EPOCH, line.cursor & mask, line.stream, line.data) for line in lines]
        )
        after = lines[-1].cursor


def _record(verdict: Verdict, at: Instant) -> Operation[None]:
    yield Statement(
        "UPDATE siblings SET state = c.state, digest = c.digest FROM {compared} AS c WHERE siblings.task_id = c.id",
        {},
        {
            "compared": Relation(
                _STATES, sorted((one.task, one.state, one.digest) for one in verdict.compared)
            )
        },
    )
    outcome = verdict.refusal if verdict.accepted is None else "accepted"
    yield from _close([verdict.parent], outcome, at)
    if verdict.accepted is None:
        return
    wanted = next(one.summary for one in verdict.compared if one.task == verdict.accepted)
    keys = verdict.keys or {}
    caught = yield from record_comparisons(
        [
            ComparedSibling(
                one.task,
                one.node,
                one.state == "agreed",
                one.wanted or wanted,
                one.summary,
                *keys.get(one.node, ("", "")),
                one.task == verdict.own,
            )
            for one in verdict.compared
            if one.state in ("agreed", "differed")
        ],
        at,
    )
    for node in sorted(caught):
        yield from _withdraw(node, at)
        right = yield from values(
            TaskId,
            "SELECT s.task_id FROM siblings s WHERE s.node_id = :node AND s.state = 'agreed'",
            {"node": node},
        )
        yield from forfeit(node, at, right)


def _withdraw(node: NodeId, at: Instant) -> Operation[None]:
    """Withdraw the results of a caught node that no check has found right and that have not vested."""
    parents = yield from values(
        TaskId,
        "SELECT v.task_id FROM siblings s JOIN verifications v ON v.task_id = s.parent_id "
        "WHERE s.node_id = :node AND s.state = 'unchecked' AND v.outcome = 'accepted' AND v.decided_at > :since",
        {"node": node, "since": at - DEFAULT_SPOT.window},
    )
    yield Statement(
        "UPDATE verifications SET outcome = 'withdrawn' WHERE task_id IN (SELECT id FROM {parents} AS p)",
        {},
        {"parents": of_ids(parents)},
    )


def _close(parents: Collection[TaskId], outcome: str, at: Instant) -> Operation[None]:
    yield Statement(
        "UPDATE verifications SET decided_at = :at, outcome = :outcome "
        "WHERE decided_at IS NULL AND task_id IN (SELECT id FROM {parents} AS p)",
        {"at": at, "outcome": outcome},
        {"parents": of_ids(parents)},
    )


class _HeldCharge(NamedTuple):
    task_id: TaskId
    state: str


@operation
def held_charges() -> Operation[list[_HeldCharge]]:
    """Siblings of decided verifications whose charges are still held."""
    return (
        yield from select(
            _HeldCharge,
            "SELECT DISTINCT c.task_id, s.state FROM charges c JOIN siblings s ON s.task_id = c.task_id "
            "JOIN verifications v ON v.task_id = s.parent_id WHERE c.state = 'held' AND v.decided_at IS NOT NULL",
        )
    )


def _settle(at: Instant) -> Operation[None]:
    """Pay or return held charges of decided verifications.

    Siblings that agreed are paid, and those that a consumer cancelled; those that differed or gave no answer are not.
    """
    held = yield from held_charges()
    paid = sorted(row.task_id for row in held if row.state in PAID)
    unpaid = sorted(row.task_id for row in held if row.state not in PAID)
    if paid:
        yield from accept_held(paid, at)
    if unpaid:
        yield from reject_held(unpaid, at)


@operation
def settle(term: int, at: Instant) -> Operation[None]:
    """Settle charges that were held after the verdict: a stopped sibling is charged when its node releases it."""
    if (yield from is_current_term(term)):
        yield from _settle(at)


@operation
def settle_ended(parents: Sequence[TaskId], term: int, at: Instant) -> Operation[None]:
    """Close the verifications of parents that were cancelled."""
    if not (yield from is_current_term(term)):
        return
    over = yield from values(
        TaskId,
        "SELECT t.id FROM {parents} AS p JOIN tasks t ON t.id = p.id WHERE t.finished_at IS NOT NULL",
        {},
        {"parents": of_ids(parents)},
    )
    yield from _close(over, "cancelled", at)
    yield from _settle(at)


class VerificationState(NamedTuple):
    """`cost`: micro-credits of all siblings; None: none was charged."""

    outcome: str
    rerun_id: int | None
    cost: int | None


@operation
def state_of(parent: TaskId) -> Operation[VerificationState | None]:
    rows = yield from select(
        VerificationState,
        "SELECT v.outcome, v.rerun_id, (SELECT CAST(SUM(c.microcredits) AS BIGINT) FROM siblings s "
        "JOIN charges c ON c.task_id = s.task_id WHERE s.parent_id = v.task_id "
        "AND c.state NOT IN ('void', 'forfeited')) FROM verifications v WHERE v.task_id = :id",
        {"id": parent},
    )
    return rows[0] if rows else None

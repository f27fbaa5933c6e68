"""Siblings of verified tasks: reading open verifications, starting siblings on drawn nodes, reading their answers.

A sibling is a task of the parent's user in a batch of its own that no account owns, so that neither counts, listings
nor results of the parent's batch contain it. Its spec names the drawn node. Two siblings with an answer are never of one
owner: the index `ix_siblings_owner` refuses it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpool.core.errors import InternalFault
from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
from gpool.core.model import Instant, OutputFile, Owners, TaskSpec
from gpool.core.permissions import TeamId
from gpool.core.specs.owners import ANYONE
from gpool.core.trust.rounds import SPOT
from gpool.server.store.operations.leases.grants import is_current_term
from gpool.server.store.operations.money.charges import Settlement
from gpool.server.store.operations.tasks.artifacts import PLAIN, StoredBytes, keep, put_artifact
from gpool.server.store.operations.tasks.progress import EPOCH_SHIFT, STDOUT
from gpool.server.store.operations.tasks.storage import holder_of
from gpool.server.store.operations.tasks.submissions import (
    NewTask,
    Submission,
    SubmittedTasks,
    submit,
)
from gpool.server.store.operations.verification.standings import start_spot
from gpool.server.store.protocol import Operation, Relation, Row, Statement, operation
from gpool.server.store.rows import of_ids, outputs_from, select, spec_from
from gpool.server.store.sealing import BODY_OF_TASK, ERROR_TEXT, LOG_DATA, PAYLOAD, VALUE, opened

LOWEST_PRIORITY = -100


class OpenVerification(NamedTuple):
    """`status`: of the parent. A cancelled parent's verification is open until it is settled."""

    task_id: TaskId
    user_id: UserId
    team_id: TeamId | None
    siblings: int
    spec_id: SpecId
    body: str
    status: str

    @property
    def spec(self) -> TaskSpec:
        return spec_from(self.body)


class SiblingRow(NamedTuple):
    """A sibling and the state of its task; all of the task's fields are None if it was deleted."""

    task_id: TaskId
    parent_id: TaskId
    number: int
    node_id: NodeId
    owner_id: UserId
    state: str
    status: str | None
    epoch: int | None
    queued_at: Instant | None
    leased_at: Instant | None
    finished_at: Instant | None
    reason: str | None
    exit_code: int | None
    shrunk_at: Instant | None


class _StoredAnswer(NamedTuple):
    id: TaskId
    epoch: int
    value: bytes | None
    value_sha256: str
    outputs: str | None
    error_text: str | None


class _Output(NamedTuple):
    task_id: TaskId
    cursor: int
    data: bytes


class _ParentPayload(NamedTuple):
    id: TaskId
    payload: bytes | None
    payload_sha256: str


class _SiblingSource(NamedTuple):
    """Columns of a parent that its siblings copy."""

    id: TaskId
    payload: bytes | None
    payload_sha256: str
    project: str


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """What a sibling returned: its value (inline, or the hash of an artifact), its output files, its standard output."""

    value: bytes
    value_sha256: str
    outputs: tuple[OutputFile, ...]
    stdout: bytes
    error_text: str = ""


@dataclass(frozen=True, slots=True)
class NewSibling:
    """Ids for a sibling, and the node drawn for it."""

    task: TaskId
    batch: BatchId
    spec_id: SpecId
    number: int
    node: NodeId
    owner: UserId


@dataclass(frozen=True, slots=True)
class CheckInput:
    """Pickled arguments of a check or comparison: inline, or bytes that are stored and not recorded yet."""

    payload: bytes = b""
    sha256: str = ""
    size_bytes: int = 0
    stored: StoredBytes = PLAIN


@operation
def open_verifications(each: int, limit: int) -> Operation[list[OpenVerification]]:
    """Read open verifications, the oldest `each` of every user first, `limit` in all."""
    rows = yield from select(
        OpenVerification,
        "SELECT t.id, t.user_id, t.team_id, v.siblings, t.spec_id, s.body, t.status FROM (SELECT o.task_id, o.siblings, "
        "ROW_NUMBER() OVER (PARTITION BY o.user_id ORDER BY o.task_id) AS place FROM verifications o "
        "WHERE o.decided_at IS NULL) AS v JOIN tasks t ON t.id = v.task_id JOIN specs s ON s.id = t.spec_id "
        "WHERE v.place <= :each ORDER BY t.id LIMIT :limit",
        {"each": each, "limit": limit},
    )
    return (yield from opened(rows, BODY_OF_TASK))


@operation
def siblings_of(parents: Collection[TaskId]) -> Operation[dict[TaskId, list[SiblingRow]]]:
    """Siblings by parent, in the order of their numbers."""
    rows = yield from select(
        SiblingRow,
        "SELECT s.task_id, s.parent_id, s.number, s.node_id, s.owner_id, s.state, t.status, t.epoch, t.queued_at, "
        "t.leased_at, t.finished_at, t.reason, t.exit_code, t.shrunk_at FROM {parents} AS p "
        "JOIN siblings s ON s.parent_id = p.id LEFT JOIN tasks t ON t.id = s.task_id ORDER BY s.parent_id, s.number",
        {},
        {"parents": of_ids(parents)},
    )
    found: dict[TaskId, list[SiblingRow]] = {}
    for row in rows:
        found.setdefault(row.parent_id, []).append(row)
    return found


@operation
def answers(tasks: Sequence[TaskId]) -> Operation[dict[TaskId, StoredAnswer]]:
    """Read what ended siblings returned; standard output is that of the last attempt."""
    rows = yield from select(
        _StoredAnswer,
        "SELECT t.id, t.epoch, t.value, t.value_sha256, t.outputs, t.error_text FROM {tasks} AS i JOIN tasks t ON t.id = i.id",
        {},
        {"tasks": of_ids(tasks)},
    )
    rows = yield from opened(rows, VALUE, ERROR_TEXT)
    chunks = yield from select(
        _Output,
        "SELECT l.task_id, l.cursor, l.data FROM {tasks} AS i JOIN log_chunks l ON l.task_id = i.id "
        "WHERE l.stream = :stream ORDER BY l.task_id, l.cursor",
        {"stream": STDOUT},
        {"tasks": of_ids(tasks)},
    )
    chunks = yield from opened(chunks, LOG_DATA)
    printed: dict[tuple[int, int], list[bytes]] = {}
    for chunk in chunks:
        key = (chunk.task_id, chunk.cursor >> EPOCH_SHIFT)
        printed.setdefault(key, []).append(bytes(chunk.data))
    return {
        row.id: StoredAnswer(
            bytes(row.value or b""),
            row.value_sha256,
            outputs_from(row.outputs),
            b"".join(printed.get((row.id, row.epoch), ())),
            row.error_text or "",
        )
        for row in rows
    }


def sibling_spec(spec: TaskSpec, node: NodeId, number: int) -> TaskSpec:
    """Return the spec of a sibling on the drawn node. It keeps the owners that the consumer named.

    A spot check has the lowest priority: it runs where no other task waits.
    """
    on = spec.requirements.on
    pinned = Owners(ANYONE, node=node) if on is None else replace(on, node=node)
    needs = replace(spec.requirements, siblings=0, on=pinned)
    is_check = spec.requirements.siblings == SPOT and number > 0
    priority = LOWEST_PRIORITY if is_check else spec.priority
    return replace(
        spec,
        requirements=needs,
        tolerance=None,
        priority=priority,
        check_sha256="",
        comparator_sha256="",
    )


def check_spec(spec: TaskSpec, node: NodeId, number: int) -> TaskSpec:
    """Return the spec of a check on the drawn node: the check function, or comparator, in the task's environment."""
    pinned = sibling_spec(spec, node, number)
    function = spec.check_sha256 or spec.comparator_sha256
    what = "check" if spec.check_sha256 else "comparison"
    return replace(pinned, function_sha256=function, name=f"{what} of {spec.name}"[:200])


@operation
def arguments_of(task: TaskId) -> Operation[tuple[bytes, str]]:
    """Read the pickled arguments of a task: inline, or the hash of an artifact."""
    rows = yield from select(
        _ParentPayload,
        "SELECT t.id, t.payload, t.payload_sha256 FROM tasks t WHERE t.id = :id",
        {"id": task},
    )
    rows = yield from opened(rows, PAYLOAD)
    return (bytes(rows[0].payload or b""), rows[0].payload_sha256) if rows else (b"", "")


@operation
def start_siblings(
    parent: OpenVerification,
    new: Sequence[NewSibling],
    term: int,
    at: Instant,
    check: CheckInput | None = None,
) -> Operation[list[tuple[Submission, SubmittedTasks]]]:
    """Queue siblings of a waiting parent, or checks; none if it has ended or another scheduler has taken over."""
    if not (yield from is_current_term(term)):
        return []
    rows = yield from select(
        _SiblingSource,
        "SELECT t.id, t.payload, t.payload_sha256, s.project FROM tasks t JOIN specs s ON s.id = t.spec_id "
        "WHERE t.id = :parent AND t.status = 'queued' /*postgresql FOR UPDATE OF t*/",
        {"parent": parent.task_id},
    )
    rows = yield from opened(rows, PAYLOAD)
    if not rows:
        return []
    payload, sha256 = bytes(rows[0].payload or b""), rows[0].payload_sha256
    spec, of = parent.spec, sibling_spec
    if check is not None:
        payload, sha256, of = check.payload, check.sha256, check_spec
        if sha256:
            account = holder_of(parent.user_id, parent.team_id)
            yield from put_artifact(sha256, check.size_bytes, at, check.stored, account)
            kept = [(sha256, each.task) for each in new]
            yield from keep("payload", kept, parent.user_id, parent.team_id)
    wanted = [
        Submission(
            batch=each.batch,
            is_new_batch=True,
            closes_batch=True,
            spec_id=each.spec_id,
            spec=of(spec, each.node, each.number),
            user=parent.user_id,
            tasks=[NewTask(each.task, 0, payload, sha256)],
            at=at,
            team=parent.team_id,
            settlement=Settlement.VERDICT,
            project=rows[0].project,
        )
        for each in new
    ]
    outcomes = yield from submit(wanted)
    submitted = [one for one in outcomes if isinstance(one, SubmittedTasks)]
    if len(submitted) < len(outcomes):
        raise InternalFault(f"siblings of task {parent.task_id} were refused: {outcomes}")
    names = (
        *(("task_id", "int"), ("parent_id", "int"), ("number", "int")),
        *(("node_id", "int"), ("owner_id", "int"), ("batch_id", "int")),
    )
    drawn: list[Row] = [
        (each.task, parent.task_id, each.number, each.node, each.owner, each.batch) for each in new
    ]
    relation = {"new": Relation(names, drawn)}
    yield Statement(
        "INSERT INTO siblings (task_id, parent_id, number, node_id, owner_id, state) "
        "SELECT n.task_id, n.parent_id, n.number, n.node_id, n.owner_id, 'open' FROM {new} AS n",
        {},
        relation,
    )
    yield Statement(
        "UPDATE tasks SET parent_id = n.parent_id FROM {new} AS n WHERE tasks.id = n.task_id",
        {},
        relation,
    )
    yield Statement(
        "UPDATE batches SET user_id = 0, team_id = NULL FROM {new} AS n WHERE batches.id = n.batch_id",
        {},
        relation,
    )
    if parent.siblings == SPOT and new[0].number == 0:
        yield from start_spot(new[0].node, at)
    return list(zip(wanted, submitted, strict=True))


@operation
def void_siblings(tasks: Sequence[TaskId]) -> Operation[None]:
    """Mark siblings that gave no answer, so that their owners may be drawn again."""
    yield Statement(
        "UPDATE siblings SET state = 'void' WHERE state = 'open' AND task_id IN (SELECT id FROM {tasks} AS i)",
        {},
        {"tasks": of_ids(tasks)},
    )

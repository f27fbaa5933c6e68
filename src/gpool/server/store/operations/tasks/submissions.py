"""Submitting tasks, with the same few statements for one submission or many. Also reads recent submissions, from which
the scheduler learns the usual mix of shapes. A refused submission is answered with the reason; the others go on.
One file because one submission and many are charged, checked and inserted by the same statements.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from gpool.core.errors import Conflict, GpoolError, Invalid, NotFound
from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
from gpool.core.model import Instant, Shape, TaskSpec
from gpool.core.permissions import TeamId
from gpool.core.scheduler.state.waiting import shape_of
from gpool.server.store.generated_rows import TasksRecord
from gpool.server.store.operations.identity.sealed_fields import insert_secrets
from gpool.server.store.operations.tasks.artifacts import keep, missing
from gpool.server.store.operations.tasks.projects import (
    MOST_PROJECTS,
    add_labels,
    labels_of,
    too_many,
)
from gpool.server.store.operations.tasks.storage import (
    NO_LIMITS,
    SPEC_BYTES,
    TASK_BYTES,
    Account,
    StorageLimits,
    change,
    holder_of,
    rooms,
    storage_full,
)
from gpool.server.store.protocol import Operation, Relation, Row, Statement, operation
from gpool.server.store.rows import (
    columns,
    digest_of,
    of_ids,
    relation_columns,
    select,
    spec_from,
    spec_text,
    storable,
)
from gpool.server.store.sealing import PAYLOAD, SPEC_BODY, Sealing, opened, sealing

MOST_ALIKE = 50
"""Tasks of one batch that count as recent: a batch of 100,000 equal tasks is not the usual mix of a day."""


@dataclass(frozen=True, slots=True)
class NewTask:
    id: TaskId
    position: int
    payload: bytes = b""
    payload_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Submission:
    """Tasks of one spec for one batch, new or open. The user must be able to see the artifacts that it names."""

    batch: BatchId
    is_new_batch: bool
    closes_batch: bool
    spec_id: SpecId  # used unless this user has an equal spec already
    spec: TaskSpec
    user: UserId
    tasks: Sequence[NewTask]
    at: Instant
    team: TeamId | None = None  # owner of the tasks; None: the user
    secrets: Sequence[tuple[str, bytes]] = ()  # (name, sealed for `spec_id`)
    secrets_mark: str = ""  # keyed hash of the secrets, to find an equal spec; "": equal to none
    team_key: int | None = (
        None  # id of the API key for one team that submits; it names what it sees
    )
    max_cost: int | None = None  # micro-credits of each task, over all its attempts
    settlement: str = "end"  # "verdict": its charges are held until its result is accepted
    project: str = ""  # label of its account for statements


@dataclass(frozen=True, slots=True)
class SubmittedTasks:
    batch: BatchId
    spec_id: SpecId  # of an equal earlier spec, if there is one
    first_position: int
    tasks: Sequence[NewTask]


@dataclass(frozen=True, slots=True)
class MissingArtifacts:
    sha256s: tuple[str, ...]


class SpecDigest(NamedTuple):
    """Equal for equal specs of one user, team and project with equal secrets."""

    user_id: UserId
    digest: str


class _KnownSpec(NamedTuple):
    user_id: UserId
    digest: str
    id: SpecId


class _NewSpec(NamedTuple):
    id: SpecId
    user_id: UserId
    digest: str
    body: str
    retries: int
    created_at: Instant
    stored_bytes: int
    project: str


class _NewBatch(NamedTuple):
    id: BatchId
    user_id: UserId
    name: str
    total: int
    closed: int
    created_at: Instant
    team_id: TeamId | None


class _TaskColumns(NamedTuple):
    id: TaskId
    position: int
    payload_sha256: str
    stored_bytes: int
    payload: bytes | None


class FirstLease(NamedTuple):
    """Columns of a lease that is granted in the transaction that inserts its task."""

    epoch: int
    node_id: NodeId
    holding: int
    allocation_number: int
    allocation: str
    leased_at: Instant


class _SharedColumns(NamedTuple):
    batch_id: BatchId
    spec_id: SpecId
    user_id: UserId
    created_at: Instant
    queued_at: Instant
    team_id: TeamId | None
    max_cost: int | None
    settlement: str


class _OpenBatch(NamedTuple):
    total: int
    closed: int
    team_id: TeamId | None


class _RecentTasks(NamedTuple):
    spec_id: SpecId
    team_id: TeamId | None
    tasks: int


class _SpecBody(NamedTuple):
    id: SpecId
    user_id: UserId
    body: str


columns(_TaskColumns, TasksRecord, "n")  # raises if a column is not the schema's
columns(_SharedColumns, TasksRecord, "n")
columns(FirstLease, TasksRecord, "n")
NO_LEASES: Mapping[TaskId, FirstLease] = MappingProxyType({})
_CASTS = {"int": "BIGINT", "text": "TEXT"}


@dataclass(slots=True)
class _Draft:
    """`first`: position of the first task in the batch."""

    number: int
    submission: Submission
    body: str
    digest: SpecDigest
    payloads: Sequence[tuple[str, TaskId]]  # (sha256, task) of payloads that are artifacts
    first: int = 0

    @property
    def account(self) -> Account:
        return holder_of(self.submission.user, self.submission.team)

    @property
    def spec_bytes(self) -> int:
        secrets = sum(len(name) + len(sealed) for name, sealed in self.submission.secrets)
        return SPEC_BYTES + len(self.body.encode()) + secrets

    @property
    def size_bytes(self) -> int:
        """Charge of the tasks, without the spec."""
        spec = self.submission.spec
        return sum(task_bytes(spec, task) for task in self.submission.tasks)

    @property
    def tasks(self) -> Sequence[NewTask]:
        tasks = self.submission.tasks
        if any(task.position != place for place, task in enumerate(tasks, self.first)):
            tasks = [replace(task, position=place) for place, task in enumerate(tasks, self.first)]
        return tasks

    @property
    def artifacts(self) -> list[str]:
        spec = self.submission.spec
        names = [file.sha256 for file in spec.inputs]
        names += [each for each in (spec.check_sha256, spec.comparator_sha256) if each]
        return [*names, spec.function_sha256] if spec.function_sha256 else names


def task_bytes(spec: TaskSpec, task: NewTask) -> int:
    return TASK_BYTES * spec.requirements.nodes + len(task.payload)


@operation
def submit(
    submissions: Sequence[Submission],
    limits: StorageLimits = NO_LIMITS,
    room: Mapping[Account, int] | None = None,
    leases: Mapping[TaskId, FirstLease] = NO_LEASES,
) -> Operation[list[SubmittedTasks | MissingArtifacts | GpoolError]]:
    """Submit each, or return the reason in its place. The cost does not depend on the tasks in the store.

    `limits`: default storage quotas; a submission that does not fit its account's is refused. `room`: of its account,
    if this transaction has read it (`storage.room_of`). `leases`: of tasks that are leased at once; the caller has
    checked their nodes in this transaction (`grants.startable`).
    """
    seal = yield from sealing({holder_of(each.user, each.team) for each in submissions})
    outcomes: dict[int, SubmittedTasks | MissingArtifacts | GpoolError] = {}
    drafts: list[_Draft] = []
    for number, submission in enumerate(submissions):
        try:
            body = spec_text(submission.spec)
        except Invalid as exc:
            outcomes[number] = exc
        else:
            digest = spec_digest(submission, body, seal)
            tasks = submission.tasks
            payloads = [(task.payload_sha256, task.id) for task in tasks if task.payload_sha256]
            drafts.append(_Draft(number, submission, body, digest, payloads))
    known = yield from _known_specs({draft.digest for draft in drafts})
    accepted: list[_Draft] = []
    if room is None:
        room = yield from rooms({draft.account for draft in drafts}, limits)
    charged: Counter[Account] = Counter()
    described = set(known)
    labelled = {
        each.account for each in drafts if each.submission.project and each.digest not in known
    }
    labels = (yield from labels_of(labelled)) if labelled else {}
    new_labels: dict[Account, set[str]] = {}
    for draft in drafts:
        account, size = draft.account, draft.size_bytes
        if draft.digest not in described:
            size += draft.spec_bytes
        left = room.get(account, size + charged[account]) - charged[account]
        refusal: MissingArtifacts | GpoolError | None
        used, project = labels.get(account), draft.submission.project
        is_new_label = bool(project) and used is not None and project not in used
        if size > left:
            refusal = storage_full(account, "this submission", size, left)
        elif is_new_label and used is not None and len(used) >= MOST_PROJECTS:
            refusal = too_many(account)
        else:
            refusal = yield from _accept(draft, is_known=draft.digest in known)
        if refusal is None:
            accepted.append(draft)
            if is_new_label and used is not None:
                used.add(project)
                new_labels.setdefault(account, set()).add(project)
            described.add(draft.digest)
            charged[account] += size
        else:
            outcomes[draft.number] = refusal
    yield from change(charged)
    yield from add_labels(new_labels)
    new = {draft.digest: draft for draft in reversed(accepted) if draft.digest not in known}
    if new:
        yield from _insert_specs(list(new.values()), seal)
        known |= {digest: draft.submission.spec_id for digest, draft in new.items()}
        known |= yield from _known_specs(set(new))  # an equal spec may have been inserted first
        for draft in new.values():
            yield from _keep_spec(draft.submission, known[draft.digest], draft.artifacts)
    for draft in accepted:
        if draft.payloads:
            s = draft.submission
            yield from keep("payload", draft.payloads, s.user, s.team)
    yield from _insert_batches(
        [draft.submission for draft in accepted if draft.submission.is_new_batch]
    )
    submitted: list[tuple[Submission, SubmittedTasks]] = []
    for draft in accepted:
        s, spec_id = draft.submission, known[draft.digest]
        outcome = SubmittedTasks(s.batch, spec_id, draft.first, draft.tasks)
        outcomes[draft.number] = outcome
        submitted.append((s, outcome))
    yield from _insert_tasks(submitted, leases, seal)
    yield from _insert_verifications(submitted)
    return [outcomes[number] for number in range(len(submissions))]


def spec_digest(s: Submission, body: str, seal: Sealing) -> SpecDigest:
    """A keyed hash of an encrypted spec: its arguments cannot be guessed from the digest."""
    parts = [body]
    if s.team is not None:
        parts.append(f"team {s.team}")
    if s.secrets:
        parts.append(f"secrets {s.secrets_mark or s.spec_id}")
    if s.project:
        parts.append(f"project {s.project}")
    key, text = seal.key(holder_of(s.user, s.team)), "\0".join(parts)
    if key is None:
        return SpecDigest(s.user, digest_of(text))
    return SpecDigest(s.user, hmac.digest(key.key, text.encode(), "sha256").hex())


def _known_specs(wanted: Collection[SpecDigest]) -> Operation[dict[SpecDigest, SpecId]]:
    rows = yield from select(
        _KnownSpec,
        "SELECT s.user_id, s.digest, s.id FROM {wanted} AS w "
        "JOIN specs s ON s.user_id = w.user_id AND s.digest = w.digest",
        {},
        {"wanted": Relation(relation_columns(SpecDigest), sorted(wanted))},
    )
    return {SpecDigest(row.user_id, row.digest): row.id for row in rows}


def _accept(draft: _Draft, *, is_known: bool) -> Operation[MissingArtifacts | GpoolError | None]:
    s = draft.submission
    needs = [sha256 for sha256, _ in draft.payloads]
    if not is_known:
        needs += draft.artifacts  # an equal spec of this user refers to them already
    if s.is_new_batch:
        lacks = yield from missing(needs, s.user, s.team, s.team_key)
        return MissingArtifacts(lacks) if lacks else None
    batch = yield from _open_batch(s)
    if isinstance(batch, GpoolError):
        return batch
    lacks = yield from missing(needs, s.user, s.team, s.team_key)
    if lacks:
        return MissingArtifacts(lacks)
    draft.first = batch.total
    yield Statement(
        "UPDATE batches SET total = total + :count, closed = :closed WHERE id = :id",
        {"id": s.batch, "count": len(s.tasks), "closed": int(s.closes_batch)},
    )
    return None


def _open_batch(s: Submission) -> Operation[_OpenBatch | GpoolError]:
    rows = yield from select(
        _OpenBatch,
        "SELECT total, closed, team_id FROM batches WHERE id = :batch AND user_id = :user /*postgresql FOR UPDATE*/",
        {"batch": s.batch, "user": s.user},
    )
    if not rows:
        return NotFound("there is no such batch of yours; leave `batch` out to begin a new one")
    [batch] = rows
    if batch.team_id != s.team:
        return Conflict("this batch is not of that team; name the team it was begun for")
    if batch.closed:
        return Conflict("this batch is closed; submit with more=true to keep the next one open")
    return batch


def _insert_specs(drafts: Sequence[_Draft], seal: Sealing) -> Operation[None]:
    rows = [
        _NewSpec(s.spec_id, *draft.digest, body, s.spec.retries, s.at, draft.spec_bytes, s.project)
        for draft in sorted(drafts, key=lambda draft: draft.digest)  # one lock order for all
        for s in (draft.submission,)
        for body in (seal.text(draft.account, SPEC_BODY.place_of(s.spec_id), draft.body),)
    ]
    yield Statement(
        "INSERT INTO specs (id, user_id, digest, body, retries, created_at, stored_bytes, project) "
        "SELECT n.id, n.user_id, n.digest, n.body, n.retries, n.created_at, n.stored_bytes, n.project "
        "FROM {specs} AS n WHERE true "
        "ON CONFLICT (user_id, digest) DO NOTHING",
        {},
        {"specs": Relation(relation_columns(_NewSpec), rows)},
    )


def _keep_spec(s: Submission, spec_id: SpecId, artifacts: Sequence[str]) -> Operation[None]:
    yield from keep("spec", [(sha256, spec_id) for sha256 in artifacts], s.user, s.team)
    if s.secrets and spec_id == s.spec_id:
        yield from insert_secrets(spec_id, s.secrets)


def _insert_batches(submissions: Sequence[Submission]) -> Operation[None]:
    if not submissions:
        return
    rows = [
        _NewBatch(
            s.batch, s.user, storable(s.spec.name), len(s.tasks), int(s.closes_batch), s.at, s.team
        )
        for s in submissions
    ]
    yield Statement(
        "INSERT INTO batches (id, user_id, name, total, closed, created_at, team_id) "
        "SELECT n.id, n.user_id, n.name, n.total, n.closed, n.created_at, n.team_id FROM {batches} AS n",
        {},
        {"batches": Relation(relation_columns(_NewBatch), rows)},
    )


def _insert_tasks(
    submitted: Sequence[tuple[Submission, SubmittedTasks]],
    leases: Mapping[TaskId, FirstLease],
    seal: Sealing,
) -> Operation[None]:
    """Insert the tasks of one or many submissions, with one statement for each of the four forms of rows.

    Shared columns are parameters for one submission, columns of the relation for many. Tasks without an inline payload
    use a relation without blobs, which is faster. Tasks in `leases` have the columns of their lease.
    """
    rows: dict[_TaskForm, list[Row]] = {}
    shared: Row = ()
    is_one = len(submitted) == 1
    for s, outcome in submitted:
        shared = _SharedColumns(
            s.batch, outcome.spec_id, s.user, s.at, s.at, s.team, s.max_cost, s.settlement
        )
        extra = () if is_one else shared
        account = holder_of(s.user, s.team)
        for task in outcome.tasks:
            lease = leases.get(task.id)
            row: Row = (task.id, task.position, task.payload_sha256, task_bytes(s.spec, task))
            if task.payload:
                row = (*row, seal.data(account, PAYLOAD.place_of(task.id), task.payload))
            form = _TaskForm(is_one, bool(task.payload), lease is not None)
            rows.setdefault(form, []).append((*row, *extra, *(lease or ())))
    parameters = dict(zip(_SharedColumns._fields, shared, strict=True)) if is_one else {}
    for form, found in rows.items():
        sql, kinds = _task_insert(form)
        yield Statement(sql, parameters, {"tasks": Relation(kinds, found)})


def _insert_verifications(
    submitted: Sequence[tuple[Submission, SubmittedTasks]],
) -> Operation[None]:
    rows: list[Row] = [
        (task.id, s.user, s.spec.requirements.siblings)
        for s, outcome in submitted
        if s.spec.requirements.siblings
        for task in outcome.tasks
    ]
    if rows:
        names = (("task_id", "int"), ("user_id", "int"), ("siblings", "int"))
        yield Statement(
            "INSERT INTO verifications (task_id, user_id, siblings) "
            "SELECT n.task_id, n.user_id, n.siblings FROM {new} AS n",
            {},
            {"new": Relation(names, rows)},
        )


class _TaskForm(NamedTuple):
    is_one: bool  # submission
    has_payload: bool
    is_leased: bool


@cache
def _task_insert(form: _TaskForm) -> tuple[str, tuple[tuple[str, str], ...]]:
    own, shared = relation_columns(_TaskColumns), relation_columns(_SharedColumns)
    if not form.has_payload:
        own = own[:-1]
    bound = own if form.is_one else (*own, *shared)
    if form.is_leased:
        bound = (*bound, *relation_columns(FirstLease))
    picked = {"status": "'leased'" if form.is_leased else "'queued'"}
    picked |= {name: f"n.{name}" for name, _ in bound}
    if form.is_one:
        picked |= {name: f"CAST(:{name} AS {_CASTS[kind]})" for name, kind in shared}
    sql = f"INSERT INTO tasks ({', '.join(picked)}) SELECT {', '.join(picked.values())} FROM {{tasks}} AS n"  # noqa: S608
    return sql, bound


# ---- recent submissions


@operation
def recent_shapes(most: int) -> Operation[list[tuple[Shape, int]]]:
    rows = yield from select(
        _RecentTasks,
        "SELECT t.spec_id, t.team_id, COUNT(*) FROM (SELECT id, spec_id, team_id, batch_id FROM tasks "
        "ORDER BY id DESC LIMIT :most) AS t GROUP BY t.batch_id, t.spec_id, t.team_id ORDER BY MIN(t.id)",
        {"most": most},
    )
    specs = yield from select(
        _SpecBody,
        "SELECT s.id, s.user_id, s.body FROM {specs} AS i JOIN specs s ON s.id = i.id",
        {},
        {"specs": of_ids(row.spec_id for row in rows)},
    )
    specs = yield from opened(specs, SPEC_BODY)
    known = {spec.id: (spec.user_id, spec_from(spec.body)) for spec in specs}
    shapes: dict[tuple[SpecId, TeamId | None], Shape] = {}
    found = []
    for row in rows:
        if row.spec_id not in known:
            continue
        shape = shapes.get((row.spec_id, row.team_id))
        if shape is None:
            user, spec = known[row.spec_id]
            shape = shapes[row.spec_id, row.team_id] = shape_of(spec, user, row.team_id)
        found.append((shape, min(int(row.tasks), MOST_ALIKE)))
    return found

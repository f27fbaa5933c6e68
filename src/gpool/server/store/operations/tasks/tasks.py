"""Tasks and batches as their users see them: submitted, listed, cancelled. Nobody sees another user's.

Where a user is named, `teams` are those whose tasks this user may see, or do this to: `core.permissions` decides which.
A team's task is the team's; who submitted it has no say in it but through the team.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from gpool.core.errors import Conflict, Invalid, NotFound
from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
from gpool.core.lifecycle import Move, sources
from gpool.core.model import AttemptRow, Instant, Phase, Span, TaskStatus
from gpool.server.store.operation import operation
from gpool.server.store.operations.gangs import members
from gpool.server.store.operations.identity.sealed_fields import insert_secrets
from gpool.server.store.operations.leases.ends import take_sequences, target
from gpool.server.store.operations.tasks.artifacts import keep, missing
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.rows import (
    REASON,
    STATUS,
    TASK_COLUMNS,
    TASK_WIDTH,
    digest_of,
    of_ids,
    outputs_from,
    spec_from,
    spec_text,
    storable,
    task_row,
)
from gpool.server.store.values import (
    PREEMPTING,
    AttemptNote,
    Batch,
    BatchResult,
    Ended,
    MemberView,
    MissingArtifacts,
    NewTask,
    Recording,
    SavedCheckpoint,
    Submission,
    Submitted,
    TaskStory,
    TaskView,
)
from gpool.wire.frames import Hold

NEW = (("id", "int"), ("position", "int"), ("payload_sha256", "text"))
NEW_WITH_PAYLOAD = (*NEW, ("payload", "blob"))
CANCELLED = (("id", "int"), ("epoch", "int"), ("sequence", "int"))
HELD_STATUSES = frozenset({TaskStatus.LEASED, TaskStatus.RUNNING})
CANCELLABLE = ", ".join(f"'{status.value}'" for status in sorted(sources(Move.CANCELLED)))
LAST = (1 << 63) - 1
MAX_TEAMS = 100
"""In one listing: each is a branch of its statement."""


@operation
def submit(s: Submission) -> Operation[Submitted | MissingArtifacts]:
    """All of it or nothing. Costs the same however many tasks there are already."""
    first = 0
    if not s.is_new_batch:
        first = yield from _open_batch(s)
    body = spec_text(s.spec)
    digest = spec_digest(s, body)
    spec_id = yield from _equal_spec(s.user, digest)
    payloads = [(task.payload_sha256, task.id) for task in s.tasks if task.payload_sha256]
    needs = [sha256 for sha256, _ in payloads]
    spec_needs = [file.sha256 for file in s.spec.inputs]
    if s.spec.function_sha256:
        spec_needs.append(s.spec.function_sha256)
    if spec_id is None:
        needs += spec_needs  # an equal spec of this user holds them already
    lacks = yield from missing(needs, s.user, s.team)
    if lacks:
        return MissingArtifacts(lacks)
    if spec_id is None:
        spec_id = yield from _put_spec(s, body, digest)
        yield from keep("spec", [(sha256, spec_id) for sha256 in spec_needs], s.user, s.team)
        if s.secrets and spec_id == s.spec_id:
            yield from insert_secrets(spec_id, s.secrets)
    yield from keep("payload", payloads, s.user, s.team)
    yield from _count(s)
    tasks = s.tasks
    if any(task.position != first + place for place, task in enumerate(tasks)):
        tasks = [replace(task, position=first + place) for place, task in enumerate(tasks)]
    yield from _put_tasks(s, spec_id, tasks)
    return Submitted(s.batch, spec_id, first, tasks)


def spec_digest(s: Submission, body: str) -> str:
    """Specs are equal only within a team, and with equal secrets."""
    parts = [body]
    if s.team is not None:
        parts.append(f"team {s.team}")
    if s.secrets:
        parts.append(f"secrets {s.secrets_mark or s.spec_id}")
    return digest_of("\0".join(parts))


def _open_batch(s: Submission) -> Operation[int]:
    rows = yield Statement(
        "SELECT total, closed, team_id FROM batches WHERE id = :batch AND user_id = :user /*postgresql FOR UPDATE*/",
        {"batch": s.batch, "user": s.user},
    )
    if not rows:
        raise NotFound("there is no such batch of yours; leave `batch` out to begin a new one")
    total, closed, team = rows[0]
    if team != s.team:
        raise Conflict("this batch is not of that team; name the team it was begun for")
    if closed:
        raise Conflict("this batch is closed; submit with more=true to keep the next one open")
    return int(total)


def _equal_spec(user: UserId, digest: str) -> Operation[SpecId | None]:
    rows = yield Statement(
        "SELECT id FROM specs WHERE user_id = :user AND digest = :digest",
        {"user": user, "digest": digest},
    )
    return SpecId(rows[0][0]) if rows else None


def _put_spec(s: Submission, body: str, digest: str) -> Operation[SpecId]:
    yield Statement(
        "INSERT INTO specs (id, user_id, digest, body, retries, created_at) "
        "VALUES (:id, :user, :digest, :body, :retries, :at) ON CONFLICT (user_id, digest) DO NOTHING",
        {
            "id": s.spec_id,
            "user": s.user,
            "digest": digest,
            "body": body,
            "retries": s.spec.retries,
            "at": s.at,
        },
    )
    # another replica may have been first
    return (yield from _equal_spec(s.user, digest)) or s.spec_id


def _count(s: Submission) -> Operation[None]:
    if s.is_new_batch:
        yield Statement(
            "INSERT INTO batches (id, user_id, name, total, closed, created_at, team_id) "
            "VALUES (:id, :user, :name, :total, :closed, :at, :team)",
            {
                "id": s.batch,
                "user": s.user,
                "name": storable(s.spec.name),
                "total": len(s.tasks),
                "closed": int(s.closes_batch),
                "at": s.at,
                "team": s.team,
            },
        )
    else:
        yield Statement(
            "UPDATE batches SET total = total + :count, closed = :closed WHERE id = :id",
            {"id": s.batch, "count": len(s.tasks), "closed": int(s.closes_batch)},
        )


def _put_tasks(s: Submission, spec_id: SpecId, tasks: Sequence[NewTask]) -> Operation[None]:
    if not tasks:
        return
    rows: list[Row]
    columns: tuple[tuple[str, str], ...]
    if any(task.payload for task in tasks):
        columns, picked = NEW_WITH_PAYLOAD, "n.payload"
        rows = [(t.id, t.position, t.payload_sha256, t.payload or None) for t in tasks]
    else:
        columns, picked = NEW, "NULL"
        rows = [(t.id, t.position, t.payload_sha256) for t in tasks]
    yield Statement(
        "INSERT INTO tasks (id, batch_id, position, spec_id, user_id, status, created_at, queued_at, "  # noqa: S608
        "team_id, payload_sha256, payload) SELECT n.id, CAST(:batch AS BIGINT), n.position, CAST(:spec AS BIGINT), "
        "CAST(:user AS BIGINT), 'queued', CAST(:at AS BIGINT), CAST(:at AS BIGINT), CAST(:team AS BIGINT), "
        f"n.payload_sha256, {picked} FROM {{tasks}} AS n",
        {"batch": s.batch, "spec": spec_id, "user": s.user, "at": s.at, "team": s.team},
        {"tasks": Relation(columns, rows)},
    )


# ---- reading

_RANKS = " ".join(f"WHEN '{phase}' THEN {place}" for place, phase in enumerate(Phase))
PHASES = f"CASE a.note {_RANKS} END"
"""Several in one report have one time; then their order is that of the work."""
SAVED = "c.epoch, c.saved_at, c.size_bytes, c.files"
VIEW = (
    f"SELECT {TASK_COLUMNS}, s.body, n.name, t.outputs, t.value_sha256, t.log_sha256, t.sequence, {{value}}, "  # noqa: S608
    "CASE WHEN t.holding = 1 THEN (SELECT a.note FROM attempt_notes a WHERE a.task_id = t.id AND a.epoch = t.epoch "
    f"AND a.note <> '{PREEMPTING}' ORDER BY a.at DESC, {PHASES} DESC LIMIT 1) END, "
    f"{SAVED}, n.owner_id FROM tasks t JOIN specs s ON s.id = t.spec_id LEFT JOIN nodes n ON n.id = t.node_id "
    "LEFT JOIN checkpoints c ON c.task_id = t.id "
)
VIEW_WITH_VALUE = VIEW.replace("{value}", "t.value")
VIEW_WITHOUT_VALUE = VIEW.replace("{value}", "NULL")


def _view(row: Row) -> TaskView:
    body, node_name, outputs, value_sha256, log_sha256, sequence, value, note, *saved, owner = row[
        TASK_WIDTH:
    ]
    return TaskView(
        row=task_row(row),
        spec=spec_from(body),
        node_name=node_name,
        outputs=outputs_from(outputs),
        value=bytes(value or b""),
        value_sha256=value_sha256,
        log_sha256=log_sha256,
        sequence=sequence or 0,
        note=note,
        checkpoint=_saved(saved),
        node_owner=owner,
    )


def _saved(row: Sequence[Any]) -> SavedCheckpoint | None:
    """From `SAVED`."""
    return None if row[0] is None else SavedCheckpoint(*row)


def _theirs(owner: int, team: int | None, user: UserId | None, teams: Collection[int]) -> bool:
    """Whether this user is the owner, or one of the teams. Nobody named: an operator, or the server itself."""
    return user is None or (owner == user if team is None else team in teams)


@operation
def task(
    id: TaskId, user: UserId | None, teams: Collection[int] = ()
) -> Operation[TaskView | None]:
    rows = yield Statement(VIEW_WITH_VALUE + "WHERE t.id = :id", {"id": id})
    if not rows or not _theirs(rows[0][4], rows[0][21], user, teams):
        return None
    (view,) = yield from _with_members([_view(rows[0])])
    return view


@operation
def tasks(
    user: UserId | None,
    before: TaskId | None,
    limit: int,
    statuses: Sequence[TaskStatus] = (),
    teams: Collection[int] = (),
) -> Operation[tuple[TaskView, ...]]:
    """The user's own and these teams', newest first, without the values; no user and no team: everybody's.

    Asking only for what is open looks at nothing else.
    """
    if len(teams) > MAX_TEAMS:
        raise Invalid(f"{len(teams)} teams in one listing; name at most {MAX_TEAMS}")
    parameters: dict[str, int] = {"before": LAST if before is None else before, "limit": limit}
    whose: list[str] = []
    if user is not None:
        parameters["user"] = user
        whose.append("t.user_id = :user AND t.team_id IS NULL")
    for place, team in enumerate(sorted(teams)):
        parameters[f"team_{place}"] = team
        whose.append(f"t.team_id = :team_{place}")
    wanted = frozenset(statuses)
    if wanted and not any(status.is_final for status in wanted):
        parts = [part for each in whose or [""] for part in _open(each, wanted)]
    else:
        of_status = f" AND {_one_of(wanted)}" if wanted else ""
        if not whose:
            return (yield from _views(f"t.id < :before{of_status}", parameters))
        parts = [_newest(f"{each} AND t.id < :before{of_status}", plain=True) for each in whose]
    return (yield from _views(f"t.id IN ({' UNION ALL '.join(parts)})", parameters))


def _views(where: str, parameters: dict[str, int]) -> Operation[tuple[TaskView, ...]]:
    rows = yield Statement(
        f"{VIEW_WITHOUT_VALUE} WHERE {where} ORDER BY t.id DESC LIMIT :limit", parameters
    )
    return (yield from _with_members([_view(row) for row in rows]))


def _with_members(views: Sequence[TaskView]) -> Operation[tuple[TaskView, ...]]:
    """Gangs with their members; a task that is none costs nothing."""
    gangs = [view.row.id for view in views if view.spec.requirements.nodes > 1]
    if not gangs:
        return tuple(views)
    found = yield from members.views(gangs)
    return tuple(_as_gang(view, found.get(view.row.id, ())) for view in views)


def _as_gang(view: TaskView, found: tuple[MemberView, ...]) -> TaskView:
    if not found:
        return view
    row = replace(view.row, node=found[0].node, allocation=found[0].allocation)
    return replace(view, row=row, node_name=found[0].node_name, members=found)


def _open(whose: str, wanted: frozenset[TaskStatus]) -> list[str]:
    """What is queued and what is held, each from its own index.

    A plus keeps the planner from another index: from walking through everything that ended, in the order of the ids.
    """
    parts = []
    ours = "team_id = :" in whose
    if TaskStatus.QUEUED in wanted:
        if whose:
            mine = f"{whose.replace('t.team_id IS', '+t.team_id IS')} AND t.id < :before"
        else:
            mine = "+t.id < :before"
        parts.append(_newest(f"t.status = 'queued' AND {mine}", plain=bool(whose)))
    if wanted & HELD_STATUSES:
        few = f"{whose} AND t.id < :before" if whose else "t.id < :before"
        if not ours:
            few = few.replace("t.", "+t.")
        held = f"t.holding = 1 AND {_one_of(wanted & HELD_STATUSES)} AND {few}"
        parts.append(_newest(held, plain=ours))
    return parts


def _newest(where: str, *, plain: bool) -> str:
    order = "t.id" if plain else "+t.id"
    return f"SELECT id FROM (SELECT t.id FROM tasks t WHERE {where} ORDER BY {order} DESC LIMIT :limit) AS newest"  # noqa: S608


def _one_of(statuses: frozenset[TaskStatus]) -> str:
    return f"t.status IN ({', '.join(repr(status.value) for status in sorted(statuses))})"


@operation
def story(
    id: TaskId, user: UserId | None, teams: Collection[int] = ()
) -> Operation[TaskStory | None]:
    rows = yield Statement(
        f"SELECT {TASK_COLUMNS}, {SAVED} FROM tasks t LEFT JOIN checkpoints c ON c.task_id = t.id WHERE t.id = :id",  # noqa: S608
        {"id": id},
    )
    if not rows or not _theirs(rows[0][4], rows[0][21], user, teams):
        return None
    attempts = yield Statement(
        "SELECT task_id, epoch, node_id, leased_at, started_at, ended_at, reason, detail "
        "FROM attempts WHERE task_id = :id ORDER BY epoch",
        {"id": id},
    )
    notes = yield Statement(
        f"SELECT a.epoch, a.note, a.at FROM attempt_notes a WHERE a.task_id = :id ORDER BY a.epoch, a.at, {PHASES}",  # noqa: S608
        {"id": id},
    )
    row = task_row(rows[0])
    if row.node is None and row.epoch:
        gang = (yield from members.views((id,))).get(id, ())
        row = replace(row, node=gang[0].node) if gang else row
    return TaskStory(
        row,
        tuple(
            AttemptRow(row[0], row[1], row[2], row[3], row[4], row[5], REASON[row[6]], row[7])
            for row in attempts
        ),
        tuple(AttemptNote(*row) for row in notes),
        _saved(rows[0][TASK_WIDTH:]),
    )


@operation
def batch(id: BatchId, user: UserId | None, teams: Collection[int] = ()) -> Operation[Batch | None]:
    rows = yield Statement(
        "SELECT id, user_id, name, total, done, closed, created_at, team_id FROM batches WHERE id = :id",
        {"id": id},
    )
    for row in rows:
        if _theirs(row[1], row[7], user, teams):
            return Batch(row[0], row[1], row[2], row[3], row[4], bool(row[5]), row[6], row[7])
    return None


@operation
def batch_results(batch: BatchId, after: int, limit: int) -> Operation[tuple[BatchResult, ...]]:
    rows = yield Statement(
        "SELECT t.sequence, t.position, t.id, t.status, t.reason, t.exit_code, t.value, t.value_sha256, t.error_text, "
        "t.node_id, n.name, n.owner_id FROM tasks t LEFT JOIN nodes n ON n.id = t.node_id WHERE t.batch_id = :batch "
        "AND t.sequence > :after AND t.sequence IS NOT NULL ORDER BY t.sequence LIMIT :limit",
        {"batch": batch, "after": after, "limit": limit},
    )
    return tuple(
        BatchResult(
            row[0],
            row[1],
            row[2],
            STATUS[row[3]],
            REASON[row[4]],
            row[5],
            bytes(row[6] or b""),
            row[7],
            row[8] or "",
            *row[9:],
        )
        for row in rows
    )


@operation
def batch_tasks(batch: BatchId) -> Operation[tuple[TaskId, ...]]:
    """The ids that have not ended. Looks only at what is open."""
    rows = yield Statement(
        "SELECT t.id FROM tasks t JOIN batches b ON b.id = :batch "
        "WHERE t.user_id = b.user_id AND t.status = 'queued' AND t.batch_id = :batch UNION ALL "
        "SELECT t.id FROM tasks t WHERE t.holding = 1 AND t.batch_id = :batch AND t.status IN ('leased', 'running')",
        {"batch": batch},
    )
    return tuple(sorted(TaskId(row[0]) for row in rows))


# ---- cancelling


@operation
def close_batch(batch: BatchId) -> Operation[None]:
    """Nothing more can be added to it."""
    yield Statement("UPDATE batches SET closed = 1 WHERE id = :batch", {"batch": batch})


@operation
def cancel(
    ids: Sequence[TaskId], user: UserId | None, at: Instant, teams: Collection[int] = ()
) -> Operation[Recording]:
    """Queued tasks end at once. Leased ones too, but their leases hold on until the node lets go."""
    rows = yield Statement(
        "SELECT t.id, t.epoch, t.batch_id, t.user_id, t.status, t.node_id, t.team_id FROM {wanted} AS w "  # noqa: S608
        f"JOIN tasks t ON t.id = w.id WHERE t.status IN ({CANCELLABLE}) "
        "/*postgresql ORDER BY t.id FOR UPDATE OF t*/",
        {},
        {"wanted": of_ids(ids)},
    )
    found = [row for row in rows if _theirs(row[3], row[6], user, teams)]
    if not found:
        return Recording()
    last = yield from take_sequences(row[2] for row in found)
    cancelled: list[Row] = []
    ended: list[Ended] = []
    for number, epoch, in_batch, owner, status, _, _ in found:
        last[in_batch] = sequence = last[in_batch] + 1
        cancelled.append((number, epoch, sequence))
        ended.append(Ended(number, in_batch, owner, target(status, Move.CANCELLED), Span(0)))
    yield Statement(
        "UPDATE tasks SET status = 'cancelled', reason = 'cancelled', finished_at = :at, sequence = c.sequence "  # noqa: S608
        "FROM {cancelled} AS c WHERE tasks.id = c.id AND tasks.epoch = c.epoch "
        f"AND tasks.status IN ({CANCELLABLE})",
        {"at": at},
        {"cancelled": Relation(CANCELLED, cancelled)},
    )
    leased = [row for row in found if row[4] != TaskStatus.QUEUED]
    of_gangs = yield from members.holders(row[0] for row in leased if row[5] is None)
    return Recording(
        ended=tuple(ended),
        withdrawn=tuple(TaskId(row[0]) for row in found if row[4] == TaskStatus.QUEUED),
        to_stop=(
            *((NodeId(row[5]), Hold(row[0], row[1])) for row in leased if row[5] is not None),
            *of_gangs,
        ),
    )


# ---- the queue


@operation
def queued_page(
    user: UserId | None, team: int | None, after: TaskId | None, limit: int
) -> Operation[tuple[TaskView, ...]]:
    """At most `limit` queued tasks with ids past `after`, oldest first; of a user, of a team, or of everybody."""
    whose, parameters = _queue_of(user, team)
    order = "t.id" if whose else "+t.id"
    parameters |= {"after": -1 if after is None else after, "limit": limit}
    oldest = (
        f"SELECT id FROM (SELECT t.id FROM tasks t WHERE t.status = 'queued'{whose} "  # noqa: S608
        f"AND {order} > :after ORDER BY {order} LIMIT :limit) AS oldest"
    )
    return (yield from _views(f"t.id IN ({oldest})", parameters))[::-1]


@operation
def queued_count(user: UserId | None, team: int | None, most: int) -> Operation[int]:
    """Number of queued tasks, counted up to `most`."""
    whose, parameters = _queue_of(user, team)
    rows = yield Statement(
        f"SELECT COUNT(*) FROM (SELECT 1 FROM tasks t WHERE t.status = 'queued'{whose} LIMIT :most) AS counted",  # noqa: S608
        {**parameters, "most": most},
    )
    return sum(number for (number,) in rows)


def _queue_of(user: UserId | None, team: int | None) -> tuple[str, dict[str, int]]:
    if team is not None:
        return " AND t.team_id = :team", {"team": team}
    if user is not None:  # the plus keeps SQLite on the index of queued tasks
        return " AND t.user_id = :user AND +t.team_id IS NULL", {"user": user}
    return "", {}

"""Tasks and batches for their users: reading, listing and cancelling. Submitting is in `submissions`.

`user` and `teams` limit the tasks that are seen or changed (`core.permissions`). A team's task belongs to the team; the
submitting user has no other right to it. `user` None: an operator, or the server itself.
One file because reading, listing and cancelling share this ownership check and the view of a task.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpool.core.errors import Invalid
from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
from gpool.core.lifecycle import Move, sources
from gpool.core.model import AttemptRow, Instant, Phase, Span, TaskStatus
from gpool.core.permissions import TeamId
from gpool.server.store.generated_rows import (
    AttemptsRecord,
    BatchesRecord,
    TasksRecord,
)
from gpool.server.store.operations.leases import gang_members
from gpool.server.store.operations.leases.ends import take_sequences, target
from gpool.server.store.operations.money.limits import cost_of
from gpool.server.store.operations.tasks.results import PRINTED, results
from gpool.server.store.protocol import Operation, Relation, Row, Statement, operation
from gpool.server.store.rows import (
    REASON,
    STATUS,
    TASK_COLUMNS,
    TASK_COLUMNS_WITHOUT_VALUE,
    columns,
    of_ids,
    outputs_from,
    select,
    select_pairs,
    spec_from,
    task_row,
    values,
)
from gpool.server.store.sealing import (
    ATTEMPT_DETAIL,
    BODY_OF_TASK,
    ERROR_TEXT,
    PROGRESS,
    VALUE,
    opened,
)
from gpool.server.store.values import (
    PREEMPTING,
    RECLAIMING,
    UNFUNDED,
    AttemptNote,
    Batch,
    BatchResult,
    EndedTask,
    MemberView,
    Recording,
    SavedCheckpoint,
    TaskStory,
    TaskView,
)
from gpool.wire.frames import Hold

CANCELLED = (("id", "int"), ("epoch", "int"), ("sequence", "int"))
HELD_STATUSES = frozenset({TaskStatus.LEASED, TaskStatus.RUNNING})
CANCELLABLE = ", ".join(f"'{status.value}'" for status in sorted(sources(Move.CANCELLED)))
LAST = (1 << 63) - 1
MAX_TEAMS = 100
"""In one listing: each is a branch of its statement."""

ATTEMPT = columns(AttemptsRecord, AttemptsRecord, "a")
BATCH = columns(BatchesRecord, BatchesRecord, "b")


class _Checkpoint(NamedTuple):
    epoch: int | None
    saved_at: Instant | None
    size_bytes: int | None
    files: int | None


class _ViewExtras(NamedTuple):
    spec_id: SpecId
    body: str
    node_name: str | None
    note: str | None
    node_owner: UserId | None
    epoch: int | None
    saved_at: Instant | None
    size_bytes: int | None
    files: int | None


class _AttemptNoteRow(NamedTuple):
    epoch: int
    note: str
    at: Instant


class _StatusCount(NamedTuple):
    status: str
    tasks: int


class _Cancellable(NamedTuple):
    id: TaskId
    epoch: int
    batch_id: BatchId
    user_id: UserId
    status: str
    node_id: NodeId | None
    team_id: TeamId | None


# ---- reading

_RANKS = " ".join(f"WHEN '{phase}' THEN {place}" for place, phase in enumerate(Phase))
PHASES = f"CASE a.note {_RANKS} END"
"""Order of phases that were reported at one time: that of the work."""
CHECKPOINT = "c.epoch, c.saved_at, c.size_bytes, c.files"
VIEW = (
    "SELECT {task}, s.id, s.body, n.name, "  # noqa: S608
    "CASE WHEN t.holding = 1 THEN (SELECT a.note FROM attempt_notes a WHERE a.task_id = t.id AND a.epoch = t.epoch "
    f"AND a.note NOT IN ('{PREEMPTING}', '{RECLAIMING}', '{UNFUNDED}') ORDER BY a.at DESC, {PHASES} DESC LIMIT 1) END, n.owner_id, {CHECKPOINT} "
    "FROM tasks t JOIN specs s ON s.id = t.spec_id LEFT JOIN nodes n ON n.id = t.node_id "
    "LEFT JOIN checkpoints c ON c.task_id = t.id "
)
VIEW_WITH_VALUE = VIEW.replace("{task}", TASK_COLUMNS)
VIEW_WITHOUT_VALUE = VIEW.replace("{task}", TASK_COLUMNS_WITHOUT_VALUE)


def _view(record: TasksRecord, extras: _ViewExtras) -> TaskView:
    return TaskView(
        row=task_row(record),
        record=record,
        spec=spec_from(extras.body),
        node_name=extras.node_name,
        outputs=outputs_from(record.outputs),
        value=bytes(record.value or b""),
        note=extras.note,
        checkpoint=_saved(extras),
        node_owner=extras.node_owner,
    )


def _saved(row: _Checkpoint | _ViewExtras) -> SavedCheckpoint | None:
    if row.epoch is None or row.saved_at is None or row.size_bytes is None or row.files is None:
        return None
    return SavedCheckpoint(row.epoch, row.saved_at, row.size_bytes, row.files)


def _is_theirs(
    row: TasksRecord | BatchesRecord | _Cancellable, user: UserId | None, teams: Collection[int]
) -> bool:
    if user is None:
        return True
    return row.user_id == user if row.team_id is None else row.team_id in teams


@operation
def task(
    id: TaskId, user: UserId | None, teams: Collection[int] = ()
) -> Operation[TaskView | None]:
    rows = yield from select_pairs(
        TasksRecord, _ViewExtras, VIEW_WITH_VALUE + "WHERE t.id = :id", {"id": id}
    )
    theirs = [pair for pair in rows if _is_theirs(pair[0], user, teams)]
    found = yield from _opened_views(theirs)
    views = yield from _with_members(found)
    if not views or not views[0].record.metered:
        return views[0] if views else None
    return replace(views[0], cost=(yield from cost_of(id)))


@operation
def tasks(
    user: UserId | None,
    before: TaskId | None,
    limit: int,
    statuses: Sequence[TaskStatus] = (),
    teams: Collection[int] = (),
    *,
    heads: bool = False,
) -> Operation[tuple[TaskView, ...]]:
    """Tasks of the user and teams (neither: all), newest first, without values. With open statuses only, no ended task is read.

    `heads`: the first task of each batch only.
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
        of_status += " AND t.position = 0" if heads else ""
        if not whose:
            where = f"t.id < :before AND t.parent_id IS NULL{of_status}"
            return (yield from _views(where, parameters))
        parts = [_newest(f"{each} AND t.id < :before{of_status}", plain=True) for each in whose]
    return (yield from _views(f"t.id IN ({' UNION ALL '.join(parts)})", parameters))


def _views(where: str, parameters: dict[str, int]) -> Operation[tuple[TaskView, ...]]:
    rows = yield from select_pairs(
        TasksRecord,
        _ViewExtras,
        f"{VIEW_WITHOUT_VALUE} WHERE {where} ORDER BY t.id DESC LIMIT :limit",
        parameters,
    )
    return (yield from _with_members((yield from _opened_views(rows))))


def _opened_views(
    rows: Sequence[tuple[TasksRecord, _ViewExtras]],
) -> Operation[list[TaskView]]:
    records = yield from opened([record for record, _ in rows], VALUE, ERROR_TEXT, PROGRESS)
    extras = yield from opened([each for _, each in rows], BODY_OF_TASK)
    return [_view(record, each) for record, each in zip(records, extras, strict=True)]


def _with_members(views: Sequence[TaskView]) -> Operation[tuple[TaskView, ...]]:
    gangs = [view.row.id for view in views if view.spec.requirements.nodes > 1]
    if not gangs:
        return tuple(views)
    found = yield from gang_members.views(gangs)
    return tuple(_as_gang(view, found.get(view.row.id, ())) for view in views)


def _as_gang(view: TaskView, found: tuple[MemberView, ...]) -> TaskView:
    if not found:
        return view
    row = replace(view.row, node=found[0].node, allocation=found[0].allocation)
    return replace(view, row=row, node_name=found[0].node_name, members=found)


def _open(whose: str, wanted: frozenset[TaskStatus]) -> list[str]:
    """Subqueries of the queued and of the held tasks, each of which uses its own partial index.

    A unary plus keeps the query planner from an index in the order of ids, which would read all ended tasks.
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
    return f"SELECT id FROM (SELECT t.id FROM tasks t WHERE {where} AND t.parent_id IS NULL ORDER BY {order} DESC LIMIT :limit) AS newest"  # noqa: S608


def _one_of(statuses: frozenset[TaskStatus]) -> str:
    return f"t.status IN ({', '.join(repr(status.value) for status in sorted(statuses))})"


@operation
def story(
    id: TaskId, user: UserId | None, teams: Collection[int] = ()
) -> Operation[TaskStory | None]:
    rows = yield from select_pairs(
        TasksRecord,
        _Checkpoint,
        f"SELECT {TASK_COLUMNS_WITHOUT_VALUE}, {CHECKPOINT} FROM tasks t "  # noqa: S608
        "LEFT JOIN checkpoints c ON c.task_id = t.id WHERE t.id = :id",
        {"id": id},
    )
    found = [(record, saved) for record, saved in rows if _is_theirs(record, user, teams)]
    if not found:
        return None
    [(sealed, saved)] = found
    [record] = yield from opened([sealed], ERROR_TEXT)
    attempts = yield from select(
        AttemptsRecord,
        f"SELECT {ATTEMPT} FROM attempts a WHERE a.task_id = :id ORDER BY a.epoch",  # noqa: S608
        {"id": id},
    )
    attempts = yield from opened(attempts, ATTEMPT_DETAIL)
    notes = yield from select(
        _AttemptNoteRow,
        f"SELECT a.epoch, a.note, a.at FROM attempt_notes a WHERE a.task_id = :id ORDER BY a.epoch, a.at, {PHASES}",  # noqa: S608
        {"id": id},
    )
    row = task_row(record)
    if row.node is None and row.epoch:
        gang = (yield from gang_members.views((id,))).get(id, ())
        row = replace(row, node=gang[0].node) if gang else row
    return TaskStory(
        row,
        tuple(
            AttemptRow(
                each.task_id,
                each.epoch,
                each.node_id,
                each.leased_at,
                each.started_at,
                each.ended_at,
                REASON[each.reason],
                each.detail,
            )
            for each in attempts
        ),
        tuple(AttemptNote(*note) for note in notes),
        _saved(saved),
    )


@operation
def batch(id: BatchId, user: UserId | None, teams: Collection[int] = ()) -> Operation[Batch | None]:
    rows = yield from select(
        BatchesRecord,
        f"SELECT {BATCH} FROM batches b WHERE b.id = :id",  # noqa: S608
        {"id": id},
    )
    for row in rows:
        if _is_theirs(row, user, teams):
            return _batch(row)
    return None


def _batch(row: BatchesRecord) -> Batch:
    return Batch(
        row.id,
        row.user_id,
        row.name,
        row.total,
        row.done,
        bool(row.closed),
        row.created_at,
        row.team_id,
    )


@operation
def batches(ids: Collection[BatchId]) -> Operation[tuple[Batch, ...]]:
    """Read these batches, in no order; the caller has checked the permission."""
    rows = yield from select(
        BatchesRecord,
        f"SELECT {BATCH} FROM {{wanted}} AS w JOIN batches b ON b.id = w.id",  # noqa: S608
        {},
        {"wanted": of_ids(ids)},
    )
    return tuple(_batch(row) for row in rows)


@operation
def batch_counts(batch: BatchId) -> Operation[dict[TaskStatus, int]]:
    """Number of tasks of a batch by status; reads every ended task's row. Waiting tasks are not counted."""
    rows = yield from select(
        _StatusCount,
        "SELECT t.status, COUNT(*) FROM tasks t WHERE t.batch_id = :batch AND t.sequence IS NOT NULL "
        "GROUP BY t.status UNION ALL SELECT t.status, COUNT(*) FROM tasks t WHERE t.holding = 1 "
        "AND t.batch_id = :batch AND t.status IN ('leased', 'running') GROUP BY t.status",
        {"batch": batch},
    )
    return {STATUS[row.status]: row.tasks for row in rows}


@operation
def has_printed(id: TaskId) -> Operation[bool]:
    found = yield from values(
        TaskId,
        f"SELECT t.id FROM tasks t WHERE t.id = :id AND {PRINTED}",  # noqa: S608
        {"id": id},
    )
    return bool(found)


@operation
def batch_results(batch: BatchId, after: int, limit: int) -> Operation[tuple[BatchResult, ...]]:
    return (
        yield from results(
            "tasks t",
            "WHERE t.batch_id = :batch AND t.sequence > :after AND t.sequence IS NOT NULL "
            "ORDER BY t.sequence LIMIT :limit",
            {"batch": batch, "after": after, "limit": limit},
        )
    )


@operation
def batch_tasks(batch: BatchId) -> Operation[tuple[TaskId, ...]]:
    found = yield from values(
        TaskId,
        "SELECT t.id FROM tasks t JOIN batches b ON b.id = :batch "
        "WHERE t.user_id = b.user_id AND t.status = 'queued' AND t.batch_id = :batch UNION ALL "
        "SELECT t.id FROM tasks t WHERE t.holding = 1 AND t.batch_id = :batch AND t.status IN ('leased', 'running')",
        {"batch": batch},
    )
    return tuple(sorted(found))


# ---- cancelling


@operation
def close_batch(batch: BatchId) -> Operation[None]:
    yield Statement("UPDATE batches SET closed = 1 WHERE id = :batch", {"batch": batch})


@operation
def cancel(
    ids: Sequence[TaskId], user: UserId | None, at: Instant, teams: Collection[int] = ()
) -> Operation[Recording]:
    """End these tasks and their siblings as cancelled. A node that holds one keeps its allocation until it releases the lease."""
    siblings = yield from values(
        TaskId,
        "SELECT t.id FROM {wanted} AS w JOIN tasks t ON t.parent_id = w.id",
        {},
        {"wanted": of_ids(ids)},
    )
    rows = yield from select(
        _Cancellable,
        "SELECT t.id, t.epoch, t.batch_id, t.user_id, t.status, t.node_id, t.team_id FROM {wanted} AS w "  # noqa: S608
        f"JOIN tasks t ON t.id = w.id WHERE t.status IN ({CANCELLABLE}) "
        "/*postgresql ORDER BY t.id FOR UPDATE OF t*/",
        {},
        {"wanted": of_ids([*ids, *siblings])},
    )
    found = [row for row in rows if _is_theirs(row, user, teams)]
    if not found:
        return Recording()
    last = yield from take_sequences(row.batch_id for row in found)
    cancelled: list[Row] = []
    ended: list[EndedTask] = []
    for row in found:
        last[row.batch_id] = sequence = last[row.batch_id] + 1
        cancelled.append((row.id, row.epoch, sequence))
        status = target(row.status, Move.CANCELLED)
        ended.append(
            EndedTask(row.id, row.batch_id, row.user_id, status, Span(0), row.epoch, row.team_id)
        )
    yield Statement(
        "UPDATE tasks SET status = 'cancelled', reason = 'cancelled', finished_at = :at, sequence = c.sequence "  # noqa: S608
        "FROM {cancelled} AS c WHERE tasks.id = c.id AND tasks.epoch = c.epoch "
        f"AND tasks.status IN ({CANCELLABLE})",
        {"at": at},
        {"cancelled": Relation(CANCELLED, cancelled)},
    )
    leased = [row for row in found if row.status != TaskStatus.QUEUED]
    of_gangs = yield from gang_members.holders(row.id for row in leased if row.node_id is None)
    return Recording(
        ended=tuple(ended),
        withdrawn=tuple(row.id for row in found if row.status == TaskStatus.QUEUED),
        to_stop=(
            *((row.node_id, Hold(row.id, row.epoch)) for row in leased if row.node_id is not None),
            *of_gangs,
        ),
    )


# ---- the queue


@operation
def queued_page(
    user: UserId | None, team: int | None, after: TaskId | None, limit: int
) -> Operation[tuple[TaskView, ...]]:
    whose, parameters = _queue_of(user, team)
    order = "t.id" if whose else "+t.id"
    parameters |= {"after": -1 if after is None else after, "limit": limit}
    oldest = (
        f"SELECT id FROM (SELECT t.id FROM tasks t WHERE t.status = 'queued'{whose} AND t.parent_id IS NULL "  # noqa: S608
        f"AND {order} > :after ORDER BY {order} LIMIT :limit) AS oldest"
    )
    return (yield from _views(f"t.id IN ({oldest})", parameters))[::-1]


@operation
def queued_count(user: UserId | None, team: int | None, most: int) -> Operation[int]:
    whose, parameters = _queue_of(user, team)
    return sum(
        (
            yield from values(
                int,
                f"SELECT COUNT(*) FROM (SELECT 1 FROM tasks t WHERE t.status = 'queued'{whose} "  # noqa: S608
                "AND t.parent_id IS NULL LIMIT :most) AS counted",
                {**parameters, "most": most},
            )
        )
    )


def _queue_of(user: UserId | None, team: int | None) -> tuple[str, dict[str, int]]:
    if team is not None:
        return " AND t.team_id = :team", {"team": team}
    if user is not None:  # the plus keeps SQLite on the index of queued tasks
        return " AND t.user_id = :user AND +t.team_id IS NULL", {"user": user}
    return "", {}

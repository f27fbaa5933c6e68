"""The outbox and its numbering: events are written with their cause, then numbered by the leader, one after the other.

    transaction of a report      outbox: (1, task.started, t-7), (2, task.succeeded, t-8)
    transaction of the leader    events: (…501, task.started, t-7), (…502, task.succeeded, t-8)
                                 deliveries: (wh-1, …501), (wh-1, …502)        outbox: empty

Transactions commit in another order than they began, so a reader of the outbox could skip an event that is committed
late. Numbers are given by one writer, fenced by its term: a reader that has seen number n has seen all up to n.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpool.core.ids import BatchId, NodeId, TaskId
from gpool.core.model import Instant
from gpool.core.specs.events import EventKind
from gpool.server.store.generated_rows import EventsRecord, OutboxRecord
from gpool.server.store.operations.leases.grants import is_current_term
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import columns, exists, of_ids, relation_columns, select, values
from gpool.wire.events import BatchEventData, TaskEventData

EventHolder = tuple[str, int]
"""The account of an event: ("user", id), ("team", id), or `POOL` for operators."""
POOL: EventHolder = ("pool", 0)

OUTBOX = columns(OutboxRecord, OutboxRecord, "o")
EVENT = columns(EventsRecord, EventsRecord, "e")
TASK_ENDS = frozenset({EventKind.TASK_SUCCEEDED, EventKind.TASK_FAILED, EventKind.TASK_CANCELLED})
OPEN_BATCH = "batch"
"""Kind of the condition: all tasks of a batch have ended, and more may be added."""


class NewEvent(NamedTuple):
    at: Instant
    kind: str
    holder_kind: str
    holder_id: int
    subject: int
    epoch: int = 0
    data: str = ""


def add_events(new: Sequence[NewEvent]) -> Operation[None]:
    """Last step of an operation that is the cause of the events."""
    yield Statement(
        "INSERT INTO outbox (at, kind, holder_kind, holder_id, subject, epoch, data) "
        "SELECT n.at, n.kind, n.holder_kind, n.holder_id, n.subject, n.epoch, n.data FROM {new} AS n",
        {},
        {"new": Relation(relation_columns(NewEvent), new)},
    )


# ---- subscribers


class _Holder(NamedTuple):
    holder_kind: str
    holder_id: int


@operation
def subscribers(now: Instant) -> Operation[frozenset[EventHolder]]:
    """Accounts whose events are recorded: with a destination that is on, or a reader."""
    rows = yield from select(
        _Holder,
        "SELECT d.holder_kind, d.holder_id FROM destinations d WHERE d.status = 'on' UNION "
        "SELECT r.holder_kind, r.holder_id FROM event_readers r WHERE r.expires_at > :now",
        {"now": now},
    )
    return frozenset((row.holder_kind, row.holder_id) for row in rows)


@operation
def put_reader(holder: EventHolder, expires_at: Instant) -> Operation[None]:
    yield Statement(
        "INSERT INTO event_readers (holder_kind, holder_id, expires_at) VALUES (:kind, :id, :at) "
        "ON CONFLICT (holder_kind, holder_id) DO UPDATE SET expires_at = excluded.expires_at",
        {"kind": holder[0], "id": holder[1], "at": expires_at},
    )


@operation
def forget_readers(now: Instant) -> Operation[bool]:
    gone = yield from values(
        int, "DELETE FROM event_readers WHERE expires_at <= :now RETURNING holder_id", {"now": now}
    )
    return bool(gone)


# ---- numbering


class _EventTask(NamedTuple):
    id: TaskId
    epoch: int
    batch_id: BatchId
    status: str
    reason: str | None
    exit_code: int | None
    sequence: int | None
    node_id: NodeId | None
    node_name: str | None
    name: str
    total: int
    closed: int


class _UnclosedBatch(NamedTuple):
    kind: str
    object: str
    since: Instant
    data: str


@dataclass(frozen=True, slots=True)
class Numbered:
    """Events that were numbered; `more`: the outbox has further rows; None: another leader has taken over."""

    events: tuple[EventsRecord, ...] = ()
    more: bool = False
    deposed: bool = False


@operation
def has_outbox() -> Operation[bool]:
    return (yield from exists("SELECT 1 FROM outbox LIMIT 1"))


@operation
def number_events(term: int, now: Instant, limit: int) -> Operation[Numbered]:
    """Move up to `limit` rows of the outbox into `events`, and add their deliveries."""
    if not (yield from is_current_term(term)):
        return Numbered(deposed=True)
    rows = yield from select(
        OutboxRecord,
        f"SELECT {OUTBOX} FROM outbox o ORDER BY o.id LIMIT :limit",  # noqa: S608
        {"limit": limit},
    )
    if not rows:
        return Numbered()
    tasks = yield from _tasks({TaskId(row.subject) for row in rows if not row.data})
    last = yield from values(int, "SELECT COALESCE(MAX(number), 0) FROM events")
    number = max(last[0] + 1, now)
    found: list[EventsRecord] = []
    open_batches: list[_UnclosedBatch] = []

    def add(row: OutboxRecord, kind: str, subject: int, data: str) -> None:
        place = number + len(found)
        found.append(
            EventsRecord(place, row.at, kind, row.holder_kind, row.holder_id, subject, data)
        )

    for row in rows:
        task = tasks.get(row.subject)
        if row.data:
            add(row, row.kind, row.subject, row.data)
        elif task is not None:  # else it was deleted meanwhile
            add(row, row.kind, row.subject, _task_data(row, task))
            if task.total > 1 and row.kind in TASK_ENDS and task.sequence == task.total:
                done = _batch_data(task)
                if task.closed:
                    add(row, EventKind.BATCH_DONE, task.batch_id, done)
                else:
                    open_batches.append(
                        _UnclosedBatch(OPEN_BATCH, _open_name(row, task.batch_id), row.at, done)
                    )
    yield from _insert(found)
    if open_batches:
        yield Statement(
            "INSERT INTO conditions (kind, object, since, data) "
            "SELECT b.kind, b.object, b.since, b.data FROM {batches} AS b WHERE true "
            "ON CONFLICT (kind, object) DO NOTHING",
            {},
            {"batches": Relation(relation_columns(_UnclosedBatch), open_batches)},
        )
    yield Statement(
        "DELETE FROM outbox WHERE id IN (SELECT id FROM {ids} AS i)",
        {},
        {"ids": of_ids(row.id for row in rows)},
    )
    return Numbered(tuple(found), more=len(rows) == limit)


def _insert(found: Sequence[EventsRecord]) -> Operation[None]:
    if not found:
        return
    relations = {"new": Relation(relation_columns(EventsRecord), found)}
    yield Statement(
        "INSERT INTO events (number, at, kind, holder_kind, holder_id, subject, data) "
        "SELECT n.number, n.at, n.kind, n.holder_kind, n.holder_id, n.subject, n.data FROM {new} AS n",
        {},
        relations,
    )
    yield Statement(
        "INSERT INTO deliveries (destination_id, number, subject, status, next_at) "
        "SELECT d.id, n.number, n.subject, 'pending', n.at FROM {new} AS n JOIN destinations d "
        "ON d.holder_kind = n.holder_kind AND d.holder_id = n.holder_id AND d.status = 'on' "
        "AND (d.kinds = '*' OR ',' || d.kinds || ',' LIKE '%,' || n.kind || ',%')",
        {},
        relations,
    )


def _tasks(ids: Collection[TaskId]) -> Operation[dict[int, _EventTask]]:
    if not ids:
        return {}
    rows = yield from select(
        _EventTask,
        "SELECT t.id, t.epoch, t.batch_id, t.status, t.reason, t.exit_code, t.sequence, t.node_id, n.name, b.name, "
        "b.total, b.closed FROM {ids} AS i JOIN tasks t ON t.id = i.id JOIN batches b ON b.id = t.batch_id "
        "LEFT JOIN nodes n ON n.id = t.node_id",
        {},
        {"ids": of_ids(ids)},
    )
    return {row.id: row for row in rows}


def _task_data(row: OutboxRecord, task: _EventTask) -> str:
    is_same, is_end = row.epoch == task.epoch, row.kind in TASK_ENDS
    return TaskEventData.of(
        task=task.id,
        batch=task.batch_id,
        name=task.name,
        attempt=row.epoch,
        node=task.node_id if is_same else None,
        node_name=task.node_name if is_same else None,
        reason=task.reason if is_end else None,
        exit_code=task.exit_code if is_end else None,
    ).model_dump_json()


def _batch_data(task: _EventTask) -> str:
    return BatchEventData.of(task.batch_id, task.name, task.total).model_dump_json()


def _open_name(row: OutboxRecord, batch: BatchId) -> str:
    return f"{batch}/{row.holder_kind}/{row.holder_id}"


# ---- reading


@operation
def events_after(
    holder: EventHolder, after: int, limit: int
) -> Operation[tuple[EventsRecord, ...]]:
    rows = yield from select(
        EventsRecord,
        f"SELECT {EVENT} FROM events e WHERE e.holder_kind = :kind AND e.holder_id = :id "  # noqa: S608
        "AND e.number > :after ORDER BY e.number LIMIT :limit",
        {"kind": holder[0], "id": holder[1], "after": after, "limit": limit},
    )
    return tuple(rows)


class NewestEvent(NamedTuple):
    number: int
    holder_kind: str
    holder_id: int


@operation
def newest_after(number: int, limit: int) -> Operation[list[NewestEvent]]:
    """Accounts of the events after a number, for the streams of this replica."""
    return (
        yield from select(
            NewestEvent,
            "SELECT e.number, e.holder_kind, e.holder_id FROM events e WHERE e.number > :number "
            "ORDER BY e.number LIMIT :limit",
            {"number": number, "limit": limit},
        )
    )


@operation
def last_number() -> Operation[int]:
    found = yield from values(int, "SELECT COALESCE(MAX(number), 0) FROM events")
    return found[0]


# ---- retention


@operation
def forget_events(before: Instant, limit: int) -> Operation[int]:
    """Delete up to `limit` events numbered before then, with their deliveries."""
    gone = yield from values(
        int,
        "DELETE FROM events WHERE number IN (SELECT e.number FROM events e WHERE e.number < :before "
        "ORDER BY e.number LIMIT :limit) RETURNING number",
        {"before": before, "limit": limit},
    )
    if gone:
        yield Statement(
            "DELETE FROM deliveries WHERE number IN (SELECT id FROM {gone} AS g)",
            {},
            {"gone": of_ids(gone)},
        )
    return len(gone)


def forget_account(holder: EventHolder) -> Operation[None]:
    """Delete what an account had: a step of its deletion."""
    parameters = {"kind": holder[0], "id": holder[1]}
    whose = "holder_kind = :kind AND holder_id = :id"
    for sql in (
        f"DELETE FROM deliveries WHERE destination_id IN (SELECT id FROM destinations WHERE {whose})",  # noqa: S608
        f"DELETE FROM destinations WHERE {whose}",  # noqa: S608
        f"DELETE FROM outbox WHERE {whose}",  # noqa: S608
        f"DELETE FROM events WHERE {whose}",  # noqa: S608
        f"DELETE FROM event_readers WHERE {whose}",  # noqa: S608
    ):
        yield Statement(sql, parameters)


def holders_in(found: Iterable[EventsRecord]) -> set[EventHolder]:
    return {(row.holder_kind, row.holder_id) for row in found}

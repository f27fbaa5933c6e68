"""Progress of running attempts: phases, output, and checkpoints that the next attempt begins with.

A task has one checkpoint, the newest, saved with all its files or not at all: each was uploaded under this lease or is
visible through it (an input, or a file of the previous checkpoint). Its references are strong; those of the previous
one are dropped, so that frequent saves do not fill the disk. Kept for `Settings.keep_checkpoints_s` after the end.
One file because output and checkpoints of an attempt are charged to its owner in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpool.core.ids import SpecId, TaskId, UserId
from gpool.core.model import MIB, InputFile, Instant
from gpool.core.permissions import TeamId
from gpool.server.store.operations.tasks.artifacts import (
    PLAIN,
    ArtifactReference,
    ArtifactSize,
    StoredBytes,
    TaskOwner,
    count,
    put_artifact,
    put_reference,
    release,
)
from gpool.server.store.operations.tasks.storage import (
    CHECKPOINT_BYTES,
    CHUNK_BYTES,
    NO_LIMITS,
    Account,
    StorageLimits,
    change,
    holder_of,
    rooms,
    summed,
)
from gpool.server.store.protocol import Operation, Relation, Row, Statement, operation
from gpool.server.store.rows import (
    manifest_from,
    manifest_text,
    of_ids,
    of_names,
    select,
    spec_from,
    values,
)
from gpool.server.store.sealing import BODY_OF_TASK, LOG_DATA, opened, sealing
from gpool.server.store.values import LogLine
from gpool.wire.frames import Checkpointed, Hold, LogChunk, Reached

NOTES = (("task", "int"), ("epoch", "int"), ("note", "text"))
PAIRS = (("task", "int"), ("sha256", "text"))


class _Saving(NamedTuple):
    id: TaskId
    spec_id: SpecId
    user_id: UserId
    team_id: TeamId | None
    body: str
    epoch: int | None
    manifest: str | None
    stored_bytes: int | None


class _Manifest(NamedTuple):
    task_id: TaskId
    manifest: str


class _ExpiredCheckpoint(NamedTuple):
    task_id: TaskId
    manifest: str
    stored_bytes: int
    user_id: UserId
    team_id: TeamId | None


def note_phases(reached: Sequence[Reached], at: Instant) -> Operation[None]:
    yield from add_notes([(item.task, item.epoch, item.phase.value) for item in reached], at)


def add_notes(rows: Sequence[Row], at: Instant) -> Operation[None]:
    yield Statement(
        "INSERT INTO attempt_notes (task_id, epoch, note, at) SELECT n.task, n.epoch, n.note, CAST(:at AS BIGINT) "
        "FROM {notes} AS n WHERE true ON CONFLICT (task_id, epoch, note) DO NOTHING",
        {"at": at},
        {"notes": Relation(NOTES, sorted(set(rows)))},
    )


def save(
    saved: Mapping[TaskId, Checkpointed], at: Instant, limits: StorageLimits = NO_LIMITS
) -> Operation[tuple[Hold, ...]]:
    """Save a checkpoint per task, whose lease the caller has locked; return the leases of rejected ones."""
    rows = yield from select(
        _Saving,
        "SELECT t.id, t.spec_id, t.user_id, t.team_id, s.body, c.epoch, c.manifest, c.stored_bytes FROM {tasks} AS i "
        "JOIN tasks t ON t.id = i.id JOIN specs s ON s.id = t.spec_id LEFT JOIN checkpoints c ON c.task_id = t.id",
        {},
        {"tasks": of_ids(saved)},
    )
    rows = yield from opened(rows, BODY_OF_TASK)
    unusable: list[Hold] = []
    room = yield from rooms({holder_of(row.user_id, row.team_id) for row in rows}, limits)
    for row in rows:
        item = saved[row.id]
        directory = spec_from(row.body).checkpoint
        names = {file.path for file in item.files}
        inside = all(name.startswith(directory) and name != directory for name in names)
        if not directory or not inside or len(names) < len(item.files):
            unusable.append(Hold(row.id, item.epoch))
            continue
        text = manifest_text(item.files)
        if (row.epoch, row.manifest) == (item.epoch, text):
            continue  # a repeated report
        account = holder_of(row.user_id, row.team_id)
        size = len(text.encode()) + CHECKPOINT_BYTES
        more = size - (row.stored_bytes or 0)
        if more > max(0, room.get(account, more)):
            unusable.append(Hold(row.id, item.epoch))
            continue
        if not (yield from _keep(item, row.user_id, row.team_id)):
            unusable.append(Hold(row.id, item.epoch))
            continue
        yield Statement(
            "INSERT INTO checkpoints (task_id, epoch, saved_at, size_bytes, files, manifest, stored_bytes) "
            "VALUES (:task, :epoch, :at, :size, :files, :manifest, :stored) ON CONFLICT (task_id) DO UPDATE SET "
            "epoch = excluded.epoch, saved_at = excluded.saved_at, size_bytes = excluded.size_bytes, "
            "files = excluded.files, manifest = excluded.manifest, stored_bytes = excluded.stored_bytes",
            {
                "task": row.id,
                "epoch": item.epoch,
                "at": at,
                "size": sum(file.size_bytes for file in item.files),
                "files": len(item.files),
                "manifest": text,
                "stored": size,
            },
        )
        yield from change({account: more})
        if account in room:
            room[account] -= more
        if row.manifest is not None:
            kept = {file.sha256 for file in item.files}
            before = manifest_from(row.manifest)
            yield from _drop([(row.id, file.sha256) for file in before if file.sha256 not in kept])
    return tuple(unusable)


def _keep(item: Checkpointed, user: int, team: int | None) -> Operation[bool]:
    sha256s = {file.sha256 for file in item.files}
    if not sha256s:
        return True
    found = yield from select(
        ArtifactSize,
        "SELECT DISTINCT a.sha256, a.size_bytes FROM {wanted} AS w JOIN artifacts a ON a.sha256 = w.name "
        "JOIN artifact_refs r ON r.sha256 = a.sha256 JOIN tasks t ON t.id = :task WHERE "
        "r.kind = 'lease' AND r.holder = t.id AND r.epoch = :epoch OR r.kind = 'spec' AND r.holder = t.spec_id "
        "OR r.kind IN ('payload', 'checkpoint') AND r.holder = t.id",
        {"task": item.task, "epoch": item.epoch},
        {"wanted": of_names(sha256s)},
    )
    sizes = {row.sha256: row.size_bytes for row in found}
    if any(sizes.get(file.sha256) != file.size_bytes for file in item.files):
        return False
    yield Statement(
        "INSERT INTO artifact_refs (sha256, kind, holder, user_id, team_id) "
        "SELECT w.name, 'checkpoint', CAST(:task AS BIGINT), CAST(:user AS BIGINT), CAST(:team AS BIGINT) "
        "FROM {wanted} AS w WHERE true ON CONFLICT (sha256, kind, holder) DO NOTHING",
        {"task": item.task, "user": user, "team": team},
        {"wanted": of_names(sha256s)},
    )
    yield from count([(*holder_of(user, team), sha256) for sha256 in sha256s])
    return True


def _drop(pairs: Sequence[tuple[int, str]]) -> Operation[None]:
    """Drop references of replaced checkpoints; artifacts with no other reference become prunable at once."""
    if not pairs:
        return
    relation = {"dropped": Relation(PAIRS, sorted(set(pairs)))}
    gone = yield from select(
        ArtifactReference,
        "DELETE FROM artifact_refs WHERE kind = 'checkpoint' AND EXISTS (SELECT 1 FROM {dropped} AS d "
        "WHERE d.task = artifact_refs.holder AND d.sha256 = artifact_refs.sha256) RETURNING user_id, team_id, sha256",
        {},
        relation,
    )
    yield from release(gone)
    yield Statement(
        "UPDATE artifacts SET touched_at = 0 FROM {dropped} AS d WHERE artifacts.sha256 = d.sha256 AND NOT EXISTS ("
        "SELECT 1 FROM artifact_refs r WHERE r.sha256 = artifacts.sha256 AND NOT (r.kind = 'lease' AND r.holder = d.task))",
        {},
        relation,
    )


def manifests(tasks: Iterable[TaskId]) -> Operation[dict[TaskId, tuple[InputFile, ...]]]:
    wanted = of_ids(tasks)
    if not wanted.rows:
        return {}
    rows = yield from select(
        _Manifest,
        "SELECT c.task_id, c.manifest FROM {tasks} AS i JOIN checkpoints c ON c.task_id = i.id",
        {},
        {"tasks": wanted},
    )
    return {row.task_id: manifest_from(row.manifest) for row in rows}


@operation
def forget_checkpoints(before: Instant, limit: int) -> Operation[int]:
    rows = yield from select(
        _ExpiredCheckpoint,
        "SELECT c.task_id, c.manifest, c.stored_bytes, t.user_id, t.team_id "
        "FROM checkpoints c JOIN tasks t ON t.id = c.task_id "
        "WHERE t.finished_at < :before AND t.holding = 0 ORDER BY c.task_id LIMIT :limit",
        {"before": before, "limit": limit},
    )
    if rows:
        yield Statement(
            "DELETE FROM checkpoints WHERE task_id IN (SELECT id FROM {tasks} AS i)",
            {},
            {"tasks": of_ids(row.task_id for row in rows)},
        )
        yield from change(
            summed((holder_of(row.user_id, row.team_id), -row.stored_bytes) for row in rows)
        )
        yield from _drop(
            [(row.task_id, file.sha256) for row in rows for file in manifest_from(row.manifest)]
        )
    return len(rows)


MAX_LOG_BYTES = 16 * MIB
"""Limit of a task's output over all its attempts; a last line says that output was dropped."""

LEAST_BYTES = 16
"""Least size that a chunk counts for: its row needs space too, and a node may send any number of chunks."""

TRUNCATED = b"[gpool: output past 16 MiB of all attempts is not kept]\n"
OUT_OF_ROOM = b"[gpool: output is not kept: the storage quota of its owner is full]\n"
STDOUT, STDERR = 1, 2
EPOCH_SHIFT = 32
"""A cursor is the epoch, then the sequence of the chunk: it grows with time and needs no counter."""

CURSORS = (("task", "int"), ("cursor", "int"))
CHUNKS = (*CURSORS, ("stream", "int"), ("data", "blob"))
HEADS = (*CURSORS[:1], ("size_bytes", "int"), ("truncated", "int"), ("stored_bytes", "int"))


class _Cursor(NamedTuple):
    task_id: TaskId
    cursor: int


class _LogOwner(NamedTuple):
    task_id: TaskId
    size_bytes: int
    truncated: int
    stored_bytes: int
    user_id: UserId
    team_id: TeamId | None


class _LogCharge(NamedTuple):
    task_id: TaskId
    stored_bytes: int


class _Chunk(NamedTuple):
    task_id: TaskId
    cursor: int
    stream: int
    data: bytes


def append_chunks(
    chunks: Sequence[LogChunk], limits: StorageLimits = NO_LIMITS
) -> Operation[tuple[TaskId, ...]]:
    if not chunks:
        return ()
    wanted = {
        (c.task, c.epoch << EPOCH_SHIFT | c.sequence): c
        for c in chunks
        if c.data
        and not c.sequence >> EPOCH_SHIFT  # a larger sequence would be a cursor of another epoch
    }
    found = yield from select(
        _Cursor,
        "SELECT l.task_id, l.cursor FROM {wanted} AS w "
        "JOIN log_chunks l ON l.task_id = w.task AND l.cursor = w.cursor",
        {},
        {"wanted": Relation(CURSORS, sorted(wanted))},
    )
    for row in found:
        del wanted[row.task_id, row.cursor]
    rows = yield from select(
        _LogOwner,
        "SELECT t.id, COALESCE(h.size_bytes, 0), COALESCE(h.truncated, 0), COALESCE(h.stored_bytes, 0), "
        "t.user_id, t.team_id FROM {tasks} AS i JOIN tasks t ON t.id = i.id LEFT JOIN log_heads h ON h.task_id = i.id",
        {},
        {"tasks": of_ids(c.task for c in chunks)},
    )
    heads: dict[int, _LogOwner] = {row.task_id: row for row in rows}
    room = yield from rooms({holder_of(row.user_id, row.team_id) for row in rows}, limits)
    seal = yield from sealing({holder_of(row.user_id, row.team_id) for row in rows})
    new: list[Row] = []
    grown: dict[int, _LogOwner] = {}
    charged: list[tuple[Account, int]] = []
    for (task, cursor), chunk in sorted(wanted.items()):
        head = heads[task]
        if head.truncated:
            continue
        account, cut = holder_of(head.user_id, head.team_id), 0
        stream, data = STDOUT if chunk.stream == STDOUT else STDERR, chunk.data
        if len(data) + CHUNK_BYTES > room.get(account, MAX_LOG_BYTES):
            stream, data, cut = STDERR, OUT_OF_ROOM, 1
        elif head.size_bytes + max(len(data), LEAST_BYTES) > MAX_LOG_BYTES:
            stream, data, cut = STDERR, TRUNCATED, 1
        cost = len(data) + CHUNK_BYTES
        heads[task] = grown[task] = head._replace(
            size_bytes=head.size_bytes + max(len(data), LEAST_BYTES),
            truncated=cut,
            stored_bytes=head.stored_bytes + cost,
        )
        charged.append((account, cost))
        if account in room:
            room[account] -= cost
        new.append(
            (task, cursor, stream, seal.data(account, LOG_DATA.place_of(task, cursor), data))
        )
    if new:
        yield Statement(
            "INSERT INTO log_chunks (task_id, cursor, stream, data) "
            "SELECT c.task, c.cursor, c.stream, c.data FROM {chunks} AS c",
            {},
            {"chunks": Relation(CHUNKS, new)},
        )
        yield Statement(
            "INSERT INTO log_heads (task_id, size_bytes, truncated, stored_bytes) "
            "SELECT h.task, h.size_bytes, h.truncated, h.stored_bytes FROM {heads} AS h WHERE true "
            "ON CONFLICT (task_id) DO UPDATE SET size_bytes = excluded.size_bytes, "
            "truncated = excluded.truncated, stored_bytes = excluded.stored_bytes",
            {},
            {
                "heads": Relation(
                    HEADS,
                    [
                        (task, head.size_bytes, head.truncated, head.stored_bytes)
                        for task, head in sorted(grown.items())
                    ],
                )
            },
        )
        yield from change(summed(charged))
    return tuple(TaskId(task) for task in grown)


@operation
def logs(task: TaskId, after_cursor: int, limit: int) -> Operation[tuple[LogLine, ...]]:
    rows = yield from select(
        _Chunk,
        "SELECT task_id, cursor, stream, data FROM log_chunks WHERE task_id = :task AND cursor > :after "
        "ORDER BY cursor LIMIT :limit",
        {"task": task, "after": after_cursor, "limit": limit},
    )
    rows = yield from opened(rows, LOG_DATA)
    return tuple(
        LogLine(row.cursor, row.cursor >> EPOCH_SHIFT, row.stream, bytes(row.data)) for row in rows
    )


@operation
def finished_with_logs(before: Instant, limit: int) -> Operation[tuple[TaskId, ...]]:
    found = yield from values(
        TaskId,
        "SELECT h.task_id FROM log_heads h JOIN tasks t ON t.id = h.task_id "
        "WHERE t.finished_at < :before AND t.holding = 0 AND t.parent_id IS NULL ORDER BY h.task_id LIMIT :limit",
        {"before": before, "limit": limit},
    )
    return tuple(found)


@operation
def seal_logs(
    task: TaskId, sha256: str, size: int, at: Instant, stored: StoredBytes = PLAIN
) -> Operation[None]:
    """Replace the rows by the artifact with the same content; no effect while the task may still print."""
    owners = yield from select(
        TaskOwner,
        "SELECT user_id, team_id FROM tasks WHERE id = :task AND finished_at IS NOT NULL AND holding = 0 "
        "/*postgresql FOR UPDATE*/",
        {"task": task},
    )
    for owner in owners:
        account = holder_of(owner.user_id, owner.team_id)
        yield from put_artifact(sha256, size, at, stored, account)
        yield from put_reference(sha256, "log", task, owner.user_id, team=owner.team_id)
        yield Statement(
            "UPDATE tasks SET log_sha256 = :sha256 WHERE id = :task",
            {"sha256": sha256, "task": task},
        )
        yield from delete_log_rows([(holder_of(owner.user_id, owner.team_id), task)])


def delete_log_rows(owned: Sequence[tuple[Account, TaskId]]) -> Operation[None]:
    accounts = {task: account for account, task in owned}
    tasks = {"tasks": of_ids(accounts)}
    rows = yield from select(
        _LogCharge,
        "DELETE FROM log_heads WHERE task_id IN (SELECT id FROM {tasks} AS i) RETURNING task_id, stored_bytes",
        {},
        tasks,
    )
    if rows:
        yield Statement(
            "DELETE FROM log_chunks WHERE task_id IN (SELECT id FROM {tasks} AS i)", {}, tasks
        )
        yield from change(summed((accounts[row.task_id], -row.stored_bytes) for row in rows))

"""Progress of running attempts: phases, output, and checkpoints that the next attempt begins with.

A task has one checkpoint, the newest, saved with all its files or not at all: each was uploaded under this lease or is
visible through it (an input, or a file of the previous checkpoint). Its references are strong; those of the previous
one are dropped, so that frequent saves do not fill the disk. Kept for `Settings.keep_checkpoints_s` after the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpool.core.ids import TaskId, UserId
from gpool.core.model import MIB, InputFile, Instant
from gpool.core.permissions import TeamId
from gpool.server.store.generated_rows import LogHeadsRecord
from gpool.server.store.operations.tasks.artifacts import (
    ArtifactSize,
    TaskOwner,
    count,
    holder_of,
    put_artifact,
    put_reference,
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
from gpool.server.store.values import LogLine
from gpool.wire.frames import Checkpointed, Hold, LogChunk, Reached

NOTES = (("task", "int"), ("epoch", "int"), ("note", "text"))
PAIRS = (("task", "int"), ("sha256", "text"))


class _Saving(NamedTuple):
    id: TaskId
    user_id: UserId
    team_id: TeamId | None
    body: str
    epoch: int | None
    manifest: str | None


class _Manifest(NamedTuple):
    task_id: TaskId
    manifest: str


def note_phases(reached: Sequence[Reached], at: Instant) -> Operation[None]:
    yield from add_notes([(item.task, item.epoch, item.phase.value) for item in reached], at)


def add_notes(rows: Sequence[Row], at: Instant) -> Operation[None]:
    yield Statement(
        "INSERT INTO attempt_notes (task_id, epoch, note, at) SELECT n.task, n.epoch, n.note, CAST(:at AS BIGINT) "
        "FROM {notes} AS n WHERE true ON CONFLICT (task_id, epoch, note) DO NOTHING",
        {"at": at},
        {"notes": Relation(NOTES, sorted(set(rows)))},
    )


def save(saved: Mapping[TaskId, Checkpointed], at: Instant) -> Operation[tuple[Hold, ...]]:
    """Save a checkpoint per task, whose lease the caller has locked; return the leases of rejected ones."""
    rows = yield from select(
        _Saving,
        "SELECT t.id, t.user_id, t.team_id, s.body, c.epoch, c.manifest FROM {tasks} AS i "
        "JOIN tasks t ON t.id = i.id JOIN specs s ON s.id = t.spec_id LEFT JOIN checkpoints c ON c.task_id = t.id",
        {},
        {"tasks": of_ids(saved)},
    )
    unusable: list[Hold] = []
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
        if not (yield from _keep(item, row.user_id, row.team_id)):
            unusable.append(Hold(row.id, item.epoch))
            continue
        yield Statement(
            "INSERT INTO checkpoints (task_id, epoch, saved_at, size_bytes, files, manifest) "
            "VALUES (:task, :epoch, :at, :size, :files, :manifest) ON CONFLICT (task_id) DO UPDATE SET "
            "epoch = excluded.epoch, saved_at = excluded.saved_at, size_bytes = excluded.size_bytes, "
            "files = excluded.files, manifest = excluded.manifest",
            {
                "task": row.id,
                "epoch": item.epoch,
                "at": at,
                "size": sum(file.size_bytes for file in item.files),
                "files": len(item.files),
                "manifest": text,
            },
        )
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
    yield Statement(
        "DELETE FROM artifact_refs WHERE kind = 'checkpoint' AND EXISTS (SELECT 1 FROM {dropped} AS d "
        "WHERE d.task = artifact_refs.holder AND d.sha256 = artifact_refs.sha256)",
        {},
        relation,
    )
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
        _Manifest,
        "SELECT c.task_id, c.manifest FROM checkpoints c JOIN tasks t ON t.id = c.task_id "
        "WHERE t.finished_at < :before AND t.holding = 0 ORDER BY c.task_id LIMIT :limit",
        {"before": before, "limit": limit},
    )
    if rows:
        yield Statement(
            "DELETE FROM checkpoints WHERE task_id IN (SELECT id FROM {tasks} AS i)",
            {},
            {"tasks": of_ids(row.task_id for row in rows)},
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
STDOUT, STDERR = 1, 2
EPOCH_SHIFT = 32
"""A cursor is the epoch, then the sequence of the chunk: it grows with time and needs no counter."""

CURSORS = (("task", "int"), ("cursor", "int"))
CHUNKS = (*CURSORS, ("stream", "int"), ("data", "blob"))
HEADS = (("task", "int"), ("size_bytes", "int"), ("truncated", "int"))


class _Cursor(NamedTuple):
    task_id: TaskId
    cursor: int


class _Chunk(NamedTuple):
    cursor: int
    stream: int
    data: bytes


def append_chunks(chunks: Sequence[LogChunk]) -> Operation[tuple[TaskId, ...]]:
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
        LogHeadsRecord,
        "SELECT h.task_id, h.size_bytes, h.truncated FROM {tasks} AS i JOIN log_heads h ON h.task_id = i.id",
        {},
        {"tasks": of_ids(c.task for c in chunks)},
    )
    heads: dict[int, tuple[int, int]] = {
        row.task_id: (row.size_bytes, row.truncated) for row in rows
    }
    new: list[Row] = []
    grown: dict[int, tuple[int, int]] = {}
    for (task, cursor), chunk in sorted(wanted.items()):
        size, cut = heads.get(task, (0, 0))
        if cut:
            continue
        stream, data = STDOUT if chunk.stream == STDOUT else STDERR, chunk.data
        if size + max(len(data), LEAST_BYTES) > MAX_LOG_BYTES:
            stream, data, cut = STDERR, TRUNCATED, 1
        heads[task] = grown[task] = (size + max(len(data), LEAST_BYTES), cut)
        new.append((task, cursor, stream, data))
    if new:
        yield Statement(
            "INSERT INTO log_chunks (task_id, cursor, stream, data) "
            "SELECT c.task, c.cursor, c.stream, c.data FROM {chunks} AS c",
            {},
            {"chunks": Relation(CHUNKS, new)},
        )
        yield Statement(
            "INSERT INTO log_heads (task_id, size_bytes, truncated) "
            "SELECT h.task, h.size_bytes, h.truncated FROM {heads} AS h WHERE true "
            "ON CONFLICT (task_id) DO UPDATE SET size_bytes = excluded.size_bytes, truncated = excluded.truncated",
            {},
            {"heads": Relation(HEADS, [(task, *head) for task, head in sorted(grown.items())])},
        )
    return tuple(TaskId(task) for task in grown)


@operation
def logs(task: TaskId, after_cursor: int, limit: int) -> Operation[tuple[LogLine, ...]]:
    rows = yield from select(
        _Chunk,
        "SELECT cursor, stream, data FROM log_chunks WHERE task_id = :task AND cursor > :after "
        "ORDER BY cursor LIMIT :limit",
        {"task": task, "after": after_cursor, "limit": limit},
    )
    return tuple(
        LogLine(row.cursor, row.cursor >> EPOCH_SHIFT, row.stream, bytes(row.data)) for row in rows
    )


@operation
def finished_with_logs(before: Instant, limit: int) -> Operation[tuple[TaskId, ...]]:
    found = yield from values(
        TaskId,
        "SELECT h.task_id FROM log_heads h JOIN tasks t ON t.id = h.task_id "
        "WHERE t.finished_at < :before AND t.holding = 0 ORDER BY h.task_id LIMIT :limit",
        {"before": before, "limit": limit},
    )
    return tuple(found)


@operation
def seal_logs(task: TaskId, sha256: str, size: int, at: Instant) -> Operation[None]:
    """Replace the rows by the artifact with the same content; no effect while the task may still print."""
    owners = yield from select(
        TaskOwner,
        "SELECT user_id, team_id FROM tasks WHERE id = :task AND finished_at IS NOT NULL AND holding = 0 "
        "/*postgresql FOR UPDATE*/",
        {"task": task},
    )
    for owner in owners:
        yield from put_artifact(sha256, size, at)
        yield from put_reference(sha256, "log", task, owner.user_id, team=owner.team_id)
        yield Statement(
            "UPDATE tasks SET log_sha256 = :sha256 WHERE id = :task",
            {"sha256": sha256, "task": task},
        )
        yield Statement("DELETE FROM log_chunks WHERE task_id = :task", {"task": task})
        yield Statement("DELETE FROM log_heads WHERE task_id = :task", {"task": task})

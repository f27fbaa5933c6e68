"""Output of attempts: rows while a task runs, one artifact afterwards. Limited per task; (task, epoch, sequence) is unique."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpool.core.ids import TaskId
from gpool.core.model import MIB, Instant
from gpool.server.store.generated_rows import LogHeadsRecord
from gpool.server.store.operation import operation
from gpool.server.store.operations.tasks.artifacts import TaskOwner, put_artifact, put_reference
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.queries import select, values
from gpool.server.store.rows import of_ids
from gpool.server.store.values import LogLine
from gpool.wire.frames import LogChunk

MAX_LOG_BYTES = 16 * MIB
"""Limit of a task's output over all its attempts; a last line says that output was dropped."""

LEAST_BYTES = 16
"""Least size that a chunk counts for: its row needs space too, and a node may send any number of chunks."""

TRUNCATED = b"output truncated\n"
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

"""Output of attempts: rows while a task runs, one artifact afterwards. Capped for each task, deduplicated by (task, epoch, sequence)."""

from __future__ import annotations

from collections.abc import Sequence

from gpool.core.ids import TaskId, UserId
from gpool.core.model import MIB, Instant
from gpool.server.store.operation import operation
from gpool.server.store.operations.tasks.artifacts import put_artifact, put_reference
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.rows import of_ids
from gpool.server.store.values import LogLine
from gpool.wire.frames import LogChunk

MAX_LOG_BYTES = 16 * MIB
"""A task's output over all its attempts; then one line says that there was more."""

LEAST_BYTES = 16
"""What a piece of output counts for at least: its row takes room too, and a node may send as many as it likes."""

TRUNCATED = b"output truncated\n"
STDOUT, STDERR = 1, 2
EPOCH_SHIFT = 32
"""A cursor is the epoch, then the sequence within it: it grows with time and needs no counter."""

CURSORS = (("task", "int"), ("cursor", "int"))
CHUNKS = (*CURSORS, ("stream", "int"), ("data", "blob"))
HEADS = (("task", "int"), ("size_bytes", "int"), ("truncated", "int"))


def append_chunks(chunks: Sequence[LogChunk]) -> Operation[tuple[TaskId, ...]]:
    """Writes what is new of chunks that the current leases sent; gives the tasks whose logs grew."""
    if not chunks:
        return ()
    wanted = {
        (c.task, c.epoch << EPOCH_SHIFT | c.sequence): c
        for c in chunks
        if c.data and not c.sequence >> EPOCH_SHIFT  # one beyond would stand for another epoch's
    }
    found = yield Statement(
        "SELECT l.task_id, l.cursor FROM {wanted} AS w "
        "JOIN log_chunks l ON l.task_id = w.task AND l.cursor = w.cursor",
        {},
        {"wanted": Relation(CURSORS, sorted(wanted))},
    )
    for task, cursor in found:
        del wanted[task, cursor]
    rows = yield Statement(
        "SELECT h.task_id, h.size_bytes, h.truncated FROM {tasks} AS i JOIN log_heads h ON h.task_id = i.id",
        {},
        {"tasks": of_ids(c.task for c in chunks)},
    )
    heads: dict[int, tuple[int, int]] = {task: (size, cut) for task, size, cut in rows}
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
    rows = yield Statement(
        "SELECT cursor, stream, data FROM log_chunks WHERE task_id = :task AND cursor > :after "
        "ORDER BY cursor LIMIT :limit",
        {"task": task, "after": after_cursor, "limit": limit},
    )
    return tuple(
        LogLine(cursor, cursor >> EPOCH_SHIFT, stream, bytes(data)) for cursor, stream, data in rows
    )


@operation
def finished_with_logs(before: Instant, limit: int) -> Operation[tuple[TaskId, ...]]:
    """Tasks that ended before that time, hold nothing, and still have their output in rows."""
    rows = yield Statement(
        "SELECT h.task_id FROM log_heads h JOIN tasks t ON t.id = h.task_id "
        "WHERE t.finished_at < :before AND t.holding = 0 ORDER BY h.task_id LIMIT :limit",
        {"before": before, "limit": limit},
    )
    return tuple(TaskId(row[0]) for row in rows)


@operation
def seal_logs(task: TaskId, sha256: str, size: int, at: Instant) -> Operation[None]:
    """The rows are replaced by the artifact that holds the same. Nothing happens while the task may still print."""
    rows = yield Statement(
        "SELECT user_id, team_id FROM tasks WHERE id = :task AND finished_at IS NOT NULL AND holding = 0 "
        "/*postgresql FOR UPDATE*/",
        {"task": task},
    )
    if not rows:
        return
    yield from put_artifact(sha256, size, at)
    user, team = rows[0]
    yield from put_reference(sha256, "log", task, UserId(user), team=team)
    yield Statement(
        "UPDATE tasks SET log_sha256 = :sha256 WHERE id = :task", {"sha256": sha256, "task": task}
    )
    yield Statement("DELETE FROM log_chunks WHERE task_id = :task", {"task": task})
    yield Statement("DELETE FROM log_heads WHERE task_id = :task", {"task": task})

"""Progress of running attempts: phases, and checkpoints that the next attempt begins with.

A task has one checkpoint, the newest, saved with all its files or not at all: each was uploaded under this lease or is
visible through it (an input, or a file of the previous checkpoint). Its references are strong; those of the previous
one are dropped, so that frequent saves do not fill the disk. Kept for `Settings.keep_checkpoints_s` after the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpool.core.ids import TaskId, UserId
from gpool.core.model import InputFile, Instant
from gpool.core.permissions import TeamId
from gpool.server.store.operation import operation
from gpool.server.store.operations.tasks.artifacts import ArtifactSize
from gpool.server.store.operations.tasks.storage import count, holder_of
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.queries import select
from gpool.server.store.rows import manifest_from, manifest_text, of_ids, of_names, spec_from
from gpool.wire.frames import Checkpointed, Hold, Reached

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

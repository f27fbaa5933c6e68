"""Deleting ended tasks, and shrinking them to a summary when their data expires. Open and held tasks are not touched.

Deleting a task removes its rows, its references to artifacts, and the spec and batch that no other task uses. A shrunk
task keeps status, times, node and command. Both return the artifacts that nothing refers to any more; the caller removes
their files after the commit. The account gets back exactly what it was charged.
One file because deleting and shrinking drop the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpool.core.ids import BatchId, SpecId, TaskId, UserId
from gpool.core.model import Instant
from gpool.core.permissions import TeamId
from gpool.server.store.generated_rows import TasksRecord
from gpool.server.store.operations.tasks.artifacts import STRONG, ArtifactReference, release
from gpool.server.store.operations.tasks.progress import delete_log_rows
from gpool.server.store.operations.tasks.storage import (
    SPEC_BYTES,
    SUMMARY_BYTES,
    Account,
    change,
    holder_of,
    own_references,
    summed,
)
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import columns, exists, of_ids, select, spec_from, spec_text, values
from gpool.server.store.sealing import ERROR_TEXT, SPEC_BODY, TEXT_MARK, opened, sealing

ENDED = "t.finished_at IS NOT NULL AND t.holding = 0"
OF_TASKS = "kind IN ('payload', 'result', 'log', 'checkpoint', 'lease')"
ERROR_LETTERS = 200
"""Length of the error text that a summary keeps."""


class _EndedTask(NamedTuple):
    id: TaskId
    user_id: UserId
    team_id: TeamId | None
    batch_id: BatchId
    spec_id: SpecId
    stored_bytes: int

    @property
    def account(self) -> Account:
        return holder_of(self.user_id, self.team_id)


class _Charged(NamedTuple):
    id: int
    stored_bytes: int


class _ExpiredSpec(NamedTuple):
    id: SpecId
    body: str
    stored_bytes: int


class _ErrorText(NamedTuple):
    id: TaskId
    error_text: str


class DeletedTasks(NamedTuple):
    tasks: tuple[TaskId, ...]
    artifacts: tuple[str, ...]  # to remove: nothing refers to them


TASK = columns(_EndedTask, TasksRecord, "t")


# ---- deleting


@operation
def delete_tasks(ids: Sequence[TaskId]) -> Operation[DeletedTasks]:
    """Delete those of the tasks that have ended and are released by their nodes."""
    rows = yield from select(
        _EndedTask,
        f"SELECT {TASK} FROM {{wanted}} AS w JOIN tasks t ON t.id = w.id WHERE {ENDED}",  # noqa: S608
        {},
        {"wanted": of_ids(ids)},
    )
    return (yield from _delete(rows))


@operation
def delete_batch(batch: BatchId, limit: int) -> Operation[DeletedTasks]:
    """Delete up to `limit` ended tasks of the batch; with the last of them the batch itself, if it is closed."""
    rows = yield from select(
        _EndedTask,
        f"SELECT {TASK} FROM tasks t WHERE t.batch_id = :batch AND t.sequence IS NOT NULL AND {ENDED} "  # noqa: S608
        "ORDER BY t.sequence LIMIT :limit",
        {"batch": batch, "limit": limit},
    )
    deleted = yield from _delete(rows)
    if not rows:
        yield from _delete_batches([batch])
    return deleted


@operation
def is_held(batch: BatchId) -> Operation[bool]:
    """Return whether a node still holds a cancelled task of the batch."""
    sql = "SELECT 1 FROM tasks WHERE holding = 1 AND batch_id = :batch LIMIT 1"
    return (yield from exists(sql, {"batch": batch}))


@operation
def delete_expired(before: Instant, limit: int) -> Operation[DeletedTasks]:
    """Delete up to `limit` tasks that ended before then, whole or shrunk."""
    rows: list[_EndedTask] = []
    for which in ("IS NOT NULL", "IS NULL"):
        rows += yield from select(
            _EndedTask,
            f"SELECT {TASK} FROM tasks t WHERE t.shrunk_at {which} AND t.finished_at < :before AND {ENDED} "  # noqa: S608
            "ORDER BY t.finished_at LIMIT :limit",
            {"before": before, "limit": limit - len(rows)},
        )
    yield from _close_batches({row.batch_id for row in rows})
    return (yield from _delete(rows))


@operation
def delete_tasks_of(account: Account, limit: int) -> Operation[DeletedTasks]:
    """Delete up to `limit` ended tasks of an account that is being deleted."""
    whose = "t.team_id = :id" if account[0] == "team" else "t.user_id = :id AND t.team_id IS NULL"
    rows = yield from select(
        _EndedTask,
        f"SELECT {TASK} FROM tasks t WHERE {whose} AND {ENDED} ORDER BY t.id LIMIT :limit",  # noqa: S608
        {"id": account[1], "limit": limit},
    )
    yield from _close_batches({row.batch_id for row in rows})
    return (yield from _delete(rows))


def _delete(rows: Sequence[_EndedTask]) -> Operation[DeletedTasks]:
    if not rows:
        return DeletedTasks((), ())
    siblings = yield from select(
        _EndedTask,
        f"SELECT {TASK} FROM {{parents}} AS p JOIN tasks t ON t.parent_id = p.id WHERE {ENDED}",  # noqa: S608
        {},
        {"parents": of_ids(row.id for row in rows)},
    )
    rows = list({row.id: row for row in (*rows, *siblings)}.values())
    dropped = yield from _drop_data(rows)
    tasks = {"tasks": of_ids(row.id for row in rows)}
    for table in (
        *("attempts", "attempt_notes", "members", "gangs"),
        *("verifications", "siblings", "failed_checks"),
    ):
        yield Statement(
            f"DELETE FROM {table} WHERE task_id IN (SELECT id FROM {{tasks}} AS i)",  # noqa: S608
            {},
            tasks,
        )
    yield Statement("DELETE FROM tasks WHERE id IN (SELECT id FROM {tasks} AS i)", {}, tasks)
    accounts = {row.spec_id: row.account for row in rows}
    specs = yield from select(
        _Charged,
        "DELETE FROM specs WHERE id IN (SELECT id FROM {specs} AS i) "
        "AND NOT EXISTS (SELECT 1 FROM tasks t WHERE t.spec_id = specs.id) RETURNING id, stored_bytes",
        {},
        {"specs": of_ids(accounts)},
    )
    dropped += yield from _drop_specs([spec.id for spec in specs])
    yield from _delete_batches({row.batch_id for row in rows})
    yield from change(
        summed(
            (
                *((row.account, -row.stored_bytes) for row in rows),
                *((accounts[SpecId(spec.id)], -spec.stored_bytes) for spec in specs),
            )
        )
    )
    artifacts = yield from _release(dropped)
    return DeletedTasks(tuple(row.id for row in rows), artifacts)


def _delete_batches(batches: Iterable[BatchId]) -> Operation[None]:
    yield Statement(
        "DELETE FROM batches WHERE id IN (SELECT id FROM {batches} AS i) AND closed = 1 AND done >= total "
        "AND NOT EXISTS (SELECT 1 FROM tasks t WHERE t.batch_id = batches.id AND t.sequence IS NOT NULL)",
        {},
        {"batches": of_ids(batches)},
    )


def _close_batches(batches: Iterable[BatchId]) -> Operation[None]:
    """Close batches whose tasks have all ended, so that they are deleted with their last task."""
    yield Statement(
        "UPDATE batches SET closed = 1 WHERE id IN (SELECT id FROM {batches} AS i) AND done >= total",
        {},
        {"batches": of_ids(batches)},
    )


# ---- shrinking


@operation
def shrink_expired(before: Instant, at: Instant, limit: int) -> Operation[DeletedTasks]:
    """Shrink up to `limit` tasks that ended before then to a summary."""
    rows = yield from select(
        _EndedTask,
        f"SELECT {TASK} FROM tasks t WHERE t.shrunk_at IS NULL AND t.finished_at < :before AND {ENDED} "  # noqa: S608
        "ORDER BY t.finished_at LIMIT :limit",
        {"before": before, "limit": limit},
    )
    return (yield from _shrink(rows, at))


def shrink_tasks(ids: Sequence[TaskId], at: Instant) -> Operation[DeletedTasks]:
    """Shrink those of the tasks that have ended and are released by their nodes."""
    rows = yield from select(
        _EndedTask,
        f"SELECT {TASK} FROM {{wanted}} AS w JOIN tasks t ON t.id = w.id WHERE {ENDED} AND t.shrunk_at IS NULL",  # noqa: S608
        {},
        {"wanted": of_ids(ids)},
    )
    return (yield from _shrink(rows, at))


def _shrink(rows: Sequence[_EndedTask], at: Instant) -> Operation[DeletedTasks]:
    if not rows:
        return DeletedTasks((), ())
    dropped = yield from _drop_data(rows)
    tasks = {"tasks": of_ids(row.id for row in rows)}
    of_these = "IN (SELECT id FROM {tasks} AS i)"
    for sql in (
        f"DELETE FROM attempt_notes WHERE task_id {of_these}",  # noqa: S608
        f"UPDATE attempts SET detail = '' WHERE task_id {of_these} AND detail <> ''",  # noqa: S608
        f"UPDATE members SET detail = '', outputs = NULL WHERE task_id {of_these}",  # noqa: S608
    ):
        yield Statement(sql, {}, tasks)
    yield Statement(
        "UPDATE tasks SET payload = NULL, value = NULL, progress = NULL, outputs = NULL, payload_sha256 = '', value_sha256 = '', "  # noqa: S608
        "log_sha256 = '', shrunk_at = :at, "
        f"error_text = CASE WHEN error_text LIKE '{TEXT_MARK}%' THEN error_text ELSE substr(error_text, 1, {ERROR_LETTERS}) END, "
        f"stored_bytes = CASE WHEN stored_bytes > {SUMMARY_BYTES} THEN {SUMMARY_BYTES} ELSE stored_bytes END "
        f"WHERE id {of_these}",
        {"at": at},
        tasks,
    )
    yield from _shrink_errors(rows)
    yield from change(
        summed((row.account, min(0, SUMMARY_BYTES - row.stored_bytes)) for row in rows)
    )
    dropped += yield from _shrink_specs({row.spec_id: row.account for row in rows})
    artifacts = yield from _release(dropped)
    return DeletedTasks(tuple(row.id for row in rows), artifacts)


def _shrink_errors(rows: Sequence[_EndedTask]) -> Operation[None]:
    """Cut sealed error texts, which SQL cannot."""
    accounts = {row.id: row.account for row in rows}
    found = yield from select(
        _ErrorText,
        "SELECT t.id, t.error_text FROM {tasks} AS i JOIN tasks t ON t.id = i.id "  # noqa: S608
        f"WHERE t.error_text LIKE '{TEXT_MARK}%'",
        {},
        {"tasks": of_ids(accounts)},
    )
    if not found:
        return
    texts = yield from opened(found, ERROR_TEXT)
    seal = yield from sealing({accounts[row.id] for row in texts})
    cut = [
        (
            row.id,
            seal.text(
                accounts[row.id], ERROR_TEXT.place_of(row.id), row.error_text[:ERROR_LETTERS]
            ),
        )
        for row in texts
    ]
    yield Statement(
        "UPDATE tasks SET error_text = c.error_text FROM {cut} AS c WHERE tasks.id = c.id",
        {},
        {"cut": Relation((("id", "int"), ("error_text", "text")), cut)},
    )


def _shrink_specs(accounts: dict[SpecId, Account]) -> Operation[list[ArtifactReference]]:
    """Drop inputs, environment variables and secrets of specs without a whole task.

    Their digest changes, so that an equal submission gets a new spec, whose artifacts are checked.
    """
    specs = yield from select(
        _ExpiredSpec,
        "SELECT s.id, s.body, s.stored_bytes FROM {specs} AS i JOIN specs s ON s.id = i.id "
        "WHERE NOT EXISTS (SELECT 1 FROM tasks t WHERE t.spec_id = s.id AND t.shrunk_at IS NULL)",
        {},
        {"specs": of_ids(accounts)},
    )
    if not specs:
        return []
    specs = yield from opened(specs, SPEC_BODY)
    seal = yield from sealing({accounts[spec.id] for spec in specs})
    shrunk: list[tuple[int, str, str, int]] = []
    changes: list[tuple[Account, int]] = []
    for spec in specs:
        body = spec_text(replace(spec_from(spec.body), inputs=(), env=()))
        size = min(spec.stored_bytes, SPEC_BYTES + len(body.encode()))
        body = seal.text(accounts[spec.id], SPEC_BODY.place_of(spec.id), body)
        shrunk.append((spec.id, f"expired {spec.id}", body, size))
        changes.append((accounts[spec.id], size - spec.stored_bytes))
    names = (("id", "int"), ("digest", "text"), ("body", "text"), ("stored_bytes", "int"))
    yield Statement(
        "UPDATE specs SET digest = e.digest, body = e.body, stored_bytes = e.stored_bytes "
        "FROM {shrunk} AS e WHERE specs.id = e.id",
        {},
        {"shrunk": Relation(names, sorted(shrunk))},
    )
    yield from change(summed(changes))
    return (yield from _drop_specs([spec.id for spec in specs]))


# ---- shared parts


def _drop_data(rows: Sequence[_EndedTask]) -> Operation[list[ArtifactReference]]:
    """Delete references, logs and checkpoints of the tasks."""
    tasks = {"tasks": of_ids(row.id for row in rows)}
    accounts = {row.id: row.account for row in rows}
    dropped = yield from select(
        ArtifactReference,
        f"DELETE FROM artifact_refs WHERE holder IN (SELECT id FROM {{tasks}} AS i) AND {OF_TASKS} "  # noqa: S608
        "RETURNING user_id, team_id, sha256",
        {},
        tasks,
    )
    saved = yield from select(
        _Charged,
        "DELETE FROM checkpoints WHERE task_id IN (SELECT id FROM {tasks} AS i) RETURNING task_id, stored_bytes",
        {},
        tasks,
    )
    yield from change(summed((accounts[TaskId(row.id)], -row.stored_bytes) for row in saved))
    yield from delete_log_rows([(row.account, row.id) for row in rows])
    return dropped


def _drop_specs(specs: Sequence[int]) -> Operation[list[ArtifactReference]]:
    if not specs:
        return []
    wanted = {"specs": of_ids(specs)}
    yield Statement(
        "DELETE FROM task_secrets WHERE spec_id IN (SELECT id FROM {specs} AS i)", {}, wanted
    )
    return (
        yield from select(
            ArtifactReference,
            "DELETE FROM artifact_refs WHERE kind = 'spec' AND holder IN (SELECT id FROM {specs} AS i) "
            "RETURNING user_id, team_id, sha256",
            {},
            wanted,
        )
    )


def _release(dropped: list[ArtifactReference]) -> Operation[tuple[str, ...]]:
    """Release the references, and the uploads of their users that no other task names."""
    if not dropped:
        return ()
    pairs = sorted({(row.sha256, row.user_id) for row in dropped})
    uploads = yield from select(
        ArtifactReference,
        "DELETE FROM artifact_refs WHERE kind = 'upload' AND (sha256, holder) IN (SELECT sha256, user_id FROM {dropped} AS d) "  # noqa: S608
        "AND NOT EXISTS (SELECT 1 FROM artifact_refs r WHERE r.sha256 = artifact_refs.sha256 "
        f"AND r.user_id = artifact_refs.holder AND r.kind IN {STRONG}) RETURNING user_id, team_id, sha256",
        {},
        {"dropped": Relation((("sha256", "text"), ("user_id", "int")), pairs)},
    )
    return (yield from release([*dropped, *uploads]))


# ---- uploads


class StoredArtifact(NamedTuple):
    sha256: str
    size_bytes: int
    kind: str  # of one of its references; the least in the order of words


class _Use(NamedTuple):
    kind: str
    holder: int


@operation
def artifacts_of(
    account: Account, below: tuple[int, str], limit: int
) -> Operation[tuple[StoredArtifact, ...]]:
    """Artifacts that the account is charged for, largest first, after (size, sha256) `below`."""
    rows = yield from select(
        StoredArtifact,
        f"SELECT a.sha256, a.size_bytes, COALESCE((SELECT MIN(r.kind) FROM artifact_refs r WHERE r.sha256 = a.sha256 AND {own_references(account)}), '') "  # noqa: S608
        "FROM stored s JOIN artifacts a ON a.sha256 = s.sha256 WHERE s.kind = :kind AND s.id = :id "
        "AND (a.size_bytes < :size OR a.size_bytes = :size AND a.sha256 > :sha256) "
        "ORDER BY a.size_bytes DESC, a.sha256 LIMIT :limit",
        {
            "kind": account[0],
            "id": account[1],
            "size": below[0],
            "sha256": below[1],
            "limit": limit,
        },
    )
    return tuple(rows)


@operation
def delete_upload(
    user: UserId, sha256: str, key: int | None = None, team: TeamId | None = None
) -> Operation[DeletedTasks | TaskId | None]:
    """Delete the user's upload; None: there is none. A task that names the artifact is returned instead.

    `key`: an API key for `team` only, which deletes its own uploads and learns of the team's tasks only.
    """
    of_team = "" if key is None else "AND r.team_id = :team "
    used = yield from select(
        _Use,
        "SELECT r.kind, r.holder FROM artifact_refs r WHERE r.sha256 = :sha256 AND r.user_id = :user "  # noqa: S608
        f"{of_team}AND r.kind IN {STRONG} LIMIT 1",
        {"sha256": sha256, "user": user} | ({} if key is None else {"team": team}),
    )
    for use in used:
        if use.kind != "spec":
            return TaskId(use.holder)
        found = yield from values(
            TaskId, "SELECT id FROM tasks WHERE spec_id = :spec LIMIT 1", {"spec": use.holder}
        )
        return found[0] if found else TaskId(use.holder)
    by_key = "" if key is None else "AND holder = :key "
    dropped = yield from select(
        ArtifactReference,
        "DELETE FROM artifact_refs WHERE sha256 = :sha256 AND kind = 'upload' AND user_id = :user "  # noqa: S608
        f"{by_key}RETURNING user_id, team_id, sha256",
        {"sha256": sha256, "user": user} | ({} if key is None else {"key": key}),
    )
    if not dropped:
        return None
    return DeletedTasks((), (yield from release(dropped)))

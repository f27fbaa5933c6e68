"""What an attempt tells while it runs: its phases, and checkpoints for the next attempt to begin with.

A task has one checkpoint, the newest. It is taken whole or not at all: each file must have been uploaded under this
lease, or be one the lease can see anyway (an input, or a file of the checkpoint before). Its references are strong;
those of the checkpoint before are dropped with it, and bytes that nothing else refers to go with the next pruning:
a task that saves every ten minutes must not fill the disk. A checkpoint outlives its task for a while
(`Settings.keep_checkpoints_s`), then it is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import InputFile, Instant, TaskStatus
from gpool.server.store.operation import operation
from gpool.server.store.operations.gangs.members import can_make_room
from gpool.server.store.operations.tasks.storage import count, holder_of
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.rows import manifest_from, manifest_text, of_ids, of_names, spec_from
from gpool.server.store.values import PREEMPTING, Recording
from gpool.wire.frames import Checkpointed, Hold, Reached

NOTES = (("task", "int"), ("epoch", "int"), ("note", "text"))
HOLDS = (("id", "int"), ("epoch", "int"))
PAIRS = (("task", "int"), ("sha256", "text"))
MOVING = tuple(status.value for status in (TaskStatus.LEASED, TaskStatus.RUNNING))


def note_phases(reached: Sequence[Reached], at: Instant) -> Operation[None]:
    """Each phase of an attempt once; said again, it changes nothing."""
    yield from _note([(item.task, item.epoch, item.phase.value) for item in reached], at)


def _note(rows: Sequence[Row], at: Instant) -> Operation[None]:
    yield Statement(
        "INSERT INTO attempt_notes (task_id, epoch, note, at) SELECT n.task, n.epoch, n.note, CAST(:at AS BIGINT) "
        "FROM {notes} AS n WHERE true ON CONFLICT (task_id, epoch, note) DO NOTHING",
        {"at": at},
        {"notes": Relation(NOTES, sorted(set(rows)))},
    )


def save(saved: Mapping[int, Checkpointed], at: Instant) -> Operation[tuple[Hold, ...]]:
    """One for each task, its lease read and locked before; those that were not taken."""
    specs = yield Statement(
        "SELECT t.id, t.user_id, t.team_id, s.body, c.epoch, c.manifest FROM {tasks} AS i "
        "JOIN tasks t ON t.id = i.id JOIN specs s ON s.id = t.spec_id LEFT JOIN checkpoints c ON c.task_id = t.id",
        {},
        {"tasks": of_ids(saved)},
    )
    unusable: list[Hold] = []
    for task, user, team, body, before_epoch, before in specs:
        item = saved[task]
        directory = spec_from(body).checkpoint
        names = {file.path for file in item.files}
        inside = all(name.startswith(directory) and name != directory for name in names)
        if not directory or not inside or len(names) < len(item.files):
            unusable.append(Hold(task, item.epoch))
            continue
        text = manifest_text(item.files)
        if (before_epoch, before) == (item.epoch, text):
            continue  # said again
        if not (yield from _keep(item, user, team)):
            unusable.append(Hold(task, item.epoch))
            continue
        yield Statement(
            "INSERT INTO checkpoints (task_id, epoch, saved_at, size_bytes, files, manifest) "
            "VALUES (:task, :epoch, :at, :size, :files, :manifest) ON CONFLICT (task_id) DO UPDATE SET "
            "epoch = excluded.epoch, saved_at = excluded.saved_at, size_bytes = excluded.size_bytes, "
            "files = excluded.files, manifest = excluded.manifest",
            {
                "task": task,
                "epoch": item.epoch,
                "at": at,
                "size": sum(file.size_bytes for file in item.files),
                "files": len(item.files),
                "manifest": text,
            },
        )
        if before is not None:
            kept = {file.sha256 for file in item.files}
            yield from _drop(
                [(task, f.sha256) for f in manifest_from(before) if f.sha256 not in kept]
            )
    return tuple(unusable)


def _keep(item: Checkpointed, user: int, team: int | None) -> Operation[bool]:
    """References to all of its files, or to none."""
    sha256s = {file.sha256 for file in item.files}
    if not sha256s:
        return True
    found = yield Statement(
        "SELECT DISTINCT a.sha256, a.size_bytes FROM {wanted} AS w JOIN artifacts a ON a.sha256 = w.name "
        "JOIN artifact_refs r ON r.sha256 = a.sha256 JOIN tasks t ON t.id = :task WHERE "
        "r.kind = 'lease' AND r.holder = t.id AND r.epoch = :epoch OR r.kind = 'spec' AND r.holder = t.spec_id "
        "OR r.kind IN ('payload', 'checkpoint') AND r.holder = t.id",
        {"task": item.task, "epoch": item.epoch},
        {"wanted": of_names(sha256s)},
    )
    sizes: dict[str, int] = dict(found)
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
    """References of checkpoints that are over. What nothing but their own tasks' leases refers to may go at once."""
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


def manifests(tasks: Iterable[int]) -> Operation[dict[int, tuple[InputFile, ...]]]:
    """What attempts of these tasks begin with."""
    wanted = of_ids(tasks)
    if not wanted.rows:
        return {}
    rows = yield Statement(
        "SELECT c.task_id, c.manifest FROM {tasks} AS i JOIN checkpoints c ON c.task_id = i.id",
        {},
        {"tasks": wanted},
    )
    return {task: manifest_from(text) for task, text in rows}


@operation
def forget_checkpoints(before: Instant, limit: int) -> Operation[int]:
    """Of tasks that ended before; how many there were."""
    rows = yield Statement(
        "SELECT c.task_id, c.manifest FROM checkpoints c JOIN tasks t ON t.id = c.task_id "
        "WHERE t.finished_at < :before AND t.holding = 0 ORDER BY c.task_id LIMIT :limit",
        {"before": before, "limit": limit},
    )
    if rows:
        yield Statement(
            "DELETE FROM checkpoints WHERE task_id IN (SELECT id FROM {tasks} AS i)",
            {},
            {"tasks": of_ids(row[0] for row in rows)},
        )
        yield from _drop(
            [(task, file.sha256) for task, text in rows for file in manifest_from(text)]
        )
    return len(rows)


@operation
def preempt(ids: Sequence[TaskId], at: Instant) -> Operation[Recording]:
    """Those of them that nodes hold are to make room. Noted, so that a node that reconnects is told again."""
    rows = yield Statement(
        "SELECT t.id, t.epoch, t.node_id FROM {wanted} AS w JOIN tasks t ON t.id = w.id "  # noqa: S608
        f"WHERE t.holding = 1 AND t.status IN ({', '.join(map(repr, MOVING))}) "
        "/*postgresql ORDER BY t.id FOR UPDATE OF t*/",
        {},
        {"wanted": of_ids(ids)},
    )
    return (yield from _ask_to_stop(rows, at))


@operation
def preempt_if_current(holds: Sequence[Hold], term: int, at: Instant) -> Operation[Recording]:
    """Those of a plan's preemptions that still are as the plan saw them; none when another scheduler has taken over."""
    current = yield Statement(
        "SELECT term FROM scheduler_term WHERE id = 1 /*postgresql FOR SHARE*/"
    )
    if not current or current[0][0] != term:
        return Recording()
    rows = yield Statement(
        "SELECT t.id, t.epoch, t.node_id FROM {wanted} AS w JOIN tasks t ON t.id = w.id AND t.epoch = w.epoch "  # noqa: S608
        f"WHERE t.holding = 1 AND t.status IN ({', '.join(map(repr, MOVING))}) "
        "/*postgresql ORDER BY t.id FOR UPDATE OF t*/",
        {},
        {"wanted": Relation(HOLDS, [(hold.task, hold.epoch) for hold in holds])},
    )
    return (yield from _ask_to_stop(rows, at))


def _ask_to_stop(rows: Sequence[Row], at: Instant) -> Operation[Recording]:
    gangs = yield from can_make_room(task for task, _, node in rows if node is None)
    asked: list[tuple[NodeId, Hold]] = []
    for task, epoch, node in rows:
        nodes = gangs.get(task, ()) if node is None else (NodeId(node),)
        asked += [(each, Hold(task, epoch)) for each in nodes]
    holds = dict.fromkeys((hold.task, hold.epoch) for _, hold in asked)
    if not holds:
        return Recording()
    yield from _note([(*hold, PREEMPTING) for hold in holds], at)
    return Recording(to_preempt=tuple(asked), noted=tuple(TaskId(task) for task, _ in holds))


def preempting(node: NodeId) -> Operation[tuple[Hold, ...]]:
    """What this node holds and was asked to end for others."""
    rows = yield Statement(
        "SELECT t.id, t.epoch FROM tasks t JOIN attempt_notes n ON n.task_id = t.id AND n.epoch = t.epoch "  # noqa: S608
        f"WHERE t.node_id = :node AND t.holding = 1 AND t.status IN ({', '.join(map(repr, MOVING))}) "
        "AND n.note = :note ORDER BY t.id",
        {"node": node, "note": PREEMPTING},
    )
    return tuple(Hold(task, epoch) for task, epoch in rows)

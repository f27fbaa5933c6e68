"""Database file of a run: creation, rows read past the server, the state rebuilt from them.

The reader's own SQL shares no code with the store.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from gpool.core.model import Allocation, Slice, TaskStatus
from gpool.core.scheduler.state.events import QueuedTask, TasksLeased
from gpool.core.scheduler.state.shapes import shape_of
from gpool.core.scheduler.state.state import State, build
from gpool.server.scheduling.picture import StatePicture
from gpool.server.store import open_inline
from gpool.server.store.values import Picture
from gpool.testing.world.oracle import MemberSnapshot, TaskSnapshot, mark_of

TASKS = (
    "SELECT t.id, t.batch_id, t.spec_id, t.status, t.epoch, t.node_id, t.holding, t.allocation_number, t.allocation, "
    "t.reason, t.exit_code, t.value, t.error_text, t.sequence, t.tries FROM tasks t"
)
MEMBERS = (
    "SELECT task_id, epoch, rank, node_id, holding, allocation_number, allocation FROM members "
    "ORDER BY task_id, rank"
)
CHECKPOINTS = "SELECT task_id, epoch, manifest FROM checkpoints"
LOGS = "SELECT rowid, task_id, data FROM log_chunks WHERE rowid > ? ORDER BY rowid"


class DatabaseReader:
    def __init__(self, path: Path, node_names: Mapping[int, str]) -> None:
        self._raw = sqlite3.connect(path, isolation_level=None)
        self._nodes = node_names
        self._specs: dict[int, str] = {}
        self._seen: dict[int, tuple[object, ...]] = {}
        self._rows: dict[int, TaskSnapshot] = {}
        self._log = 0

    def rows(self) -> Mapping[int, TaskSnapshot]:
        """All tasks; an unchanged row is the same object as before."""
        found: dict[int, TaskSnapshot] = {}
        members = self._members()
        for raw in self._raw.execute(TASKS):
            task = raw[0]
            raw += members.get((task, raw[4]), ())
            if self._seen.get(task) != raw:
                self._seen[task] = raw
                self._rows[task] = self._row(raw)
            found[task] = self._rows[task]
        return found

    def _members(self) -> dict[tuple[int, int], tuple[MemberSnapshot, ...]]:
        found: dict[tuple[int, int], tuple[MemberSnapshot, ...]] = {}
        for task, epoch, rank, node, holding, number, text in self._raw.execute(MEMBERS):
            where = _allocation(number, text)
            made = MemberSnapshot(rank, self._nodes[node], bool(holding), where)
            found[task, epoch] = (*found.get((task, epoch), ()), made)
        return found

    def progress(self) -> Mapping[int, int]:
        """Progress in each task's checkpoint: the hash of its only file is that number."""
        found: dict[int, int] = {}
        for task, _, manifest in self._raw.execute(CHECKPOINTS):
            (file,) = json.loads(manifest)
            found[task] = int(file["sha256"], 16)
        return found

    def new_logs(self) -> Iterator[tuple[int, str]]:
        for number, task, data in self._raw.execute(LOGS, (self._log,)).fetchall():
            self._log = number
            for line in data.decode().splitlines():
                yield task, line

    def close(self) -> None:
        self._raw.close()

    def _row(self, raw: tuple[object, ...]) -> TaskSnapshot:
        task, batch, spec, status, epoch, node, holding, number, allocation = raw[:9]
        reason, exit_code, value, error_text, sequence, tries = raw[9:15]
        mark = mark_of(bytes(value or b""), str(error_text or ""))  # type: ignore[call-overload]
        return TaskSnapshot(
            task=task,  # type: ignore[arg-type]
            batch=batch,  # type: ignore[arg-type]
            submission=self._name(spec),  # type: ignore[arg-type]
            status=TaskStatus(str(status)),
            epoch=epoch,  # type: ignore[arg-type]
            node=None if node is None else self._nodes[node],  # type: ignore[index]
            holding=bool(holding),
            allocation=None if allocation is None else _allocation(number, str(allocation)),  # type: ignore[arg-type]
            reason=reason,  # type: ignore[arg-type]
            exit_code=exit_code,  # type: ignore[arg-type]
            mark=mark,
            sequence=sequence,  # type: ignore[arg-type]
            tries=tries,  # type: ignore[arg-type]
            members=raw[15:],  # type: ignore[arg-type]
        )

    def _name(self, spec: int) -> str:
        if spec not in self._specs:
            ((body,),) = self._raw.execute(
                "SELECT body FROM specs WHERE id = ?", (spec,)
            ).fetchall()
            self._specs[spec] = json.loads(body)["name"]
        return self._specs[spec]


def _allocation(number: int, text: str) -> Allocation:
    cpu_milli, memory_bytes, slices, *disk = json.loads(text)
    parts = tuple(Slice(*part) for part in slices)
    return Allocation(number, cpu_milli, memory_bytes, parts, *disk)


def rebuilt(picture: StatePicture, rows: Picture) -> State:
    """Scheduling state from stored rows, with the fields of nodes that only the picture has."""
    shapes = {id_: shape_of(spec, user, rows.teams.get(id_)) for id_, user, spec in rows.specs}
    state = build(
        [picture.nodes.annotated(row.node) for row in rows.nodes],
        [
            (shapes[row.spec], QueuedTask(row.task, row.epoch, row.queued_at))
            for row in rows.queued
            if row.task not in picture.rejected
        ],
        [(node, lease.allocation, shapes[lease.spec], lease.task) for node, lease in rows.held],
    )
    for gang in rows.gangs:
        lease = gang.lease
        shape, tasks = shapes[lease.spec], (lease.task,)
        state.fold(TasksLeased(gang.node, lease.allocation, shape, tasks, gang.members))
    return state


@lru_cache(maxsize=1)
def empty_database() -> bytes:
    with tempfile.TemporaryDirectory(dir=fast_folder()) as folder:
        path = Path(folder) / "empty.db"
        open_inline(path, synchronous="OFF").close()
        return path.read_bytes()


def fast_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None

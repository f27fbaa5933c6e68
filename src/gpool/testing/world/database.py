"""The server's database and disk: the real store, driven inline, whose commits take time and can be interrupted by a
crash.

The reader's own SQL shares no code with the store.

A group of operations is one transaction; callers are answered after its commit, in order. A crash before it discards
the group; a crash after it leaves effects that no caller knows of.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from gpool.core.errors import GpoolError
from gpool.core.model import Allocation, Slice, TaskStatus
from gpool.core.scheduler.state.events import QueuedTask, TasksLeased
from gpool.core.scheduler.state.state import State, build
from gpool.core.scheduler.state.waiting import shape_of
from gpool.server.scheduling.picture import StatePicture
from gpool.server.store import InlineStore, open_inline
from gpool.server.store.protocol import Operation
from gpool.server.store.values import Picture
from gpool.testing.simulation import Dice, VirtualLoop
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
        self.reads = 0  # of all tasks: one after each commit

    def rows(self) -> Mapping[int, TaskSnapshot]:
        """All tasks; an unchanged row is the same object as before."""
        self.reads += 1
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


T = TypeVar("T")
MS = 1_000
MAX_GROUP = 256


@dataclass(slots=True)
class PendingOperation:
    operation: Operation[Any]
    future: asyncio.Future[Any]
    value: Any = None
    error: BaseException | None = None

    def answer(self) -> None:
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(self.error)


@dataclass(slots=True)
class DiskSpeed:
    commit_us: tuple[int, int] = (100, 3 * MS)
    answer_us: tuple[int, int] = (10, 500)
    stuck_until_us: int = 0

    def stall_until(self, at_us: int) -> None:
        self.stuck_until_us = at_us


class SimulatedDisk:
    def __init__(
        self,
        loop: VirtualLoop,
        dice: Dice,
        file: InlineStore,
        pace: DiskSpeed,
        committed: Callable[[], None],
        broken: Callable[[str], None],
    ) -> None:
        self._loop, self._dice, self._file, self._pace = loop, dice, file, pace
        self._committed, self._broken = committed, broken
        self._waiting: list[PendingOperation] = []
        self._group: list[PendingOperation] = []
        self._open = False  # whether a transaction is open
        self._dead = False
        self.unanswered = 0
        self.commits = 0
        self.last_answer_us = -1

    # ---- the store's interface

    async def write(self, operation: Operation[T]) -> T:
        asked = self._ask(operation)
        self._waiting.append(asked)
        if not self._open and len(self._waiting) == 1:
            self._loop.call_soon(self._begin)
        answer: T = await asked.future
        return answer

    async def read(self, operation: Operation[T]) -> T:
        asked = self._ask(operation)
        self._loop.after_us(self._dice.between(10, 300), self._look, asked)
        answer: T = await asked.future
        return answer

    async def close(self) -> None: ...

    # ---- execution

    def _ask(self, operation: Operation[T]) -> PendingOperation:
        if self._dead:
            raise asyncio.CancelledError  # the process is gone: nothing of it reaches the disk
        self.unanswered += 1
        return PendingOperation(operation, self._loop.create_future())

    def _look(self, asked: PendingOperation) -> None:
        if self._dead:
            return
        self._run(asked, self._file.read_now)
        self._loop.after_us(self._dice.between(10, 300), self._answer, [asked])

    def _begin(self) -> None:
        if self._dead or self._open or not self._waiting:
            return
        self._group, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
        self._open = True
        self._file.begin_group()
        for asked in self._group:
            self._run(asked, self._file.write_now)
        self.executed(self._group)
        delay = self._dice.between(*self._pace.commit_us)
        delay = max(delay, self._pace.stuck_until_us - self._loop.us)
        self._loop.after_us(delay, self._commit)

    def executed(self, group: list[PendingOperation]) -> None:
        """A group has run and is not durable yet. Flaws answer here, too early."""

    def _run(self, asked: PendingOperation, run: Callable[[Operation[Any]], Any]) -> None:
        try:
            asked.value = run(asked.operation)
        except GpoolError as refusal:
            asked.error = refusal
        except Exception as error:  # noqa: BLE001 - any error of the store is a violation
            asked.error = error
            self._broken(f"the store raised {error!r}")

    def _commit(self) -> None:
        if self._dead:
            return
        self._file.commit_group()
        self._open = False
        self.commits += 1
        self._committed()
        group, self._group = self._group, []
        self._loop.after_us(self._dice.between(*self._pace.answer_us), self._answer_group, group)

    def _answer_group(self, group: list[PendingOperation]) -> None:
        if not self._dead:
            self._answer(group)
            self._begin()

    def _answer(self, group: list[PendingOperation]) -> None:
        if self._dead:
            return
        self.last_answer_us = self._loop.us
        self.unanswered -= len(group)
        for asked in group:
            asked.answer()

    @property
    def is_quiet(self) -> bool:
        return not self.unanswered and self.last_answer_us < self._loop.us

    def crash(self) -> bool:
        """Return whether an open group was discarded."""
        lost = self._open
        if self._open:
            self._file.abandon_group()
            self._open = False
        self._dead = True
        return lost

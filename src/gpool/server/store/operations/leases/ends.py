"""How leases end: the writes that reports, expiry and cancelling share. Which move is legal, `core.lifecycle` says.

A task ends once: the row is read (and locked) as held under this epoch, then written in the same transaction. Each
end takes the next `sequence` of its batch; the batch's row stays locked to the commit, so sequences are dense and
become visible in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
from gpool.core.lifecycle import Move, after, end_move
from gpool.core.model import SECOND, EndReason, Fault, Instant, Span, TaskStatus
from gpool.core.retries import Unstarted, archived_as, given_up, unstarted_move
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.rows import STATUS, of_ids, outputs_text, storable
from gpool.server.store.values import Ended, Requeued
from gpool.wire.frames import Finished

DETAIL_LETTERS = 4000
LATE = Span(10 * SECOND)
"""By which an end may reach the server later than the start did."""

HELD = "t.id, t.epoch, t.batch_id, t.spec_id, t.user_id, t.status, t.leased_at, t.started_at, t.tries, t.losses, t.queued_at"
ENDED = (
    ("task", "int"),
    ("epoch", "int"),
    ("status", "text"),
    ("reason", "text"),
    ("exit_code", "int"),
    ("started_at", "int"),
    ("tries", "int"),
    ("losses", "int"),
    ("sequence", "int"),
    ("error_text", "text"),
    ("value_sha256", "text"),
    ("outputs", "text"),
    ("value", "blob"),
)
SEQUENCE = ENDED.index(("sequence", "int"))
REQUEUED = (
    ("task", "int"),
    ("epoch", "int"),
    ("tries", "int"),
    ("losses", "int"),
    ("queued_at", "int"),
)
ARCHIVED = (
    ("task", "int"),
    ("epoch", "int"),
    ("node", "int"),
    ("leased_at", "int"),
    ("started_at", "int"),
    ("reason", "text"),
    ("detail", "text"),
)
COUNTED = (("id", "int"), ("count", "int"))
INT = (1 << 31) - 1
Named = tuple[str, TaskId, int, SpecId, UserId]
"""An artifact that an end names: sha256, and whose it is."""

NEVER_STARTED = frozenset(
    {
        EndReason.BAD_INPUT,
        EndReason.SANDBOX_FAILED,
        EndReason.HANDED_BACK,
        EndReason.PREEMPTED,
        EndReason.CANCELLED,
        EndReason.LOST,
    }
)
"""Ends that do not imply a start that was not reported."""


@lru_cache(maxsize=64)
def target(status: str, move: Move) -> TaskStatus:
    """The status after the move. A success implies the start it was not worth reporting."""
    moves: tuple[Move, ...] = (move,)
    if move is Move.SUCCEEDED and status == TaskStatus.LEASED:
        moves = (Move.STARTED, move)
    return after(STATUS[status], moves)


def take_sequences(batches: Iterable[int]) -> Operation[dict[int, int]]:
    """Counts these ends in their batches; gives the sequence before each batch's first."""
    counts = Counter(batches)
    rows = yield Statement(
        "UPDATE batches SET done = done + c.count FROM {counts} AS c WHERE batches.id = c.id RETURNING batches.id, done",
        {},
        {"counts": Relation(COUNTED, sorted(counts.items()))},
    )
    return {batch: done - counts[batch] for batch, done in rows}


@dataclass(slots=True)
class Ends:
    """Ends of leases on one node, collected and then written together. `row` is a `HELD` row throughout."""

    node: NodeId
    at: Instant
    ended: list[Ended] = field(default_factory=list)
    requeued: list[Requeued] = field(default_factory=list)
    released: list[TaskId] = field(default_factory=list)
    _ended_rows: list[list[Any]] = field(default_factory=list)
    _batches: list[int] = field(default_factory=list)
    _requeued_rows: list[Row] = field(default_factory=list)
    _archived: list[Row] = field(default_factory=list)
    _let_go: list[int] = field(default_factory=list)

    def end(
        self,
        row: Row,
        move: Move,
        reason: EndReason,
        *,
        started_at: int | None,
        exit_code: int | None = None,
        losses: int | None = None,
        error_text: str = "",
        value: bytes = b"",
        value_sha256: str = "",
        outputs: str | None = None,
        duration: int = 0,
    ) -> None:
        """The attempt ends its task."""
        task, epoch, batch, _, user, status, _, _, tries, lost, _ = row
        becomes = target(status, move)
        self._batches.append(batch)
        self._ended_rows.append(
            [
                task,
                epoch,
                becomes.value,
                reason.value,
                exit_code,
                started_at,
                tries + 1 if move is Move.FAILED else tries,
                lost if losses is None else losses,
                None,
                storable(error_text) if error_text else None,
                value_sha256,
                outputs,
                value or None,
            ]
        )
        self.ended.append(
            Ended(TaskId(task), BatchId(batch), UserId(user), becomes, Span(duration))
        )
        self.released.append(TaskId(task))

    def requeue(
        self,
        row: Row,
        move: Move,
        reason: EndReason,
        *,
        started_at: int | None,
        losses: int | None = None,
        detail: str = "",
        fault: Fault | None = None,
    ) -> None:
        """The attempt goes to the archive, the task back to the queue."""
        task, epoch, _, spec, user, status, _, _, tries, lost, queued_at = row
        target(status, move)
        tries += move is Move.RETRIED
        since = self.at
        if reason is EndReason.PREEMPTED and queued_at is not None:
            since = queued_at  # it gave way to others, and keeps its age for that
        self._requeued_rows.append((task, epoch, tries, lost if losses is None else losses, since))
        self._archive(row, reason, started_at, detail)
        self.requeued.append(
            Requeued(
                TaskId(task),
                epoch,
                SpecId(spec),
                UserId(user),
                since,
                reason,
                Span(0 if started_at is None else max(0, self.at - started_at)),
                self.node,
                fault,
            )
        )
        self.released.append(TaskId(task))

    def let_go(self, row: Row, *, lost: bool = False) -> None:
        """A cancelled task's lease holds nothing any more. Lost, it is archived: a late report is then refused."""
        self._let_go.append(row[0])
        self.released.append(TaskId(row[0]))
        if lost:
            self._archive(row, EndReason.LOST, row[7], "")

    def _archive(self, row: Row, reason: EndReason, started_at: int | None, detail: str) -> None:
        text = storable(detail[:DETAIL_LETTERS])
        self._archived.append((row[0], row[1], self.node, row[6], started_at, reason.value, text))

    def write(self) -> Operation[None]:
        if self._ended_rows:
            yield from self._write_ended()
        if self._requeued_rows:
            yield Statement(
                "UPDATE tasks SET status = 'queued', queued_at = r.queued_at, node_id = NULL, holding = 0, "
                "allocation_number = NULL, allocation = NULL, leased_at = NULL, started_at = NULL, "
                "tries = r.tries, losses = r.losses FROM {requeued} AS r "
                "WHERE tasks.id = r.task AND tasks.epoch = r.epoch AND tasks.holding <> 0",
                {},
                {"requeued": Relation(REQUEUED, self._requeued_rows)},
            )
        if self._archived:
            yield Statement(
                "INSERT INTO attempts (task_id, epoch, node_id, leased_at, started_at, ended_at, reason, detail) "
                "SELECT a.task, a.epoch, a.node, a.leased_at, a.started_at, CAST(:at AS BIGINT), a.reason, a.detail "
                "FROM {archived} AS a",
                {"at": self.at},
                {"archived": Relation(ARCHIVED, self._archived)},
            )
        if self._let_go:
            yield Statement(
                "UPDATE tasks SET holding = 0 WHERE id IN (SELECT id FROM {gone} AS g)",
                {},
                {"gone": of_ids(self._let_go)},
            )

    def _write_ended(self) -> Operation[None]:
        last = yield from take_sequences(self._batches)
        for row, batch in zip(self._ended_rows, self._batches, strict=True):
            last[batch] = row[SEQUENCE] = last[batch] + 1
        yield Statement(
            "UPDATE tasks SET status = e.status, reason = e.reason, exit_code = e.exit_code, "
            "started_at = e.started_at, finished_at = :at, tries = e.tries, losses = e.losses, "
            "sequence = e.sequence, error_text = e.error_text, value_sha256 = e.value_sha256, "
            "outputs = e.outputs, value = e.value, holding = 0 FROM {ended} AS e "
            "WHERE tasks.id = e.task AND tasks.epoch = e.epoch AND tasks.holding <> 0",
            {"at": self.at},
            {"ended": Relation(ENDED, [tuple(row) for row in self._ended_rows])},
        )


def lasted(claimed: int, leased_at: int, started_at: int | None, at: Instant) -> int:
    """How long an attempt ran, for predictions: as its node says, within what the server saw.

    Never longer than the lease. Of one whose start was told, at least half of what passed since then, but for what reports
    may be late: a node that says less would have its owner's tasks taken for short ones, everywhere. 0, nothing was
    measured, stays so.
    """
    if not claimed:
        return 0
    least = 0 if started_at is None else (at - started_at - LATE) // 2
    return min(max(claimed, least), max(0, at - leased_at))


def finish(
    ends: Ends,
    row: Row,
    item: Finished,
    at: Instant,
    *,
    tries_left: bool,
    named: list[Named],
) -> None:
    """An attempt ended as its node says: for good, or for another try. `named`: what it left behind."""
    reason = item.reason
    move = end_move(reason, item.exit_code, tries_left=tries_left, losses=0)
    started_at = row[7]
    if started_at is None and reason not in NEVER_STARTED:
        # never said, so reckoned from the agent's measure, within what the server's own clock allows
        started_at = min(at, max(row[6], at - item.duration_us))
    if move is Move.RETRIED or move is Move.REQUEUED:
        ends.requeue(row, move, reason, started_at=started_at, detail=item.error_text)
        return
    ends.end(
        row,
        move,
        reason,
        started_at=started_at,
        exit_code=None if item.exit_code is None else max(-INT, min(item.exit_code, INT)),
        error_text=item.error_text,
        value=item.value,
        value_sha256=item.value_sha256,
        outputs=outputs_text(item.outputs) if item.outputs else None,
        duration=lasted(item.duration_us, row[6], row[7], at),
    )
    if item.value_sha256:
        named.append((item.value_sha256, row[0], row[1], row[3], row[4]))
    for output in item.outputs:
        named.append((output.sha256, row[0], row[1], row[3], row[4]))


def fault_in(item: Finished, *, begun: bool) -> Fault | None:
    """That it could not be started, where that is so: by its agent's word, or, of an older agent, where nothing was said of a start."""
    if item.reason is not EndReason.SANDBOX_FAILED:
        return None
    return item.fault if item.fault is not None or begun else Fault.UNCLEAR


def could_not_start(
    ends: Ends, failed: Sequence[tuple[Row, Fault, str, int | None]], retries: Mapping[int, int]
) -> Operation[None]:
    """Attempts that came to nothing: of each what the node says of itself and of the reason, and the exit code.

    The tasks wait again, or, after so many tries, fail with what the last node said. `retries` is by spec.
    """
    counted = yield Statement(
        "SELECT a.task_id, SUM(CASE WHEN a.reason = 'node_failed' THEN 1 ELSE 0 END), COUNT(*) "
        "FROM {tasks} AS i JOIN attempts a ON a.task_id = i.id WHERE a.started_at IS NULL "
        "AND a.reason IN ('sandbox_failed', 'node_failed') GROUP BY a.task_id",
        {},
        {"tasks": of_ids(row[0] for row, _, _, _ in failed)},
    )
    before = {
        task: Unstarted(int(times - by_node), int(by_node)) for task, by_node, times in counted
    }
    for row, fault, said, exit_code in failed:
        tries = before.get(row[0], Unstarted()).and_one(fault)
        move = unstarted_move(tries, retries[row[3]])
        if move is Move.REQUEUED:
            reason = archived_as(fault)
            ends.requeue(row, move, reason, started_at=None, detail=said, fault=fault)
        else:
            ends.end(
                row,
                move,
                EndReason.SANDBOX_FAILED,
                started_at=None,
                exit_code=exit_code,
                error_text=given_up(said, tries),
            )


def lose(ends: Ends, rows: Sequence[Row], detail: str = "") -> Operation[None]:
    """The node is gone with these leases: nobody's fault, until it is the third node lost while the task ran."""
    active = [row for row in rows if row[5] != TaskStatus.CANCELLED]
    losses: dict[int, int] = {}
    if active:
        counted = yield Statement(
            "SELECT a.task_id, COUNT(DISTINCT a.node_id) FROM {tasks} AS i JOIN attempts a ON a.task_id = i.id "
            "WHERE a.reason = 'lost' AND a.started_at IS NOT NULL AND a.node_id <> :node GROUP BY a.task_id",
            {"node": ends.node},
            {"tasks": of_ids(row[0] for row in active)},
        )
        losses = dict(counted)
    for row in rows:
        if row[5] == TaskStatus.CANCELLED:
            ends.let_go(row, lost=True)
            continue
        started_at = row[7]
        # the nodes lost so far, and this one too if the task had begun on it, now or in an earlier attempt
        lost = max(row[9], losses.get(row[0], 0) + (started_at is not None))
        move = end_move(EndReason.LOST, None, tries_left=False, losses=lost)
        if move is Move.GAVE_UP:
            ends.end(
                row,
                move,
                EndReason.LOSES_NODES,
                started_at=started_at,
                losses=lost,
                error_text=f"{lost} different nodes were lost while this task ran; see what it does to them",
            )
        else:
            ends.requeue(
                row, move, EndReason.LOST, started_at=started_at, losses=lost, detail=detail
            )

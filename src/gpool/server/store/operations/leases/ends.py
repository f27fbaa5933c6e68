"""Ends of leases: the writes that reports, expiry and gangs share. `core.lifecycle` decides which move is legal.

A task ends once: its row is read and locked as held at this epoch, and written in the same transaction. Every end
takes the next `sequence` of its batch, whose row stays locked until the commit, so sequences have no gaps and become
visible in order. One file because every end of a lease is written by the same statements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from gpool.core.ids import BatchId, NodeId, SpecId, TaskId
from gpool.core.lifecycle import Move, after, end_move
from gpool.core.model import EndReason, Fault, Instant, Span, TaskStatus
from gpool.core.reliability import Unstarted, archived_as, given_up, unstarted_move
from gpool.server.store.operations.leases.finished import (
    HeldTask,
    plausible_duration,
    results_of,
)
from gpool.server.store.operations.money.charges import (
    EndedLease,
    MemberStart,
    MeteredEnds,
    meter_ends,
    write_ends,
)
from gpool.server.store.operations.money.usage import LeaseTotals, UsedAllocation, add_usage
from gpool.server.store.operations.tasks.artifacts import NamedResult
from gpool.server.store.operations.tasks.storage import (
    ATTEMPT_BYTES,
    END_BYTES,
    HOW_TO_FREE,
    NO_LIMITS,
    Account,
    StorageLimits,
    change,
    rooms,
    summed,
)
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.rows import STATUS, of_ids, outputs_text, select, storable
from gpool.server.store.sealing import ATTEMPT_DETAIL, ERROR_TEXT, VALUE, Sealing, sealing
from gpool.server.store.values import EndedTask, Requeued
from gpool.wire.frames import Finished

CANCELLED = TaskStatus.CANCELLED.value
DETAIL_LETTERS = 4000
ENDED = (
    ("task", "int"),
    ("epoch", "int"),
    ("status", "text"),
    ("reason", "text"),
    ("exit_code", "int"),
    ("started_at", "int"),
    ("tries", "int"),
    ("losses", "int"),
    ("error_text", "text"),
    ("value_sha256", "text"),
    ("outputs", "text"),
    ("value", "blob"),
    ("stored_bytes", "int"),
    ("sequence", "int"),
)
REQUEUED = (
    ("task", "int"),
    ("epoch", "int"),
    ("tries", "int"),
    ("losses", "int"),
    ("queued_at", "int"),
    ("stored_bytes", "int"),
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
ON_NODE = (("id", "int"), ("node", "int"))
INT = (1 << 31) - 1

USED_UP = "its max_cost is used up; submit it again with a larger one"
STOPPED = "stopped: its max_cost, or the funds or budget of its payer, is used up"
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
"""Reasons of ends that do not imply a start."""


class EndRow(NamedTuple):
    """Columns of an end, without the sequence."""

    task: TaskId
    epoch: int
    status: str
    reason: str
    exit_code: int | None
    started_at: int | None
    tries: int
    losses: int
    error_text: str | None
    value_sha256: str
    outputs: str | None
    value: bytes | None
    stored_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes beyond those that the task's charge covers."""
        size = 0 if self.value is None else len(self.value)
        if self.error_text:
            size += len(self.error_text.encode())
        if self.outputs:
            size += len(self.outputs.encode())
        return max(0, size - END_BYTES)


class RequeuedRow(NamedTuple):
    task: TaskId
    epoch: int
    tries: int
    losses: int
    queued_at: Instant
    stored_bytes: int


class EndedMember(NamedTuple):
    """A gang's member when its gang ends."""

    node: NodeId
    allocation: str | None
    started_at: int | None


class _LeaseOver(NamedTuple):
    row: HeldTask
    reason: EndReason
    started_at: int | None
    duration: int = 0  # as its node claims


class FailedStart(NamedTuple):
    row: HeldTask
    fault: Fault
    text: str
    exit_code: int | None


class _BatchEnds(NamedTuple):
    id: BatchId
    done: int


class _FailedStarts(NamedTuple):
    task_id: TaskId
    by_node: int
    times: int


class _NodeLosses(NamedTuple):
    task_id: TaskId
    nodes: int


@lru_cache(maxsize=64)
def target(status: str, move: Move) -> TaskStatus:
    """Status after the move. Success of a leased task implies its start, which is not always reported."""
    moves: tuple[Move, ...] = (move,)
    if move is Move.SUCCEEDED and status == TaskStatus.LEASED:
        moves = (Move.STARTED, move)
    return after(STATUS[status], moves)


def take_sequences(batches: Iterable[BatchId]) -> Operation[dict[BatchId, int]]:
    counts = Counter(batches)
    rows = yield from select(
        _BatchEnds,
        "UPDATE batches SET done = done + c.count FROM {counts} AS c WHERE batches.id = c.id RETURNING batches.id, done",
        {},
        {"counts": Relation(COUNTED, sorted(counts.items()))},
    )
    return {batch: done - counts[batch] for batch, done in rows}


@dataclass(slots=True)
class Ends:
    """Ends of leases to write. Their data is charged to the task's owner; data over the quota is dropped, and the
    task ends nevertheless.
    """

    at: Instant
    limits: StorageLimits = NO_LIMITS
    ended: list[EndedTask] = field(default_factory=list)
    requeued: list[Requeued] = field(default_factory=list)
    released: list[TaskId] = field(default_factory=list)
    free: set[tuple[TaskId, int]] = field(default_factory=set)
    """Task and epoch of the metered leases that are charged nothing, once written."""
    _ended_rows: list[tuple[HeldTask, EndRow]] = field(default_factory=list)
    _requeued_rows: list[tuple[HeldTask, RequeuedRow]] = field(default_factory=list)
    _archived: list[tuple[Account, Row]] = field(default_factory=list)
    _released_rows: list[TaskId] = field(default_factory=list)
    _over: list[_LeaseOver] = field(default_factory=list)  # all of these leases, as reported
    _members: dict[TaskId, tuple[EndedMember, ...]] = field(default_factory=dict)
    _may_exceed: bool = False  # an end may have more data than its task's charge covers

    def end(
        self,
        row: HeldTask,
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
        becomes = target(row.status, move)
        self._over.append(_LeaseOver(row, reason, started_at, duration))
        if len(value) + 4 * (len(error_text) + len(outputs or "")) > END_BYTES:
            self._may_exceed = True
        written = EndRow(
            row.id,
            row.epoch,
            becomes.value,
            reason.value,
            exit_code,
            started_at,
            row.tries + 1 if move is Move.FAILED else row.tries,
            row.losses if losses is None else losses,
            storable(error_text) if error_text else None,
            value_sha256,
            outputs,
            value or None,
        )
        self._ended_rows.append((row, written))
        self.ended.append(
            EndedTask(
                row.id,
                row.batch_id,
                row.user_id,
                becomes,
                Span(duration),
                row.epoch,
                row.team_id,
            )
        )
        self.released.append(row.id)

    def requeue(
        self,
        row: HeldTask,
        move: Move,
        reason: EndReason,
        *,
        started_at: int | None,
        losses: int | None = None,
        detail: str = "",
        fault: Fault | None = None,
    ) -> None:
        target(row.status, move)
        self._over.append(_LeaseOver(row, reason, started_at))
        tries = row.tries + (move is Move.RETRIED)
        since = self.at
        if reason is EndReason.PREEMPTED and row.queued_at is not None:
            since = row.queued_at  # a preempted task keeps its age in the queue
        size = ATTEMPT_BYTES + len(detail[:DETAIL_LETTERS].encode())
        lost = row.losses if losses is None else losses
        self._requeued_rows.append((row, RequeuedRow(row.id, row.epoch, tries, lost, since, size)))
        self._archive(row, reason, started_at, detail)
        self.requeued.append(
            Requeued(
                row.id,
                row.epoch,
                row.spec_id,
                row.user_id,
                since,
                reason,
                Span(0 if started_at is None else max(0, self.at - started_at)),
                row.node_id,
                fault,
                row.team_id,
            )
        )
        self.released.append(row.id)

    def release(self, row: HeldTask, *, lost: bool = False) -> None:
        """Release the allocation of a cancelled task. A lost attempt is archived, so that its late reports are refused."""
        self._released_rows.append(row.id)
        self.released.append(row.id)
        reason = EndReason.LOST if lost else EndReason.CANCELLED
        self._over.append(_LeaseOver(row, reason, row.started_at))
        if lost:
            self._archive(row, EndReason.LOST, row.started_at, "")

    def _archive(
        self, row: HeldTask, reason: EndReason, started_at: int | None, detail: str
    ) -> None:
        text = storable(detail[:DETAIL_LETTERS])
        archived = (row.id, row.epoch, row.node_id, row.leased_at, started_at, reason.value, text)
        self._archived.append((row.account, archived))

    def add_members(self, task: TaskId, members: Sequence[EndedMember]) -> None:
        """Name the allocations of a gang that ends here."""
        self._members[task] = tuple(members)

    def write(self) -> Operation[None]:
        metered = yield from self._meter()
        if self._ended_rows:
            yield from self._write_ended()
        if self._requeued_rows:
            yield Statement(
                "UPDATE tasks SET status = 'queued', queued_at = r.queued_at, node_id = NULL, holding = 0, "
                "allocation_number = NULL, allocation = NULL, leased_at = NULL, started_at = NULL, "
                "tries = r.tries, losses = r.losses, stored_bytes = tasks.stored_bytes + r.stored_bytes "
                "FROM {requeued} AS r WHERE tasks.id = r.task AND tasks.epoch = r.epoch AND tasks.holding <> 0",
                {},
                {"requeued": Relation(REQUEUED, [row for _, row in self._requeued_rows])},
            )
            yield from change(
                summed((held.account, row.stored_bytes) for held, row in self._requeued_rows)
            )
        if self._archived:
            seal = yield from sealing({account for account, _ in self._archived})
            archived = [_sealed_detail(seal, account, row) for account, row in self._archived]
            yield Statement(
                "INSERT INTO attempts (task_id, epoch, node_id, leased_at, started_at, ended_at, reason, detail) "
                "SELECT a.task, a.epoch, a.node, a.leased_at, a.started_at, CAST(:at AS BIGINT), a.reason, a.detail "
                "FROM {archived} AS a",
                {"at": self.at},
                {"archived": Relation(ARCHIVED, archived)},
            )
        if self._released_rows:
            yield Statement(
                "UPDATE tasks SET holding = 0 WHERE id IN (SELECT id FROM {released} AS r)",
                {},
                {"released": of_ids(self._released_rows)},
            )
        if metered is not None:
            self.free = metered.free
            yield from write_ends(metered, self.at)
        yield from add_usage(self._used(), self.at)

    def _used(self) -> dict[UsedAllocation, LeaseTotals]:
        counted: dict[tuple[Account, NodeId, str | None, SpecId], list[int]] = {}
        for row, _, started_at, _ in self._over:
            of_gang = self._members.get(row.id) if self._members else None
            parts = ((row.node_id, row.allocation, started_at),) if of_gang is None else of_gang
            for node, allocation, began in parts:
                total = counted.setdefault((row.account, node, allocation, row.spec_id), [0, 0])
                total[0] += 1
                if began is not None and began < self.at:
                    total[1] += self.at - began
        return {UsedAllocation(*key): LeaseTotals(*total) for key, total in counted.items()}

    def _meter(self) -> Operation[MeteredEnds | None]:
        """Charge the leases on metered allocations. A task that may not cost more ends instead of being queued again."""
        ended = [self._ended_lease(over) for over in self._over if over.row.metered == 1]
        if not ended:
            return None
        done = yield from meter_ends(ended)
        unfunded = done.stopped | done.used_up
        for row, again in [each for each in self._requeued_rows if each[0].id in unfunded]:
            self._requeued_rows.remove((row, again))
            self.requeued = [each for each in self.requeued if each.task != row.id]
            self._archived = [each for each in self._archived if not _is_of(each[-1], row)]
            self.released.remove(row.id)
            [over] = [each for each in self._over if each.row.id == row.id]
            text = USED_UP if row.id in done.used_up else STOPPED
            reason = EndReason.OUT_OF_FUNDS
            self.end(row, Move.GAVE_UP, reason, started_at=over.started_at, error_text=text)
            self._over.pop()  # it is there already
        return done

    def _ended_lease(self, over: _LeaseOver) -> EndedLease:
        row = over.row
        at = self.at
        if row.finished_at is not None:
            at = min(at, row.finished_at)  # cancelled then; its node took until now
        return EndedLease(
            row.id,
            row.epoch,
            row.node_id,
            row.allocation_number,
            None if over.started_at is None else Instant(over.started_at),
            at,
            over.reason,
            Span(over.duration),
            row.max_cost,
            row.settlement,
            row.spec_id,
            self._starts(row.id) if row.allocation_number is None else (),
            row.started_at is not None,
        )

    def _starts(self, task: TaskId) -> tuple[MemberStart, ...]:
        return tuple(
            MemberStart(each.node, None if each.started_at is None else Instant(each.started_at))
            for each in self._members.get(task, ())
        )

    def _write_ended(self) -> Operation[None]:
        if self._may_exceed:
            yield from self._charge()
        last = yield from take_sequences(each.batch for each in self.ended)
        seal = yield from sealing({held.account for held, _ in self._ended_rows})
        rows: list[Row] = []
        for (held, row), each in zip(self._ended_rows, self.ended, strict=True):
            last[each.batch] = sequence = last[each.batch] + 1
            rows.append((*_sealed_end(seal, held, row), sequence))
        yield Statement(
            "UPDATE tasks SET status = e.status, reason = e.reason, exit_code = e.exit_code, "
            "started_at = e.started_at, finished_at = :at, tries = e.tries, losses = e.losses, "
            "sequence = e.sequence, error_text = e.error_text, value_sha256 = e.value_sha256, "
            "outputs = e.outputs, value = e.value, holding = 0, "
            "stored_bytes = tasks.stored_bytes + e.stored_bytes FROM {ended} AS e "
            "WHERE tasks.id = e.task AND tasks.epoch = e.epoch AND tasks.holding <> 0",
            {"at": self.at},
            {"ended": Relation(ENDED, rows)},
        )

    def _charge(self) -> Operation[None]:
        room = yield from rooms({held.account for held, _ in self._ended_rows}, self.limits)
        charged: list[tuple[Account, int]] = []
        for place, (held, row) in enumerate(self._ended_rows):
            size, account = row.size_bytes, held.account
            if size and size > room.get(account, size):
                dropped = _without_data(held, row, size)
                self._ended_rows[place] = (held, dropped)
                self.ended[place] = replace(self.ended[place], status=STATUS[dropped.status])
            elif size:
                self._ended_rows[place] = (held, row._replace(stored_bytes=size))
                charged.append((account, size))
                if account in room:
                    room[account] -= size
        yield from change(summed(charged))


def _is_of(archived: Row, row: HeldTask) -> bool:
    task, *_ = archived
    return bool(task == row.id)


def _sealed_end(seal: Sealing, held: HeldTask, row: EndRow) -> EndRow:
    if row.error_text:
        text = seal.text(held.account, ERROR_TEXT.place_of(row.task), row.error_text)
        row = row._replace(error_text=text)
    if row.value:
        row = row._replace(value=seal.data(held.account, VALUE.place_of(row.task), row.value))
    return row


def _sealed_detail(seal: Sealing, account: Account, row: Row) -> Row:
    *others, detail = row
    if detail:
        task, epoch = row[:2]
        detail = seal.text(account, ATTEMPT_DETAIL.place_of(task, epoch), detail)
    return (*others, detail)


def _without_data(held: HeldTask, row: EndRow, size: int) -> EndRow:
    """End whose result, outputs and long error text are dropped: the task's owner has no room for them."""
    has_data = row.value is not None or row.value_sha256 or row.outputs is not None
    text = row.error_text or ""
    if has_data:
        text = f"the result of {size} bytes was dropped: the storage quota is full; {HOW_TO_FREE}, then run it again"
    becomes = row.status
    reason = row.reason
    if has_data and becomes == TaskStatus.SUCCEEDED:
        becomes = target(held.status, Move.FAILED).value
        reason = EndReason.BAD_OUTPUT.value
    text = text.encode()[:END_BYTES].decode(errors="ignore")
    return row._replace(
        status=becomes,
        reason=reason,
        error_text=text or None,
        value_sha256="",
        outputs=None,
        value=None,
    )


def finish(
    ends: Ends, row: HeldTask, item: Finished, *, tries_left: bool, named: list[NamedResult]
) -> None:
    at, reason = ends.at, item.reason
    move = end_move(reason, item.exit_code, tries_left=tries_left, losses=0)
    started_at: int | None = row.started_at
    if started_at is None and reason not in NEVER_STARTED:
        # an unreported start: computed from the agent's measurement, within what the server's clock allows
        started_at = min(at, max(row.leased_at, at - item.duration_us))
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
        duration=plausible_duration(item.duration_us, row.leased_at, row.started_at, at),
    )
    if item.value_sha256 or item.outputs:
        named += results_of(row, item)


def could_not_start(
    ends: Ends, failed: Sequence[FailedStart], retries: Mapping[SpecId, int]
) -> Operation[None]:
    """Queue these tasks again or, after too many failed starts, fail them with the last node's text."""
    counted = yield from select(
        _FailedStarts,
        "SELECT a.task_id, SUM(CASE WHEN a.reason = 'node_failed' THEN 1 ELSE 0 END), COUNT(*) "
        "FROM {tasks} AS i JOIN attempts a ON a.task_id = i.id WHERE a.started_at IS NULL "
        "AND a.reason IN ('sandbox_failed', 'node_failed') GROUP BY a.task_id",
        {},
        {"tasks": of_ids(each.row.id for each in failed)},
    )
    before = {
        task: Unstarted(int(times - by_node), int(by_node)) for task, by_node, times in counted
    }
    for row, fault, text, exit_code in failed:
        tries = before.get(row.id, Unstarted()).and_one(fault)
        move = unstarted_move(tries, retries[row.spec_id])
        if move is Move.REQUEUED:
            reason = archived_as(fault)
            ends.requeue(row, move, reason, started_at=None, detail=text, fault=fault)
        else:
            ends.end(
                row,
                move,
                EndReason.SANDBOX_FAILED,
                started_at=None,
                exit_code=exit_code,
                error_text=given_up(text, tries),
            )


def lose(ends: Ends, rows: Sequence[HeldTask], detail: str = "") -> Operation[None]:
    """End leases of a lost node. The tasks are queued again, until the third node is lost while the task runs."""
    active = [(row.id, row.node_id) for row in rows if row.status != CANCELLED]
    losses: dict[TaskId, int] = {}
    if active:
        counted = yield from select(
            _NodeLosses,
            "SELECT a.task_id, COUNT(DISTINCT a.node_id) FROM {tasks} AS i JOIN attempts a ON a.task_id = i.id "
            "WHERE a.reason = 'lost' AND a.started_at IS NOT NULL AND a.node_id <> i.node GROUP BY a.task_id",
            {},
            {"tasks": Relation(ON_NODE, sorted(active))},
        )
        losses = {row.task_id: row.nodes for row in counted}
    for row in rows:
        if row.status == CANCELLED:
            ends.release(row, lost=True)
            continue
        # nodes lost so far, and this one if the task had started on it, now or in an earlier attempt
        lost = max(row.losses, losses.get(row.id, 0) + (row.started_at is not None))
        move = end_move(EndReason.LOST, None, tries_left=False, losses=lost)
        if move is Move.GAVE_UP:
            ends.end(
                row,
                move,
                EndReason.LOSES_NODES,
                started_at=row.started_at,
                losses=lost,
                error_text=f"{lost} different nodes were lost while this task ran; see what it does to them",
            )
        else:
            ends.requeue(
                row, move, EndReason.LOST, started_at=row.started_at, losses=lost, detail=detail
            )

"""What nodes say of their members of gangs, and how gangs end: once. What their ends amount to, `core.gangs` says.

All that a gang's fate depends on is read under the lock of its task's row. Its allocations are released together, when
the last member has let go; until then the task is not over, whatever was decided. Outputs are rank 0's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gpool.core.gangs import GangOrder, GangVerdict, call, marked, verdict
from gpool.core.ids import NodeId, SpecId, TaskId, UserId
from gpool.core.lifecycle import Move, sources
from gpool.core.model import EndReason, Fault, Instant, OnLoss, TaskStatus
from gpool.core.retries import archived_as
from gpool.server.store.operations.gangs.grants import forget
from gpool.server.store.operations.gangs.members import Gang, Part, gangs
from gpool.server.store.operations.leases.ends import (
    DETAIL_LETTERS,
    HELD,
    INT,
    Ends,
    Named,
    could_not_start,
    fault_in,
    finish,
    lose,
)
from gpool.server.store.operations.tasks.logs import EPOCH_SHIFT
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.rows import of_ids, outputs_from, outputs_text, storable
from gpool.server.store.values import Ended, Requeued
from gpool.wire.frames import (
    Checkpointed,
    Finished,
    HandedBack,
    Hold,
    LogChunk,
    Reached,
    Released,
    ReportItem,
    Started,
)

CANCELLED = TaskStatus.CANCELLED.value
STARTABLE = frozenset(status.value for status in sources(Move.STARTED))
NEWLINE = b"\n"[0]
UNSTARTED = frozenset({EndReason.SANDBOX_FAILED, EndReason.NODE_FAILED})
HOLDS = (("id", "int"), ("epoch", "int"))
COUNTED = (("id", "int"), ("count", "int"))
CHANGED = (
    ("task", "int"),
    ("rank", "int"),
    ("epoch", "int"),
    ("holding", "int"),
    ("started_at", "int"),
    ("ended_at", "int"),
    ("place", "int"),
    ("reason", "text"),
    ("exit_code", "int"),
    ("detail", "text"),
    ("duration_us", "int"),
    ("outputs", "text"),
    ("logged", "int"),
    ("mid_line", "int"),
)
MEMBER = f"{HELD}, m.rank, m.started_at, m.logged, m.mid_line, m.holding, m.reason"
RANK = 11


# ---- what nodes say of their members


@dataclass(slots=True)
class _Heard:
    """One member that a node speaks of, or is lost with. `row` is a `HELD` row of its task."""

    row: Row
    node: NodeId
    rank: int
    started_at: int | None
    logged: int
    mid_line: int
    chunks: list[LogChunk] = field(default_factory=list)
    end: Finished | None = None
    let_go: bool = False  # it says no more than that it has
    part: Part | None = None  # as it ended

    @property
    def task(self) -> int:
        return int(self.row[0])

    @property
    def epoch(self) -> int:
        return int(self.row[1])

    @property
    def ended(self) -> bool:
        return self.let_go or self.end is not None


@dataclass(slots=True)
class Taken:
    """What reports about members come to. `rest`: what is about no member; the others are for the caller to write."""

    rest: list[ReportItem] = field(default_factory=list)
    started: dict[int, int] = field(default_factory=dict)
    chunks: list[LogChunk] = field(default_factory=list)
    reached: list[Reached] = field(default_factory=list)
    saved: dict[int, Checkpointed] = field(default_factory=dict)
    named: list[Named] = field(default_factory=list)
    unusable: list[Hold] = field(default_factory=list)
    noted: list[TaskId] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    requeued: list[Requeued] = field(default_factory=list)
    released: list[TaskId] = field(default_factory=list)
    to_stop: list[tuple[NodeId, Hold]] = field(default_factory=list)
    to_preempt: list[tuple[NodeId, Hold]] = field(default_factory=list)


def take(node: NodeId, items: Sequence[ReportItem], at: Instant) -> Operation[Taken]:
    """Of what this node says, that which is about a gang's member of its own. Said again, it is taken in silence."""
    said = sorted({(item.task, item.epoch) for item in items})
    rows = yield Statement(
        f"SELECT {MEMBER} FROM {{said}} AS s "  # noqa: S608
        "JOIN members m ON m.task_id = s.id AND m.epoch = s.epoch JOIN tasks t ON t.id = m.task_id "
        "WHERE m.node_id = :node /*postgresql ORDER BY t.id FOR UPDATE OF t, m*/",
        {"node": node},
        {"said": Relation(HOLDS, said)},
    )
    taken = Taken()
    heard: dict[tuple[int, int], _Heard] = {}
    over: set[tuple[int, int]] = set()
    for row in rows:
        key = (row[0], row[1])
        if row[RANK + 4]:
            heard[key] = _heard(row, node)
        elif row[RANK + 5] != EndReason.LOST:
            over.add(key)
    for item in items:
        one = heard.get((item.task, item.epoch))
        if one is not None:
            _hear(one, item, at, taken)
        elif (item.task, item.epoch) not in over:
            taken.rest.append(item)
    if heard:
        taken.unusable = list(dict.fromkeys(taken.unusable))  # one word for each, however often
        yield from _mark(list(heard.values()), taken)
        yield from _settle(list(heard.values()), at, taken)
    return taken


def lose_members(node: NodeId, at: Instant) -> Operation[Taken]:
    """The node is lost, and with it whatever members it had."""
    rows = yield Statement(
        f"SELECT {MEMBER} FROM members m JOIN tasks t ON t.id = m.task_id "  # noqa: S608
        "WHERE m.node_id = :node AND m.holding = 1 ORDER BY t.id /*postgresql FOR UPDATE OF t, m*/",
        {"node": node},
    )
    taken = Taken()
    heard = [_heard(row, node) for row in rows]
    for one in heard:
        one.end = Finished(one.task, one.epoch, EndReason.LOST)
    if heard:
        yield from _settle(heard, at, taken)
    return taken


def _heard(row: Row, node: NodeId) -> _Heard:
    return _Heard(row[:RANK], node, *row[RANK : RANK + 4])


def _hear(one: _Heard, item: ReportItem, at: Instant, taken: Taken) -> None:
    if type(item) is LogChunk:
        if not item.sequence >> EPOCH_SHIFT:
            one.chunks.append(item)
        return
    if one.ended:
        return
    match item:
        case Started():
            if one.started_at is None:
                one.started_at = at
                taken.noted.append(TaskId(item.task))
            if one.rank == 0 and one.row[5] in STARTABLE:
                taken.started[item.task] = item.epoch
        case Finished():
            one.end = item
        case HandedBack() | Released():
            one.let_go = True
        case Reached() if one.rank == 0:
            taken.reached.append(item)
        case Checkpointed() if one.rank == 0:
            taken.saved[item.task] = item
        case Checkpointed():
            taken.unusable.append(Hold(item.task, item.epoch))


def _mark(heard: Sequence[_Heard], taken: Taken) -> Operation[None]:
    """Output in the order it comes, whoever printed it; what came before is left out, of each member for itself."""
    new: dict[int, list[tuple[_Heard, LogChunk]]] = {}
    for one in heard:
        for chunk in sorted(one.chunks, key=lambda chunk: chunk.sequence):
            if chunk.sequence >= one.logged:
                one.logged = chunk.sequence + 1
                new.setdefault(one.task, []).append((one, chunk))
    if not new:
        return
    rows = yield Statement(
        "UPDATE gangs SET logged = logged + c.count FROM {counts} AS c WHERE gangs.task_id = c.id "
        "RETURNING gangs.task_id, logged",
        {},
        {"counts": Relation(COUNTED, [(task, len(pairs)) for task, pairs in sorted(new.items())])},
    )
    for task, logged in rows:
        first = logged - len(new[task])
        for place, (one, chunk) in enumerate(new[task], first):
            bit = 1 if chunk.stream == 1 else 2
            data = marked(chunk.data, one.rank, in_line=bool(one.mid_line & bit))
            if data:
                open_line = data[-1] != NEWLINE
                one.mid_line = one.mid_line & ~bit | (bit if open_line else 0)
            taken.chunks.append(LogChunk(task, one.epoch, place, chunk.stream, data))


def _settle(heard: Sequence[_Heard], at: Instant, taken: Taken) -> Operation[None]:
    """Writes what is new of these members, calls off gangs that cannot go on, ends those that all have let go of."""
    ending = [one for one in heard if one.ended]
    found = yield from gangs(one.task for one in ending)
    closing: list[tuple[_Heard, Gang]] = []
    for one in ending:
        before = found[one.task]
        told = call(before.standing)
        end = _end_of(one, told)
        one.part = _ended(before, one, end)
        gang = before.with_part(one.part)
        if one.rank == 0 and one.row[5] != CANCELLED:
            taken.named += _named(one.row, end)
        if not gang.holding:
            closing.append((one, gang))
        elif told is None and one.row[5] != CANCELLED and not gang.making_room:
            _call_off(one, gang, taken)
    yield from _write(heard, at)
    ends: list[Ends] = []
    for one, gang in closing:
        ends.append((yield from _close(one, gang, at, taken)))
    for each in ends:
        yield from each.write()
        taken.ended += each.ended
        taken.requeued += each.requeued
        taken.released += each.released
    if closing:
        yield from forget("gangs", [one.task for one, _ in closing])
    yield from _forsake([one.task for one, gang in closing if gang.parts[0].outputs], taken)


def _end_of(one: _Heard, told: GangOrder | None) -> Finished:
    """How it ended. One that only let go was told to, or had to."""
    if one.end is not None:
        return one.end
    if one.row[5] == CANCELLED or told is GangOrder.END:
        reason = EndReason.CANCELLED
    else:
        reason = EndReason.HANDED_BACK if one.started_at is None else EndReason.PREEMPTED
    return Finished(one.task, one.epoch, reason)


def _ended(gang: Gang, one: _Heard, end: Finished) -> Part:
    fault = fault_in(end, begun=one.started_at is not None)
    return replace(
        gang.parts[one.rank],
        started_at=one.started_at if fault is None else None,
        place=len(gang.parts) - len(gang.holding) + 1,
        reason=(end.reason if fault is None else archived_as(fault)).value,
        exit_code=None if end.exit_code is None else max(-INT, min(end.exit_code, INT)),
        detail=storable(end.error_text[:DETAIL_LETTERS]),
        duration_us=end.duration_us,
        outputs=outputs_text(end.outputs) if one.rank == 0 else None,
    )


def _named(row: Row, end: Finished) -> list[Named]:
    """What rank 0 left: kept from now on, however long the others take."""
    whose = (TaskId(row[0]), row[1], SpecId(row[3]), UserId(row[4]))
    return [(output.sha256, *whose) for output in end.outputs]


def _call_off(one: _Heard, gang: Gang, taken: Taken) -> None:
    told = call(gang.standing)
    if told is not None:
        hold = Hold(one.task, one.epoch)
        to = taken.to_stop if told is GangOrder.END else taken.to_preempt
        to += [(node, hold) for node in gang.holding]


def _write(heard: Sequence[_Heard], at: Instant) -> Operation[None]:
    rows: list[Row] = []
    for one in heard:
        part = one.part
        ended: Row = (None, None, None, None, "", 0, None)
        if part is not None:
            ended = (at, part.place, part.reason, part.exit_code, part.detail)
            ended += (part.duration_us, part.outputs)
        started_at = one.started_at if part is None else part.started_at
        first: Row = (one.task, one.rank, one.epoch, int(part is None), started_at)
        rows.append((*first, *ended, one.logged, one.mid_line))
    yield Statement(
        "UPDATE members SET holding = c.holding, started_at = c.started_at, ended_at = c.ended_at, place = c.place, "
        "reason = c.reason, exit_code = c.exit_code, detail = c.detail, duration_us = c.duration_us, "
        "outputs = c.outputs, logged = c.logged, mid_line = c.mid_line FROM {changed} AS c "
        "WHERE members.task_id = c.task AND members.rank = c.rank AND members.epoch = c.epoch",
        {},
        {"changed": Relation(CHANGED, rows)},
    )


# ---- the end of a gang


def _close(one: _Heard, gang: Gang, at: Instant, taken: Taken) -> Operation[Ends]:
    """All have let go: the task ends, or waits again."""
    row = one.row
    if row[5] == CANCELLED:
        ends = Ends(one.node, at)
        ends.let_go(row)
        return ends
    found = verdict(gang.standing)
    assert found is not None, "all have let go"
    cause = gang.parts[found.rank]
    ends = Ends(cause.node, at)
    started_at = row[7]
    if started_at is None:  # rank 0 never said so
        started_at = gang.parts[0].started_at or cause.started_at
    row = (*row[:7], started_at, *row[8:])
    text = _told(found, cause)
    if found.reason is EndReason.LOST and gang.spec.on_loss is OnLoss.REFORM:
        yield from lose(ends, [row], text)
    elif found.reason is EndReason.LOST:
        text = f"{text}; the task asks to end then (on_loss=end)"
        ends.end(row, Move.FAILED, EndReason.LOST, started_at=started_at, error_text=text)
    elif found.reason in UNSTARTED and cause.started_at is None:
        # that it cannot start anything, a node's own tasks show: a gang is no reason for it to rest
        fault = Fault.UNCLEAR if found.reason is EndReason.SANDBOX_FAILED else Fault.PART
        unstarted = [(row, fault, text, found.exit_code)]
        yield from could_not_start(ends, unstarted, {row[3]: gang.spec.retries})
    else:
        first = gang.parts[0]
        end = Finished(
            one.task,
            one.epoch,
            found.reason,
            found.exit_code,
            error_text=text,
            duration_us=first.duration_us or cause.duration_us,
            outputs=outputs_from(first.outputs),
        )
        left = row[8] < gang.spec.retries
        finish(ends, row, end, at, tries_left=left, named=taken.named)
    return ends


def _told(found: GangVerdict, cause: Part) -> str:
    """What the cause said; of others than rank 0, with its rank."""
    if found.reason is EndReason.LOST:
        return f"rank {found.rank} was lost with its node"
    if not found.rank:
        return cause.detail
    said = cause.detail
    if not said:
        said = cause.reason.replace("_", " ") if cause.reason else "ended"
        said += "" if cause.exit_code is None else f" with code {cause.exit_code}"
    return f"rank {found.rank}: {said}"


def _forsake(tasks: Sequence[int], taken: Taken) -> Operation[None]:
    """What rank 0 left in an attempt that counts for nothing."""
    again = {requeued.task for requeued in taken.requeued}
    gone = [task for task in tasks if task in again]
    if gone:
        taken.named = [named for named in taken.named if named[1] not in again]
        yield Statement(
            "DELETE FROM artifact_refs WHERE kind = 'result' AND holder IN (SELECT id FROM {tasks} AS i)",
            {},
            {"tasks": of_ids(gone)},
        )

"""Reports about members of gangs, and the end of a gang, as `core.gangs` decides. Gang state is read under the lock of
its task's row. Allocations are released together, when the last node has released its member; until then the task has
not ended. Outputs are those of rank 0. One file because a report about a member may end its gang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpool.core.gangs import GangOrder, GangVerdict, call, marked, verdict
from gpool.core.ids import NodeId, TaskId
from gpool.core.lifecycle import Move, sources
from gpool.core.model import EndReason, Fault, Instant, OnLoss
from gpool.core.reliability import archived_as
from gpool.server.store.generated_rows import MembersRecord
from gpool.server.store.operations.leases.ends import (
    CANCELLED,
    DETAIL_LETTERS,
    INT,
    EndedMember,
    Ends,
    FailedStart,
    could_not_start,
    finish,
    lose,
)
from gpool.server.store.operations.leases.finished import (
    HELD,
    HeldTask,
    fault_in,
    result_of,
    without_missing,
)
from gpool.server.store.operations.leases.gang_members import (
    GangStatus,
    MemberStatus,
    delete_rows,
    gangs,
)
from gpool.server.store.operations.tasks.artifacts import ArtifactReference, NamedResult, release
from gpool.server.store.operations.tasks.progress import EPOCH_SHIFT
from gpool.server.store.operations.tasks.storage import NO_LIMITS, StorageLimits
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.rows import (
    columns,
    of_ids,
    outputs_from,
    outputs_text,
    select,
    select_pairs,
    storable,
)
from gpool.server.store.sealing import MEMBER_DETAIL, sealing
from gpool.server.store.values import EndedTask, Recording, Requeued, StartedTask
from gpool.wire.frames import (
    Checkpointed,
    Finished,
    HandedBack,
    Hold,
    LogChunk,
    Progressed,
    Reached,
    Released,
    ReportItem,
    Started,
)

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


class _StoredMember(NamedTuple):
    rank: int
    started_at: Instant | None
    logged: int
    mid_line: int
    holding: int
    reason: str | None


class _LoggedChunks(NamedTuple):
    task_id: TaskId
    logged: int


HELD_MEMBER = (
    f"{HELD.replace('t.node_id', 'm.node_id')}, {columns(_StoredMember, MembersRecord, 'm')}"
)


# ---- reports about members


@dataclass(slots=True)
class _Reported:
    task: HeldTask
    rank: int
    started_at: Instant | None
    logged: int  # sequence of the next chunk of its output
    mid_line: int  # streams (bits 1, 2) whose last chunk did not end its line
    chunks: list[LogChunk] = field(default_factory=list)
    end: Finished | None = None
    released: bool = False  # released without a report of its end
    status: MemberStatus | None = None  # after its end

    @property
    def ended(self) -> bool:
        return self.released or self.end is not None

    @property
    def hold(self) -> Hold:
        return Hold(self.task.id, self.task.epoch)


@dataclass(slots=True)
class MemberReports:
    """Results of reports about members. `rest`: reports about no member.

    The caller writes `started`, `chunks`, `reached`, `saved`, `progressed` and `named`; the others are written.
    """

    limits: StorageLimits = NO_LIMITS  # of the tasks' owners
    rest: list[ReportItem] = field(default_factory=list)
    started: dict[TaskId, StartedTask] = field(default_factory=dict)
    chunks: list[LogChunk] = field(default_factory=list)
    reached: list[Reached] = field(default_factory=list)
    saved: dict[TaskId, Checkpointed] = field(default_factory=dict)
    progressed: dict[TaskId, tuple[HeldTask, Progressed]] = field(default_factory=dict)
    named: list[NamedResult] = field(default_factory=list)
    unusable: list[Hold] = field(default_factory=list)
    noted: list[TaskId] = field(default_factory=list)
    ended: list[EndedTask] = field(default_factory=list)
    requeued: list[Requeued] = field(default_factory=list)
    released: list[TaskId] = field(default_factory=list)
    to_stop: list[tuple[NodeId, Hold]] = field(default_factory=list)
    to_preempt: list[tuple[NodeId, Hold]] = field(default_factory=list)

    def recording(self) -> Recording:
        return Recording(
            ended=tuple(self.ended),
            requeued=tuple(self.requeued),
            released=tuple(self.released),
            to_stop=tuple(self.to_stop),
            to_preempt=tuple(self.to_preempt),
            noted=tuple(self.noted),
            unusable=tuple(self.unusable),
        )


def record_members(
    node: NodeId, items: Sequence[ReportItem], at: Instant, limits: StorageLimits = NO_LIMITS
) -> Operation[MemberReports]:
    """Record the reports about members on this node. A repeated report has no effect."""
    leases = sorted({(item.task, item.epoch) for item in items})
    rows = yield from select_pairs(
        HeldTask,
        _StoredMember,
        f"SELECT {HELD_MEMBER} FROM {{reported}} AS s "  # noqa: S608
        "JOIN members m ON m.task_id = s.id AND m.epoch = s.epoch JOIN tasks t ON t.id = m.task_id "
        "WHERE m.node_id = :node /*postgresql ORDER BY t.id FOR UPDATE OF t, m*/",
        {"node": node},
        {"reported": Relation(HOLDS, leases)},
    )
    reports = MemberReports(limits)
    open_members: dict[tuple[int, int], _Reported] = {}
    over: set[tuple[int, int]] = set()
    for task, member in rows:
        if member.holding:
            open_members[task.id, task.epoch] = _reported(task, member)
        elif member.reason != EndReason.LOST:
            over.add((task.id, task.epoch))
    for item in items:
        one = open_members.get((item.task, item.epoch))
        if one is not None:
            _add(one, item, at, reports)
        elif (item.task, item.epoch) not in over:
            reports.rest.append(item)
    if open_members:
        reports.unusable = list(dict.fromkeys(reports.unusable))
        yield from _number_chunks(list(open_members.values()), reports)
        yield from _settle(list(open_members.values()), at, reports)
    return reports


def lose_members(node: NodeId, at: Instant) -> Operation[MemberReports]:
    rows = yield from select_pairs(
        HeldTask,
        _StoredMember,
        f"SELECT {HELD_MEMBER} FROM members m JOIN tasks t ON t.id = m.task_id "  # noqa: S608
        "WHERE m.node_id = :node AND m.holding = 1 ORDER BY t.id /*postgresql FOR UPDATE OF t, m*/",
        {"node": node},
    )
    reports = MemberReports()
    lost = [_reported(task, member) for task, member in rows]
    for one in lost:
        one.end = Finished(one.task.id, one.task.epoch, EndReason.LOST)
    if lost:
        yield from _settle(lost, at, reports)
    return reports


def _reported(task: HeldTask, member: _StoredMember) -> _Reported:
    return _Reported(task, member.rank, member.started_at, member.logged, member.mid_line)


def _add(one: _Reported, item: ReportItem, at: Instant, reports: MemberReports) -> None:
    if type(item) is LogChunk:
        if not item.sequence >> EPOCH_SHIFT:
            one.chunks.append(item)
        return
    if one.ended:
        return
    task = one.task.id
    match item:
        case Started():
            if one.started_at is None:
                one.started_at = at
                reports.noted.append(task)
            if one.rank == 0 and one.task.status in STARTABLE:
                held = one.task
                reports.started[task] = StartedTask(task, item.epoch, held.user_id, held.team_id)
        case Finished():
            one.end = item
        case HandedBack() | Released():
            one.released = True
        case Reached() if one.rank == 0:
            reports.reached.append(item)
        case Progressed() if one.rank == 0:
            reports.progressed[task] = one.task, item
        case Checkpointed() if one.rank == 0:
            reports.saved[task] = item
        case Checkpointed():
            reports.unusable.append(one.hold)


def _number_chunks(members: Sequence[_Reported], reports: MemberReports) -> Operation[None]:
    new: dict[TaskId, list[tuple[_Reported, LogChunk]]] = {}
    for one in members:
        for chunk in sorted(one.chunks, key=lambda chunk: chunk.sequence):
            if chunk.sequence >= one.logged:
                one.logged = chunk.sequence + 1
                new.setdefault(one.task.id, []).append((one, chunk))
    if not new:
        return
    rows = yield from select(
        _LoggedChunks,
        "UPDATE gangs SET logged = logged + c.count FROM {counts} AS c WHERE gangs.task_id = c.id "
        "RETURNING gangs.task_id, logged",
        {},
        {"counts": Relation(COUNTED, [(task, len(pairs)) for task, pairs in sorted(new.items())])},
    )
    for task, logged in rows:
        first = logged - len(new[task])
        for sequence, (one, chunk) in enumerate(new[task], first):
            bit = 1 if chunk.stream == 1 else 2
            data = marked(chunk.data, one.rank, in_line=bool(one.mid_line & bit))
            if data:
                open_line = data[-1] != NEWLINE
                one.mid_line = one.mid_line & ~bit | (bit if open_line else 0)
            reports.chunks.append(LogChunk(task, one.task.epoch, sequence, chunk.stream, data))


def _settle(members: Sequence[_Reported], at: Instant, reports: MemberReports) -> Operation[None]:
    ending = [one for one in members if one.ended]
    found = yield from gangs(one.task.id for one in ending)
    closing: list[tuple[_Reported, GangStatus]] = []
    for one in ending:
        before = found[one.task.id]
        instruction = call(before.standing)
        end = _end_of(one, instruction)
        one.status = _status_after(before, one, end)
        gang = before.with_member(one.status)
        cancelled = one.task.status == CANCELLED
        if one.rank == 0 and not cancelled:  # kept from now on, however long the others take
            reports.named += [result_of(one.task, output.sha256) for output in end.outputs]
        if not gang.holding:
            closing.append((one, gang))
        elif instruction is None and not cancelled and not gang.preempting:
            _call_off(one, gang, reports)
    yield from _write(members, at)
    ends: list[Ends] = []
    for one, gang in closing:
        ends.append((yield from _close(one, gang, at, reports)))
    for each in ends:
        yield from each.write()
        reports.ended += each.ended
        reports.requeued += each.requeued
        reports.released += each.released
    if closing:
        yield from delete_rows("gangs", [one.task.id for one, _ in closing])
    yield from _drop_results(
        [one.task.id for one, gang in closing if gang.members[0].outputs], reports
    )


def _end_of(one: _Reported, instruction: GangOrder | None) -> Finished:
    if one.end is not None:
        return one.end
    if one.task.status == CANCELLED or instruction is GangOrder.END:
        reason = EndReason.CANCELLED
    else:
        reason = EndReason.HANDED_BACK if one.started_at is None else EndReason.PREEMPTED
    return Finished(one.task.id, one.task.epoch, reason)


def _status_after(gang: GangStatus, one: _Reported, end: Finished) -> MemberStatus:
    fault = fault_in(end, begun=one.started_at is not None)
    return gang.members[one.rank]._replace(
        holding=0,
        started_at=one.started_at if fault is None else None,
        place=len(gang.members) - len(gang.holding) + 1,
        reason=(end.reason if fault is None else archived_as(fault)).value,
        exit_code=None if end.exit_code is None else max(-INT, min(end.exit_code, INT)),
        detail=storable(end.error_text[:DETAIL_LETTERS]),
        duration_us=end.duration_us,
        outputs=outputs_text(end.outputs) if one.rank == 0 else None,
    )


def _call_off(one: _Reported, gang: GangStatus, reports: MemberReports) -> None:
    instruction = call(gang.standing)
    if instruction is not None:
        to = reports.to_stop if instruction is GangOrder.END else reports.to_preempt
        to += [(node, one.hold) for node in gang.holding]


def _write(members: Sequence[_Reported], at: Instant) -> Operation[None]:
    seal = yield from sealing({one.task.account for one in members})
    rows: list[Row] = []
    for one in members:
        after = one.status
        ended: Row = (None, None, None, None, "", 0, None)
        if after is not None:
            detail = after.detail
            if detail:
                place = MEMBER_DETAIL.place_of(one.task.id, one.rank)
                detail = seal.text(one.task.account, place, detail)
            ended = (at, after.place, after.reason, after.exit_code, detail)
            ended += (after.duration_us, after.outputs)
        started_at = one.started_at if after is None else after.started_at
        first: Row = (one.task.id, one.rank, one.task.epoch, int(after is None), started_at)
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


def _close(
    one: _Reported, gang: GangStatus, at: Instant, reports: MemberReports
) -> Operation[Ends]:
    ends = Ends(at, reports.limits)
    ends.add_members(
        one.task.id,
        [EndedMember(each.node_id, each.allocation, each.started_at) for each in gang.members],
    )
    if one.task.status == CANCELLED:
        ends.release(one.task)
        return ends
    found = verdict(gang.standing)
    assert found is not None, "all nodes have released the gang"
    first, cause = gang.members[0], gang.members[found.rank]
    started_at = one.task.started_at
    if started_at is None:  # rank 0 did not report its start
        started_at = first.started_at or cause.started_at
    row = one.task._replace(node_id=cause.node_id, started_at=started_at)
    text = _cause_text(found, cause)
    if found.reason is EndReason.LOST and gang.spec.on_loss is OnLoss.REFORM:
        yield from lose(ends, [row], text)
    elif found.reason is EndReason.LOST:
        text = f"{text}; the task asks to end then (on_loss=end)"
        ends.end(row, Move.FAILED, EndReason.LOST, started_at=started_at, error_text=text)
    elif found.reason in UNSTARTED and cause.started_at is None:
        # no Fault.NODE: a failed gang is no reason for a backoff of the node, its single-node tasks are
        fault = Fault.UNCLEAR if found.reason is EndReason.SANDBOX_FAILED else Fault.PART
        unstarted = [FailedStart(row, fault, text, found.exit_code)]
        yield from could_not_start(ends, unstarted, {row.spec_id: gang.spec.retries})
    else:
        end = Finished(
            row.id,
            row.epoch,
            found.reason,
            found.exit_code,
            error_text=text,
            duration_us=first.duration_us or cause.duration_us,
            outputs=outputs_from(first.outputs),
        )
        if end.exit_code == 0:
            [(_, end)] = yield from without_missing([(row, end)])
        left = row.tries < gang.spec.retries
        finish(ends, row, end, tries_left=left, named=reports.named)
    return ends


def _cause_text(found: GangVerdict, cause: MemberStatus) -> str:
    if found.reason is EndReason.LOST:
        return f"rank {found.rank} was lost with its node"
    if not found.rank:
        return cause.detail
    text = cause.detail
    if not text:
        text = cause.reason.replace("_", " ") if cause.reason else "ended"
        text += "" if cause.exit_code is None else f" with code {cause.exit_code}"
    return f"rank {found.rank}: {text}"


def _drop_results(tasks: Sequence[TaskId], reports: MemberReports) -> Operation[None]:
    requeued = {each.task for each in reports.requeued}
    dropped = [task for task in tasks if task in requeued]
    if dropped:
        reports.named = [named for named in reports.named if named.task not in requeued]
        gone = yield from select(
            ArtifactReference,
            "DELETE FROM artifact_refs WHERE kind = 'result' AND holder IN (SELECT id FROM {tasks} AS i) "
            "RETURNING user_id, team_id, sha256",
            {},
            {"tasks": of_ids(dropped)},
        )
        yield from release(gone)

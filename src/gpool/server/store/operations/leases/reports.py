"""Reports of agents about their leases, fenced by (task, epoch, node); `leases` explains leases and fencing.

A report is about a lease of a single-node task, else a gang's member (`gangs`), else refused. A (task, epoch) has at
most one end. A report repeated by the lease's node has no effect, and is refused if the lease expired: an agent
repeats its reports until it knows that they are durable. Where replicas exist, the node's connection is a fence too
(`connections`). One file because all kinds of reports share one read of their leases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

from gpool.core.ids import NodeId, SpecId, TaskId
from gpool.core.lifecycle import Move, sources
from gpool.core.model import EndReason, Instant
from gpool.core.specs.progress import StoredProgress, stored_text
from gpool.server.store.operations.leases.connections import (
    CURRENT_LINK,
    NO_LINKS,
    Links,
    links_relation,
    still_connected,
)
from gpool.server.store.operations.leases.ends import (
    CANCELLED,
    ON_NODE,
    Ends,
    FailedStart,
    could_not_start,
    finish,
    lose,
)
from gpool.server.store.operations.leases.finished import HELD, HeldTask, fault_in, without_missing
from gpool.server.store.operations.leases.gangs import MemberReports, lose_members, record_members
from gpool.server.store.operations.leases.grants import is_current_term
from gpool.server.store.operations.money.receipts import put_signatures
from gpool.server.store.operations.tasks.artifacts import NamedResult, keep_results
from gpool.server.store.operations.tasks.progress import append_chunks, note_phases, save
from gpool.server.store.operations.tasks.results import results_of
from gpool.server.store.operations.tasks.storage import NO_LIMITS, StorageLimits
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import of_ids, select, storable, values
from gpool.server.store.sealing import PROGRESS, sealing
from gpool.server.store.values import Recording, StartedTask
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

STARTABLE = tuple(status.value for status in sources(Move.STARTED))
HOLDS = (("id", "int"), ("epoch", "int"))
REPORTED = (
    f"SELECT {HELD} FROM {{reported}} AS i JOIN tasks t ON t.id = i.id "  # noqa: S608
    "WHERE t.node_id = i.node AND t.holding <> 0 /*postgresql ORDER BY t.id FOR UPDATE OF t*/"
)
REPORTED_BY_LINK = (
    f"SELECT {HELD} FROM {{reported}} AS i JOIN {{links}} AS l ON l.node = i.node {CURRENT_LINK}"  # noqa: S608
    "JOIN tasks t ON t.id = i.id WHERE t.node_id = i.node AND t.holding <> 0 "
    "/*postgresql ORDER BY t.id FOR UPDATE OF t FOR SHARE OF c*/"
)
"""Tasks before connections, as an expiry locks them."""
BIGINT = (1 << 63) - 1
"""Largest value of an integer column."""

Reports = tuple[NodeId, Sequence[ReportItem]]
"""The items of one frame, and the node that sent it."""


class _Retries(NamedTuple):
    id: SpecId
    retries: int


class _Lease(NamedTuple):
    id: TaskId
    epoch: int


class _Attempt(NamedTuple):
    task_id: TaskId
    epoch: int
    reason: str


@dataclass(slots=True)
class _LeaseReports:
    ends: Ends
    started: dict[TaskId, StartedTask] = field(default_factory=dict)
    failed: list[tuple[HeldTask, Finished]] = field(default_factory=list)
    with_results: list[tuple[HeldTask, Finished]] = field(default_factory=list)  # successes
    unstarted: list[FailedStart] = field(default_factory=list)
    lost: dict[str, list[HeldTask]] = field(default_factory=dict)  # by the cause
    named: list[NamedResult] = field(default_factory=list)
    chunks: list[LogChunk] = field(default_factory=list)
    reached: list[Reached] = field(default_factory=list)
    saved: dict[TaskId, Checkpointed] = field(default_factory=dict)
    progressed: dict[TaskId, tuple[HeldTask, Progressed]] = field(default_factory=dict)

    def add(self, row: HeldTask, item: ReportItem) -> bool:
        match item:
            case Finished():
                begun = self.started.pop(row.id, None) is not None or row.started_at is not None
                fault = None
                if item.reason is EndReason.SANDBOX_FAILED:
                    fault = fault_in(item, begun=begun)
                if row.status == CANCELLED:
                    self.ends.release(row)
                elif fault is not None:
                    failed = FailedStart(row, fault, item.error_text, item.exit_code)
                    self.unstarted.append(failed)
                elif item.reason is EndReason.RETURNED or item.exit_code == 0:
                    if item.outputs or item.value_sha256:
                        self.with_results.append((row, item))
                    else:
                        finish(self.ends, row, item, tries_left=False, named=self.named)
                elif item.reason is EndReason.LOST:
                    self.lost.setdefault(item.error_text, []).append(row)
                else:
                    self.failed.append((row, item))
                return False
            case Started():
                if row.status in STARTABLE:
                    self.started[row.id] = StartedTask(row.id, row.epoch, row.user_id, row.team_id)
            case LogChunk():
                self.chunks.append(item)
            case Reached():
                self.reached.append(item)
            case Checkpointed():
                self.saved[row.id] = item  # the last one of a frame is the newest
            case Progressed():
                self.progressed[row.id] = row, item
            case HandedBack() | Released():
                self.started.pop(row.id, None)
                if row.status == CANCELLED:
                    self.ends.release(row)
                else:
                    begun = row.started_at is not None
                    reason = EndReason.PREEMPTED if begun else EndReason.HANDED_BACK
                    self.ends.requeue(row, Move.REQUEUED, reason, started_at=row.started_at)
                return False
        return True

    def write(self, at: Instant) -> Operation[Recording]:
        if self.with_results:
            self.failed += yield from without_missing(self.with_results)
        if self.failed or self.unstarted:
            retries = yield from _retries(
                {row.spec_id for row, _ in self.failed}
                | {each.row.spec_id for each in self.unstarted}
            )
            if self.unstarted:
                yield from could_not_start(self.ends, self.unstarted, retries)
            for row, item in self.failed:
                left = row.tries < retries[row.spec_id]
                finish(self.ends, row, item, tries_left=left, named=self.named)
        for detail, rows in self.lost.items():
            yield from lose(self.ends, rows, detail)
        if self.started:
            yield from _start(self.started, at)
        unusable: tuple[Hold, ...] = ()
        if self.reached:
            yield from note_phases(self.reached, at)
        if self.saved:
            unusable = yield from save(self.saved, at, self.ends.limits)
        if self.progressed:
            yield from _put_progress(self.progressed, at)
        logged = yield from append_chunks(self.chunks, self.ends.limits)
        yield from self.ends.write()
        yield from keep_results(self.named)
        return Recording(
            started=tuple(self.started),
            ended=tuple(self.ends.ended),
            requeued=tuple(self.ends.requeued),
            released=tuple(self.ends.released),
            logged=logged,
            noted=(*(TaskId(item.task) for item in self.reached), *self.saved, *self.progressed),
            unusable=unusable,
            begun=tuple(self.started.values()),
        )


@operation
def record(
    frames: Sequence[Reports],
    at: Instant,
    limits: StorageLimits = NO_LIMITS,
    awaited: Collection[TaskId] = (),
    links: Links = NO_LINKS,
) -> Operation[Recording]:
    """Record reports. `limits`: default storage quotas of the tasks' owners, whose data over them is dropped.

    `awaited`: tasks whose results are returned if they end, read while their pages are in the cache. `links`: where
    replicas exist, the connection by which each node's frames came; a node with a newer one is `overtaken`.
    """
    items = [(node, item) for node, items in frames for item in items]
    refused = [
        (node, Hold(item.task, item.epoch))
        for node, item in items
        if item.task > BIGINT or item.epoch > BIGINT  # outside the range of the columns: no task's
    ]
    if refused:
        items = [each for each in items if max(each[1].task, each[1].epoch) <= BIGINT]
    reported = Relation(ON_NODE, sorted({(item.task, node) for node, item in items}))
    rows = yield from select(
        HeldTask,
        REPORTED_BY_LINK if links else REPORTED,
        {},
        {"reported": reported, "links": links_relation(links)} if links else {"reported": reported},
    )
    held = {(row.node_id, row.id): row for row in rows}
    batch = _LeaseReports(Ends(at, limits))
    ended: set[int] = set()
    unknown: dict[NodeId, list[ReportItem]] = {}
    for node, item in items:
        row = held.get((node, TaskId(item.task)))
        if row is None or row.epoch != item.epoch:
            unknown.setdefault(node, []).append(item)
        elif item.task not in ended:
            if not batch.add(row, item):
                ended.add(item.task)
        elif type(item) is LogChunk:
            batch.chunks.append(item)  # sent after the end of its lease, in the same frame
        else:
            unknown.setdefault(node, []).append(item)
    overtaken: set[NodeId] = set()
    if links and unknown:
        asked = {node: links[node] for node in unknown}
        overtaken = asked.keys() - (yield from still_connected(asked))
    recordings = [(yield from batch.write(at))]
    for node, about in unknown.items():
        if node in overtaken:
            continue
        reports = yield from record_members(node, about, at, limits)
        recordings.append((yield from _write_members(reports, at, limits)))
        if reports.rest:
            refused += yield from _refused(node, reports.rest)
    recording = _merged(recordings, refused)
    free: Collection[tuple[int, int]] = batch.ends.free  # no receipt
    signed = [
        (node, item)
        for node, item in items
        if _is_signed(item) and (item.task, item.epoch) not in free and node not in overtaken
    ]
    if signed:
        yield from put_signatures(signed, set(refused), at)
    if overtaken:
        recording = replace(recording, overtaken=tuple(sorted(overtaken)))
    if awaited:
        return replace(recording, results=(yield from results_of(awaited)))
    return recording


def _is_signed(item: ReportItem) -> bool:
    return (type(item) is Finished or type(item) is Released) and item.work is not None


@operation
def record_if_current(
    frames: Sequence[Reports], term: int, at: Instant, limits: StorageLimits = NO_LIMITS
) -> Operation[Recording]:
    """Record ends that the server decided itself, unless another scheduler has taken over."""
    if not (yield from is_current_term(term)):
        return Recording()
    return (yield from record(frames, at, limits))


def _write_members(
    reports: MemberReports, at: Instant, limits: StorageLimits
) -> Operation[Recording]:
    batch = _LeaseReports(
        Ends(at, limits),
        started=reports.started,
        named=reports.named,
        chunks=reports.chunks,
        reached=reports.reached,
        saved=reports.saved,
        progressed=reports.progressed,
    )
    written = yield from batch.write(at)
    return _merged([written, reports.recording()], ())


def _merged(recordings: Sequence[Recording], refused: Iterable[tuple[NodeId, Hold]]) -> Recording:
    if len(recordings) == 1 and not refused:
        return recordings[0]
    return Recording(
        started=tuple(each for one in recordings for each in one.started),
        ended=tuple(each for one in recordings for each in one.ended),
        requeued=tuple(each for one in recordings for each in one.requeued),
        released=tuple(each for one in recordings for each in one.released),
        to_stop=tuple(each for one in recordings for each in one.to_stop),
        to_preempt=tuple(each for one in recordings for each in one.to_preempt),
        logged=tuple(each for one in recordings for each in one.logged),
        noted=tuple(each for one in recordings for each in one.noted),
        unusable=tuple(each for one in recordings for each in one.unusable),
        begun=tuple(each for one in recordings for each in one.begun),
        refused=tuple(refused),
    )


def _retries(specs: set[SpecId]) -> Operation[dict[SpecId, int]]:
    rows = yield from select(
        _Retries,
        "SELECT s.id, s.retries FROM {specs} AS i JOIN specs s ON s.id = i.id",
        {},
        {"specs": of_ids(specs)},
    )
    return {row.id: row.retries for row in rows}


def _start(started: Mapping[TaskId, StartedTask], at: Instant) -> Operation[None]:
    yield Statement(
        "UPDATE tasks SET status = 'running', started_at = :at FROM {started} AS s "  # noqa: S608
        "WHERE tasks.id = s.id AND tasks.epoch = s.epoch AND tasks.holding <> 0 "
        f"AND tasks.status IN ({', '.join(repr(word) for word in STARTABLE)})",
        {"at": at},
        {"started": Relation(HOLDS, [each[:2] for each in started.values()])},
    )


def _put_progress(
    progressed: Mapping[TaskId, tuple[HeldTask, Progressed]], at: Instant
) -> Operation[None]:
    seal = yield from sealing({row.account for row, _ in progressed.values()})
    rows = []
    for task, (row, item) in sorted(progressed.items()):
        text = stored_text(StoredProgress(item.epoch, item.millionths, at, storable(item.text)))
        rows.append((task, item.epoch, seal.text(row.account, PROGRESS.place_of(task), text)))
    yield Statement(
        "UPDATE tasks SET progress = p.progress FROM {progressed} AS p "
        "WHERE tasks.id = p.id AND tasks.epoch = p.epoch AND tasks.holding <> 0",
        {},
        {"progressed": Relation((*HOLDS, ("progress", "text")), rows)},
    )


def _refused(node: NodeId, reported: Sequence[ReportItem]) -> Operation[list[tuple[NodeId, Hold]]]:
    leases = {(item.task, item.epoch) for item in reported}
    parameters = {"node": node}
    relations = {"reported": Relation(HOLDS, sorted(leases))}
    ended_here = yield from select(
        _Lease,
        "SELECT t.id, t.epoch FROM {reported} AS s JOIN tasks t ON t.id = s.id AND t.epoch = s.epoch "
        "WHERE t.node_id = :node AND (t.finished_at IS NOT NULL AND t.reason <> 'loses_nodes' OR t.holding = 1)",
        parameters,
        relations,
    )
    archived = yield from select(
        _Attempt,
        "SELECT a.task_id, a.epoch, a.reason FROM {reported} AS s "
        "JOIN attempts a ON a.task_id = s.id AND a.epoch = s.epoch WHERE a.node_id = :node",
        parameters,
        relations,
    )
    repeated: set[tuple[int, int]] = {(row.id, row.epoch) for row in ended_here}
    for row in archived:
        if row.reason == EndReason.LOST:
            repeated.discard((row.task_id, row.epoch))
        else:
            repeated.add((row.task_id, row.epoch))
    return [(node, Hold(task, epoch)) for task, epoch in sorted(leases - repeated)]


class NotExpired(Enum):
    HEARD = auto()  # a heartbeat newer than the caller's was stored
    DEPOSED = auto()  # another scheduler has taken over


@operation
def expire_silent(
    node: NodeId, heard_at: Instant, term: int, at: Instant, seen: Instant | None = None
) -> Operation[Recording | NotExpired]:
    """Expire the leases of a node whose last heartbeat, as far as the caller knows, came at `heard_at`.

    Fenced by the stored heartbeat and the term: the leader expires no node that another replica hears. `seen`: the stored
    heartbeat that the caller saw last, of a node that another replica hears by its own clock.
    """
    if not (yield from is_current_term(term)):
        return NotExpired.DEPOSED
    stored = yield from values(
        int,
        "SELECT COALESCE(last_beat_at, 0) FROM nodes WHERE id = :node /*postgresql FOR UPDATE*/",
        {"node": node},
    )
    if any(beat > heard_at or (seen is not None and beat != seen) for beat in stored):
        return NotExpired.HEARD
    return (yield from expire(node, at))


@operation
def expire(node: NodeId, at: Instant) -> Operation[Recording]:
    """End all leases of the node as lost, now: it is removed, its owner is suspended, or `expire_silent` has checked."""
    rows = yield from select(
        HeldTask,
        f"SELECT {HELD} FROM tasks t WHERE t.node_id = :node AND t.holding = 1 "  # noqa: S608
        "ORDER BY t.id /*postgresql FOR UPDATE*/",
        {"node": node},
    )
    gangs = yield from lose_members(node, at)
    ends = Ends(at)
    if rows:
        yield from lose(ends, rows)
        yield from ends.write()
    own = Recording(
        ended=tuple(ends.ended), requeued=tuple(ends.requeued), released=tuple(ends.released)
    )
    return _merged([own, gangs.recording()], ())

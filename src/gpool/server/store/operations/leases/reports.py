"""What agents report about their leases, fenced by (task, epoch, node). Refuses what an old lease says.

What is about none of a node's own leases may be about a member of a gang: those are looked for last, so the rest costs no more.

At most one end is accepted for a (task, epoch). Something said again about a lease that this node really had, and that
did not expire, is accepted in silence: the agent repeats itself until it is told that its report is durable.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpool.core.ids import NodeId, TaskId
from gpool.core.lifecycle import Move, sources
from gpool.core.model import EndReason, Fault, Instant, TaskStatus
from gpool.server.store.operation import operation
from gpool.server.store.operations.gangs.gangs import Taken, lose_members, take
from gpool.server.store.operations.leases.ends import (
    HELD,
    Ends,
    Named,
    could_not_start,
    fault_in,
    finish,
    lose,
)
from gpool.server.store.operations.tasks.artifacts import keep_results
from gpool.server.store.operations.tasks.checkpoints import note_phases, save
from gpool.server.store.operations.tasks.logs import append_chunks
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.rows import of_ids
from gpool.server.store.values import Recording
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

STARTABLE = tuple(status.value for status in sources(Move.STARTED))
CANCELLED = TaskStatus.CANCELLED.value
HOLDS = (("id", "int"), ("epoch", "int"))
SAID = (("id", "int"), ("node", "int"))


@operation
def record(node: NodeId, items: Sequence[ReportItem], at: Instant) -> Operation[Recording]:
    impossible = [item for item in items if (item.task | item.epoch) >> 63]
    if impossible:
        items = [item for item in items if not (item.task | item.epoch) >> 63]
    rows = yield Statement(
        f"SELECT {HELD} FROM {{tasks}} AS i JOIN tasks t ON t.id = i.id "  # noqa: S608
        "WHERE t.node_id = :node AND t.holding <> 0 /*postgresql ORDER BY t.id FOR UPDATE OF t*/",
        {"node": node},
        {"tasks": of_ids(item.task for item in items)},
    )
    held: dict[int, Row] = {row[0]: row for row in rows}
    open_now = dict(held)
    ends = Ends(node, at)
    started: dict[int, int] = {}
    failed: list[tuple[Row, Finished]] = []
    unstarted: list[tuple[Row, Fault, str, int | None]] = []
    lost: list[Row] = []
    named: list[Named] = []
    chunks: list[LogChunk] = []
    reached: list[Reached] = []
    saved: dict[int, Checkpointed] = {}
    doubtful: list[ReportItem] = []

    for item in items:
        row = open_now.get(item.task)
        if row is None or row[1] != item.epoch:
            at_first = held.get(item.task)
            if type(item) is LogChunk and at_first is not None and at_first[1] == item.epoch:
                chunks.append(item)  # in one frame with the end it belongs to
            else:
                doubtful.append(item)
            continue
        match item:
            case Finished():
                del open_now[item.task]
                begun = started.pop(item.task, None) is not None or row[7] is not None
                fault = fault_in(item, begun=begun)
                if row[5] == CANCELLED:
                    ends.let_go(row)
                elif fault is not None:
                    unstarted.append((row, fault, item.error_text, item.exit_code))
                elif item.reason is EndReason.RETURNED or item.exit_code == 0:
                    finish(ends, row, item, at, tries_left=False, named=named)
                elif item.reason is EndReason.LOST:
                    lost.append(row)
                else:
                    failed.append((row, item))
            case Started():
                if row[5] in STARTABLE:
                    started[item.task] = item.epoch
            case LogChunk():
                chunks.append(item)
            case Reached():
                reached.append(item)
            case Checkpointed():
                saved[item.task] = item  # the last one of a frame is the newest
            case HandedBack() | Released():
                del open_now[item.task]
                started.pop(item.task, None)
                if row[5] == CANCELLED:
                    ends.let_go(row)
                else:
                    begun = row[7] is not None
                    reason = EndReason.PREEMPTED if begun else EndReason.HANDED_BACK
                    ends.requeue(row, Move.REQUEUED, reason, started_at=row[7])

    gangs = (yield from take(node, doubtful, at)) if doubtful else Taken()
    doubtful = gangs.rest
    started |= gangs.started
    chunks += gangs.chunks
    reached += gangs.reached
    saved |= gangs.saved
    named += gangs.named
    if failed or unstarted:
        specs = {row[3] for row, _ in failed} | {row[3] for row, *_ in unstarted}
        retries = yield from _retries(specs)
        if unstarted:
            yield from could_not_start(ends, unstarted, retries)
        for row, item in failed:
            finish(ends, row, item, at, tries_left=row[8] < retries[row[3]], named=named)
    if lost:
        yield from lose(ends, lost)
    if started:
        yield from _start(started, at)
    unusable: tuple[Hold, ...] = ()
    if reached:
        yield from note_phases(reached, at)
    if saved:
        unusable = yield from save(saved, at)
    logged = yield from append_chunks(chunks)
    yield from ends.write()
    yield from keep_results(named)
    refused = (yield from _refused(node, doubtful)) if doubtful else ()
    refused += tuple(Hold(item.task, item.epoch) for item in impossible)
    noted = (TaskId(each) for each in (*(item.task for item in reached), *saved))
    return Recording(
        started=tuple(TaskId(task) for task in started),
        ended=(*ends.ended, *gangs.ended),
        requeued=(*ends.requeued, *gangs.requeued),
        released=(*ends.released, *gangs.released),
        to_stop=tuple(gangs.to_stop),
        to_preempt=tuple(gangs.to_preempt),
        logged=logged,
        noted=(*noted, *gangs.noted),
        unusable=(*unusable, *gangs.unusable),
        refused=refused,
    )


@operation
def record_together(
    frames: Sequence[tuple[NodeId, Sequence[ReportItem]]], at: Instant
) -> Operation[tuple[Recording, dict[int, Recording]]]:
    """What several nodes report, one frame each: what merely starts or ends well in one write for all of them.

    Whatever else a frame says, it is recorded by itself; those recordings come by the frame's place.
    """
    plain = [place for place, (_, items) in enumerate(frames) if all(map(_is_plain, items))]
    said = [(item.task, frames[place][0]) for place in plain for item in frames[place][1]]
    rows = yield Statement(
        f"SELECT {HELD}, t.node_id FROM {{said}} AS i JOIN tasks t ON t.id = i.id "  # noqa: S608
        "WHERE t.node_id = i.node AND t.holding <> 0 /*postgresql ORDER BY t.id FOR UPDATE OF t*/",
        {},
        {"said": Relation(SAID, sorted(set(said)))},
    )
    held: dict[tuple[int, int], Row] = {(row[0], row[-1]): row[:-1] for row in rows}
    ends = Ends(NodeId(0), at)  # of many nodes; nothing of it goes to the archive
    started: dict[int, int] = {}
    named: list[Named] = []
    alone = set(range(len(frames))).difference(plain)
    for place in plain:
        node, items = frames[place]
        known = [held.get((item.task, node)) for item in items]
        if len({item.task for item in items}) < len(items) or any(
            row is None or row[1] != item.epoch or row[5] == CANCELLED
            for row, item in zip(known, items, strict=True)
        ):
            alone.add(place)
            continue
        for row, item in zip(known, items, strict=True):
            assert row is not None
            del held[
                item.task, node
            ]  # said by another frame of this node too, it is looked at again
            if type(item) is Finished:
                finish(ends, row, item, at, tries_left=False, named=named)
            elif row[5] in STARTABLE:
                started[item.task] = item.epoch
    if started:
        yield from _start(started, at)
    yield from ends.write()
    yield from keep_results(named)
    others: dict[int, Recording] = {}
    for place in sorted(alone):
        others[place] = yield from record(*frames[place], at)
    together = Recording(
        started=tuple(TaskId(task) for task in started),
        ended=tuple(ends.ended),
        released=tuple(ends.released),
    )
    return together, others


def _is_plain(item: ReportItem) -> bool:
    """A start, or an end that is a success: nothing has to be looked up for it."""
    if type(item) is Finished:
        exited = item.reason is EndReason.EXITED and item.exit_code == 0
        is_success = exited or item.reason is EndReason.RETURNED
        return is_success and not (item.task | item.epoch) >> 63
    return type(item) is Started and not (item.task | item.epoch) >> 63


def _retries(specs: set[int]) -> Operation[dict[int, int]]:
    rows = yield Statement(
        "SELECT s.id, s.retries FROM {specs} AS i JOIN specs s ON s.id = i.id",
        {},
        {"specs": of_ids(specs)},
    )
    return dict(rows)


def _start(started: dict[int, int], at: Instant) -> Operation[None]:
    yield Statement(
        "UPDATE tasks SET status = 'running', started_at = :at FROM {started} AS s "  # noqa: S608
        "WHERE tasks.id = s.id AND tasks.epoch = s.epoch AND tasks.holding <> 0 "
        f"AND tasks.status IN ({', '.join(repr(word) for word in STARTABLE)})",
        {"at": at},
        {"started": Relation(HOLDS, list(started.items()))},
    )


def _refused(node: NodeId, doubtful: Sequence[ReportItem]) -> Operation[tuple[Hold, ...]]:
    """Of what this node says about leases it does not hold: what it never had, or had and let expire."""
    said = {(item.task, item.epoch) for item in doubtful}
    parameters = {"node": node}
    relations = {"said": Relation(HOLDS, sorted(said))}
    ended_here = yield Statement(
        "SELECT t.id, t.epoch FROM {said} AS s JOIN tasks t ON t.id = s.id AND t.epoch = s.epoch "
        "WHERE t.node_id = :node AND (t.finished_at IS NOT NULL AND t.reason <> 'loses_nodes' OR t.holding = 1)",
        parameters,
        relations,
    )
    archived = yield Statement(
        "SELECT a.task_id, a.epoch, a.reason FROM {said} AS s "
        "JOIN attempts a ON a.task_id = s.id AND a.epoch = s.epoch WHERE a.node_id = :node",
        parameters,
        relations,
    )
    repeated = {(row[0], row[1]) for row in ended_here}
    repeated |= {(row[0], row[1]) for row in archived}
    repeated -= {(row[0], row[1]) for row in archived if row[2] == EndReason.LOST}
    return tuple(Hold(task, epoch) for task, epoch in sorted(said - repeated))


@operation
def expire(node: NodeId, at: Instant) -> Operation[Recording]:
    """The node is lost: every lease it holds ends."""
    rows = yield Statement(
        f"SELECT {HELD} FROM tasks t WHERE t.node_id = :node AND t.holding = 1 "  # noqa: S608
        "ORDER BY t.id /*postgresql FOR UPDATE*/",
        {"node": node},
    )
    gangs = yield from lose_members(node, at)
    ends = Ends(node, at)
    if rows:
        yield from lose(ends, rows)
        yield from ends.write()
    return Recording(
        ended=(*ends.ended, *gangs.ended),
        requeued=(*ends.requeued, *gangs.requeued),
        released=(*ends.released, *gangs.released),
        to_stop=tuple(gangs.to_stop),
        to_preempt=tuple(gangs.to_preempt),
    )

"""Reading, waiting for and stopping tasks and batches. Objects the caller may not see are reported as missing; a stop is
stored before it is sent.

Cancelling ends a waiting task and marks a running one, which its node stops. Preempting makes the node warn the task,
save its checkpoint and return the lease; the task is queued again, unbilled, without a failed try.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from gpool.core.errors import Conflict, NotFound
from gpool.core.ids import BatchId, TaskId, UserId, encode
from gpool.core.model import Instant, TaskStatus
from gpool.core.permissions import POOL, Action, ObjectKind, TeamId, Thing, missing
from gpool.core.scheduler.state.events import TasksPreempted
from gpool.server.actions.audit import as_operator, audited, entry, note_read
from gpool.server.actions.tasks import documents
from gpool.server.identity.authorization import batch_thing, own, permit, task_thing
from gpool.server.server import Once, Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.identity import teams as teams_operations
from gpool.server.store.operations.leases import grants
from gpool.server.store.operations.tasks import tasks as operations
from gpool.server.store.protocol import Operation, brief, operation
from gpool.server.store.values import Batch, BatchResult, Recording, TaskView
from gpool.wire.documents import BatchDocument, EventDocument, instant_to_datetime

RESULT_ROWS = 1000
CACHED_BYTES = 16 * 1024
"""Largest inline result of a cached task."""
TASK_ROWS = 4
"""Weight of a cached task, in rows of 1 to 2 kB."""
SILENCE_S = 15.0
"""Interval of blank lines on an idle stream, which keep proxies from closing it."""


@dataclass(frozen=True, slots=True)
class Listing:
    before: TaskId | None
    limit: int
    statuses: Sequence[TaskStatus] = ()
    everybody: bool = False
    team: TeamId | None = None
    heads: bool = False  # the first task of each batch only


async def task(
    server: Server, who: Caller, id_: TaskId, action: Action = Action.TASK_READ
) -> TaskView:
    view = await server.store.read(brief(operations.task(id_, None)))
    return await _permitted(server, who, id_, action, view)


async def polled_task(server: Server, who: Caller, id_: TaskId) -> TaskView:
    """The task from the cache: with other replicas, as it was at most a second ago."""
    reading = brief(operations.task(id_, None))
    view = await server.reads.read(server.store, ("task", id_), reading, ids=ids_of, rows=_rows_of)
    return await _permitted(server, who, id_, Action.TASK_READ, view)


async def _permitted(
    server: Server, who: Caller, id_: TaskId, action: Action, view: TaskView | None
) -> TaskView:
    permit(who, action, task_thing(view), named(id_))
    await note_read(server, who, Action.TASK_READ, task_thing(view), encode("task", id_))
    assert view is not None
    return view


def ids_of(view: TaskView | None) -> Iterator[int]:
    """Ids of which one is bound by every statement that changes the view."""
    if view is not None:
        record = view.record
        yield from (record.id, record.batch_id, record.user_id, record.spec_id)
        others = (record.team_id, record.node_id, *(member.node for member in view.members))
        yield from (id_ for id_ in others if id_ is not None)


def _rows_of(view: TaskView | None) -> int:
    """Missing tasks and large values are not kept."""
    if view is None or len(view.value) > CACHED_BYTES:
        return 0
    return TASK_ROWS + len(view.value) // 1024


async def task_again(server: Server, id_: TaskId) -> TaskView:
    """The caller's permission was checked earlier in the request."""
    view = await server.store.read(brief(operations.task(id_, None)))
    if view is None:
        raise NotFound(f"no {named(id_)} of yours")
    return view


async def list_tasks(server: Server, who: Caller, listing: Listing) -> tuple[TaskView, ...]:
    """Newest first; for everybody's tasks the route has checked TASKS_LIST_ALL."""
    user, team = await listed_account(server, who, listing.everybody, listing.team)
    teams = () if team is None else (team,)
    return await server.store.read(
        operations.tasks(
            user,
            listing.before,
            listing.limit,
            tuple(listing.statuses),
            teams,
            heads=listing.heads,
        )
    )


async def batches_of(server: Server, views: Sequence[TaskView]) -> tuple[Batch, ...]:
    """Batches of tasks that the caller may read."""
    return await server.store.read(operations.batches({view.row.batch for view in views}))


async def result(server: Server, who: Caller, view: TaskView) -> bytes:
    """Result of an ended task that the caller may read."""
    printed = await server.store.read(brief(operations.has_printed(view.row.id)))
    return documents.result(view, who.user.id, printed)


async def listed_account(
    server: Server, who: Caller, everybody: bool, team: TeamId | None
) -> tuple[UserId | None, TeamId | None]:
    if everybody:
        await note_read(server, who, Action.TASKS_LIST_ALL, POOL, "")
        return None, None
    thing = await acting_account(server, who, team)
    permit(who, Action.TASKS_LIST, thing, _team(team))
    if team is not None:
        await note_read(server, who, Action.TASKS_LIST, thing, encode("team", team))
    return (who.user.id, None) if team is None else (None, team)


async def acting_account(server: Server, who: Caller, team: TeamId | None) -> Thing:
    """The caller's account, or the team's; a team the caller is not in is looked up, as it may not exist."""
    if team is None:
        return own(who)
    if team not in who.teams and await server.store.read(teams_operations.team(team)) is None:
        return missing(ObjectKind.ACCOUNT)
    return Thing(ObjectKind.ACCOUNT, team=team)


def _team(team: TeamId | None) -> str:
    return "account" if team is None else f"team {encode('team', team)}"


async def wait_for_task(server: Server, who: Caller, id_: TaskId, seconds: float) -> TaskView:
    clock = asyncio.get_running_loop().time
    ends = clock() + seconds
    with server.hub.subscription(id_) as changed:
        view = await task(server, who, id_)
        while not view.row.status.is_final and (left := ends - clock()) > 0:
            await changed.wait(left)
            view = await task_again(server, id_)
        return view


@dataclass(frozen=True, slots=True)
class Awaited:
    """Tasks of one batch whose results are awaited; `fresh`: just committed, so none has ended."""

    batch: BatchId
    tasks: Sequence[TaskId]
    fresh: bool


async def wait_for_results(
    server: Server, awaited: Awaited, seconds: float
) -> list[BatchResult] | None:
    clock = asyncio.get_running_loop().time
    ends = clock() + seconds
    found: dict[TaskId, BatchResult] = {}
    missing = set(awaited.tasks)
    after = 0
    with server.hub.subscription(awaited.batch) as changed:
        if awaited.fresh:
            delivered = server.reports.awaited.expect(awaited.tasks, changed.wake)
            try:
                if not await changed.wait(seconds):
                    return None
            finally:
                server.reports.awaited.forget(awaited.tasks)
            if len(delivered) == len(missing):
                return [delivered[id_] for id_ in awaited.tasks]
        while True:
            reading = operations.batch_results(awaited.batch, after, RESULT_ROWS)
            rows = await server.store.read(brief(reading, len(awaited.tasks)))
            for row in rows:
                after = row.sequence
                if row.task in missing:
                    missing.discard(row.task)
                    found[row.task] = row
            if not missing:
                return [found[id_] for id_ in awaited.tasks]
            if len(rows) < RESULT_ROWS and not await changed.wait(ends - clock()):
                return None


async def batch(
    server: Server, who: Caller, id_: BatchId, action: Action = Action.BATCH_READ
) -> Batch:
    found = await server.store.read(operations.batch(id_, None))
    permit(who, action, batch_thing(found), f"batch {encode('batch', id_)}")
    await note_read(server, who, Action.BATCH_READ, batch_thing(found), encode("batch", id_))
    assert found is not None
    return found


async def counted_batch(server: Server, who: Caller, id_: BatchId) -> BatchDocument:
    found = await batch(server, who, id_)
    return documents.batch(found, await server.store.read(operations.batch_counts(id_)))


async def batch_again(server: Server, id_: BatchId) -> Batch:
    found = await server.store.read(operations.batch(id_, None))
    if found is None:
        raise NotFound(f"no batch {encode('batch', id_)} of yours")
    return found


async def batch_results(
    server: Server, who: Caller, id_: BatchId, after: int
) -> AsyncIterator[bytes]:
    await batch(server, who, id_)
    return _results(server, who, id_, after)


async def _results(server: Server, who: Caller, id_: BatchId, after: int) -> AsyncIterator[bytes]:
    with server.hub.subscription(id_) as changed:
        while True:
            rows, now = await server.store.read(_more(id_, after))
            if rows:
                after = rows[-1].sequence
                yield documents.result_lines(rows, who.user.id)
                if len(rows) == RESULT_ROWS:
                    continue
            if now is None or (now.closed and now.done >= now.total):
                return  # `rows` were read with `now`; ended tasks may have been deleted
            while not await changed.wait(SILENCE_S):
                yield b"\n"


@operation
def _more(id_: BatchId, after: int) -> Operation[tuple[tuple[BatchResult, ...], Batch | None]]:
    rows = yield from operations.batch_results(id_, after, RESULT_ROWS)
    now = yield from operations.batch(id_, None)
    return rows, now


async def events(server: Server, who: Caller, id_: TaskId) -> list[EventDocument]:
    story = await server.store.read(operations.story(id_, None))
    permit(who, Action.TASK_READ, task_thing(story), named(id_))
    await note_read(server, who, Action.TASK_READ, task_thing(story), encode("task", id_))
    assert story is not None
    return documents.events(story)


def check_not_expired(view: TaskView) -> None:
    """Raise `NotFound` for the result of a shrunk task."""
    if view.record.shrunk_at is not None:
        day = instant_to_datetime(view.record.shrunk_at).date()
        raise NotFound(f"the result of {named(view.row.id)} expired on {day}; its summary is kept")


def named(id_: TaskId) -> str:
    return f"task {encode('task', id_)}"


# ---- cancellation


async def cancel_task(server: Server, who: Caller, id_: TaskId, once: Once | None) -> bool:
    """Cancel a task; an ended one stays. False: a repetition, without a permission check."""
    answered = await server.write_once(who.user, once, _cancel_task(id_, who, server.now), _nothing)
    if answered.value is not None:
        server.picture.absorb(answered.value)
    return answered.value is not None


async def cancel_batch(server: Server, who: Caller, id_: BatchId, once: Once | None) -> bool:
    answered = await server.write_once(
        who.user, once, _cancel_batch(id_, who, server.now), _nothing
    )
    if answered.value is not None:
        server.picture.absorb(answered.value)
        server.hub.publish((id_,))
    return answered.value is not None


@operation
def _cancel_task(id_: TaskId, who: Caller, at: Instant) -> Operation[Recording]:
    found = yield from operations.task(id_, None)
    thing = task_thing(found)
    permit(who, Action.TASK_CANCEL, thing, named(id_))
    recording = yield from operations.cancel((id_,), None, at)
    yield from as_operator(at, who, Action.TASK_CANCEL, thing, encode("task", id_))
    return recording


@operation
def _cancel_batch(id_: BatchId, who: Caller, at: Instant) -> Operation[Recording]:
    found = yield from operations.batch(id_, None)
    thing = batch_thing(found)
    permit(who, Action.BATCH_CANCEL, thing, f"batch {encode('batch', id_)}")
    yield from operations.close_batch(id_)
    waiting = yield from operations.batch_tasks(id_)
    recording = yield from operations.cancel(waiting, None, at)
    yield from as_operator(at, who, Action.BATCH_CANCEL, thing, encode("batch", id_))
    return recording


# ---- preemption


async def preempt_tasks(
    server: Server, tasks: Sequence[TaskId], because: str | None = None
) -> Recording:
    """The caller has checked the permission. `because`: RECLAIMING; None: for other tasks."""
    recording = await server.write(grants.preempt(tasks, server.now, because))
    _fold(server, recording)
    return recording


async def preempt_task(server: Server, who: Caller, id_: TaskId, once: Once | None) -> bool:
    """Preempt a task for an operator; `Conflict` if it has no lease. False: a repetition."""
    order = entry(server.now, who, "task.preempt", encode("task", id_))
    preempting = audited(_preempt(id_, who, server.now), [order])
    answered = await server.write_once(who.user, once, preempting, _nothing)
    if answered.value is not None:
        _fold(server, answered.value)
    return answered.value is not None


def _fold(server: Server, recording: Recording) -> None:
    """Inform the scheduler, so that it preempts nothing else for the same capacity."""
    asked = dict.fromkeys(TaskId(hold.task) for _, hold in recording.to_preempt)
    if asked:
        server.picture.fold(TasksPreempted(tuple(asked)))
    server.picture.absorb(recording)


@operation
def _preempt(id_: TaskId, who: Caller, at: Instant) -> Operation[Recording]:
    found = yield from operations.task(id_, None)
    permit(who, Action.TASK_PREEMPT, task_thing(found), named(id_))
    assert found is not None
    recording = yield from grants.preempt((id_,), at)
    if not recording.to_preempt:
        state = "is being stopped already" if found.row.holding else "is waiting already"
        state = "has ended" if found.row.status.is_final else state
        raise Conflict(f"{named(id_)} {state}; there is nothing to preempt")
    return recording


def _nothing(_: Recording) -> bytes:
    return b""

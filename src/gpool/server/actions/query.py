"""Reading tasks and batches, and waiting for them. Whoever may not see something is told it is not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from gpool.core import explain as core_explain
from gpool.core.errors import NotFound
from gpool.core.ids import BatchId, TaskId, UserId, encode
from gpool.core.model import Permission, TaskStatus
from gpool.server.actions import documents
from gpool.server.server import Server
from gpool.server.store.operation import brief, operation
from gpool.server.store.operations import tasks as operations
from gpool.server.store.protocol import Operation
from gpool.server.store.values import Batch, BatchResult, TaskView, User
from gpool.wire.documents import EventDocument, ExplainDocument

RESULT_ROWS = 1000
SILENCE_S = 15.0
"""A stream with nothing to say sends a blank line this often, so that no proxy takes it for dead."""


def scope(user: User) -> UserId | None:
    """Whose things a user may touch: their own; an operator's scope is everybody."""
    return None if Permission.OPERATOR in user.permissions else user.id


@dataclass(frozen=True, slots=True)
class Listing:
    before: TaskId | None
    limit: int
    statuses: Sequence[TaskStatus] = ()
    everybody: bool = False


async def task(server: Server, user: User, id_: TaskId) -> TaskView:
    view = await server.store.read(brief(operations.task(id_, scope(user))))
    if view is None:
        raise _no_task(id_)
    return view


async def list_tasks(server: Server, user: User, listing: Listing) -> tuple[TaskView, ...]:
    """Newest first. One's own, or everybody's when an operator asks for it."""
    whose = scope(user) if listing.everybody else user.id
    return await server.store.read(
        operations.tasks(whose, listing.before, listing.limit, tuple(listing.statuses))
    )


async def wait_for_task(server: Server, user: User, id_: TaskId, seconds: float) -> TaskView:
    """The task once it has ended, or as it is when the time is over."""
    ends = asyncio.get_running_loop().time() + seconds
    with server.hub.subscription(id_) as changed:
        while True:
            view = await task(server, user, id_)
            left = ends - asyncio.get_running_loop().time()
            if view.row.status.is_final or left <= 0:
                return view
            await changed.wait(left)


@dataclass(frozen=True, slots=True)
class Awaited:
    """Tasks of one batch whose results are wanted; `fresh`: committed just now, they cannot have ended yet."""

    batch: BatchId
    tasks: Sequence[TaskId]
    fresh: bool


async def wait_for_results(
    server: Server, awaited: Awaited, seconds: float
) -> list[BatchResult] | None:
    """The results in the order of the tasks; None when the time is over first."""
    clock = asyncio.get_running_loop().time
    ends = clock() + seconds
    found: dict[TaskId, BatchResult] = {}
    missing = set(awaited.tasks)
    after = 0
    with server.hub.subscription(awaited.batch) as changed:
        if awaited.fresh and not await changed.wait(seconds):
            return None
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


async def batch(server: Server, user: User, id_: BatchId) -> Batch:
    found = await server.store.read(operations.batch(id_, scope(user)))
    if found is None:
        raise NotFound(f"no batch {encode('batch', id_)} of yours")
    return found


async def batch_results(
    server: Server, user: User, id_: BatchId, after: int
) -> AsyncIterator[bytes]:
    """NDJSON from `after` on, as the tasks end, until the batch is closed and done."""
    await batch(server, user, id_)
    return _results(server, user, id_, after)


async def _results(server: Server, user: User, id_: BatchId, after: int) -> AsyncIterator[bytes]:
    with server.hub.subscription(id_) as changed:
        while True:
            rows, now = await server.store.read(_more(id_, scope(user), after))
            if rows:
                after = rows[-1].sequence
                yield documents.result_lines(rows)
                if len(rows) == RESULT_ROWS:
                    continue
            if now is None or (now.closed and after >= now.total):
                return
            while not await changed.wait(SILENCE_S):
                yield b"\n"


@operation
def _more(
    id_: BatchId, whose: UserId | None, after: int
) -> Operation[tuple[tuple[BatchResult, ...], Batch | None]]:
    rows = yield from operations.batch_results(id_, after, RESULT_ROWS)
    now = yield from operations.batch(id_, whose)
    return rows, now


async def events(server: Server, user: User, id_: TaskId) -> list[EventDocument]:
    story = await server.store.read(operations.story(id_, scope(user)))
    if story is None:
        raise _no_task(id_)
    return documents.events(story)


async def explain(server: Server, user: User, id_: TaskId) -> ExplainDocument:
    """Why the task is where it is, in one sentence."""
    view = await task(server, user, id_)
    row, scheduler = view.row, server.scheduler
    if row.status.is_final:
        sentence, position = _end_of(view), None
    elif row.status is TaskStatus.RUNNING:
        sentence, position = f"It runs on {view.node_name or 'a node'}.", None
    else:
        told = core_explain.explain(scheduler.state, id_, server.now, scheduler.policy)
        sentence, position = told.sentence, told.position
    return ExplainDocument(
        id=encode("task", id_), status=row.status.value, sentence=sentence, position=position
    )


def _end_of(view: TaskView) -> str:
    row = view.row
    where = f" on {view.node_name}" if view.node_name else ""
    reason = row.reason.value.replace("_", " ") if row.reason else ""
    why = f": {reason}" if reason not in ("", row.status.text) else ""
    code = f" with code {row.exit_code}" if row.exit_code is not None else ""
    said = (row.error_text or "").strip().rpartition("\n")[2][:300]
    return f"It is {row.status.text}{where}{why}{code}." + (f" {said}" if said else "")


def _no_task(id_: TaskId) -> NotFound:
    return NotFound(f"no task {encode('task', id_)} of yours; `gpool ps --all` lists them")

"""Queue page: waiting tasks with position, expected start (from the forecasts) and reason, and the running tasks.

Reasons and positions are computed for the first and last listed task of each shape; positions between are
interpolated, because tasks of a shape wait in order. Example: of 100 tasks of one shape the first has 4 tasks ahead
and the last 202; the 51st has 4 + 50/99 * 198 = 104.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpool.core.ids import TaskId, UserId, encode
from gpool.core.model import TaskStatus
from gpool.core.permissions import TeamId
from gpool.core.scheduler.explain.mismatch import Explanation, counted
from gpool.core.scheduler.explain.waiting import Story, with_story
from gpool.server.actions.tasks import documents, query
from gpool.server.actions.tasks.explain import HOPELESS, explanation_document
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operation import operation
from gpool.server.store.operations.tasks import tasks as operations
from gpool.server.store.protocol import Operation
from gpool.server.store.values import TaskView
from gpool.wire.documents import ExplainDocument, QueueEntry, QueuePage

MOST_RUNNING = 1000
"""Running tasks on the first page."""

MOST_COUNTED = 100_000
"""Waiting tasks are counted up to this number."""


@dataclass(frozen=True, slots=True)
class QueueQuery:
    everybody: bool = False
    team: TeamId | None = None
    after: TaskId | None = None
    limit: int = 50


@dataclass(frozen=True, slots=True)
class _StoredQueue:
    waiting: tuple[TaskView, ...]
    count: int
    running: tuple[TaskView, ...]


async def queue_page(server: Server, who: Caller, wanted: QueueQuery) -> QueuePage:
    """Waiting tasks, oldest first; the first page adds running tasks. Raises `TooMany` as `explain` does."""
    user, team = await query.listed_account(server, who, wanted.everybody, wanted.team)
    found = await server.store.read(_stored(user, team, wanted))
    with server.explaining.admitted():
        explained = await _explained(server, found.waiting)
    return QueuePage(
        items=[
            QueueEntry(task=documents.task(view), explain=explained[view.row.id])
            for view in found.waiting
        ],
        next=encode("task", found.waiting[-1].row.id)
        if len(found.waiting) == wanted.limit
        else None,
        waiting=found.count,
        running=[documents.task(view) for view in reversed(found.running)],
    )


@operation
def _stored(user: UserId | None, team: int | None, wanted: QueueQuery) -> Operation[_StoredQueue]:
    waiting = yield from operations.queued_page(user, team, wanted.after, wanted.limit)
    count = yield from operations.queued_count(user, team, MOST_COUNTED)
    if wanted.after is not None:
        return _StoredQueue(waiting, count, ())
    teams = () if team is None else (team,)
    held = (TaskStatus.LEASED, TaskStatus.RUNNING)
    running = yield from operations.tasks(user, None, MOST_RUNNING, held, teams)
    return _StoredQueue(waiting, count, running)


async def _explained(server: Server, views: Iterable[TaskView]) -> dict[TaskId, ExplainDocument]:
    picture, now = server.picture, server.now
    alike: dict[object, list[TaskView]] = {}
    found: dict[TaskId, ExplainDocument] = {}
    for view in views:
        waiting = picture.state.queue_of(view.row.id)
        shape = view.row.id if waiting is None else waiting.shape
        alike.setdefault(shape, []).append(view)
    for group in alike.values():
        for view, reason in zip(group, await _reasons(server, group), strict=True):
            row = view.row
            if picture.state.queue_of(row.id) is not None:
                log = f"gpool logs {encode('task', row.id)}"
                reason = with_story(reason, Story(row.tries, row.losses, log=log))
            estimate = None
            if reason.position is not None and reason.code not in HOPELESS:
                estimate = await picture.forecasts.estimate(picture, now, row.id, reason.ahead)
            found[row.id] = explanation_document(view, reason, estimate)
    return found


async def _reasons(server: Server, group: list[TaskView]) -> list[Explanation]:
    first = await _reason(server, group[0].row.id)
    if len(group) == 1:
        return [first]
    if server.picture.state.queue_of(group[0].row.id) is None:  # it was leased meanwhile
        return [first, *await _reasons(server, group[1:])]
    if first.position is None:
        return [first] * len(group)
    last = await _reason(server, group[-1].row.id)
    steps = len(group) - 1
    more = max(last.ahead - first.ahead, steps)  # also if the last one was leased meanwhile
    between = [_at(last, first.ahead + more * place // steps) for place in range(1, steps)]
    return [first, *between, last]


async def _reason(server: Server, id_: TaskId) -> Explanation:
    refused = server.picture.rejected.explanation(id_, server.now)
    if refused is not None:
        return refused
    return await server.explaining.why(server.picture, id_, server.now)


def _at(last: Explanation, ahead: int) -> Explanation:
    """Return the reason of the last task of a group with the position of another one of it."""
    if _ahead(last.ahead) not in last.sentence:
        return Explanation("ahead", f"{_ahead(ahead)}.", ahead + 1)
    sentence = last.sentence.replace(_ahead(last.ahead), _ahead(ahead))
    return replace(last, sentence=sentence, position=ahead + 1)


def _ahead(tasks: int) -> str:
    return f"{counted(tasks, 'task is', 'tasks are')} ahead of it in line"

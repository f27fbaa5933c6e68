"""Routes of tasks, batches and the queue. Submission is the hot route: raw body in, encoded bytes out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated

from fastapi import Header, Query
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import Invalid
from gpool.core.ids import BatchId, TaskId, decode, encode
from gpool.core.model import TaskStatus
from gpool.core.permissions import Action, TeamId
from gpool.server.actions import lending
from gpool.server.actions.tasks import (
    deletion,
    documents,
    explain,
    outputs,
    query,
    verification,
)
from gpool.server.actions.tasks.repeated import WantedTasks, head_of
from gpool.server.actions.tasks.submit import submit
from gpool.server.api.callers import server_of, user_of
from gpool.server.api.endpoints import NO_CONTENT, EndpointRouter, SuccessReply, action_of
from gpool.server.api.messages import (
    BATCH,
    TASK,
    After,
    Cursor,
    Limit,
    Wait,
    answer,
    body_of,
    no_content,
    once_of,
    parsed_body,
    raw,
    stream,
    tagged,
)
from gpool.server.identity.throttle import RouteClass
from gpool.server.overload.admission import LoadClass
from gpool.server.store.identity_values import Caller
from gpool.wire.documents import (
    MAX_BODY_BYTES,
    BatchDocument,
    EventDocument,
    ExplainDocument,
    LogDocument,
    LogPage,
    ProgressDocument,
    QueuePage,
    ResultDocument,
    SubmittedDocument,
    TaskDocument,
    TaskPage,
    TaskRequest,
)
from gpool.wire.nodes import TelemetryDocument

routes = EndpointRouter("tasks")

NDJSON = "application/x-ndjson"
EVENT_STREAM = "text/event-stream"
SUBMITTED = (
    SuccessReply(SubmittedDocument, 202, "Accepted; the tasks are stored durably"),
    SuccessReply(list[ResultDocument], 200, "Results, if all tasks ended within `wait` seconds"),
)
"""Replies of the submission and of its alias."""


@routes.post(
    "/v1/tasks",
    Action.TASK_SUBMIT,
    Action.BATCH_EXTEND,
    rate=RouteClass.SUBMIT,
    body=TaskRequest,
    returns=SUBMITTED,
    problems=(422,),
)
async def submit_tasks(request: Request, wait: Wait = 0) -> Response:
    """Submit one task or a batch of tasks. With `wait`, answer with the results if all end in time."""
    server = server_of(request)
    who = await user_of(request, Action.TASK_SUBMIT)
    async with AsyncExitStack() as held:
        content = await body_of(request, MAX_BODY_BYTES, held)
        wanted = server.repeated.find(content)
        if wanted is None:
            parsed = await parsed_body(request, TaskRequest, content, held)
            wanted = WantedTasks(parsed, None, head_of(content))
    accepted = await submit(server, who, wanted, once_of(request, content))
    if wait > 0 and accepted.tasks:
        seconds = min(wait, server.settings.max_wait_s)
        awaited = query.Awaited(accepted.batch, accepted.tasks, accepted.fresh)
        results = await query.wait_for_results(server, awaited, seconds)
        if results is not None:
            return raw(documents.result_list(results, who.user.id))
    return raw(accepted.body, 202)


@routes.get("/v1/tasks", Action.TASKS_LIST, Action.TASKS_LIST_ALL, returns=TaskPage)
async def list_tasks(
    request: Request,
    limit: Limit = 50,
    cursor: Cursor = None,
    status: Annotated[
        list[str] | None, Query(description="Statuses, repeated or joined by commas")
    ] = None,
    all: Annotated[bool, Query(description="Tasks of all users; operators only")] = False,
    team: Annotated[str | None, Query(description="Team id: tasks of this team")] = None,
    first: Annotated[
        bool, Query(description="The first task of each batch, and the batches")
    ] = False,
) -> Response:
    """List your tasks, newest first."""
    if first and status:
        raise Invalid("'first' lists whole batches; leave it out to filter tasks by 'status'")
    who = await user_of(request, Action.TASKS_LIST_ALL if all else Action.TASKS_LIST)
    listing = query.Listing(
        before=TaskId(decode("task", cursor)) if cursor else None,
        limit=limit,
        statuses=_statuses(status or []),
        everybody=all,
        team=TeamId(decode("team", team)) if team else None,
        heads=first,
    )
    views = await query.list_tasks(server_of(request), who, listing)
    batches = await query.batches_of(server_of(request), views) if first else ()
    page = TaskPage(
        items=[documents.task(view) for view in views],
        next=encode("task", views[-1].row.id) if len(views) == limit else None,
        batches=[documents.batch(each) for each in batches],
    )
    return tagged(request, page)


@routes.get(
    "/v1/queue",
    Action.TASKS_LIST,
    Action.TASKS_LIST_ALL,
    load=LoadClass.EXPLAIN,
    returns=QueuePage,
)
async def get_queue(
    request: Request,
    limit: Limit = 50,
    cursor: Cursor = None,
    all: Annotated[bool, Query(description="Tasks of all users; operators only")] = False,
    team: Annotated[str | None, Query(description="Team id: tasks of this team")] = None,
) -> Response:
    """List your waiting tasks, oldest first, with position, expected start and reason; running tasks beside them."""
    who = await user_of(request, Action.TASKS_LIST_ALL if all else Action.TASKS_LIST)
    wanted = explain.QueueQuery(
        everybody=all,
        team=TeamId(decode("team", team)) if team else None,
        after=TaskId(decode("task", cursor)) if cursor else None,
        limit=limit,
    )
    return tagged(request, await explain.queue_page(server_of(request), who, wanted))


@routes.get("/v1/tasks/{id}", Action.TASK_READ, returns=TaskDocument)
async def get_task(request: Request, id: TASK, wait: Wait = 0) -> Response:
    """Read one task. With `wait`, answer when it has ended or after that many seconds."""
    server = server_of(request)
    who = await user_of(request)
    task, seconds = TaskId(decode("task", id)), min(wait, server.settings.max_wait_s)
    if seconds > 0:
        view = await query.wait_for_task(server, who, task, seconds)
    else:
        view = await query.polled_task(server, who, task)
    closeness = explain.closeness(server, view.row.id)
    return tagged(
        request, documents.task(view, closeness, await verification.summary(server, view))
    )


@routes.delete("/v1/tasks/{id}", Action.TASK_CANCEL, returns=TaskDocument)
async def cancel_task(request: Request, id: TASK) -> Response:
    """Cancel a task. Cancelling an ended task changes nothing."""
    server, who = server_of(request), await user_of(request)
    task = TaskId(decode("task", id))
    is_asked = await query.cancel_task(server, who, task, once_of(request))
    return await _changed(request, who, task, is_asked)


@routes.delete("/v1/tasks/{id}/record", Action.TASK_DELETE, returns=NO_CONTENT)
async def delete_task(request: Request, id: TASK) -> Response:
    """Delete an ended task with arguments, results, log and checkpoint. 409 if it has not ended."""
    server, who = server_of(request), await user_of(request)
    await deletion.delete_task(server, who, TaskId(decode("task", id)), once_of(request))
    return no_content()


@routes.post("/v1/tasks/{id}/preempt", Action.TASK_PREEMPT, returns=TaskDocument)
async def preempt_task(request: Request, id: TASK) -> Response:
    """Preempt a task: it is warned, saves its checkpoint and is queued again. 409 if it has no lease."""
    server, who = server_of(request), await user_of(request)
    task = TaskId(decode("task", id))
    is_asked = await query.preempt_task(server, who, task, once_of(request))
    return await _changed(request, who, task, is_asked)


async def _changed(request: Request, who: Caller, id_: TaskId, is_asked: bool) -> Response:
    """The task after a change; checks the permission if the change was a repetition."""
    server = server_of(request)
    view = (
        await query.task_again(server, id_)
        if is_asked
        else await query.task(server, who, id_, action_of(request))
    )
    return answer(documents.task(view))


@routes.get(
    "/v1/tasks/{id}/result",
    Action.TASK_READ,
    returns=(
        SuccessReply(ResultDocument),
        SuccessReply(TaskDocument, 202, "The task has not ended yet"),
    ),
)
async def get_result(request: Request, id: TASK, wait: Wait = 0) -> Response:
    """Read the result of an ended task; 202 with the task until it has ended."""
    server = server_of(request)
    who = await user_of(request)
    seconds = min(wait, server.settings.max_wait_s)
    view = await query.wait_for_task(server, who, TaskId(decode("task", id)), seconds)
    if not view.row.status.is_final:
        return answer(documents.task(view), 202)
    query.check_not_expired(view)
    return tagged(request, await query.result(server, who, view))


@routes.get(
    "/v1/tasks/{id}/explain", Action.TASK_READ, load=LoadClass.EXPLAIN, returns=ExplainDocument
)
async def get_explanation(request: Request, id: TASK) -> Response:
    """Explain why a task waits, when it is expected to start and which changes would start it now."""
    who = await user_of(request)
    return answer(await explain.explain(server_of(request), who, TaskId(decode("task", id))))


@routes.get(
    "/v1/tasks/{id}/events",
    Action.TASK_READ,
    load=LoadClass.LISTING,
    returns=SuccessReply(list[EventDocument]),
)
async def get_events(request: Request, id: TASK) -> Response:
    """List the events of a task, oldest first."""
    who = await user_of(request)
    found = await query.events(server_of(request), who, TaskId(decode("task", id)))
    return tagged(
        request, b"[" + b",".join(event.model_dump_json().encode() for event in found) + b"]"
    )


@routes.get(
    "/v1/tasks/{id}/telemetry",
    Action.TASK_READ,
    load=LoadClass.LISTING,
    returns=TelemetryDocument,
)
async def get_task_telemetry(request: Request, id: TASK) -> Response:
    """Read the GPU usage of a task over the last 15 minutes."""
    who = await user_of(request)
    found = await lending.task_telemetry(server_of(request), who, TaskId(decode("task", id)))
    return tagged(request, found)


@routes.get(
    "/v1/tasks/{id}/logs",
    Action.TASK_READ,
    rate=RouteClass.STREAM,
    returns=SuccessReply(
        LogPage,
        description="A page; with `Accept: text/event-stream` all output so far and, as it comes, the rest "
        "(`event: progress` carries a `ProgressDocument`)",
        media_types=(EVENT_STREAM,),
    ),
)
async def get_logs(
    request: Request,
    id: TASK,
    after: After = 0,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Read the output of a task after a cursor."""
    server = server_of(request)
    who = await user_of(request)
    task = TaskId(decode("task", id))
    if last_event_id is not None:
        if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 19):
            raise Invalid(f"Last-Event-ID {last_event_id[:40]!r} is not an id of this stream")
        after = max(after, int(last_event_id))
    if EVENT_STREAM in request.headers.get("accept", ""):
        return stream(_events(await outputs.follow(server, who, task, after)), EVENT_STREAM)
    page = await outputs.page(server, who, task, after)
    return answer(LogPage(items=page.items, next=page.next, ended=page.ended))


async def _events(
    pieces: AsyncIterator[list[LogDocument] | ProgressDocument],
) -> AsyncIterator[bytes]:
    async for items in pieces:
        if isinstance(items, ProgressDocument):
            yield f"event: progress\ndata: {items.model_dump_json()}\n\n".encode()
        elif items:
            yield "".join(
                f"id: {item.cursor}\ndata: {item.model_dump_json()}\n\n" for item in items
            ).encode()
        else:
            yield b": still here\n\n"
    yield b"event: end\ndata: {}\n\n"


# ---- batches


@routes.get("/v1/batches/{id}", Action.BATCH_READ, returns=BatchDocument)
async def get_batch(
    request: Request,
    id: BATCH,
    counts: Annotated[bool, Query(description="Count the tasks by status")] = False,
) -> Response:
    """Read one batch: its name and how many of its tasks have ended."""
    server, who = server_of(request), await user_of(request)
    batch = BatchId(decode("batch", id))
    if counts:
        return tagged(request, await query.counted_batch(server, who, batch))
    return tagged(request, documents.batch(await query.batch(server, who, batch)))


@routes.delete("/v1/batches/{id}", Action.BATCH_CANCEL, returns=BatchDocument)
async def cancel_batch(request: Request, id: BATCH) -> Response:
    """Cancel all tasks of a batch that have not ended, and close the batch."""
    server, who = server_of(request), await user_of(request)
    batch = BatchId(decode("batch", id))
    if await query.cancel_batch(server, who, batch, once_of(request)):
        return answer(documents.batch(await query.batch_again(server, batch)))
    return answer(documents.batch(await query.batch(server, who, batch, Action.BATCH_CANCEL)))


@routes.delete("/v1/batches/{id}/record", Action.BATCH_DELETE, returns=NO_CONTENT)
async def delete_batch(request: Request, id: BATCH) -> Response:
    """Delete a batch and its tasks, all of which have ended. 409 if one has not."""
    server, who = server_of(request), await user_of(request)
    await deletion.delete_batch(server, who, BatchId(decode("batch", id)), once_of(request))
    return no_content()


@routes.get(
    "/v1/batches/{id}/results",
    Action.BATCH_READ,
    rate=RouteClass.STREAM,
    returns=SuccessReply(
        description="One `ResultDocument` a line, in order of ending; blank lines keep the connection alive. "
        "`Accept: text/plain` selects the second media type, with the same content",
        media_types=(NDJSON, "text/plain"),
    ),
)
async def get_batch_results(request: Request, id: BATCH, after: After = 0) -> Response:
    """Stream results until the batch is closed and done. Resume with the last `sequence` as `after`."""
    who = await user_of(request)
    pieces = await query.batch_results(server_of(request), who, BatchId(decode("batch", id)), after)
    is_text = "text/plain" in request.headers.get("accept", "")
    return stream(pieces, "text/plain" if is_text else NDJSON)


def _statuses(given: list[str]) -> list[TaskStatus]:
    words = [word.strip() for text in given for word in text.split(",") if word.strip()]
    try:
        return [TaskStatus(word) for word in words]
    except ValueError:
        known = ", ".join(status.value for status in TaskStatus)
        raise Invalid(
            f"'status' is {','.join(words)[:80]!r}; it must be one or more of {known}"
        ) from None

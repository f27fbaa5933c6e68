"""Routes of tasks and batches. The submission is the hot one: raw body in, built bytes out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import Invalid
from gpool.core.ids import BatchId, TaskId, decode, encode
from gpool.core.model import TaskStatus
from gpool.core.permissions import Action, TeamId
from gpool.server.actions.nodes import gpus
from gpool.server.actions.tasks import cancel, documents, explain, logs, preempt, query
from gpool.server.actions.tasks.submit import submit
from gpool.server.api.openapi import BATCH, TASK, body, ok
from gpool.server.api.requests import (
    After,
    Limit,
    Wait,
    body_of,
    once_of,
    parsed,
    server_of,
    user_of,
)
from gpool.server.api.responses import answer, raw, stream, tagged
from gpool.wire.documents import (
    MAX_BODY_BYTES,
    BatchDocument,
    EventDocument,
    ExplainDocument,
    LogDocument,
    LogPage,
    ProgressDocument,
    ResultDocument,
    SubmittedDocument,
    TaskDocument,
    TaskPage,
    TaskRequest,
    TelemetryDocument,
)

router = APIRouter(tags=["tasks"])

SUBMITTING: dict[str, Any] = {
    "status_code": 202,
    "openapi_extra": body(TaskRequest),
    "responses": {
        200: {"model": list[ResultDocument], "description": "All ended within `wait` seconds"},
        202: {"model": SubmittedDocument, "description": "Durable"},
    },
    "response_class": Response,
}
"""How a route that submits tasks is described; it has an alias."""


@router.post("/v1/tasks", **SUBMITTING)
async def submit_tasks(request: Request, wait: Wait = 0) -> Response:
    """Submit one task or a batch; with `wait`, the results when they are there in time."""
    server = server_of(request)
    who = await user_of(request, Action.TASK_SUBMIT)
    content = await body_of(request, MAX_BODY_BYTES)
    accepted = await submit(server, who, parsed(TaskRequest, content), once_of(request, content))
    if wait > 0 and accepted.tasks:
        seconds = min(wait, server.settings.max_wait_s)
        awaited = query.Awaited(accepted.batch, accepted.tasks, accepted.fresh)
        results = await query.wait_for_results(server, awaited, seconds)
        if results is not None:
            return raw(documents.result_list(results, who.user.id))
    return raw(accepted.body, 202)


@router.get("/v1/tasks", responses=ok(TaskPage), response_class=Response)
async def list_tasks(
    request: Request,
    limit: Limit = 50,
    cursor: str | None = None,
    status: Annotated[list[str] | None, Query()] = None,
    all: bool = False,
    team: str | None = None,
) -> Response:
    """Newest first. `status` may be given several times or joined by commas; `all` is everybody's, for operators."""
    who = await user_of(request, Action.TASKS_LIST_ALL if all else Action.TASKS_LIST)
    listing = query.Listing(
        before=TaskId(decode("task", cursor)) if cursor else None,
        limit=limit,
        statuses=_statuses(status or []),
        everybody=all,
        team=TeamId(decode("team", team)) if team else None,
    )
    views = await query.list_tasks(server_of(request), who, listing)
    page = TaskPage(
        items=[documents.task(view) for view in views],
        next=encode("task", views[-1].row.id) if len(views) == limit else None,
    )
    return tagged(request, page)


@router.get("/v1/tasks/{id}", responses=ok(TaskDocument), response_class=Response)
async def get_task(request: Request, id: TASK, wait: Wait = 0) -> Response:
    """One task; with `wait`, as soon as it has ended or the seconds are over."""
    return await task_answer(request, id, wait)


async def task_answer(request: Request, id: str, wait: float) -> Response:
    server = server_of(request)
    who = await user_of(request, Action.TASK_READ)
    seconds = min(wait, server.settings.max_wait_s)
    view = await query.wait_for_task(server, who, TaskId(decode("task", id)), seconds)
    return tagged(request, documents.task(view))


@router.delete("/v1/tasks/{id}", responses=ok(TaskDocument), response_class=Response)
async def cancel_task(request: Request, id: TASK) -> Response:
    """Cancel. Repeating it, or cancelling what has ended, changes nothing."""
    server = server_of(request)
    who = await user_of(request, Action.TASK_CANCEL)
    task = TaskId(decode("task", id))
    await cancel.cancel_task(server, who, task, once_of(request))
    return answer(documents.task(await query.task(server, who, task)))


@router.post("/v1/tasks/{id}/preempt", responses=ok(TaskDocument), response_class=Response)
async def preempt_task(request: Request, id: TASK) -> Response:
    """Operators make a task give up its place: it is warned, saved and queued again. 409 where it has none."""
    server = server_of(request)
    who = await user_of(request, Action.TASK_PREEMPT)
    task = TaskId(decode("task", id))
    await preempt.preempt_task(server, who, task, once_of(request))
    return answer(documents.task(await query.task(server, who, task)))


@router.get(
    "/v1/tasks/{id}/result",
    responses=ok(ResultDocument) | {202: {"model": TaskDocument, "description": "Not ended yet"}},
    response_class=Response,
)
async def get_result(request: Request, id: TASK, wait: Wait = 0) -> Response:
    """What the task left behind; 202 with the task while it has not ended."""
    server = server_of(request)
    who = await user_of(request, Action.TASK_READ)
    seconds = min(wait, server.settings.max_wait_s)
    view = await query.wait_for_task(server, who, TaskId(decode("task", id)), seconds)
    if not view.row.status.is_final:
        return answer(documents.task(view), 202)
    return tagged(request, documents.result(view, who.user.id))


@router.get("/v1/tasks/{id}/explain", responses=ok(ExplainDocument), response_class=Response)
async def get_explanation(request: Request, id: TASK) -> Response:
    """Why the task waits, when it will start and what would start it now; or what became of it."""
    who = await user_of(request, Action.TASK_READ)
    return answer(await explain.explain(server_of(request), who, TaskId(decode("task", id))))


@router.get("/v1/tasks/{id}/events", responses=ok(list[EventDocument]), response_class=Response)
async def get_events(request: Request, id: TASK) -> Response:
    """The task's story, oldest first."""
    who = await user_of(request, Action.TASK_READ)
    told = await query.events(server_of(request), who, TaskId(decode("task", id)))
    return tagged(
        request, b"[" + b",".join(event.model_dump_json().encode() for event in told) + b"]"
    )


@router.get("/v1/tasks/{id}/telemetry", responses=ok(TelemetryDocument), response_class=Response)
async def get_telemetry(request: Request, id: TASK) -> Response:
    """What the task took of its GPUs in the last quarter of an hour."""
    who = await user_of(request, Action.TASK_READ)
    told = await gpus.task_telemetry(server_of(request), who, TaskId(decode("task", id)))
    return tagged(request, told)


@router.get(
    "/v1/tasks/{id}/logs",
    responses={
        200: {
            "model": LogPage,
            "description": "A page, or with `Accept: text/event-stream` all there is and what comes "
            "(`event: progress` in between: a `ProgressDocument`)",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    },
    response_class=Response,
)
async def get_logs(
    request: Request,
    id: TASK,
    after: After = 0,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Output after a cursor."""
    server = server_of(request)
    who = await user_of(request, Action.TASK_READ)
    task = TaskId(decode("task", id))
    if last_event_id is not None:
        if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 19):
            raise Invalid(f"Last-Event-ID {last_event_id[:40]!r} is not one that came from here")
        after = max(after, int(last_event_id))
    if "text/event-stream" in request.headers.get("accept", ""):
        return stream(_events(await logs.follow(server, who, task, after)), "text/event-stream")
    page = await logs.page(server, who, task, after)
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


@router.get("/v1/batches/{id}", responses=ok(BatchDocument), response_class=Response)
async def get_batch(request: Request, id: BATCH) -> Response:
    who = await user_of(request, Action.BATCH_READ)
    found = await query.batch(server_of(request), who, BatchId(decode("batch", id)))
    return tagged(request, documents.batch(found))


@router.delete("/v1/batches/{id}", responses=ok(BatchDocument), response_class=Response)
async def cancel_batch(request: Request, id: BATCH) -> Response:
    """Cancel what has not ended, and close the batch."""
    server = server_of(request)
    who = await user_of(request, Action.BATCH_CANCEL)
    batch = BatchId(decode("batch", id))
    await cancel.cancel_batch(server, who, batch, once_of(request))
    return answer(documents.batch(await query.batch(server, who, batch)))


@router.get(
    "/v1/batches/{id}/results",
    responses={
        200: {
            "description": "One `ResultDocument` a line, in the order of ending; blank lines mean: still here",
            "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
        }
    },
    response_class=Response,
)
async def get_batch_results(request: Request, id: BATCH, after: After = 0) -> Response:
    """A stream that ends when the batch is closed and done; resume with the last `sequence` as `after`."""
    who = await user_of(request, Action.BATCH_READ)
    pieces = await query.batch_results(server_of(request), who, BatchId(decode("batch", id)), after)
    return stream(pieces, "application/x-ndjson")


def _statuses(given: list[str]) -> list[TaskStatus]:
    words = [word.strip() for text in given for word in text.split(",") if word.strip()]
    try:
        return [TaskStatus(word) for word in words]
    except ValueError:
        known = ", ".join(status.value for status in TaskStatus)
        raise Invalid(
            f"'status' is {','.join(words)[:80]!r}; it is one or more of {known}"
        ) from None

"""One task: phases and attempts, the reason it waits, live log, results, GPU usage; cancel and run again."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gpool.core.errors import NotFound
from gpool.core.ids import TaskId, decode
from gpool.core.permissions import Action
from gpool.server.actions import lending
from gpool.server.actions.tasks import documents, explain, outputs, query
from gpool.server.api.callers import server_of
from gpool.server.api.messages import stream
from gpool.server.identity.throttle import RouteClass
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.web.live import (
    EVENT_STREAM,
    Fragment,
    Fragments,
    Render,
    Viewer,
    event,
    is_stream,
    live_answer,
    message,
    partial,
    views_of,
)
from gpool.server.web.logs import LogText
from gpool.server.web.parts import part
from gpool.server.web.previews import preview_type
from gpool.server.web.rendering import SANDBOX, environment, page
from gpool.server.web.routing import PageRouter, see
from gpool.server.web.visitors import is_signed_in_still, visitor
from gpool.wire.documents import (
    EventDocument,
    LogDocument,
    instant_to_datetime,
)

routes = PageRouter("pages")

MOST_PIECES = 4000
"""Pieces of output on the page; the download has all."""
MOST_PAGES = 200
SUGGESTIONS_S = 0.03
"""Longest wait of a page for changes that would start the task; later ones come with the next view."""


@dataclass
class ShownLog:
    """The end of the output as HTML. `texts`: state of each stream, for what follows."""

    html: Markup = field(default_factory=Markup)
    cursor: int = 0
    is_cut: bool = False
    texts: dict[str, LogText] = field(default_factory=dict)

    def add(self, pieces: list[LogDocument]) -> Markup:
        found = []
        for piece in pieces:
            text = self.texts.setdefault(piece.stream, LogText())
            found.append(text.feed(piece.text, is_error=piece.stream == "stderr"))
            self.cursor = piece.cursor
        return Markup("").join(found)


@routes.page("/tasks/{id}", Action.TASK_READ)
async def show_task(request: Request, id: str) -> Response:
    """Show one task."""
    who, server, task = await visitor(request), server_of(request), TaskId(decode("task", id))
    now = await query.task(server, who, task)  # the view is shared: the permission is checked here
    # the page of an ended task has no stream that would replace an older view
    max_age_s = 0.0 if now.row.status.is_final else 0.5
    view = await views_of(request).fresh(("task", task), _render(server, who, task), max_age_s)
    document = documents.task(now)
    search, only = request.query_params.get("q", "")[:100], request.query_params.get("stream", "")
    log = await part(_log(server, who, task, search, only))
    return page(
        request,
        "task.html",
        task=document,
        parts={name: each.html for name, each in view.fragments.items()},
        since=views_of(request).version,
        log=log.value,
        log_missing=log.missing,
        is_live=not now.row.status.is_final and not search and not only,
        search=search,
        only=only,
    )


@routes.live("/live/tasks/{id}", Action.TASK_READ)
async def stream_task(request: Request, id: str) -> Response:
    """Stream output and changes of a task."""
    who, task = await visitor(request), TaskId(decode("task", id))
    await query.task(server_of(request), who, task)  # the view is shared
    if not is_stream(request):
        source = (("task", task), _render(server_of(request), who, task))
        return await live_answer(request, [source], 0)
    after = request.headers.get("last-event-id") or request.query_params.get("after", "0")
    first = int(after) if after.isascii() and after.isdigit() and len(after) < 18 else 0
    pieces = await outputs.follow(server_of(request), who, task, first)
    return stream(_changes(request, who, task, pieces), EVENT_STREAM)


async def _changes(
    request: Request, who: Caller, task: TaskId, pieces: AsyncIterator[Any]
) -> AsyncIterator[bytes]:
    server, views, log, viewer = (
        server_of(request),
        views_of(request),
        ShownLog(),
        Viewer(0, is_whole=True),
    )
    async for piece in pieces:
        if isinstance(piece, list) and piece:
            html = partial("log", log.add(piece), "beforeend")
            yield message(html, log.cursor)
        elif not await is_signed_in_still(request):
            yield event("signed-out")
            return
        html = viewer.update(await views.fresh(("task", task), _render(server, who, task), 0.5))
        yield message(html) if html else event("still")
    view = await views.fresh(("task", task), _render(server, who, task), 0.0)
    while html := viewer.update(view):
        yield message(html)
    yield event("ended")


def _render(server: Server, who: Caller, task: TaskId) -> Render:
    async def render() -> Fragments:
        view = await query.task(server, who, task)
        document = documents.task(view, explain.closeness(server, task))
        events = await query.events(server, who, task)
        reason = await part(explain.explain(server, who, task, SUGGESTIONS_S))
        usage = await part(lending.task_telemetry(server, who, task))
        parts: Any = environment().get_template("task_parts.html").module
        now = instant_to_datetime(server.now)
        found: Any = {
            "state": parts.state(document, reason.value, now),
            "steps": parts.steps(document, steps_of(events), now),
            "facts": parts.facts(document, usage.value, spark(usage.value), now),
            "results": parts.results(document),
        }
        return {name: Fragment(html) for name, html in found.items()}

    return render


async def _log(server: Server, who: Caller, task: TaskId, search: str, only: str) -> ShownLog:
    kept: deque[LogDocument] = deque(maxlen=MOST_PIECES)
    after, is_cut = 0, False
    for _ in range(MOST_PAGES):
        found = await outputs.page(server, who, task, after)
        for piece in found.items:
            if only in ("stdout", "stderr") and piece.stream != only:
                continue
            is_cut = is_cut or len(kept) == MOST_PIECES
            kept.append(piece)
        if found.next is None:
            break
        after = found.next
    log = ShownLog(is_cut=is_cut)
    if search:
        lines = "".join(piece.text for piece in kept).splitlines(keepends=True)
        log.html = LogText().feed("".join(each for each in lines if search in each))
    else:
        log.html = log.add(list(kept))
    return log


# ---- phases and usage


@dataclass(frozen=True, slots=True)
class TimelineStep:
    """`kind`: done, now, bad or waits."""

    text: str
    kind: str
    seconds: float | None = None


_WORDS = {"queued": "waited", "leased": "prepare", "started": "run"}
_PHASES = frozenset({"queued", "leased", "started", "fetch", "build", "start", "run", "collect"})


def steps_of(events: list[EventDocument]) -> list[TimelineStep]:
    """One step for each wait, phase and ended attempt; phases that follow themselves are one."""
    found: list[TimelineStep] = []
    for place, here in enumerate(events):
        is_last = place == len(events) - 1
        seconds = 0.0 if is_last else (events[place + 1].at - here.at).total_seconds()
        word = _WORDS.get(here.event, here.event)
        if here.event == "queued" and is_last:
            found.append(TimelineStep("waits", "waits"))
        elif here.event in _PHASES:
            if found and found[-1].text == word:
                seconds += found.pop().seconds or 0
            found.append(TimelineStep(word, "now" if is_last else "done", seconds or None))
        elif here.event in ("succeeded", "checkpoint"):
            found.append(TimelineStep(here.text, "done"))
        else:
            text = here.text if is_last else f"attempt {here.epoch}: {here.text}"
            found.append(TimelineStep(text, "bad"))
    return found


def spark(usage: Any) -> str:
    """Utilisation of the last quarter of an hour as the path of a chart of 300 by 56."""
    readings = [] if usage is None else usage.readings
    used = [each.utilisation_percent for each in readings if each.utilisation_percent is not None]
    if len(used) < 2:
        return ""
    step = 300 / (len(used) - 1)
    return " ".join(f"{i * step:.0f} {56 - 0.54 * value:.0f}" for i, value in enumerate(used))


# ---- forms and files


@routes.form("/tasks/{id}/cancel", Action.TASK_CANCEL)
async def cancel_task_on_page(request: Request, id: str) -> Response:
    """Cancel the task."""
    who = await visitor(request)
    await query.cancel_task(server_of(request), who, TaskId(decode("task", id)), None)
    return see(f"/tasks/{id}")


@routes.page("/tasks/{id}/log.txt", Action.TASK_READ, rate=RouteClass.STREAM)
async def download_log(request: Request, id: str) -> Response:
    """Download the whole output, as the task wrote it."""
    who, server, task = await visitor(request), server_of(request), TaskId(decode("task", id))
    first = await outputs.page(server, who, task, 0)

    async def lines() -> AsyncIterator[bytes]:
        found = first
        while True:
            yield "".join(piece.text for piece in found.items).encode("utf-8", "replace")
            if found.next is None:
                return
            found = await outputs.page(server, who, task, found.next)

    headers = {
        "Content-Disposition": f'attachment; filename="{id}.log"',
        "Content-Security-Policy": SANDBOX,
        "Cache-Control": "no-store",
    }
    return StreamingResponse(lines(), 200, headers, "text/plain; charset=utf-8")


@routes.page("/tasks/{id}/files/{sha256}", Action.TASK_READ, rate=RouteClass.TRANSFER)
async def download_output(request: Request, id: str, sha256: str) -> Response:
    """Download a file of the task's results; `?show` previews texts and images, without scripts and without the pool's origin."""
    who, server, task = await visitor(request), server_of(request), TaskId(decode("task", id))
    view = await query.task(server, who, task)
    file = next((each for each in documents.task(view).outputs if each.sha256 == sha256), None)
    if file is None:
        raise NotFound(f"the task has no result {sha256[:64]}")
    size = await outputs.size_of(server, who, sha256)
    kind = preview_type(file.path, size) if "show" in request.query_params else ""
    name = quote(file.path.rpartition("/")[2][:200] or "result", safe="")
    headers = {
        "Content-Disposition": f"{'inline' if kind else 'attachment'}; filename*=UTF-8''{name}",
        "Content-Security-Policy": SANDBOX,
        "Content-Length": str(size),
        "Cache-Control": "private, no-store",
    }
    pieces = server.blobs.read(await outputs.location_of(server, sha256), 0, size)
    return StreamingResponse(pieces, 200, headers, kind or "application/octet-stream")

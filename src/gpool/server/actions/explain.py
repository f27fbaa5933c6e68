"""Why a task is where it is, when it will start, and what would start it now. It only reads; the long part runs in a thread."""

from __future__ import annotations

import asyncio

from gpool.core.explain import Explanation, with_story
from gpool.core.explain import explain as why
from gpool.core.ids import TaskId, encode
from gpool.core.model import Phase, TaskStatus
from gpool.core.scheduling.snapshot import take
from gpool.core.scheduling.whatif import Suggestion, suggest
from gpool.server.actions import documents, query
from gpool.server.forecasts import Estimate
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations import tasks as operations
from gpool.server.store.values import TaskView
from gpool.wire.documents import (
    EstimateDocument,
    ExplainDocument,
    SuggestionDocument,
    instant_to_datetime,
)

HOPELESS = frozenset({"over_quota", "flagged"})
"""Codes under which the task never starts as it is, whatever ends."""


async def explain(server: Server, who: Caller, id_: TaskId) -> ExplainDocument:
    view = await query.task(server, who, id_)
    row = view.row
    if row.status.is_final:
        return _document(view, Explanation("ended", _end_of(view)))
    if row.status is TaskStatus.RUNNING or view.note is not None:
        noted = view.note if row.status is not TaskStatus.RUNNING else None
        doing = documents.NOTED[noted or documents.phase_of(view) or Phase.RUN.value]
        return _document(
            view, Explanation("running", f"It {doing} on {view.node_name or 'a node'}.")
        )
    scheduler, now = server.scheduler, server.now
    told = why(scheduler.state, id_, now, scheduler.policy, scheduler.orders)
    if scheduler.state.queue_of(id_) is None:
        return _document(view, told)
    told = with_story(told, row.tries, row.losses, await _last_failure(server, id_, row.tries))
    estimate = None
    if told.position is not None and told.code not in HOPELESS:
        estimate = await scheduler.forecasts.estimate(scheduler, now, id_, told.ahead)
    found: tuple[Suggestion, ...] = ()
    if told.code != "next":
        snapshot = take(scheduler.state, also=id_)
        policy, orders = scheduler.policy, scheduler.orders
        found = await asyncio.to_thread(suggest, snapshot, id_, now, policy, orders)
    return _document(view, told, estimate, found)


async def _last_failure(server: Server, id_: TaskId, tries: int) -> str:
    """How its last own failure is called."""
    if not tries:
        return ""
    story = await server.store.read(operations.story(id_, None))
    if story is None:
        return ""
    for attempt in reversed(story.attempts):
        if attempt.detail or attempt.reason:
            said = attempt.reason.value.replace("_", " ")
            return f"{said}, {attempt.detail[:100]}" if attempt.detail else said
    return ""


def _document(
    view: TaskView,
    told: Explanation,
    estimate: Estimate | None = None,
    found: tuple[Suggestion, ...] = (),
) -> ExplainDocument:
    row = view.row
    return ExplainDocument(
        id=encode("task", row.id),
        status=row.status.value,
        sentence=told.sentence,
        position=told.position,
        code=told.code,
        ahead=None if told.position is None else told.ahead,
        tries=row.tries,
        losses=row.losses,
        estimate=None
        if estimate is None
        else EstimateDocument(
            at=instant_to_datetime(estimate.at),
            earliest=instant_to_datetime(estimate.first),
            latest=instant_to_datetime(estimate.last),
        ),
        suggestions=[
            SuggestionDocument(kind=one.kind, change=one.change, sentence=one.sentence)
            for one in found
        ],
    )


def _end_of(view: TaskView) -> str:
    row = view.row
    where = f" on {view.node_name}" if view.node_name else ""
    reason = row.reason.value.replace("_", " ") if row.reason else ""
    why = f": {reason}" if reason not in ("", row.status.text) else ""
    code = f" with code {row.exit_code}" if row.exit_code is not None else ""
    said = (row.error_text or "").strip().rpartition("\n")[2][:300]
    return f"It is {row.status.text}{where}{why}{code}." + (f" {said}" if said else "")

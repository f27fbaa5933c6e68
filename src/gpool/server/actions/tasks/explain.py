"""Explanation of a task, and the queue page: position, expected start, reason, changes that would start it now.

Only reads; `scheduling.explanations` searches for the changes.

Reasons and positions are computed for the first and last listed task of each shape; positions between are
interpolated, because tasks of a shape wait in order. Example: of 100 tasks of one shape the first has 4 tasks ahead
and the last 202; the 51st has 4 + 50/99 * 198 = 104.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpool.core.ids import TaskId, UserId, encode
from gpool.core.model import (
    SECOND,
    AttemptRow,
    EndReason,
    Engine,
    Instant,
    OnLoss,
    Phase,
    TaskRow,
    TaskStatus,
)
from gpool.core.money.charging import AHEAD
from gpool.core.money.transfers import TransferOutcome, format_credits, format_month, month_of
from gpool.core.permissions import TeamId
from gpool.core.scheduler.explain.mismatch import Explanation, counted, list_of, ranked
from gpool.core.scheduler.explain.resources import gpu_closeness, resource_lines
from gpool.core.scheduler.explain.waiting import Story, with_story
from gpool.core.scheduler.explain.whatif import Suggested, Suggestion
from gpool.server.actions.tasks import documents, query, verification
from gpool.server.scheduling.learning import Estimate
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.money import limits
from gpool.server.store.operations.tasks import tasks as operations
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.values import TaskView, UnfundedPlace
from gpool.wire.documents import (
    EstimateDocument,
    ExplainDocument,
    QueueEntry,
    QueuePage,
    SuggestionDocument,
    instant_to_datetime,
)

HOPELESS = frozenset({"over_quota", "flagged"})
"""Codes of tasks that never start unless they or their quota change; they get no estimate."""

_NOT_ITS_OWN = frozenset(
    {EndReason.LOST, EndReason.HANDED_BACK, EndReason.PREEMPTED, EndReason.NODE_FAILED}
)
_UNSTARTED = frozenset({EndReason.SANDBOX_FAILED, EndReason.NODE_FAILED})
_UNTRIED = " Not all changes that might start it now were tried, because of many requests; ask again later."


async def explain(
    server: Server, who: Caller, id_: TaskId, wait_s: float | None = None
) -> ExplainDocument:
    """`wait_s`: longest wait for suggestions, which may then be five seconds old or left out; None: all, of now."""
    view = await query.task(server, who, id_)
    row = view.row
    if row.status.is_final:
        return explanation_document(view, Explanation("ended", _end_of(view)))
    if view.spec.requirements.siblings:
        return explanation_document(view, await verification.explanation(server, view))
    refused = await _refusal(server, id_)
    if refused is not None:
        return explanation_document(view, refused)
    if row.status is TaskStatus.RUNNING or view.note is not None:
        audit_entry = view.note if row.status is not TaskStatus.RUNNING else None
        doing = documents.NOTED[audit_entry or documents.phase_of(view) or Phase.RUN.value]
        reason = Explanation("running", f"It {doing} on {_place(view) or 'a node'}.")
        return explanation_document(view, reason, resources=_resources(server, id_))
    with server.explaining.admitted():
        return await _explain(server, view, id_, wait_s)


async def _explain(
    server: Server, view: TaskView, id_: TaskId, wait_s: float | None
) -> ExplainDocument:
    picture, explaining, now = server.picture, server.explaining, server.now
    reason = await explaining.why(picture, id_, now)
    if picture.state.queue_of(id_) is None:
        return explanation_document(view, reason, resources=_resources(server, id_))
    reason = with_story(reason, await _story(server, view.row))
    estimate = None
    if reason.position is not None and reason.code not in HOPELESS:
        estimate = await picture.forecasts.estimate(picture, now, id_, reason.ahead)
    tried = Suggested()
    if reason.code != "next":
        if wait_s is None:
            tried = await explaining.suggestions(picture, id_, now)
        else:
            recent = await explaining.recent_suggestions(picture, id_, now, wait_s)
            tried = tried if recent is None else recent
    if not tried.is_complete and not tried.found:
        reason = replace(reason, sentence=reason.sentence + _UNTRIED)
    return explanation_document(view, reason, estimate, tried.found, _resources(server, id_))


def _resources(server: Server, id_: TaskId) -> tuple[str, ...]:
    return resource_lines(server.picture.state, id_)


def closeness(server: Server, id_: TaskId) -> str | None:
    """Closeness of a leased task's GPUs; None if unknown, or with one GPU at most."""
    return gpu_closeness(server.picture.state, id_)


async def _story(server: Server, row: TaskRow) -> Story:
    if not row.epoch:
        return Story()
    story = await server.store.read(operations.story(row.id, None))
    attempts = () if story is None else story.attempts
    tried = [each for each in attempts if each.started_at is None and each.reason in _UNSTARTED]
    own = [each for each in attempts if each.reason not in _NOT_ITS_OWN and each not in tried]
    lost = [each for each in attempts if each.reason is EndReason.LOST]
    last = own[-1] if own else None
    return Story(
        row.tries,
        row.losses,
        sum(each.reason is EndReason.PREEMPTED for each in attempts),
        "" if last is None else _said(server, last),
        None if last is None else last.reason,
        _where(server, lost[-1]) if lost else "",
        f"gpool logs {encode('task', row.id)}",
        tuple(dict.fromkeys(_where(server, each) for each in tried)),
        tried[-1].detail[:100] if tried else "",
    )


def _said(server: Server, attempt: AttemptRow) -> str:
    reason = attempt.reason.value.replace("_", " ")
    detail = f", {attempt.detail[:100]}" if attempt.detail else ""
    return f"{reason} on {_where(server, attempt)}{detail}"


def _where(server: Server, attempt: AttemptRow) -> str:
    entry = server.picture.state.nodes.get(attempt.node)
    known = entry.node if entry is not None else None
    return encode("node", attempt.node) if known is None else known.name


def explanation_document(
    view: TaskView,
    reason: Explanation,
    estimate: Estimate | None = None,
    found: tuple[Suggestion, ...] = (),
    resources: tuple[str, ...] = (),
) -> ExplainDocument:
    row = view.row
    return ExplainDocument(
        id=encode("task", row.id),
        status=row.status.value,
        sentence=reason.sentence,
        position=reason.position,
        code=reason.code,
        ahead=None if reason.position is None else reason.ahead,
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
            SuggestionDocument(kind=one.kind, change=_change(view, one), sentence=one.sentence)
            for one in found
        ],
        resources=list(resources),
    )


def _change(view: TaskView, one: Suggestion) -> str:
    spec, left_out = view.spec, []
    if one.requirements.nodes == 1 < spec.requirements.nodes:
        left_out += ["--engine"] * (spec.engine is not Engine.NONE)
        left_out += ["--on-loss"] * (spec.on_loss is not OnLoss.REFORM)
    return f"{one.change} without {' and '.join(left_out)}" if left_out else one.change


def _place(view: TaskView) -> str:
    if len(view.members) < 2:
        return view.node_name or ""
    return list_of([ranked(each.node_name or "a node", each.rank) for each in view.members])


def _end_of(view: TaskView) -> str:
    row = view.row
    where = f" on {_place(view)}" if _place(view) else ""
    reason = row.reason.value.replace("_", " ") if row.reason else ""
    why = f": {reason}" if reason not in ("", row.status.text) else ""
    code = f" with code {row.exit_code}" if row.exit_code is not None else ""
    last_line = (row.error_text or "").strip().rpartition("\n")[2][:300]
    ended = "was cancelled" if row.status is TaskStatus.CANCELLED else row.status.text
    return f"It {ended}{where}{why}{code}." + (f" {last_line}" if last_line else "")


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
    found = await server.reads.read(
        server.store,
        ("queue", user, team, wanted.after, wanted.limit),
        _stored(user, team, wanted),
        ids=lambda page: _ids_of(page, user, team),
        rows=lambda page: 1 + query.TASK_ROWS * (len(page.waiting) + len(page.running)),
    )
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
        running=[documents.task(view) for view in reversed(found.running[:MOST_RUNNING])],
        more_running=len(found.running) > MOST_RUNNING,
    )


def _ids_of(page: _StoredQueue, user: UserId | None, team: int | None) -> set[int] | None:
    """Ids that name every change of a page with all open tasks of an account; None: of other pages."""
    account = user if team is None else team
    is_whole = page.count == len(page.waiting) and len(page.running) <= MOST_RUNNING
    if account is None or not is_whole:
        return None
    shown = (*page.waiting, *page.running)
    return {account, -account, *(id_ for view in shown for id_ in query.ids_of(view))}


@operation
def _stored(user: UserId | None, team: int | None, wanted: QueueQuery) -> Operation[_StoredQueue]:
    waiting = yield from operations.queued_page(user, team, wanted.after, wanted.limit)
    count = yield from operations.queued_count(user, team, MOST_COUNTED)
    if wanted.after is not None:
        return _StoredQueue(waiting, count, ())
    teams = () if team is None else (team,)
    held = (TaskStatus.LEASED, TaskStatus.RUNNING)
    running = yield from operations.tasks(user, None, MOST_RUNNING + 1, held, teams)
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


async def _refusal(server: Server, id_: TaskId) -> Explanation | None:
    """Why a task is left out of planning for a while; None: it is not."""
    rejected = server.picture.rejected
    unfunded = rejected.unfunded(id_)
    if unfunded is None:
        return rejected.explanation(id_, server.now)
    found = await server.store.read(limits.funds((unfunded.payer,), server.now))
    return no_funds(unfunded, found.get(unfunded.payer), server.now)


def no_funds(place: UnfundedPlace, found: limits.PayerFunds | None, now: Instant) -> Explanation:
    """Explanation of a task whose payer lacks funds, with the figures of now."""
    needed = f"needs {format_credits(place.needed)} for the first {AHEAD // SECOND // 60} minutes"
    only_free = "or run it on free nodes only (--max-price 0)"
    if place.outcome is TransferOutcome.OVER_BUDGET and found is not None and found.cap is not None:
        spent = f"{format_credits(found.spent)} of {format_credits(found.cap)}"
        return Explanation(
            "over_budget",
            f"Over budget: {spent} spent in {format_month(month_of(now))}, {needed}; raise the budget "
            f"(gpool budget --set), wait for the next month, {only_free}.",
        )
    balance = format_credits(0 if found is None else found.balance)
    return Explanation(
        "no_funds",
        f"No funds: balance {balance}, {needed}; ask an operator for credits "
        f"(gpool admin ledger grant), {only_free}.",
    )


async def _reason(server: Server, id_: TaskId) -> Explanation:
    refused = await _refusal(server, id_)
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

"""The list of tasks: paged, filtered by state and account, with cancelling of several at once."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import Conflict, GpoolError, Invalid
from gpool.core.ids import TaskId, decode, encode
from gpool.core.model import Permission, TaskStatus
from gpool.core.permissions import Action, TeamId
from gpool.server.actions.accounts import accounts
from gpool.server.actions.tasks import documents, query
from gpool.server.api.callers import server_of
from gpool.server.store.identity_values import Caller
from gpool.server.web.origins import safe_next
from gpool.server.web.parts import part
from gpool.server.web.rendering import page
from gpool.server.web.routing import PageRouter, see
from gpool.server.web.visitors import form_of, visitor
from gpool.wire.identity import OwnTeam

routes = PageRouter("pages")

PAGE = 50
MOST_CANCELLED = 200
FILTERS = (
    ("", "All"),
    ("queued", "Waiting"),
    ("leased,running", "Running"),
    ("succeeded", "Succeeded"),
    ("failed", "Failed"),
    ("cancelled", "Cancelled"),
)


@routes.page("/tasks", Action.TASKS_LIST, Action.TASKS_LIST_ALL)
async def show_tasks(request: Request) -> Response:
    """Show the visitor's tasks, newest first."""
    given = request.query_params
    everybody = given.get("all") == "1"
    who = await visitor(request, Action.TASKS_LIST_ALL if everybody else Action.TASKS_LIST)
    return await _tasks(request, who)


async def _tasks(
    request: Request, who: Caller, status: int = 200, error: GpoolError | None = None
) -> Response:
    given, server = request.query_params, server_of(request)
    everybody = given.get("all") == "1"
    wanted = given.get("status", "")
    if wanted not in dict(FILTERS):
        raise Invalid(f"there is no filter {wanted[:40]!r}; choose one of the page")
    team, cursor = given.get("team", ""), given.get("cursor", "")
    views = await query.list_tasks(
        server,
        who,
        query.Listing(
            before=TaskId(decode("task", cursor)) if cursor else None,
            limit=PAGE,
            statuses=[TaskStatus(word) for word in wanted.split(",") if word],
            everybody=everybody,
            team=TeamId(decode("team", team)) if team else None,
        ),
    )
    me = await part(accounts.me(server, who))
    kept = {"status": wanted, "team": team, "all": "1" if everybody else ""}
    more = encode("task", views[-1].row.id) if len(views) == PAGE else ""

    def link(**changes: str) -> str:
        return "/tasks?" + urlencode({k: v for k, v in {**kept, **changes}.items() if v})

    return page(
        request,
        "tasks.html",
        status,
        tasks=[documents.task(view) for view in views],
        filters=[(name, link(status=value), value == wanted) for value, name in FILTERS],
        accounts=_accounts(who, me.value.teams if me.value else [], team, everybody, link),
        is_first=not cursor,
        first=link(),
        next=link(cursor=more) if more else "",
        here=link(cursor=cursor),
        error=error,
    )


def _accounts(
    who: Caller,
    teams: list[OwnTeam],
    team: str,
    everybody: bool,
    link: Callable[..., str],
) -> list[tuple[str, str, bool]]:
    """Accounts whose tasks the visitor may list: name, link, whether it is shown."""
    found = [("Mine", link(team="", all=""), not team and not everybody)]
    found += [(each.name, link(team=each.id, all=""), each.id == team) for each in teams]
    if Permission.OPERATOR in who.user.permissions:
        found.append(("Everybody's", link(team="", all="1"), everybody))
    return found if len(found) > 1 else []


@routes.form("/tasks/cancel", Action.TASK_CANCEL)
async def cancel_tasks_on_page(request: Request) -> Response:
    """Cancel the chosen tasks; those that have ended stay."""
    who, form = await visitor(request), await form_of(request)
    chosen = form.all("id")
    if not chosen or len(chosen) > MOST_CANCELLED:
        raise Conflict(f"choose 1 to {MOST_CANCELLED} tasks to cancel")
    for id_ in chosen:
        await query.cancel_task(server_of(request), who, TaskId(decode("task", id_)), None)
    return see(safe_next(form.text("next") or "/tasks"))

"""`gpool queue`: running tasks, then waiting ones in order of their expected start, each with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpool.cli.command import as_json, client_of
from gpool.cli.output.printing import age, emit_json, local_time, table
from gpool.cli.references import principal_names, shared_names
from gpool.cli.tasks import places, task_status, where, whose, whose_tasks
from gpool.core.errors import NotFound, TooMany

if TYPE_CHECKING:
    from gpool.client.client import Client

SHOWN = 20
"""Waiting tasks shown by default: the server simulates schedules to estimate each start."""

READ = 20_000
"""Waiting tasks read: listings begin with the newest, and the oldest are shown."""

_LAST = "~"
"""Sorts after every time."""


@click.command()
@whose
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=SHOWN,
    show_default=True,
    metavar="N",
    help="Show at most N waiting tasks, oldest first.",
)
@as_json
@click.pass_context
def queue(ctx: click.Context, team: str | None, everybody: bool, limit: int, as_json: bool) -> None:
    """List running and waiting tasks with expected start and reason.

    Running tasks come first, then waiting tasks by expected start.
    """
    client = client_of(ctx)
    filters = whose_tasks(client, team, everybody)
    queued = client.listing("tasks", limit=READ, status="queued", **filters)[::-1]  # oldest first
    found = client.listing("tasks", limit=READ, status="leased,running", **filters)[::-1]
    started = {task["id"] for task in found}  # some started between the two requests
    waiting = [task for task in queued if task["id"] not in started]
    shown = waiting[:limit]
    told = {task["id"]: _explanation(client, task["id"]) for task in shown}
    found += sorted(shown, key=lambda task: _place(task, told[task["id"]] or {}))
    if as_json:
        emit_json([{**task, "explain": told.get(task["id"])} for task in found])
        return
    date, shared = client.api.date, shared_names(places(found))
    known = principal_names(client) if everybody else {}
    rows = []
    for task in found:
        why = told.get(task["id"]) or {}
        estimate = why.get("estimate")
        rows.append(
            (
                task["id"],
                task["name"],
                *([known.get(task["user"], task["user"])] if everybody else ()),
                task_status(task),
                age(task["created_at"], date),
                task.get("gpu") or "-",
                where(task, shared),
                local_time(estimate["at"], date) if estimate else "-",
                why.get("sentence") or "",
            )
        )
    columns = ("id", "name", *(["user"] if everybody else ()), "status", "age", "gpu", "node")
    table((*columns, "starts", "why it waits"), rows, "No running or waiting tasks.")
    if len(waiting) > len(shown):
        more = f"{len(waiting) - len(shown)}{' or more' if len(queued) == READ else ''}"
        click.echo(f"{more} more tasks wait; --limit N shows more", err=True)


def _explanation(client: Client, task: str) -> dict[str, Any] | None:
    """None: the task has ended meanwhile, or the server limits the rate of explanations."""
    try:
        return client.explain(task)
    except (NotFound, TooMany):
        return None


def _place(task: dict[str, Any], why: dict[str, Any]) -> tuple[str, int, str]:
    """Sort key: expected start, position in the queue, age."""
    starts = (why.get("estimate") or {}).get("at")
    return starts or _LAST, why.get("position") or 1 << 60, task["created_at"]

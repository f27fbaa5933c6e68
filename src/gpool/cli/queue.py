"""`gpool queue`: what runs and what waits, in the order it is expected to start, each with its reason. It only reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpool.cli.calling import as_json, client_of
from gpool.cli.output.printing import age, emit_json, local_time, table
from gpool.cli.references import shared_names, who_is_who
from gpool.cli.tasks import places, task_status, where, whose, whose_tasks
from gpool.core.errors import NotFound, TooMany

if TYPE_CHECKING:
    from gpool.client.client import Client

SHOWN = 20
"""How many of those that wait are shown: the server plans for each to say when it starts."""

READ = 20_000
"""How many that wait are looked at: listings begin with the newest, and those that have waited longest are wanted."""

_LAST = "~"
"""Sorts after every time."""


@click.command()
@whose
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=SHOWN,
    show_default=True,
    help="Of those that wait, so many that have waited longest.",
)
@as_json
@click.pass_context
def queue(ctx: click.Context, team: str | None, everybody: bool, limit: int, as_json: bool) -> None:
    """List what runs and waits, with when it starts and why not yet.

    Those that run come first, then those that wait, by when they are expected to start.
    """
    client = client_of(ctx)
    filters = whose_tasks(client, team, everybody)
    queued = client.listing("tasks", limit=READ, status="queued", **filters)[::-1]  # oldest first
    found = client.listing("tasks", limit=READ, status="leased,running", **filters)[::-1]
    started = {task["id"] for task in found}  # some in between
    waiting = [task for task in queued if task["id"] not in started]
    shown = waiting[:limit]
    told = {task["id"]: _explanation(client, task["id"]) for task in shown}
    found += sorted(shown, key=lambda task: _place(task, told[task["id"]] or {}))
    if as_json:
        emit_json([{**task, "explain": told.get(task["id"])} for task in found])
        return
    date, shared = client.api.date, shared_names(places(found))
    known = who_is_who(client) if everybody else {}
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
    table((*columns, "starts", "why it waits"), rows, "Nothing runs or waits.")
    if len(waiting) > len(shown):
        more = f"{len(waiting) - len(shown)}{' or more' if len(queued) == READ else ''}"
        click.echo(f"{more} others wait behind; --limit N shows more of them", err=True)


def _explanation(client: Client, task: str) -> dict[str, Any] | None:
    """None: it is gone meanwhile, or the server has no time for this."""
    try:
        return client.explain(task)
    except (NotFound, TooMany):
        return None


def _place(task: dict[str, Any], why: dict[str, Any]) -> tuple[str, int, str]:
    """By when it starts, then by its place in line, then by age."""
    starts = (why.get("estimate") or {}).get("at")
    return starts or _LAST, why.get("position") or 1 << 60, task["created_at"]

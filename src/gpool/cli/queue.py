"""`gpool queue`: running and waiting tasks with expected start and reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import click

from gpool.cli.command import as_json, client_of
from gpool.cli.output.printing import age, emit_json, local_time, table
from gpool.cli.references import principal_names, shared_names
from gpool.cli.tasks import places, task_status, where, whose, whose_tasks

if TYPE_CHECKING:
    from gpool.client.client import Client

SHOWN = 20
"""Default number of waiting tasks."""

PAGE = 200
"""Most waiting tasks in one request."""

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
    running, waiting, count = _read(client, limit, filters)
    entries = sorted(waiting, key=lambda entry: _start(entry["task"], entry["explain"]))
    reasons = {entry["task"]["id"]: entry["explain"] for entry in entries}
    found = [*running, *(entry["task"] for entry in entries)]
    if as_json:
        emit_json([{**task, "explain": reasons.get(task["id"])} for task in found])
        return
    date, shared = client.api.date, shared_names(places(found))
    known = principal_names(client) if everybody else {}
    rows = []
    for task in found:
        why = reasons.get(task["id"]) or {}
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
    if count > len(waiting):
        click.echo(f"{count - len(waiting)} more tasks wait; --limit N shows more", err=True)


def _read(
    client: Client, limit: int, filters: dict[str, str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    """Running tasks, the oldest `limit` waiting ones, the number of all waiting ones; one request per 200."""
    query = dict(filters)
    running: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    while True:
        query["limit"] = str(min(limit - len(waiting), PAGE))
        page = client.api.get_json(f"/v1/queue?{urlencode(query)}")
        running += page["running"]
        waiting += page["items"]
        if not page["next"] or len(waiting) >= limit:
            return running, waiting, page["waiting"]
        query["cursor"] = page["next"]


def _start(task: dict[str, Any], why: dict[str, Any]) -> tuple[str, int, str]:
    starts = (why.get("estimate") or {}).get("at")
    return starts or _LAST, why.get("position") or 1 << 60, task["created_at"]

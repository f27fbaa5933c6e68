"""Lists of tasks: `ps` (one line per batch), `queue`, the tasks on a node; notes beneath lists of nodes and GPUs; stored
data of an account. One file because all of them are listings with the same options and columns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlencode

import click

from gpool.cli.account import password_of
from gpool.cli.command import (
    SectionedCommand,
    VerbGroup,
    as_json,
    client_of,
    complete_tasks,
    examples,
    listed,
    listing,
    option_section,
    principal_names,
    shared_names,
)
from gpool.cli.main import INTERRUPTED, exit_code_of, print_error
from gpool.cli.printing import age, duration, emit_json, gib, local_time, table, watch
from gpool.cli.tasks import places, progress_text, task_status, where, whose, whose_tasks
from gpool.core.errors import GpoolError, Invalid

if TYPE_CHECKING:
    from gpool.client.client import Client

F = TypeVar("F", bound=Callable[..., Any])


@click.command(epilog=examples("gpool delete t-0123456789abc", "gpool delete b-0123456789abc"))
@click.argument("tasks", metavar="ID...", nargs=-1, required=True, shell_complete=complete_tasks)
@as_json
@click.pass_context
def delete(ctx: click.Context, tasks: tuple[str, ...], as_json: bool) -> None:
    """Delete ended tasks or batches with their data.

    Arguments, results, output files, logs and checkpoints are deleted for good and no longer count against the storage
    quota. A task that has not ended is cancelled first: gpool cancel ID
    """
    client = client_of(ctx)
    deleted, failed = [], 0
    for task in tasks:
        try:
            client.data.delete(task)
        except GpoolError as error:  # the other tasks are deleted nevertheless
            if len(tasks) == 1:
                raise
            print_error(error)
            failed = exit_code_of(error)
            continue
        deleted.append(task)
        if not as_json:
            click.echo(f"{task} deleted")
    if as_json:
        emit_json(deleted)
    ctx.exit(failed)


# ---- artifacts


@click.group(cls=VerbGroup)
def artifacts() -> None:
    """List and delete stored artifacts."""


@artifacts.command("ls")
@click.option("--limit", default=50, show_default=True, help="Show at most this many.")
@as_json
@click.pass_context
def artifacts_ls(ctx: click.Context, limit: int, as_json: bool) -> None:
    """List your artifacts, largest first."""
    found = client_of(ctx).data.artifacts(limit)
    if as_json:
        emit_json(found)
        return
    rows = [(one["sha256"], one["size_bytes"], one["used_as"]) for one in found["items"]]
    table(("sha256", "bytes", "used as"), rows, "No artifacts yet.")
    click.echo(f"Storage in use, with logs and inline data: {found['used_bytes']} bytes", err=True)


@artifacts.command("delete")
@click.argument("sha256s", metavar="SHA256...", nargs=-1, required=True)
@click.pass_context
def artifacts_delete(ctx: click.Context, sha256s: tuple[str, ...]) -> None:
    """Delete uploads that no task uses.

    An artifact of a task is deleted with the task: gpool delete ID
    """
    client = client_of(ctx)
    for sha256 in sha256s:
        client.data.delete_artifact(sha256)
        click.echo(f"{sha256} deleted")


STORED = {
    "upload": "uploads that no task uses",
    "spec": "inputs and functions",
    "payload": "arguments",
    "result": "results and outputs",
    "log": "logs",
    "checkpoint": "checkpoints",
    "lease": "outputs of running tasks",
    "unfinished": "unfinished uploads",
    "rows": "tasks, inline data, output of running tasks",
}


@click.command(epilog=examples("gpool storage", "gpool storage --team vision"))
@click.option("--team", "team_", metavar="TEAM", help="Show the storage of a team of yours.")
@as_json
@click.pass_context
def storage(ctx: click.Context, team_: str | None, as_json: bool) -> None:
    """Show what takes your storage.

    To free some: gpool delete ID, gpool artifacts ls, gpool artifacts delete SHA256
    """
    client = client_of(ctx)
    found = client.data.storage(client.team_id(team_) if team_ else None)
    if as_json:
        emit_json(found)
        return
    rows = [
        (STORED.get(one["used_as"], one["used_as"]), one["count"] or "-", one["size_bytes"])
        for one in found["items"]
    ]
    table(("stored", "number", "bytes"), rows, "Nothing is stored.")
    limit = found["limit_bytes"]
    quota = "no limit" if limit is None else f"the quota is {limit}"
    click.echo(f"Storage in use: {found['used_bytes']} bytes; {quota}", err=True)


# ---- the account


@click.group(cls=VerbGroup)
def account() -> None:
    """Export or delete your account."""


@account.command("export", epilog=examples("gpool account export my-data.jsonl"))
@click.argument("file", type=click.Path(path_type=Path))
@click.pass_context
def account_export(ctx: click.Context, file: Path) -> None:
    """Write your data to a file, one JSON object a line.

    Contains account, keys and webhooks (without secrets), names of stored secrets, sessions, nodes, notices, ledger
    entries, tasks with arguments, results and logs, and the list of artifacts; `gpool result ID` downloads output files.
    """
    if file.exists():
        raise Invalid(f"'{file}' exists; choose another name")
    lines = client_of(ctx).data.export(file)
    click.echo(f"{lines} lines written to {file}")


@account.command("delete")
@click.option("--yes", is_flag=True, help="Do not ask whether to delete the account.")
@click.pass_context
def account_delete(ctx: click.Context, yes: bool) -> None:
    """Delete your account and its data for good.

    Running tasks are cancelled, all tasks with their data deleted, nodes removed, keys and sessions ended. A team of
    which you are the only member is deleted too; a team with other members needs another owner first.
    """
    from gpool.client.config import forget_sign_in

    client = client_of(ctx)
    me = client.api.get_json("/v1/me")
    if not yes:
        question = f"Delete account {me['name']} ({me['id']}) with all its tasks, data and nodes?"
        click.confirm(question, abort=True, err=True)
    if me["has_password"]:
        client.data.delete_account(password=password_of("Password"))
    else:
        client.data.delete_account(name=me["name"])
    if client.session is not None:
        client.session.file.remove()
        forget_sign_in(client.session.file.path)
    click.echo(f"Account {me['name']} ({me['id']}) deleted.")


select, display = option_section("Selection"), option_section("Display")


def watching(function: F) -> F:
    option = display(
        "--watch",
        "every_s",
        is_flag=False,
        flag_value=2.0,
        type=click.FloatRange(min=0.5),
        metavar="[SECONDS]",
        help="Print again every 2 seconds, or the given number, until Ctrl-C.",
    )
    return cast(F, option(function))


def watch_until_interrupted(
    ctx: click.Context, refresh: Callable[[], Callable[[], None]], every_s: float | None
) -> None:
    """Print once, or until Ctrl-C if an interval is given."""
    if every_s is None:
        refresh()()
        return
    try:
        watch(refresh, every_s, threading.Event().wait)
    except KeyboardInterrupt:
        ctx.exit(INTERRUPTED)


@click.command(
    cls=SectionedCommand,
    epilog=examples("gpool ps --watch", "gpool ps --status failed", "gpool ps --everybody --all"),
)
@select(
    "--status",
    metavar="STATUS",
    help="Only tasks with this status: queued, leased, running, succeeded, failed or cancelled.",
)
@partial(whose, option=select)
@display("--tasks", "singly", is_flag=True, help="List every task, also those of batches.")
@watching
@partial(listing, option=display)
@click.pass_context
def ps(
    ctx: click.Context,
    as_json: bool,
    everything: bool,
    limit: int,
    status: str | None,
    singly: bool,
    team: str | None,
    everybody: bool,
    every_s: float | None,
) -> None:
    """List tasks, newest first.

    The calls of one `map` are one line, with the batch's id. --status, --tasks and --json list every task.
    """
    if as_json and every_s is not None:
        raise Invalid("--watch and --json exclude each other; give one of them")
    client = client_of(ctx)
    filters = whose_tasks(client, team, everybody) | ({"status": status} if status else {})
    if not (status or singly or as_json):
        filters["first"] = "true"

    def refresh() -> Callable[[], None]:
        batches: dict[str, dict[str, Any]] = {}

        def on_page(page: dict[str, Any]) -> None:
            batches.update({one["id"]: one for one in page.get("batches") or ()})

        found = listed(
            client, "tasks", everything=everything, limit=limit, on_page=on_page, **filters
        )
        if as_json:
            return partial(emit_json, found)
        names = principal_names(client) if everybody else {}
        rows = _task_rows(found, batches, names if everybody else None, client.api.date)
        columns = ["id", "name", *(["user"] if everybody else ()), "status", "age", "duration", "node", "gpu"]  # fmt: skip
        if any(row[-1] != "-" for row in rows):
            columns.append("progress")
        else:
            rows = [row[:-1] for row in rows]
        return partial(table, columns, rows, f"No task is {status}." if status else "No tasks yet.")

    watch_until_interrupted(ctx, refresh, every_s)


def _task_rows(
    found: list[dict[str, Any]],
    batches: dict[str, dict[str, Any]],
    names: dict[str, str] | None,
    date: str | None,
) -> list[tuple[object, ...]]:
    """One row per task or batch; `names` of users if they are a column."""
    shared, rows = shared_names(places(found)), []
    for task in found:
        batch = batches.get(task["batch"])
        is_many = batch is not None and batch["total"] > 1
        rows.append(
            (
                task["batch"] if is_many else task["id"],
                task["name"],
                *(() if names is None else [names.get(task["user"], task["user"])]),
                batch_status(batch) if batch and is_many else task_status(task),
                age(task["created_at"], date),
                "-" if is_many else duration(task, date),
                "-" if is_many else where(task, shared),
                task.get("gpu") or "-",
                "-" if is_many else progress_text(task) or "-",
            )
        )
    return rows


def batch_status(batch: dict[str, Any]) -> str:
    done, total = batch["done"], batch["total"]
    if batch["closed"] and done >= total:
        return f"{total:,} ended"
    return f"{done:,} of {total:,}{'' if batch['closed'] else '+'} ended"


SHOWN = 20
"""Default number of waiting tasks."""

PAGE = 200
"""Most waiting tasks in one request."""

_LAST = "~"
"""Sorts after every time."""


@click.command(cls=SectionedCommand, epilog=examples("gpool queue --watch"))
@partial(whose, option=select)
@display(
    "--limit",
    type=click.IntRange(min=1),
    default=SHOWN,
    show_default=True,
    metavar="N",
    help="Show at most N waiting tasks, oldest first.",
)
@watching
@as_json
@click.pass_context
def queue(
    ctx: click.Context,
    team: str | None,
    everybody: bool,
    limit: int,
    every_s: float | None,
    as_json: bool,
) -> None:
    """List running and waiting tasks with expected start and reason.

    Running tasks come first, then waiting tasks by expected start.
    """
    if as_json and every_s is not None:
        raise Invalid("--watch and --json exclude each other; give one of them")
    client = client_of(ctx)
    filters = whose_tasks(client, team, everybody)

    def refresh() -> Callable[[], None]:
        read = _read(client, limit, filters)
        names = principal_names(client) if everybody else None
        return partial(_show_queue, read, names, client.api.date, as_json=as_json)

    watch_until_interrupted(ctx, refresh, every_s)


def _show_queue(
    read: tuple[list[dict[str, Any]], list[dict[str, Any]], int, bool],
    names: dict[str, str] | None,
    date: str | None,
    *,
    as_json: bool,
) -> None:
    """Print what `_read` returned; `names` of users if they are a column."""
    running, waiting, count, more_running = read
    entries = sorted(waiting, key=lambda entry: _start(entry["task"], entry["explain"]))
    reasons = {entry["task"]["id"]: entry["explain"] for entry in entries}
    found = [*running, *(entry["task"] for entry in entries)]
    if more_running:
        text = f"only the newest {len(running)} running tasks are listed; gpool ps --status running --all lists all"
        click.echo(text, err=True)
    if as_json:
        emit_json([{**task, "explain": reasons.get(task["id"])} for task in found])
        return
    shared, rows = shared_names(places(found)), []
    for task in found:
        why = reasons.get(task["id"]) or {}
        estimate = why.get("estimate")
        rows.append(
            (
                task["id"],
                task["name"],
                *(() if names is None else [names.get(task["user"], task["user"])]),
                task_status(task),
                age(task["created_at"], date),
                task.get("gpu") or "-",
                where(task, shared),
                local_time(estimate["at"], date) if estimate else "-",
                why.get("sentence") or "",
            )
        )
    columns = ("id", "name", *(() if names is None else ["user"]), "status", "age", "gpu", "node")
    table((*columns, "starts", "why it waits"), rows, "No running or waiting tasks.")
    if count > len(waiting):
        click.echo(f"{count - len(waiting)} more tasks wait; --limit N shows more", err=True)


def _read(
    client: Client, limit: int, filters: dict[str, str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int, bool]:
    """Running tasks, the oldest `limit` waiting ones, the number of all waiting ones, and whether the server left
    running tasks out; one request per 200.
    """
    query = dict(filters)
    more_running = False
    running: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    while True:
        query["limit"] = str(min(limit - len(waiting), PAGE))
        page = client.api.get_json(f"/v1/queue?{urlencode(query)}")
        running += page["running"]
        waiting += page["items"]
        more_running = more_running or bool(page.get("more_running"))
        if not page["next"] or len(waiting) >= limit:
            return running, waiting, page["waiting"], more_running
        query["cursor"] = page["next"]


def _start(task: dict[str, Any], why: dict[str, Any]) -> tuple[str, int, str]:
    starts = (why.get("estimate") or {}).get("at")
    return starts or _LAST, why.get("position") or 1 << 60, task["created_at"]


def show_node_tasks(tasks: dict[str, Any], date: str | None) -> None:
    for title, found in (("Running", tasks["running"]), ("Ended", tasks["ended"])):
        if not found:
            continue
        rows = [
            (
                one["id"],
                one["user_name"],
                one["status"],
                local_time(one.get("leased_at") or one["started_at"], date)
                if one.get("leased_at") or one.get("started_at")
                else "-",
                duration(one, date),
                _resources(one),
            )
            for one in found
        ]
        click.echo(f"\n{title}:")
        table(("id", "user", "status", "since", "duration", "with"), rows, "")
    if checks := tasks.get("failed_checks"):
        click.echo("\nAnswers that differed from the accepted one:")
        lines = [
            (one["task"], local_time(one["at"], date), one["wanted"], one["found"])
            for one in checks
        ]
        table(("task", "at", "wanted", "found"), lines, "")
    if tasks.get("banned_until"):
        click.echo(f"\nNo verified tasks until {local_time(tasks['banned_until'], date)}.")


def _resources(task: dict[str, Any]) -> str:
    parts = [task["kind"], f"{task['cpus']:g} CPU", task.get("gpu") or ""]
    parts += [gib(task["memory_bytes"])] if task.get("memory_bytes") else []
    parts += [f"image {task['image']}"] if task.get("image") else []
    parts += ["internet"] if task.get("network") else []
    parts += [f"tier {task['tier']}"] if task.get("tier") not in (None, "container") else []
    return ", ".join(part for part in parts if part)


_UNTESTED = "only for its owner and the owner's teams: gpool was never run on its kind"

_UNPROVEN = "only for its owner, the owner's teams and tasks with --on"


def gpu_notes(gpu: dict[str, Any]) -> list[str]:
    """Sentences beneath the list of GPUs, without the GPU's id."""
    why = gpu.get("flagged") or gpu.get("quarantined") or gpu.get("closed")
    notes = [f"takes no tasks: {why}"] if why else []
    if not why and gpu.get("ails"):
        notes.append(f"is {gpu['health']}: {gpu['ails']}")
    if not why and gpu.get("unproven"):
        notes.append(f"is {_UNPROVEN}: {gpu['unproven']}")
    return [*notes, *([f"is {_UNTESTED}"] if gpu.get("untested") else [])]


def node_notes(node: dict[str, Any]) -> list[str]:
    """Sentences beneath the list of nodes, without the node's id."""
    notes = [f"takes no new tasks: {node['closed']}"] if node.get("closed") else []
    notes += [f"cordoned: {node['cordoned']}"] if node.get("cordoned") else []
    names = [f"gpu{gpu['index']}" for gpu in node.get("gpus") or [] if gpu.get("untested")]
    notes += [f"{name} is {_UNTESTED}" for name in names]
    return [*notes, *(node.get("problems") or [])]

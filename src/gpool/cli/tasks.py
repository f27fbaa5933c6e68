"""Verbs about tasks: ps, status, logs, wait, cancel, result, explain."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from gpool.cli.calling import as_json, client_of, into, listing
from gpool.cli.main import FAILED, GPOOL_FAULT, say_error
from gpool.cli.printing import LogPrinter, age, emit_json, fields, local_time, plain, table
from gpool.cli.run import progress_bar, say_how_it_ended
from gpool.cli.team import team_id
from gpool.core.errors import GpoolError

task_id = click.argument("task", metavar="ID")


@click.command()
@listing
@click.option("--status", help="Only those: queued, leased, running, succeeded, failed, cancelled.")
@click.option("--team", metavar="TEAM", help="Those of a team of yours, instead of your own.")
@click.pass_context
def ps(
    ctx: click.Context,
    as_json: bool,
    everything: bool,
    limit: int,
    status: str | None,
    team: str | None,
) -> None:
    """List tasks, newest first."""
    client = client_of(ctx)
    filters = {"status": status} if status else {}
    if team is not None:
        filters["team"] = team_id(client, team)
    found = client.listing("tasks", limit=None if everything else limit, **filters)
    if as_json:
        emit_json(found)
        return
    date = client.door.date
    rows = [
        (
            task["id"],
            task["name"],
            _status(task),
            age(task["created_at"], date),
            _where(task),
            task.get("gpu") or "-",
        )
        for task in found
    ]
    table(
        ("id", "name", "status", "age", "node", "gpu"),
        rows,
        f"No task is {status}." if status else "No tasks yet.",
    )


def _status(task: dict[str, Any]) -> str:
    """With the phase, where that says more: before and after the run."""
    phase = task.get("phase")
    return task["status"] if phase in (None, "run") else f"{task['status']} ({phase})"


def _where(task: dict[str, Any]) -> str:
    """Its node, or the nodes of a gang's members; of one that waits, how many it wants."""
    members = [member.get("node_name") or member["node"] for member in task.get("members") or ()]
    wanted = task.get("nodes") or 1
    if members or wanted == 1:
        return ",".join(members) or task.get("node_name") or task.get("node") or "-"
    return f"({wanted} nodes)"


def _member(member: dict[str, Any]) -> str:
    where = member.get("node_name") or member["node"]
    return f"rank {member['rank']} on {where} ({member['status']});"


@click.command()
@task_id
@as_json
@click.pass_context
def status(ctx: click.Context, task: str, as_json: bool) -> None:
    """Show one task."""
    document = client_of(ctx).get(task).document()
    if as_json:
        emit_json(document)
        return
    outputs = document.get("outputs") or []
    document["outputs"] = [output["path"] for output in outputs]
    saved = document.get("checkpoint")
    if saved is not None:
        document["checkpoint"] = (
            f"{saved['files']} file(s), {saved['size_bytes']} bytes, saved at {saved['saved_at']}"
        )
    if (document.get("nodes") or 1) == 1:
        document["nodes"] = None
    document["members"] = [_member(member) for member in document.get("members") or ()]
    names = (
        "id name status phase reason exit_code error_text command gpu environment network nodes node_name members "
        "created_at started_at finished_at tries losses checkpoint outputs"
    )
    fields(document, names.split())


@click.command()
@task_id
@click.option("-f", "--follow", is_flag=True, help="Stay until it ends.")
@as_json
@click.pass_context
def logs(ctx: click.Context, task: str, follow: bool, as_json: bool) -> None:
    """Print what a task wrote."""
    run = client_of(ctx).get(task)
    if as_json:
        emit_json(list(run.log_documents(follow=follow)))
        return
    try:
        LogPrinter().show(run.printed(follow=follow))
    except KeyboardInterrupt:
        click.echo(f"\nTask {task} goes on. Come back with: gpool logs -f {task}", err=True)
        ctx.exit(FAILED)


@click.command()
@task_id
@click.option("--timeout", metavar="TIME", help="Give up after, e.g. 10m; the task goes on.")
@as_json
@click.pass_context
def wait(ctx: click.Context, task: str, timeout: str | None, as_json: bool) -> None:
    """Wait for a task; exit with its code."""
    from gpool.client.options import seconds
    from gpool.client.results import exit_code

    patience = None if timeout is None else seconds(timeout)
    run = client_of(ctx).get(task)  # before this answers, there is no id to speak of
    try:
        result = run.wait(patience)
        if as_json:
            emit_json(run.document())
    except TimeoutError as late:
        click.echo(f"gpool: {late}", err=True)
        ctx.exit(FAILED)
    except KeyboardInterrupt:
        click.echo(f"\nTask {task} goes on. Wait again with: gpool wait {task}", err=True)
        ctx.exit(FAILED)
    except GpoolError as error:
        if os.environ.get("GPOOL_DEBUG"):
            raise
        say_error(error)
        ctx.exit(GPOOL_FAULT)
    say_how_it_ended(result)
    ctx.exit(exit_code(result))


@click.command()
@click.argument("tasks", metavar="ID...", nargs=-1, required=True)
@as_json
@click.pass_context
def cancel(ctx: click.Context, tasks: tuple[str, ...], as_json: bool) -> None:
    """Cancel tasks."""
    client = client_of(ctx)
    found = [client.cancel(task) for task in tasks]
    if as_json:
        emit_json(found)
        return
    for task, document in zip(tasks, found, strict=True):
        click.echo(f"{task} {document.get('status', 'cancelled')}")


@click.command()
@task_id
@into
@as_json
@click.pass_context
def result(ctx: click.Context, task: str, into: Path, as_json: bool) -> None:
    """Fetch a finished task's outputs."""
    import msgspec

    client = client_of(ctx)
    try:
        found = client.get(task).wait(timeout=0)
    except TimeoutError:
        click.echo(
            f"gpool: task {task} has not ended yet; wait for it with: gpool wait {task}", err=True
        )
        ctx.exit(FAILED)
    with progress_bar() as progress:
        written = client.artifacts.fetch(found.outputs, into, *([progress] if progress else []))
    if as_json:
        emit_json(msgspec.to_builtins(found))
    else:
        for path in written:
            click.echo(str(path))
        if not written:
            click.echo(f"Task {task} left no outputs.", err=True)
    say_how_it_ended(found, code_too=True)
    ctx.exit(0 if found.status == "succeeded" else FAILED)


@click.command()
@task_id
@as_json
@click.pass_context
def explain(ctx: click.Context, task: str, as_json: bool) -> None:
    """Say why a task waits, when it will start, and what would start it now."""
    document = client_of(ctx).explain(task)
    if as_json:
        emit_json(document)
        return
    click.echo(plain(document["sentence"]))
    estimate = document.get("estimate")
    if estimate:
        first, last = local_time(estimate["from"]), local_time(estimate["to"])
        about = local_time(estimate["at"])
        click.echo(f"Starts about {about}; eight times of ten between {first} and {last}.")
    for one in document.get("suggestions") or ():
        click.echo(f"  {plain(one['sentence'])} ({plain(one['change'])})")

"""Verbs about tasks: ps, status, logs, wait, cancel, result, explain."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpool.cli.command import (
    as_json,
    client_of,
    examples,
    into_option,
    listed,
    listing,
    own_team_id,
    principal_names,
    shared_names,
    shown_as,
)
from gpool.cli.interrupts import Reading
from gpool.cli.main import FAILED, GPOOL_FAULT, INTERRUPTED, exit_code_of, print_error
from gpool.cli.printing import (
    ProgressLine,
    age,
    emit_json,
    fields,
    local_time,
    on_stderr,
    plain,
    print_outcome,
    progress_bar,
    show_documents,
    show_output,
    table,
)
from gpool.core.errors import Forbidden, GpoolError, Invalid
from gpool.core.specs import gpu

if TYPE_CHECKING:
    from gpool.cli.command import WaitOutcome
    from gpool.client.client import Client
    from gpool.client.values import Result

F = TypeVar("F", bound=Callable[..., Any])


def _one_task(ctx: click.Context, param: click.Parameter, given: str) -> str:  # noqa: ARG001 - click's signature
    if given.startswith("b-"):
        raise Invalid(
            f"{given} is a batch; this command takes one task. Commands that take batches: gpool wait {given}, "
            f"gpool cancel {given}"
        )
    return given


task_id = click.argument("task", metavar="ID", callback=_one_task)


def whose(function: F) -> F:
    function = click.option("--everybody", is_flag=True, help="Tasks of all users (operators).")(
        function
    )
    return click.option("--team", metavar="TEAM", help="Tasks of this team instead of your own.")(
        function
    )


def whose_tasks(client: Client, team: str | None, everybody: bool) -> dict[str, str]:
    if everybody and team is not None:
        raise Invalid("--everybody and --team exclude each other; give one of them")
    if everybody:
        return {"all": "true"}
    return {} if team is None else {"team": own_team_id(client, team)}


@click.command()
@listing
@click.option(
    "--status",
    metavar="STATUS",
    help="Only tasks with this status: queued, leased, running, succeeded, failed or cancelled.",
)
@whose
@click.pass_context
def ps(
    ctx: click.Context,
    as_json: bool,
    everything: bool,
    limit: int,
    status: str | None,
    team: str | None,
    everybody: bool,
) -> None:
    """List tasks, newest first."""
    client = client_of(ctx)
    filters = whose_tasks(client, team, everybody) | ({"status": status} if status else {})
    found = listed(client, "tasks", everything=everything, limit=limit, **filters)
    if as_json:
        emit_json(found)
        return
    date, shared = client.api.date, shared_names(places(found))
    names = principal_names(client) if everybody else {}
    rows = [
        (
            task["id"],
            task["name"],
            *([names.get(task["user"], task["user"])] if everybody else ()),
            task_status(task),
            age(task["created_at"], date),
            where(task, shared),
            task.get("gpu") or "-",
        )
        for task in found
    ]
    table(
        ("id", "name", *(["user"] if everybody else ()), "status", "age", "node", "gpu"),
        rows,
        f"No task is {status}." if status else "No tasks yet.",
    )


def task_status(task: dict[str, Any]) -> str:
    phase = task.get("phase")
    return task["status"] if phase in (None, "run") else f"{task['status']} ({phase})"


def places(tasks: Iterable[dict[str, Any]]) -> Iterator[tuple[str | None, str | None]]:
    for task in tasks:
        for one in (task, *(task.get("members") or ())):
            yield one.get("node"), one.get("node_name")


def where(task: dict[str, Any], shared: frozenset[str] = frozenset()) -> str:
    """Node or nodes; for a waiting gang the number it needs."""
    members = [
        shown_as(member["node"], member.get("node_name"), shared)
        for member in task.get("members") or ()
    ]
    wanted = task.get("nodes") or 1
    if members or wanted == 1:
        return ",".join(members) or shown_as(task.get("node"), task.get("node_name"), shared)
    return f"({wanted} nodes)"


def _member(member: dict[str, Any]) -> str:
    return f"rank {member['rank']} on {_node(member)} ({member['status']});"


def _node(document: dict[str, Any]) -> str | None:
    id_, name = document.get("node"), document.get("node_name")
    return f"{name} ({id_})" if id_ and name else id_


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
    document["command"] = shlex.join(document.get("command") or ())
    outputs = document.get("outputs") or []
    document["outputs"] = [output["path"] for output in outputs]
    saved = document.get("checkpoint")
    if saved is not None:
        document["checkpoint"] = (
            f"{saved['files']} file(s), {saved['size_bytes']} bytes, saved at {saved['saved_at']}"
        )
    if (document.get("nodes") or 1) == 1:
        document["nodes"] = None
    document["node"] = _node(document)
    for name in ("created_at", "started_at", "finished_at", "by"):
        document[name] = document.get(name) and local_time(document[name])
    if expired := document.get("expired_at"):
        document["expired"] = (
            f"arguments, results, log and checkpoint were deleted {local_time(expired)}"
        )
    document["preemptible"] = "yes" if document.get("preemptible") else None
    for name in ("memory", "disk"):
        size = document.get(f"{name}_bytes")
        document[name] = None if size is None else gpu.typed_size(size)
    if timeout := document.get("timeout_s"):
        document["timeout"] = f"{timeout:.12g} s"
    if not document["nodes"]:
        document["engine"] = document["on_loss"] = None
    if document.get("kind") != "function":  # the batch of a command has one task
        document["batch"] = None
    document["members"] = [_member(member) for member in document.get("members") or ()]
    names = (
        "id name batch user team status phase reason exit_code error_text command gpu cpus memory disk on labels max_price tier "
        "environment network timeout retries priority by preemptible nodes engine on_loss node members created_at started_at finished_at tries losses checkpoint outputs expired"
    )
    fields(document, names.split())


@click.command()
@task_id
@click.option("-f", "--follow", is_flag=True, help="Follow until the task ends.")
@as_json
@click.pass_context
def logs(ctx: click.Context, task: str, follow: bool, as_json: bool) -> None:
    """Print the output of a task."""
    client = client_of(ctx)

    def read(emit: Callable[[Any], None]) -> bool:
        run = client.get(task)
        on_progress = ProgressLine(emit, run, phases=sys.stderr.isatty()) if follow else None
        read_on = run.log_documents if as_json else run.printed
        for piece in read_on(follow=follow, on_progress=on_progress):
            emit(piece)
        return True

    with Reading(read) as reading:
        is_whole = reading.show(show_documents if as_json else partial(show_output, quiet=False))
    if not is_whole:
        again = f"gpool logs {'-f ' if follow else ''}{'--json ' if as_json else ''}{task}"
        click.echo(f"\nThe task continues. Read on with: {again}", err=True)
        ctx.exit(INTERRUPTED)


@click.command(epilog=examples("gpool wait t-0123456789abc", "gpool wait --timeout 2h $(cat ids)"))
@click.argument("tasks", metavar="ID...", nargs=-1, required=True)
@click.option("--timeout", metavar="TIME", help="Stop waiting after this time, e.g. 10m.")
@as_json
@click.pass_context
def wait(ctx: click.Context, tasks: tuple[str, ...], timeout: str | None, as_json: bool) -> None:
    """Wait for tasks to end; exit with their exit code.

    With several ids, waits for all and exits with the code of the first one that did not succeed. An id that begins
    with b- is a batch, e.g. the calls of one `map`.
    """
    from gpool.cli.command import Wait, WaitOutcome, awaited, is_batch
    from gpool.client.times import seconds

    ends = None if timeout is None else time.monotonic() + seconds(timeout)
    client = client_of(ctx)
    waits, found = list[Wait](), list[WaitOutcome]()

    def read(emit: Callable[[Result | WaitOutcome | str], None]) -> bool:
        waits[:] = [awaited(client, task, as_json=as_json) for task in tasks]
        for wait in waits:
            emit(wait(None if ends is None else max(0.0, ends - time.monotonic()), emit))
        return True

    def report(pieces: Iterator[Result | WaitOutcome | str]) -> None:
        for one in pieces:
            if isinstance(one, str):
                on_stderr(one)
            elif isinstance(one, WaitOutcome):
                found.append(one)
            else:
                print_outcome(one)

    try:
        with Reading(read) as reading:
            is_whole = reading.show(report)
    except TimeoutError:
        unfinished = tasks[len(found)]
        what = "batch" if is_batch(unfinished) else "task"
        click.echo(
            f"gpool: {what} {unfinished} has not ended within {timeout}; it continues", err=True
        )
        ctx.exit(FAILED)
    except GpoolError as error:
        if not waits or os.environ.get("GPOOL_DEBUG"):  # no id is known to be valid yet
            raise
        print_error(error)
        ctx.exit(GPOOL_FAULT)
    if not is_whole:
        left = " ".join(("--json", *tasks) if as_json else tasks[len(found) :])
        click.echo(
            f"\nInterrupted; the tasks continue. Wait again with: gpool wait {left}", err=True
        )
        ctx.exit(INTERRUPTED)
    if as_json:
        documents = [one.document for one in found]
        emit_json(documents if len(tasks) > 1 else documents[0])
    ctx.exit(next((one.code for one in found if one.code), 0))


@click.command()
@click.argument("tasks", metavar="ID...", nargs=-1, required=True)
@as_json
@click.pass_context
def cancel(ctx: click.Context, tasks: tuple[str, ...], as_json: bool) -> None:
    """Cancel tasks or batches.

    An id that begins with b- is a batch, e.g. the calls of one `map`; its finished tasks are left as they are.
    """
    client = client_of(ctx)
    found, failed = [], 0
    for task in tasks:
        try:
            if task.startswith("b-"):
                had_ended = _has_ended(client, task)
                client.cancel_batch(task)
                document = {"id": task, "status": "ended" if had_ended else "cancelled"}
            else:
                document = client.cancel(task)
        except GpoolError as error:  # the other tasks are cancelled nevertheless
            if len(tasks) == 1:
                raise
            print_error(error)
            failed = exit_code_of(error)
            continue
        found.append(document)
        if not as_json:
            outcome = document.get("status", "cancelled")
            click.echo(f"{task} {'has ended' if outcome == 'ended' else outcome}")
    if as_json:
        emit_json(found)
    ctx.exit(failed)


def _has_ended(client: Client, batch: str) -> bool:
    """False for a key that may cancel but not read."""
    try:
        about = client.batch(batch)
    except Forbidden:
        return False
    return bool(about["closed"] and about["done"] >= about["total"])


@click.command()
@task_id
@into_option()
@as_json
@click.pass_context
def result(ctx: click.Context, task: str, into: Path, as_json: bool) -> None:
    """Download the output files of a finished task."""
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
    print_outcome(found, code_too=True)
    ctx.exit(0 if found.status == "succeeded" else FAILED)


@click.command()
@task_id
@as_json
@click.pass_context
def explain(ctx: click.Context, task: str, as_json: bool) -> None:
    """Explain why a task waits and estimate its start."""
    client = client_of(ctx)
    document = client.explain(task)
    if as_json:
        emit_json(document)
        return
    click.echo(plain(document["sentence"]))
    estimate = document.get("estimate")
    if estimate:
        about, first, last = (
            local_time(estimate[name], client.api.date) for name in ("at", "from", "to")
        )
        click.echo(f"Expected start: {about}; with 80 % probability between {first} and {last}.")
    for one in document.get("suggestions") or ():
        click.echo(f"  {plain(one['sentence'])} ({plain(one['change'])})")

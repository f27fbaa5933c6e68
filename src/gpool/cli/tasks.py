"""Verbs about tasks: ps, status, logs, wait, cancel, result, explain.
One file because these verbs share a task's id and its fields.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from gpool.cli.command import (
    MakeOption,
    as_json,
    client_of,
    complete_tasks,
    examples,
    into_option,
    own_team_id,
    shown_as,
)
from gpool.cli.interrupts import Reading
from gpool.cli.main import FAILED, GPOOL_FAULT, INTERRUPTED, exit_code_of, print_error
from gpool.cli.printing import (
    ProgressLine,
    cost_fields,
    emit_json,
    fields,
    granted_fields,
    local_time,
    on_stderr,
    print_outcome,
    progress_bar,
    show_documents,
    show_output,
    sibling_fields,
)
from gpool.core.errors import Forbidden, GpoolError, Invalid
from gpool.core.specs import gpu
from gpool.core.terminal import neutral, plain

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


task_id = click.argument("task", metavar="ID", callback=_one_task, shell_complete=complete_tasks)


def whose(function: F, option: MakeOption = click.option) -> F:
    everybody = option("--everybody", is_flag=True, help="Tasks of all users (operators).")
    team = option("--team", metavar="TEAM", help="Tasks of this team instead of your own.")
    return cast(F, team(everybody(function)))


def whose_tasks(client: Client, team: str | None, everybody: bool) -> dict[str, str]:
    if everybody and team is not None:
        raise Invalid("--everybody and --team exclude each other; give one of them")
    if everybody:
        return {"all": "true"}
    return {} if team is None else {"team": own_team_id(client, team)}


def task_status(task: dict[str, Any]) -> str:
    phase = task.get("phase")
    return task["status"] if phase in (None, "run") else f"{task['status']} ({phase})"


def progress_text(task: dict[str, Any]) -> str | None:
    """ "40 % epoch 4"; None if the task reported nothing."""
    reported = task.get("progress")
    if not reported:
        return None
    return f"{int(100 * reported['fraction'])} % {reported.get('text') or ''}".rstrip()


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
@click.argument("task", metavar="ID", shell_complete=complete_tasks)
@as_json
@click.pass_context
def status(ctx: click.Context, task: str, as_json: bool) -> None:
    """Show one task or batch.

    An id that begins with b- is a batch, e.g. the calls of one `map`.
    """
    client = client_of(ctx)
    if task.startswith("b-"):
        _show_batch(client.batch(task, counts=True), as_json)
        return
    document = client.get(task).document()
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
    document |= granted_fields(document) | cost_fields(document) | sibling_fields(document)
    if timeout := document.get("timeout_s"):
        document["timeout"] = f"{timeout:.12g} s"
    if not document["nodes"]:
        document["engine"] = document["on_loss"] = None
    if document.get("kind") != "function":  # the batch of a command has one task
        document["batch"] = None
    document["progress"] = progress_text(document)
    document["members"] = [_member(member) for member in document.get("members") or ()]
    names = (
        "id name batch user team status phase progress reason exit_code error_text command gpu gpu_indexes cpus memory disk on labels max_price max_cost cost tier "
        "environment network timeout retries priority by preemptible nodes engine on_loss node members created_at started_at finished_at tries losses checkpoint outputs expired verification"
    )
    fields(document, names.split())


def _show_batch(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json(document)
        return
    counts = [document.get(name) for name in ("succeeded", "failed", "cancelled", "running")]
    document["waiting"] = document["total"] - sum(count or 0 for count in counts)
    document["open"] = None if document["closed"] else "yes; more tasks may be added"
    names = "id name total succeeded failed cancelled running waiting open created_at"
    fields(document, names.split())
    if document.get("failed"):
        click.echo(f"Failed tasks, one by one: gpool wait {document['id']}", err=True)


@click.command(
    epilog=examples("gpool logs t-0123456789abc --tail 20", "gpool logs -f t-0123456789abc")
)
@task_id
@click.option("-f", "--follow", is_flag=True, help="Follow until the task ends.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines.")
@as_json
@click.pass_context
def logs(ctx: click.Context, task: str, follow: bool, tail: int | None, as_json: bool) -> None:
    """Print the output of a task.

    A task that was started several times has a line between its attempts.
    """
    if tail is not None and (follow or as_json):
        raise Invalid("--tail is for output that is printed once; leave out --follow and --json")
    from gpool.client.runs import printed

    client = client_of(ctx)
    if tail is not None:
        lines = client.get(task).logs().splitlines(keepends=True)
        for line in lines[max(0, len(lines) - tail) :]:
            click.echo(neutral(line) if sys.stdout.isatty() else line, nl=False)
        return

    def read(emit: Callable[[Any], None]) -> bool:
        run = client.get(task)
        on_progress = ProgressLine(emit, run, phases=sys.stderr.isatty()) if follow else None
        documents = run.log_documents(follow=follow, on_progress=on_progress)
        for piece in documents if as_json else printed(between_attempts(documents, emit)):
            emit(piece)
        return True

    with Reading(read) as reading:
        is_whole = reading.show(show_documents if as_json else partial(show_output, quiet=False))
    if not is_whole:
        again = f"gpool logs {'-f ' if follow else ''}{'--json ' if as_json else ''}{task}"
        click.echo(f"\nThe task continues. Read on with: {again}", err=True)
        ctx.exit(INTERRUPTED)


@click.command(epilog=examples("gpool wait t-0123456789abc", "gpool wait --timeout 2h $(cat ids)"))
@click.argument("tasks", metavar="ID...", nargs=-1, required=True, shell_complete=complete_tasks)
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
                print_outcome(one, code_too=len(tasks) > 1)

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


def between_attempts(
    documents: Iterable[dict[str, Any]], emit: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Announce each later attempt: otherwise its output continues that of the one before."""
    last = None
    for one in documents:
        epoch = int(one["epoch"])
        if last is not None and epoch != last:
            emit(f"gpool: --- attempt {epoch}: the task was started again ---")
        last = epoch
        yield one


def _unfinished(client: Client) -> tuple[str, ...]:
    """Own tasks that have not ended; a batch instead of its tasks."""
    found = client.listing("tasks", status="queued,leased,running")
    return tuple(
        dict.fromkeys(one["batch"] if one.get("kind") == "function" else one["id"] for one in found)
    )


@click.command(epilog=examples("gpool cancel t-0123456789abc", "gpool cancel --all"))
@click.argument("tasks", metavar="[ID...]", nargs=-1, shell_complete=complete_tasks)
@click.option("--all", "everything", is_flag=True, help="All tasks of yours that have not ended.")
@as_json
@click.pass_context
def cancel(ctx: click.Context, tasks: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Cancel tasks or batches.

    An id that begins with b- is a batch, e.g. the calls of one `map`; its finished tasks are left as they are.
    """
    if everything == bool(tasks):
        raise click.UsageError("Name the tasks to cancel, or give --all.")
    client = client_of(ctx)
    if everything:
        tasks = _unfinished(client)
        if not tasks:
            click.echo("No running or waiting tasks.", err=True)
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
    for line in (document["sentence"], *(document.get("resources") or ())):
        click.echo(plain(line))
    estimate = document.get("estimate")
    if estimate:
        about, first, last = (
            local_time(estimate[name], client.api.date) for name in ("at", "from", "to")
        )
        click.echo(f"Expected start: {about}; with 80 % probability between {first} and {last}.")
    for one in document.get("suggestions") or ():
        click.echo(f"  {plain(one['sentence'])} ({plain(one['change'])})")

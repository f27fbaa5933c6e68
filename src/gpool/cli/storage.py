"""Verbs `delete`, `artifacts` and `account`: the data that an account keeps in the pool."""

from __future__ import annotations

from pathlib import Path

import click

from gpool.cli.account import password_of
from gpool.cli.command import VerbGroup, as_json, client_of, examples
from gpool.cli.main import exit_code_of, print_error
from gpool.cli.printing import emit_json, table
from gpool.core.errors import GpoolError, Invalid


@click.command(epilog=examples("gpool delete t-0123456789abc", "gpool delete b-0123456789abc"))
@click.argument("tasks", metavar="ID...", nargs=-1, required=True)
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


# ---- the account


@click.group(cls=VerbGroup)
def account() -> None:
    """Export or delete your account."""


@account.command("export", epilog=examples("gpool account export my-data.jsonl"))
@click.argument("file", type=click.Path(path_type=Path))
@click.pass_context
def account_export(ctx: click.Context, file: Path) -> None:
    """Write your data to a file, one JSON object a line.

    Contains account, keys (without secrets), sessions, nodes, tasks with arguments, results and logs, and the list of
    artifacts; `gpool result ID` downloads output files.
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

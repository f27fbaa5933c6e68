"""`gpool admin backup`, `restore` and `check`: on the server's machine, by its data directory and database; and
`gpool admin read-only`, by its API.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpool.cli.command import as_json, client_of, examples, require_extra
from gpool.cli.lending.listener import data_option
from gpool.cli.main import FAILED
from gpool.cli.printing import emit_json, table
from gpool.core.errors import Invalid

if TYPE_CHECKING:
    from gpool.server.settings import Settings

PASSPHRASE = "GPOOL_BACKUP_PASSPHRASE"

_passphrase_option = click.option(
    "--passphrase-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help=f"File whose first line is the passphrase (default: the variable {PASSPHRASE}, else a prompt).",
)


@click.command(
    epilog=examples(
        "gpool admin backup pool.backup",
        "gpool admin backup --passphrase-file secret.txt --data /srv/gpool pool.backup",
    )
)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@data_option
@_passphrase_option
@click.option(
    "--with-bucket",
    is_flag=True,
    help="Read artifacts of the object store into the backup too (default: they stay there).",
)
@as_json
def backup(
    file: Path, data: Path | None, passphrase_file: Path | None, with_bucket: bool, as_json: bool
) -> None:
    """Write an encrypted backup of the pool to FILE; the server keeps serving.

    Run it where the server runs, with its GPOOL_SERVER_ variables. The file contains the database, the keys, the
    certificate and the artifacts of the data directory.
    """
    import asyncio

    settings = _settings(data, "gpool admin backup")
    from gpool.server.clock import SystemClock
    from gpool.server.recovery.backup import BackupRequest, back_up

    secret = _passphrase(passphrase_file, is_new=True)
    request = BackupRequest(settings, file, secret, with_bucket)
    done = asyncio.run(back_up(request, SystemClock().now))
    if as_json:
        emit_json({**asdict(done), "file": str(file)})
        return
    size = done.size_bytes / 1e6
    click.echo(f"{file}: {done.tasks} tasks, {done.artifacts} artifacts, {size:.1f} MB.")
    if not done.has_master_key:
        click.echo(
            "  The master key is not inside: it comes from a variable or a command. Keep it, or the backup is useless.",
            err=True,
        )
    if done.in_bucket:
        click.echo(
            f"  {done.in_bucket} artifacts stay in the object store; --with-bucket includes them.",
            err=True,
        )
    if done.lost:
        click.echo(
            f"  {len(done.lost)} artifacts have no file, for example {done.lost[0]}; see: gpool admin check",
            err=True,
        )


@click.command(
    epilog=examples(
        "gpool admin restore pool.backup",
        "gpool admin restore --verify pool.backup",
        "gpool admin restore --data /srv/gpool --force pool.backup",
    )
)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@data_option
@_passphrase_option
@click.option("--force", is_flag=True, help="Replace a database and keys that are there.")
@click.option("--verify", is_flag=True, help="Only check that the file is whole and can be read.")
@as_json
def restore(
    file: Path,
    data: Path | None,
    passphrase_file: Path | None,
    force: bool,
    verify: bool,
    as_json: bool,
) -> None:
    """Restore a backup into an empty directory and database; the server must be stopped.

    Everything done after the backup is lost. Tasks that were leased are queued again under new epochs, sessions and
    unused invitations end, and servers of the lost database are fenced.
    """
    import asyncio

    settings = _settings(data, "gpool admin restore")
    from gpool.server.clock import SystemClock
    from gpool.server.recovery.restore import RestoreRequest, opened, timestamp, verified
    from gpool.server.recovery.restore import restore as restore_pool

    secret = _passphrase(passphrase_file, is_new=False)
    if verify:
        with opened(file) as archive:
            found = verified(archive, secret)
        facts: dict[str, Any] = {
            "at": timestamp(found.manifest.at),
            "version": found.manifest.version,
            "revision": found.manifest.revision,
            "database": found.manifest.database,
            "rows": sum(found.end.rows.values()),
            "tasks": found.end.rows.get("tasks", 0),
            "artifacts": found.end.artifacts,
            "has_master_key": found.manifest.has_master_key,
        }
        if as_json:
            emit_json(facts)
        else:
            click.echo(
                f"{file} is whole: of {facts['at']}, {facts['tasks']} tasks, {facts['artifacts']} artifacts."
            )
        return
    done = asyncio.run(
        restore_pool(RestoreRequest(settings, file, secret, force), SystemClock().now)
    )
    at = timestamp(done.manifest.at)
    if as_json:
        emit_json(
            {
                "at": at,
                "rows": done.rows,
                "tasks": done.tasks,
                "artifacts": done.artifacts,
                "lost": list(done.lost),
                **asdict(done.fenced),
                "replaced": None if done.replaced is None else str(done.replaced),
            }
        )
        return
    fenced = done.fenced
    click.echo(f"Restored the pool of {at}: {done.tasks} tasks, {done.artifacts} artifacts.")
    click.echo(
        f"  Ended: leases {fenced.leases} (their tasks are queued again), sessions {fenced.sessions}, "
        f"invitations {fenced.invitations}.",
        err=True,
    )
    if done.replaced is not None:
        click.echo(f"  Files that were there: {done.replaced}", err=True)
    click.echo("  Check it with: gpool admin check; then start the server.", err=True)


@click.command(
    epilog=examples(
        "gpool admin check",
        "gpool admin check --data /srv/gpool --anchor 1234:HASH",
    )
)
@data_option
@click.option(
    "--anchor",
    "anchors",
    multiple=True,
    metavar="NUMBER:HASH",
    help="Head of the audit record, from the server's log, to compare with (repeatable).",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="N",
    help="Violations to list of each check.",
)
@as_json
@click.pass_context
def check(
    ctx: click.Context, data: Path | None, anchors: tuple[str, ...], limit: int, as_json: bool
) -> None:
    """Check database, files, keys and audit record; exit code 1 if something is wrong.

    Run it where the server runs, with its GPOOL_SERVER_ variables. It reads one snapshot and changes nothing.
    """
    import asyncio

    settings = _settings(data, "gpool admin check")
    from gpool.server.recovery.check import check_pool, parse_anchor

    pinned = [parse_anchor(each) for each in anchors]
    found = asyncio.run(check_pool(settings, pinned, limit))
    if as_json:
        emit_json({"clean": found.is_clean, **asdict(found)})
        ctx.exit(0 if found.is_clean else FAILED)
    if found.is_clean:
        click.echo(f"{found.checks} checks passed.")
        if found.audit_head:
            click.echo(f"  Head of the audit record: {found.audit_head}", err=True)
        return
    rows = [(one.check, one.id, one.detail) for one in found.violations]
    table(("check", "id", "violation"), rows, "")
    for name in found.truncated:
        click.echo(f"  {name}: more than {limit}; list more with --limit", err=True)
    ctx.exit(FAILED)


@click.command(
    "read-only",
    epilog=examples(
        "gpool admin read-only",
        "gpool admin read-only on --reason 'the database moves until 18:00'",
        "gpool admin read-only off",
    ),
)
@click.argument("mode", type=click.Choice(["on", "off"]), required=False)
@click.option(
    "--reason",
    default="maintenance",
    show_default=True,
    metavar="TEXT",
    help="Shown to everybody whose request is refused.",
)
@as_json
@click.pass_context
def read_only(ctx: click.Context, mode: str | None, reason: str, as_json: bool) -> None:
    """Show the read-only mode, or switch it; running tasks go on."""
    api = client_of(ctx).api
    path = "/v1/admin/read-only"
    if mode is None:
        found = api.get_json(path)
    else:
        found = api.send_json("PUT", path, {"reason": reason if mode == "on" else ""})
    if as_json:
        emit_json(found)
    elif found["reason"]:
        click.echo(f"The pool is read-only: {found['reason']}")
    else:
        click.echo("The pool can be changed.")


def _settings(data: Path | None, verb: str) -> Settings:
    """The server's settings: its data directory over the environment."""
    require_extra("server", verb)
    from pydantic import ValidationError

    from gpool.cli.lending.up import data_folder
    from gpool.server.settings import Settings

    try:
        return Settings(data=data_folder(data))
    except ValidationError as error:
        raise Invalid("; ".join(each["msg"] for each in error.errors())) from error


def _passphrase(file: Path | None, *, is_new: bool) -> str:
    from gpool.server.recovery.archive import checked_passphrase

    if file is not None:
        try:
            found = file.read_text(encoding="utf-8").partition("\n")[0].rstrip("\r")
        except (OSError, UnicodeDecodeError) as error:
            raise Invalid(f"the passphrase cannot be read from {file}: {error}") from error
    else:
        found = os.environ.get(PASSPHRASE, "")
        if not found:
            found = click.prompt("Passphrase", hide_input=True, confirmation_prompt=is_new)
    return checked_passphrase(found) if is_new else found

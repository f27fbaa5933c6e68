"""`gpool admin keys` (encryption keys of the server), `receipt-keys`, `audit` and `replicas`."""

from __future__ import annotations

import threading
from typing import Any

import click

from gpool.cli.command import as_json, client_of, examples, listed, listing
from gpool.cli.main import FAILED
from gpool.cli.printing import emit_json, fields, table

LOOK_EVERY_S = 0.5


@click.group()
def keys() -> None:
    """Show and rotate the server's encryption keys."""


@keys.command("ls")
@as_json
@click.pass_context
def keys_ls(ctx: click.Context, as_json: bool) -> None:
    """List encryption keys and the progress of a rotation."""
    _show(client_of(ctx).api.get_json("/v1/admin/keys"), as_json)


@keys.command("rotate")
@click.option("--master", is_flag=True, help="Create a new master key too.")
@click.option("-d", "--detach", is_flag=True, help="Do not wait for the end.")
@as_json
@click.pass_context
def keys_rotate(ctx: click.Context, master: bool, detach: bool, as_json: bool) -> None:
    """Encrypt all secrets with a new key; the server stays available."""
    api = client_of(ctx).api
    progress = api.send_json("POST", "/v1/admin/keys/rotate", {"master": master})
    pause = threading.Event()
    while progress["left"] and not detach:
        if not as_json:
            done = progress["fields"] - progress["left"]
            click.echo(f"  {done} of {progress['fields']} fields encrypted", err=True)
        pause.wait(LOOK_EVERY_S)
        progress = api.get_json("/v1/admin/keys")
    _show(progress, as_json)


@click.group("receipt-keys")
def receipt_keys() -> None:
    """Replace the key that signs receipts."""


@receipt_keys.command("rotate")
@as_json
@click.pass_context
def receipt_keys_rotate(ctx: click.Context, as_json: bool) -> None:
    """Replace the receipt key, or create the first one; older receipts stay valid."""
    history = client_of(ctx).api.send_json("POST", "/v1/admin/receipt-keys/rotate", {})
    if as_json:
        emit_json(history)
        return
    click.echo(
        f"The pool {history['pool']} has a new receipt key; its history has {len(history['keys'])}."
    )
    click.echo("Users fetch the history with: gpool receipt fetch-keys")


@click.command()
@as_json
@click.pass_context
def replicas(ctx: click.Context, as_json: bool) -> None:
    """List the servers of the pool and which one leads."""
    found = client_of(ctx).api.get_json("/v1/admin/replicas")
    if as_json:
        emit_json(found["items"])
        return
    columns = ("id", "address", "version", "role", "nodes", "started_at", "heard_at")
    rows = [[_cell(each, name) for name in columns] for each in found["items"]]
    table(columns, rows, "No server is registered.")


def _cell(replica: dict[str, Any], column: str) -> str:
    if column == "role":
        if not replica["alive"]:
            return "dead"
        return "leader" if replica["leader"] else "follower"
    return str(replica[column] if replica[column] is not None else "-")


def _show(progress: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json(progress)
    else:
        fields(progress, ("data_keys", "retired", "fields", "left", "masters"))


@click.command(
    epilog=examples("gpool admin audit --limit 20", "gpool admin audit --verify --anchor 1234:HASH")
)
@listing
@click.option("--verify", is_flag=True, help="Verify the hash chain of the record.")
@click.option(
    "--anchor",
    "anchors",
    multiple=True,
    metavar="NUMBER:HASH",
    help="Head printed by an earlier --verify, to compare with (repeatable).",
)
@click.pass_context
def audit(
    ctx: click.Context,
    as_json: bool,
    everything: bool,
    limit: int,
    verify: bool,
    anchors: tuple[str, ...],
) -> None:
    """List audit entries, newest first, or verify them."""
    client = client_of(ctx)
    if verify:
        query = "".join(f"&anchor={anchor}" for anchor in anchors)
        found = client.api.get_json(f"/v1/audit?verify=true{query}")
        if as_json:
            emit_json(found)
        elif found["whole"]:
            click.echo(f"{found['entries']} entries verified; none was changed.")
            click.echo(
                f"  Keep this head outside the server, for --anchor: {found['head']}", err=True
            )
        else:
            click.echo(f"The record is damaged after entry {found['entries']}: {found['why']}")
        ctx.exit(0 if found["whole"] else FAILED)
    items = listed(client, "audit", everything=everything, limit=limit)
    if as_json:
        emit_json(items)
        return
    rows = [
        (
            one["number"],
            one["at"],
            one["actor"] or "-",
            one["action"],
            one["thing"],
            one["outcome"],
            one["address"],
            " ".join(f"{name}={value}" for name, value in one["facts"].items()),
        )
        for one in items
    ]
    columns = ("number", "at", "actor", "action", "thing", "outcome", "address", "facts")
    table(columns, rows, "No audit entries yet.")

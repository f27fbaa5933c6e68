"""`gpool admin keys` and `gpool admin audit`."""

from __future__ import annotations

import threading
from typing import Any

import click

from gpool.cli.calling import as_json, client_of, listed, listing
from gpool.cli.main import FAILED
from gpool.cli.output.printing import emit_json, fields, table

LOOK_EVERY_S = 0.5


@click.group()
def keys() -> None:
    """The keys that seal what is secret on the server."""


@keys.command("ls")
@as_json
@click.pass_context
def keys_ls(ctx: click.Context, as_json: bool) -> None:
    """Show the keys, and how far a rotation is."""
    _show(client_of(ctx).api.get_json("/v1/admin/keys"), as_json)


@keys.command("rotate")
@click.option("--master", is_flag=True, help="A new master key too.")
@click.option("-d", "--detach", is_flag=True, help="Do not wait until it is done.")
@as_json
@click.pass_context
def keys_rotate(ctx: click.Context, master: bool, detach: bool, as_json: bool) -> None:
    """Seal everything anew with a new key, while the server serves."""
    api = client_of(ctx).api
    told = api.send_json("POST", "/v1/admin/keys/rotate", {"master": master})
    pause = threading.Event()
    while told["left"] and not detach:
        if not as_json:
            done = told["fields"] - told["left"]
            click.echo(f"  {done} of {told['fields']} fields", err=True)
        pause.wait(LOOK_EVERY_S)
        told = api.get_json("/v1/admin/keys")
    _show(told, as_json)


def _show(told: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json(told)
    else:
        fields(told, ("data_keys", "retired", "fields", "left", "masters"))


@click.command()
@listing
@click.option("--verify", is_flag=True, help="Check that the record is as it was written.")
@click.option(
    "--anchor",
    "anchors",
    multiple=True,
    metavar="NUMBER:HASH",
    help="A head that --verify told you earlier and you kept.",
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
    """Show who did what, newest first."""
    client = client_of(ctx)
    if verify:
        query = "".join(f"&anchor={anchor}" for anchor in anchors)
        found = client.api.get_json(f"/v1/audit?verify=true{query}")
        if as_json:
            emit_json(found)
        elif found["whole"]:
            click.echo(f"{found['entries']} entries, all as they were written.")
            click.echo(f"  Keep this where nobody here can change it: {found['head']}", err=True)
        else:
            click.echo(f"The record is broken after {found['entries']}: {found['why']}")
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
    table(columns, rows, "Nothing was noted yet.")

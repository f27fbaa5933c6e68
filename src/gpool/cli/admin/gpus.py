"""`gpool admin gpu-models` and `gpool admin admit`: the table of GPU verification, and an operator's word for a GPU."""

from __future__ import annotations

import click

from gpool.cli.command import as_json, client_of, examples, quoted
from gpool.cli.printing import emit_json, table
from gpool.core.terminal import plain


@click.command("gpu-models", epilog=examples("gpool admin gpu-models"))
@as_json
@click.pass_context
def gpu_models(ctx: click.Context, as_json: bool) -> None:
    """List GPU models that GPU verification knows, and lent models that it does not."""
    page = client_of(ctx).api.get_json("/v1/admin/gpu-models")
    if as_json:
        emit_json(page)
        return
    columns = ("model", "int8 TOPS", "memory GB/s", "memory GiB")
    fields = ("name", "int8_teraops", "memory_gb_per_s", "memory_gib")
    rows = [tuple(str(one[name]) for name in fields) for one in page["items"]]
    table(columns, rows, "The table is empty.")
    if not page["verifies"]:
        click.echo("GPU verification is off: GPOOL_SERVER_EXAMINE_GPUS=true turns it on.", err=True)
    for model in page["unknown"]:
        click.echo(f"{plain(model)} is lent and has no row: its GPUs are unproven.", err=True)


@click.command(epilog=examples("gpool admin admit g-6gc8n0ng0237t"))
@click.argument("gpu", metavar="GPU")
@as_json
@click.pass_context
def admit(ctx: click.Context, gpu: str, as_json: bool) -> None:
    """Admit a flagged or unproven GPU for all users, and bind it to its node's owner."""
    path = f"/v1/resources/{quoted(gpu)}"
    found = client_of(ctx).api.send_json("PATCH", path, {"flagged": None})
    if as_json:
        emit_json(found)
        return
    click.echo(f"{plain(gpu)} takes tasks of all users")

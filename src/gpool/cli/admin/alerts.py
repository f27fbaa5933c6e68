"""`gpool admin alerts`: the server's alert rules and their state."""

from __future__ import annotations

import click

from gpool.cli.command import as_json, client_of, examples
from gpool.cli.main import FAILED
from gpool.cli.printing import emit_json, local_time, table

_ORDER = ("firing", "pending", "unknown", "quiet")


@click.command(epilog=examples("gpool admin alerts", "gpool admin alerts --all"))
@click.option("-a", "--all", "everything", is_flag=True, help="Show quiet and unknown rules too.")
@as_json
@click.pass_context
def alerts(ctx: click.Context, everything: bool, as_json: bool) -> None:
    """List alerts, as the server finds them; exit code 1 if one fires."""
    page = client_of(ctx).api.get_json("/v1/admin/alerts")
    items = sorted(page["items"], key=lambda one: _ORDER.index(one["state"]))
    firing = [one for one in items if one["state"] == "firing"]
    if as_json:
        emit_json(page)
        ctx.exit(FAILED if firing else 0)
    active = [one for one in items if everything or one["state"] in ("firing", "pending")]
    rows = [
        (
            one["state"],
            one["severity"],
            one["name"],
            " ".join(f"{name}={value}" for name, value in sorted(one["labels"].items())),
            local_time(one["since"]) if one["since"] else "-",
            one["summary"],
            one["runbook"],
        )
        for one in active
    ]
    columns = ("state", "severity", "alert", "labels", "since", "summary", "runbook")
    if page["evaluated_at"] is None:
        table(columns, rows, "The server has not evaluated its rules yet; ask again in 15 s.")
    else:
        table(columns, rows, f"No alert: {len(items)} rules, none fires.")
    ctx.exit(FAILED if firing else 0)

"""`gpool events` and `gpool notify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpool.cli.command import VerbGroup, as_json, client_of, examples
from gpool.cli.printing import emit_json, local_time, show, table

if TYPE_CHECKING:
    from gpool.client.client import Client

PAGE = 200
team_option = click.option("--team", "team_", metavar="TEAM", help="Use a team of yours instead.")
pool_option = click.option(
    "--pool", "of_pool", is_flag=True, help="Use the pool instead (operators)."
)
kinds_option = click.option(
    "--kinds",
    default="",
    metavar="KINDS",
    help="Types of events, by commas, e.g. task.failed,node.* (default: all).",
)


def account_query(client: Client, team: str | None, of_pool: bool) -> str:
    """Query of the account that --team and --pool name."""
    from gpool.core.errors import Invalid

    if team and of_pool:
        raise Invalid("use one of --team and --pool")
    if of_pool:
        return "pool=true"
    return f"team={client.team_id(team)}" if team else ""


def kind_list(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


@click.command(
    epilog=examples(
        "gpool events",
        "gpool events --follow --json",
        "gpool events --after ev-0000000000007",
        "gpool events --pool --follow",
    )
)
@click.option("--follow", "-f", is_flag=True, help="Go on with new events until interrupted.")
@click.option("--after", default="", metavar="EVENT", help="Begin after this event.")
@team_option
@pool_option
@as_json
@click.pass_context
def events(
    ctx: click.Context,
    follow: bool,
    after: str,
    team_: str | None,
    of_pool: bool,
    as_json: bool,
) -> None:
    """Show events of your tasks, nodes and funds.

    Events are recorded from the first use of this verb on, and while a webhook or mail address exists.
    """
    import json

    from gpool.client.runs import follow_events

    client = client_of(ctx)
    query = account_query(client, team_, of_pool)
    if follow:
        for event in follow_events(client.api, query, after):
            click.echo(json.dumps(event) if as_json else _line(event))
        return
    found: list[dict[str, Any]] = []
    while True:
        cursor = f"&after={after}" if after else ""
        page = client.api.get_json(f"/v1/events?limit={PAGE}{cursor}&{query}")
        found += page["items"]
        if page["next"] is None:
            break
        after = page["next"]
    if as_json:
        emit_json(found)
        return
    for event in found:
        click.echo(_line(event))
    if not found:
        click.echo("No events yet; they are recorded from now on.")


def _line(event: dict[str, Any]) -> str:
    from gpool.core.terminal import plain

    data = event["data"]
    words = [f"{name}={value}" for name, value in data.items() if value not in (None, "", {})]
    return plain(f"{local_time(event['timestamp'])}  {event['type']:<15}  {' '.join(words)}")


# ---- mail


@click.group(cls=VerbGroup)
def notify() -> None:
    """Send events to mail addresses."""


@notify.command("ls")
@as_json
@click.pass_context
def notify_ls(ctx: click.Context, as_json: bool) -> None:
    """List your mail addresses."""
    found = client_of(ctx).api.get_json("/v1/me/notices")["items"]
    if as_json:
        emit_json(found)
        return
    rows = [
        (one["id"], one["address"], ",".join(one["kinds"]), "yes" if one["confirmed"] else "no")
        for one in found
    ]
    empty = "No addresses; add one with: gpool notify add ADDRESS"
    table(("id", "address", "kinds", "confirmed"), rows, empty)


@notify.command("add", epilog=examples("gpool notify add me@example.org --kinds task.failed"))
@click.argument("address")
@kinds_option
@as_json
@click.pass_context
def notify_add(ctx: click.Context, address: str, kinds: str, as_json: bool) -> None:
    """Add a mail address; a code is sent there."""
    wanted = {"address": address, "kinds": kind_list(kinds)}
    made = client_of(ctx).api.send_json("POST", "/v1/me/notices", wanted)
    show(made, as_json, "id address confirmed")
    if not as_json:
        click.echo(f"Confirm it with the mailed code: gpool notify confirm {made['id']} CODE")


@notify.command("confirm")
@click.argument("id_", metavar="ID")
@click.argument("code")
@as_json
@click.pass_context
def notify_confirm(ctx: click.Context, id_: str, code: str, as_json: bool) -> None:
    """Confirm a mail address by its code."""
    path = f"/v1/me/notices/{id_}/confirm"
    show(client_of(ctx).api.send_json("POST", path, {"code": code}), as_json, "id confirmed")


@notify.command("rm")
@click.argument("id_", metavar="ID")
@click.pass_context
def notify_rm(ctx: click.Context, id_: str) -> None:
    """Delete a mail address."""
    client_of(ctx).api.send("DELETE", f"/v1/me/notices/{id_}")

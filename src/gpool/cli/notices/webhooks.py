"""`gpool webhook`: web addresses that get events."""

from __future__ import annotations

import click

from gpool.cli.command import VerbGroup, as_json, client_of, examples
from gpool.cli.notices.events import (
    account_query,
    kind_list,
    kinds_option,
    pool_option,
    team_option,
)
from gpool.cli.printing import emit_json, local_time, show, table

the_webhook = click.argument("id_", metavar="WEBHOOK")


@click.group(cls=VerbGroup)
def webhook() -> None:
    """Send events to web addresses."""


@webhook.command(
    "add",
    epilog=examples(
        "gpool webhook add https://ci.example.org/gpool --kinds task.failed,batch.done",
        "gpool webhook add https://ntfy.sh/my-topic --form ntfy",
        "gpool webhook add https://ops.example.org/alerts --pool --kinds 'alert.*'",
    ),
)
@click.argument("url")
@kinds_option
@click.option(
    "--form",
    type=click.Choice(["standard", "slack", "discord", "ntfy"]),
    default="standard",
    show_default=True,
    help="Layout of the body.",
)
@team_option
@pool_option
@as_json
@click.pass_context
def webhook_add(
    ctx: click.Context,
    url: str,
    kinds: str,
    form: str,
    team_: str | None,
    of_pool: bool,
    as_json: bool,
) -> None:
    """Create a webhook and print its secret, which is shown once."""
    client = client_of(ctx)
    wanted = {"url": url, "kinds": kind_list(kinds), "form": form}
    path = f"/v1/webhooks?{account_query(client, team_, of_pool)}"
    show(client.api.send_json("POST", path, wanted), as_json, "id secret public_key")


@webhook.command("ls")
@team_option
@pool_option
@as_json
@click.pass_context
def webhook_ls(ctx: click.Context, team_: str | None, of_pool: bool, as_json: bool) -> None:
    """List webhooks."""
    client = client_of(ctx)
    found = client.api.get_json(f"/v1/webhooks?{account_query(client, team_, of_pool)}")["items"]
    if as_json:
        emit_json(found)
        return
    rows = [
        (
            one["id"],
            one["form"],
            ",".join(one["kinds"]),
            "on" if one["enabled"] else f"off {one['why']}".rstrip(),
            one["url"],
        )
        for one in found
    ]
    empty = "No webhooks; create one with: gpool webhook add URL"
    table(("id", "form", "kinds", "state", "url"), rows, empty)


@webhook.command("set", epilog=examples("gpool webhook set wh-0000000000007 --off"))
@the_webhook
@click.option("--url", metavar="URL", help="New address.")
@click.option("--kinds", metavar="KINDS", help="Types of events, by commas; * for all.")
@click.option("--on/--off", "enabled", default=None, help="Switch it on or off.")
@as_json
@click.pass_context
def webhook_set(
    ctx: click.Context,
    id_: str,
    url: str | None,
    kinds: str | None,
    enabled: bool | None,
    as_json: bool,
) -> None:
    """Change a webhook."""
    wanted = {
        "url": url,
        "kinds": None if kinds is None else kind_list(kinds),
        "enabled": enabled,
    }
    changed = client_of(ctx).api.send_json("PATCH", f"/v1/webhooks/{id_}", wanted)
    show(changed, as_json, "id url kinds enabled")


@webhook.command("rm")
@the_webhook
@click.pass_context
def webhook_rm(ctx: click.Context, id_: str) -> None:
    """Delete a webhook."""
    client_of(ctx).api.send("DELETE", f"/v1/webhooks/{id_}")


@webhook.command("test")
@the_webhook
@as_json
@click.pass_context
def webhook_test(ctx: click.Context, id_: str, as_json: bool) -> None:
    """Send a ping to a webhook now; exit code 1 if it fails."""
    found = client_of(ctx).api.send_json("POST", f"/v1/webhooks/{id_}/test", {})
    show(found, as_json, "status response error")
    if found["status"] != "sent":
        ctx.exit(1)


@webhook.command("log")
@the_webhook
@click.option(
    "--limit",
    type=click.IntRange(1, 200),
    default=20,
    show_default=True,
    metavar="N",
    help="Maximum number of deliveries.",
)
@as_json
@click.pass_context
def webhook_log(ctx: click.Context, id_: str, limit: int, as_json: bool) -> None:
    """List deliveries of a webhook, newest first."""
    path = f"/v1/webhooks/{id_}/deliveries?limit={limit}"
    found = client_of(ctx).api.get_json(path)["items"]
    if as_json:
        emit_json(found)
        return
    rows = [
        (
            one["event"],
            one["type"],
            one["status"],
            str(one["attempts"]),
            local_time(one["next_at"]) if one["next_at"] else "",
            one["error"] or str(one["response"] or ""),
        )
        for one in found
    ]
    table(("event", "type", "status", "tries", "next", "answer"), rows, "No deliveries yet.")


@webhook.command("replay")
@the_webhook
@click.option("--event", metavar="EVENT", help="Send this event again (default: all that failed).")
@as_json
@click.pass_context
def webhook_replay(ctx: click.Context, id_: str, event: str | None, as_json: bool) -> None:
    """Send events again with their ids."""
    found = client_of(ctx).api.send_json("POST", f"/v1/webhooks/{id_}/replay", {"event": event})
    show(found, as_json, "deliveries")


@webhook.command("rotate")
@the_webhook
@click.option(
    "--overlap",
    type=click.IntRange(0, 168),
    default=24,
    show_default=True,
    metavar="HOURS",
    help="Hours for which both secrets sign.",
)
@as_json
@click.pass_context
def webhook_rotate(ctx: click.Context, id_: str, overlap: int, as_json: bool) -> None:
    """Replace the secret of a webhook and print the new one."""
    wanted = {"overlap_s": overlap * 3600}
    made = client_of(ctx).api.send_json("POST", f"/v1/webhooks/{id_}/rotate", wanted)
    show(made, as_json, "id secret public_key")

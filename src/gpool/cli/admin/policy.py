"""`gpool admin policy`, `cordon`, `drain` and `reservations`: how operators steer the pool while it runs."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from gpool.cli.calling import as_json, client_of
from gpool.cli.output.printing import emit_json, fields, local_time, plain, table
from gpool.cli.references import names_of, node_id, quoted, team_id, user_id, who_is_who
from gpool.client.times import moment, now
from gpool.core.errors import Invalid, NotFound

if TYPE_CHECKING:
    from gpool.client.client import Client

the_node = click.argument("node")
_POLICY = ("order", "orders", "ageing_s", "patience_s", "weights", "changed", "pricing")

NOT_LEARNT = "not learnt yet: it takes 200 tasks that asked for GPUs, 50 of one batch at most"


@click.command()
@click.option("--order", metavar="NAME", help="Who comes first; `configured` goes back.")
@click.option("--ageing", metavar="TIME", help="Waiting this long is worth a point of priority.")
@click.option("--patience", metavar="TIME", help="Then a node is kept clear for a large task.")
@click.option("--weight", "weights", multiple=True, metavar="WHO=N", help="Of a user or team.")
@click.option("--dry-run", is_flag=True, help="Only say what it would do to those who wait.")
@click.option(
    "--learn", is_flag=True, help="Learn anew what free room is worth, from earlier tasks."
)
@as_json
@click.pass_context
def policy(
    ctx: click.Context,
    order: str | None,
    ageing: str | None,
    patience: str | None,
    weights: tuple[str, ...],
    dry_run: bool,
    learn: bool,
    as_json: bool,
) -> None:
    """Show or change by which rules tasks are started.

    \b
    gpool admin policy --order round_robin --dry-run
    """
    wanted: dict[str, Any] = {}
    if order is not None:
        wanted["order"] = None if order == "configured" else order
    for name, value in (("ageing_s", ageing), ("patience_s", patience)):
        if value is not None:
            wanted[name] = None if value == "configured" else _seconds(value)
    client = client_of(ctx)
    api = client.api
    if weights:
        wanted["weights"] = dict(_weight(client, text) for text in weights)
    if learn:
        api.send("POST", "/v1/admin/policy/learn")
        click.echo("learning begins; `gpool admin policy` shows what came of it", err=True)
    if wanted or dry_run:
        told = api.send_json("PATCH", "/v1/admin/policy", {**wanted, "dry_run": dry_run})
    else:
        told = api.get_json("/v1/admin/policy")
    if as_json:
        emit_json(told)
        return
    found = told.get("dry_run")
    if found is None:
        known = who_is_who(client) if told["weights"] else {}
        heavy = " ".join(
            f"{known.get(who, who)}={weight:g}" for who, weight in told["weights"].items()
        )
        changed = ", ".join(told["changed"])
        learnt = told.get("learnt")
        priced = f"{learnt['sentence']} ({learnt['at']})" if learnt else NOT_LEARNT
        shown = {"weights": heavy or "-", "changed": changed or "-", "pricing": priced}
        fields({**told, **shown}, _POLICY)
        return
    click.echo(plain(found["sentence"]))
    rows = [(one["task"], _wait(one["before_s"]), _wait(one["after_s"])) for one in found["moved"]]
    if rows:
        table(("task", "waits now", "would wait"), rows, "")


@click.command()
@the_node
@click.option("--why", default="", help="For those who ask.")
@as_json
@click.pass_context
def cordon(ctx: click.Context, node: str, why: str, as_json: bool) -> None:
    """Let nothing new start on a node, whatever its owner allows."""
    _cordon(ctx, node, {"why": why}, as_json)


@click.command()
@the_node
@click.option("--why", default="", help="For those who ask.")
@as_json
@click.pass_context
def drain(ctx: click.Context, node: str, why: str, as_json: bool) -> None:
    """Cordon a node and move away what may be preempted."""
    _cordon(ctx, node, {"why": why, "drain": True}, as_json)


@click.command()
@the_node
@click.pass_context
def uncordon(ctx: click.Context, node: str) -> None:
    """Let a node take tasks again."""
    client = client_of(ctx)
    client.api.send("DELETE", f"/v1/admin/cordons/{node_id(client, node)}")
    click.echo(f"{plain(node)} takes tasks again, if its owner lends it")


@click.group()
def reservations() -> None:
    """Keep nodes for a class or an event."""


@reservations.command("ls")
@as_json
@click.pass_context
def reservations_ls(ctx: click.Context, as_json: bool) -> None:
    """List reservations."""
    client = client_of(ctx)
    items = client.api.get_json("/v1/admin/reservations")["items"]
    if as_json:
        emit_json(items)
        return
    known = names_of(client, "nodes") | who_is_who(client) if items else {}
    rows = [
        (
            one["id"],
            "now" if one["holds"] else "",
            _minute(one["first"]),
            _minute(one["last"]),
            ",".join(known.get(node, node) for node in one["nodes"]),
            ",".join(known.get(who, who) for who in one["teams"] + one["users"]),
            one["why"],
        )
        for one in items
    ]
    table(("id", "", "from", "to", "nodes", "for", "why"), rows, "Nothing is reserved.")


@reservations.command("make")
@click.argument("nodes", metavar="NODE...", nargs=-1, required=True)
@click.option("--team", "teams", multiple=True, metavar="TEAM")
@click.option("--user", "users", multiple=True, metavar="USER")
@click.option(
    "--from",
    "first",
    metavar="TIME",
    help="09:00 (the next), 2026-11-20T09:00, or 2026-11-20T09:00+01:00 (default: now).",
)
@click.option(
    "--to",
    "last",
    required=True,
    metavar="TIME",
    help="Likewise, as seen from then: 18:00 is the next after --from, 3h so much later.",
)
@click.option("--why", default="")
@as_json
@click.pass_context
def reservations_make(
    ctx: click.Context,
    nodes: tuple[str, ...],
    teams: tuple[str, ...],
    users: tuple[str, ...],
    first: str | None,
    last: str,
    why: str,
    as_json: bool,
) -> None:
    """Keep nodes for teams or users between two times.

    \b
    gpool admin reservations make lab1 lab2 --team class --from 09:00 --to 11:30
    """
    if not teams and not users:
        raise Invalid("say for whom: --team TEAM or --user USER")
    begins = now() if first is None else moment(first)
    ends = moment(last, begins)
    if ends <= begins:
        raise Invalid(f"--to {last} is not after --from {first or begins.isoformat()}")
    client = client_of(ctx)
    wanted = {
        "nodes": [node_id(client, node) for node in nodes],
        "teams": [team_id(client, team) for team in teams],
        "users": [user_id(client, user) for user in users],
        "first": begins.isoformat(),
        "last": ends.isoformat(),
        "why": why,
    }
    made = client.api.send_json("POST", "/v1/admin/reservations", wanted)
    if as_json:
        emit_json(made)
    else:
        click.echo(made["id"])
        click.echo(f"  from {_minute(made['first'])} to {_minute(made['last'])}", err=True)


@reservations.command("end")
@click.argument("reservation", metavar="ID")
@click.pass_context
def reservations_end(ctx: click.Context, reservation: str) -> None:
    """Give the nodes back to everybody."""
    client_of(ctx).api.send("DELETE", f"/v1/admin/reservations/{quoted(reservation)}")
    click.echo(f"{plain(reservation)} is over")


def _cordon(ctx: click.Context, node: str, wanted: dict[str, Any], as_json: bool) -> None:
    client = client_of(ctx)
    told = client.api.send_json("PUT", f"/v1/admin/cordons/{node_id(client, node)}", wanted)
    if as_json:
        emit_json(told)
        return
    click.echo(f"{plain(node)} takes nothing new; {told['running']} still run there")
    if told["preempted"]:
        click.echo(f"  {told['preempted']} were asked to make room", err=True)


def _weight(client: Client, text: str) -> tuple[str, float | None]:
    """Of a team or a user: anybody may call a team as somebody else is called, so a name of both is refused."""
    who, _, value = text.rpartition("=")
    try:
        weight = None if value == "configured" else float(value)
    except ValueError:
        raise Invalid(f"{text!r} is not WHO=N, as in lab=2 or tm-0000000000001=2") from None
    if who.startswith(("tm-", "u-")):
        return who, weight
    found = []
    for look in (team_id, user_id):
        with suppress(NotFound):
            found.append(look(client, who))
    if not found:
        lists = "`gpool admin teams ls --all` and `gpool admin users ls --all` list them"
        raise NotFound(f"no team and no user is called {who!r}; {lists}")
    if len(found) > 1:
        raise Invalid(
            f"a team and a user are called {who!r}; say which by its id: {' or '.join(found)}"
        )
    return found[0], weight


def _seconds(text: str) -> float:
    from gpool.client.times import seconds

    return float(seconds(text))


def _minute(at: str) -> str:
    """Here and to the minute, with the date."""
    return local_time(at)[:-3]


def _wait(value: float | None) -> str:
    return "longer" if value is None else f"{value:.0f} s"

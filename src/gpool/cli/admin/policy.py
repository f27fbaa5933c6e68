"""`gpool admin policy`, `cordon`, `uncordon`, `drain`, `preempt` and `reservations`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from gpool.cli.command import (
    SectionedCommand,
    VerbGroup,
    as_json,
    client_of,
    complete_nodes,
    complete_tasks,
    examples,
    names_of,
    node_id,
    option_section,
    principal_names,
    quoted,
    team_id,
    user_id,
)
from gpool.cli.printing import emit_json, fields, local_time, table
from gpool.client.times import moment, now
from gpool.core.errors import Invalid, NotFound
from gpool.core.terminal import plain

if TYPE_CHECKING:
    from gpool.client.client import Client

the_node = click.argument("node", shell_complete=complete_nodes)
_POLICY = ("order", "orders", "ageing_s", "patience_s", "weights", "changed", "pricing")

NOT_LEARNT = "not learnt yet: needs 200 tasks with GPUs, of which 50 per batch count"


scheduling, effect = option_section("Scheduling"), option_section("Effect")


@click.command(
    cls=SectionedCommand,
    epilog=examples(
        "gpool admin policy",
        "gpool admin policy --order round_robin --dry-run",
        "gpool admin policy --weight lab=2 --ageing configured",
    ),
)
@scheduling("--order", metavar="NAME", help="Queue order.")
@scheduling("--ageing", metavar="TIME", help="Waiting time worth one point of priority.")
@scheduling("--patience", metavar="TIME", help="Waiting time after which a node is kept clear.")
@scheduling(
    "--weight",
    "weights",
    multiple=True,
    metavar="WHO=N",
    help="Fair-share weight of a user or team (repeatable).",
)
@effect("--dry-run", is_flag=True, help="Show the effect on waiting tasks; change nothing.")
@effect("--learn", is_flag=True, help="Learn the value of free capacity from past tasks now.")
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
    """Show or change the scheduling policy.

    The value `configured` restores the setting of the server.
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
        click.echo("learning started; `gpool admin policy` shows the result", err=True)
    if wanted or dry_run:
        answer = api.send_json("PATCH", "/v1/admin/policy", {**wanted, "dry_run": dry_run})
    else:
        answer = api.get_json("/v1/admin/policy")
    if as_json:
        emit_json(answer)
        return
    found = answer.get("dry_run")
    if found is None:
        names = principal_names(client) if answer["weights"] else {}
        weight_list = " ".join(
            f"{names.get(who, who)}={weight:g}" for who, weight in answer["weights"].items()
        )
        changed = ", ".join(answer["changed"])
        learnt = answer.get("learnt")
        priced = f"{learnt['sentence']} ({learnt['at']})" if learnt else NOT_LEARNT
        shown = {"weights": weight_list or "-", "changed": changed or "-", "pricing": priced}
        fields({**answer, **shown}, _POLICY)
        return
    click.echo(plain(found["sentence"]))
    rows = [(one["task"], _wait(one["before_s"]), _wait(one["after_s"])) for one in found["moved"]]
    if rows:
        table(("task", "waits now", "would wait"), rows, "")


@click.command()
@the_node
@click.option("--why", default="", metavar="TEXT", help="Reason shown to users.")
@as_json
@click.pass_context
def cordon(ctx: click.Context, node: str, why: str, as_json: bool) -> None:
    """Start no new tasks on a node."""
    _cordon(ctx, node, {"why": why}, as_json)


@click.command()
@the_node
@click.option("--why", default="", metavar="TEXT", help="Reason shown to users.")
@as_json
@click.pass_context
def drain(ctx: click.Context, node: str, why: str, as_json: bool) -> None:
    """Cordon a node and preempt its preemptible tasks."""
    _cordon(ctx, node, {"why": why, "drain": True}, as_json)


@click.command()
@the_node
@click.pass_context
def uncordon(ctx: click.Context, node: str) -> None:
    """Remove the cordon of a node."""
    client = client_of(ctx)
    client.api.send("DELETE", f"/v1/admin/cordons/{node_id(client, node)}")
    click.echo(f"{plain(node)} is no longer cordoned; it takes tasks if its owner's policy allows")


@click.command(
    epilog=examples("gpool admin certify lab1 hipaa tier=vm", "gpool admin certify lab1 --none")
)
@the_node
@click.argument("labels", metavar="[LABEL]...", nargs=-1)
@click.option("--none", "none", is_flag=True, help="Remove the node's certified labels.")
@as_json
@click.pass_context
def certify(
    ctx: click.Context, node: str, labels: tuple[str, ...], none: bool, as_json: bool
) -> None:
    """Vouch for labels of a node; tasks ask for them with --label certified:LABEL."""
    if bool(labels) == none:
        raise Invalid("give the labels to certify, e.g. hipaa tier=vm, or --none")
    client = client_of(ctx)
    path = f"/v1/admin/certified/{node_id(client, node)}"
    found = client.api.send_json("PUT", path, {"labels": list(labels)})
    if as_json:
        emit_json(found)
        return
    named = " ".join(f"certified:{label}" for label in found["labels"])
    click.echo(f"{plain(node)}: {named or 'no certified labels'}")


@click.command()
@click.argument("tasks", metavar="ID...", nargs=-1, required=True, shell_complete=complete_tasks)
@as_json
@click.pass_context
def preempt(ctx: click.Context, tasks: tuple[str, ...], as_json: bool) -> None:
    """Preempt tasks: SIGTERM, checkpoint, back into the queue."""
    client = client_of(ctx)
    found = [client.preempt(task) for task in tasks]
    if as_json:
        emit_json(found)
        return
    for task in tasks:
        click.echo(f"{task} is being preempted")


@click.group(cls=VerbGroup, renamed={"make": "create", "end": "delete"})
def reservations() -> None:
    """Reserve nodes for teams or users."""


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
    names = names_of(client, "nodes") | principal_names(client) if items else {}
    rows = [
        (
            one["id"],
            "active" if one["holds"] else "",
            _minute(one["first"]),
            _minute(one["last"]),
            ",".join(names.get(node, node) for node in one["nodes"]),
            ",".join(names.get(who, who) for who in one["teams"] + one["users"]),
            one["why"],
        )
        for one in items
    ]
    table(("id", "", "from", "to", "nodes", "for", "why"), rows, "No reservations.")


@reservations.command(
    "create",
    epilog=examples(
        "gpool admin reservations create lab1 lab2 --team class --from 09:00 --to 11:30"
    ),
)
@click.argument("nodes", metavar="NODE...", nargs=-1, required=True, shell_complete=complete_nodes)
@click.option(
    "--team", "teams", multiple=True, metavar="TEAM", help="Team to reserve for (repeatable)."
)
@click.option(
    "--user", "users", multiple=True, metavar="USER", help="User to reserve for (repeatable)."
)
@click.option(
    "--from",
    "first",
    metavar="TIME",
    help="Start: 09:00 (the next one), 2026-11-20T09:00 or 2026-11-20T09:00+01:00 (default: now).",
)
@click.option(
    "--to",
    "last",
    required=True,
    metavar="TIME",
    help="End: a time as for --from (18:00: the first one after --from), or a duration, e.g. 3h.",
)
@click.option("--why", default="", metavar="TEXT", help="Reason shown to users.")
@as_json
@click.pass_context
def reservations_create(
    ctx: click.Context,
    nodes: tuple[str, ...],
    teams: tuple[str, ...],
    users: tuple[str, ...],
    first: str | None,
    last: str,
    why: str,
    as_json: bool,
) -> None:
    """Reserve nodes for teams or users between two times."""
    if not teams and not users:
        raise Invalid("a reservation needs a team or a user; give --team TEAM or --user USER")
    begins = now() if first is None else moment(first)
    ends = moment(last, begins)
    if ends <= begins:
        raise Invalid(
            f"--to {last} is not after --from {first or begins.isoformat()}; give a later time or a duration"
        )
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


@reservations.command("delete")
@click.argument("reservation", metavar="ID")
@click.pass_context
def reservations_delete(ctx: click.Context, reservation: str) -> None:
    """Delete a reservation; its nodes are free for all users again."""
    client_of(ctx).api.send("DELETE", f"/v1/admin/reservations/{quoted(reservation)}")
    click.echo(f"{plain(reservation)} deleted")


def _cordon(ctx: click.Context, node: str, wanted: dict[str, Any], as_json: bool) -> None:
    client = client_of(ctx)
    answer = client.api.send_json("PUT", f"/v1/admin/cordons/{node_id(client, node)}", wanted)
    if as_json:
        emit_json(answer)
        return
    click.echo(f"{plain(node)} takes no new tasks; {answer['running']} still running")
    if answer["preempted"]:
        click.echo(f"  {answer['preempted']} being preempted", err=True)


def _weight(client: Client, text: str) -> tuple[str, float | None]:
    """Parse `WHO=N`. A name shared by a team and a user is refused: anybody chooses team names."""
    who, _, value = text.rpartition("=")
    try:
        weight = None if value == "configured" else float(value)
    except ValueError:
        raise Invalid(f"{text!r} is not WHO=N; write lab=2 or tm-0000000000001=2") from None
    if who.startswith(("tm-", "u-")):
        return who, weight
    found = []
    for look in (team_id, user_id):
        with suppress(NotFound):
            found.append(look(client, who))
    if not found:
        hint = "`gpool admin teams ls --all` and `gpool admin users ls --all` list them"
        raise NotFound(f"no team or user {who!r}; {hint}")
    if len(found) > 1:
        raise Invalid(
            f"a team and a user have the name {who!r}; use an id instead: {' or '.join(found)}"
        )
    return found[0], weight


def _seconds(text: str) -> float:
    from gpool.client.times import seconds

    return float(seconds(text))


def _minute(at: str) -> str:
    return local_time(at)[:-3]


def _wait(value: float | None) -> str:
    return "longer" if value is None else f"{value:.0f} s"

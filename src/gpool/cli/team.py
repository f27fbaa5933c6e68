"""`gpool team`: people who share tasks and quotas."""

from __future__ import annotations

from typing import Any

import click

from gpool.cli.calling import as_json, client_of
from gpool.cli.output.printing import emit_json, show, table
from gpool.cli.references import own_team_id
from gpool.core.errors import NotFound

role_option = click.option(
    "--role",
    type=click.Choice(["owner", "member", "viewer"]),
    default="member",
    show_default=True,
    help="What they may do there.",
)
the_team = click.argument("team_", metavar="TEAM")


@click.group()
def team() -> None:
    """Teams: list, make, invite, join, leave."""


@team.command("ls")
@as_json
@click.pass_context
def team_ls(ctx: click.Context, as_json: bool) -> None:
    """List your teams."""
    found = client_of(ctx).api.get_json("/v1/teams")["items"]
    if as_json:
        emit_json(found)
        return
    rows = [(one["id"], one["name"], one["role"]) for one in found]
    table(("id", "name", "role"), rows, "You are in no team; make one with: gpool team make NAME")


@team.command("make")
@click.argument("name")
@as_json
@click.pass_context
def team_make(ctx: click.Context, name: str, as_json: bool) -> None:
    """Make a team; you own it."""
    made = client_of(ctx).api.send_json("POST", "/v1/teams", {"name": name})
    show(made, as_json, "id name role")


@team.command("members")
@the_team
@as_json
@click.pass_context
def team_members(ctx: click.Context, team_: str, as_json: bool) -> None:
    """List who is in a team."""
    client = client_of(ctx)
    found = client.api.get_json(f"/v1/teams/{own_team_id(client, team_)}/members")["items"]
    if as_json:
        emit_json(found)
        return
    rows = [(one["user"], one["name"], one["role"]) for one in found]
    table(("user", "name", "role"), rows, "")


@team.command("add")
@the_team
@click.argument("user")
@role_option
@as_json
@click.pass_context
def team_add(ctx: click.Context, team_: str, user: str, role: str, as_json: bool) -> None:
    """Take somebody in, or change their role."""
    client = client_of(ctx)
    path = f"/v1/teams/{own_team_id(client, team_)}/members"
    made = client.api.send_json("POST", path, {"user": user, "role": role})
    show(made, as_json, "user name role")


@team.command("remove")
@the_team
@click.argument("user")
@click.pass_context
def team_remove(ctx: click.Context, team_: str, user: str) -> None:
    """Send somebody away."""
    client = client_of(ctx)
    path = f"/v1/teams/{own_team_id(client, team_)}/members"
    found = [one for one in client.api.get_json(path)["items"] if user in _names(one)]
    if not found:
        raise NotFound(f"no {user!r} in {team_}; `gpool team members {team_}` lists them")
    client.api.send("DELETE", f"{path}/{found[0]['user']}")
    click.echo(f"{user} is no longer in {team_}")


def _names(member: dict[str, Any]) -> tuple[str, str]:
    return member["user"], member["name"]


@team.command("leave")
@the_team
@click.pass_context
def team_leave(ctx: click.Context, team_: str) -> None:
    """Leave a team."""
    client = client_of(ctx)
    me = client.api.get_json("/v1/me")["id"]
    client.api.send("DELETE", f"/v1/teams/{own_team_id(client, team_)}/members/{me}")
    click.echo(f"You left {team_}")


@team.command("invite")
@the_team
@role_option
@click.option("--expires", default="7d", show_default=True, metavar="TIME")
@as_json
@click.pass_context
def team_invite(ctx: click.Context, team_: str, role: str, expires: str, as_json: bool) -> None:
    """Make a token with which one person may join."""
    from gpool.client.times import seconds

    client = client_of(ctx)
    wanted = {"role": role, "expires_in_s": int(seconds(expires))}
    made = client.api.send_json("POST", f"/v1/teams/{own_team_id(client, team_)}/invites", wanted)
    if as_json:
        emit_json(made)
    else:
        click.echo(f"gpool team join {made['token']}")
        click.echo(f"  One person, once, until {made['expires_at']}.", err=True)


@team.command("join")
@click.argument("token")
@as_json
@click.pass_context
def team_join(ctx: click.Context, token: str, as_json: bool) -> None:
    """Join a team with an invite's token."""
    show(
        client_of(ctx).api.send_json("POST", "/v1/teams/join", {"token": token}),
        as_json,
        "id name role",
    )


@team.command("rename")
@the_team
@click.argument("name")
@as_json
@click.pass_context
def team_rename(ctx: click.Context, team_: str, name: str, as_json: bool) -> None:
    """Give a team another name."""
    client = client_of(ctx)
    changed = client.api.send_json(
        "PATCH", f"/v1/teams/{own_team_id(client, team_)}", {"name": name}
    )
    show(changed, as_json, "id name role")


@team.command("delete")
@the_team
@click.confirmation_option(prompt="The team and its memberships will be gone. Go on?")
@click.pass_context
def team_delete(ctx: click.Context, team_: str) -> None:
    """Delete a team that has nothing open."""
    client = client_of(ctx)
    client.api.send("DELETE", f"/v1/teams/{own_team_id(client, team_)}")
    click.echo(f"{team_} is gone")

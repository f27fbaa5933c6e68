"""`gpool team`: teams of users, who share tasks and quotas."""

from __future__ import annotations

from typing import Any

import click

from gpool.cli.command import VerbGroup, as_json, client_of, own_team_id, quoted
from gpool.cli.printing import emit_json, local_time, show, table
from gpool.core.errors import NotFound

role_option = click.option(
    "--role",
    type=click.Choice(["owner", "member", "viewer"]),
    default="member",
    show_default=True,
    help="Role in the team.",
)
the_team = click.argument("team_", metavar="TEAM")


@click.group(cls=VerbGroup, renamed={"make": "create"})
def team() -> None:
    """Manage teams and their members."""


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
    table(
        ("id", "name", "role"), rows, "You are in no team; create one with: gpool team create NAME"
    )


@team.command("create")
@click.argument("name")
@as_json
@click.pass_context
def team_create(ctx: click.Context, name: str, as_json: bool) -> None:
    """Create a team; you are its owner."""
    made = client_of(ctx).api.send_json("POST", "/v1/teams", {"name": name})
    show(made, as_json, "id name role")


@team.command("members")
@the_team
@as_json
@click.pass_context
def team_members(ctx: click.Context, team_: str, as_json: bool) -> None:
    """List the members of a team."""
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
    """Invite a user, or change a member's role."""
    client = client_of(ctx)
    path = f"/v1/teams/{own_team_id(client, team_)}/members"
    made = client.api.send_json("POST", path, {"user": user, "role": role})
    if as_json or "expires_at" not in made:
        show(made, as_json, "user name role")
        return
    click.echo(f"Invited {user} as {role}; if there is such an account, it joins with:")
    click.echo(f"  gpool team join {made['team']}")
    click.echo(f"  Valid until {local_time(made['expires_at'])}.", err=True)


@team.command("invitations")
@click.argument("team_", metavar="TEAM", required=False)
@as_json
@click.pass_context
def team_invitations(ctx: click.Context, team_: str | None, as_json: bool) -> None:
    """List the teams that invited you, or the open invitations of TEAM."""
    client = client_of(ctx)
    path = "/v1/invitations"
    if team_ is not None:
        path = f"/v1/teams/{own_team_id(client, team_)}/invitations"
    found = client.api.get_json(path)["items"]
    if as_json:
        emit_json(found)
        return
    columns = ("team", "team_name", "user", "role", "invited_by", "expires_at")
    table(
        ("team", "name", "user", "role", "invited by", "expires"),
        [tuple(one[column] for column in columns) for one in found],
        "No open invitations.",
    )


@team.command("decline")
@click.argument("team_", metavar="TEAM_ID")
@click.pass_context
def team_decline(ctx: click.Context, team_: str) -> None:
    """Decline the invitation to a team."""
    client_of(ctx).api.send("DELETE", f"/v1/invitations/{quoted(team_)}")
    click.echo(f"Invitation to {team_} declined")


@team.command("remove")
@the_team
@click.argument("user")
@click.pass_context
def team_remove(ctx: click.Context, team_: str, user: str) -> None:
    """Remove a member, or withdraw an invitation."""
    client = client_of(ctx)
    path = f"/v1/teams/{own_team_id(client, team_)}"
    found = [one for one in client.api.get_json(f"{path}/members")["items"] if user in _names(one)]
    if found:
        client.api.send("DELETE", f"{path}/members/{found[0]['user']}")
        click.echo(f"{user} removed from {team_}")
        return
    invited = client.api.get_json(f"{path}/invitations")["items"]
    if user not in [one["user"] for one in invited]:
        raise NotFound(
            f"{user!r} is neither in {team_} nor invited; `gpool team members {team_}` and "
            f"`gpool team invitations {team_}` list them"
        )
    client.api.send("DELETE", f"{path}/invitations/{quoted(user)}")
    click.echo(f"Invitation of {user} to {team_} withdrawn")


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
@click.option(
    "--expires", default="7d", show_default=True, metavar="TIME", help="Validity of the invite."
)
@as_json
@click.pass_context
def team_invite(ctx: click.Context, team_: str, role: str, expires: str, as_json: bool) -> None:
    """Create an invite with which one person can join."""
    from gpool.client.times import seconds

    client = client_of(ctx)
    wanted = {"role": role, "expires_in_s": int(seconds(expires))}
    made = client.api.send_json("POST", f"/v1/teams/{own_team_id(client, team_)}/invites", wanted)
    if as_json:
        emit_json(made)
    else:
        click.echo(f"gpool team join {made['token']}")
        click.echo(
            f"  Valid for one person, once, until {local_time(made['expires_at'])}.", err=True
        )


@team.command("join")
@click.argument("token", metavar="TOKEN|TEAM_ID")
@as_json
@click.pass_context
def team_join(ctx: click.Context, token: str, as_json: bool) -> None:
    """Join a team with an invite token, or accept an invitation."""
    wanted = {"team": token} if token.startswith("tm-") else {"token": token}
    joined = client_of(ctx).api.send_json("POST", "/v1/teams/join", wanted)
    show(joined, as_json, "id name role")


@team.command("rename")
@the_team
@click.argument("name")
@as_json
@click.pass_context
def team_rename(ctx: click.Context, team_: str, name: str, as_json: bool) -> None:
    """Rename a team."""
    client = client_of(ctx)
    changed = client.api.send_json(
        "PATCH", f"/v1/teams/{own_team_id(client, team_)}", {"name": name}
    )
    show(changed, as_json, "id name role")


@team.command("delete")
@the_team
@click.confirmation_option(prompt="The team and its memberships will be deleted. Continue?")
@click.pass_context
def team_delete(ctx: click.Context, team_: str) -> None:
    """Delete a team without unfinished tasks."""
    client = client_of(ctx)
    client.api.send("DELETE", f"/v1/teams/{own_team_id(client, team_)}")
    click.echo(f"{team_} deleted")

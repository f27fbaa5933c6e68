"""`gpool admin`: what operators do."""

from __future__ import annotations

from typing import Any

import click

from gpool.cli.admin.keys_and_audit import audit, keys
from gpool.cli.admin.policy import cordon, drain, policy, reservations, uncordon
from gpool.cli.admin.quotas import quota_of, quota_options, show_quota, teams
from gpool.cli.calling import as_json, client_of, listed, listing
from gpool.cli.output.printing import emit_json, table
from gpool.cli.references import user_id
from gpool.core.errors import Invalid

PERMISSIONS = ("consumer", "provider", "operator")
the_user = click.argument("user")
_FIELDS = "id name permissions disabled_at quota created_at"


@click.group()
def admin() -> None:
    """For operators: users, keys, the audit record, the policy."""


for _verb in (keys, audit, policy, cordon, uncordon, drain, reservations, teams):
    admin.add_command(_verb)


@admin.group()
def users() -> None:
    """List users, and say what they may."""


@users.command("ls")
@listing
@click.pass_context
def users_ls(ctx: click.Context, as_json: bool, everything: bool, limit: int) -> None:
    """List users."""
    found = listed(client_of(ctx), "users", everything=everything, limit=limit)
    if as_json:
        emit_json(found)
        return
    rows = [
        (
            one["id"],
            one["name"],
            ",".join(one["permissions"]),
            "disabled" if one["disabled_at"] else "",
            one["created_at"],
        )
        for one in found
    ]
    table(("id", "name", "permissions", "", "created"), rows, "No users.")


@users.command("show")
@the_user
@as_json
@click.pass_context
def users_show(ctx: click.Context, user: str, as_json: bool) -> None:
    """Show one user."""
    client = client_of(ctx)
    show_quota(client.api.get_json(f"/v1/users/{user_id(client, user)}"), as_json, _FIELDS)


@users.command("set")
@the_user
@click.option(
    "--permission",
    "permissions",
    multiple=True,
    type=click.Choice([*PERMISSIONS, "none"]),
    help="All they may from now on; may be given several times.",
)
@quota_options
@as_json
@click.pass_context
def users_set(
    ctx: click.Context,
    /,
    user: str,
    permissions: tuple[str, ...],
    as_json: bool,
    **quota: Any,
) -> None:
    """Say what a user may do and have."""
    client = client_of(ctx)
    path = f"/v1/users/{user_id(client, user)}"
    wanted: dict[str, Any] = {}
    if permissions:
        wanted["permissions"] = [one for one in permissions if one != "none"]
    if any(value is not None for value in quota.values()):
        wanted["quota"] = quota_of(client, path, **quota)
    if not wanted:
        raise Invalid(
            "say what is to change: --permission, --gpus, --guaranteed, --queued or --storage"
        )
    show_quota(client.api.send_json("PATCH", path, wanted), as_json, _FIELDS)


@users.command("disable")
@the_user
@as_json
@click.pass_context
def users_disable(ctx: click.Context, user: str, as_json: bool) -> None:
    """Sign a user out everywhere and let them in no more."""
    _disable(ctx, user, True, as_json)


@users.command("enable")
@the_user
@as_json
@click.pass_context
def users_enable(ctx: click.Context, user: str, as_json: bool) -> None:
    """Let a disabled user in again."""
    _disable(ctx, user, False, as_json)


def _disable(ctx: click.Context, user: str, disabled: bool, as_json: bool) -> None:
    client = client_of(ctx)
    path = f"/v1/users/{user_id(client, user)}"
    show_quota(client.api.send_json("PATCH", path, {"disabled": disabled}), as_json, _FIELDS)


@admin.command()
@click.option(
    "--permission",
    "permissions",
    multiple=True,
    type=click.Choice(PERMISSIONS),
    help="What the new user may (default: what new users may here).",
)
@click.option("--expires", default="7d", show_default=True, metavar="TIME")
@as_json
@click.pass_context
def invite(ctx: click.Context, permissions: tuple[str, ...], expires: str, as_json: bool) -> None:
    """Make a token with which one person may register."""
    from gpool.client.times import seconds

    wanted: dict[str, Any] = {"expires_in_s": int(seconds(expires))}
    if permissions:
        wanted["permissions"] = list(permissions)
    client = client_of(ctx)
    made = client.api.send_json("POST", "/v1/users/invites", wanted)
    if as_json:
        emit_json(made)
    else:
        pinned = client.api.address.fingerprint
        known = "" if pinned is None else f"GPOOL_FINGERPRINT={pinned} "
        click.echo(f"{known}gpool --url {client.url} register NAME --invite {made['token']}")
        click.echo(f"  One person, once, until {made['expires_at']}.", err=True)


@admin.command()
@click.argument("tasks", metavar="ID...", nargs=-1, required=True)
@as_json
@click.pass_context
def preempt(ctx: click.Context, tasks: tuple[str, ...], as_json: bool) -> None:
    """Make tasks give up their places: each is warned, saved and queued again."""
    client = client_of(ctx)
    found = [client.preempt(task) for task in tasks]
    if as_json:
        emit_json(found)
        return
    for task in tasks:
        click.echo(f"{task} was asked to make room")

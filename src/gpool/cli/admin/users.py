"""`gpool admin users` and `gpool admin invite`."""

from __future__ import annotations

from typing import Any

import click

from gpool.cli.admin.quotas import quota_of, quota_options, show_quota
from gpool.cli.command import (
    SectionedCommand,
    as_json,
    client_of,
    examples,
    listed,
    listing,
    option_section,
)
from gpool.cli.output.printing import emit_json, table
from gpool.cli.references import user_id
from gpool.core.errors import Invalid

PERMISSIONS = ("consumer", "provider", "operator")
the_user = click.argument("user")
_FIELDS = "id name permissions disabled_at quota created_at"


@click.group()
def users() -> None:
    """Manage users, their permissions and quotas."""


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
    table(("id", "name", "permissions", "", "created"), rows, "No users yet.")


@users.command("show")
@the_user
@as_json
@click.pass_context
def users_show(ctx: click.Context, user: str, as_json: bool) -> None:
    """Show one user."""
    client = client_of(ctx)
    show_quota(client.api.get_json(f"/v1/users/{user_id(client, user)}"), as_json, _FIELDS)


@users.command(
    "set",
    cls=SectionedCommand,
    epilog=examples(
        "gpool admin users set ada --permission consumer --permission provider",
        "gpool admin users set ada --gpus 2 --queued configured",
    ),
)
@the_user
@option_section("Permissions")(
    "--permission",
    "permissions",
    multiple=True,
    type=click.Choice([*PERMISSIONS, "none"]),
    help="Replace the present permissions (repeatable).",
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
    """Set permissions and quota of a user."""
    client = client_of(ctx)
    path = f"/v1/users/{user_id(client, user)}"
    wanted: dict[str, Any] = {}
    if permissions:
        wanted["permissions"] = [one for one in permissions if one != "none"]
    if any(value is not None for value in quota.values()):
        wanted["quota"] = quota_of(client, path, **quota)
    if not wanted:
        raise Invalid(
            "nothing to change; give --permission, --gpus, --guaranteed, --queued or --storage"
        )
    show_quota(client.api.send_json("PATCH", path, wanted), as_json, _FIELDS)


@users.command("disable")
@the_user
@as_json
@click.pass_context
def users_disable(ctx: click.Context, user: str, as_json: bool) -> None:
    """Disable an account and end its sessions."""
    _disable(ctx, user, True, as_json)


@users.command("enable")
@the_user
@as_json
@click.pass_context
def users_enable(ctx: click.Context, user: str, as_json: bool) -> None:
    """Enable a disabled account."""
    _disable(ctx, user, False, as_json)


def _disable(ctx: click.Context, user: str, disabled: bool, as_json: bool) -> None:
    client = client_of(ctx)
    path = f"/v1/users/{user_id(client, user)}"
    show_quota(client.api.send_json("PATCH", path, {"disabled": disabled}), as_json, _FIELDS)


@click.command()
@click.option(
    "--permission",
    "permissions",
    multiple=True,
    type=click.Choice(PERMISSIONS),
    help="Permission of the new user (repeatable; default: as configured for new users).",
)
@click.option(
    "--expires", default="7d", show_default=True, metavar="TIME", help="Validity of the invite."
)
@as_json
@click.pass_context
def invite(ctx: click.Context, permissions: tuple[str, ...], expires: str, as_json: bool) -> None:
    """Create an invite with which one person can register."""
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
        prefix = "" if pinned is None else f"GPOOL_FINGERPRINT={pinned} "
        click.echo(f"{prefix}gpool --url {client.url} register NAME --invite {made['token']}")
        click.echo(f"  Valid for one person, once, until {made['expires_at']}.", err=True)

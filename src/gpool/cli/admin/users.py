"""`gpool admin users`, `invite` and `teams`, and the quota options."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from gpool.cli.command import (
    SectionedCommand,
    as_json,
    client_of,
    examples,
    listed,
    listing,
    option_section,
    team_id,
)
from gpool.cli.printing import emit_json, local_time, show, table
from gpool.core.errors import Invalid
from gpool.core.specs.gpu import parse_bytes
from gpool.transfer.requests import is_loopback

if TYPE_CHECKING:
    from gpool.client.client import Client
from gpool.cli.command import user_id

_TEAM_FIELDS = "id name quota created_at"


USUAL = "configured"
"""Value of a quota option that removes the own limit: the server's default applies."""

quota_option = option_section(f"Quota (N, or `{USUAL}` for the server's default)")


def quota_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        quota_option("--storage", metavar="SIZE", help="Maximum storage, e.g. 10GB."),
        quota_option("--queued", metavar="N", help="Maximum number of waiting tasks."),
        quota_option(
            "--guaranteed",
            metavar="N",
            help="Guaranteed GPUs; others borrow idle ones until they are needed. 0: none.",
        ),
        quota_option("--gpus", metavar="N", help="Maximum number of GPUs in use."),
    ):
        command = option(command)
    return command


def quota_of(
    client: Client,
    path: str,
    gpus: str | None,
    guaranteed: str | None,
    queued: str | None,
    storage: str | None,
) -> dict[str, Any]:
    parsed = {
        "running_gpus": _limit("--gpus", gpus, float, "4, or 0.5"),
        "guaranteed_gpus": _limit("--guaranteed", guaranteed, float, "8, or 0"),
        "queued_tasks": _limit("--queued", queued, int, "1000"),
        "storage_bytes": _limit("--storage", storage, parse_bytes, "10GB"),
    }
    given = {"running_gpus": gpus, "guaranteed_gpus": guaranteed}
    given |= {"queued_tasks": queued, "storage_bytes": storage}
    before = client.api.get_json(path).get("quota") or {}
    return {**before, **{name: parsed[name] for name, text in given.items() if text is not None}}


def _limit(
    option: str, text: str | None, read: Callable[[str], float | int], example: str
) -> float | int | None:
    if text is None or text == USUAL:
        return None
    try:
        found = read(text)
    except (ValueError, Invalid):
        raise Invalid(f"{option} {text!r} is not a quota; write {example}, or {USUAL}") from None
    if not 0 <= found < math.inf:
        raise Invalid(f"{option} {text!r} is out of range; write 0 or more, or {USUAL}")
    return found


def with_quota_text(document: dict[str, Any]) -> dict[str, Any]:
    from gpool.client.local_files import shown_size

    quota = document.get("quota") or {}
    gpus, guaranteed_gpus = quota.get("running_gpus"), quota.get("guaranteed_gpus")
    queued, storage = quota.get("queued_tasks"), quota.get("storage_bytes")
    parts = [
        *([f"at most {gpus:g} GPU(s)"] if gpus is not None else ()),
        *([f"{guaranteed_gpus:g} guaranteed"] if guaranteed_gpus else ()),
        *([f"at most {queued} waiting task(s)"] if queued is not None else ()),
        *([f"at most {shown_size(storage)} stored"] if storage is not None else ()),
    ]
    return {**document, "quota": ", ".join(parts) or "server default"}


def show_quota(document: dict[str, Any], as_json: bool, names: str) -> None:
    show(document if as_json else with_quota_text(document), as_json, names)


@click.group()
def teams() -> None:
    """Manage the quotas of teams."""


@teams.command("ls")
@listing
@click.pass_context
def teams_ls(ctx: click.Context, as_json: bool, everything: bool, limit: int) -> None:
    """List all teams."""
    found = listed(client_of(ctx), "teams", everything=everything, limit=limit, all="true")
    if as_json:
        emit_json(found)
        return
    rows = [(one["id"], one["name"], one["created_at"]) for one in found]
    table(("id", "name", "created"), rows, "No teams yet.")


@teams.command("show")
@click.argument("team_", metavar="TEAM")
@as_json
@click.pass_context
def teams_show(ctx: click.Context, team_: str, as_json: bool) -> None:
    """Show one team and its quota."""
    client = client_of(ctx)
    show_quota(client.api.get_json(f"/v1/teams/{team_id(client, team_)}"), as_json, _TEAM_FIELDS)


@teams.command(
    "set",
    cls=SectionedCommand,
    epilog=examples("gpool admin teams set lab --guaranteed 8 --gpus 32"),
)
@click.argument("team_", metavar="TEAM")
@quota_options
@as_json
@click.pass_context
def teams_set(ctx: click.Context, /, team_: str, as_json: bool, **quota: Any) -> None:
    """Set the quota of a team."""
    if all(value is None for value in quota.values()):
        raise Invalid("nothing to change; give --gpus, --guaranteed, --queued or --storage")
    client = client_of(ctx)
    path = f"/v1/teams/{team_id(client, team_)}"
    wanted = {"quota": quota_of(client, path, **quota)}
    show_quota(client.api.send_json("PATCH", path, wanted), as_json, _TEAM_FIELDS)


PERMISSIONS = ("consumer", "provider", "operator")
the_user = click.argument("user")
_USER_FIELDS = "id name permissions disabled_at quota created_at"


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
    show_quota(client.api.get_json(f"/v1/users/{user_id(client, user)}"), as_json, _USER_FIELDS)


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
    show_quota(client.api.send_json("PATCH", path, wanted), as_json, _USER_FIELDS)


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
    show_quota(client.api.send_json("PATCH", path, {"disabled": disabled}), as_json, _USER_FIELDS)


@users.command("reset")
@the_user
@as_json
@click.pass_context
def users_reset(ctx: click.Context, user: str, as_json: bool) -> None:
    """Print a link that sets a new password, once."""
    client = client_of(ctx)
    path = f"/v1/users/{user_id(client, user)}/password-link"
    made = client.api.send_json("POST", path, {})
    if as_json:
        emit_json(made)
        return
    click.echo(made["url"])
    click.echo(
        f"  Valid once, until {local_time(made['expires_at'])}; ends all sessions of {user}. "
        "Who has the link has the account: pass it on in private.",
        err=True,
    )


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
        pinned = made["fingerprint"]
        prefix = "" if pinned is None else f"GPOOL_FINGERPRINT={pinned} "
        click.echo(f"{prefix}gpool --url {made['url']} register NAME --invite {made['token']}")
        if is_loopback(urlsplit(made["url"]).hostname or ""):
            click.echo("  For this machine only: the server listens on loopback.", err=True)
        click.echo(
            f"  Valid for one person, once, until {local_time(made['expires_at'])}.", err=True
        )

"""What users and teams may have at once and are sure of, as operators say it on the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from gpool.cli.account import quoted, show
from gpool.cli.calling import as_json, client_of, listing
from gpool.cli.printing import emit_json, table
from gpool.core.errors import Invalid, NotFound

if TYPE_CHECKING:
    from gpool.client.client import Client

_FIELDS = "id name quota created_at"


def quota_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--storage", metavar="SIZE", help="Bytes stored, e.g. 10GB."),
        click.option("--queued", type=int, help="Tasks waiting at once."),
        click.option(
            "--guaranteed",
            type=float,
            help="GPUs they are sure of; others borrow what they leave idle. 0: none.",
        ),
        click.option("--gpus", type=float, help="GPUs at once."),
    ):
        command = option(command)
    return command


def quota_of(
    client: Client,
    path: str,
    gpus: float | None,
    guaranteed: float | None,
    queued: int | None,
    storage: str | None,
) -> dict[str, Any]:
    """What they have, with what is given in its place."""
    from gpool.core.gpuspec import parse_bytes

    asked = {
        "running_gpus": gpus,
        "guaranteed_gpus": guaranteed,
        "queued_tasks": queued,
        "storage_bytes": None if storage is None else parse_bytes(storage),
    }
    before = client.door.get_json(path).get("quota") or {}
    return {**before, **{name: value for name, value in asked.items() if value is not None}}


@click.group()
def teams() -> None:
    """List all teams, and say what they may have."""


@teams.command("ls")
@listing
@click.pass_context
def teams_ls(ctx: click.Context, as_json: bool, everything: bool, limit: int) -> None:
    """List all teams."""
    found = _all(client_of(ctx), None if everything else limit)
    if as_json:
        emit_json(found)
        return
    rows = [(one["id"], one["name"], one["created_at"]) for one in found]
    table(("id", "name", "created"), rows, "No teams.")


@teams.command("show")
@click.argument("team_", metavar="TEAM")
@as_json
@click.pass_context
def teams_show(ctx: click.Context, team_: str, as_json: bool) -> None:
    """Show one team and its quota."""
    client = client_of(ctx)
    show(client.door.get_json(f"/v1/teams/{team_id(client, team_)}"), as_json, _FIELDS)


@teams.command("set")
@click.argument("team_", metavar="TEAM")
@quota_options
@as_json
@click.pass_context
def teams_set(ctx: click.Context, /, team_: str, as_json: bool, **quota: Any) -> None:
    """Say what a team may have, e.g. `gpool admin teams set lab --guaranteed 8 --gpus 32`."""
    if all(value is None for value in quota.values()):
        raise Invalid("say what is to change: --gpus, --guaranteed, --queued or --storage")
    client = client_of(ctx)
    path = f"/v1/teams/{team_id(client, team_)}"
    wanted = {"quota": quota_of(client, path, **quota)}
    show(client.door.send_json("PATCH", path, wanted), as_json, _FIELDS)


def _all(client: Client, limit: int | None) -> list[dict[str, Any]]:
    return client.listing("teams", limit=limit, all="true")


def user_id(client: Client, text: str) -> str:
    """Any user's id, by their name too."""
    if text.startswith("u-"):
        return quoted(text)
    for one in client.listing("users"):
        if one["name"] == text:
            return str(one["id"])
    raise NotFound(f"no user {text!r}; `gpool admin users ls --all` lists them")


def team_id(client: Client, text: str) -> str:
    """Any team's id, by its name too."""
    if text.startswith("tm-"):
        return quoted(text)
    for one in _all(client, None):
        if one["name"] == text:
            return str(one["id"])
    raise NotFound(f"no team {text!r}; `gpool admin teams ls --all` lists them")

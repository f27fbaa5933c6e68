"""What users and teams may have at once and are sure of, as operators say it on the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from gpool.cli.calling import as_json, client_of, listed, listing
from gpool.cli.output.printing import emit_json, show, table
from gpool.cli.references import team_id
from gpool.core.errors import Invalid
from gpool.core.specs.gpu import parse_bytes

if TYPE_CHECKING:
    from gpool.client.client import Client

_FIELDS = "id name quota created_at"


USUAL = "configured"
"""Said in place of a number: what the server gives everybody."""


def quota_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--storage", metavar="SIZE", help="Bytes stored, e.g. 10GB."),
        click.option("--queued", metavar="N", help="Tasks waiting at once."),
        click.option(
            "--guaranteed",
            metavar="N",
            help="GPUs they are sure of; others borrow what they leave idle. 0: none.",
        ),
        click.option(
            "--gpus",
            metavar="N",
            help=f"GPUs at once. For each of these: {USUAL} goes back to what the server gives everybody.",
        ),
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
    """What they have, with what is given in its place."""
    asked = {
        "running_gpus": _limit("--gpus", gpus, float, "4, or 0.5"),
        "guaranteed_gpus": _limit("--guaranteed", guaranteed, float, "8, or 0"),
        "queued_tasks": _limit("--queued", queued, int, "1000"),
        "storage_bytes": _limit("--storage", storage, parse_bytes, "10GB"),
    }
    given = {"running_gpus": gpus, "guaranteed_gpus": guaranteed}
    given |= {"queued_tasks": queued, "storage_bytes": storage}
    before = client.api.get_json(path).get("quota") or {}
    return {**before, **{name: asked[name] for name, said in given.items() if said is not None}}


def _limit(
    option: str, said: str | None, read: Callable[[str], float | int], like: str
) -> float | int | None:
    if said is None or said == USUAL:
        return None
    try:
        found = read(said)
    except (ValueError, Invalid):
        raise Invalid(f"{option} is {said!r}; write {like}, or {USUAL}") from None
    if not 0 <= found < math.inf:
        raise Invalid(f"{option} is {said!r}; write 0 or more, or {USUAL}")
    return found


def quota_told(document: dict[str, Any]) -> dict[str, Any]:
    """The document with its quota in words."""
    from gpool.client.files.local_files import shown_size

    quota = document.get("quota") or {}
    gpus, sure = quota.get("running_gpus"), quota.get("guaranteed_gpus")
    queued, storage = quota.get("queued_tasks"), quota.get("storage_bytes")
    told = [
        *([f"at most {gpus:g} GPU(s) at once"] if gpus is not None else ()),
        *([f"sure of {sure:g}"] if sure else ()),
        *([f"{queued} task(s) waiting"] if queued is not None else ()),
        *([f"{shown_size(storage)} stored"] if storage is not None else ()),
    ]
    return {**document, "quota": ", ".join(told) or f"as {USUAL} for everybody"}


def show_quota(document: dict[str, Any], as_json: bool, names: str) -> None:
    show(document if as_json else quota_told(document), as_json, names)


@click.group()
def teams() -> None:
    """List all teams, and say what they may have."""


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
    table(("id", "name", "created"), rows, "No teams.")


@teams.command("show")
@click.argument("team_", metavar="TEAM")
@as_json
@click.pass_context
def teams_show(ctx: click.Context, team_: str, as_json: bool) -> None:
    """Show one team and its quota."""
    client = client_of(ctx)
    show_quota(client.api.get_json(f"/v1/teams/{team_id(client, team_)}"), as_json, _FIELDS)


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
    show_quota(client.api.send_json("PATCH", path, wanted), as_json, _FIELDS)

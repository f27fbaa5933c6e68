"""`gpool admin ledger`: grants, refunds, deposits, and verification of the books."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpool.cli.command import as_json, client_of, examples, team_id, user_id
from gpool.cli.main import FAILED
from gpool.cli.market.deposits import show_deposits, show_place
from gpool.cli.market.ledger import limit_option, show_ledger
from gpool.cli.printing import emit_json, local_time

if TYPE_CHECKING:
    from gpool.client.client import Client

id_option = click.option(
    "--id", "id_", metavar="ID", help="Id of the transfer: the same one twice moves once."
)
note_option = click.option(
    "--note", default="", metavar="TEXT", help="Reason, kept in the audit record."
)
of_team = click.option("--team", "is_team", is_flag=True, help="The name is that of a team.")


def _holder(client: Client, name: str, is_team: bool) -> str:
    return team_id(client, name) if is_team or name.startswith("tm-") else user_id(client, name)


@click.group()
def ledger() -> None:
    """Grant and refund credits, verify the books."""


@ledger.command(
    "grant",
    epilog=examples("gpool admin ledger grant ann 25.00 --id welcome-ann --note 'workshop'"),
)
@click.argument("holder", metavar="USER|TEAM")
@click.argument("credits", metavar="CREDITS")
@of_team
@id_option
@note_option
@as_json
@click.pass_context
def ledger_grant(
    ctx: click.Context,
    holder: str,
    credits: str,
    is_team: bool,
    id_: str | None,
    note: str,
    as_json: bool,
) -> None:
    """Grant credits of the treasury to a user or team."""
    from gpool.core.money.transfers import parse_credits

    amount, client = parse_credits(credits), client_of(ctx)
    wanted = {
        "to": _holder(client, holder, is_team),
        "amount_microcredits": amount,
        "id": id_,
        "note": note,
    }
    _send(client, "grants", wanted, as_json)


@ledger.command(
    "refund", epilog=examples("gpool admin ledger refund CHARGE 0.40 --note 'GPU fault'")
)
@click.argument("charge", metavar="CHARGE")
@click.argument("credits", metavar="CREDITS")
@id_option
@note_option
@as_json
@click.pass_context
def ledger_refund(
    ctx: click.Context, charge: str, credits: str, id_: str | None, note: str, as_json: bool
) -> None:
    """Refund part or all of a charge, from the treasury.

    CHARGE is the transfer of kind `post` that `gpool balance` and `gpool admin ledger show` list.
    """
    from gpool.core.money.transfers import parse_credits

    wanted = {
        "charge": charge,
        "amount_microcredits": parse_credits(credits),
        "id": id_,
        "note": note,
    }
    _send(client_of(ctx), "refunds", wanted, as_json)


def _send(client: Client, what: str, wanted: dict[str, object], as_json: bool) -> None:
    done = client.api.send_json("POST", f"/v1/admin/ledger/{what}", wanted)
    if as_json:
        emit_json(done)
        return
    earlier = " earlier; nothing was moved again" if done["outcome"] == "repeated" else ""
    click.echo(f"{done['id']} moved{earlier}")


@ledger.command("show", epilog=examples("gpool admin ledger show", "gpool admin ledger show ann"))
@click.argument("holder", metavar="[USER|TEAM]", required=False)
@of_team
@limit_option
@as_json
@click.pass_context
def ledger_show(
    ctx: click.Context, holder: str | None, is_team: bool, limit: int, as_json: bool
) -> None:
    """Show the account of a user or team, or the pool's own accounts."""
    client = client_of(ctx)
    if holder is not None:
        id_ = _holder(client, holder, is_team)
        whose = "team" if id_.startswith("tm-") else "user"
        found = client.api.get_json(f"/v1/ledger?limit={limit}&{whose}={id_}")
        show_ledger(found, as_json)
        return
    found = client.api.get_json("/v1/admin/ledger")
    if as_json:
        emit_json(found)
        return
    from gpool.core.money.transfers import format_credits

    since = found["uncleared_since"]
    age = f", the oldest since {local_time(since)}" if since else ""
    head = found["head"]
    click.echo(f"treasury   {format_credits(found['treasury_microcredits'])} credits")
    click.echo(f"fee        {format_credits(found['fee_microcredits'])}")
    click.echo(f"uncleared  {format_credits(found['uncleared_microcredits'])}{age}")
    click.echo(f"head       {'none' if head is None else '{number}:{hash}'.format(**head)}")


@ledger.command(
    "verify",
    epilog=examples("gpool admin ledger verify", "gpool admin ledger verify --anchor 12:HASH"),
)
@click.option(
    "--anchor",
    "anchors",
    multiple=True,
    metavar="NUMBER:HASH",
    help="Head printed by an earlier verification, to compare with (repeatable).",
)
@as_json
@click.pass_context
def ledger_verify(ctx: click.Context, anchors: tuple[str, ...], as_json: bool) -> None:
    """Recompute the books from the first entry; name what is wrong."""
    query = "&".join(f"anchor={anchor}" for anchor in anchors)
    found = client_of(ctx).api.get_json(f"/v1/admin/ledger/check?{query}")
    if as_json:
        emit_json(found)
    elif found["sound"]:
        unsealed = f", {found['unsealed']} not sealed yet" if found["unsealed"] else ""
        click.echo(f"Transfers verified: {found['transfers']}{unsealed}. The books are sound.")
        if found["head"]:
            click.echo(
                f"  Keep this head outside the server, for --anchor: {found['head']}", err=True
            )
    else:
        for one in found["findings"]:
            click.echo(f"{one['thing']}: {one['why']}")
    ctx.exit(0 if found["sound"] else FAILED)


@ledger.command(
    "deposits",
    epilog=examples("gpool admin ledger deposits", "gpool admin ledger deposits --resume 21000000"),
)
@click.option(
    "--resume",
    "block",
    type=click.IntRange(0),
    metavar="BLOCK",
    help="Scan again from this block on, and end a halt; nothing is credited twice.",
)
@as_json
@click.pass_context
def ledger_deposits(ctx: click.Context, block: int | None, as_json: bool) -> None:
    """Show the scan of the chain and deposits that are not credited."""
    api = client_of(ctx).api
    if block is None:
        found = api.get_json("/v1/admin/deposits")
    else:
        found = api.send_json("POST", "/v1/admin/deposits/resume", {"from_block": block})
    if as_json:
        emit_json(found)
        return
    show_place(found)
    if found["halted_at"]:
        click.echo(f"halted         {local_time(found['halted_at'])}: {found['why']}")
    show_deposits(found["items"], "Every deposit is credited.")

"""`gpool deposit`, and how deposits are printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from gpool.cli.command import as_json, client_of, examples
from gpool.cli.market.ledger import limit_option
from gpool.cli.printing import emit_json, local_time, table


@click.command(epilog=examples("gpool deposit", "gpool deposit --json"))
@limit_option
@as_json
@click.pass_context
def deposit(ctx: click.Context, limit: int, as_json: bool) -> None:
    """Show where to send tokens, and your deposits.

    Only transfers from a wallet of your account are credited to you: link it first with `gpool wallet link`.
    """
    found = client_of(ctx).api.get_json(f"/v1/deposits?limit={limit}")
    if as_json:
        emit_json(found)
        return
    show_place(found)
    wallets = ", ".join(found["wallets"]) or "none; link one first: gpool wallet link"
    click.echo(f"wallets        {wallets}")
    if found["halted"]:
        click.echo("gpool: crediting is stopped until an operator has looked at it", err=True)
    show_deposits(found["items"], "No deposits yet.")


def show_place(found: dict[str, Any]) -> None:
    block = found["scanned_block"]
    click.echo(f"address        {found['address']}")
    click.echo(f"token          {found['token']} (1 token is 1 credit)")
    click.echo(f"chain          {found['chain_id']}")
    click.echo(f"confirmations  {found['confirmations']}")
    click.echo(f"scanned        {'nothing yet' if block is None else f'up to block {block}'}")


def show_deposits(items: Sequence[dict[str, Any]], none: str) -> None:
    from gpool.core.money.transfers import format_credits

    rows = [
        (
            local_time(one["changed_at"]),
            one["status"],
            format_credits(int(one["amount"])),
            str(one["block"]),
            one["sender"],
            one["transaction"],
        )
        for one in items
    ]
    table(("at", "status", "credits", "block", "sender", "transaction"), rows, none)

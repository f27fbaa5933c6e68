"""`gpool balance` and `gpool budget`, and how balances are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpool.cli.command import as_json, client_of, examples, user_id
from gpool.cli.printing import emit_json, local_time, table

if TYPE_CHECKING:
    from gpool.client.client import Client

LEVELS = {
    "warning": "80 % of the budget are used; nothing runs beyond it.",
    "reached": "The budget of this month is used up; tasks that cost something wait.",
}
limit_option = click.option(
    "--limit",
    type=click.IntRange(1, 200),
    default=20,
    show_default=True,
    metavar="N",
    help="Maximum number of entries.",
)
team_option = click.option("--team", "team_", metavar="TEAM", help="Use a team of yours instead.")


@click.command(epilog=examples("gpool balance", "gpool balance --team vision --json"))
@team_option
@limit_option
@as_json
@click.pass_context
def balance(ctx: click.Context, team_: str | None, limit: int, as_json: bool) -> None:
    """Show your balance, pending funds and recent entries."""
    client = client_of(ctx)
    query = f"&team={client.team_id(team_)}" if team_ else ""
    show_ledger(client.api.get_json(f"/v1/ledger?limit={limit}{query}"), as_json)


def show_ledger(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json(found)
        return
    from gpool.core.money.transfers import format_credits

    click.echo(f"balance  {format_credits(found['balance_microcredits'])} credits")
    click.echo(f"pending  {format_credits(found['pending_microcredits'])} (set aside for tasks)")
    if found["earned_microcredits"]:
        click.echo(f"earned   {format_credits(found['earned_microcredits'])} (by your nodes)")
    _show_budget(found)
    rows = [
        (
            local_time(one["at"]),
            one["kind"],
            format_credits(one["amount_microcredits"]),
            format_credits(one["balance_microcredits"]),
            one["transfer"],
        )
        for one in found["entries"]
    ]
    table(("at", "kind", "credits", "balance", "transfer"), rows, "No entries yet.")


def _show_budget(found: dict[str, Any]) -> None:
    from gpool.core.money.transfers import format_credits

    cap = found["budget_microcredits"]
    limit = "no budget" if cap is None else f"of {format_credits(cap)}"
    click.echo(
        f"spent    {format_credits(found['spent_microcredits'])} in {found['month']}, {limit}"
    )
    if found["budget_level"] in LEVELS:
        click.echo(f"gpool: {LEVELS[found['budget_level']]}", err=True)


@click.command(
    epilog=examples("gpool budget", "gpool budget --set 50", "gpool budget --team vision --none")
)
@team_option
@click.option("--user", metavar="USER", help="Use the account of this user instead (operators).")
@click.option("--set", "cap", metavar="CREDITS", help="Set the cap of each month, e.g. 50.00.")
@click.option("--none", "removed", is_flag=True, help="Remove the cap.")
@as_json
@click.pass_context
def budget(
    ctx: click.Context,
    team_: str | None,
    user: str | None,
    cap: str | None,
    removed: bool,
    as_json: bool,
) -> None:
    """Show or set the monthly budget of your account or team.

    Funds that tasks set aside count when they are set aside; what returns does not count any more. At 80 % the budget
    warns; at the cap nothing more is set aside until the next month (UTC).
    """
    from gpool.core.errors import Invalid
    from gpool.core.money.transfers import parse_credits

    if (team_ and user) or (cap is not None and removed):
        raise Invalid("use one of --team and --user, and one of --set and --none")
    client = client_of(ctx)
    query = _account(client, team_, user)
    if cap is None and not removed:
        found = client.api.get_json(f"/v1/ledger?limit=1{query}")
    else:
        wanted = None if cap is None else parse_credits(cap)
        path = f"/v1/budget?{query.lstrip('&')}"
        found = client.api.send_json("PUT", path, {"cap_microcredits": wanted})
    if as_json:
        names = ("month", "spent_microcredits", "budget_microcredits", "budget_level")
        emit_json({name: found[name] for name in names})
    else:
        _show_budget(found)


def _account(client: Client, team: str | None, user: str | None) -> str:
    if team:
        return f"&team={client.team_id(team)}"
    return f"&user={user_id(client, user)}" if user else ""

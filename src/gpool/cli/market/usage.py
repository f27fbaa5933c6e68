"""`gpool usage`: sums of charges (spent, earned) and of GPU time (used, served) by project, team, month, GPU and more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from gpool.cli.command import as_json, client_of, examples
from gpool.cli.market.ledger import team_option
from gpool.cli.market.statements import (
    account_query,
    csv_text,
    earned_or_spent,
    month_option,
    pages,
    statement_lines,
    to_csv,
)
from gpool.cli.printing import emit_json, table

if TYPE_CHECKING:
    from gpool.client.client import Client

OF_USE = ("gpu", "node", "month", "team", "project")
"""Groups that GPU time is kept by; charges have the others too."""
OF_CHARGES = ("user", "task", "state")
COLUMNS = ("side", "group", "attempts", "run_s", "gpu_s", "microcredits")
SIDES = ("used", "served", "spent", "earned")


@dataclass(slots=True)
class UsageSum:
    """Sum of one side and group. `gpu_s`: None for charges; `microcredits`: None for use."""

    attempts: int = 0
    run_s: float = 0.0
    gpu_s: float | None = None
    microcredits: int | None = None


@dataclass(slots=True)
class UsageSums:
    """Sums by side and group."""

    sums: dict[tuple[str, str], UsageSum] = field(default_factory=dict)

    def add_charge(self, line: dict[str, Any], group: str) -> None:
        total = self.sums.setdefault((line["side"], group), UsageSum())
        total.attempts += 1
        total.run_s += line["charged_s"]
        total.microcredits = (total.microcredits or 0) + earned_or_spent(line)

    def add_use(self, use: dict[str, Any], group: str) -> None:
        total = self.sums.setdefault((use["side"], group), UsageSum())
        total.attempts += use["attempts"]
        total.run_s += use["run_s"]
        total.gpu_s = (total.gpu_s or 0.0) + use["gpu_s"]

    def rows(self) -> list[dict[str, Any]]:
        """One member for each column; use before charges."""
        order = sorted(self.sums.items(), key=lambda item: (SIDES.index(item[0][0]), item[0][1]))
        return [
            {
                "side": side,
                "group": group,
                "attempts": total.attempts,
                "run_s": total.run_s,
                "gpu_s": total.gpu_s,
                "microcredits": total.microcredits,
            }
            for (side, group), total in order
        ]


@click.command(
    epilog=examples(
        "gpool usage",
        "gpool usage --by month --months 6 --json",
        "gpool usage --by project --csv > projects.csv",
        "gpool usage --month 2026-11 --charges --csv > charges.csv",
    )
)
@month_option
@click.option(
    "--months",
    type=click.IntRange(1, 24),
    metavar="N",
    help="Number of months up to that one; default 1, with --by month 12.",
)
@team_option
@click.option(
    "--by",
    type=click.Choice([*OF_USE, *OF_CHARGES]),
    help="Group the sums by this; default gpu. By team: you and all your teams.",
)
@click.option("--charges", "each", is_flag=True, help="List every charge instead of sums.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@as_json
@click.pass_context
def usage(
    ctx: click.Context,
    month: str | None,
    months: int | None,
    team_: str | None,
    by: str | None,
    each: bool,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Show the GPU time and credits that you used and earned."""
    from gpool.core.errors import Invalid

    if each and by is not None:
        raise Invalid("--charges lists every charge and --by sums them; give one of them")
    if as_csv and as_json:
        raise Invalid("--csv and --json are two formats; give one of them")
    client = client_of(ctx)
    count = months or (12 if by == "month" else 1)
    if each:
        _show_charges(list(statement_lines(client, team_, month, count)), as_csv, as_json)
        return
    by = by or "gpu"
    sums = UsageSums()
    for team, name in _accounts(client, team_, by):
        for line in statement_lines(client, team, month, count):
            sums.add_charge(line, name or charge_group(line, by))
        for use in _use(client, team, month, count, by):
            sums.add_use(use, name or use["group"] or "-")
    _show_sums(sums.rows(), by, as_csv, as_json)


def _accounts(client: Client, team: str | None, by: str) -> Iterator[tuple[str | None, str]]:
    """Accounts to sum up, as team and name of its group; an empty name: the group is that of each line."""
    if by != "team":
        yield team, ""
        return
    if team is not None:
        yield team, team
        return
    yield None, "-"
    for one in client.api.get_json("/v1/teams")["items"]:
        yield one["id"], one["name"]


def _use(
    client: Client, team: str | None, month: str | None, months: int, by: str
) -> Iterable[dict[str, Any]]:
    if by not in OF_USE:
        return ()
    query = account_query(client, team, month)
    return pages(client, f"/v1/usage/totals?limit=1000&months={months}&by={by}{query}")


def charge_group(line: dict[str, Any], by: str) -> str:
    """Group of a charge; `-` if it has none."""
    if by == "gpu":
        return "+".join(line["gpus"]) or "-"
    if by == "month":
        return str(line["ended_at"][:7])  # UTC
    return str(line[by] or "-")


def _show_sums(rows: list[dict[str, Any]], by: str, as_csv: bool, as_json: bool) -> None:
    from gpool.core.money.transfers import format_credits

    if as_json:
        emit_json([{"by": by, **row} for row in rows])
        return
    if as_csv:
        click.echo(csv_text(COLUMNS, rows), nl=False)
        return
    shown = [
        (
            row["side"],
            row["group"],
            row["attempts"],
            f"{row['run_s'] / 3600:.2f}",
            "-" if row["gpu_s"] is None else f"{row['gpu_s'] / 3600:.2f}",
            "-" if row["microcredits"] is None else format_credits(row["microcredits"]),
        )
        for row in rows
    ]
    empty = "No use in this time." if by in OF_USE else "No charges in this time."
    table(("side", by, "attempts", "hours", "gpu hours", "credits"), shown, empty)


def _show_charges(lines: list[dict[str, Any]], as_csv: bool, as_json: bool) -> None:
    from gpool.core.money.transfers import format_credits

    if as_json:
        emit_json(lines)
        return
    if as_csv:
        click.echo(to_csv(lines), nl=False)
        return
    rows = [
        (
            line["side"],
            line["ended_at"],
            line["task"],
            "+".join(line["gpus"]) or "-",
            f"{line['charged_s']:.3f}",
            format_credits(earned_or_spent(line)),
            line["state"],
            line["receipt"] or "-",
        )
        for line in lines
    ]
    columns = ("side", "ended", "task", "gpus", "seconds", "credits", "state", "receipt")
    table(columns, rows, "No charges in this time.")

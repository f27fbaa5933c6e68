"""`gpool receipts`, `gpool earnings`, `gpool usage` and `gpool invoice`: what was paid, earned and for which task."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpool.cli.command import as_json, client_of, examples
from gpool.cli.market.ledger import limit_option, team_option
from gpool.cli.printing import emit_json, local_time, table

if TYPE_CHECKING:
    from gpool.client.client import Client

month_option = click.option("--month", metavar="YYYY-MM", help="Month in UTC.")
CSV_COLUMNS = (
    "side",
    "ended_at",
    "task",
    "attempt",
    "node",
    "user",
    "gpus",
    "charged_s",
    "price_microcredits",
    "amount_microcredits",
    "fee_microcredits",
    "end_reason",
    "state",
    "receipt",
)
FORMULA = ("=", "+", "-", "@")


@click.command(epilog=examples("gpool receipts", "gpool receipts --month 2026-11 --json"))
@click.option("--task", metavar="TASK", help="Of this task only.")
@month_option
@team_option
@limit_option
@as_json
@click.pass_context
def receipts(
    ctx: click.Context,
    task: str | None,
    month: str | None,
    team_: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List receipts of charged attempts, newest first."""
    client = client_of(ctx)
    query = _query(client, team_, month) + (f"&task={task}" if task else "")
    found = client.api.get_json(f"/v1/receipts?limit={limit}{query}")["items"]
    if as_json:
        emit_json(found)
        return
    from gpool.core.money.transfers import format_credits

    rows = [
        (
            one["id"],
            local_time(one["issued_at"]),
            one["side"],
            format_credits(one["amount_microcredits"]),
            one["task"],
            one["attempt"],
            one["node"],
        )
        for one in found
    ]
    columns = ("receipt", "issued", "side", "credits", "task", "attempt", "node")
    table(columns, rows, "No receipts yet.")


@click.command(epilog=examples("gpool earnings", "gpool earnings --months 3 --json"))
@click.option(
    "--months",
    type=click.IntRange(1, 24),
    default=12,
    show_default=True,
    metavar="N",
    help="Number of months, up to now.",
)
@as_json
@click.pass_context
def earnings(ctx: click.Context, months: int, as_json: bool) -> None:
    """Show what your nodes have earned, by month, node and GPU."""
    found = client_of(ctx).api.get_json(f"/v1/earnings?months={months}")
    if as_json:
        emit_json(found)
        return
    from gpool.core.money.transfers import format_credits

    for name in ("unvested", "vested", "paid"):
        click.echo(f"{name:9} {format_credits(found[name + '_microcredits'])} credits")
    for change in found["wallets"]:
        click.echo(f"wallet    {change['address'] or 'none'} since {local_time(change['at'])}")
    rows = [
        (
            one["month"],
            one["node"],
            ", ".join(one["gpus"]) or "-",
            one["state"],
            one["attempts"],
            f"{one['charged_s'] / 3600:.2f}",
            format_credits(one["microcredits"]),
        )
        for one in found["items"]
    ]
    rows += [
        (one["month"], "-", "-", "reward", "-", "-", format_credits(one["microcredits"]))
        for one in found["rewards"]
    ]
    columns = ("month", "node", "gpus", "state", "attempts", "hours", "credits")
    table(columns, rows, "No earnings yet.")


@click.command(
    epilog=examples(
        "gpool usage",
        "gpool usage --month 2026-11 --csv > usage.csv",
        "gpool usage --by user --team lab",
    )
)
@month_option
@team_option
@click.option(
    "--by",
    type=click.Choice(["gpu", "user", "node", "task", "state"]),
    default="gpu",
    show_default=True,
    help="Group the sums by this.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print every charge as CSV.")
@as_json
@click.pass_context
def usage(
    ctx: click.Context,
    month: str | None,
    team_: str | None,
    by: str,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Show what you spent and earned in a month."""
    from gpool.core.money.transfers import format_credits

    client = client_of(ctx)
    lines = list(statement_lines(client, team_, month))
    if as_json:
        emit_json(lines)
        return
    if as_csv:
        click.echo(to_csv(lines), nl=False)
        return
    sums: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        name = {"gpu": "+".join(line["gpus"]), "user": line["user"]}.get(by, line.get(by))
        total = sums.setdefault((line["side"], name or "-"), [0, 0, 0])
        total[0] += 1
        total[1] += line["charged_s"]
        total[2] += earned_or_spent(line)
    rows = [
        (side, name, int(count), f"{seconds / 3600:.2f}", format_credits(int(amount)))
        for (side, name), (count, seconds, amount) in sorted(sums.items())
    ]
    table(("side", by, "attempts", "hours", "credits"), rows, "No charges in this month.")


@click.command(
    epilog=examples(
        "gpool invoice --month 2026-11 -o invoice.html",
        "gpool invoice --month 2026-11 -o invoice.csv",
    )
)
@click.option("--month", required=True, metavar="YYYY-MM", help="Month in UTC.")
@team_option
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File to write: .html or .csv.",
)
@as_json
@click.pass_context
def invoice(ctx: click.Context, month: str, team_: str | None, output: Path, as_json: bool) -> None:
    """Write the charges of a month, each with its receipt and task, as HTML or CSV."""
    from gpool.core.errors import Invalid

    if output.suffix not in (".html", ".csv"):
        raise Invalid(f"{output.name} must end with .html or .csv")
    client = client_of(ctx)
    lines = [line for line in statement_lines(client, team_, month) if line["side"] == "spent"]
    account = team_ or client.api.get_json("/v1/me")["name"]
    text = to_csv(lines) if output.suffix == ".csv" else to_html(lines, account, month)
    output.write_text(text, encoding="utf-8")
    total = sum(map(earned_or_spent, lines))
    if as_json:
        emit_json({"file": str(output), "lines": len(lines), "total_microcredits": total})
        return
    from gpool.core.money.transfers import format_credits

    click.echo(f"{output}: {len(lines)} charges, {format_credits(total)} credits.")


def statement_lines(
    client: Client, team: str | None, month: str | None
) -> Iterator[dict[str, Any]]:
    """All charges of a month, page by page."""
    query, cursor = _query(client, team, month), ""
    while True:
        page = client.api.get_json(f"/v1/usage?limit=1000{query}{cursor}")
        yield from page["items"]
        if page["next"] is None:
            return
        cursor = f"&cursor={page['next']}"


def earned_or_spent(line: dict[str, Any]) -> int:
    """Micro-credits of a line: a payer pays the fee too; a forfeited charge returned."""
    if line["state"] == "forfeited":
        return 0
    amount: int = line["amount_microcredits"]
    return amount if line["side"] == "spent" else amount - int(line["fee_microcredits"])


def _query(client: Client, team: str | None, month: str | None) -> str:
    query = f"&team={client.team_id(team)}" if team else ""
    return query + (f"&month={month}" if month else "")


def csv_cell(value: object) -> str:
    """One line of text that no spreadsheet takes for a formula."""
    text = "" if value is None else " ".join(str(value).split())
    return "'" + text if text.startswith(FORMULA) else text


def to_csv(lines: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(CSV_COLUMNS)
    for line in lines:
        shown = {**line, "gpus": "+".join(line["gpus"])}
        rows.writerow([csv_cell(shown[name]) for name in CSV_COLUMNS])
    return text.getvalue()


STYLE = (
    "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}"
    "td,th{border:1px solid #999;padding:.2em .5em;text-align:left}td.n{text-align:right}"
)


def to_html(lines: Sequence[dict[str, Any]], account: str, month: str) -> str:
    """A page without script or other files; every value is escaped."""
    from html import escape

    from gpool.core.money.transfers import format_credits

    heads = ("ended", "task", "attempt", "GPUs", "seconds", "credits", "receipt")
    rows = [
        f"<tr><td>{escape(local_time(line['ended_at']))}</td><td>{escape(line['task'])}</td>"
        f"<td class=n>{int(line['attempt'])}</td><td>{escape(', '.join(line['gpus']) or '-')}</td>"
        f"<td class=n>{float(line['charged_s']):.3f}</td>"
        f"<td class=n>{escape(format_credits(earned_or_spent(line)))}</td>"
        f"<td>{escape(line['receipt'] or 'not issued')}</td></tr>"
        for line in lines
    ]
    total = format_credits(sum(map(earned_or_spent, lines)))
    title = escape(f"Charges of {account} in {month}")
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n<table><tr>{head}</tr>\n"
        + "\n".join(rows)
        + f"\n</table>\n<p>Total: {escape(total)} credits in {len(lines)} charges.</p></body></html>\n"
    )

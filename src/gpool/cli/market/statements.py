"""`gpool receipts`, `gpool earnings` and `gpool invoice`: what was paid, earned and for which task."""

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
    "team",
    "project",
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
    query = account_query(client, team_, month) + (f"&task={task}" if task else "")
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
    """Write the charges of a month, each with its receipt, task and timeline, as HTML or CSV."""
    from gpool.core.errors import Invalid

    if output.suffix not in (".html", ".csv"):
        raise Invalid(f"{output.name} must end with .html or .csv")
    client = client_of(ctx)
    lines = [line for line in statement_lines(client, team_, month) if line["side"] == "spent"]
    account = team_ or client.api.get_json("/v1/me")["name"]
    is_csv = output.suffix == ".csv"
    text = to_csv(lines) if is_csv else to_html(lines, account, month, client.url)
    output.write_text(text, encoding="utf-8")
    total = sum(map(earned_or_spent, lines))
    if as_json:
        emit_json({"file": str(output), "lines": len(lines), "total_microcredits": total})
        return
    from gpool.core.money.transfers import format_credits

    click.echo(f"{output}: {len(lines)} charges, {format_credits(total)} credits.")


def statement_lines(
    client: Client, team: str | None, month: str | None, months: int = 1
) -> Iterator[dict[str, Any]]:
    """All charges of months up to `month`."""
    query = account_query(client, team, month)
    return pages(client, f"/v1/usage?limit=1000&months={months}{query}")


def pages(client: Client, path: str) -> Iterator[dict[str, Any]]:
    """Items of a list, page by page."""
    from urllib.parse import quote

    cursor = ""
    while True:
        page = client.api.get_json(path + cursor)
        yield from page["items"]
        if page["next"] is None:
            return
        cursor = f"&cursor={quote(page['next'], safe='')}"


def earned_or_spent(line: dict[str, Any]) -> int:
    """Micro-credits of a line: a payer pays the fee too; a forfeited charge returned."""
    if line["state"] == "forfeited":
        return 0
    amount: int = line["amount_microcredits"]
    return amount if line["side"] == "spent" else amount - int(line["fee_microcredits"])


def account_query(client: Client, team: str | None, month: str | None) -> str:
    """Query of a team's account, None: the caller's own, and of a month."""
    query = f"&team={client.team_id(team)}" if team else ""
    return query + (f"&month={month}" if month else "")


def csv_cell(value: object) -> str:
    """One line of text that no spreadsheet takes for a formula."""
    text = "" if value is None else " ".join(str(value).split())
    return "'" + text if text.startswith(FORMULA) else text


def to_csv(lines: Sequence[dict[str, Any]]) -> str:
    """Charges, one row each."""
    return csv_text(CSV_COLUMNS, [{**line, "gpus": "+".join(line["gpus"])} for line in lines])


def csv_text(names: Sequence[str], items: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(names)
    for item in items:
        rows.writerow([csv_cell(item[name]) for name in names])
    return text.getvalue()


STYLE = (
    "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}"
    "td,th{border:1px solid #999;padding:.2em .5em;text-align:left}td.n{text-align:right}"
)


def to_html(lines: Sequence[dict[str, Any]], account: str, month: str, server: str) -> str:
    """A page without script or other files, whose lines link to receipt, task and timeline on the server.

    Every value is escaped.
    """
    from html import escape
    from urllib.parse import quote

    from gpool.core.money.transfers import format_credits

    def link(path: str, text: str) -> str:
        return f'<a href="{escape(server.rstrip("/") + path)}">{escape(text)}</a>'

    def task(line: dict[str, Any]) -> str:
        path = f"/tasks/{quote(line['task'], safe='')}"
        return f"<td>{link(path, line['task'])}</td><td>{link(path + '#steps', 'timeline')}</td>"

    def receipt(line: dict[str, Any]) -> str:
        id_ = line["receipt"]
        return "not issued" if id_ is None else link(f"/receipts/{quote(id_, safe='')}", id_)

    heads = ("ended", "task", "timeline", "attempt", "GPUs", "seconds", "credits", "receipt")
    rows = [
        f"<tr><td>{escape(local_time(line['ended_at']))}</td>{task(line)}"
        f"<td class=n>{int(line['attempt'])}</td><td>{escape(', '.join(line['gpus']) or '-')}</td>"
        f"<td class=n>{float(line['charged_s']):.3f}</td>"
        f"<td class=n>{escape(format_credits(earned_or_spent(line)))}</td>"
        f"<td>{receipt(line)}</td></tr>"
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

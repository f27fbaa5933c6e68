"""`gpool admin payout` and `gpool admin rewards`: close periods, share reward pools."""

from __future__ import annotations

from pathlib import Path

import click

from gpool.cli.command import as_json, client_of, examples
from gpool.cli.printing import emit_json, table

period_option = click.option(
    "--period", required=True, metavar="YYYY-MM", help="Month in UTC, which must be over."
)
dry_run_option = click.option("--dry-run", is_flag=True, help="Show the amounts; change nothing.")


@click.group("payout")
def payout() -> None:
    """Close periods and write their payout files."""


@payout.command(
    "close",
    epilog=examples(
        "gpool admin payout close --period 2026-11 --dry-run",
        "gpool admin payout close --period 2026-11 --chain-id 8453 --contract 0x… -o payout-1.json",
    ),
)
@period_option
@click.option("--chain-id", type=click.IntRange(min=1), metavar="N", help="Chain of --contract.")
@click.option("--contract", metavar="ADDRESS", help="Distributor contract (default: no chain).")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Payout file to write.",
)
@dry_run_option
@as_json
@click.pass_context
def payout_close(
    ctx: click.Context,
    period: str,
    chain_id: int | None,
    contract: str | None,
    output: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Pay vested earnings and rewards: build the payout file, record them as paid."""
    wanted = {"month": period, "chain_id": chain_id, "contract": contract, "dry_run": dry_run}
    done = client_of(ctx).api.send_json("POST", "/v1/admin/payouts", wanted)
    data = done.pop("file")
    if output is not None:
        output.write_bytes(data.encode())
    if as_json:
        emit_json(done)
        return
    from gpool.core.money.transfers import format_credits

    word = "would pay" if dry_run else "pays"
    total = format_credits(int(done["total_due"]))
    click.echo(
        f"Period {done['number']} ({period}) {word} {total} credits to {done['accounts']} account(s)."
    )
    if done["accrued"]:
        accrued = format_credits(done["accrued_microcredits"])
        click.echo(
            f"{done['accrued']} owner(s) without a payout wallet keep {accrued} credits for later."
        )
    if output is not None:
        click.echo(f"Payout file: {output}")


@click.command(epilog=examples("gpool admin rewards --period 2026-11 --pool 100.00 --dry-run"))
@period_option
@click.option("--pool", required=True, metavar="CREDITS", help="Credits to share, e.g. 100.00.")
@dry_run_option
@as_json
@click.pass_context
def rewards(ctx: click.Context, period: str, pool: str, dry_run: bool, as_json: bool) -> None:
    """Share credits among owners by what their nodes contributed in a month."""
    from gpool.core.money.transfers import format_credits, parse_credits

    wanted = {"month": period, "pool_microcredits": parse_credits(pool), "dry_run": dry_run}
    done = client_of(ctx).api.send_json("POST", "/v1/admin/rewards", wanted)
    if as_json:
        emit_json(done)
        return
    rows = [
        (one["owner"], one["weight"], format_credits(one["microcredits"])) for one in done["items"]
    ]
    table(("owner", "weight", "credits"), rows, "Nobody contributed.")

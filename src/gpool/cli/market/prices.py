"""Verbs `offers` and `quote`: what GPUs cost, and what a command would cost."""

from __future__ import annotations

from typing import Any

import click

from gpool.cli.command import SectionedCommand, client_of, examples, listed, listing, option_section
from gpool.cli.printing import brief_time, emit_json, fields, gib, local_time, table
from gpool.cli.run import run
from gpool.core.terminal import plain

UNQUOTED = frozenset({"dry_run", "detach", "into", "must_fit", "stdin"})
"""Parameters of `gpool run` that say nothing about cost or start."""


which, quality = option_section("Selection"), option_section("Quality")


@click.command(
    cls=SectionedCommand,
    epilog=examples(
        "gpool offers --gpu 24GB --max-price 0.40/h",
        "gpool offers --gpu H100 --min-reliability 3d --min-speed 200 --free",
    ),
)
@which("--gpu", metavar="SPEC", help="GPUs that match, e.g. H100, 24GB or H100:2.")
@which("--max-price", metavar="PRICE", help="Maximum price for the whole --gpu SPEC, e.g. 0.40/h.")
@which("--tier", type=click.Choice(["container", "vm"]), help="Minimum isolation.")
@quality(
    "--min-reliability", metavar="TIME", help="Minimum mean time between losses of a node, e.g. 3d."
)
@quality(
    "--min-speed",
    type=click.FloatRange(min=0),
    metavar="N",
    help="Minimum measured TFLOP/s for one credit an hour.",
)
@quality(
    "--min-bandwidth",
    type=click.IntRange(min=0),
    metavar="GB/s",
    help="Minimum measured bandwidth of the GPU's memory.",
)
@which("--free", "only_free", is_flag=True, help="Only nodes with a GPU that is free now.")
@listing
@click.pass_context
def offers(
    ctx: click.Context,
    gpu: str | None,
    max_price: str | None,
    tier: str | None,
    min_reliability: str | None,
    min_speed: float | None,
    min_bandwidth: int | None,
    only_free: bool,
    as_json: bool,
    everything: bool,
    limit: int,
) -> None:
    """List what GPUs cost, by model and price."""
    from gpool.client.times import seconds

    given = {
        "gpu": gpu,
        "max_price": max_price,
        "tier": tier,
        "min_mtbf_hours": min_reliability and str(seconds(min_reliability) / 3600),
        "min_tflops_per_credit": None if min_speed is None else str(min_speed),
        "min_memory_gb_per_s": None if min_bandwidth is None else str(min_bandwidth),
        "free": "true" if only_free else None,
    }
    filters = {name: value for name, value in given.items() if value}
    client = client_of(ctx)
    found = listed(client, "offers", everything=everything, limit=limit, on_page=None, **filters)
    if as_json:
        emit_json(found)
    else:
        offer_rows(found, "No offer matches; list all GPUs with: gpool gpus")


def offer_rows(found: list[dict[str, Any]], empty: str) -> None:
    rows = [
        (
            one["model"] + (" (simulated)" if one["simulated"] else ""),
            gib(one["memory_bytes"]),
            rate(one["price_microcredits"]),
            f"{one['free']}/{one['gpus']}",
            one["nodes"],
            one["verified"],
            f"{one['mtbf_hours']:g} h",
            _or_dash(one["gigaflops"] and one["gigaflops"] / 1000),
            _or_dash(one["tflops_per_credit"]),
            _or_dash(one["memory_gb_per_s"]),
            ",".join(one["tiers"]),
            credits(one["min_charge_microcredits"]),
            brief_time(one["notice_s"]) if one["notice_s"] else "-",
        )
        for one in found
    ]
    columns = "model,memory,price/gpu,free,nodes,verified,mtbf,tflop/s,per credit,gb/s,tier,minimum,notice"
    table(columns.split(","), rows, empty)


def _or_dash(value: float | None) -> str:
    return f"{value:.4g}" if value else "-"


def rate(microcredits: int) -> str:
    from gpool.core.specs.fields import format_price

    return format_price(microcredits) if microcredits else "free"


def credits(microcredits: int) -> str:
    from gpool.core.money.prices import format_credits

    return format_credits(microcredits) if microcredits else "-"


@click.command(
    cls=SectionedCommand,
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        "gpool quote --gpu H100:2 -- python train.py",
        "gpool quote --gpu 24GB --timeout 2h --json -- python train.py",
    ),
)
@click.pass_context
def quote(ctx: click.Context, /, **given: Any) -> None:
    """Show what a command would cost and when it would start.

    Takes the options of `gpool run` and submits nothing; `gpool run --dry-run` does the same.
    """
    ctx.invoke(run, dry_run=True, **given)


quote.params += [param for param in run.params if param.name not in UNQUOTED]


def show_quote(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        emit_json(found)
        return
    shown: dict[str, Any] = {"state": plain(found["sentence"])}
    starts, run_s, cost = found.get("starts"), found.get("run_s"), found.get("cost")
    if found["code"] == "waits" and starts:
        at, first, last = (local_time(starts[name]) for name in ("at", "from", "to"))
        shown["start"] = f"{at} (from {first} to {last})"
    if found["rate_microcredits"] is not None:
        several = f" for each of {found['tasks']} tasks" if found["tasks"] > 1 else ""
        shown["price"] = rate(found["rate_microcredits"]) + several
        if len(found["rates"]) > 1:
            low, high = (rate(each) for each in found["rates"])
            shown["price"] += f" (matching nodes: {low} to {high})"
        shown["minimum"] = credits(found["min_charge_microcredits"])
        if run_s:
            spans = [brief_time(run_s[name]) for name in ("expected", "low", "high")]
            whose = "your tasks like it" if found["known_from"] == "own" else "other tasks"
            shown["run time"] = f"{spans[0]} ({spans[1]} to {spans[2]}, from {whose})"
        if cost:
            shown["cost"] = _amount(cost["expected"], cost["low"], cost["high"])
        shown["at timeout"] = _amount(found["cost_at_timeout_microcredits"])
    fields(shown, list(shown))
    if found["offers"]:
        click.echo()
        offer_rows(found["offers"], "")


def _amount(expected: int, low: int | None = None, high: int | None = None) -> str:
    from gpool.core.money.prices import format_credits

    if low is None or high is None or low == high:
        return f"{format_credits(expected)} credits"
    return f"{format_credits(expected)} credits ({format_credits(low)} to {format_credits(high)})"

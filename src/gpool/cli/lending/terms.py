"""Lending options of `up` and `join`, and the agent's variables made from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any

import click

from gpool.agent.machine.policy import GANG_PORT, MOST_GANG_PORT, site_address, site_name
from gpool.agent.machine.policy_file import parse_free_for, parse_notice
from gpool.cli.command import option_section
from gpool.core.errors import Invalid
from gpool.core.money.prices import parse_credits, parse_prices
from gpool.core.specs.fields import normal_labels


@dataclass(frozen=True, slots=True)
class LendingTerms:
    slots: int | None = None
    simulate_gpus: str | None = None
    allow_process: bool = False
    policy: Path | None = None
    labels: tuple[str, ...] = ()
    price: str = ""
    min_charge: str = ""
    free_for: str | None = None
    notice: str = ""
    site: str = ""
    address: str = ""
    gang_port: int | None = None
    trusted_link: bool = False


def _checked(read: Callable[[str], str]) -> Callable[[click.Context, click.Parameter, str], str]:
    def check(_: click.Context, __: click.Parameter, value: str) -> str:
        try:
            return read(value)
        except (ValueError, Invalid) as error:
            raise click.BadParameter(str(error)) from error

    return check


def _labels(_: click.Context, __: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return normal_labels(value)
    except Invalid as error:
        raise click.BadParameter(error.detail) from error


def _unchanged(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Check a text here that the agent parses again."""

    def read(text: str) -> str:
        if text:
            parse(text)
        return text

    return read


def _free_for(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    try:
        return None if value is None else ",".join(parse_free_for(value))
    except Invalid as error:
        raise click.BadParameter(error.detail) from error


_lent = option_section("Lending")
_gangs = option_section("Tasks on several nodes (gangs)")

_OPTIONS = (
    _lent(
        "--slots",
        envvar="GPOOL_AGENT_SLOTS",
        type=click.IntRange(min=0),
        metavar="N",
        help="CPU cores to lend (default: all).",
    ),
    _lent(
        "--simulate-gpus",
        envvar="GPOOL_AGENT_SIMULATE_GPUS",
        metavar="SPEC",
        help="Simulate GPUs, e.g. H100:2,RTX4090; listings mark them as simulated.",
    ),
    _lent(
        "--allow-process",
        envvar="GPOOL_AGENT_ALLOW_PROCESS",
        is_flag=True,
        help="Run your own tasks with --tier none here, with the agent's rights and no isolation.",
    ),
    _lent(
        "--policy",
        envvar="GPOOL_AGENT_POLICY",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Owner's policy: allowed users, hours, limits (TOML; docs/policy.md).",
    ),
    _gangs(
        "--site",
        envvar="GPOOL_AGENT_SITE",
        callback=_checked(site_name),
        default="",
        metavar="NAME",
        help="Site: nodes of one site reach each other directly; a gang runs within one site.",
    ),
    _gangs(
        "--address",
        envvar="GPOOL_AGENT_GANG_ADDRESS",
        callback=_checked(site_address),
        default="",
        metavar="IP",
        help="Address for other nodes of the site (default: that of the route to the server).",
    ),
    _gangs(
        "--gang-port",
        envvar="GPOOL_AGENT_GANG_PORT",
        type=click.IntRange(1024, MOST_GANG_PORT),
        metavar="PORT",
        help=f"First UDP port for other nodes of the site (default: {GANG_PORT}).",
    ),
    _gangs(
        "--trusted-link",
        envvar="GPOOL_AGENT_GANG_TRUSTED_LINK",
        is_flag=True,
        help="Let gangs use the site's link directly, unencrypted, if all their nodes declare this.",
    ),
    _lent(
        "--label",
        "labels",
        multiple=True,
        callback=_labels,
        metavar="LABEL",
        help="Label that tasks can request: ssd, zone=a (repeatable).",
    ),
    _lent(
        "--price",
        envvar="GPOOL_AGENT_PRICE",
        callback=_checked(_unchanged(parse_prices)),
        default="",
        metavar="PRICE",
        help="Price per hour of a GPU, or of a machine without GPUs: 0.31/h, or 0.31/h,H100=2.00/h,gpu0=0/h.",
    ),
    _lent(
        "--min-charge",
        envvar="GPOOL_AGENT_MIN_CHARGE",
        callback=_checked(_unchanged(parse_credits)),
        default="",
        metavar="CREDITS",
        help="Least charge of an allocation, e.g. 0.05 (default: none).",
    ),
    _lent(
        "--free-for",
        envvar="GPOOL_AGENT_FREE_FOR",
        callback=_free_for,
        metavar="NAMES",
        help="Users and teams that pay nothing, e.g. team:lab,user:ana; your own tasks never cost anything.",
    ),
    _lent(
        "--notice",
        envvar="GPOOL_AGENT_NOTICE",
        callback=_checked(_unchanged(parse_notice)),
        default="",
        metavar="TIME",
        help="Promised time before rules of the policy reclaim running tasks, e.g. 10m (default: none).",
    ),
)


def lending(function: Callable[..., None]) -> Callable[..., None]:

    @wraps(function)
    def with_terms(*args: Any, **values: Any) -> None:
        terms = LendingTerms(**{one.name: values.pop(one.name) for one in fields(LendingTerms)})
        function(*args, terms=terms, **values)

    found: Callable[..., None] = with_terms
    for option in reversed(_OPTIONS):
        found = option(found)
    return found

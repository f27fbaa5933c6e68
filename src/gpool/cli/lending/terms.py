"""Lending options of `up` and `join`, and the agent's variables made from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any

import click

from gpool.agent.machine.policy import GANG_PORT, MOST_GANG_PORT, site_address, site_name
from gpool.cli.command import option_section
from gpool.core.errors import Invalid
from gpool.core.specs.fields import normal_labels, parse_price


@dataclass(frozen=True, slots=True)
class LendingTerms:
    slots: int | None = None
    simulate_gpus: str | None = None
    allow_process: bool = False
    policy: Path | None = None
    labels: tuple[str, ...] = ()
    price: str = ""
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


def _a_price(text: str) -> str:
    if text:
        parse_price(text)
    return text


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
        callback=_checked(_a_price),
        default="",
        metavar="CREDITS/h",
        help="Price per hour of a GPU, or of a machine without GPUs, e.g. 0.31/h (default: 0).",
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

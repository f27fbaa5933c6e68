"""On what terms an owner lends a machine: the options `up` and `join` share, and how the agent is told of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import click

from gpool.agent.machine.policy import GANG_PORT, MOST_GANG_PORT, GangRules, site_address, site_name
from gpool.cli.lending.enrolment import Identity
from gpool.core.errors import Invalid
from gpool.core.specs import labels
from gpool.core.specs import price as prices


@dataclass(frozen=True, slots=True)
class Terms:
    """What the owner said."""

    slots: int | None = None
    simulate_gpus: str | None = None
    allow_process: bool = False
    policy: Path | None = None
    gangs: GangRules = field(default_factory=GangRules)  # for several nodes at once
    labels: tuple[str, ...] = ()
    price: str = ""


def _checked(read: Callable[[str], str]) -> Callable[[click.Context, click.Parameter, str], str]:
    def check(_: click.Context, __: click.Parameter, value: str) -> str:
        try:
            return read(value)
        except (ValueError, Invalid) as error:
            raise click.BadParameter(str(error)) from error

    return check


def _labels(_: click.Context, __: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return labels.normal(value)
    except Invalid as error:
        raise click.BadParameter(error.detail) from error


def _a_price(text: str) -> str:
    if text:
        prices.parse_price(text)
    return text


_OPTIONS = (
    click.option(
        "--slots",
        envvar="GPOOL_AGENT_SLOTS",
        type=click.IntRange(min=0),
        help="Processors to lend (default: all).",
    ),
    click.option(
        "--simulate-gpus",
        envvar="GPOOL_AGENT_SIMULATE_GPUS",
        metavar="SPEC",
        help="Pretend to have GPUs, e.g. H100:2,RTX4090; marked as simulated.",
    ),
    click.option(
        "--allow-process",
        envvar="GPOOL_AGENT_ALLOW_PROCESS",
        is_flag=True,
        help="Let your own tasks that ask for --tier none run here with the agent's rights, without any isolation.",
    ),
    click.option(
        "--policy",
        envvar="GPOOL_AGENT_POLICY",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Your rules: whose tasks, which hours, what you keep back (TOML; docs/policy.md).",
    ),
    click.option(
        "--site",
        envvar="GPOOL_AGENT_SITE",
        callback=_checked(site_name),
        default="",
        metavar="NAME",
        help="Where this machine stands: tasks on several nodes run on those of one site, which reach each other directly.",
    ),
    click.option(
        "--address",
        envvar="GPOOL_AGENT_GANG_ADDRESS",
        callback=_checked(site_address),
        default="",
        metavar="IP",
        help="By which the others of its site reach it (default: the one that leads to the server).",
    ),
    click.option(
        "--gang-port",
        envvar="GPOOL_AGENT_GANG_PORT",
        type=click.IntRange(1024, MOST_GANG_PORT),
        metavar="PORT",
        help=f"The first of the UDP ports that the others of its site reach (default: {GANG_PORT}).",
    ),
    click.option(
        "--label",
        "node_labels",
        multiple=True,
        callback=_labels,
        metavar="LABEL",
        help="What tasks can ask for by name: ssd, zone=a. Repeat it for more.",
    ),
    click.option(
        "--price",
        envvar="GPOOL_AGENT_PRICE",
        callback=_checked(_a_price),
        default="",
        metavar="CREDITS/h",
        help="For an hour of a GPU, or of the machine where it has none: 0.31/h (default: nothing).",
    ),
)


def lending(function: Callable[..., None]) -> Callable[..., None]:
    """What an owner may say, given to the verb as `terms`."""

    @wraps(function)
    def with_terms(
        *args: Any,
        slots: int | None,
        simulate_gpus: str | None,
        allow_process: bool,
        policy: Path | None,
        site: str,
        address: str,
        gang_port: int | None,
        node_labels: tuple[str, ...],
        price: str,
        **kwargs: Any,
    ) -> None:
        gangs = GangRules(site=site, address=address, port=gang_port or 0)
        terms = Terms(slots, simulate_gpus, allow_process, policy, gangs, node_labels, price)
        function(*args, terms=terms, **kwargs)

    found: Callable[..., None] = with_terms
    for option in reversed(_OPTIONS):
        found = option(found)
    return found


def agent_variables(identity: Identity, data: Path, terms: Terms) -> dict[str, str]:
    """How the agent is told what to do: variables, because a command line is for everyone to read."""
    found = {
        "GPOOL_AGENT_SERVER_URL": identity.address.url,
        "GPOOL_AGENT_PLAIN_HTTP": str(int(identity.address.plain)),
        "GPOOL_AGENT_NODE": identity.id,
        "GPOOL_AGENT_SERVER_NAME": identity.server,
        "GPOOL_AGENT_KEY_FILE": str(identity.key_file),
        "GPOOL_AGENT_DATA_DIR": str(data),
        "GPOOL_AGENT_ALLOW_PROCESS": str(int(terms.allow_process)),
    }
    if identity.address.fingerprint is not None:
        found["GPOOL_AGENT_FINGERPRINT"] = identity.address.fingerprint
    if terms.slots is not None:
        found["GPOOL_AGENT_SLOTS"] = str(terms.slots)
    if terms.simulate_gpus:
        found["GPOOL_AGENT_SIMULATE_GPUS"] = terms.simulate_gpus
    if terms.policy is not None:
        found["GPOOL_AGENT_POLICY"] = str(terms.policy.absolute())
    gangs = terms.gangs
    if gangs.site:
        found["GPOOL_AGENT_SITE"] = gangs.site
    if gangs.address:
        found["GPOOL_AGENT_GANG_ADDRESS"] = gangs.address
    if gangs.port:
        found["GPOOL_AGENT_GANG_PORT"] = str(gangs.port)
    if terms.labels:
        found["GPOOL_AGENT_LABELS"] = ",".join(terms.labels)
    if terms.price:
        found["GPOOL_AGENT_PRICE"] = terms.price
    return found

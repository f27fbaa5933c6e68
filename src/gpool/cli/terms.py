"""On what terms an owner lends a machine: the options `up` and `join` share, and how the agent is told of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from gpool.cli.joining import Identity


@dataclass(frozen=True, slots=True)
class Terms:
    """What the owner said."""

    slots: int | None = None
    simulate_gpus: str | None = None
    allow_process: bool = False
    policy: Path | None = None


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
)


def lending(function: Callable[..., None]) -> Callable[..., None]:
    """`--slots`, `--simulate-gpus`, `--allow-process` and `--policy`, given to the verb as `terms`."""

    @wraps(function)
    def with_terms(
        *args: Any,
        slots: int | None,
        simulate_gpus: str | None,
        allow_process: bool,
        policy: Path | None,
        **kwargs: Any,
    ) -> None:
        function(*args, terms=Terms(slots, simulate_gpus, allow_process, policy), **kwargs)

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
    return found

"""A gang member as a command."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from gpool.agent.network.policy import Gang
from gpool.agent.runner import gang as starter
from gpool.core import gangs
from gpool.core.model import Allocation, Engine, Network, TaskSpec
from gpool.wire.frames import Rendezvous

INTERPRETER = (
    "python=$(command -v python || command -v python3) || { echo \"gpool: engine $1 needs a Python in the task's "
    'environment, and there is none; choose another --image" >&2; exit 127; }; shift; exec "$python" -c "$0" "$@"'
)
"""Shell script that finds a Python in an image: `$0` is the starter's text, `$1` the engine."""


@cache
def starter_text() -> str:
    return Path(starter.__file__).read_text("utf-8")


def network_of(spec: TaskSpec, member: Rendezvous) -> Gang:
    egress = spec.requirements.network is Network.EGRESS
    return Gang(member.rank, member.peers, member.secret, egress)


def command_of(spec: TaskSpec, member: Rendezvous, part: Allocation) -> tuple[str, ...]:
    if spec.engine is Engine.NONE:
        return spec.command
    nodes = len(member.peers)
    plan = {
        "engine": spec.engine.value,
        "rank": member.rank,
        "nodes": nodes,
        "head": str(gangs.address_of(0)),
        "gate": gangs.GATE_PORT,
        "ray": gangs.ray_address(),
        "words": gangs.engine_words(spec.engine, member.rank, nodes, part),
    }
    engine, text = spec.engine.value, json.dumps(plan)
    return ("/bin/sh", "-c", INTERPRETER, starter_text(), engine, text, *spec.command)


def variables_of(spec: TaskSpec, member: Rendezvous) -> tuple[tuple[str, str], ...]:
    """The task's own variables override the member's."""
    return (*gangs.variables(member.rank, len(member.peers)), *QUIET.get(spec.engine, ()))


QUIET = {Engine.RAY: (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_DISABLE_IMPORT_WARNING", "1"))}
"""Switch off the engines' own traffic to the internet."""

"""Generator of docs/settings.md: `python -m tests.tools.settings_page`."""

from __future__ import annotations

import json
import sys

from pydantic.fields import FieldInfo

from gpool.agent.settings import AgentSettings
from gpool.core.model import GIB
from gpool.server.deposits.settings import DepositSettings
from gpool.server.events.settings import NoticeSettings
from gpool.server.identity.oidc import OidcProvider
from gpool.server.settings import Settings

SECTIONS = {
    "host": "Network and TLS",
    "ttl_s": "Leases and scheduling",
    "node_frames_per_s": "Limits and retention",
    "registration": "Accounts and sign-in",
    "user_gpus": "Default quotas",
    "master_key": "Master keys",
    "keep_events_days": "Events and notices",
    "deposit_rpc_url": "Deposits by chain transfers",
}
"""Heading by the first setting of each section."""

UNITS = {
    "_frames_per_s": "frames/s",
    "_bytes_per_s": "bytes/s",
    "_s": "seconds",
    "_days": "days",
    "_bytes": "bytes",
    "_kib": "KiB",
    "_gpus": "GPUs",
    "_queued": "tasks",
    "_nodes": "nodes",
    "_teams": "teams",
}
TABLE = ("| variable | default | unit | meaning |", "|---|---|---|---|")


def as_markdown() -> str:
    lines = [
        "# Settings of server and agent",
        "",
        "Generated from `gpool.server.settings` and `gpool.agent.settings` (`make docs`); `make check`",
        "fails when it is stale.",
        "",
        "Server and agent read environment variables. Lists and sets are written as JSON. `gpool up` and",
        "`gpool join` set the variables of the agent from their options.",
    ]
    fields = Settings.model_fields
    last = (*NoticeSettings.model_fields, *DepositSettings.model_fields)
    for name in (*(each for each in fields if each not in last), *last):
        field = fields[name]
        if name in SECTIONS:
            lines += ["", f"## {SECTIONS[name]}", "", *TABLE]
        lines.append(_row(f"GPOOL_SERVER_{name.upper()}", name, field))
    lines += ["", "## Members of an OpenID Connect provider", ""]
    lines += ["| member | default | unit | meaning |", TABLE[1]]
    lines += [_row(name, name, field) for name, field in OidcProvider.model_fields.items()]
    lines += ["", "## Agent", "", *TABLE]
    lines += [
        _row(f"GPOOL_AGENT_{name.upper()}", name, field)
        for name, field in AgentSettings.model_fields.items()
    ]
    return "\n".join([*lines, ""])


def _row(label: str, name: str, field: FieldInfo) -> str:
    unit = next((unit for ending, unit in UNITS.items() if name.endswith(ending)), "")
    unit = "" if isinstance(field.default, bool) else unit
    return f"| `{label}` | {_default(field)} | {unit} | {field.description} |"


def _default(field: FieldInfo) -> str:
    value = field.default
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "depends on the machine"
    if value is None or value == "":
        return "unset"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, frozenset | tuple):
        value = json.dumps(sorted(value))
    if isinstance(value, bool):
        value = str(value).lower()
    size = f" ({value // GIB} GiB)" if type(value) is int and value >= GIB else ""
    return f"`{value}`{size}"


if __name__ == "__main__":
    sys.stdout.write(as_markdown())

"""`gpool node doctor`: what this machine has and lacks for lending, and whether the pool answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpool.agent.detect import Finding, doctor
from gpool.core.errors import GpoolError

if TYPE_CHECKING:
    from gpool.client.client import Client


def examine(client: Client, data: Path) -> list[Finding]:
    return [*doctor(data), *_pool(client)]


def _pool(client: Client) -> list[Finding]:
    try:
        client.door.send("GET", "/readyz")
    except GpoolError as error:
        return [Finding("server", False, error.detail, "gpool up, or set GPOOL_URL")]
    reached = Finding("server", True, f"{client.url} is ready")
    try:
        who = client.door.get_json("/v1/me")
    except GpoolError as error:
        return [reached, Finding("key", False, error.detail, "set GPOOL_KEY")]
    return [reached, Finding("key", True, f"you are {who['name']}")]

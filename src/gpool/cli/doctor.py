"""`gpool node doctor`: what this machine has and lacks for lending, what its owner's rules say, and whether the pool answers."""

from __future__ import annotations

import os
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gpool.agent.daemon import wall_clock
from gpool.agent.detect import Finding, Level, doctor
from gpool.agent.detect.findings import clock_finding
from gpool.agent.detect.owner import LoadMeter, facts_now
from gpool.agent.lookout import Rulebook
from gpool.agent.policy import reason_to_close
from gpool.core.errors import GpoolError, Invalid

if TYPE_CHECKING:
    from gpool.client.client import Client

POLICY = "GPOOL_AGENT_POLICY"


def examine(client: Client, data: Path, now: datetime | None = None) -> list[Finding]:
    """This machine, then the pool it would lend to."""
    at = now if now is not None else wall_clock()
    named = os.environ.get(POLICY)
    return [*doctor(data), policy_finding(Path(named) if named else None, at), *_pool(client, at)]


def policy_finding(file: Path | None, now: datetime) -> Finding:
    if file is None:
        return Finding("policy", Level.OK, f"none; everything is lent, always ({POLICY})")
    try:
        rules = Rulebook(file)
    except Invalid as error:
        return Finding("policy", Level.PROBLEM, error.detail, f"edit {file}")
    closed = reason_to_close(rules.policy, facts_now(now, LoadMeter(os.getpid())))
    said = f"just now it would take nothing: {closed}" if closed else "it would take tasks now"
    return Finding("policy", Level.OK, f"{file}; {said}")


def _pool(client: Client, now: datetime) -> list[Finding]:
    try:
        reply = client.door.send("GET", "/readyz")
    except GpoolError as error:
        return [Finding("server", Level.PROBLEM, error.detail, "gpool up, or set GPOOL_URL")]
    reached = [
        Finding("server", Level.OK, f"{client.url} is ready"),
        clock_finding(now, date_of(reply.headers.get("date"))),
    ]
    try:
        who = client.door.get_json("/v1/me")
    except GpoolError as error:
        return [
            *reached,
            Finding("key", Level.PROBLEM, error.detail, "gpool login, or set GPOOL_KEY"),
        ]
    return [*reached, Finding("key", Level.OK, f"you are {who['name']}"), *_lent(client, who["id"])]


def _lent(client: Client, user: str) -> list[Finding]:
    """What the pool says of this account's nodes."""
    try:
        nodes = client.listing("nodes")
    except GpoolError:
        return []
    return [
        Finding(f"node {one['name']}", Level.WARNING, said, "gpool node show, gpool gpus")
        for one in nodes
        if one["owner"] == user
        for said in one.get("problems") or []
    ]


def date_of(header: str | None) -> datetime | None:
    """The time an HTTP answer says it was made."""
    try:
        return None if header is None else parsedate_to_datetime(header)
    except ValueError:
        return None

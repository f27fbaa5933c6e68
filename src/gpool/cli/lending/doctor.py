"""`gpool node doctor`: what this machine has and lacks for lending, what its owner's rules say, and whether the pool answers."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING

from gpool.agent.daemon import wall_clock
from gpool.agent.machine.detection import Finding, Level, doctor
from gpool.agent.machine.detection.findings import clock_finding
from gpool.agent.machine.detection.host import site_address
from gpool.agent.machine.detection.owner import LoadMeter, facts_now
from gpool.agent.machine.monitor import Rulebook
from gpool.agent.machine.policy import GANG_PORT, Gangs, reason_to_close
from gpool.agent.network.factory import probe_gangs
from gpool.core.errors import GpoolError, Invalid

if TYPE_CHECKING:
    from gpool.client.client import Client

POLICY = "GPOOL_AGENT_POLICY"
SITE, ADDRESS, PORT = "GPOOL_AGENT_SITE", "GPOOL_AGENT_GANG_ADDRESS", "GPOOL_AGENT_GANG_PORT"


def examine(client: Client, data: Path, now: datetime | None = None) -> list[Finding]:
    """This machine, then the pool it would lend to."""
    at = now if now is not None else wall_clock()
    named = os.environ.get(POLICY)
    file = Path(named) if named else None
    return [
        *doctor(data),
        policy_finding(file, at),
        *_gangs(file, data, client.url),
        *_pool(client, at),
    ]


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


def _gangs(file: Path | None, data: Path, server: str) -> list[Finding]:
    try:
        said = Rulebook(file).policy.gangs
    except Invalid:
        return []  # said already
    site = os.environ.get(SITE, "") or said.site
    return [gangs_finding(replace(said, site=site), data, server)]


def gangs_finding(said: Gangs, data: Path, server: str) -> Finding:
    """Whether this machine takes part in tasks on several nodes, and why not; opens a lane to see."""
    if not said.offered:
        return Finding("gangs", Level.OK, "its policy refuses tasks on several nodes")
    if not said.site:
        text = "no site is named: tasks on several nodes never run here"
        return Finding(
            "gangs", Level.NOTE, text, "gpool join … --site NAME, the same on nodes of one network"
        )
    works, why = asyncio.run(probe_gangs(data))
    if not works:
        return Finding("gangs", Level.WARNING, why)
    address = os.environ.get(ADDRESS, "") or said.address or site_address(server)
    port = int(os.environ.get(PORT, "0")) or said.port or GANG_PORT
    if IPv4Address(address).is_loopback:
        text = f"site {said.site}, but by {address} no other machine reaches this one"
        return Finding("gangs", Level.WARNING, text, "gpool join … --address IP")
    text = f"site {said.site}; its others reach this machine at {address}, UDP ports from {port} on"
    return Finding("gangs", Level.OK, text)


def _pool(client: Client, now: datetime) -> list[Finding]:
    try:
        reply = client.api.send("GET", "/readyz")
    except GpoolError as error:
        return [Finding("server", Level.PROBLEM, error.detail, "gpool up, or set GPOOL_URL")]
    reached = [
        Finding("server", Level.OK, f"{client.url} is ready"),
        clock_finding(now, date_of(reply.headers.get("date"))),
    ]
    try:
        who = client.api.get_json("/v1/me")
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

"""`gpool node doctor`: checks of machine, owner's policy and pool."""

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
from gpool.agent.machine.findings import Finding, Level, clock_finding, doctor
from gpool.agent.machine.host import site_address
from gpool.agent.machine.monitor import LoadMeter, PolicyFile, facts_now
from gpool.agent.machine.policy import GANG_PORT, GangRules, reason_to_close
from gpool.agent.network.factory import probe_gangs, probe_links
from gpool.cli.command import is_joined
from gpool.core.errors import GpoolError, Invalid, NotSignedIn
from gpool.core.gangs import GangLink

if TYPE_CHECKING:
    from gpool.client.client import Client

POLICY = "GPOOL_AGENT_POLICY"
SIGN_IN = "gpool login, or set GPOOL_KEY"
SITE, ADDRESS, PORT = "GPOOL_AGENT_SITE", "GPOOL_AGENT_GANG_ADDRESS", "GPOOL_AGENT_GANG_PORT"
TRUSTED = "GPOOL_AGENT_GANG_TRUSTED_LINK"


def examine(client: Client, data: Path, now: datetime | None = None) -> list[Finding]:
    at = now if now is not None else wall_clock()
    named = os.environ.get(POLICY)
    file = Path(named) if named else None
    return [
        *doctor(data),
        policy_finding(file, at),
        *_gangs(file, data, client.url),
        *pool_findings(client, at),
    ]


def policy_finding(file: Path | None, now: datetime) -> Finding:
    if file is None:
        return Finding("policy", Level.OK, f"none; all resources are lent at any time ({POLICY})")
    try:
        rules = PolicyFile(file)
    except Invalid as error:
        return Finding("policy", Level.PROBLEM, error.detail, f"edit {file}")
    closed = reason_to_close(rules.policy, facts_now(now, LoadMeter(os.getpid())))
    state = f"takes no tasks now: {closed}" if closed else "takes tasks now"
    return Finding("policy", Level.OK, f"{file}; {state}")


def _gangs(file: Path | None, data: Path, server: str) -> list[Finding]:
    try:
        gangs = PolicyFile(file).policy.gangs
    except Invalid:
        return []  # reported by policy_finding
    site = os.environ.get(SITE, "") or gangs.site
    return [gangs_finding(replace(gangs, site=site), data, server)]


def gangs_finding(gangs: GangRules, data: Path, server: str) -> Finding:
    """Try it: open a sandbox network."""
    if not gangs.offered:
        return Finding("gangs", Level.OK, "the policy refuses tasks on several nodes")
    if not gangs.site:
        text = "no site is set: tasks on several nodes never run here"
        return Finding(
            "gangs", Level.NOTE, text, "gpool join … --site NAME, the same on nodes of one network"
        )
    works, why = asyncio.run(probe_gangs(data))
    if not works:
        return Finding("gangs", Level.WARNING, why)
    address = os.environ.get(ADDRESS, "") or gangs.address or site_address(server)
    port = int(os.environ.get(PORT, "0")) or gangs.port or GANG_PORT
    if IPv4Address(address).is_loopback:
        text = f"site {gangs.site}, but no other machine reaches this one at {address}"
        return Finding("gangs", Level.WARNING, text, "gpool join … --address IP")
    trusted = os.environ.get(TRUSTED, "").lower() in ("1", "true", "yes", "on")
    links, problems = asyncio.run(probe_links(data, address, trusted=trusted))
    offered = ", ".join([link.value for link in GangLink if link.value in links] + ["relay"])
    text = (
        f"site {gangs.site}; other nodes reach this machine at {address}, UDP ports from {port}; "
        f"links: {offered}"
    )
    return Finding("gangs", Level.OK, "; ".join((text, *problems)))


def pool_findings(client: Client, now: datetime) -> list[Finding]:
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
    except NotSignedIn as error:
        if not is_joined():
            return [*reached, Finding("key", Level.PROBLEM, error.detail, SIGN_IN)]
        text = "nobody is signed in here; node ls, pause, resume and doctor work without"
        return [*reached, Finding("account", Level.NOTE, text, "gpool login, as the node's owner")]
    except GpoolError as error:
        return [
            *reached,
            Finding("key", Level.PROBLEM, error.detail, SIGN_IN),
        ]
    return [
        *reached,
        Finding("key", Level.OK, f"signed in as {who['name']}"),
        *_node_problems(client, who["id"]),
    ]


def _node_problems(client: Client, user: str) -> list[Finding]:
    try:
        nodes = client.listing("nodes")
    except GpoolError:
        return []
    return [
        Finding(f"node {one['name']}", Level.WARNING, problem, "gpool node show, gpool gpus")
        for one in nodes
        if one["owner"] == user
        for problem in one.get("problems") or []
    ]


def date_of(header: str | None) -> datetime | None:
    try:
        return None if header is None else parsedate_to_datetime(header)
    except ValueError:
        return None

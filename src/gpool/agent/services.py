"""The services a node runs tasks with, built from the settings."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from gpool.agent.daemon import boot_clock
from gpool.agent.environments import environments_for
from gpool.agent.machine.policy import OwnerPolicy
from gpool.agent.network import sandbox_network
from gpool.agent.network.factory import networks_for, probe, probe_gangs
from gpool.agent.network.policy import BadPolicy, EgressPolicy, parse_rate, parse_target
from gpool.agent.running.sandboxes import (
    EnvironmentProvider,
    GpuShareProvider,
    NetworkProvider,
    PolicyLimits,
)
from gpool.agent.runtime.protocol import BuildRuntime, Runtime
from gpool.agent.settings import AgentSettings
from gpool.core.errors import Invalid

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class NodeServices:
    runtimes: Sequence[Runtime]
    networks: NetworkProvider | None = None
    environments: EnvironmentProvider | None = None
    allowed: Callable[[], PolicyLimits] = PolicyLimits
    gpu_shares: GpuShareProvider | None = None

    async def start(self) -> None:
        for runtime in self.runtimes:
            await runtime.sweep()
        if self.networks is not None:
            await self.networks.start()
        if self.environments is not None:
            await self.environments.sweep()
        if self.gpu_shares is not None:
            await self.gpu_shares.start()

    async def close(self) -> None:
        if self.gpu_shares is not None:
            await self.gpu_shares.close()
        for runtime in self.runtimes:
            await runtime.close()
        if self.environments is not None:
            await self.environments.close()
        if self.networks is not None:
            await self.networks.close()


@dataclass(frozen=True, slots=True)
class NetworkSupport:
    networks: sandbox_network.Networks | None = None
    egress: bool = False
    gangs: bool = False


def network_support(settings: AgentSettings, policy: OwnerPolicy) -> NetworkSupport:
    """Probe egress, and gang networks if a site is named; log missing parts.

    Environment builds use egress even if the policy gives tasks none.
    """
    egress, why = asyncio.run(probe(settings.data_dir))
    if not egress:
        log.info("egress_unavailable", why=why)
    gangs = False
    if settings.site or policy.gangs.site:
        gangs, why = asyncio.run(probe_gangs(settings.data_dir))
        if not gangs:
            log.warning("gangs_unavailable", why=why)
    if not egress and not gangs:
        return NetworkSupport()
    return NetworkSupport(networks_for(egress_policy(policy), settings.data_dir), egress, gangs)


def egress_policy(policy: OwnerPolicy) -> EgressPolicy:
    rules = policy.egress
    try:
        allow = tuple(parse_target(text) for text in rules.allow)
        deny = tuple(parse_target(text) for text in rules.deny)
        rate = parse_rate(rules.rate) if rules.rate else None
    except BadPolicy as error:
        raise Invalid(f"the policy's [egress]: {error}") from error
    known = EgressPolicy(allow=allow, rate_bytes_per_s=rate)
    return replace(known, deny=(*known.deny, *deny))


def environment_provider(
    settings: AgentSettings, builder: BuildRuntime, support: NetworkSupport
) -> EnvironmentProvider | None:
    networks = support.networks if support.egress else None
    return environments_for(settings.data_dir, builder, networks, os.environ, clock=boot_clock)

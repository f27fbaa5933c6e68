"""The services a node runs tasks with: runtimes, sandbox networks, environments, GPU shares; built from the settings.

Depends on every package that implements one. Decides nothing about leases.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from gpool.agent.daemon import boot_clock
from gpool.agent.environments import environments_for
from gpool.agent.machine.detection import services as installed
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
from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime
from gpool.agent.runtime.microvm import requirements as guests
from gpool.agent.runtime.microvm.runtime import MicrovmRuntime
from gpool.agent.runtime.process import ProcessRuntime
from gpool.agent.runtime.protocol import Runtime, SandboxFailed
from gpool.agent.settings import AgentSettings
from gpool.core.errors import Invalid
from gpool.core.model import Gpu

log = structlog.get_logger(__name__)


class GpuRuntime(Runtime, Protocol):
    """A runtime that is given the machine's GPUs after each detection."""

    def use_gpus(self, gpus: Sequence[Gpu]) -> None: ...


@dataclass(frozen=True, slots=True)
class NodeServices:
    """The services of one node; the protocols are in `gpool.agent.running.sandboxes`."""

    runtimes: Sequence[Runtime]
    networks: NetworkProvider | None = None
    environments: EnvironmentProvider | None = None
    allowed: Callable[[], PolicyLimits] = PolicyLimits
    seats: GpuShareProvider | None = None

    async def start(self) -> None:
        """Remove the leftovers of an earlier agent, then start each service."""
        for runtime in self.runtimes:
            await runtime.sweep()
        if self.networks is not None:
            await self.networks.start()
        if self.environments is not None:
            await self.environments.sweep()
        if self.seats is not None:
            await self.seats.start()

    async def close(self) -> None:
        if self.seats is not None:
            await self.seats.close()
        for runtime in self.runtimes:
            await runtime.close()
        if self.environments is not None:
            await self.environments.close()
        if self.networks is not None:
            await self.networks.close()


def available_runtimes(
    settings: AgentSettings, gpus: Sequence[Gpu], registries: Sequence[str] = ()
) -> list[GpuRuntime]:
    """Return all runtimes that work on this machine, first choice first within a tier.

    The owner's policy decides later, at every start, which of them are lent. Bubblewrap is always among them, because
    environments are built in it; the process runtime only if the owner asked for it.
    """
    made: list[GpuRuntime] = [BubblewrapRuntime(settings.data_dir, gpus=gpus)]
    if settings.docker and installed.docker().version:
        made += _docker(settings, gpus, registries)
    if settings.microvm:
        made += _microvm(settings)
    if settings.allow_process:
        made.append(ProcessRuntime(settings.data_dir, gpus=gpus))
    return made


def _docker(
    settings: AgentSettings, gpus: Sequence[Gpu], registries: Sequence[str]
) -> list[GpuRuntime]:
    from gpool.agent.runtime.docker.runtime import DockerRuntime  # noqa: PLC0415 - imports in 0.2 s

    try:
        return [DockerRuntime(settings.data_dir, gpus=gpus, registries=registries)]
    except SandboxFailed as error:
        log.warning("docker_unavailable", why=str(error))
        return []


def _microvm(settings: AgentSettings) -> list[GpuRuntime]:
    why = guests.missing()
    try:
        if why is None:
            return [MicrovmRuntime(settings.data_dir)]
    except SandboxFailed as error:
        why = str(error)
    log.info("microvm_unavailable", why=why)
    return []


@dataclass(frozen=True, slots=True)
class NetworkSupport:
    """Sandbox networks this machine can open, and where they lead."""

    networks: sandbox_network.Networks | None = None
    egress: bool = False
    gangs: bool = False


def network_support(settings: AgentSettings, policy: OwnerPolicy) -> NetworkSupport:
    """Probe the machine for egress, and for gang networks if a site is named; log what is missing.

    Environment builds use egress even if the policy gives tasks none: the offer states what tasks get.
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
    """Return the policy's [egress] table as network filters; `Invalid` names the entry that is wrong."""
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
    settings: AgentSettings, builder: BubblewrapRuntime, support: NetworkSupport
) -> EnvironmentProvider | None:
    """Return the builder of package environments; None where packages cannot be downloaded or built."""
    networks = support.networks if support.egress else None
    return environments_for(settings.data_dir, builder, networks, os.environ, clock=boot_clock)

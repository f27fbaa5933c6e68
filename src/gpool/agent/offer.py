"""The offer: capacity and capabilities reported to the server, before the owner's policy."""

from __future__ import annotations

from dataclasses import replace

from gpool import __version__
from gpool.agent.machine.detection import host_capacity
from gpool.agent.machine.detection.host import site_address
from gpool.agent.machine.policy import GANG_PORT, GangRules
from gpool.agent.runtime.protocol import Runtime, RuntimeAbility
from gpool.agent.runtime.runner_calls import PYTHON
from gpool.agent.services import NetworkSupport, NodeServices
from gpool.agent.settings import AgentSettings
from gpool.core.model import Gpu, Network, Offer, RuntimeOffer
from gpool.core.specs import environment


def machine_offer(
    settings: AgentSettings,
    gpus: tuple[Gpu, ...],
    services: NodeServices,
    support: NetworkSupport = NetworkSupport(),  # noqa: B008 - frozen
    rules: GangRules = GangRules(),  # noqa: B008 - frozen
) -> Offer:
    capacity = host_capacity(settings.data_dir)
    named = "slots" in settings.model_fields_set
    runtimes = services.runtimes
    networks = set(Network) if support.egress else {Network.NONE}
    with_images = any(RuntimeAbility.IMAGES in one.abilities for one in runtimes)
    builds = {environment.IMAGE} if with_images else set()
    ready, pythons = {environment.DEFAULT}, {PYTHON}
    if services.environments is not None:
        builds.add(environment.PIP)
        ready |= services.environments.ready()
        pythons |= services.environments.pythons()
    return Offer(
        cpu_milli=settings.slots * 1000 if named else capacity.cpu_milli,
        memory_bytes=capacity.memory_bytes,
        disk_bytes=capacity.disk_bytes,
        gpus=gpus,
        pythons=frozenset(pythons),
        tiers=frozenset(one.tier for one in runtimes),
        environments=frozenset(ready),
        builds=frozenset(builds),
        networks=frozenset(networks & {given for one in runtimes for given in one.networks}),
        runtimes=tuple(_runtime_offer(one) for one in runtimes),
        hostname=capacity.hostname,
        site=settings.site if support.gangs else "",
        labels=settings.own_labels,
        price_microcredits=settings.price_microcredits,
        address=gang_address(settings, rules) if support.gangs else "",
        gang_port=(settings.gang_port or rules.port or GANG_PORT) if support.gangs else 0,
        agent_version=__version__,
    )


def refreshed(first: Offer, now: Offer) -> Offer:
    """`first` with the changeable parts of `now`."""
    return replace(
        first,
        gpus=now.gpus,
        environments=now.environments,
        networks=now.networks,
        runtimes=now.runtimes,
        address=now.address,
    )


def gang_address(settings: AgentSettings, rules: GangRules) -> str:
    return settings.gang_address or rules.address or site_address(settings.server_url)


def _runtime_offer(runtime: Runtime) -> RuntimeOffer:
    images = RuntimeAbility.IMAGES in runtime.abilities
    gpus = RuntimeAbility.GPUS in runtime.abilities
    return RuntimeOffer(runtime.name, runtime.tier, runtime.networks, images, gpus)

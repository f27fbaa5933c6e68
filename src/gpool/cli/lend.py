"""`python -m gpool.cli.lend`: the agent, told by `GPOOL_AGENT_*` variables. Finds what the machine has and lends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import click
import structlog

from gpool import __version__
from gpool.agent.app import Means, serve
from gpool.agent.daemon import boot_clock, wall_clock
from gpool.agent.environments import Environments, environments_for
from gpool.agent.machine.detection import host_facts
from gpool.agent.machine.detection.gpus import Detector
from gpool.agent.machine.detection.host import site_address
from gpool.agent.machine.detection.owner import LoadMeter, facts_now
from gpool.agent.machine.detection.processes import Kin, Programs
from gpool.agent.machine.gpu_monitor import Watch
from gpool.agent.machine.monitor import Lookout, Rulebook, glimpser
from gpool.agent.machine.policy import GANG_PORT, Gangs, Policy
from gpool.agent.network import sandbox_network
from gpool.agent.network.factory import networks_for, probe, probe_gangs
from gpool.agent.network.policy import BadPolicy, EgressPolicy, parse_rate, parse_target
from gpool.agent.runtime.protocol import BuildRuntime, Runtime, RuntimeAbility, SandboxFailed
from gpool.agent.runtime.registry import RuntimeContext, make_all
from gpool.agent.runtime.runner_calls import PYTHON
from gpool.agent.settings import AgentSettings
from gpool.agent.sharing.plan import parse_modes
from gpool.agent.sharing.setup import sharing_for
from gpool.cli.main import FAILED, exit_code_of, say_error
from gpool.core.errors import GpoolError, Invalid
from gpool.core.model import Gpu, Network, Offer, RuntimeOffer
from gpool.core.specs import environment

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Reach:
    """What lanes of this machine can lead to."""

    networks: sandbox_network.Networks | None = None  # who opens them; None: nobody can
    egress: bool = False
    gangs: bool = False


def offer_of(
    settings: AgentSettings,
    gpus: tuple[Gpu, ...],
    means: Means,
    reach: Reach = Reach(),  # noqa: B008 - frozen
    said: Gangs = Gangs(),  # noqa: B008 - frozen
) -> Offer:
    """What this machine has: the slots its owner named, else all processors it may use."""
    facts = host_facts(settings.data_dir)
    named = "slots" in settings.model_fields_set
    runtimes = means.runtimes
    networks = set(Network) if reach.egress else {Network.NONE}
    builds = (
        {environment.IMAGE}
        if any(RuntimeAbility.IMAGES in one.abilities for one in runtimes)
        else set()
    )
    ready, pythons = {environment.DEFAULT}, {PYTHON}
    if means.environments is not None:
        builds.add(environment.PIP)
        ready |= means.environments.ready()
        pythons |= means.environments.pythons()
    return Offer(
        cpu_milli=settings.slots * 1000 if named else facts.cpu_milli,
        memory_bytes=facts.memory_bytes,
        disk_bytes=facts.disk_bytes,
        gpus=gpus,
        pythons=frozenset(pythons),
        tiers=frozenset(one.tier for one in runtimes),
        environments=frozenset(ready),
        builds=frozenset(builds),
        networks=frozenset(networks & {given for one in runtimes for given in one.networks}),
        runtimes=tuple(_offered(one) for one in runtimes),
        hostname=facts.hostname,
        site=settings.site if reach.gangs else "",
        labels=settings.own_labels,
        price_microcredits=settings.price_microcredits,
        address=address_of(settings, said) if reach.gangs else "",
        gang_port=(settings.gang_port or said.port or GANG_PORT) if reach.gangs else 0,
        agent_version=__version__,
    )


def renewed(first: Offer, now: Offer) -> Offer:
    """GPUs, environments and what lanes lead to come and go while an agent runs; the rest stays as it was at first."""
    return replace(
        first,
        gpus=now.gpus,
        environments=now.environments,
        networks=now.networks,
        runtimes=now.runtimes,
        address=now.address,
    )


def address_of(settings: AgentSettings, said: Gangs) -> str:
    """As its owner says; else as this machine looks from outside, which may change while the agent runs."""
    return settings.gang_address or said.address or site_address(settings.server_url)


def _offered(runtime: Runtime) -> RuntimeOffer:
    images = RuntimeAbility.IMAGES in runtime.abilities
    gpus = RuntimeAbility.GPUS in runtime.abilities
    return RuntimeOffer(runtime.name, runtime.tier, runtime.networks, images, gpus)


def reach_of(settings: AgentSettings, policy: Policy) -> Reach:
    """Who opens lanes, for tasks and for builds; nobody, for a reason that is logged.

    Whether tasks are given any is for the offer to say: an environment is built without egress of the task. Gangs are
    tried only where a site is named.
    """
    egress, why = asyncio.run(probe(settings.data_dir))
    if not egress:
        log.info("no_egress", why=why)
    gangs = False
    if settings.site or policy.gangs.site:
        gangs, why = asyncio.run(probe_gangs(settings.data_dir))
        if not gangs:
            log.warning("no_gangs", why=why)
    if not egress and not gangs:
        return Reach()
    return Reach(networks_for(egress_of(policy), settings.data_dir), egress, gangs)


def egress_of(policy: Policy) -> EgressPolicy:
    """The owner's words about the network; `Invalid` names the one that cannot be."""
    said = policy.egress
    try:
        allow = tuple(parse_target(text) for text in said.allow)
        deny = tuple(parse_target(text) for text in said.deny)
        rate = parse_rate(said.rate) if said.rate else None
    except BadPolicy as error:
        raise Invalid(f"the policy's [egress]: {error}") from error
    known = EgressPolicy(allow=allow, rate_bytes_per_s=rate)
    return replace(known, deny=(*known.deny, *deny))


def environments_of(
    settings: AgentSettings, sandboxes: BuildRuntime, networks: sandbox_network.Networks | None
) -> Environments | None:
    """Who makes environments from packages; None: nobody, for a reason that is logged."""
    return environments_for(settings.data_dir, sandboxes, networks, os.environ, clock=boot_clock)


def lend() -> None:
    """Until told to stop; raises when it cannot or may not."""
    settings = AgentSettings()  # type: ignore[call-arg]  # from the environment
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    rules = Rulebook(settings.policy)
    policy = rules.policy
    detector = Detector(settings.simulate_gpus)
    gpus = detector.survey().gpus
    runtimes = make_all(RuntimeContext(settings, _real(gpus), policy.registries))
    can = {one.tier for one in runtimes}
    if not can & policy.tiers:
        raise Invalid(
            f"the policy's tiers leave no runtime; this machine can do {', '.join(sorted(can))}"
        )
    reach = reach_of(settings, policy)
    networks = reach.networks
    builders = [one for each in runtimes if (one := each.build_runtime()) is not None]
    outward = networks if reach.egress else None
    made = environments_of(settings, builders[0], outward) if builders else None
    sharing = None
    if builders and not settings.simulate_gpus:
        sharing = sharing_for(settings.data_dir, builders[0], parse_modes(settings.sharing))
    seats = None if sharing is None else sharing.seats
    means = Means(runtimes, networks, made, rules.allowed, seats)
    meter = LoadMeter(os.getpid())

    def offer() -> Offer:
        found = detector.survey().gpus
        if sharing is not None:
            found = sharing.describe(found)
        for runtime in runtimes:
            runtime.use_gpus(_real(found))
        return renewed(first, offer_of(settings, found, means, reach, policy.gangs))

    first = offer_of(settings, gpus, means, reach, policy.gangs)
    kin = Kin(os.getpid(), groups=lambda: _containers(runtimes))
    glimpse = glimpser(rules, Watch(detector.nvml, kin), Programs(kin), wall_clock, boot_clock)
    lookout = Lookout(rules, offer, lambda: facts_now(wall_clock(), meter), glimpse)
    serve(settings, means, lookout.first_offer(), lookout.look, lookout.glance)


def _containers(runtimes: Sequence[Runtime]) -> list[str]:
    return [id_ for one in runtimes for id_ in one.containers]


def _real(gpus: Sequence[Gpu]) -> list[Gpu]:
    return [gpu for gpu in gpus if not gpu.simulated]


def main() -> None:
    try:
        lend()
    except KeyboardInterrupt:  # before it could be stopped in good order
        sys.exit(128 + signal.SIGINT)
    except GpoolError as error:
        say_error(error)
        sys.exit(exit_code_of(error))
    except SandboxFailed as error:
        click.echo(f"gpool: this machine cannot isolate tasks: {error}", err=True)
        click.echo("  Look closer with: gpool node doctor", err=True)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()

"""`python -m gpool.cli.lend`: the agent, told by `GPOOL_AGENT_*` variables. Finds what the machine has and lends it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

import click

from gpool import __version__
from gpool.agent.daemon import boot_clock, wall_clock
from gpool.agent.detect import host_facts
from gpool.agent.detect.gpus import Detector
from gpool.agent.detect.owner import LoadMeter, facts_now
from gpool.agent.detect.processes import Programs
from gpool.agent.health import Watch
from gpool.agent.lookout import Lookout, Rulebook, glimpser
from gpool.agent.main import Means, serve
from gpool.agent.policy import Policy
from gpool.agent.runtime.bubblewrap import BubblewrapRuntime
from gpool.agent.runtime.calls import PYTHON
from gpool.agent.runtime.process import ProcessRuntime
from gpool.agent.runtime.protocol import SandboxFailed
from gpool.agent.sandboxes import Environments, Networks
from gpool.agent.settings import AgentSettings
from gpool.cli.main import FAILED, exit_code_of, say_error
from gpool.core import environments
from gpool.core.errors import GpoolError, Invalid
from gpool.core.model import Gpu, Network, Offer

Made = BubblewrapRuntime | ProcessRuntime


def offer_of(settings: AgentSettings, gpus: tuple[Gpu, ...], means: Means) -> Offer:
    """What this machine has: the slots its owner named, else all processors it may use."""
    facts = host_facts(settings.data_dir)
    named = "slots" in settings.model_fields_set
    runtimes = means.runtimes
    networks = {Network.NONE} if means.networks is None else set(Network)
    builds = {environments.IMAGE} if any(one.images for one in runtimes) else set()
    ready = {environments.DEFAULT}
    if means.environments is not None:
        builds.add(environments.PIP)
        ready |= means.environments.ready()
    return Offer(
        cpu_milli=settings.slots * 1000 if named else facts.cpu_milli,
        memory_bytes=facts.memory_bytes,
        disk_bytes=facts.disk_bytes,
        gpus=gpus,
        pythons=frozenset({PYTHON}),
        tiers=frozenset(one.tier for one in runtimes),
        environments=frozenset(ready),
        builds=frozenset(builds),
        networks=frozenset(networks & {given for one in runtimes for given in one.networks}),
        hostname=facts.hostname,
        agent_version=__version__,
    )


def runtimes_of(settings: AgentSettings, gpus: Sequence[Gpu], policy: Policy) -> list[Made]:
    """Bubblewrap for everyone; no isolation only where the owner asked for it. First choice first within a tier."""
    made: list[Made] = [BubblewrapRuntime(settings.data_dir, gpus=gpus)]
    if settings.allow_process:
        made.append(ProcessRuntime(settings.data_dir, gpus=gpus))
    return [one for one in made if one.tier in policy.tiers]


def networks_of(settings: AgentSettings, policy: Policy) -> Networks | None:  # noqa: ARG001 - for who builds them
    """Who opens lanes for tasks that ask for a network, by `policy.egress`; None: nobody."""
    return None


def environments_of(settings: AgentSettings) -> Environments | None:  # noqa: ARG001 - for who builds them
    """Who makes environments from packages; None: nobody."""
    return None


def lend() -> None:
    """Until told to stop; raises when it cannot or may not."""
    settings = AgentSettings()  # type: ignore[call-arg]  # from the environment
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    rules = Rulebook(settings.policy)
    policy = rules.policy
    detector = Detector(settings.simulate_gpus)
    gpus = detector.survey().gpus
    runtimes = runtimes_of(settings, _real(gpus), policy)
    if not runtimes:
        raise Invalid("the policy's tiers leave no runtime; this machine can do 'container'")
    means = Means(runtimes, networks_of(settings, policy), environments_of(settings))
    meter = LoadMeter(os.getpid())

    def offer() -> Offer:
        """GPUs and environments come and go while an agent runs."""
        found = detector.survey().gpus
        for runtime in runtimes:
            runtime.use_gpus(_real(found))
        return replace(
            first, gpus=found, environments=offer_of(settings, found, means).environments
        )

    first = offer_of(settings, gpus, means)
    glimpse = glimpser(rules, Watch(detector.nvml), Programs(os.getpid()), wall_clock, boot_clock)
    lookout = Lookout(rules, offer, lambda: facts_now(wall_clock(), meter), glimpse)
    serve(settings, means, lookout.first_offer(), lookout.look, lookout.glance)


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

"""`python -m gpool.cli.lend`: the agent, told by `GPOOL_AGENT_*` variables. Finds what the machine has and lends it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

import click

from gpool import __version__
from gpool.agent.detect import detect, host_facts
from gpool.agent.main import serve
from gpool.agent.runtime.bubblewrap import BubblewrapRuntime
from gpool.agent.runtime.calls import PYTHON
from gpool.agent.runtime.process import ProcessRuntime
from gpool.agent.runtime.protocol import SandboxFailed
from gpool.agent.settings import AgentSettings
from gpool.cli.main import FAILED, exit_code_of, say_error
from gpool.core.errors import GpoolError
from gpool.core.model import Gpu, Offer, Tier


def offer_of(settings: AgentSettings, gpus: tuple[Gpu, ...], tiers: frozenset[Tier]) -> Offer:
    """What this machine lends: the slots its owner named, else all processors it may use."""
    facts = host_facts(settings.data_dir)
    named = "slots" in settings.model_fields_set
    return Offer(
        cpu_milli=settings.slots * 1000 if named else facts.cpu_milli,
        memory_bytes=facts.memory_bytes,
        disk_bytes=facts.disk_bytes,
        gpus=gpus,
        pythons=frozenset({PYTHON}),
        tiers=tiers,
        hostname=facts.hostname,
        agent_version=__version__,
    )


def runtimes_of(
    settings: AgentSettings, gpus: Sequence[Gpu]
) -> dict[Tier, BubblewrapRuntime | ProcessRuntime]:
    """Bubblewrap for everyone; no isolation only where the owner asked for it."""
    made: dict[Tier, BubblewrapRuntime | ProcessRuntime] = {
        Tier.CONTAINER: BubblewrapRuntime(settings.data_dir, gpus=gpus)
    }
    if settings.allow_process:
        made[Tier.NONE] = ProcessRuntime(settings.data_dir, gpus=gpus)
    return made


def lend() -> None:
    """Until told to stop; raises when it cannot or may not."""
    settings = AgentSettings()  # type: ignore[call-arg]  # from the environment
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    gpus = detect(settings.simulate_gpus)
    runtimes = runtimes_of(settings, _real(gpus))
    offer = offer_of(settings, gpus, frozenset(runtimes))

    def look() -> Offer:
        """Only GPUs come and go while an agent runs."""
        found = detect(settings.simulate_gpus)
        for runtime in runtimes.values():
            runtime.use_gpus(_real(found))
        return replace(offer, gpus=found)

    serve(settings, runtimes, offer, look)


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

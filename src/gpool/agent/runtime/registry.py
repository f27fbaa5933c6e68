"""The registry of runtimes; nothing else in the agent names them.

A new runtime is a module with a class (protocol `Runtime`) and an entry in `BUILT_IN`, or an entry point of the group
`gpool.runtimes` in an installed package, which loads a `RuntimeKind`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

import structlog

from gpool.agent.machine.detection import services
from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime
from gpool.agent.runtime.microvm import requirements
from gpool.agent.runtime.microvm.runtime import MicrovmRuntime
from gpool.agent.runtime.process import ProcessRuntime
from gpool.agent.runtime.protocol import Runtime, SandboxFailed
from gpool.core.model import Gpu, Tier

GROUP = "gpool.runtimes"
log = structlog.get_logger(__name__)


class RuntimeSettings(Protocol):
    data_dir: Path
    docker: bool
    microvm: bool
    allow_process: bool


@dataclass(frozen=True, slots=True)
class RuntimeContext:
    settings: RuntimeSettings
    gpus: Sequence[Gpu] = ()  # real ones
    registries: Sequence[str] = ()  # of images, on private addresses, that the owner allows

    @property
    def data_dir(self) -> Path:
        return self.settings.data_dir


@dataclass(frozen=True, slots=True)
class RuntimeKind:
    """`name` and `tier` equal those of the runtimes it makes."""

    name: str
    tier: Tier
    make: Callable[[RuntimeContext], Runtime]
    """Raises `SandboxFailed` if this machine cannot run it after all."""
    unavailable: Callable[[RuntimeContext], str | None] = lambda _context: None
    """Returns why this machine or its owner does not offer it; None if it does. Quick; starts nothing."""
    required: bool = False  # without it the agent does not start


def _docker_unavailable(context: RuntimeContext) -> str | None:
    if not context.settings.docker:
        return "switched off by the owner"
    found = services.docker()
    return None if found.version else (found.refused or "no container engine answers")


def _docker(context: RuntimeContext) -> Runtime:
    from gpool.agent.runtime.docker.runtime import DockerRuntime  # noqa: PLC0415 - 0.2 s

    return DockerRuntime(context.data_dir, gpus=context.gpus, registries=context.registries)


def _microvm_unavailable(context: RuntimeContext) -> str | None:
    return requirements.missing() if context.settings.microvm else "switched off by the owner"


def _process_unavailable(context: RuntimeContext) -> str | None:
    return None if context.settings.allow_process else "not allowed by the owner"


BUILT_IN = (
    RuntimeKind(
        BubblewrapRuntime.name,
        BubblewrapRuntime.tier,
        lambda context: BubblewrapRuntime(context.data_dir, gpus=context.gpus),
        required=True,  # environments are built in it
    ),
    RuntimeKind("docker", Tier.CONTAINER, _docker, _docker_unavailable),
    RuntimeKind(
        MicrovmRuntime.name,
        MicrovmRuntime.tier,
        lambda context: MicrovmRuntime(context.data_dir),
        _microvm_unavailable,
    ),
    RuntimeKind(
        ProcessRuntime.name,
        ProcessRuntime.tier,
        lambda context: ProcessRuntime(context.data_dir, gpus=context.gpus),
        _process_unavailable,
    ),
)
"""In order of preference within a tier."""


def known() -> tuple[RuntimeKind, ...]:
    return (*BUILT_IN, *(entry.load() for entry in entry_points(group=GROUP)))


def make_all(context: RuntimeContext, kinds: Iterable[RuntimeKind] | None = None) -> list[Runtime]:
    """In order of preference within a tier; logs why others are missing. Raises `SandboxFailed` without a required one. The
    owner's policy decides later which are lent.
    """
    made: list[Runtime] = []
    for kind in known() if kinds is None else kinds:
        why = kind.unavailable(context)
        if why is None:
            try:
                made.append(kind.make(context))
                continue
            except SandboxFailed as failure:
                if kind.required:
                    raise
                log.warning("runtime_failed", runtime=kind.name, why=str(failure))
                continue
        log.info("runtime_unavailable", runtime=kind.name, why=why)
    return made

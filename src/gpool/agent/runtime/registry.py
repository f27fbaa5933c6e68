"""The registry of runtimes, which nothing else in the agent names, and the self-check of a runtime after a failed start.

A new runtime is a module with a class (protocol `Runtime`) and an entry in `BUILT_IN`, or an entry point of the group
`gpool.runtimes` in an installed package, which loads a `RuntimeKind`.

It starts the simplest sandbox, at most every `AGAIN_AFTER_US`, or asks the engine. Its result is evidence against this
node, so doubt (a time-out) counts as unclear.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Protocol

import structlog

from gpool.agent.machine import host
from gpool.agent.running.sandboxes import run_to_completion, start_sandbox
from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime
from gpool.agent.runtime.microvm import requirements
from gpool.agent.runtime.microvm.passthrough import DedicatedCards
from gpool.agent.runtime.microvm.runtime import MicrovmRuntime
from gpool.agent.runtime.process import ProcessRuntime
from gpool.agent.runtime.protocol import (
    CommandJob,
    Runtime,
    RuntimeAbility,
    SandboxFailed,
    SandboxLimits,
)
from gpool.core.model import MIB, EndReason, Fault, Gpu, Tier

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
    gpus: Sequence[Gpu] = ()  # real ones, without those dedicated to guests
    registries: Sequence[str] = ()  # of images, on private addresses, that the owner allows
    cards: DedicatedCards | None = None  # GPUs of guests

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
    found = host.docker()
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
        lambda context: MicrovmRuntime(context.data_dir, cards=context.cards),
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
    return (*BUILT_IN, *installed(entry_points(group=GROUP)))


def installed(entries: Iterable[EntryPoint]) -> Iterator[RuntimeKind]:
    """Runtimes of installed packages. One that does not load is logged and left out: the node lends without it."""
    for entry in entries:
        try:
            kind = entry.load()
        except Exception as error:  # noqa: BLE001 - a foreign package may raise anything
            log.warning("runtime_not_loaded", runtime=entry.name, why=repr(error))
            continue
        if isinstance(kind, RuntimeKind):
            yield kind
        else:
            log.warning("runtime_not_loaded", runtime=entry.name, why=f"{kind!r} is no RuntimeKind")


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


AGAIN_AFTER_US = 10_000_000
"""How long a result is valid."""
WITHIN_S = 30.0
"""A busy machine may be slow without being broken."""
SIMPLEST = CommandJob(
    ("/bin/true",), (), (), (), SandboxLimits(1000, 256 * MIB, disk_bytes=16 * MIB)
)


class RuntimeSelfCheck:
    def __init__(self, clock: Callable[[], int], within_s: float = WITHIN_S) -> None:
        self._clock = clock
        self._within_s = within_s
        self._found: dict[
            str, tuple[int, str]
        ] = {}  # by runtime: when, and the error ("" for none)
        self._locks: dict[str, asyncio.Lock] = {}
        self.checks = 0  # so far

    async def fault(self, runtime: Runtime, /) -> Fault:
        async with self._locks.setdefault(runtime.name, asyncio.Lock()):
            known = self._found.get(runtime.name)
            if known is None or self._clock() >= known[0] + AGAIN_AFTER_US:
                why = await self._check(runtime)  # may take longer than a result is valid
                known = (self._clock(), why)
                self._found[runtime.name] = known
        return Fault.NODE if known[1] else Fault.UNCLEAR

    async def _check(self, runtime: Runtime) -> str:
        self.checks += 1
        try:
            async with asyncio.timeout(self._within_s):
                why = await _error_of(runtime)
        except TimeoutError:
            log.warning("self_check_timed_out", runtime=runtime.name)
            return ""
        if why:
            log.error("runtime_cannot_start", runtime=runtime.name, why=why)
        return why


async def _error_of(runtime: Runtime) -> str:
    try:
        known = await runtime.self_check()
        if known is not None or RuntimeAbility.IMAGES in runtime.abilities:
            return known or ""
        return await _cannot_start(runtime)
    except (SandboxFailed, OSError) as error:
        if isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError):
            raise TimeoutError from error  # the runtime's own time-out
        return str(error) or type(error).__name__


async def _cannot_start(runtime: Runtime) -> str:
    sandbox = await start_sandbox(runtime, runtime.start_command(SIMPLEST))
    try:
        async for _ in sandbox.output():
            pass
        ended = await sandbox.ended()
    finally:
        await run_to_completion(sandbox.kill)
        await run_to_completion(sandbox.remove)
    return (ended.detail or "it ended") if ended.reason is EndReason.SANDBOX_FAILED else ""

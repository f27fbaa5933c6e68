"""The context of the executors: chooses a sandbox's runtime and prepares environment, network and GPU share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from gpool.agent.network.policy import Egress, Gang
from gpool.agent.running.artifact_cache import ArtifactCache
from gpool.agent.runtime.protocol import (
    CommandSandbox,
    GpuShare,
    PartFailed,
    PreparedEnvironment,
    RunnerSandbox,
    Runtime,
    RuntimeAbility,
    SandboxExit,
    SandboxFailed,
    SandboxLimits,
    SandboxNetwork,
    WarmRunner,
)
from gpool.agent.runtime.runner_calls import PYTHON
from gpool.agent.state_machine.instructions import Event
from gpool.agent.state_machine.warm_plan import WarmKey
from gpool.core import gangs as rendezvous
from gpool.core.model import (
    Allocation,
    EndReason,
    Fault,
    Network,
    Offer,
    Phase,
    Recipe,
    Slice,
    TaskSpec,
    Tier,
)
from gpool.core.specs import fields
from gpool.observability.tracing import Tracing
from gpool.transfer.requests import LeaseRef

S = TypeVar("S", CommandSandbox, RunnerSandbox, WarmRunner)
KILLED = 137
HOSTNAME = "sandbox"
"""Hostname of every sandbox; in a gang it resolves to the member's address."""
PROCESSES_A_CPU = 128
"""Threads included: PyTorch starts a thread for each processor in each process, Ray a worker of about twenty threads for each
processor.
"""

log = structlog.get_logger(__name__)


class Uploader(Protocol):
    async def upload(
        self, file: Path, sha256: str, size: int, lease: LeaseRef | None = None
    ) -> None: ...


class OpenNetwork(Protocol):
    @property
    def lane(self) -> SandboxNetwork: ...

    def report_to(self, say: Callable[[str], None], /) -> None:
        """Send lines about refused lookups, a few at most, until `close` has returned."""
        ...

    async def close(self) -> None: ...


class NetworkProvider(Protocol):
    """Leaves nothing behind if cancelled. `start` first removes leftovers of an earlier agent; `close` restores the host."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def open(self, wants: Egress | Gang, /) -> OpenNetwork: ...


class EnvironmentProvider(Protocol):
    """`sweep` comes first: it finds environments of an earlier agent."""

    async def sweep(self) -> None: ...

    async def close(self) -> None: ...

    def prepare(
        self,
        name: str,
        recipe: Recipe | None,
        said: Callable[[str], None],
        limits: SandboxLimits | None,
        /,
    ) -> contextlib.AbstractAsyncContextManager[PreparedEnvironment | None]:
        """None: the agent's own Python is enough. `said` receives progress lines; a build has the `limits` of the lease, and
        none is begun without. Raises `SandboxFailed`.
        """
        ...

    def ready(self) -> frozenset[str]: ...

    def pythons(self) -> frozenset[str]: ...


class GpuShareProvider(Protocol):
    """Divides real GPUs among sandboxes. `start` and `close` restore changed settings."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def seat(
        self, user: int, slices: Sequence[Slice], /
    ) -> contextlib.AbstractAsyncContextManager[GpuShare | None]:
        """None: no slice is of a real GPU. Raises `SandboxFailed`."""
        ...


@dataclass(frozen=True, slots=True)
class WarmedSandbox:
    sandbox: WarmRunner
    resources: contextlib.AsyncExitStack

    async def remove(self) -> None:
        await self.sandbox.remove()
        await self.resources.aclose()


class WarmSandboxes(Protocol):
    def take(self, key: WarmKey, /) -> WarmedSandbox | None: ...

    def offered(self, offer: Offer, /) -> None: ...

    def lease_began(self, holder: object, memory_bytes: int, /) -> None:
        """Count memory as leased; a waiting runner holds no lease."""
        ...

    def lease_ended(self, holder: object, /) -> None: ...


class SelfCheck(Protocol):
    async def fault(self, runtime: Runtime, /) -> Fault: ...


@dataclass(frozen=True, slots=True)
class PolicyLimits:
    tiers: frozenset[Tier] = frozenset(Tier)
    egress: bool = True
    gangs: bool = True


@dataclass(frozen=True, slots=True)
class ExecutorContext:
    """`runtimes` are in order of preference within a tier."""

    runtimes: Sequence[Runtime]
    cache: ArtifactCache
    uploader: Uploader
    scratch: Path
    feed: Callable[[Event], None]
    clock: Callable[[], int]
    networks: NetworkProvider | None = None
    environments: EnvironmentProvider | None = None
    allowed: Callable[[], PolicyLimits] = PolicyLimits
    warm: WarmSandboxes | None = None
    cleaning: set[asyncio.Task[None]] = field(default_factory=set)
    gpu_shares: GpuShareProvider | None = None
    self_check: SelfCheck | None = None
    survey: Callable[[], Awaitable[None]] | None = None  # returns once the current offer was sent
    tracing: Tracing | None = None

    async def with_fault(self, ended: SandboxExit, runtime: Runtime | None) -> SandboxExit:
        """Add the fault that a self-check finds, if nothing of the task ran. If a part of the node failed, the offer without it is
        sent before the end.
        """
        if ended.fault is Fault.PART and self.survey is not None:
            await self.survey()
        if ended.fault is not Fault.UNCLEAR or ended.reason is not EndReason.SANDBOX_FAILED:
            return ended
        if runtime is None or self.self_check is None:
            return ended
        return replace(ended, fault=await self.self_check.fault(runtime))

    @contextlib.asynccontextmanager
    async def gpu_share_for(
        self, runtime: Runtime, user: int, slices: Sequence[Slice]
    ) -> AsyncIterator[GpuShare | None]:
        """The tier without isolation, for owners only, uses GPUs directly."""
        if self.gpu_shares is None or not slices or runtime.tier is Tier.NONE:
            yield None
            return
        async with self.gpu_shares.seat(user, slices) as share:
            yield share

    async def remove_sandbox(self, sandbox: CommandSandbox | RunnerSandbox) -> None:
        """Return once nothing of it runs; its files are removed in the background."""
        try:
            await run_to_completion(sandbox.kill)
        finally:
            cleaner = asyncio.create_task(sandbox.remove())
            self.cleaning.add(cleaner)
            cleaner.add_done_callback(self._removed)

    def _removed(self, cleaner: asyncio.Task[None]) -> None:
        self.cleaning.discard(cleaner)
        if not cleaner.cancelled() and (error := cleaner.exception()) is not None:
            log.error("sandbox_not_removed", exc_info=error)

    def runtime_for(self, spec: TaskSpec, owner: bool) -> Runtime:
        """Weakest runtime that has the task's tier, network and image support.

        A gang needs egress: only such runtimes can join a sandbox network. The tier without isolation is for the owner's tasks
        that ask for it. The node does not rely on the scheduler's checks.
        """
        needs = spec.requirements
        floor = needs.tier
        if floor is Tier.NONE and not owner:
            raise SandboxFailed(
                "tier 'none' runs without isolation: only tasks of this node's owner may"
            )
        lent = [one for one in self.runtimes if one.tier in self.allowed().tiers]
        strong = [one for one in lent if one.tier.strength >= floor.strength]
        if not strong or (floor is Tier.NONE and all(r.tier is not floor for r in strong)):
            raise PartFailed(f"this node has no runtime of tier {floor.value!r}")
        fitting = [
            one
            for one in strong
            if (RuntimeAbility.IMAGES in one.abilities) == bool(image_of(spec))
        ]
        if not fitting:
            what = f"the image {image_of(spec)!r}" if image_of(spec) else "a task without an image"
            raise PartFailed(f"no runtime of tier {floor.value!r} here runs {what}")
        if needs.nodes > 1:
            fitting = [
                one
                for one in fitting
                if Network.EGRESS in one.networks
                and RuntimeAbility.EGRESS_ONLY not in one.abilities
            ]
            if not fitting or not self.allowed().gangs:
                raise PartFailed("this node takes no members of gangs")
        fitting = [one for one in fitting if needs.network in one.networks]
        if not fitting:
            raise PartFailed(f"this node gives no network {needs.network.value!r}")
        return min(fitting, key=lambda one: one.tier.strength)  # the first of equals

    @contextlib.asynccontextmanager
    async def prepare(
        self,
        spec: TaskSpec,
        reach: Callable[[Phase], None],
        said: Callable[[str], None],
        limits: SandboxLimits,
        gang: Gang | None = None,
    ) -> AsyncIterator[tuple[PreparedEnvironment | None, SandboxNetwork | None]]:
        async with contextlib.AsyncExitStack() as stack:
            prepared = None
            named = environment_of(spec)
            if named is not None:
                if self.environments is None:
                    raise PartFailed(f"this node has no environment {spec.environment!r}")
                reach(Phase.BUILD)
                making = self.environments.prepare(*named, said, limits)
                prepared = await stack.enter_async_context(making)
            reach(Phase.START)
            network = None
            outward = spec.requirements.network is not Network.NONE
            if outward and (self.networks is None or not self.allowed().egress):
                raise PartFailed(f"this node gives no network {spec.requirements.network.value!r}")
            if gang is not None and (self.networks is None or not self.allowed().gangs):
                raise PartFailed("this node takes no members of gangs")
            if self.networks is not None and (outward or gang is not None):
                opened = await self.networks.open(Egress() if gang is None else gang)
                stack.push_async_callback(run_to_completion, opened.close)
                opened.report_to(said)
                network = opened.lane
                if gang is not None:
                    names = rendezvous.hosts(gang.rank, len(gang.peers), HOSTNAME)
                    network = replace(network, hosts=names)
            yield prepared, network


def image_of(spec: TaskSpec) -> str:
    return spec.recipe.image if spec.recipe is not None else ""


def environment_of(spec: TaskSpec) -> tuple[str, Recipe | None] | None:
    recipe = spec.recipe
    minor = spec.requirements.python
    if recipe is None and minor not in (None, PYTHON):
        recipe = Recipe(python=minor)  # a function of another Python than the agent's
    if image_of(spec) or (spec.environment == fields.DEFAULT_ENVIRONMENT and recipe is None):
        return None
    return spec.environment, recipe


def warm_key_of(runtime: Runtime, spec: TaskSpec, allocation: Allocation) -> WarmKey | None:
    isolated = spec.requirements.network is Network.NONE
    # A part of a GPU needs a GPU share first.
    whole = all(part.share_milli == 1000 for part in allocation.slices)
    if not spec.preload or not isolated or not whole:
        return None
    if image_of(spec) or RuntimeAbility.WARM_RUNNERS not in runtime.abilities:
        return None
    return WarmKey(
        runtime.name,
        environment_of(spec),
        spec.requirements.python or PYTHON,
        spec.preload,
        allocation.slices,
        limits_of(spec, allocation),
    )


def limits_of(spec: TaskSpec, allocation: Allocation) -> SandboxLimits:
    limits = SandboxLimits(allocation.cpu_milli, allocation.memory_bytes)
    processes = max(limits.processes, allocation.cpu_milli * PROCESSES_A_CPU // 1000)
    limits = replace(limits, processes=processes)
    disk = spec.requirements.disk_bytes
    return limits if disk is None else replace(limits, disk_bytes=disk)


async def start_sandbox(runtime: Runtime, start: Awaitable[S]) -> S:
    """If cancelled, let the start end and remove the sandbox, so that none lacks an executor."""
    starting = asyncio.ensure_future(start)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        if RuntimeAbility.CANCELLABLE_START in runtime.abilities:
            starting.cancel()
        with contextlib.suppress(SandboxFailed, asyncio.CancelledError):
            sandbox = await starting
            await sandbox.kill()
            await sandbox.remove()
        raise


async def run_to_completion(work: Callable[[], Awaitable[None]]) -> None:
    """Not cancellable: else a port or uid would stay taken."""
    working = asyncio.ensure_future(work())
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    working.result()


def executor_failure(task: asyncio.Task[None]) -> SandboxExit | None:
    """End for a bug in the executor: the state machine must not wait."""
    if task.cancelled() or (error := task.exception()) is None:
        return None
    log.error("executor_failed", exc_info=error)
    return SandboxExit(125, EndReason.SANDBOX_FAILED, f"a fault in the agent: {error!r}")

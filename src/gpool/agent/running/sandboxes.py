"""What every keeper of a sandbox needs, and how the place for one is got ready: runtime, environment, network.

The doors through which environments and networks come are here; whoever builds them lies behind. Decides nothing.
"""

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
from gpool.core import rendezvous
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
from gpool.core.specs import environment as environments
from gpool.transfer.artifacts import LeaseRef

S = TypeVar("S", CommandSandbox, RunnerSandbox, WarmRunner)
KILLED = 137
HOSTNAME = "sandbox"
"""Every sandbox's own; in a gang it resolves to the member's address."""
OPEN_FILES_OF_GANGS = 8192
"""A member may have connections to all others, several times."""
PROCESSES_A_CPU = 128
"""For a gang's member, threads counted too: Ray starts a worker of some twenty threads for each processor."""

log = structlog.get_logger(__name__)


class Uploader(Protocol):
    async def upload(
        self, file: Path, sha256: str, size: int, lease: LeaseRef | None = None
    ) -> None: ...


class OpenLane(Protocol):
    """A lane somebody opened; `close` it once nothing runs in it any more."""

    @property
    def lane(self) -> SandboxNetwork: ...

    async def close(self) -> None: ...


class Networks(Protocol):
    """Opens a private network for one sandbox, by the owner's rules. Cancelled half-way, it leaves nothing behind.

    `start` comes first and sweeps what an earlier agent left; `close` leaves the host as it was.
    """

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def open(self, wants: Egress | Gang, /) -> OpenLane:
        """Raises `SandboxFailed`."""
        ...


class Environments(Protocol):
    """Makes environments, or finds them ready. `sweep` comes first: it finds what an earlier agent made."""

    async def sweep(self) -> None: ...

    async def close(self) -> None: ...

    def prepare(
        self, name: str, recipe: Recipe | None, said: Callable[[str], None], /
    ) -> contextlib.AbstractAsyncContextManager[PreparedEnvironment | None]:
        """Kept for as long as the block lasts; None: the agent's own Python serves.

        `said` is told of progress, a line at a time. Raises `SandboxFailed` where it cannot be made.
        """
        ...

    def ready(self) -> frozenset[str]:
        """The names of those that lie ready."""
        ...

    def pythons(self) -> frozenset[str]:
        """The minors there are on this machine."""
        ...


class Seats(Protocol):
    """Shares out real GPUs. `start` comes first and sets back what an earlier agent left; `close` does so at the end."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def seat(
        self, user: int, slices: Sequence[Slice], /
    ) -> contextlib.AbstractAsyncContextManager[GpuShare | None]:
        """For one sandbox, kept for as long as the block lasts; None: the slices are of no real GPU.

        Raises `SandboxFailed`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Warmed:
    """A warm sandbox and what it stands on, which stays for as long as it lives."""

    sandbox: WarmRunner
    standing: contextlib.AsyncExitStack

    async def remove(self) -> None:
        await self.sandbox.remove()
        await self.standing.aclose()


class WarmSandboxes(Protocol):
    """Has sandboxes ready that are nobody's yet, as far as memory is idle."""

    def take(self, key: WarmKey, /) -> Warmed | None:
        """One for work with this key, yours from now on; None: start one."""
        ...

    def offered(self, offer: Offer, /) -> None: ...

    def lease_began(self, holder: object, memory_bytes: int, /) -> None:
        """Memory that was idle is somebody's now; a runner that waits for its user's next call holds no lease."""
        ...

    def lease_ended(self, holder: object, /) -> None: ...


class SelfCheck(Protocol):
    """Finds out whether the fault is this node's when something could not be started; see `gpool.agent.running.self_check`."""

    async def fault(self, runtime: Runtime, /) -> Fault: ...


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the owner's rules let a node give."""

    tiers: frozenset[Tier] = frozenset(Tier)
    egress: bool = True
    gangs: bool = True


@dataclass(frozen=True, slots=True)
class Equipment:
    """What every sandbox's keeper needs. `runtimes` are in the order of preference within a tier."""

    runtimes: Sequence[Runtime]
    cache: ArtifactCache
    uploader: Uploader
    scratch: Path
    feed: Callable[[Event], None]
    clock: Callable[[], int]
    networks: Networks | None = None
    environments: Environments | None = None
    allowed: Callable[[], Allowed] = Allowed
    warm: WarmSandboxes | None = None
    cleaning: set[asyncio.Task[None]] = field(default_factory=set)
    seats: Seats | None = None
    checkup: SelfCheck | None = None
    look_again: Callable[[], Awaitable[None]] | None = None  # at what the machine lends now

    async def told(self, ended: SandboxExit, runtime: Runtime | None) -> SandboxExit:
        """With what this node finds out about itself, where nothing of the task ran. What it lends no more, it says first."""
        if ended.fault is Fault.PART and self.look_again is not None:
            await self.look_again()
        if ended.fault is not Fault.UNCLEAR or ended.reason is not EndReason.SANDBOX_FAILED:
            return ended
        if runtime is None or self.checkup is None:
            return ended
        return replace(ended, fault=await self.checkup.fault(runtime))

    @contextlib.asynccontextmanager
    async def seat_for(
        self, runtime: Runtime, user: int, slices: Sequence[Slice]
    ) -> AsyncIterator[GpuShare | None]:
        """GPUs ready for one sandbox; without isolation, where only owners are, they are as they are."""
        if self.seats is None or not slices or runtime.tier is Tier.NONE:
            yield None
            return
        async with self.seats.seat(user, slices) as seat:
            yield seat

    async def clear_away(self, sandbox: CommandSandbox | RunnerSandbox) -> None:
        """Returns once nothing of it runs; its files go while the next one starts."""
        try:
            await to_its_end(sandbox.kill)
        finally:
            cleaner = asyncio.create_task(sandbox.remove())
            self.cleaning.add(cleaner)
            cleaner.add_done_callback(self._cleared)

    def _cleared(self, cleaner: asyncio.Task[None]) -> None:
        self.cleaning.discard(cleaner)
        if not cleaner.cancelled() and (error := cleaner.exception()) is not None:
            log.error("sandbox_not_removed", exc_info=error)

    def runtime_for(self, spec: TaskSpec, owner: bool) -> Runtime:
        """The weakest runtime here that is strong enough and gives what is asked for: network, image. A gang needs a
        lane, which those enter that give a way out.

        Without isolation only for the owner, who must ask for it. The scheduler sees to all that as well; a node does
        not take its word for it.
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
            fitting = [one for one in fitting if Network.EGRESS in one.networks]
            if not fitting or not self.allowed().gangs:
                raise PartFailed("this node takes no members of gangs")
        fitting = [one for one in fitting if needs.network in one.networks]
        if not fitting:
            raise PartFailed(f"this node gives no network {needs.network.value!r}")
        return min(fitting, key=lambda one: one.tier.strength)  # the first of equals

    @contextlib.asynccontextmanager
    async def place_for(
        self,
        spec: TaskSpec,
        reach: Callable[[Phase], None],
        said: Callable[[str], None],
        gang: Gang | None = None,
    ) -> AsyncIterator[tuple[PreparedEnvironment | None, SandboxNetwork | None]]:
        """Environment and lane of one sandbox, kept while the block lasts; `reach` is told of each phase."""
        async with contextlib.AsyncExitStack() as stack:
            prepared = None
            named = environment_of(spec)
            if named is not None:
                if self.environments is None:
                    raise PartFailed(f"this node has no environment {spec.environment!r}")
                reach(Phase.BUILD)
                making = self.environments.prepare(*named, said)
                prepared = await stack.enter_async_context(making)
            reach(Phase.START)
            lane = None
            outward = spec.requirements.network is not Network.NONE
            if outward and (self.networks is None or not self.allowed().egress):
                raise PartFailed(f"this node gives no network {spec.requirements.network.value!r}")
            if gang is not None and (self.networks is None or not self.allowed().gangs):
                raise PartFailed("this node takes no members of gangs")
            if self.networks is not None and (outward or gang is not None):
                opened = await self.networks.open(Egress() if gang is None else gang)
                stack.push_async_callback(to_its_end, opened.close)
                lane = opened.lane
                if gang is not None:
                    names = rendezvous.hosts(gang.rank, len(gang.peers), HOSTNAME)
                    lane = replace(lane, hosts=names, gang=True)
            yield prepared, lane


def image_of(spec: TaskSpec) -> str:
    return spec.recipe.image if spec.recipe is not None else ""


def environment_of(spec: TaskSpec) -> tuple[str, Recipe | None] | None:
    """By name and recipe; None: the agent's own Python serves, or an image."""
    recipe = spec.recipe
    minor = spec.requirements.python
    if recipe is None and minor not in (None, PYTHON):
        recipe = Recipe(python=minor)  # a function of another Python than the agent's
    if image_of(spec) or (spec.environment == environments.DEFAULT and recipe is None):
        return None
    return spec.environment, recipe


def warm_key_of(runtime: Runtime, spec: TaskSpec, allocation: Allocation) -> WarmKey | None:
    """What a warm sandbox would have to be prepared for; None: none could be."""
    isolated = spec.requirements.network is Network.NONE
    whole = all(part.share_milli == 1000 for part in allocation.slices)  # others need a seat first
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
    if spec.requirements.nodes > 1:
        processes = max(limits.processes, allocation.cpu_milli * PROCESSES_A_CPU // 1000)
        limits = replace(limits, open_files=OPEN_FILES_OF_GANGS, processes=processes)
    disk = spec.requirements.disk_bytes
    return limits if disk is None else replace(limits, disk_bytes=disk)


async def started(runtime: Runtime, start: Awaitable[S]) -> S:
    """A start that is called off half-way ends, and is undone: no sandbox is left without a keeper."""
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


async def to_its_end(work: Callable[[], Awaitable[None]]) -> None:
    """Whoever is called off while it clears away still does: nobody else would, and its port or its uid stays taken."""
    working = asyncio.ensure_future(work())
    called_off: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError as error:
            called_off = error
    if called_off is not None:
        raise called_off
    working.result()


def fault_of(task: asyncio.Task[None]) -> SandboxExit | None:
    """A bug of ours must not leave the session waiting for an end."""
    if task.cancelled() or (error := task.exception()) is None:
        return None
    log.error("keeper_failed", exc_info=error)
    return SandboxExit(125, EndReason.SANDBOX_FAILED, f"a fault in the agent: {error!r}")

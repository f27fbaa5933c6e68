"""Discovery of parts that appear while the agent runs: a package that the owner installs needs no restart.

Asks the same requirements as the start of the agent and as `gpool node doctor`. Removes no part.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from gpool.agent.environments.building import find_uv
from gpool.agent.network import factory
from gpool.agent.network.policy import Egress, Gang
from gpool.agent.running.sandboxes import EnvironmentProvider, NetworkProvider, OpenNetwork
from gpool.agent.runtime.protocol import (
    PartFailed,
    PreparedEnvironment,
    Runtime,
    SandboxFailed,
    SandboxLimits,
)
from gpool.agent.runtime.registry import RuntimeContext, RuntimeKind
from gpool.agent.services import NetworkSupport
from gpool.core.model import Recipe

log = structlog.get_logger(__name__)

EVERY_S = 30.0


class LateNetworks:
    """Sandbox networks once the host has what they need."""

    def __init__(self, inner: NetworkProvider | None = None) -> None:
        self.inner = inner

    async def start(self) -> None:
        if self.inner is not None:
            await self.inner.start()

    async def close(self) -> None:
        if self.inner is not None:
            await self.inner.close()

    async def open(self, wants: Egress | Gang, /) -> OpenNetwork:
        if self.inner is None:
            raise PartFailed("this node gives no network")
        return await self.inner.open(wants)


class LateEnvironments:
    """Environments once uv and an index are in reach; until then `pythons` is empty."""

    def __init__(self, inner: EnvironmentProvider | None = None) -> None:
        self.inner = inner

    async def sweep(self) -> None:
        if self.inner is not None:
            await self.inner.sweep()

    async def close(self) -> None:
        if self.inner is not None:
            await self.inner.close()

    @asynccontextmanager
    async def prepare(
        self,
        name: str,
        recipe: Recipe | None,
        said: Callable[[str], None],
        limits: SandboxLimits | None,
        /,
    ) -> AsyncIterator[PreparedEnvironment | None]:
        if self.inner is None:
            raise PartFailed(f"this node has no environment {name[:80]!r}")
        async with self.inner.prepare(name, recipe, said, limits) as prepared:
            yield prepared

    def ready(self) -> frozenset[str]:
        return frozenset() if self.inner is None else self.inner.ready()

    def pythons(self) -> frozenset[str]:
        return frozenset() if self.inner is None else self.inner.pythons()


@dataclass(frozen=True, slots=True)
class PartMakers:
    """Blocking functions that make one part; they run in a thread."""

    networks: Callable[[], NetworkSupport]
    environments: Callable[[NetworkSupport], EnvironmentProvider | None]
    kinds: Sequence[RuntimeKind]
    context: RuntimeContext
    requirements: Callable[[], tuple[factory.NetworkRequirement, ...]] = factory.facts


@dataclass(slots=True)
class Discovery:
    """`runtimes` is the agent's own list: a new runtime is appended."""

    makers: PartMakers
    runtimes: list[Runtime]
    support: NetworkSupport
    networks: LateNetworks
    environments: LateEnvironments
    _unmet: set[str] = field(default_factory=set)  # network requirements at the last look
    _tried: tuple[bool, bool] = (False, False)  # (uv, egress) at the last attempt for environments
    _unavailable: set[str] = field(default_factory=set)  # runtimes

    def __post_init__(self) -> None:
        self._unmet = self._unmet_requirements()
        self._tried = (find_uv() is not None, self.support.egress)
        there = {one.name for one in self.runtimes}
        self._unavailable = {one.name for one in self.makers.kinds} - there

    def _unmet_requirements(self) -> set[str]:
        return {one.name for one in self.makers.requirements() if not one.ok}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Make the parts whose requirements were met since the last look. A failed attempt waits for another change."""
        if self.networks.inner is None:
            await self._look_for_networks()
        if self.environments.inner is None:
            await self._look_for_environments()
        await self._look_for_runtimes()

    async def _look_for_networks(self) -> None:
        unmet = await asyncio.to_thread(self._unmet_requirements)
        before, self._unmet = self._unmet, unmet
        if unmet or not before:
            return
        found = await asyncio.to_thread(self.makers.networks)
        if found.networks is None:
            return
        await found.networks.start()
        self.networks.inner, self.support = found.networks, found
        log.info("part_found", part="networks")

    async def _look_for_environments(self) -> None:
        state = (find_uv() is not None, self.support.egress)
        if state == self._tried:
            return
        self._tried = state
        made = await asyncio.to_thread(self.makers.environments, self.support)
        if made is None:
            return
        await made.sweep()
        self.environments.inner = made
        log.info("part_found", part="environments")

    async def _look_for_runtimes(self) -> None:
        for kind in self.makers.kinds:
            if kind.name not in self._unavailable:
                continue
            if await asyncio.to_thread(kind.unavailable, self.makers.context) is not None:
                continue
            self._unavailable.discard(kind.name)
            try:
                made = await asyncio.to_thread(kind.make, self.makers.context)
                await made.sweep()
            except SandboxFailed as failure:
                log.warning("runtime_failed", runtime=kind.name, why=str(failure))
                continue
            self.runtimes.append(made)
            log.info("part_found", part=kind.name)

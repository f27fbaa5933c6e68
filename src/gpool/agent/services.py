"""Wiring: the services a node runs tasks with (environments, GPU sharing, runtimes), built from the settings, and the
offer made of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from gpool.agent.daemon import boot_clock
from gpool.agent.environments.building import (
    OpenLane,
    Sandboxes,
    UvBuilder,
    environment_support,
    find_uv,
    no_lane,
)
from gpool.agent.environments.egress_targets import IndexLanes, asking, built_in_index
from gpool.agent.environments.environments import Environments
from gpool.agent.environments.interpreters import candidates, find_interpreters, own_interpreter
from gpool.agent.machine.drm import DrmCards
from gpool.agent.machine.host import host_capacity, site_address
from gpool.agent.machine.nvml import NoDriver, Nvml, NvmlError
from gpool.agent.machine.policy import GANG_PORT, GangRules, OwnerPolicy
from gpool.agent.machine.real_nvml import RealNvml
from gpool.agent.network import sandbox_network
from gpool.agent.network.factory import networks_for, probe, probe_gangs, probe_links
from gpool.agent.network.policy import BadPolicy, EgressPolicy, parse_rate, parse_target
from gpool.agent.network.sandbox_network import Networks
from gpool.agent.running.sandboxes import (
    EnvironmentProvider,
    GpuShareProvider,
    NetworkProvider,
    PolicyLimits,
)
from gpool.agent.runtime.bubblewrap.launcher_client import Launcher
from gpool.agent.runtime.protocol import BuildRuntime, GpuShare, Runtime, RuntimeAbility
from gpool.agent.runtime.runner_calls import PYTHON
from gpool.agent.runtime.slots import RUN
from gpool.agent.settings import AgentSettings
from gpool.agent.sharing import plan
from gpool.agent.sharing.drm_shares import DrmShares
from gpool.agent.sharing.modes import MpsPrograms, Records, find_program
from gpool.agent.sharing.shares import GpuShares
from gpool.core.errors import Invalid
from gpool.core.model import GIB, Gpu, Network, Offer, RuntimeOffer, Sharing, Slice
from gpool.core.specs import fields
from gpool.version import installed_version

log = structlog.get_logger(__name__)

LIMIT_BYTES = 20 * GIB
NO_NETWORK = "this node has no sandbox networks"


def environments_for(
    data_dir: Path,
    sandboxes: Sandboxes,
    networks: Networks | None,
    environ: Mapping[str, str],
    *,
    clock: Callable[[], int],
    limit_bytes: int = LIMIT_BYTES,
    kept_bytes: Callable[[], int] = lambda: 0,
) -> Environments | None:
    """None without uv or a reachable index. Blocks; `clock` counts microseconds. `sweep` before, `close` after use."""
    found = environment_support(environ, network="" if networks is not None else NO_NETWORK)
    uv, indexes = find_uv(), found.indexes
    if uv is None or indexes is None:
        log.info("no_environments", why=found.why, fix=found.fix)
        return None
    open_lane: OpenLane = no_lane
    if networks is not None:
        built_in = built_in_index(uv)
        if indexes.asks_default:
            indexes = replace(indexes, default=built_in)
        open_lane = IndexLanes(networks, built_in, asking(indexes)).open
    interpreters = find_interpreters(candidates(environ, Path(environ.get("HOME") or "/")))
    folder = data_dir / "environments"
    return Environments(
        folder,
        UvBuilder(sandboxes, folder, uv, indexes, open_lane),
        limit_bytes=limit_bytes,
        interpreters=interpreters,
        own=own_interpreter().minor,
        clock=clock,
        free_bytes=lambda: host_capacity(data_dir).disk_bytes - kept_bytes(),
    )


LONGEST_PATH = 60  # socket paths have at most 108 characters


class GpuSharing:
    def __init__(
        self,
        nvml: Nvml,
        seats: GpuShares,
        can: plan.Abilities,
        modes: Sequence[Sharing] | None,
    ) -> None:
        self._nvml = nvml
        self._can = can
        self._modes = modes
        self.seats = seats

    def describe(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        described = tuple(self._described(gpu) for gpu in gpus)
        self.seats.use_gpus([gpu for gpu in described if not gpu.guest])
        return described

    def _described(self, gpu: Gpu) -> Gpu:
        if gpu.simulated or gpu.guest or gpu.vendor != "nvidia":
            return gpu
        try:
            card = self._nvml.card(gpu.uuid)
            profiles = plan.profiles_of(self._nvml.mig_profiles(gpu.uuid))
        except NvmlError as error:
            log.warning("gpu_not_shared", gpu=gpu.uuid, error=str(error))
            return replace(gpu, sharing=Sharing.EXCLUSIVE)
        before = self.seats.settings_before(gpu.uuid)
        if before is not None:
            card = replace(card, mig=before.mig)
        mode = plan.choose(card, profiles, self._can, self._modes)
        closed = gpu.closed or self.seats.unclean.get(gpu.uuid, "")
        lent = profiles if mode is Sharing.MIG else ()
        return replace(gpu, sharing=mode, profiles=lent, closed=closed)


class NodeGpuShares:
    """Shares of all GPUs: NVIDIA's by `nvidia` (None without its driver), AMD's and Intel's by `drm`."""

    def __init__(self, nvidia: GpuSharing | None, drm: DrmShares, *, lend_untested: bool) -> None:
        self._nvidia = nvidia
        self._drm = drm
        self._lend_untested = lend_untested

    def describe(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        described = [self._described(gpu) for gpu in gpus]
        self._drm.use_gpus([gpu for gpu in described if not gpu.guest])
        return tuple(described) if self._nvidia is None else self._nvidia.describe(described)

    def _described(self, gpu: Gpu) -> Gpu:
        if gpu.simulated or gpu.guest or gpu.vendor == "nvidia":
            return gpu
        return replace(
            gpu,
            sharing=Sharing.EXCLUSIVE,
            closed=gpu.closed or self._drm.unclean.get(gpu.uuid, ""),
            untested=not self._lend_untested,
        )

    async def start(self) -> None:
        if self._nvidia is not None:
            await self._nvidia.seats.start()
        await self._drm.start()

    async def close(self) -> None:
        if self._nvidia is not None:
            await self._nvidia.seats.close()
        await self._drm.close()

    @contextlib.asynccontextmanager
    async def seat(self, user: int, slices: Sequence[Slice], /) -> AsyncIterator[GpuShare | None]:
        async with contextlib.AsyncExitStack() as stack:
            share = None
            if self._nvidia is not None:
                share = await stack.enter_async_context(self._nvidia.seats.seat(user, slices))
            yield await stack.enter_async_context(self._drm.seat(slices, share))


def nvidia_sharing(
    data_dir: Path, sandboxes: BuildRuntime, modes: Sequence[Sharing] | None
) -> GpuSharing | None:
    """None without an NVIDIA driver."""
    nvml = RealNvml()
    try:
        nvml.open()
    except NoDriver:
        return None
    root = os.geteuid() == 0
    program, unshare = find_program(), find_program("unshare")
    means = None
    if program and (unshare or not root):
        launcher = Launcher(place="", binds=(), seccomp=b"")
        means = MpsPrograms(program, unshare, launcher, _pipes(data_dir, root))
    can = plan.Abilities(root, means is not None, sandboxes.tells_apart)
    seats = GpuShares(
        nvml,
        sandboxes,
        Records(data_dir / "cards"),
        mps=means,
        shared_uid=sandboxes.shared_uid,
    )
    return GpuSharing(nvml, seats, can, modes)


def sharing_for(
    settings: AgentSettings, sandboxes: BuildRuntime, drm: DrmCards, is_ours: Callable[[int], bool]
) -> NodeGpuShares:
    nvidia = nvidia_sharing(settings.data_dir, sandboxes, plan.parse_modes(settings.sharing))
    return NodeGpuShares(nvidia, DrmShares(drm, is_ours), lend_untested=settings.lend_untested)


def _pipes(data_dir: Path, root: bool) -> Path:
    if root:
        return RUN / f"mps-{hashlib.sha256(bytes(data_dir.resolve())).hexdigest()[:12]}"
    near = data_dir.resolve() / "mps"
    return near if len(str(near)) <= LONGEST_PATH else Path(tempfile.mkdtemp(prefix="gpool-mps-"))


@dataclass(frozen=True, slots=True)
class NodeServices:
    runtimes: Sequence[Runtime]
    networks: NetworkProvider | None = None
    environments: EnvironmentProvider | None = None
    allowed: Callable[[], PolicyLimits] = PolicyLimits
    gpu_shares: GpuShareProvider | None = None

    async def start(self) -> None:
        for runtime in self.runtimes:
            await runtime.sweep()
        if self.networks is not None:
            await self.networks.start()
        if self.environments is not None:
            await self.environments.sweep()
        if self.gpu_shares is not None:
            await self.gpu_shares.start()

    async def close(self) -> None:
        if self.gpu_shares is not None:
            await self.gpu_shares.close()
        for runtime in self.runtimes:
            await runtime.close()
        if self.environments is not None:
            await self.environments.close()
        if self.networks is not None:
            await self.networks.close()


@dataclass(frozen=True, slots=True)
class NetworkSupport:
    networks: sandbox_network.Networks | None = None
    egress: bool = False
    gangs: bool = False
    gang_links: frozenset[str] = frozenset()


def network_support(settings: AgentSettings, policy: OwnerPolicy) -> NetworkSupport:
    """Probe egress, and gang networks if a site is named; log missing parts.

    Environment builds use egress even if the policy gives tasks none.
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
    links: frozenset[str] = frozenset()
    if gangs:
        address = gang_address(settings, policy.gangs)
        found = probe_links(settings.data_dir, address, trusted=settings.gang_trusted_link)
        links, problems = asyncio.run(found)
        for problem in problems:
            log.info("gang_link_unavailable", why=problem)
    networks = networks_for(egress_policy(policy), settings.data_dir, rdma=settings.gang_rdma)
    return NetworkSupport(networks, egress, gangs, links)


def egress_policy(policy: OwnerPolicy) -> EgressPolicy:
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
    settings: AgentSettings,
    builder: BuildRuntime,
    support: NetworkSupport,
    kept_bytes: Callable[[], int],
) -> EnvironmentProvider | None:
    """`kept_bytes` returns the part of the disk that the owner keeps."""
    return environments_for(
        settings.data_dir,
        builder,
        support.networks if support.egress else None,
        os.environ,
        clock=boot_clock,
        kept_bytes=kept_bytes,
    )


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
    builds = {fields.IMAGE_ENVIRONMENT} if with_images else set()
    ready, pythons = {fields.DEFAULT_ENVIRONMENT}, {PYTHON}
    if services.environments is not None and services.environments.pythons():
        builds.add(fields.PIP_ENVIRONMENT)
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
        address=gang_address(settings, rules) if support.gangs else "",
        gang_port=(settings.gang_port or rules.port or GANG_PORT) if support.gangs else 0,
        gang_links=support.gang_links,
        agent_version=installed_version(),
    )


def refreshed(first: Offer, now: Offer) -> Offer:
    """`first` with the changeable parts of `now`."""
    return replace(
        first,
        gpus=now.gpus,
        pythons=now.pythons,
        tiers=now.tiers,
        environments=now.environments,
        builds=now.builds,
        networks=now.networks,
        runtimes=now.runtimes,
        address=now.address,
    )


def gang_address(settings: AgentSettings, rules: GangRules) -> str:
    return settings.gang_address or rules.address or site_address(settings.address.url)


def _runtime_offer(runtime: Runtime) -> RuntimeOffer:
    images = RuntimeAbility.IMAGES in runtime.abilities
    gpus = RuntimeAbility.GPUS in runtime.abilities
    gangs = RuntimeAbility.EGRESS_ONLY not in runtime.abilities
    return RuntimeOffer(runtime.name, runtime.tier, runtime.networks, images, gpus, gangs)

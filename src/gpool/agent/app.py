"""The wiring of the agent from `GPOOL_AGENT_*` variables. Decides nothing itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterable, Sequence
from random import Random, SystemRandom

import structlog

from gpool.agent.addresses import ServerAddresses
from gpool.agent.channel import AgentChannel, AgentCredentials, NodeIdentity, next_boot
from gpool.agent.daemon import Daemon, boot_clock, wall_clock
from gpool.agent.discovery import Discovery, LateEnvironments, LateNetworks, PartMakers
from gpool.agent.gpu_verification.service import GpuVerificationService
from gpool.agent.machine.gpu_monitor import GpuMonitor
from gpool.agent.machine.gpus import Detector
from gpool.agent.machine.host import AgentProcesses, ForeignPrograms
from gpool.agent.machine.monitor import LoadMeter, NodeMonitor, PolicyFile, facts_now, sampler
from gpool.agent.machine.policy import MachineFacts
from gpool.agent.running.artifact_cache import ArtifactCache
from gpool.agent.running.sandboxes import EnvironmentProvider, ExecutorContext
from gpool.agent.running.warm_sandboxes import WarmPoolManager
from gpool.agent.runtime.microvm.passthrough import DedicatedCards
from gpool.agent.runtime.protocol import Runtime
from gpool.agent.runtime.registry import RuntimeContext, RuntimeSelfCheck, known, make_all
from gpool.agent.services import (
    NetworkSupport,
    NodeServices,
    environment_provider,
    machine_offer,
    network_support,
    refreshed,
    sharing_for,
)
from gpool.agent.settings import AgentSettings
from gpool.agent.state_machine.agent_state import AgentState
from gpool.agent.state_machine.instructions import Disconnected, Event, FrameArrived
from gpool.agent.state_machine.work_signatures import WorkSigner
from gpool.core.errors import Invalid
from gpool.core.model import Gpu, Offer, Tier
from gpool.observability.context import NamedWork, begin_work
from gpool.observability.logs import LogSource, configure, exported_traces
from gpool.observability.redaction import Redactor
from gpool.observability.tracing import Tracing
from gpool.transfer.senders import AsyncSender
from gpool.version import installed_version
from gpool.wire.frames import AgentFrame, Grants, ServerFrame, ToGpu

NewLoop = Callable[[], asyncio.AbstractEventLoop]
try:
    import uvloop

    new_loop: NewLoop = uvloop.new_event_loop
except ImportError:  # not on every platform
    new_loop = asyncio.new_event_loop

log = structlog.get_logger(__name__)

SOURCE = LogSource("gpool-agent", installed_version())


Check = Callable[[], Sequence[Event]]
"""Examine the machine and the owner's policy; return the changes as events. Runs in a thread and may block."""

SURVEY_EVERY_S = 10.0
SURVEY_WITHIN_S = 5.0
"""Longest time a report waits for a survey that was requested before it."""
POLL_EVERY_S = 1.0
"""Delay until a changed policy, an unhealthy GPU or an owner's program is noticed."""


def lend() -> None:
    """Lend this machine until a signal; raise `GpoolError` or `SandboxFailed` if impossible or refused."""
    settings = AgentSettings()  # type: ignore[call-arg]  # from the environment
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    redactor = configure(settings.log_format, settings.log_level, SOURCE)
    cards = DedicatedCards(
        settings.data_dir,
        () if settings.simulate_gpus else settings.dedicated,
        untested=not settings.lend_untested,
    )
    cards.bind()  # before NVML opens any card
    try:
        _lend(settings, cards, redactor)
    finally:
        cards.release()


def _lend(settings: AgentSettings, cards: DedicatedCards, redactor: Redactor) -> None:
    policy_file = PolicyFile(settings.policy, settings.asked_terms)
    policy = policy_file.policy
    detector = Detector(settings.simulate_gpus, guests=cards.gpus)
    gpus = detector.survey().gpus
    runtime_context = RuntimeContext(settings, _real(gpus), policy.registries, cards)
    runtimes = make_all(runtime_context)
    tiers = {one.tier for one in runtimes}
    if not tiers & policy.tiers:
        raise Invalid(
            f"the policy's tiers leave no runtime; this machine can do {', '.join(sorted(tiers))}"
        )
    support = network_support(settings, policy)
    builders = [one for each in runtimes if (one := each.build_runtime()) is not None]

    def environments_of(found: NetworkSupport) -> EnvironmentProvider | None:
        def kept() -> int:
            return policy_file.policy.kept.disk_bytes

        return environment_provider(settings, builders[0], found, kept) if builders else None

    discovery = Discovery(
        PartMakers(
            lambda: network_support(settings, policy), environments_of, known(), runtime_context
        ),
        runtimes,
        support,
        LateNetworks(support.networks),
        LateEnvironments(environments_of(support)),
    )
    own = AgentProcesses(os.getpid(), groups=lambda: _containers(runtimes))
    sharing = None
    if builders and not settings.simulate_gpus:
        sharing = sharing_for(settings, builders[0], detector.drm, own.has)
        gpus = sharing.describe(gpus)
    services = NodeServices(
        runtimes, discovery.networks, discovery.environments, policy_file.limits, sharing
    )
    meter = LoadMeter(os.getpid())

    def offer() -> Offer:
        found = detector.survey().gpus
        if sharing is not None:
            found = sharing.describe(found)
        for runtime in runtimes:
            runtime.use_gpus(_real(found, guests=runtime.tier is Tier.VM))
        now = machine_offer(settings, found, services, discovery.support, policy.gangs)
        return refreshed(first, now)

    first = machine_offer(settings, gpus, services, support, policy.gangs)
    gpu_monitor = GpuMonitor(detector.nvml, own, drm=detector.drm)
    sample = sampler(policy_file, gpu_monitor, ForeignPrograms(own), wall_clock, boot_clock)

    def facts() -> MachineFacts:
        return facts_now(wall_clock(), meter, data=settings.data_dir)

    monitor = NodeMonitor(policy_file, offer, facts, sample)
    with (
        exported_traces(SOURCE, redactor) as tracing,
        asyncio.Runner(loop_factory=new_loop) as runner,
    ):
        runner.run(
            run_agent(
                settings,
                services,
                monitor.first_offer(),
                survey=monitor.survey,
                poll=monitor.poll,
                discover=discovery.run,
                secrets_seen=redactor.add,
                tracing=tracing,
            )
        )


def _containers(runtimes: Sequence[Runtime]) -> list[str]:
    # Their processes descend from the engine, not from the agent.
    return [id_ for one in runtimes for id_ in one.containers]


def _real(gpus: Sequence[Gpu], *, guests: bool = False) -> list[Gpu]:
    """GPUs for runtimes of tier vm (`guests`), or for all others."""
    return [gpu for gpu in gpus if not gpu.simulated and gpu.guest == guests]


async def run_agent(
    settings: AgentSettings,
    services: NodeServices,
    offer: Offer,
    *,
    stop: asyncio.Event | None = None,
    random: Random | None = None,
    survey: Check | None = None,
    survey_every_s: float = SURVEY_EVERY_S,
    poll: Check | None = None,
    discover: Callable[[], Coroutine[None, None, None]] | None = None,
    secrets_seen: Callable[[Iterable[str]], None] | None = None,
    tracing: Tracing | None = None,
) -> None:
    """Run until `stop` is set, or (without one) SIGTERM or SIGINT; a second signal stops without waiting.

    `survey` runs every `survey_every_s`, `poll` every second between, `discover` until the end; `secrets_seen` gets the values
    of secret variables before anything uses them. Raises `GpoolError` on a final refusal.
    """
    random = random if random is not None else SystemRandom()
    addresses = ServerAddresses(settings.addresses, random)
    identity = NodeIdentity(settings.node, settings.server_name)
    key = settings.read_key()
    credentials = AgentCredentials(key, identity, boot_clock)
    scratch = settings.data_dir / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    begin_work(NamedWork({"node": settings.node}))
    await services.start()
    sender = AsyncSender(
        settings.address,
        None,
        random,
        vouch=credentials.vouch,
        stores=settings.store_access,
        current=lambda: addresses.current,
    )
    cache = ArtifactCache(settings.data_dir / "artifacts", sender.download, settings.cache_bytes)

    warm = WarmPoolManager(services.runtimes, services.environments, boot_clock)
    warm.offered(offer)

    def send(frame: AgentFrame) -> None:
        channel.send(frame)

    def context(feed: Callable[[Event], None]) -> ExecutorContext:
        return ExecutorContext(
            services.runtimes,
            cache,
            sender,
            scratch,
            feed,
            boot_clock,
            services.networks,
            services.environments,
            services.allowed,
            warm,
            gpu_shares=services.gpu_shares,
            self_check=RuntimeSelfCheck(boot_clock),
            survey=monitoring.survey_now,
            tracing=tracing,
        )

    monitoring = MonitorLoop(survey, poll)
    signer = WorkSigner(settings.node, key.sign_work)
    state = AgentState(next_boot(settings.data_dir), offer, signer)
    daemon = monitoring.daemon = Daemon(state, send, context)
    gpus = GpuVerificationService(send)

    def feed(event: Event) -> None:
        if isinstance(event, FrameArrived) and isinstance(event.frame, ToGpu):
            gpus.take(event.frame)
            return
        if secrets_seen is not None and isinstance(event, FrameArrived):
            secrets_seen(_secrets_in(event.frame))
        if isinstance(event, Disconnected):
            gpus.end_all()
        daemon.feed(event)

    channel = AgentChannel(addresses, credentials, feed)
    log.info(
        "agent_starts", server=settings.server_url, cpu_milli=offer.cpu_milli, gpus=len(offer.gpus)
    )
    connecting = asyncio.create_task(channel.run())
    serving = asyncio.create_task(daemon.run())
    stopping = asyncio.create_task(_stopped(stop, daemon))
    warming = asyncio.create_task(warm.run())
    checking = asyncio.create_task(monitoring.run(survey_every_s))
    discovering = asyncio.create_task(discover() if discover is not None else asyncio.sleep(0))
    try:
        await asyncio.wait([connecting, serving], return_when=asyncio.FIRST_COMPLETED)
        if connecting.done() and not serving.done():
            daemon.request_stop()  # refused for good: no report would be received
            daemon.request_stop()
        await serving
        if connecting.done():
            connecting.result()
    finally:
        tasks = (stopping, checking, connecting, serving, warming, discovering)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await gpus.close()
        await sender.close()
        await services.close()
        log.info("agent_ends")


def _secrets_in(frame: ServerFrame) -> Iterable[str]:
    return [secret.value for secret in frame.secrets] if isinstance(frame, Grants) else ()


async def _stopped(stop: asyncio.Event | None, daemon: Daemon) -> None:
    if stop is not None:
        await stop.wait()
        daemon.request_stop()
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.request_stop)
    try:
        await loop.create_future()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class MonitorLoop:
    def __init__(self, survey: Check | None, poll: Check | None) -> None:
        self._survey, self._poll = survey, poll
        self._lock = asyncio.Lock()
        self._requested: set[asyncio.Task[None]] = set()
        self._next: asyncio.Task[None] | None = None  # requested, not begun: requests share it
        self.daemon: Daemon | None = None  # receives the events

    async def survey_now(self) -> None:
        surveying = self._next
        if surveying is None:
            surveying = self._next = asyncio.create_task(self._run(self._survey, requested=True))
            self._requested.add(surveying)
            surveying.add_done_callback(self._requested.discard)
        await asyncio.wait([surveying], timeout=SURVEY_WITHIN_S)

    async def _run(self, check: Check | None, *, requested: bool = False) -> None:
        if check is None:
            return
        async with self._lock:
            if requested:
                self._next = None
            events = await asyncio.to_thread(check)
        if self.daemon is not None:
            for event in events:
                self.daemon.feed(event)

    async def run(self, survey_every_s: float) -> None:
        try:
            while self._survey is not None:
                await self._run(self._survey)
                left_s = survey_every_s
                while left_s > 0:
                    await asyncio.sleep(min(left_s, POLL_EVERY_S))
                    left_s -= POLL_EVERY_S
                    if left_s > 0:
                        await self._run(self._poll)
        finally:
            for task in self._requested:
                task.cancel()

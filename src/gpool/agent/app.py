"""The agent put together: key, channel, cache, sandboxes, session, signals. Decides nothing itself."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random, SystemRandom

import structlog

from gpool.agent.boot_counter import next_boot
from gpool.agent.channel import Channel
from gpool.agent.credentials import Badge, Identity
from gpool.agent.daemon import Daemon, boot_clock
from gpool.agent.gpu_verification.service import GpuDesk
from gpool.agent.running.artifact_cache import ArtifactCache
from gpool.agent.running.sandboxes import Allowed, Environments, Equipment, Networks, Seats
from gpool.agent.running.self_check import Checkup
from gpool.agent.running.warm_sandboxes import WarmKeeper
from gpool.agent.runtime.protocol import Runtime
from gpool.agent.settings import AgentSettings
from gpool.agent.state_machine.instructions import Disconnected, Event, FrameArrived
from gpool.agent.state_machine.session import Session
from gpool.core.model import Offer
from gpool.transfer.senders import AsyncSender
from gpool.wire.frames import AgentFrame, ToGpu

NewLoop = Callable[[], asyncio.AbstractEventLoop]
try:
    import uvloop

    new_loop: NewLoop = uvloop.new_event_loop
except ImportError:  # not on every platform
    new_loop = asyncio.new_event_loop

log = structlog.get_logger(__name__)


Look = Callable[[], Sequence[Event]]
"""Looks at the machine again: what it lends now, and what its owner wants. Runs in a thread, may take its time."""

LOOK_EVERY_S = 10.0
LOOK_WITHIN_S = 5.0
"""How long a report waits for a look."""
GLANCE_EVERY_S = 1.0
"""How soon it is noticed that a rule changed, a GPU ails or its owner wants it."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a machine has to run tasks with; see `gpool.agent.running.sandboxes` for the doors."""

    runtimes: Sequence[Runtime]
    networks: Networks | None = None
    environments: Environments | None = None
    allowed: Callable[[], Allowed] = Allowed
    seats: Seats | None = None

    async def take_up(self) -> None:
        """Sweep away what an earlier agent left, and get ready."""
        for runtime in self.runtimes:
            await runtime.sweep()
        if self.networks is not None:
            await self.networks.start()
        if self.environments is not None:
            await self.environments.sweep()
        if self.seats is not None:
            await self.seats.start()

    async def lay_down(self) -> None:
        if self.seats is not None:
            await self.seats.close()
        for runtime in self.runtimes:
            await runtime.close()
        if self.environments is not None:
            await self.environments.close()
        if self.networks is not None:
            await self.networks.close()


def serve(
    settings: AgentSettings,
    means: Means,
    offer: Offer,
    look: Look,
    glance: Look | None = None,
) -> None:
    """Be an agent until SIGTERM or Ctrl-C, on the fastest loop there is."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run_agent(settings, means, offer, look=look, glance=glance))


async def run_agent(
    settings: AgentSettings,
    means: Means,
    offer: Offer,
    *,
    stop: asyncio.Event | None = None,
    random: Random | None = None,
    look: Look | None = None,
    look_every_s: float = LOOK_EVERY_S,
    glance: Look | None = None,
) -> None:
    """Serve until told to stop: by `stop`, or (without one) by SIGTERM or Ctrl-C; a second signal does not wait.

    `glance` is a cheaper look, taken every second between two others. Raises a `GpoolError` when the server will not
    have this node.
    """
    dice = random if random is not None else SystemRandom()
    address = settings.address
    badge = Badge(settings.read_key(), Identity(settings.node, settings.server_name), boot_clock)
    scratch = settings.data_dir / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    await means.take_up()
    sender = AsyncSender(address, None, dice, vouch=badge.vouch)
    cache = ArtifactCache(settings.data_dir / "artifacts", sender.download, settings.cache_bytes)

    warm = WarmKeeper(means.runtimes, means.environments, boot_clock)
    warm.offered(offer)

    def send(frame: AgentFrame) -> None:
        channel.send(frame)

    def equip(feed: Callable[[Event], None]) -> Equipment:
        return Equipment(
            means.runtimes,
            cache,
            sender,
            scratch,
            feed,
            boot_clock,
            means.networks,
            means.environments,
            means.allowed,
            warm,
            seats=means.seats,
            checkup=Checkup(boot_clock),
            look_again=looking_at.now,
        )

    looking_at = _Looks(look, glance)
    daemon = looking_at.daemon = Daemon(Session(next_boot(settings.data_dir), offer), send, equip)
    gpus = GpuDesk(send)

    def feed(event: Event) -> None:
        if isinstance(event, FrameArrived) and isinstance(event.frame, ToGpu):
            gpus.take(event.frame)
            return
        if isinstance(event, Disconnected):
            gpus.end_all()
        daemon.feed(event)

    channel = Channel(address, badge, feed, dice)
    log.info("agent_starts", server=address.url, cpu_milli=offer.cpu_milli, gpus=len(offer.gpus))
    dialling = asyncio.create_task(channel.keep())
    serving = asyncio.create_task(daemon.run())
    stopping = asyncio.create_task(_stopped(stop, daemon))
    warming = asyncio.create_task(warm.keep())
    looking = asyncio.create_task(looking_at.now_and_then(look_every_s))
    try:
        await asyncio.wait([dialling, serving], return_when=asyncio.FIRST_COMPLETED)
        if dialling.done() and not serving.done():
            daemon.ask_to_stop()  # refused for good: nothing we say will be heard
            daemon.ask_to_stop()
        await serving
        if dialling.done():
            dialling.result()
    finally:
        tasks = (stopping, looking, dialling, serving, warming)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await gpus.close()
        await sender.close()
        await means.lay_down()
        log.info("agent_ends")


async def _stopped(stop: asyncio.Event | None, daemon: Daemon) -> None:
    if stop is not None:
        await stop.wait()
        daemon.ask_to_stop()
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.ask_to_stop)
    try:
        await loop.create_future()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class _Looks:
    """Tells the session what the machine has; whether that is news, the session knows. One look at a time."""

    def __init__(self, look: Look | None, glance: Look | None) -> None:
        self._look, self._glance = look, glance
        self._looking = asyncio.Lock()
        self._asked: set[asyncio.Task[None]] = set()
        self._next: asyncio.Task[None] | None = (
            None  # asked for and not begun: whoever asks meanwhile shares it
        )
        self.daemon: Daemon | None = None  # whoever is told

    async def now(self) -> None:
        """Once the session has been told, or it took too long: then it is told later."""
        looking = self._next
        if looking is None:
            looking = self._next = asyncio.create_task(self._tell(self._look, asked=True))
            self._asked.add(looking)
            looking.add_done_callback(self._asked.discard)
        await asyncio.wait([looking], timeout=LOOK_WITHIN_S)

    async def _tell(self, look: Look | None, *, asked: bool = False) -> None:
        if look is None:
            return
        async with self._looking:
            if asked:
                self._next = None
            events = await asyncio.to_thread(look)
        if self.daemon is not None:
            for event in events:
                self.daemon.feed(event)

    async def now_and_then(self, every_s: float) -> None:
        try:
            while self._look is not None:
                await self._tell(self._look)
                left_s = every_s
                while left_s > 0:
                    await asyncio.sleep(min(left_s, GLANCE_EVERY_S))
                    left_s -= GLANCE_EVERY_S
                    if left_s > 0:
                        await self._tell(self._glance)
        finally:
            for each in self._asked:
                each.cancel()

"""The server's host: starts the real server over the database file, and kills it without warning.

After that nothing of the process reaches disk or network. One file because the wiring of a server, its process and
the deployment of one server are used together only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from gpool.agent.state_machine.agent_state import AgentState
from gpool.core.errors import GpoolError
from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Instant, Offer
from gpool.core.scheduler.order.orders import Policy
from gpool.server.actions.tasks import submit
from gpool.server.blobs import Blobs
from gpool.server.clock import Ids
from gpool.server.identity.authorization import Credentials
from gpool.server.identity.node_proofs import NodeAuthenticator
from gpool.server.identity.sealer import MasterSource, Sealer
from gpool.server.identity.throttle import Guard
from gpool.server.metrics import Metrics
from gpool.server.nodes.connection import NodeChannel
from gpool.server.nodes.registry import NodeRegistry
from gpool.server.nodes.reports import ReportBatches
from gpool.server.replicas.membership import Membership, Replica, SoleServer
from gpool.server.scheduling.loops import LoopRunner, all_loops
from gpool.server.scheduling.picture import StatePicture
from gpool.server.scheduling.policy import ActivePolicy
from gpool.server.scheduling.prices import PlanPrices
from gpool.server.scheduling.scheduler import Scheduler
from gpool.server.server import Server
from gpool.server.settings import Settings
from gpool.server.store import InlineStore
from gpool.server.store.operations.tasks import artifacts
from gpool.server.store.values import NodeCredentials
from gpool.server.wakeups import Hub
from gpool.testing.simulation import Dice, SimulatedProcess, Trace, VirtualLoop, new_loop
from gpool.testing.world.database import DiskSpeed, SimulatedDisk
from gpool.testing.world.machine import SimulatedMachine
from gpool.testing.world.network import SimulatedLink
from gpool.wire import frames
from gpool.wire.documents import TaskRequest

T = TypeVar("T")
ROOT_KEY = b"the world's root key"
EPOCH_US = 1_800_000_000_000_000
"""Wall-clock time at the start of a run."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A flaw replaces one component."""

    agent_state: Callable[[str, Offer], AgentState] = AgentState
    disk: Callable[..., SimulatedDisk] = SimulatedDisk
    channel: Callable[..., NodeChannel] = NodeChannel
    registry: Callable[..., NodeRegistry] = NodeRegistry
    picture: Callable[..., StatePicture] = StatePicture
    scheduler: Callable[..., Scheduler] = Scheduler
    server: Callable[..., Server] = Server
    gate: Callable[..., NodeAuthenticator] = NodeAuthenticator
    machine: Callable[..., SimulatedMachine] = SimulatedMachine


@dataclass(slots=True)
class WallClock:
    """Server's clock: drifts by `rate`, is set forward by `steps`: (when, how far)."""

    loop: VirtualLoop
    rate: float = 1.0
    steps: tuple[tuple[int, int], ...] = ()
    ahead_us: int = 0

    def now(self) -> Instant:
        stepped = sum(by for at, by in self.steps if self.loop.us >= at)
        return Instant(self.passed() + stepped + self.ahead_us)

    def passed(self) -> Instant:
        return Instant(EPOCH_US + int(self.loop.us * self.rate))


@dataclass(frozen=True, slots=True)
class HostEnvironment:
    loop: VirtualLoop
    dice: Dice
    trace: Trace
    parts: Parts
    folder: Path
    file: InlineStore
    pace: DiskSpeed
    settings: Settings
    clock: WallClock
    committed: Callable[[], None]
    fail: Callable[[str], None]

    def task_ended(self, task: asyncio.Task[Any]) -> None:
        error = task.exception()
        if error is not None and not isinstance(error, GpoolError):
            self.fail(f"a task of the server died: {error!r}")


class ServerHost(Protocol):
    """Servers of a run, as agents, consumers and faults reach them."""

    def know(self, secret: str, credentials: NodeCredentials) -> None: ...

    def public_key(self, secret: str) -> str | None:
        """Key that a node is created with; None: it has none."""
        ...

    def start(self) -> None: ...

    def crash(self) -> None: ...

    def stop(self) -> list[asyncio.Task[Any]]: ...

    def serving(self) -> ServerProcess | None:
        """Process that the next request reaches."""
        ...

    def settled(self) -> Sequence[ServerProcess]: ...

    def accept(self, link: SimulatedLink, secret: str) -> bool: ...

    def put(
        self, secret: str, hold: frames.Hold, sha256: str, told: Callable[[bool], None]
    ) -> None:
        """Store an artifact without its bytes. A process that dies meanwhile does not answer."""
        ...


def wired(
    site: HostEnvironment, disk: SimulatedDisk, dice: Dice, membership: Membership | None = None
) -> Server:
    """Build a server of the site's components over a disk. `membership`: of a replica."""
    parts, clock, settings = site.parts, site.clock, site.settings
    replica: Replica = SoleServer() if membership is None else membership
    hub, metrics = Hub(), Metrics()
    nodes = parts.registry(metrics, settings.ttl, clock.passed)
    policy = ActivePolicy(Policy(order=settings.order))
    picture = parts.picture(disk, nodes, policy, hub, metrics, clock.now, lambda: replica.leads)
    sealer = Sealer(disk, MasterSource(site.folder / "master.key"), clock.now)
    ids = Ids(clock, dice.branch("ids"), None if membership is None else lambda: membership.slot)
    prices = PlanPrices(ids, settings.fee_ppm) if settings.prices else None
    return parts.server(
        settings=settings,
        store=disk,
        clock=clock,
        ids=ids,
        hub=hub,
        nodes=nodes,
        picture=picture,
        scheduler=parts.scheduler(picture, sealer, metrics, prices),
        reports=ReportBatches(picture.write, picture.absorb),
        blobs=Blobs(site.folder / "blobs", settings.max_artifact_bytes),
        credentials=Credentials(disk, clock.now, settings.ttl, ROOT_KEY),
        gate=parts.gate(
            disk, clock.now, ROOT_KEY, remember=settings.ttl, is_shared=membership is not None
        ),
        metrics=metrics,
        sealer=sealer,
        guard=Guard(clock.now),
        submitting=submit.batching(),
        replica=replica,
    )


class ServerProcess:
    def __init__(
        self,
        site: HostEnvironment,
        process: SimulatedProcess,
        disk: SimulatedDisk,
        server: Server,
    ) -> None:
        self._site = site
        self.process, self.disk, self.server = process, disk, server
        self.links: list[SimulatedLink] = []

    @classmethod
    def alone(cls, site: HostEnvironment, number: int) -> ServerProcess:
        dice = site.dice.branch(f"server-{number}")
        disk = site.parts.disk(
            site.loop, dice.branch("disk"), site.file, site.pace, site.committed, site.fail
        )
        process = SimulatedProcess(f"server-{number}", site.task_ended)
        return cls(site, process, disk, wired(site, disk, dice))

    def start(self) -> None:
        self.spawn(self._run())

    async def _run(self) -> None:
        await self.server.picture.rebuild(self.server.now)
        LoopRunner(self.server, *all_loops(self.server)).start()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.process.spawn(self._site.loop, work)

    @property
    def is_settled(self) -> bool:
        """Whether the scheduling state must agree with the store."""
        return self.disk.is_quiet and not self.server.picture.is_stale

    def serve(self, link: SimulatedLink, credentials: NodeCredentials) -> None:
        site, trace, name = self._site, self._site.trace, f"srv:{link.name}"
        inbox: deque[bytes | None] = deque()
        arrived = asyncio.Event()

        def send(frame: frames.ServerFrame) -> None:
            if self.process.alive:
                data = frames.encode(frame)
                trace.frame(name, ">", data, frame)
                link.send_down(data)

        def deliver(data: bytes | None) -> None:
            inbox.append(data)
            arrived.set()

        async def pump() -> None:
            channel = site.parts.channel(self.server, credentials, send)
            while not channel.closed:
                if not inbox:
                    arrived.clear()
                    await arrived.wait()
                data = inbox.popleft()
                if data is None:
                    break
                frame = frames.decode_from_agent(data)
                trace.frame(name, "<", data, frame)
                try:
                    await channel.receive(frame)
                except GpoolError as error:  # as the transport, which ends
                    trace.say(name, "fails", error.code)
                    break
            await channel.close()
            link.close_by_server()

        self.links.append(link)
        link.attach_server(deliver, lambda: deliver(None))
        self.spawn(pump())

    def kill(self) -> bool:
        """Return whether an open group of writes was lost."""
        lost = self.disk.crash()
        self.process.kill()
        for link in self.links:
            link.close_by_server()
        return lost


class Host:
    """Host of the only server."""

    def __init__(self, site: HostEnvironment) -> None:
        self._site = site
        self._nodes: dict[str, NodeCredentials] = {}
        self._current: ServerProcess | None = None
        self._started = 0

    def know(self, secret: str, credentials: NodeCredentials) -> None:
        self._nodes[secret] = credentials

    def public_key(self, secret: str) -> None:  # noqa: ARG002 - as a `ServerHost`
        return None

    def start(self) -> None:
        if self._current is None:
            self._started += 1
            self._current = ServerProcess.alone(self._site, self._started)
            self._site.trace.say("server", "starts", self._started)
            self._current.start()

    def crash(self) -> None:
        if self._current is not None:
            lost = self._current.kill()
            self._current = None
            self._site.trace.say("server", "crashes", "with a group open" if lost else "")

    def stop(self) -> list[asyncio.Task[Any]]:
        if self._current is None:
            return []
        self._current.kill()
        return self._current.process.tasks

    def serving(self) -> ServerProcess | None:
        return self._current

    def settled(self) -> Sequence[ServerProcess]:
        process = self._current
        return () if process is None or not process.is_settled else (process,)

    def accept(self, link: SimulatedLink, secret: str) -> bool:
        if self._current is None:
            return False
        self._current.serve(link, self._nodes[secret])
        return True

    def put(
        self, secret: str, hold: frames.Hold, sha256: str, told: Callable[[bool], None]
    ) -> None:
        process = self._current
        if process is not None:
            process.spawn(
                store_artifact(process.server, self._nodes[secret].node, hold, sha256, told)
            )


async def store_artifact(
    server: Server,
    node: NodeId,
    hold: frames.Hold,
    sha256: str,
    told: Callable[[bool], None],
) -> None:
    lease = (TaskId(hold.task), hold.epoch)
    told(await server.write(artifacts.add_artifact(sha256, 1, None, node, lease, server.now)))


@dataclass(slots=True)
class OneServer:
    """`Deployment` of the only server."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    tolerated: tuple[type[BaseException], ...] = ()
    ends_us: int = 0
    endless: int = 0

    def loop(self) -> VirtualLoop:
        return new_loop()

    def plan(self, dice: Dice, until_us: int) -> None:
        """No fault besides those of every run."""

    def host(self, site: HostEnvironment) -> ServerHost:
        return Host(site)

    def begin(self, loop: VirtualLoop) -> None: ...

    def end_all(self) -> None: ...

    def offer(self, number: int, offer: Offer) -> Offer:  # noqa: ARG002 - as a `Deployment`
        return offer

    def request(self, request: TaskRequest) -> TaskRequest:
        return request


class Deployment(Protocol):
    """Servers of a run and their own faults, which end at `ends_us`."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings that differ from those of one server."""
        ...

    @property
    def tolerated(self) -> tuple[type[BaseException], ...]:
        """Errors that its servers may log."""
        ...

    @property
    def ends_us(self) -> int: ...

    @property
    def endless(self) -> int:
        """Number of further tasks that end by a cancellation only."""
        ...

    def loop(self) -> VirtualLoop: ...

    def plan(self, dice: Dice, until_us: int) -> None: ...

    def host(self, site: HostEnvironment) -> ServerHost: ...

    def begin(self, loop: VirtualLoop) -> None: ...

    def end_all(self) -> None: ...

    def offer(self, number: int, offer: Offer) -> Offer:
        """Offer of a node, with what its owner asks for."""
        ...

    def request(self, request: TaskRequest) -> TaskRequest:
        """Request of a consumer, with limits of its own."""
        ...


class ErrorLogHandler(logging.Handler):
    """Fails the run: an exception that the loop runner survives is still a bug."""

    def __init__(
        self, fail: Callable[[str], None], tolerated: tuple[type[BaseException], ...]
    ) -> None:
        super().__init__(logging.ERROR)
        self._fail, self._tolerated = fail, tolerated

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, self._tolerated):
            return
        self._fail(f"the server logged: {record.getMessage()} ({error!r})")

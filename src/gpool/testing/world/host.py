"""The server's host: starts the real server over the database file, and kills it without warning.

After that nothing of the process reaches disk or network.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gpool.agent.state_machine.agent_state import AgentState
from gpool.core.errors import GpoolError
from gpool.core.ids import TaskId
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
from gpool.server.scheduling.loops import LoopRunner, all_loops
from gpool.server.scheduling.picture import StatePicture
from gpool.server.scheduling.policy import ActivePolicy
from gpool.server.scheduling.scheduler import Scheduler
from gpool.server.server import Server
from gpool.server.settings import Settings
from gpool.server.store import InlineStore
from gpool.server.store.operations.tasks import artifacts
from gpool.server.store.values import NodeCredentials
from gpool.server.wakeups import Hub
from gpool.testing.simulation import Dice, SimulatedProcess, Trace, VirtualLoop
from gpool.testing.world.database import DiskSpeed, SimulatedDisk
from gpool.testing.world.machine import SimulatedMachine
from gpool.testing.world.network import SimulatedLink
from gpool.wire import frames

T = TypeVar("T")
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
    machine: Callable[..., SimulatedMachine] = SimulatedMachine


@dataclass(slots=True)
class WallClock:
    """Server's clock: drifts by `rate`, is set forward by `steps`: (when, how far)."""

    loop: VirtualLoop
    rate: float = 1.0
    steps: tuple[tuple[int, int], ...] = ()

    def now(self) -> Instant:
        stepped = sum(by for at, by in self.steps if self.loop.us >= at)
        return Instant(self.passed() + stepped)

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


class ServerProcess:
    def __init__(self, site: HostEnvironment, number: int) -> None:
        self._site = site
        self.process = SimulatedProcess(f"server-{number}", self._task_ended)
        dice = site.dice.branch(f"server-{number}")
        self.disk: SimulatedDisk = site.parts.disk(
            site.loop, dice.branch("disk"), site.file, site.pace, site.committed, site.fail
        )
        hub, metrics = Hub(), Metrics()
        policy = Policy(order=site.settings.order)
        nodes = site.parts.registry(metrics, site.settings.ttl, site.clock.passed)
        picture = site.parts.picture(
            self.disk, nodes, ActivePolicy(policy), hub, metrics, site.clock.now
        )
        sealer = Sealer(self.disk, MasterSource(site.folder / "master.key"), site.clock.now)
        self.server: Server = site.parts.server(
            settings=site.settings,
            store=self.disk,
            clock=site.clock,
            ids=Ids(site.clock, dice.branch("ids")),
            hub=hub,
            nodes=nodes,
            picture=picture,
            scheduler=site.parts.scheduler(picture, sealer, metrics),
            reports=ReportBatches(picture.write, picture.absorb),
            blobs=Blobs(site.folder / "blobs", site.settings.max_artifact_bytes),
            credentials=Credentials(
                self.disk, site.clock.now, site.settings.ttl, b"the world's root key"
            ),
            gate=NodeAuthenticator(
                self.disk, site.clock.now, b"the world's root key", remember=site.settings.ttl
            ),
            metrics=metrics,
            sealer=sealer,
            guard=Guard(site.clock.now),
            submitting=submit.batching(),
        )
        self._links: list[SimulatedLink] = []

    def start(self) -> None:
        self.spawn(self._run())

    async def _run(self) -> None:
        await self.server.picture.rebuild(self.server.now)
        LoopRunner(self.server, *all_loops(self.server)).start()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.process.spawn(self._site.loop, work)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        error = task.exception()
        if error is not None and not isinstance(error, GpoolError):
            self._site.fail(f"a task of the server died: {error!r}")

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
                await channel.receive(frame)
            await channel.close()
            link.close_by_server()

        self._links.append(link)
        link.attach_server(deliver, lambda: deliver(None))
        self.spawn(pump())

    def kill(self) -> bool:
        """Return whether an open group of writes was lost."""
        lost = self.disk.crash()
        self.process.kill()
        for link in self._links:
            link.close_by_server()
        return lost


class Host:
    def __init__(self, site: HostEnvironment) -> None:
        self._site = site
        self._nodes: dict[str, NodeCredentials] = {}
        self.current: ServerProcess | None = None
        self.started = 0

    def know(self, secret: str, credentials: NodeCredentials) -> None:
        self._nodes[secret] = credentials

    def start(self) -> None:
        if self.current is None:
            self.started += 1
            self.current = ServerProcess(self._site, self.started)
            self._site.trace.say("server", "starts", self.started)
            self.current.start()

    def crash(self) -> None:
        if self.current is not None:
            lost = self.current.kill()
            self.current = None
            self._site.trace.say("server", "crashes", "with a group open" if lost else "")

    def stop(self) -> list[asyncio.Task[Any]]:
        if self.current is None:
            return []
        self.current.kill()
        return self.current.process.tasks

    def accept(self, link: SimulatedLink, secret: str) -> bool:
        if self.current is None:
            return False
        self.current.serve(link, self._nodes[secret])
        return True

    def put(
        self, secret: str, hold: frames.Hold, sha256: str, told: Callable[[bool], None]
    ) -> None:
        """Store an artifact without its bytes. A process that dies meanwhile does not answer."""
        process = self.current
        if process is None:
            return
        server, node = process.server, self._nodes[secret].node

        async def put() -> None:
            lease = (TaskId(hold.task), hold.epoch)
            told(
                await server.write(artifacts.add_artifact(sha256, 1, None, node, lease, server.now))
            )

        process.spawn(put())


class ErrorLogHandler(logging.Handler):
    """Fails the run: an exception that the loop runner survives is still a bug."""

    def __init__(self, fail: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._fail = fail

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._fail(f"the server logged: {record.getMessage()} ({error!r})")

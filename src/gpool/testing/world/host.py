"""The server's machine: it starts the real server over what is on the disk, and kills it without warning.

One incarnation is one process: its tasks die together, and nothing it does afterwards reaches disk or network.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gpool.core.errors import GpoolError
from gpool.core.ids import TaskId
from gpool.core.model import Instant
from gpool.core.scheduler.order.orders import Policy
from gpool.server.actions.tasks import submit
from gpool.server.blobs import Blobs
from gpool.server.clock import Ids
from gpool.server.identity.credentials import Credentials
from gpool.server.identity.node_proofs.verifier import NodeGate
from gpool.server.identity.secrets.sealer import MasterSource, Sealer
from gpool.server.identity.sign_in_guard import Guard
from gpool.server.metrics import Metrics
from gpool.server.scheduling.loops import Ticker, all_loops
from gpool.server.server import Server
from gpool.server.settings import Settings
from gpool.server.store import InlineStore
from gpool.server.store.operations.tasks import artifacts
from gpool.server.store.values import NodeCredentials
from gpool.server.wakeups import Hub
from gpool.testing.dice import Dice
from gpool.testing.loop import Household, VirtualLoop
from gpool.testing.world.disk import Disk, Pace
from gpool.testing.world.network import Link
from gpool.testing.world.parts import Parts
from gpool.testing.world.trace import Trace
from gpool.wire import frames

T = TypeVar("T")
EPOCH_US = 1_800_000_000_000_000
"""What the server's wall clock shows when a run begins."""


@dataclass(slots=True)
class WallClock:
    """The server's clock: right but for a drift, and for steps: (when, how far forward) it is set."""

    loop: VirtualLoop
    rate: float = 1.0
    steps: tuple[tuple[int, int], ...] = ()

    def now(self) -> Instant:
        stepped = sum(by for at, by in self.steps if self.loop.us >= at)
        return Instant(self.passed() + stepped)

    def passed(self) -> Instant:
        return Instant(EPOCH_US + int(self.loop.us * self.rate))


@dataclass(frozen=True, slots=True)
class Site:
    """What stays when the server's process dies."""

    loop: VirtualLoop
    dice: Dice
    trace: Trace
    parts: Parts
    folder: Path
    file: InlineStore
    pace: Pace
    settings: Settings
    clock: WallClock
    committed: Callable[[], None]
    fail: Callable[[str], None]


class Incarnation:
    """One process of the server."""

    def __init__(self, site: Site, number: int) -> None:
        self._site = site
        self.household = Household(f"server-{number}", self._task_ended)
        dice = site.dice.branch(f"server-{number}")
        self.disk: Disk = site.parts.disk(
            site.loop, dice.branch("disk"), site.file, site.pace, site.committed, site.fail
        )
        hub, metrics = Hub(), Metrics()
        policy = Policy(order=site.settings.order)
        sealer = Sealer(self.disk, MasterSource(site.folder / "master.key"), site.clock.now)
        self.server: Server = site.parts.server(
            settings=site.settings,
            store=self.disk,
            clock=site.clock,
            ids=Ids(site.clock, dice.branch("ids")),
            hub=hub,
            scheduler=site.parts.scheduler(
                self.disk,
                hub,
                metrics,
                policy,
                site.settings.ttl,
                sealer,
                clock=site.clock.now,
                passed=site.clock.passed,
            ),
            blobs=Blobs(site.folder / "blobs", site.settings.max_artifact_bytes),
            credentials=Credentials(
                self.disk, site.clock.now, site.settings.ttl, b"the world's root key"
            ),
            gate=NodeGate(
                self.disk, site.clock.now, b"the world's root key", remember=site.settings.ttl
            ),
            metrics=metrics,
            sealer=sealer,
            guard=Guard(site.clock.now),
            submitting=submit.batching(),
        )
        self._links: list[Link] = []

    def start(self) -> None:
        self.spawn(self._run())

    async def _run(self) -> None:
        await self.server.scheduler.rebuild(self.server.now)
        Ticker(self.server, *all_loops(self.server)).start()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.household.spawn(self._site.loop, work)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        error = task.exception()
        if error is not None and not isinstance(error, GpoolError):
            self._site.fail(f"a task of the server died: {error!r}")

    def serve(self, link: Link, credentials: NodeCredentials) -> None:
        """What the WebSocket route does: one frame after the other into the channel."""
        site, trace, name = self._site, self._site.trace, f"srv:{link.name}"
        inbox: deque[bytes | None] = deque()
        arrived = asyncio.Event()

        def send(frame: frames.ServerFrame) -> None:
            if self.household.alive:
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
        link.up.deliver = deliver
        link.on_server_closed = lambda: deliver(None)
        self.spawn(pump())

    def kill(self) -> bool:
        """Whether a group of writes was lost with it."""
        lost = self.disk.crash()
        self.household.kill()
        for link in self._links:
            link.close_by_server()
        return lost


class Host:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._nodes: dict[str, NodeCredentials] = {}
        self.current: Incarnation | None = None
        self.started = 0

    def know(self, secret: str, credentials: NodeCredentials) -> None:
        self._nodes[secret] = credentials

    def start(self) -> None:
        if self.current is None:
            self.started += 1
            self.current = Incarnation(self._site, self.started)
            self._site.trace.say("server", "starts", self.started)
            self.current.start()

    def crash(self) -> None:
        if self.current is not None:
            lost = self.current.kill()
            self.current = None
            self._site.trace.say("server", "crashes", "with a group open" if lost else "")

    def stop(self) -> list[asyncio.Task[Any]]:
        """The run is over: the process goes, and nobody is told. What is left of its tasks."""
        if self.current is None:
            return []
        self.current.kill()
        return self.current.household.tasks

    def accept(self, link: Link, secret: str) -> bool:
        if self.current is None:
            return False
        self.current.serve(link, self._nodes[secret])
        return True

    def put(
        self, secret: str, hold: frames.Hold, sha256: str, told: Callable[[bool], None]
    ) -> None:
        """What the artifact routes do, without the bytes. Nobody answers for a process that dies over it."""
        incarnation = self.current
        if incarnation is None:
            return
        server, node = incarnation.server, self._nodes[secret].node

        async def put() -> None:
            lease = (TaskId(hold.task), hold.epoch)
            told(
                await server.write(artifacts.add_artifact(sha256, 1, None, node, lease, server.now))
            )

        incarnation.spawn(put())


class FaultLog(logging.Handler):
    """What the server's ticker survives is still a bug: nothing may be logged as an error."""

    def __init__(self, fail: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._fail = fail

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._fail(f"the server logged: {record.getMessage()} ({error!r})")

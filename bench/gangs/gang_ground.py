"""What many interleavings of gangs stand on: a database with nodes and people, a store whose writes can wait, a clock."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from pathlib import Path
from types import coroutine
from typing import Any, TypeVar

from gpool.core.ids import GpuId, NodeId, UserId
from gpool.core.model import GIB, SECOND, Gpu, Instant, Node, Offer, Permission, Span
from gpool.core.scheduler.order.orders import Policy
from gpool.server.clock import Ids
from gpool.server.identity.sealer import MasterSource, Sealer
from gpool.server.metrics import Metrics
from gpool.server.nodes.connection import NodeChannel
from gpool.server.nodes.reconciliation import OfferTerms
from gpool.server.nodes.registry import NodeRegistry
from gpool.server.nodes.reports import ReportBatches
from gpool.server.nodes.telemetry import Telemetry
from gpool.server.read_only import ReadOnlyMode
from gpool.server.replicas.membership import SoleServer
from gpool.server.scheduling.picture import StatePicture
from gpool.server.scheduling.policy import ActivePolicy
from gpool.server.scheduling.scheduler import Scheduler
from gpool.server.settings import Settings
from gpool.server.store import SqliteStore
from gpool.server.store.operations import nodes
from gpool.server.store.operations.identity import users
from gpool.server.store.protocol import Operation, Statement
from gpool.server.store.values import NodeCredentials, User
from gpool.server.wakeups import Hub
from gpool.testing.simulation import Dice
from gpool.testing.world.database import empty_database, fast_folder
from gpool.wire import frames

T = TypeVar("T")
BEGIN = Instant(1_800_000_000 * SECOND)


def _gpus(node: int, count: int, model: str) -> tuple[Gpu, ...]:
    return tuple(Gpu(n, f"g-{node}-{n}", model, "nvidia", 24 * GIB, True) for n in range(count))


def _offer(node: int, site: str, gpus: int, model: str = "A10G") -> Offer:
    return Offer(
        2000,
        8 * GIB,
        100 * GIB,
        _gpus(node, gpus, model),
        site=site,
        address=f"10.1.0.{node}" if site else "",
        gang_port=7000 if site else 0,
    )


OFFERS = {
    1: _offer(1, "a", 2),
    2: _offer(2, "a", 1),
    3: _offer(3, "a", 1, "RTX4090"),
    4: _offer(4, "b", 1),
    5: _offer(5, "b", 1),
    6: _offer(6, "", 1),
}


@coroutine
def _pause() -> Generator[None, None, None]:
    yield


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Runs to its end what waits for nothing."""
    try:
        while True:
            work.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value


class Door:
    """The store, inside the one transaction that is open; a write can be kept waiting before it is made."""

    def __init__(self, path: Path) -> None:
        self.file = SqliteStore.inline(path, synchronous="OFF")
        self.is_slow = False
        self.wrote = True
        self.rewrite: Callable[[Operation[Any]], Operation[Any]] | None = None

    async def write(self, operation: Operation[T]) -> T:
        if self.is_slow:
            await _pause()
        return self.now(operation)

    async def read(self, operation: Operation[T]) -> T:
        return self.now(operation)

    async def close(self) -> None:
        self.file.close()

    def now(self, operation: Operation[T]) -> T:
        self.wrote = True
        value: T = self.file.write_now(self.rewrite(operation) if self.rewrite else operation)
        return value


@dataclass(slots=True)
class Time:
    """The server's clock; it stands still within a step."""

    at: Instant = BEGIN

    def now(self) -> Instant:
        return self.at


@dataclass(slots=True)
class Desk:
    """What a channel asks of the server."""

    settings: Settings
    store: Door
    sealer: Sealer
    ids: Ids
    nodes: NodeRegistry
    picture: StatePicture
    scheduler: Scheduler
    reports: ReportBatches
    time: Time
    metrics: Metrics
    examiner: None = None
    replica: SoleServer = field(default_factory=SoleServer)
    telemetry: Telemetry = field(default_factory=Telemetry)
    read_only: ReadOnlyMode = field(default_factory=ReadOnlyMode)

    @property
    def now(self) -> Instant:
        return self.time.at

    @property
    def offer_terms(self) -> OfferTerms:
        return OfferTerms(self.settings.owner_quota)

    def write(self, operation: Operation[T]) -> Awaitable[T]:
        return self.store.write(operation)


class Ground:
    """A database with nodes and people, made once and used by many interleavings."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gpool-gangs-", dir=fast_folder())
        path = Path(self._folder.name)
        (path / "gpool.db").write_bytes(empty_database())
        self.store = Door(path / "gpool.db")
        self.time = Time()
        self.settings = Settings(data=path)
        self.sealer = Sealer(self.store, MasterSource(path / "master.key"), self.time.now)
        finish(self.sealer.prepare())
        self.metrics, self.hub = Metrics(), Hub()
        owner = User(UserId(1), "owner", frozenset({Permission.PROVIDER}), BEGIN)
        self.store.now(users.create_user(owner))
        for user in (11, 12, 13):
            self.store.now(
                users.create_user(
                    User(UserId(user), f"u{user}", frozenset({Permission.CONSUMER}), BEGIN)
                )
            )
        self.credentials: dict[int, NodeCredentials] = {}
        for number, offer in OFFERS.items():
            gpus = [GpuId(100 * number + gpu.index) for gpu in offer.gpus]
            made = nodes.create_node(
                NodeId(number), f"n{number}", owner.id, None, f"s{number}", offer, gpus, BEGIN
            )
            self.credentials[number] = self.store.now(made)
            self._greet(number)
        self.nodes: dict[int, Node] = {
            int(row.node.id): row.node for row in self.store.now(nodes.nodes())
        }

    def picture(
        self, policy: Policy | None = None, kind: type[StatePicture] = StatePicture
    ) -> StatePicture:
        registry = NodeRegistry(self.metrics, Span(60 * SECOND))
        active = ActivePolicy(policy or Policy())
        return kind(self.store, registry, active, self.hub, self.metrics)

    def desk(self, picture: StatePicture, dice: Dice) -> Desk:
        return Desk(
            self.settings,
            self.store,
            self.sealer,
            Ids(self.time, dice),
            picture.nodes,
            picture,
            Scheduler(picture, self.sealer, self.metrics),
            ReportBatches(picture.write, picture.absorb),
            self.time,
            self.metrics,
        )

    def _greet(self, number: int) -> None:
        """Once for real: what the server keeps of an offer is its own matter."""
        desk: Any = self.desk(self.picture(), Dice("ground"))
        hello = frames.Hello(frames.PROTOCOL, "boot-0000", OFFERS[number], 1, ())
        finish(NodeChannel(desk, self.credentials[number], lambda _: None).receive(hello))

    def settle(self, run: Callable[[], None]) -> None:
        """Makes for good the temporary tables that a run needs: made anew in each, they would cost more than all the rest."""
        self.store.file.begin_group()
        run()
        made = self.store.now(_temporary_tables())
        self.store.file.abandon_group()
        for sql in made:
            self.store.now(_make(sql))

    def close(self) -> None:
        self.store.file.close()
        self._folder.cleanup()


def _temporary_tables() -> Operation[list[str]]:
    rows = yield Statement("SELECT sql FROM sqlite_temp_master WHERE type = 'table'")
    return [row[0].replace("CREATE TABLE", "CREATE TEMP TABLE", 1) for row in rows]


def _make(sql: str) -> Operation[None]:
    yield Statement(sql)

"""Processes of the replicas behind a load balancer, which sends connections and requests to any that is ready.

Each runs the production server with `Membership` and `FollowChanges` over the simulated database.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpool.core.errors import NotSignedIn, Unreachable
from gpool.core.ids import encode
from gpool.server.actions import policy, quotas
from gpool.server.nodes.connection import NodeChannel
from gpool.server.replicas.follow import FollowChanges, leadership_changed
from gpool.server.replicas.membership import Membership
from gpool.server.scheduling.loops import LoopRunner, all_loops
from gpool.server.settings import span
from gpool.server.store.drivers.replica_sessions import ReplicaLink
from gpool.server.store.values import NodeCredentials
from gpool.testing.simulation import Dice
from gpool.testing.world.host import (
    HostEnvironment,
    Parts,
    ServerProcess,
    WallClock,
    store_artifact,
    wired,
)
from gpool.testing.world.network import SimulatedLink
from gpool.testing.world.replicas.database import SimulatedPostgres
from gpool.testing.world.replicas.pausing import PausableLoop, PausableProcess
from gpool.testing.world.replicas.sessions import (
    DatabasePath,
    FeedConditions,
    ReplicaStore,
    SimulatedFeedLink,
    SimulatedReplicas,
    StoreSession,
)
from gpool.testing.world.replicas.watched_channel import WatchedChannel
from gpool.transfer.node_proofs import NodeKey, RequestStatement, public_text
from gpool.wire import frames

MS = 1_000
S = 1_000_000
FIRST_REPLICA = 7_000
PING_US = (3 * S, 6 * S)
"""Time until an agent closes the connection to a stopped server: one to two thirds of a lease time, as in production."""
RESTART_US = (200 * MS, 1_500 * MS)


@dataclass(frozen=True, slots=True)
class ReplicaParts:
    """A flaw replaces one component of each replica."""

    store: Callable[..., ReplicaStore] = ReplicaStore
    link: Callable[..., ReplicaLink] = SimulatedFeedLink
    follow: Callable[..., FollowChanges] = FollowChanges
    changed: Callable[..., None] = leadership_changed


@dataclass(frozen=True, slots=True)
class ReplicaConditions:
    """By seed: `skew_us`, largest difference of a replica's clock; `replays`, chance that a request is sent twice."""

    feed: FeedConditions = field(default_factory=FeedConditions)
    skew_us: int = 0
    replays: float = 0.0


class ReplicaProcess:
    """One start of a replica. `number` counts all starts, `place` is the replica's index."""

    def __init__(
        self,
        site: HostEnvironment,
        place: int,
        number: int,
        parts: ReplicaParts,
        database: SimulatedPostgres,
        conditions: ReplicaConditions,
    ) -> None:
        self.place, self.id = place, FIRST_REPLICA + number
        self._site, self._parts, self._database = site, parts, database
        dice = site.dice.branch(f"replica-{number}")
        assert isinstance(site.loop, PausableLoop)
        process = PausableProcess(site.loop, f"replica-{number}", site.task_ended)
        self.path = DatabasePath(site.loop, dice.branch("path"), process, conditions.feed)
        store = parts.store(
            site.loop, dice.branch("disk"), site.file, site.pace, lambda: None, site.fail
        )
        store.session = StoreSession(database, self.path, self.id)
        own = replace(
            site,
            clock=_clock(site.clock, dice.branch("clock"), conditions.skew_us),
            parts=_watched(site),
        )
        self.membership = Membership(
            SimulatedReplicas(database, self.path, store, parts.link),
            self.id,
            f"replica-{place}",
            "world",
            span(site.settings.replica_timeout_s),
        )
        server = wired(own, store, dice, self.membership)
        self.base = ServerProcess(own, process, store, server)
        self.follow = parts.follow(server, self.membership)
        self.is_ready = self.is_draining = False

    @property
    def process(self) -> PausableProcess:
        process = self.base.process
        assert isinstance(process, PausableProcess)
        return process

    async def run(self, failed: Callable[[], None]) -> None:
        """Start as `app.open_server` does; `failed` is called if the database does not answer."""
        server, membership = self.base.server, self.membership
        try:
            await membership.open_store()
            await membership.start(lambda: self._parts.changed(server, membership))
            await quotas.refresh(server)
            await policy.refresh(server)
            await server.picture.rebuild(server.now)
        except Unreachable:
            failed()
            return
        loops = [
            self.follow if isinstance(each, FollowChanges) else each for each in all_loops(server)
        ]
        LoopRunner(server, *loops).start()
        self.is_ready = True

    async def drain(self) -> None:
        """As `app.drain`."""
        self.is_draining = True
        await self.membership.resign()
        for connection in self.base.server.nodes.connections:
            connection.refuse("unreachable", "the server is stopping; connect again", retry=True)

    @property
    def is_settled(self) -> bool:
        """True once all changes of the others were read: its state must then agree with the store."""
        if not self.is_ready or self.process.paused or not self.base.is_settled:
            return False
        follow, server = self.follow, self.base.server
        if follow._cursor is None or follow._left_out:
            return False
        if follow._unknown != server.picture.validity.unknown_commits:
            return False
        in_doubt = server.nodes.lease_time(server.now) < follow._doubt_until
        own = None if in_doubt else self.id
        page = self._database.page(follow._cursor)
        return all(each.replica_id == own or each.xid in follow._applied for each in page.changes)

    def kill(self, *, is_noticed: bool) -> bool:
        """`is_noticed` False: the database keeps the lock's session, as after a power failure."""
        pid = self.membership._lock.pid
        if is_noticed and pid is not None:
            self._database.disconnect(pid)
        self._database.listeners.pop(self.id, None)
        return self.base.kill()


def _watched(site: HostEnvironment) -> Parts:
    if site.parts.channel is not NodeChannel:
        return site.parts

    def channel(*arguments: Any) -> NodeChannel:
        made = WatchedChannel(*arguments)
        made.fail = site.fail
        return made

    return replace(site.parts, channel=channel)


def _clock(clock: WallClock, dice: Dice, skew_us: int) -> WallClock:
    ahead_us = dice.between(-skew_us, skew_us)
    return replace(clock, rate=clock.rate * (1 + (dice.random() - 0.5) * 0.002), ahead_us=ahead_us)


class ReplicaHost:
    """`ServerHost` of several replicas."""

    def __init__(
        self, site: HostEnvironment, count: int, parts: ReplicaParts, conditions: ReplicaConditions
    ) -> None:
        self._site, self._parts, self._conditions = site, parts, conditions
        self._dice = site.dice.branch("load balancer")
        self.database = SimulatedPostgres(site.file, site.clock.now, site.committed)
        self._running: list[ReplicaProcess | None] = [None] * count
        self._started = 0
        self._nodes: dict[str, NodeCredentials] = {}
        self._accepted: set[str] = set()  # proofs
        self.replayed = 0

    def know(self, secret: str, credentials: NodeCredentials) -> None:
        self._nodes[secret] = credentials

    def public_key(self, secret: str) -> str:
        return public_text(_key_of(secret).public)

    # ---- processes

    @property
    def alive(self) -> Sequence[ReplicaProcess]:
        return [each for each in self._running if each is not None]

    @property
    def leaders(self) -> Sequence[ReplicaProcess]:
        """Replicas that believe they lead."""
        return [each for each in self.alive if each.membership.leads]

    def start(self) -> None:
        for place in range(len(self._running)):
            self.start_at(place)

    def start_at(self, place: int) -> None:
        if self._running[place] is not None:
            return
        self._started += 1
        made = ReplicaProcess(
            self._site, place, self._started, self._parts, self.database, self._conditions
        )
        self._running[place] = made
        self._site.trace.say(f"replica-{place}", "starts", made.id)
        made.base.spawn(made.run(lambda: self._failed(made)))

    def _failed(self, process: ReplicaProcess) -> None:
        """End a process that could not start; its supervisor starts the next one."""
        self._site.loop.outside_us(1, self.kill, process)
        self._site.loop.outside_us(self._dice.between(*RESTART_US), self.start_at, process.place)

    def kill(self, process: ReplicaProcess) -> None:
        if self._running[process.place] is not process:
            return
        self._running[process.place] = None
        lost = process.kill(is_noticed=self._dice.chance(0.7))
        how = "with a transaction open" if lost else ""
        self._site.trace.say(f"replica-{process.place}", "dies", process.id, how)

    def crash(self) -> None:
        """Kill any; it starts again with the others."""
        if self.alive:
            self.kill(self._dice.pick(self.alive))

    def stop(self) -> list[asyncio.Task[Any]]:
        tasks: list[asyncio.Task[Any]] = []
        for each in self.alive:
            each.kill(is_noticed=True)
            tasks += each.process.tasks
        return tasks

    def pause(self, process: ReplicaProcess, lasts_us: int) -> None:
        if process.process.paused or self._running[process.place] is not process:
            return
        loop = self._site.loop
        self._site.trace.say(f"replica-{process.place}", "stops", process.id, lasts_us)
        process.process.pause()
        if self._dice.chance(0.5):
            late_us = self._dice.between(1, 300 * MS)
            process.path.held_until_us = loop.us + lasts_us + late_us
        for link in process.base.links:
            self._ping(process, link)
        loop.outside_us(lasts_us, self.resume, process)

    def resume(self, process: ReplicaProcess) -> None:
        if process.process.paused:
            self._site.trace.say(f"replica-{process.place}", "continues", process.id)
            process.process.resume()

    def _ping(self, process: ReplicaProcess, link: SimulatedLink) -> None:
        self._site.loop.outside_us(self._dice.between(*PING_US), self._no_pong, process, link)

    def _no_pong(self, process: ReplicaProcess, link: SimulatedLink) -> None:
        if process.process.paused:
            link.break_off(1, self._dice.between(1, 500 * MS), lose=True)

    def drain(self, process: ReplicaProcess, lasts_us: int) -> None:
        if not process.is_ready or process.is_draining:
            return
        self._site.trace.say(f"replica-{process.place}", "drains", process.id)
        process.base.spawn(self._drain(process, lasts_us))

    async def _drain(self, process: ReplicaProcess, lasts_us: int) -> None:
        await process.drain()
        await asyncio.sleep(lasts_us / 1e6)
        for connection in process.base.server.nodes.connections:
            connection.refuse("unreachable", "the server is stopping; connect again", retry=True)
        await process.membership.stop()
        loop = self._site.loop
        loop.outside_us(1, self.kill, process)
        loop.outside_us(self._dice.between(*RESTART_US), self.start_at, process.place)

    # ---- the load balancer

    def _balanced(self) -> ReplicaProcess | None:
        ready = [each for each in self.alive if each.is_ready and not each.is_draining]
        return self._dice.pick(ready) if ready else None

    def serving(self) -> ServerProcess | None:
        process = self._balanced()
        return None if process is None else process.base

    def settled(self) -> Sequence[ServerProcess]:
        return [each.base for each in self.alive if each.is_settled]

    def accept(self, link: SimulatedLink, secret: str) -> bool:
        process = self._balanced()
        if process is None:
            return False
        links = process.base.links
        links[:] = [each for each in links if not each.broken]
        process.base.serve(link, self._nodes[secret])
        if process.process.paused:
            self._ping(process, link)
        return True

    # ---- requests of nodes

    def put(
        self, secret: str, hold: frames.Hold, sha256: str, told: Callable[[bool], None]
    ) -> None:
        """Send an upload with its proof, and perhaps a copy that somebody recorded to any replica."""
        process = self._balanced()
        if process is None:
            return
        gate, who = process.base.server.gate, self._nodes[secret]
        token = gate.token(who).token
        lease = f"{encode('task', hold.task)}:{hold.epoch}"
        at_s = process.base.server.now // S
        nonce = public_text(self._dice.randbytes(16))
        path = f"/v1/artifacts/{sha256}"
        statement = RequestStatement(gate.name, "PUT", path, token, at_s, nonce, lease)
        proof = _key_of(secret).request_proof(statement)

        def deliver(to: ReplicaProcess, answer: Callable[[bool], None]) -> None:
            if to.process.alive:
                to.base.spawn(self._put(to, statement, proof, (hold, sha256), answer))

        deliver(process, told)
        if self._dice.chance(self._conditions.replays):
            other = self._balanced() or process
            late_us = self._dice.between(0, self._dice.pick((2, 2, 500)) * MS)
            self._site.loop.outside_us(late_us, deliver, other, lambda _: None)

    async def _put(
        self,
        process: ReplicaProcess,
        statement: RequestStatement,
        proof: str,
        upload: tuple[frames.Hold, str],
        told: Callable[[bool], None],
    ) -> None:
        server, (hold, sha256) = process.base.server, upload
        try:
            who = await server.gate.requests(
                statement.method, statement.path, statement.lease, statement.token, proof
            )
        except NotSignedIn:
            self.replayed += proof in self._accepted
            told(False)
            return
        if proof in self._accepted:
            self._site.fail(f"a proof of node {who.node} was accepted twice")
        self._accepted.add(proof)
        await store_artifact(server, who.node, hold, sha256, told)


def _key_of(secret: str) -> NodeKey:
    return NodeKey(hashlib.sha256(secret.encode()).digest())

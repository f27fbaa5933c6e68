"""A pool in one process under virtual time: real planner, store, server and agent state machines; the rest is simulated.

The same seed gives the same run, to the byte of its trace, in every process.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpool.core.ids import GpuId, NodeId, UserId
from gpool.core.model import GIB, Gpu, Instant, Offer, Permission
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.server.settings import Settings
from gpool.server.store import InlineStore, SqliteStore
from gpool.server.store.operations import nodes
from gpool.server.store.operations.identity import users
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.tasks import artifacts
from gpool.server.store.values import User
from gpool.testing.simulation import Deadlock, Dice, Livelock, Trace, VirtualLoop
from gpool.testing.world.agents import Agent, AgentEnvironment
from gpool.testing.world.consumers import (
    FUNCTION_SHA256,
    Consumer,
    ConsumerEnvironment,
    draw_endless,
    draw_gang,
    draw_submission,
)
from gpool.testing.world.database import (
    DatabaseReader,
    DiskSpeed,
    empty_database,
    fast_folder,
    rebuilt,
)
from gpool.testing.world.faults import FIRST_NODE, FaultInjector, FaultLimits, FaultPlan, draw
from gpool.testing.world.host import (
    Deployment,
    ErrorLogHandler,
    HostEnvironment,
    OneServer,
    Parts,
    WallClock,
)
from gpool.testing.world.liars import OFFER as LIES
from gpool.testing.world.liars import Liar, LiarPlan
from gpool.testing.world.network import SimulatedNetwork
from gpool.testing.world.oracle import Oracle

S = 1_000_000
MS = 1_000
CALM_US = 180 * S
"""Time after the last fault within which every task must have ended."""

_ALONE = (
    Offer(
        4000,
        16 * GIB,
        100 * GIB,
        tuple(Gpu(n, f"sim-0-{n}", "RTX4090", "nvidia", 24 * GIB, True) for n in range(2)),
        frozenset({"3.11"}),
    ),
    Offer(
        2000,
        8 * GIB,
        100 * GIB,
        (Gpu(0, "sim-1-0", "A10G", "nvidia", 24 * GIB, True),),
        frozenset({"3.11"}),
    ),
    Offer(3000, 8 * GIB, 100 * GIB, (), frozenset({"3.11"})),
)
OFFERS = tuple(
    replace(offer, site="hall", address=f"10.0.0.{number}", gang_port=7000)
    for number, offer in enumerate(_ALONE, 1)
)
GANGS = 0.5
"""Fraction of runs with gangs."""


@dataclass(frozen=True, slots=True)
class WorldOutcome:
    seed: int
    violation: str | None
    digest: str
    virtual_s: float
    steps: int  # lines of the trace
    commits: int
    attempts: int
    accepted: int
    crashes: int
    resumed: int = 0  # attempts that went on from a checkpoint
    gangs: int = 0  # that succeeded
    kept: int = 0  # leases that malicious nodes did not end
    lines: list[str] = field(default_factory=list)


def run(
    seed: int,
    parts: Parts | None = None,
    *,
    keep_trace: bool = False,
    limits: FaultLimits | None = None,
    steps: tuple[tuple[int, int], ...] = (),
    liars: LiarPlan | None = None,
    deployment: Deployment | None = None,
) -> WorldOutcome:
    """A violation ends the run. `steps`: (when, how far) the server's time of day is set forward, in microseconds."""
    folder = Path(tempfile.mkdtemp(prefix="gpool-world-", dir=fast_folder()))
    try:
        kind = (parts or Parts(), limits or FaultLimits(), deployment or OneServer())
        return World(seed, folder, *kind, keep_trace, steps, liars).run(seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class World:
    def __init__(
        self,
        seed: int,
        folder: Path,
        parts: Parts,
        limits: FaultLimits,
        deployment: Deployment,
        keep_trace: bool,
        steps: tuple[tuple[int, int], ...] = (),
        liars: LiarPlan | None = None,
    ) -> None:
        liars = liars or LiarPlan(0, limit_s=300.0)
        self._deployment = deployment
        self.dice = Dice(f"world-{seed}")
        self.loop: VirtualLoop = deployment.loop()
        self.loop.set_exception_handler(self._loop_failed)
        self.trace = Trace(self.loop, keep=keep_trace)
        self.violation: str | None = None
        self._over: asyncio.Future[None] = self.loop.create_future()
        deployment.plan(self.dice, limits.until_us)
        plan = draw(self.dice.branch("faults"), len(OFFERS), limits)
        self.plan: FaultPlan = replace(plan, ends_us=max(plan.ends_us, deployment.ends_us))
        self.oracle = Oracle(lambda: self.loop.us, self.fail)
        network = SimulatedNetwork(self.loop, self.dice.branch("network"), self.plan.conditions)
        (folder / "gpool.db").write_bytes(empty_database())
        self._file = SqliteStore.inline(folder / "gpool.db", synchronous="OFF")
        speed = DiskSpeed()
        rate = 1 + (self.dice.branch("clock").random() - 0.5) * 0.01
        clock = WallClock(self.loop, rate, steps)
        given: dict[str, Any] = {
            "data": folder,
            "ttl_s": 4.0,
            "margin_s": 0.5,
            "beat_s": 0.8,
            "tick_s": 0.25,
            "prune_s": 20.0,
            "seal_logs_after_s": 1e6,
            "order": self.dice.branch("order").pick(tuple(sorted(ORDERS))),
            "release_s": liars.limit_s,
            "collect_s": liars.limit_s,
        }
        settings = Settings(**{**given, **deployment.settings})
        self.host = deployment.host(
            HostEnvironment(
                self.loop,
                self.dice,
                self.trace,
                parts,
                folder,
                self._file,
                speed,
                settings,
                clock,
                self._committed,
                self.fail,
            )
        )
        around = AgentEnvironment(
            self.loop, network, self.oracle, self.trace, self.host, parts, self.fail
        )
        offers = [deployment.offer(number, offer) for number, offer in enumerate(OFFERS)]
        self.agents = _make_nodes(self._file, around, self.dice, clock.now(), offers)
        lies = [deployment.offer(len(OFFERS) + number, LIES) for number in range(liars.count)]
        hostile = _make_liars(self._file, around, self.dice, clock.now(), lies)
        self.consumers = _make_consumers(
            self._file,
            ConsumerEnvironment(self.loop, network, self.host, self.oracle, self.trace, self.fail),
            self.dice,
            clock.now(),
        )
        self._faults = FaultInjector(
            self.loop, self.dice, self.trace, network, self.host, self.agents, self.oracle, speed
        )
        everybody: tuple[Agent | Liar, ...] = (*self.agents, *hostile)
        names = {FIRST_NODE + number: node.name for number, node in enumerate(everybody)}
        self._reader = DatabaseReader(folder / "gpool.db", names)
        self._lives: list[asyncio.Task[None]] = []

    def run(self, seed: int) -> WorldOutcome:
        root = logging.getLogger("gpool")
        handler = ErrorLogHandler(self.fail, self._deployment.tolerated)
        propagates, root.propagate = root.propagate, False
        root.addHandler(handler)
        collects = gc.isenabled()
        gc.disable()  # a finaliser runs at an instant that no seed decides
        try:
            asyncio.set_event_loop(self.loop)
            self.loop.run_until_complete(self._live())
        except (Deadlock, Livelock) as stuck:
            self.fail(str(stuck))
        finally:
            self.loop.run_until_complete(self._wind_up())
            root.removeHandler(handler)
            root.propagate = propagates
            self._close()
            if collects:
                gc.enable()
        return WorldOutcome(
            seed,
            self.violation,
            self.trace.digest(),
            self.loop.time(),
            self.trace.count,
            self._reader.reads,
            self.oracle.attempts,
            self.oracle.accepted,
            self._faults.server_crashes,
            self.oracle.resumed,
            self.oracle.gangs,
            sum(node.kept for node in self.oracle.nodes.values()),
            self.trace.lines,
        )

    async def _live(self) -> None:
        self.host.start()
        for agent in self.agents:
            agent.start()
        for fault in self.plan.faults:
            self.loop.after_us(fault.at_us, self._faults.strike, fault)
        self._deployment.begin(self.loop)
        submissions = self.dice.branch("wishes")
        gangs = self.dice.branch("gangs")
        until_us = self.plan.ends_us - 4 * S
        for number, consumer in enumerate(self.consumers):
            mine = [
                draw_submission(submissions, f"{consumer.name}-s{n}", until_us)
                for n in range(submissions.between(2, 5))
            ]
            if number == 0 and gangs.chance(GANGS):
                mine += [
                    draw_gang(gangs, f"{consumer.name}-g{n}", until_us)
                    for n in range(gangs.between(1, 4))
                ]
            if number == 0:
                mine += draw_endless(
                    self.dice.branch("endless"), consumer.name, until_us, self._deployment.endless
                )
            mine = [replace(each, request=self._deployment.request(each.request)) for each in mine]
            self._lives.append(self.loop.create_task(consumer.live(mine)))
        for life in self._lives:
            life.add_done_callback(self._life_ended)
        self.loop.after_us(300 * MS, self._compare)
        self.loop.after_us(self.plan.ends_us, self._end_faults)
        self.loop.after_us(self.plan.ends_us + 100 * MS, self._look_for_the_end)
        await self._over

    def _end_faults(self) -> None:
        self._deployment.end_all()
        self._faults.end_all()

    async def _wind_up(self) -> None:
        for life in self._lives:
            life.cancel()
        for agent in self.agents:
            agent.crash()
        await asyncio.gather(*self._lives, return_exceptions=True)
        while tasks := self.host.stop():  # a cancelled task may start another one
            await asyncio.gather(*tasks, return_exceptions=True)

    def _life_ended(self, life: asyncio.Task[None]) -> None:
        if not life.cancelled() and life.exception() is not None:
            self.fail(f"a consumer died of {life.exception()!r}")

    def fail(self, what: str) -> None:
        """Only the first violation is reported."""
        if self.violation is None:
            self.violation = f"at {self.loop.us / 1e6:.6f} s: {what}"
            self.trace.say("world", "VIOLATION", what)
            if not self._over.done():
                self._over.set_result(None)

    def _loop_failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.fail(f"{context.get('message')}: {context.get('exception')!r}")

    # ---- checks

    def _committed(self) -> None:
        before = self.oracle.rows
        self.oracle.checkpointed(self._reader.progress())
        self.oracle.absorb(self._reader.rows())
        for task, line in self._reader.new_logs():
            self.oracle.logged(before, task, line)

    def _compare(self) -> None:
        for process in self.host.settled():
            picture = process.server.picture
            rows = self._file.read_now(leases.picture())
            if picture.state != rebuilt(picture, rows):
                who = process.process.name
                self.fail(f"{who}: the scheduling state differs from one rebuilt from the store")
        self.loop.after_us(300 * MS, self._compare)

    def _look_for_the_end(self) -> None:
        open_rows = [
            row for row in self.oracle.rows.values() if row.holding or not row.status.is_final
        ]
        waiting = sum(consumer.unfinished for consumer in self.consumers)
        if not open_rows and not waiting:
            self.trace.say("world", "ends")
            if not self._over.done():
                self._over.set_result(None)
        elif self.loop.us > self.plan.ends_us + CALM_US:
            self.fail(f"not ended in time: {waiting} consumers wait, {open_rows[:2]}")
        else:
            self.loop.after_us(100 * MS, self._look_for_the_end)

    def _close(self) -> None:
        self._reader.close()
        self._file.close()
        self.loop.close()
        asyncio.set_event_loop(None)


def _make_nodes(
    file: InlineStore, around: AgentEnvironment, dice: Dice, now: Instant, offers: Sequence[Offer]
) -> Sequence[Agent]:
    owner = User(UserId(1), "owner", frozenset({Permission.PROVIDER}), now)
    file.write_now(users.create_user(owner))
    agents = []
    for number, offer in enumerate(offers):
        name, secret, id_ = f"n{number}", f"secret-{number}", NodeId(FIRST_NODE + number)
        gpu_ids = [GpuId(1000 + 10 * number + gpu.index) for gpu in offer.gpus]
        key = around.host.public_key(secret)
        credentials = file.write_now(
            nodes.create_node(id_, name, owner.id, None, secret, offer, gpu_ids, now, key)
        )
        around.host.know(secret, credentials)
        agents.append(Agent(around, name, secret, offer, dice.branch(name)))
    return agents


def _make_liars(
    file: InlineStore, around: AgentEnvironment, dice: Dice, now: Instant, offers: Sequence[Offer]
) -> Sequence[Liar]:
    if not offers:
        return ()
    owner = User(UserId(2), "mallory", frozenset({Permission.PROVIDER}), now)
    file.write_now(users.create_user(owner))
    made = []
    for number, offer in enumerate(offers):
        name, secret = f"liar{number}", f"liar-secret-{number}"
        id_ = NodeId(FIRST_NODE + len(OFFERS) + number)
        gpu_ids = [GpuId(2000 + 10 * number + gpu.index) for gpu in offer.gpus]
        credentials = file.write_now(
            nodes.create_node(id_, name, owner.id, None, secret, offer, gpu_ids, now)
        )
        around.host.know(secret, credentials)
        made.append(Liar(around, name, secret, dice.branch(name), offer))
        made[-1].start()
    return made


def _make_consumers(
    file: InlineStore, around: ConsumerEnvironment, dice: Dice, now: Instant
) -> Sequence[Consumer]:
    consumers = []
    for number in range(3):
        name = f"c{number}"
        user = User(UserId(10 + number), name, frozenset({Permission.CONSUMER}), now)
        file.write_now(users.create_user(user))
        file.write_now(artifacts.add_artifact(FUNCTION_SHA256, 1, user.id, None, None, now))
        consumers.append(Consumer(around, name, user, dice.branch(name)))
    return consumers

"""A whole pool in one process under virtual time: real planner, store, server and sessions; everything else is weather.

`run(seed)` is a function: the same seed gives the same run, to the byte of its trace, in every process.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpool.core.ids import GpuId, NodeId, TaskId, UserId
from gpool.core.model import GIB, Availability, Gpu, Offer, Permission
from gpool.core.scheduler.order.orders import ORDERS
from gpool.server.actions.tasks.stopping import preempt_tasks
from gpool.server.settings import Settings
from gpool.server.store import SqliteStore
from gpool.server.store.operations.identity import users
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.nodes import nodes
from gpool.server.store.operations.tasks import artifacts
from gpool.server.store.values import User
from gpool.testing.dice import Dice
from gpool.testing.loop import Deadlock, Livelock, VirtualLoop, new_loop
from gpool.testing.world.agents import Agent, Surroundings
from gpool.testing.world.consumers import FUNCTION_SHA256, Consumer, Counter, draw_gang, draw_wish
from gpool.testing.world.disk import Pace
from gpool.testing.world.faults import Fault, FaultPlan, Kind, Mischief, draw
from gpool.testing.world.files import empty_database, fast_folder, rebuilt
from gpool.testing.world.host import FaultLog, Host, Site, WallClock
from gpool.testing.world.network import Network, Weather
from gpool.testing.world.parts import Parts
from gpool.testing.world.record import Record
from gpool.testing.world.rows import Reader
from gpool.testing.world.trace import Trace

S = 1_000_000
MS = 1_000
CALM_US = 180 * S
"""Once the faults are over, everything must have ended after this long."""

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
"""Of all runs: those in which somebody asks for several nodes at once."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run."""

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
    lines: list[str] = field(default_factory=list)


def run(
    seed: int,
    parts: Parts | None = None,
    *,
    keep_trace: bool = False,
    mischief: Mischief | None = None,
    steps: tuple[tuple[int, int], ...] = (),
) -> Outcome:
    """One run; a violation ends it. `steps`: when and how far the server's time of day is set forward, in microseconds."""
    folder = Path(tempfile.mkdtemp(prefix="gpool-world-", dir=fast_folder()))
    try:
        world = World(seed, folder, parts or Parts(), mischief or Mischief(), keep_trace, steps)
        return world.run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class World:
    def __init__(
        self,
        seed: int,
        folder: Path,
        parts: Parts,
        mischief: Mischief,
        keep_trace: bool,
        steps: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.seed = seed
        self.dice = Dice(f"world-{seed}")
        self.loop: VirtualLoop = new_loop()
        self.loop.set_exception_handler(self._loop_failed)
        self.trace = Trace(self.loop, keep=keep_trace)
        self.violation: str | None = None
        self._over: asyncio.Future[None] = self.loop.create_future()
        self._parts = parts
        self.plan: FaultPlan = draw(self.dice.branch("faults"), len(OFFERS), mischief)
        self.record = Record(lambda: self.loop.us, self.fail)
        self.network = Network(self.loop, self.dice.branch("network"), self.plan.weather)
        (folder / "gpool.db").write_bytes(empty_database())
        self._file = SqliteStore.inline(folder / "gpool.db", synchronous="OFF")
        self._pace = Pace()
        rate = 1 + (self.dice.branch("clock").random() - 0.5) * 0.01
        clock = WallClock(self.loop, rate, steps)
        settings = Settings(
            data=folder,
            ttl_s=4.0,
            margin_s=0.5,
            beat_s=0.8,
            tick_s=0.25,
            prune_s=20.0,
            seal_logs_after_s=1e6,
            order=self.dice.branch("order").pick(tuple(sorted(ORDERS))),
        )
        self.host = Host(
            Site(
                self.loop,
                self.dice,
                self.trace,
                parts,
                folder,
                self._file,
                self._pace,
                settings,
                clock,
                self._committed,
                self.fail,
            )
        )
        self._clock = clock
        self._node_names: dict[int, str] = {}
        self.agents = self._make_nodes()
        self.consumers = self._make_consumers()
        self._reader = Reader(folder / "gpool.db", self._node_names)
        self._lives: list[asyncio.Task[None]] = []
        self.commits = 0
        self.crashes = 0

    # ---- setting up

    def _make_nodes(self) -> list[Agent]:
        owner = User(UserId(1), "owner", frozenset({Permission.PROVIDER}), self._clock.now())
        self._file.write_now(users.create_user(owner))
        around = Surroundings(
            self.loop,
            self.network,
            self.record,
            self.trace,
            self.host,
            self._parts,
            self.fail,
        )
        agents = []
        for number, offer in enumerate(OFFERS):
            name, secret, id_ = f"n{number}", f"secret-{number}", NodeId(100 + number)
            self._node_names[id_] = name
            gpu_ids = [GpuId(1000 + 10 * number + gpu.index) for gpu in offer.gpus]
            credentials = self._file.write_now(
                nodes.create_node(
                    id_, name, owner.id, None, secret, offer, gpu_ids, self._clock.now()
                )
            )
            self.host.know(secret, credentials)
            agents.append(Agent(around, name, secret, offer, self.dice.branch(name)))
        return agents

    def _make_consumers(self) -> list[Consumer]:
        counter = Counter(self.loop, self.network, self.host, self.record, self.trace, self.fail)
        consumers = []
        for number in range(3):
            name, now = f"c{number}", self._clock.now()
            user = User(UserId(10 + number), name, frozenset({Permission.CONSUMER}), now)
            self._file.write_now(users.create_user(user))
            self._file.write_now(
                artifacts.add_artifact(FUNCTION_SHA256, 1, user.id, None, None, now)
            )
            consumers.append(Consumer(counter, name, user, self.dice.branch(name)))
        return consumers

    # ---- running

    def run(self) -> Outcome:
        root = logging.getLogger("gpool")
        handler = FaultLog(self.fail)
        propagates, root.propagate = root.propagate, False
        root.addHandler(handler)
        collects = gc.isenabled()
        gc.disable()  # a finaliser at a random moment is the one thing a seed does not decide
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
        return Outcome(
            self.seed,
            self.violation,
            self.trace.digest(),
            self.loop.time(),
            self.trace.count,
            self.commits,
            self.record.attempts,
            self.record.accepted,
            self.crashes,
            self.record.resumed,
            self.record.gangs,
            self.trace.lines,
        )

    async def _live(self) -> None:
        self.host.start()
        for agent in self.agents:
            agent.start()
        for fault in self.plan.faults:
            self.loop.after_us(fault.at_us, self._strike, fault)
        wishes = self.dice.branch("wishes")
        gangs = self.dice.branch("gangs")
        until_us = self.plan.ends_us - 4 * S
        for number, consumer in enumerate(self.consumers):
            mine = [
                draw_wish(wishes, f"{consumer.name}-s{n}", until_us)
                for n in range(wishes.between(2, 5))
            ]
            if number == 0 and gangs.chance(GANGS):
                mine += [
                    draw_gang(gangs, f"{consumer.name}-g{n}", until_us)
                    for n in range(gangs.between(1, 4))
                ]
            self._lives.append(self.loop.create_task(consumer.live(mine)))
        for life in self._lives:
            life.add_done_callback(self._life_ended)
        self.loop.after_us(300 * MS, self._compare)
        self.loop.after_us(self.plan.ends_us, self._calm)
        self.loop.after_us(self.plan.ends_us + 100 * MS, self._look_for_the_end)
        await self._over

    async def _wind_up(self) -> None:
        for life in self._lives:
            life.cancel()
        for agent in self.agents:
            agent.crash()
        processes = self.host.stop()
        await asyncio.gather(*self._lives, *processes, return_exceptions=True)

    def _life_ended(self, life: asyncio.Task[None]) -> None:
        if not life.cancelled() and life.exception() is not None:
            self.fail(f"a consumer died of {life.exception()!r}")

    def fail(self, what: str) -> None:
        """A promise was broken: the first one is the one told."""
        if self.violation is None:
            self.violation = f"at {self.loop.us / 1e6:.6f} s: {what}"
            self.trace.say("world", "VIOLATION", what)
            if not self._over.done():
                self._over.set_result(None)

    def _loop_failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.fail(f"{context.get('message')}: {context.get('exception')!r}")

    # ---- faults

    def _strike(self, fault: Fault) -> None:
        agent = self.agents[fault.node]
        self.trace.say("world", "strikes", fault.kind, agent.name, fault.lasts_us)
        over = self.loop.us + fault.lasts_us
        blockage = self.network.blockage(agent.name)
        match fault.kind:
            case Kind.SERVER_CRASH:
                self.crashes += 1
                self.host.crash()
                self.loop.after_us(fault.lasts_us, self.host.start)
            case Kind.AGENT_CRASH:
                agent.crash()
                self.loop.after_us(fault.lasts_us, agent.start)
            case Kind.SHUTDOWN:
                agent.shut_down()
                self.loop.after_us(fault.lasts_us, agent.start_again)
            case Kind.PREEMPT:
                self._preempt(agent.name)
            case Kind.RECLAIM:
                agent.reclaim()
                lends_us = fault.lasts_us
                if self.dice.chance(0.5):  # just while it connects anew
                    self.loop.after_us(lends_us, self.network.break_links, agent.name)
                    lends_us += self.dice.between(1 * MS, 40 * MS)
                self.loop.after_us(lends_us, agent.lend)
            case Kind.FREEZE:
                agent.freeze()
                self.loop.after_us(fault.lasts_us, agent.thaw)
            case Kind.BREAK:
                self.network.break_links(agent.name)
            case Kind.STALL:
                self.network.stall(agent.name, fault.lasts_us)
            case Kind.BLOCK | Kind.BLOCK_UP | Kind.BLOCK_DOWN:
                if fault.kind is not Kind.BLOCK_DOWN:
                    blockage.up_until_us = max(blockage.up_until_us, over)
                if fault.kind is not Kind.BLOCK_UP:
                    blockage.down_until_us = max(blockage.down_until_us, over)
                if self.dice.chance(0.5):
                    self.loop.after_us(fault.lasts_us // 2, self.network.break_links, agent.name)
            case Kind.BLOCK_CROSSED:
                blockage.down_until_us = max(blockage.down_until_us, over)
                self.loop.after_us(fault.lasts_us // 3, self._block_up, agent.name, 6 * S)
            case Kind.OWNER_PAUSE:
                self._set_availability(fault.node, Availability.PAUSED)
                self.loop.after_us(
                    fault.lasts_us, self._set_availability, fault.node, Availability.AVAILABLE
                )
            case Kind.SLOW_DISK:
                self._pace.stuck_until_us = over
            case _:
                pass

    def _block_up(self, name: str, lasts_us: int) -> None:
        blockage = self.network.blockage(name)
        blockage.up_until_us = max(blockage.up_until_us, self.loop.us + lasts_us)

    def _preempt(self, name: str) -> None:
        """Somebody decided that some of what this node holds must make room."""
        incarnation = self.host.current
        held = sorted(r.task for r in self.record.rows.values() if r.holds_at(name, r.epoch))
        if incarnation is None or not held:
            return
        chosen = self.dice.sample(held, self.dice.between(1, len(held)))
        self.trace.say("world", "preempts", chosen)
        incarnation.spawn(preempt_tasks(incarnation.server, [TaskId(task) for task in chosen]))

    def _set_availability(self, node: int, availability: Availability) -> None:
        incarnation = self.host.current
        if incarnation is not None:
            incarnation.spawn(self._change(incarnation.server, NodeId(100 + node), availability))

    @staticmethod
    async def _change(server: Any, node: NodeId, availability: Availability) -> None:
        row = await server.write(nodes.set_availability(node, None, availability, server.now))
        if row is not None:
            server.scheduler.node_changed(row.node)

    def _calm(self) -> None:
        self.trace.say("world", "calms down")
        self.network.weather = Weather()
        self.host.start()
        for number, agent in enumerate(self.agents):
            agent.thaw()
            agent.lend()
            self._set_availability(number, Availability.AVAILABLE)
        self.loop.after_us(1 * S, self._start_all)

    def _start_all(self) -> None:
        for number, agent in enumerate(self.agents):
            agent.start()
            self._set_availability(number, Availability.AVAILABLE)

    # ---- looking

    def _committed(self) -> None:
        self.commits += 1
        before = self.record.rows
        self.record.checkpointed(self._reader.progress())
        self.record.absorb(self._reader.rows())
        for task, line in self._reader.new_logs():
            self.record.logged(before, task, line)

    def _compare(self) -> None:
        """The scheduler's picture, folded from events, against one taken from the file."""
        incarnation = self.host.current
        if incarnation is not None and incarnation.disk.is_quiet:
            scheduler = incarnation.server.scheduler
            if not scheduler.in_doubt:
                picture = self._file.read_now(leases.picture())
                if scheduler.state != rebuilt(scheduler, picture):
                    self.fail("the scheduling state differs from one rebuilt from the store")
        self.loop.after_us(300 * MS, self._compare)

    def _look_for_the_end(self) -> None:
        open_rows = [
            row for row in self.record.rows.values() if row.holding or not row.status.is_final
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

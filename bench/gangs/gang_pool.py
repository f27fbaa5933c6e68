"""One random interleaving of gangs and single tasks: the real planner, scheduler, channels and store operations.

Each interleaving is one transaction that is taken back at its end, so none sees another. After every step the judge looks at
the store's rows and compares what the scheduler takes for held and waiting; now and then, and at the end, the whole state is
compared with one rebuilt from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from bench.gang_agents import Agent
from bench.gang_flaws import FLAWED_PICTURES, REWRITES, UNCOMPARED
from bench.gang_ground import BEGIN, OFFERS, Ground, finish
from bench.gang_judge import Broken, Judge, look, unended

from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
from gpool.core.model import (
    GIB,
    SECOND,
    Availability,
    Engine,
    GpuRequest,
    Instant,
    OnLoss,
    Requirements,
    TaskKind,
    TaskSpec,
)
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.orders import Policy
from gpool.server.scheduling.picture import StatePicture
from gpool.server.scheduling.scheduler import Scheduler
from gpool.server.store.operations import nodes
from gpool.server.store.operations.leases import grants, leases
from gpool.server.store.operations.tasks import submissions, tasks
from gpool.server.store.operations.tasks.submissions import NewTask, Submission
from gpool.server.store.protocol import Operation
from gpool.server.store.values import Recording
from gpool.testing.simulation import Dice
from gpool.testing.world.database import rebuilt
from gpool.wire import frames
from gpool.wire.frames import Hold

CALM_ROUNDS = 60
PICTURES = 0.06  # of all steps: the whole state is compared with one rebuilt from the store
RANDOM_STEPS = (10, 34)
MOST_TASKS = 8


class Pool:
    """One interleaving."""

    def __init__(self, ground: Ground, seed: int, flaw: str = "") -> None:
        self.ground, self.seed, self.flaw = ground, seed, flaw
        self.dice = Dice(f"gangs-{seed}")
        self.judge = Judge({number: node.offer for number, node in ground.nodes.items()})
        self.ids = 1000
        self.steps = self.gangs = self.passes = self.leases = 0
        self.lost: set[int] = set()
        self.changed: set[int] = set()  # by their owners
        self.pass_: Coroutine[Any, Any, int] | None = None
        self.meetings: dict[tuple[int, int], tuple[object, dict[int, int]]] = {}
        self.told: list[str] = []

    @property
    def now(self) -> Instant:
        return self.ground.time.at

    def run(self) -> None:
        """Raises `Broken`."""
        store = self.ground.store
        store.file.begin_group()
        store.rewrite = REWRITES.get(self.flaw)
        try:
            self.play()
        finally:
            if self.pass_ is not None:
                self.pass_.close()
            store.is_slow = False
            store.file.abandon_group()

    def play(self) -> None:
        """In the transaction that is open."""
        self.ground.time.at = BEGIN
        self._begin()
        for _ in range(self.dice.between(*RANDOM_STEPS)):
            self._step()
            self._check(picture=self.dice.chance(PICTURES))
        self._calm()

    # ---- setting up

    def _begin(self) -> None:
        ground, dice = self.ground, self.dice
        policy = Policy(order=dice.pick(tuple(sorted(ORDERS))), preemption=dice.chance(0.8))
        kind = FLAWED_PICTURES.get(self.flaw, StatePicture)
        self.picture = ground.picture(policy, kind)
        self.desk = ground.desk(self.picture, dice.branch("ids"))
        self.agents = {number: Agent(self, number) for number in OFFERS}
        finish(self.picture.rebuild(self.now))
        for agent in self.agents.values():
            agent.connect()

    # ---- steps

    def _step(self) -> None:
        """One of those that would do something."""
        self.steps += 1
        self.ground.time.at = Instant(self.now + self.dice.between(0, 40) * SECOND)
        can = [name for name, asks in CAN.items() if asks(self)]
        name = self.dice.choices(can, [STEPS[each] for each in can])[0]
        self.told.append(name)
        getattr(self, name)()

    def some(self, has: Callable[[Agent], object]) -> list[Agent]:
        return [agent for agent in self.agents.values() if has(agent)]

    def submit(self) -> None:
        dice = self.dice
        spec, count = _spec(dice), dice.pick((1, 1, 2))
        first = self.ids
        self.ids += 10
        new = [NewTask(TaskId(first + n), n) for n in range(count)]
        user = UserId(dice.pick((11, 12, 13)))
        submission = Submission(
            BatchId(first + 5), True, True, SpecId(first + 6), spec, user, new, self.now
        )
        for task in new:
            self.judge.wanted[task.id] = spec.requirements.nodes
        self.gangs += count * (spec.requirements.nodes > 1)
        [submitted] = self.ground.store.now(submissions.submit([submission]))
        self.picture.add_submission(submitted, submission)

    def plan(self) -> None:
        """A pass begins; its plan is written in a later step."""
        self.passes += 1
        self.pass_ = self.desk.scheduler.run_once(self.now)
        self._go_on()

    def apply(self) -> None:
        self._go_on()

    def _go_on(self) -> None:
        assert self.pass_ is not None
        self.ground.store.is_slow = True
        try:
            self.pass_.send(None)
        except StopIteration as stop:
            self.leases += stop.value
            self.pass_ = None
        self.ground.store.is_slow = False

    def whole_pass(self) -> None:
        while self.pass_ is not None:
            self._go_on()
        self.passes += 1
        self.leases += finish(self.desk.scheduler.run_once(self.now))

    def read(self) -> None:
        self.dice.pick(self.some(_is_told)).read()

    def start(self) -> None:
        self.dice.pick(self.some(_can_start)).begin(self.dice)

    def end(self) -> None:
        self.dice.pick(self.some(_runs)).end(self.dice)

    def send(self) -> None:
        self.dice.pick(self.some(_has_news)).send()

    def repeat(self) -> None:
        """Something said before arrives again, perhaps of an agent that has died."""
        agent = self.dice.pick(self.some(_has_spoken))
        agent.report([self.dice.pick(agent.said)])

    def repeat_late(self) -> None:
        """Something said of a lease that is over, while some node has the next."""
        agent, items = self.dice.pick(self.old_news())
        agent.report([self.dice.pick(items)])

    def old_news(self) -> list[tuple[Agent, list[frames.ReportItem]]]:
        epochs: dict[int, int] = {}
        for agent in self.agents.values():
            epochs |= agent.epochs
        found = [(agent, agent.old_news(epochs)) for agent in self.some(_has_spoken)]
        return [(agent, items) for agent, items in found if items]

    def die(self) -> None:
        agent = self.dice.pick(self.some(_is_up))
        agent.die()
        self.lost.add(agent.number)

    def expire(self) -> None:
        """A silent node's leases are given away: it let go of them before."""
        silent = sorted(self.lost if self.flaw != "expires_early" else self.agents)
        self.absorb(leases.expire(NodeId(self.dice.pick(silent)), self.now))

    def boot(self) -> None:
        number = self.dice.pick(sorted(self.lost))
        self.lost.remove(number)
        self.agents[number].start()

    def cancel(self) -> None:
        task = TaskId(self.dice.pick(sorted(self.judge.wanted)))
        self.absorb(tasks.cancel((task,), None, self.now))

    def preempt(self) -> None:
        task = self.dice.pick(sorted(self.picture.state.held))
        self.absorb(grants.preempt((task,), self.now))

    def hand_back(self) -> None:
        self.dice.pick(self.some(_has_some)).hand_back(self.dice)

    def pause(self) -> None:
        self._set(self.dice.pick(list(OFFERS)), self.dice.pick(tuple(Availability)))

    def resume(self) -> None:
        self._set(self.dice.pick(list(OFFERS)), Availability.AVAILABLE)

    def _set(self, node: int, availability: Availability) -> None:
        self.changed.add(node)
        row = self.ground.store.now(
            nodes.set_availability(NodeId(node), None, availability, self.now)
        )
        if row is not None:
            self.picture.node_changed(row.node)

    def doubt(self) -> None:
        """The next pass takes a new term and a new picture; a plan on its way is of the old one."""
        self.picture.invalidate()
        if self.dice.chance(0.5) and self.pass_ is not None:
            old, self.pass_ = self.pass_, None
            other = Scheduler(self.picture, self.ground.sealer, self.ground.metrics)
            self.leases += finish(
                other.run_once(self.now)
            )  # its own pass excludes no other server's
            self.pass_ = old

    # ---- what the agents and the judge need

    def absorb(self, operation: Operation[Recording]) -> None:
        self.picture.absorb(self.ground.store.now(operation))

    def take_for_current(self, node: int, items: list[frames.ReportItem]) -> None:
        """As if every report were about the lease that is current, whoever has it."""
        for item in items:
            rows, members = self.ground.store.now(look())
            epoch = next((row[1] for row in rows if row[0] == item.task and row[3]), item.epoch)
            has = [row[4] for row in rows if row[0] == item.task and row[4]]
            has += [row[3] for row in members if row[0] == item.task and row[6]]
            renewed = msgspec.structs.replace(item, epoch=epoch)
            where = node if node in has or not has else has[0]
            self.absorb(leases.record([(NodeId(where), [renewed])], self.now))

    def met(self, node: int, hold: Hold, line: frames.Line) -> None:
        """All members of one epoch are told the same of each other, each its own rank."""
        wanted = self.judge.wanted[hold.task]
        if (line.gang is None) != (wanted == 1):
            raise Broken("partial_gang", f"node {node} was granted {hold} with {line.gang}")
        if line.gang is None:
            return
        same = (line.gang.peers, line.gang.secret)
        known, ranks = self.meetings.setdefault((hold.task, hold.epoch), (same, {}))
        rank = line.gang.rank
        if known != same or ranks.setdefault(rank, node) != node:
            raise Broken("partial_gang", f"members of {hold} were told different things")
        port = OFFERS[node].gang_port + line.allocation.number
        if len(line.gang.peers) != wanted or line.gang.peers[rank] != (OFFERS[node].address, port):
            raise Broken("partial_gang", f"{hold}: rank {rank} is not at {line.gang.peers}")

    def _check(self, *, picture: bool) -> None:
        store, known = self.ground.store, self.picture
        state = None if known.is_stale or self.flaw in UNCOMPARED else known.state
        if store.wrote:
            self.judge.check(store.now(look()), state)
            store.wrote = False
        if picture and state is not None and state != rebuilt(known, store.now(leases.picture())):
            raise Broken("state_differs", "from one rebuilt from the store")

    # ---- the end

    def _calm(self) -> None:
        """Every node is there and lends, nothing goes wrong any more: everything ends."""
        while self.pass_ is not None:
            self._go_on()
        for number in sorted(self.lost):
            self.absorb(leases.expire(NodeId(number), self.now))
            self.agents[number].start()
        for number in sorted(self.changed):
            self._set(number, Availability.AVAILABLE)
        self.lost.clear()
        for _ in range(CALM_ROUNDS):
            self.steps += 1
            self.ground.time.at = Instant(self.now + 120 * SECOND)
            self.whole_pass()
            self._check(picture=False)
            self._work()
            self._check(picture=False)
            if not any(agent.has or agent.inbox for agent in self.agents.values()):
                left = self.ground.store.now(unended())
                if not left:
                    break
        else:
            raise Broken("deadlock", f"after {CALM_ROUNDS} rounds: {left}")
        self._check(picture=True)

    def _work(self) -> None:
        for agent in self.agents.values():
            while agent.inbox:
                agent.read()
            while agent.has:
                if agent.running:
                    agent.end(self.dice, calm=True)
                else:
                    agent.begin(self.dice)
            if agent.outbox:
                agent.send()


def _spec(dice: Dice) -> TaskSpec:
    wanted = dice.pick((1, 1, 2, 2, 2, 3))
    gpu = dice.pick((GpuRequest(1), GpuRequest(1), GpuRequest(vram_bytes=8 * GIB), None))
    needs = Requirements(
        (gpu,) if gpu else (),
        dice.pick((500, 1000, 2000)),
        GIB,
        disk_bytes=dice.pick((None, None, 60 * GIB)),
        nodes=wanted,
    )
    return TaskSpec(
        TaskKind.COMMAND,
        "train",
        needs,
        ("train",),
        retries=dice.pick((0, 1)),
        preemptible=dice.chance(0.5),
        engine=dice.pick(tuple(Engine)) if wanted > 1 else Engine.NONE,
        on_loss=dice.pick((OnLoss.REFORM, OnLoss.REFORM, OnLoss.END)),
    )


def _is_told(agent: Agent) -> object:
    return agent.inbox


def _can_start(agent: Agent) -> object:
    return agent.startable


def _runs(agent: Agent) -> object:
    return agent.running


def _has_news(agent: Agent) -> object:
    return agent.outbox and agent.is_up


def _has_spoken(agent: Agent) -> object:
    return agent.said


def _has_some(agent: Agent) -> object:
    return agent.has


def _is_up(agent: Agent) -> object:
    return agent.is_up


STEPS = {
    "submit": 3,
    "plan": 5,
    "apply": 6,
    "whole_pass": 2,
    "read": 9,
    "start": 8,
    "end": 4,
    "send": 8,
    "repeat": 1.5,
    "repeat_late": 6,
    "die": 1.2,
    "expire": 2,
    "boot": 1.2,
    "cancel": 0.7,
    "preempt": 0.7,
    "hand_back": 0.5,
    "pause": 0.4,
    "resume": 0.4,
    "doubt": 0.4,
}
CAN: dict[str, Callable[[Pool], object]] = {
    "submit": lambda pool: len(pool.judge.wanted) < MOST_TASKS,
    "plan": lambda pool: pool.pass_ is None and pool.picture.state.queued_count,
    "apply": lambda pool: pool.pass_ is not None,
    "whole_pass": lambda pool: pool.picture.state.queued_count,
    "read": lambda pool: pool.some(_is_told),
    "start": lambda pool: pool.some(_can_start),
    "end": lambda pool: pool.some(_runs),
    "send": lambda pool: pool.some(_has_news),
    "repeat": lambda pool: pool.some(_has_spoken),
    "repeat_late": lambda pool: pool.old_news(),
    "die": lambda pool: pool.judge.wanted and len(pool.some(_is_up)) > 2,
    "expire": lambda pool: pool.lost or (pool.flaw == "expires_early" and pool.some(_runs)),
    "boot": lambda pool: pool.lost,
    "cancel": lambda pool: pool.judge.wanted,
    "preempt": lambda pool: pool.picture.state.held,
    "hand_back": lambda pool: pool.some(_has_some),
    "pause": lambda pool: pool.judge.wanted,
    "resume": lambda pool: pool.judge.wanted,
    "doubt": lambda pool: pool.judge.wanted,
}

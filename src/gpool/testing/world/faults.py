"""Fault plan of a run, drawn from the seed, and its injector.

Each seed allows only some kinds of fault (swarm testing): an even mixture would hide rare combinations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Availability
from gpool.server.actions.tasks.query import preempt_tasks
from gpool.server.server import Server
from gpool.server.store.operations import nodes
from gpool.testing.simulation import Dice, Trace, VirtualLoop
from gpool.testing.world.agents import Agent
from gpool.testing.world.database import DiskSpeed
from gpool.testing.world.host import ServerHost
from gpool.testing.world.network import NetworkConditions, SimulatedNetwork
from gpool.testing.world.oracle import Oracle

FIRST_NODE = 100
"""Id of the first node; the others follow."""

MS = 1_000
S = 1_000_000


class FaultKind(StrEnum):
    SERVER_CRASH = "server_crash"
    AGENT_CRASH = "agent_crash"
    FREEZE = "freeze"
    BREAK = "break"
    STALL = "stall"  # frames of a connection arrive after those of a newer one
    BLOCK = "block"  # both ways
    BLOCK_UP = "block_up"
    BLOCK_DOWN = "block_down"
    BLOCK_CROSSED = "block_crossed"  # down for a while; up later, and for longer than a lease
    OWNER_PAUSE = "owner_pause"
    SLOW_DISK = "slow_disk"
    SHUTDOWN = "shutdown"  # the owner stops the agent properly, and starts it again
    PREEMPT = "preempt"  # the server preempts some of a node's tasks
    RECLAIM = "reclaim"  # the owner reclaims the machine, and lends it again later
    SPIKES = "spikes"
    REPEATS = "repeats"
    LOSSES = "losses"


MOMENTS = (
    FaultKind.SERVER_CRASH,
    FaultKind.AGENT_CRASH,
    FaultKind.FREEZE,
    FaultKind.BREAK,
    FaultKind.STALL,
    FaultKind.BLOCK,
    FaultKind.BLOCK_UP,
    FaultKind.BLOCK_DOWN,
    FaultKind.BLOCK_CROSSED,
    FaultKind.OWNER_PAUSE,
    FaultKind.SLOW_DISK,
    FaultKind.SHUTDOWN,
    FaultKind.PREEMPT,
    FaultKind.RECLAIM,
)
"""Faults that happen at an instant; the others are network conditions."""

LASTS_US: dict[FaultKind, tuple[int, int]] = {
    FaultKind.SERVER_CRASH: (50 * MS, 2 * S),
    FaultKind.AGENT_CRASH: (100 * MS, 5 * S),
    FaultKind.FREEZE: (200 * MS, 9 * S),
    FaultKind.BREAK: (0, 0),
    FaultKind.STALL: (50 * MS, 3 * S),
    FaultKind.BLOCK: (300 * MS, 8 * S),
    FaultKind.BLOCK_UP: (300 * MS, 8 * S),
    FaultKind.BLOCK_DOWN: (300 * MS, 6 * S),
    FaultKind.BLOCK_CROSSED: (1500 * MS, 2800 * MS),
    FaultKind.OWNER_PAUSE: (500 * MS, 4 * S),
    FaultKind.SLOW_DISK: (300 * MS, 2 * S),
    FaultKind.SHUTDOWN: (300 * MS, 3 * S),
    FaultKind.PREEMPT: (0, 0),
    FaultKind.RECLAIM: (300 * MS, 4 * S),
}


@dataclass(frozen=True, slots=True)
class PlannedFault:
    at_us: int
    kind: FaultKind
    node: int  # index of the node it strikes, if it strikes one
    lasts_us: int


@dataclass(frozen=True, slots=True)
class FaultPlan:
    allowed: tuple[FaultKind, ...]
    faults: tuple[PlannedFault, ...]
    conditions: NetworkConditions
    ends_us: int


@dataclass(slots=True)
class FaultLimits:
    until_us: int = 24 * S
    most: int = 14
    always: tuple[FaultKind, ...] = field(default=())


def draw(dice: Dice, nodes: int, limits: FaultLimits) -> FaultPlan:
    allowed = tuple(k for k in FaultKind if k in limits.always or dice.chance(0.5))
    moments = [k for k in allowed if k in MOMENTS]
    faults: list[PlannedFault] = []
    if moments:
        for _ in range(dice.between(1, limits.most)):
            kind = dice.pick(moments)
            at_us = dice.between(500 * MS, limits.until_us)
            faults.append(
                PlannedFault(at_us, kind, dice.between(0, nodes - 1), dice.between(*LASTS_US[kind]))
            )
    faults.sort(key=lambda fault: (fault.at_us, fault.kind.value, fault.node))
    conditions = NetworkConditions(
        delay_us=(1 * MS, dice.pick((3, 30, 150)) * MS),
        spike=dice.pick((0.01, 0.05)) if FaultKind.SPIKES in allowed else 0.0,
        repeat=dice.pick((0.02, 0.2)) if FaultKind.REPEATS in allowed else 0.0,
        request_lost=0.1 if FaultKind.LOSSES in allowed else 0.0,
        answer_lost=dice.pick((0.1, 0.3)) if FaultKind.LOSSES in allowed else 0.0,
        request_repeated=dice.pick((0.05, 0.3)) if FaultKind.REPEATS in allowed else 0.0,
    )
    ends_us = max((f.at_us + f.lasts_us for f in faults), default=0)
    return FaultPlan(allowed, tuple(faults), conditions, max(ends_us, limits.until_us))


class FaultInjector:
    def __init__(
        self,
        loop: VirtualLoop,
        dice: Dice,
        trace: Trace,
        network: SimulatedNetwork,
        host: ServerHost,
        agents: Sequence[Agent],
        oracle: Oracle,
        speed: DiskSpeed,
    ) -> None:
        self._loop, self._dice, self._trace = loop, dice, trace
        self._network, self._host, self._agents = network, host, agents
        self._oracle, self._speed = oracle, speed
        self.server_crashes = 0

    def strike(self, fault: PlannedFault) -> None:
        agent = self._agents[fault.node]
        self._trace.say("world", "strikes", fault.kind, agent.name, fault.lasts_us)
        over = self._loop.us + fault.lasts_us
        blocked = self._network.blockage(agent.name)
        match fault.kind:
            case FaultKind.SERVER_CRASH:
                self.server_crashes += 1
                self._host.crash()
                self._loop.after_us(fault.lasts_us, self._host.start)
            case FaultKind.AGENT_CRASH:
                agent.crash()
                self._loop.after_us(fault.lasts_us, agent.start)
            case FaultKind.SHUTDOWN:
                agent.shut_down()
                self._loop.after_us(fault.lasts_us, agent.start_again)
            case FaultKind.PREEMPT:
                self._preempt(agent.name)
            case FaultKind.RECLAIM:
                agent.reclaim()
                lends_us = fault.lasts_us
                if self._dice.chance(0.5):  # just while it connects again
                    self._loop.after_us(lends_us, self._network.break_links, agent.name)
                    lends_us += self._dice.between(1 * MS, 40 * MS)
                self._loop.after_us(lends_us, agent.lend)
            case FaultKind.FREEZE:
                agent.freeze()
                self._loop.after_us(fault.lasts_us, agent.thaw)
            case FaultKind.BREAK:
                self._network.break_links(agent.name)
            case FaultKind.STALL:
                self._network.stall(agent.name, fault.lasts_us)
            case FaultKind.BLOCK | FaultKind.BLOCK_UP | FaultKind.BLOCK_DOWN:
                if fault.kind is not FaultKind.BLOCK_DOWN:
                    blocked.block_up(over)
                if fault.kind is not FaultKind.BLOCK_UP:
                    blocked.block_down(over)
                if self._dice.chance(0.5):
                    self._loop.after_us(fault.lasts_us // 2, self._network.break_links, agent.name)
            case FaultKind.BLOCK_CROSSED:
                blocked.block_down(over)
                self._loop.after_us(fault.lasts_us // 3, self._block_up, agent.name, 6 * S)
            case FaultKind.OWNER_PAUSE:
                self._set_availability(fault.node, Availability.PAUSED)
                self._loop.after_us(
                    fault.lasts_us, self._set_availability, fault.node, Availability.AVAILABLE
                )
            case FaultKind.SLOW_DISK:
                self._speed.stall_until(over)
            case _:
                pass

    def _block_up(self, name: str, lasts_us: int) -> None:
        self._network.blockage(name).block_up(self._loop.us + lasts_us)

    def _preempt(self, name: str) -> None:
        process = self._host.serving()
        held = sorted(r.task for r in self._oracle.rows.values() if r.holds_at(name, r.epoch))
        if process is None or not held:
            return
        chosen = self._dice.sample(held, self._dice.between(1, len(held)))
        self._trace.say("world", "preempts", chosen)
        process.spawn(preempt_tasks(process.server, [TaskId(task) for task in chosen]))

    def _set_availability(self, node: int, availability: Availability) -> None:
        process = self._host.serving()
        if process is not None:
            process.spawn(
                _change_availability(process.server, NodeId(FIRST_NODE + node), availability)
            )

    def end_all(self) -> None:
        self._trace.say("world", "calms down")
        self._network.calm()
        self._host.start()
        for number, agent in enumerate(self._agents):
            agent.thaw()
            agent.lend()
            self._set_availability(number, Availability.AVAILABLE)
        self._loop.after_us(1 * S, self._start_all)

    def _start_all(self) -> None:
        for number, agent in enumerate(self._agents):
            agent.start()
            self._set_availability(number, Availability.AVAILABLE)


async def _change_availability(server: Server, node: NodeId, availability: Availability) -> None:
    row = await server.write(nodes.set_availability(node, None, availability, server.now))
    if row is not None:
        server.picture.node_changed(row.node)

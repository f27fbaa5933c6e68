"""Many agents in one process: each has the real channel and state machine, and a timer in place of a sandbox.

They reconnect, keep reports until they are recorded and end leases by their own deadline as real agents do. A ledger
counts what the server acknowledged. For tests and benchmarks of servers.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import structlog
import uvloop

from gpool.agent.addresses import ServerAddresses
from gpool.agent.channel import AgentChannel, AgentCredentials, NodeIdentity
from gpool.agent.daemon import boot_clock
from gpool.agent.state_machine.agent_state import AgentState
from gpool.agent.state_machine.instructions import (
    CommandEnded,
    CommandStarted,
    Connected,
    Disconnected,
    EndCommand,
    Event,
    FrameArrived,
    Instruction,
    Send,
    StartCommand,
    Ticked,
)
from gpool.core.errors import GpoolError
from gpool.core.model import EndReason
from gpool.transfer.node_proofs import NodeKey
from gpool.transfer.requests import Address
from gpool.wire.frames import AgentFrame, Finished, Hold, Recorded, Reports, ServerFrame, Welcome
from tests.tools.scripted_agent import offer
from tests.tools.simulated_pool import AT_ONCE, SimulatedNode

STARTED_WITHIN_S = 600.0


@dataclass(slots=True)
class Ledger:
    """Counts of all agents together. `accepted`: by task, the epochs whose success the server acknowledged."""

    accepted: dict[int, list[int]] = field(default_factory=dict)
    started: int = 0
    refused: int = 0  # successes the server refused: under an old lease
    expired: int = 0  # leases that an agent ended by its own deadline
    lost: set[tuple[int, int]] = field(default_factory=set)  # leases agents reported as lost
    connections: int = 0  # opened, the first of each agent included
    silence_us: int = 0  # longest time between two frames of the server to one agent
    ended: dict[str, str] = field(default_factory=dict)  # by node: why its agent ended by itself

    @property
    def twice(self) -> list[int]:
        return [task for task, epochs in self.accepted.items() if len(epochs) > 1]


class SimulatedAgent:
    def __init__(
        self,
        address: Address,
        node: SimulatedNode,
        hold_s: tuple[float, float],
        ledger: Ledger,
        dice: Random,
    ) -> None:
        identity = NodeIdentity(node.node, node.server)
        credentials = AgentCredentials(NodeKey(node.seed), identity, boot_clock)
        self.node, self.welcomed = node.node, False
        self.greeted = asyncio.Event()  # once: by its first welcome, or because it ended
        self._state = AgentState(f"{boot_clock():016d}", offer(node.cpus))
        self._channel = AgentChannel(ServerAddresses([address], dice), credentials, self.feed)
        self._hold_s, self._ledger, self._dice = hold_s, ledger, dice
        self._running: dict[tuple[int, int], asyncio.TimerHandle] = {}
        self._successes: dict[int, list[tuple[int, int]]] = {}  # by sequence: not yet recorded
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = self._heard_at = 0

    async def run(self) -> None:
        try:
            await self._channel.run()
        except GpoolError as error:
            self._ledger.ended[self.node] = f"{error.code}: {error.detail}"
        finally:
            self.greeted.set()
            if self._timer is not None:
                self._timer.cancel()

    def feed(self, event: Event) -> None:
        if isinstance(event, FrameArrived):
            self._note(event.frame)
        elif isinstance(event, Connected):
            self._ledger.connections += 1
        elif isinstance(event, Disconnected):
            self.welcomed = False
            self._successes.clear()  # those not dropped meanwhile are sent again
        now = boot_clock()
        for instruction in self._state.handle(now, event):
            self._carry_out(instruction)
        self._arm(now)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Send():
                self._sent(instruction.frame)
                self._channel.send(instruction.frame)
            case StartCommand():
                self._start(instruction.task, instruction.epoch)
            case EndCommand():
                self._end(instruction)
            case _:
                raise AssertionError(f"only commands are simulated: {instruction}")

    def _start(self, task: int, epoch: int) -> None:
        loop = asyncio.get_running_loop()
        self._ledger.started += 1
        lasts_s = self._dice.uniform(*self._hold_s)

        def over() -> None:
            self._running.pop((task, epoch))
            took = round(lasts_s * 1e6)
            self.feed(CommandEnded(task, epoch, EndReason.EXITED, 0, "", took))

        self._running[task, epoch] = loop.call_later(lasts_s, over)
        loop.call_soon(self._began, task, epoch)

    def _began(self, task: int, epoch: int) -> None:
        if (task, epoch) in self._running:
            self.feed(CommandStarted(task, epoch))

    def _end(self, asked: EndCommand) -> None:
        timer = self._running.pop((asked.task, asked.epoch), None)
        if timer is None:
            return
        timer.cancel()
        self._ledger.expired += asked.reason is EndReason.LOST
        ended = CommandEnded(asked.task, asked.epoch, asked.reason, None, "", 0)
        asyncio.get_running_loop().call_soon(self.feed, ended)

    def _arm(self, now: int) -> None:
        wakes_at = self._state.wakes_at
        if wakes_at is None or (self._timer is not None and self._wakes_at <= wakes_at):
            return  # a timer that comes early finds nothing due
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = wakes_at
        delay = max(0.0, (wakes_at - now) / 1e6)
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.feed(Ticked())

    # ---- the ledger

    def _sent(self, frame: AgentFrame) -> None:
        if not isinstance(frame, Reports):
            return
        ends = [item for item in frame.items if isinstance(item, Finished)]
        won = [(item.task, item.epoch) for item in ends if item.reason is EndReason.EXITED]
        self._ledger.lost |= {(e.task, e.epoch) for e in ends if e.reason is EndReason.LOST}
        if won:
            self._successes[frame.sequence] = won

    def _note(self, frame: ServerFrame) -> None:
        now, before = boot_clock(), self._heard_at
        self._heard_at = now
        self._ledger.silence_us = max(self._ledger.silence_us, now - (before or now))
        if isinstance(frame, Welcome):
            self.welcomed = True
            self.greeted.set()
        elif isinstance(frame, Recorded):
            for sequence in [each for each in self._successes if each <= frame.sequence]:
                for task, epoch in self._successes.pop(sequence):
                    if Hold(task, epoch) in frame.refused:
                        self._ledger.refused += 1
                        continue
                    known = self._ledger.accepted.setdefault(task, [])
                    if epoch not in known:  # a report may be sent, and acknowledged, again
                        known.append(epoch)


# ---- the process


@dataclass(frozen=True, slots=True)
class AgentsPlan:
    """Agents of one process. `addresses`: agent i begins with address i modulo their number."""

    addresses: Sequence[Address]
    nodes: Sequence[SimulatedNode]
    hold_s: tuple[float, float]
    log: Path


@dataclass(frozen=True, slots=True)
class AgentsSeen:
    connected: int
    silence_s: float  # longest time between two frames of the server to one agent, since `begin`
    started: int
    accepted: int
    twice: tuple[int, ...]
    refused: int
    expired: int
    lost: frozenset[tuple[int, int]]
    connections: int
    ended: Mapping[str, str]


def raise_open_files() -> None:
    """Allow as many sockets as the machine's hard limit does."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _serve(plan: AgentsPlan, pipe: Connection) -> None:
    raise_open_files()
    log = plan.log.open("a", buffering=1)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(log))
    uvloop.run(_run(plan, pipe))


async def _run(plan: AgentsPlan, pipe: Connection) -> None:
    ledger = Ledger()
    agents = [
        SimulatedAgent(
            plan.addresses[number % len(plan.addresses)], node, plan.hold_s, ledger, Random(number)
        )
        for number, node in enumerate(plan.nodes)
    ]
    running = []
    for first in range(0, len(agents), AT_ONCE):
        some = agents[first : first + AT_ONCE]
        running += [asyncio.create_task(agent.run()) for agent in some]
        await asyncio.gather(*(agent.greeted.wait() for agent in some))
    pipe.send("ready")
    asked = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), asked.set)
    os.set_blocking(pipe.fileno(), True)
    while True:
        await asked.wait()
        asked.clear()
        word = pipe.recv()
        if word == "stop":
            break
        if word == "begin":
            ledger.silence_us = 0
        else:
            pipe.send(_seen(agents, ledger))
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _seen(agents: Sequence[SimulatedAgent], ledger: Ledger) -> AgentsSeen:
    return AgentsSeen(
        sum(agent.welcomed for agent in agents),
        ledger.silence_us / 1e6,
        ledger.started,
        len(ledger.accepted),
        tuple(ledger.twice),
        ledger.refused,
        ledger.expired,
        frozenset(ledger.lost),
        ledger.connections,
        dict(ledger.ended),
    )


class Agents:
    """The process; `ready` waits until all agents were welcomed, `seen` asks for the ledger."""

    def __init__(self, plan: AgentsPlan) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(plan, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def ready(self, within_s: float = STARTED_WITHIN_S) -> None:
        assert self._pipe.poll(within_s), f"not all agents were welcomed within {within_s:g} s"
        assert self._pipe.recv() == "ready"

    def begin(self) -> None:
        self._pipe.send("begin")

    def seen(self) -> AgentsSeen:
        self._pipe.send("tell")
        found: AgentsSeen = self._pipe.recv()
        return found

    def stop(self) -> None:
        with suppress(OSError):  # it may have ended by itself
            self._pipe.send("stop")
            self._process.join(10)
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()

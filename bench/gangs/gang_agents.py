"""Agents as small models of their sessions: told late, starting, ending, failing, dying; they say things late and twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from bench.gang_ground import OFFERS, Ground, finish
from bench.gang_judge import Judge

from gpool.core.ids import NodeId
from gpool.core.model import SECOND, Allocation, EndReason, Instant, Node
from gpool.server.nodes.connection import NodeChannel
from gpool.server.store.operations.leases import leases
from gpool.server.store.protocol import Operation
from gpool.server.store.values import Recording
from gpool.testing.simulation import Dice
from gpool.wire import frames
from gpool.wire.frames import Hold


class Around(Protocol):
    """What an agent stands in."""

    ground: Ground
    judge: Judge
    flaw: str
    desk: Any

    @property
    def now(self) -> Instant: ...

    def met(self, node: int, hold: Hold, line: frames.Line) -> None: ...

    def take_for_current(self, node: int, items: list[frames.ReportItem]) -> None: ...

    def absorb(self, operation: Operation[Recording]) -> None: ...


class Wire(NodeChannel):
    """The real channel of a node whose hello was taken already."""

    def open(self, node: Node) -> None:
        self._greeted = True
        self._server.nodes.attach(self)
        self._server.picture.node_changed(node)


@dataclass(slots=True)
class Attempt:
    allocation: Allocation
    runs: bool = False


class Agent:
    """A node's agent: what it was told and has not read, what it has, what it said and has not sent."""

    def __init__(self, pool: Around, number: int) -> None:
        self.pool, self.number = pool, number
        self.boot = 0
        self.channel: Wire | None = None
        self.inbox: deque[frames.ServerFrame] = deque()
        self.has: dict[Hold, Attempt] = {}
        self.past: set[Hold] = set()
        self.outbox: list[frames.ReportItem] = []
        self.said: list[frames.ReportItem] = []

    @property
    def is_up(self) -> bool:
        return self.channel is not None

    def connect(self) -> None:
        """At the very beginning, when nothing is held."""
        self._dial().open(self.pool.ground.nodes[self.number])

    def _dial(self) -> Wire:
        self.inbox.clear()
        desk: Any = self.pool.desk
        self.channel = Wire(desk, self.pool.ground.credentials[self.number], self.inbox.append)
        return self.channel

    def start(self) -> None:
        """Boots anew, and says hello: it has nothing. With that the connection before is closed, and all that was on it."""
        self.boot += 1
        self.said = []
        hello = frames.Hello(
            frames.PROTOCOL, f"boot-{self.boot:04d}", OFFERS[self.number], 1, tuple(self.has)
        )
        self.past.clear()
        finish(self._dial().receive(hello))

    def die(self) -> None:
        """With everything that runs there. What it said and was on its way may still arrive."""
        for hold in self.has:
            self.pool.judge.ends(self.number, hold.task, hold.epoch)
        self.said += self.outbox
        self.has.clear()
        self.outbox = []
        channel, self.channel = self.channel, None
        if channel is not None:
            finish(channel.close())
        self.inbox.clear()

    # ---- what it is told

    def read(self) -> None:
        frame = self.inbox.popleft()
        match frame:
            case frames.Grants():
                for line in frame.lines:
                    for lease in line.leases:
                        self._take(Hold(lease.task, lease.epoch), line)
            case frames.Stop(holds, reason):
                for hold in holds:
                    self._stop(hold, reason)
            case frames.Recorded(_, refused):
                for hold in refused:
                    self._drop(hold)
            case frames.Welcome(drop=drop) | frames.BeatSeen(drop=drop):
                for hold in drop:
                    self._drop(hold)
            case _:
                pass

    def _take(self, hold: Hold, line: frames.Line) -> None:
        if hold in self.has or hold in self.past:
            return
        self.pool.met(self.number, hold, line)
        self.has[hold] = Attempt(line.allocation)

    def _stop(self, hold: Hold, reason: frames.StopReason) -> None:
        known = self.has.get(hold)
        if known is None:
            if hold not in self.past:
                self._say(frames.Released(hold.task, hold.epoch))
            return
        self._over(hold)
        if self.pool.flaw == "silent_stop":
            return
        if reason is frames.StopReason.PREEMPTED and known.runs:
            self._say(frames.Finished(hold.task, hold.epoch, EndReason.PREEMPTED))
        elif reason is frames.StopReason.PREEMPTED:
            self._say(frames.HandedBack(hold.task, hold.epoch))
        else:
            self._say(frames.Released(hold.task, hold.epoch))

    def _drop(self, hold: Hold) -> None:
        if hold in self.has:
            self._over(hold)

    def _over(self, hold: Hold) -> None:
        del self.has[hold]
        self.past.add(hold)
        self.pool.judge.ends(self.number, hold.task, hold.epoch)

    def _say(self, item: frames.ReportItem) -> None:
        self.outbox.append(item)

    # ---- what it does

    @property
    def startable(self) -> list[Hold]:
        """One of a line at a time."""
        busy = {attempt.allocation.number for attempt in self.has.values() if attempt.runs}
        return [hold for hold, each in self.has.items() if each.allocation.number not in busy]

    @property
    def running(self) -> list[Hold]:
        return [hold for hold, attempt in self.has.items() if attempt.runs]

    @property
    def epochs(self) -> dict[int, int]:
        return {hold.task: hold.epoch for hold in self.has}

    def old_news(self, epochs: Mapping[int, int]) -> list[frames.ReportItem]:
        """What it said of tasks that some node has under another epoch."""
        return [item for item in self.said if epochs.get(item.task, item.epoch) != item.epoch]

    def begin(self, dice: Dice) -> None:
        hold = dice.pick(self.startable)
        attempt = self.has[hold]
        attempt.runs = True
        self.pool.judge.starts(self.number, hold.task, hold.epoch, attempt.allocation)
        self._say(frames.Started(hold.task, hold.epoch))

    def end(self, dice: Dice, *, calm: bool = False) -> None:
        hold = dice.pick(self.running)
        self._over(hold)
        reason, code = EndReason.EXITED, 0
        if not calm and dice.chance(0.2):
            reason, code = dice.pick(((EndReason.EXITED, 1), (EndReason.OUT_OF_MEMORY, 137)))
        self._say(frames.Finished(hold.task, hold.epoch, reason, code, duration_us=SECOND))

    def hand_back(self, dice: Dice) -> None:
        """Its owner wants the machine."""
        hold = dice.pick(list(self.has))
        runs = self.has[hold].runs
        self._over(hold)
        if runs:
            self._say(frames.Finished(hold.task, hold.epoch, EndReason.PREEMPTED))
        else:
            self._say(frames.HandedBack(hold.task, hold.epoch))

    def report(self, items: list[frames.ReportItem]) -> None:
        if self.pool.flaw == "fence_off":
            self.pool.take_for_current(self.number, items)
        elif self.channel is not None:
            finish(self.channel.receive(frames.Reports(1, tuple(items))))
        else:  # it was on its way when the agent died
            self.pool.absorb(leases.record([(NodeId(self.number), items)], self.pool.now))

    def send(self) -> None:
        items, self.outbox = self.outbox, []
        self.said += items
        self.report(items)

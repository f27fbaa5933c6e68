"""Simulated malicious node: no sandbox, no state machine; it sends what harms others. Honest tasks must end all the same.

It invents GPUs to attract tasks, keeps leases or claims wrong ends and run times, and reports for other nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpool.core.model import GIB, EndReason, Gpu, Offer
from gpool.testing.simulation import Dice
from gpool.testing.world.agents import AgentEnvironment
from gpool.testing.world.network import SimulatedLink
from gpool.wire import frames

MS = 1_000
BEAT_US = 800 * MS
OFFER = Offer(
    64_000,
    512 * GIB,
    1000 * GIB,
    tuple(Gpu(n, f"made-up-{n}", "RTX4090", "nvidia", 24 * GIB, True) for n in range(4)),
    frozenset({"3.11"}),
)


@dataclass(frozen=True, slots=True)
class LiarPlan:
    """`limit_s`: of the server, for leases that their node does not end (`release_s`, `collect_s`)."""

    count: int = 1
    limit_s: float = 5.0


class Liar:
    def __init__(
        self,
        around: AgentEnvironment,
        name: str,
        secret: str,
        dice: Dice,
        offer: Offer = OFFER,
    ) -> None:
        self._around, self.name, self._secret, self._dice = around, name, secret, dice
        self._offer = offer
        self._link: SimulatedLink | None = None
        self._beat = self._sequence = 0
        self._held: set[frames.Hold] = set()
        self._truth = around.oracle.node(name, offer)

    def start(self) -> None:
        self._around.loop.after_us(self._dice.between(1, 100 * MS), self._dial)

    def _dial(self) -> None:
        network, host = self._around.network, self._around.host
        if self._link is None and network.reachable(self.name):
            link = network.open(self.name)
            if host.accept(link, self._secret):
                self._link = link
                link.attach_agent(self._arrived, self._closed)
                self._beat += 1
                holds = tuple(sorted(self._held, key=lambda hold: (hold.task, hold.epoch)))
                hello = frames.Hello(frames.PROTOCOL, "liar", self._offer, self._beat, holds)
                self._send(hello)
                self._around.loop.after_us(BEAT_US, self._lie)
                return
        self._around.loop.after_us(500 * MS, self._dial)

    def _closed(self) -> None:
        if self._link is not None:
            self._link = None
            self._around.loop.after_us(500 * MS, self._dial)

    def _send(self, frame: frames.AgentFrame) -> None:
        data = frames.encode(frame)
        self._around.trace.frame(self.name, ">", data, frame)
        if self._link is not None:
            self._link.send_up(data)

    def _report(self, *items: frames.ReportItem) -> None:
        self._sequence += 1
        self._send(frames.Reports(self._sequence, items))

    def _arrived(self, data: bytes) -> None:
        frame = frames.decode_from_server(data)
        self._around.trace.frame(self.name, "<", data, frame)
        if isinstance(frame, frames.Grants):
            for line in frame.lines:
                for lease in line.leases:
                    self._take(frames.Hold(lease.task, lease.epoch))

    def _take(self, hold: frames.Hold) -> None:
        self._held.add(hold)
        what = self._dice.pick(("hoard", "hang", "fail", "return"))
        self._around.trace.say(self.name, "decides", what, hold.task, hold.epoch)
        if what == "hang":
            self._report(frames.Started(hold.task, hold.epoch))
        elif what == "fail":
            claimed = self._dice.pick((0, 1, 1 << 60))
            self._report(
                frames.Finished(hold.task, hold.epoch, EndReason.EXITED, 1, duration_us=claimed)
            )
        elif what == "return":
            self._report(frames.HandedBack(hold.task, hold.epoch))
        if what in ("hoard", "hang"):
            self._truth.keep()

    def _lie(self) -> None:
        """Send a heartbeat for every lease it ever had, and an end for a lease of another node."""
        if self._link is None:
            return
        self._beat += 1
        holds = tuple(sorted(self._held, key=lambda hold: (hold.task, hold.epoch)))
        self._send(frames.Beat(self._beat, holds))
        others = [
            row
            for row in self._around.oracle.rows.values()
            if row.holding and row.node not in (None, self.name)
        ]
        if others:
            row = self._dice.pick(others)
            self._report(
                frames.Finished(row.task, row.epoch, EndReason.RETURNED, value=b"forged"),
                frames.Released(row.task, row.epoch),
            )
        self._around.loop.after_us(BEAT_US, self._lie)

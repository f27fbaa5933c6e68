"""Simulated agent: the real state machine in virtual time. It connects, freezes, crashes and starts again.

Its monotonic clock has a random offset and runs slightly fast or slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gpool.agent.state_machine import instructions as say
from gpool.agent.state_machine.agent_state import AgentState
from gpool.core.model import Offer
from gpool.testing.simulation import Dice, Trace, VirtualLoop
from gpool.testing.world.host import Parts, ServerHost
from gpool.testing.world.machine import SimulatedMachine
from gpool.testing.world.network import SimulatedLink, SimulatedNetwork
from gpool.testing.world.oracle import Oracle
from gpool.wire import frames

MS = 1_000
UPLOAD_PATIENCE_US = 1_500 * MS


@dataclass(frozen=True, slots=True)
class AgentEnvironment:
    loop: VirtualLoop
    network: SimulatedNetwork
    oracle: Oracle
    trace: Trace
    host: ServerHost
    parts: Parts
    fail: Callable[[str], None]


@dataclass(slots=True)
class BootClock:
    offset_us: int
    rate: float

    def at(self, world_us: int) -> int:
        return self.offset_us + int(world_us * self.rate)

    def world_us(self, boot_us: int) -> int:
        return int((boot_us - self.offset_us) / self.rate) + 1


@dataclass(slots=True)
class _AgentProcess:
    number: int
    state: AgentState
    machine: SimulatedMachine
    link: SimulatedLink | None = None
    dialling: bool = False
    backoff_us: int = 20 * MS
    over: bool = False
    stopping: bool = False
    sent: dict[int, tuple[frames.ReportItem, ...]] = field(default_factory=dict)


class Agent:
    def __init__(
        self, around: AgentEnvironment, name: str, secret: str, offer: Offer, dice: Dice
    ) -> None:
        self._around, self.name, self._secret, self._offer, self._dice = (
            around,
            name,
            secret,
            offer,
            dice,
        )
        self._clock = BootClock(dice.between(0, 10**9), 1 + (dice.random() - 0.5) * 0.02)
        self._lent = offer  # offered now: closed while the owner uses the machine
        self._boots = 0
        self._boot: _AgentProcess | None = None
        self._alarm_us = -1
        self._frozen = False
        self._backlog: list[say.Event] = []
        self._clear_us = 0  # when the last sandbox of the previous process is dead
        self.truth = around.oracle.node(name, offer)

    # ---- life

    @property
    def is_up(self) -> bool:
        return self._boot is not None

    def start(self) -> None:
        """Start once the sandboxes of the previous process are dead."""
        if self._boot is not None:
            return
        if self._clear_us > self._around.loop.us:
            self._around.loop.after_us(self._clear_us - self._around.loop.us, self.start)
            return
        self._boots += 1
        self.truth.booted()
        number = self._boots
        state = self._around.parts.agent_state(f"{self.name}-boot-{number:06d}", self._lent)
        machine = self._around.parts.machine(
            self._around.loop,
            self._dice.branch(f"machine-{number}"),
            self._around.oracle,
            self.name,
            number,
            self._happened,
            self._upload,
        )
        self._boot = _AgentProcess(number, state, machine)
        self._around.trace.say(self.name, "boots", number)
        self._dial(self._boot)

    def crash(self) -> None:
        boot, self._boot = self._boot, None
        self._thaw_quietly()
        self._backlog = []
        if boot is None:
            return
        boot.over = True
        self._around.trace.say(self.name, "crashes")
        if boot.link is not None:
            boot.link.close_by_agent()
        self._clear_us = self._around.loop.us + boot.machine.crash() + 1

    def shut_down(self) -> None:
        if self._boot is not None:
            self._boot.stopping = True
            self._happened(say.ShutdownAsked())

    def start_again(self) -> None:
        if self._boot is not None and self._boot.stopping:
            self._around.loop.after_us(100 * MS, self.start_again)
        else:
            self.start()

    def reclaim(self) -> None:
        self._lent = replace(self._offer, closed="its owner is using it")
        self._happened(say.OfferDetected(self._lent))
        self._happened(say.ReclaimAsked(None, "its owner took the machine back"))

    def lend(self) -> None:
        self._lent = self._offer
        self._happened(say.OfferDetected(self._lent))

    def freeze(self) -> None:
        if self._boot is not None and not self._frozen:
            self._frozen = True
            self.truth.freeze()
            self._around.trace.say(self.name, "freezes")
            self._boot.machine.freeze()

    def thaw(self) -> None:
        """Frames and ends of sandboxes of the meantime arrive at once."""
        if not self._frozen or self._boot is None:
            return
        self._thaw_quietly()
        self._around.trace.say(self.name, "thaws", len(self._backlog))
        backlog, self._backlog = self._backlog, []
        if self._dice.chance(0.5):
            self._handle(say.Ticked())
        for event in backlog:
            self._handle(event)
        if self._boot is not None:
            self._boot.machine.thaw()
            self._handle(say.Ticked())

    def _thaw_quietly(self) -> None:
        if self._frozen:
            self._frozen = False
            self.truth.thaw(self._around.loop.us)

    # ---- the daemon

    def _happened(self, event: say.Event) -> None:
        if self._boot is None:
            return
        if self._frozen:
            self._backlog.append(event)
        else:
            self._handle(event)

    def _handle(self, event: say.Event) -> None:
        boot = self._boot
        if boot is None:
            return
        now = self._clock.at(self._around.loop.us)
        for instruction in boot.state.handle(now, event):
            if self._boot is not boot:
                return
            self._obey(boot, instruction)
        wrong = boot.state.violations()
        if wrong:
            self._around.fail(f"{self.name}: {wrong[0]} after {event}")
        self._set_alarm(boot)

    def _set_alarm(self, boot: _AgentProcess) -> None:
        if self._boot is not boot:
            return
        wakes_at = boot.state.wakes_at
        if wakes_at is None:
            return
        at_us = max(self._clock.world_us(wakes_at), self._around.loop.us)
        if self._alarm_us <= self._around.loop.us or at_us < self._alarm_us:
            self._alarm_us = at_us
            self._around.loop.call_at(at_us / 1e6, self._rang, boot, at_us)

    def _rang(self, boot: _AgentProcess, at_us: int) -> None:
        if self._boot is boot and self._alarm_us == at_us:
            self._alarm_us = -1
            if not self._frozen:
                self._handle(say.Ticked())

    def _obey(self, boot: _AgentProcess, instruction: say.Instruction) -> None:
        match instruction:
            case say.Send(frame):
                self._send(boot, frame)
            case say.StartCommand():
                self._tell("starts command", instruction.task, instruction.epoch)
                boot.machine.start_command(instruction)
            case say.EndCommand():
                self._tell("ends command", instruction.task, instruction.epoch, instruction.reason)
                boot.machine.end_command(instruction)
            case say.StartRunner():
                self._tell("starts runner", instruction.runner)
                boot.machine.start_runner(instruction)
            case say.SendCalls():
                calls = [(call.task, call.epoch) for call in instruction.calls]
                self._tell("sends calls", instruction.runner, calls)
                boot.machine.send_calls(instruction)
            case say.EndRunner():
                self._tell("ends runner", instruction.runner)
                boot.machine.end_runner(instruction)
            case say.ExitDaemon():
                self._tell("exits")
                self.crash()

    def _tell(self, what: str, *details: object) -> None:
        self._around.trace.say(self.name, what, *details)

    # ---- the channel

    def _send(self, boot: _AgentProcess, frame: frames.AgentFrame) -> None:
        data = frames.encode(frame)
        self._around.trace.frame(self.name, ">", data, frame)
        if boot.link is None:
            return
        if isinstance(frame, frames.Reports):
            boot.sent[frame.sequence] = frame.items
        boot.link.send_up(data)

    def _upload(self, task: int, epoch: int, sha256: str, told: Callable[[bool], None]) -> None:
        """The request may be lost or late, and is given up after `UPLOAD_PATIENCE_US`."""
        network, open_now = self._around.network, [True]

        def answer(arrived: bool) -> None:
            if open_now:
                open_now.clear()
                self._tell("uploaded", task, epoch, arrived)
                told(arrived)

        def arrive() -> None:
            if network.reachable(self.name):
                self._around.host.put(self._secret, frames.Hold(task, epoch), sha256, back)

        def back(arrived: bool) -> None:
            self._around.loop.outside_us(network.latency_us(), answer, arrived)

        self._around.loop.after_us(network.latency_us(), arrive)
        self._around.loop.after_us(UPLOAD_PATIENCE_US, answer, False)

    def _dial(self, boot: _AgentProcess) -> None:
        if not boot.dialling and not boot.over:
            boot.dialling = True
            delay = self._dice.between(1, boot.backoff_us)
            boot.backoff_us = min(2 * boot.backoff_us, 500 * MS)
            self._around.loop.after_us(delay, self._dialled, boot)

    def _dialled(self, boot: _AgentProcess) -> None:
        boot.dialling = False
        if boot.over or boot.link is not None:
            return
        network = self._around.network
        if self._frozen or not network.reachable(self.name):
            self._dial(boot)
            return
        link = network.open(self.name)
        if not self._around.host.accept(link, self._secret):
            self._dial(boot)
            return
        boot.link = link
        boot.sent.clear()  # unrecorded reports are sent again, under new numbers
        boot.backoff_us = 20 * MS
        link.attach_agent(
            lambda data: self._arrived(boot, link, data), lambda: self._closed(boot, link)
        )
        self._tell("dials", link.name)
        self._handle(say.Connected())

    def _arrived(self, boot: _AgentProcess, link: SimulatedLink, data: bytes) -> None:
        if boot.over or boot.link is not link:
            return
        frame = frames.decode_from_server(data)
        self._around.trace.frame(self.name, "<", data, frame)
        self._witness(boot, frame)
        self._happened(say.FrameArrived(frame))

    def _closed(self, boot: _AgentProcess, link: SimulatedLink) -> None:
        if boot.over or boot.link is not link:
            return
        boot.link = None
        self._tell("loses", link.name)
        self._happened(say.Disconnected())
        self._dial(boot)

    def _witness(self, boot: _AgentProcess, frame: frames.ServerFrame) -> None:
        oracle = self._around.oracle
        match frame:
            case frames.Grants():
                leases = [
                    (lease.task, lease.epoch) for line in frame.lines for lease in line.leases
                ]
                oracle.grants_received(self.name, leases)
            case frames.Recorded():
                for number in [n for n in boot.sent if n <= frame.sequence]:
                    for item in boot.sent.pop(number):
                        refused = frames.Hold(item.task, item.epoch) in frame.refused
                        oracle.report_acknowledged(self.name, item, refused=refused)
            case frames.Refused(retry=False):
                self._around.fail(f"{self.name} was told never to come back: {frame.detail}")
            case _:
                pass

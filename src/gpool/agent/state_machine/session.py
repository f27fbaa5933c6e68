"""The agent's mind: events in, instructions out. It has no clock, no sockets and no processes; `now` is an argument.

Lease time (law 3: the agent lets go first). The server gives a lease away no sooner than `ttl` after it *received* the
node's last beat. The agent notes when it *sends* each beat and counts `ttl - margin` from the sending of the latest one
the server has confirmed (`Welcome.beat`, `BeatSeen.number`, `Grants.beat`). Sending precedes receiving, so the agent's
deadline precedes the server's by at least the margin, whatever the network did and without comparing clocks. The
deadline is looked at before anything else in `handle`: the first event after a freeze, whichever it is, ends
everything held. What had *ended* before is still reported; what is let go is reported lost, once nothing of it runs
(when beats arrive and only their answers do not, nobody else would end those leases); the store's fence decides.

Leases, lines, runners and commands are `gpool.agent.state_machine.work`; reports on their way are `gpool.agent.state_machine.outbox`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from gpool.agent.machine.telemetry import Gathering, by_task
from gpool.agent.state_machine.instructions import (
    CallPrinted,
    CallsAnswered,
    CommandCheckpointed,
    CommandEnded,
    CommandPrinted,
    CommandReached,
    CommandStarted,
    Connected,
    Disconnected,
    Event,
    Exit,
    FrameArrived,
    Instruction,
    OfferDetected,
    ReadingsTaken,
    ReclaimAsked,
    RunnerEnded,
    RunnerReached,
    RunnerReady,
    RunsLimited,
    Send,
    ShutdownAsked,
    Ticked,
)
from gpool.agent.state_machine.lease_queues import NEVER, Variables
from gpool.agent.state_machine.outbox import Outbox
from gpool.agent.state_machine.work import RECLAIM_GRACE_US, Work
from gpool.core.model import Offer, TaskSpec
from gpool.wire.frames import (
    PROTOCOL,
    Beat,
    BeatSeen,
    Grants,
    Hello,
    Hold,
    Line,
    OfferChanged,
    Recorded,
    Refused,
    Stop,
    StopReason,
    Welcome,
)

SHUTDOWN_US = 3_000_000
"""How long a stopping agent waits for sandboxes to end and reports to be recorded ..."""
SAVING_SHUTDOWN_US = 12_000_000
"""... and where a checkpoint is to be saved. Whoever starts agents waits longer before it insists."""
PREEMPTED_WHY = "stopped to make room for another task"
RECLAIMED_WHY = "its owner took the GPU back"


class Session:
    """One agent's dealings with one server, from boot to exit."""

    def __init__(self, node_boot: str, offer: Offer) -> None:
        self._boot = node_boot
        self._offer = self._said = offer
        self._outbox = Outbox()
        self._work = work = Work(self._outbox)
        self._specs: dict[int, TaskSpec] = {}
        self._secrets: dict[int, Variables] = {}
        self._gathering = Gathering()
        self._connected = False
        self._welcomed = False
        self._beat = 0
        self._beats: dict[int, int] = {}  # number -> when it was sent; unconfirmed ones
        self._beat_every = NEVER
        self._beat_at = NEVER
        self._term = NEVER  # ttl - margin
        self._confirmed_at: int | None = None  # when the last confirmed beat was sent
        self._deadline = NEVER
        self._exit_by = NEVER  # set once the owner stops the agent
        self._exited = False
        self._on: dict[type, Callable[[int, Any, list[Instruction]], None]] = {
            Connected: self._on_connected,
            Disconnected: self._on_disconnected,
            FrameArrived: self._on_frame,
            Ticked: self._on_ticked,
            OfferDetected: self._on_offer_detected,
            ReadingsTaken: self._on_readings_taken,
            ShutdownAsked: self._on_shutdown_asked,
            ReclaimAsked: self._on_reclaim_asked,
            RunsLimited: self._on_runs_limited,
            CommandReached: work.on_command_reached,
            CommandCheckpointed: work.on_command_checkpointed,
            CommandStarted: work.on_command_started,
            CommandPrinted: work.on_command_printed,
            CommandEnded: work.on_command_ended,
            RunnerReached: work.on_runner_reached,
            RunnerReady: work.on_runner_ready,
            CallsAnswered: work.on_calls_answered,
            CallPrinted: work.on_call_printed,
            RunnerEnded: work.on_runner_ended,
        }

    def handle(self, now: int, event: Event) -> list[Instruction]:
        """What to do about the event, in this order."""
        out: list[Instruction] = []
        if now >= self._deadline:
            self._let_go(now, out)
        self._on[type(event)](now, event, out)
        if self._welcomed:
            out.extend([Send(frame) for frame in self._outbox.flush(now)])
        if self._exit_by != NEVER and not self._exited:
            self._exit_when_done(now, out)
        return out

    @property
    def wakes_at(self) -> int | None:
        """When `Ticked` is wanted, at the latest."""
        at = self._work.next_at
        if self._work.has_leases:
            at = min(at, self._deadline)
        if self._welcomed:
            at = min(at, self._beat_at, self._outbox.flush_at)
        if not self._exited:
            at = min(at, self._exit_by)
        return None if at >= NEVER else at

    @property
    def holds(self) -> tuple[Hold, ...]:
        """Every lease it has: running, in line, or ended and not yet recorded."""
        leases = self._work.leases
        leases += sorted(self._outbox.ended_leases().difference(leases))
        return tuple([Hold(task, epoch) for task, epoch in leases])

    def violations(self) -> list[str]:
        """What must never be so and is, in sentences; empty when all is well."""
        return self._work.violations()

    # ---- beats and lease time

    def _next_beat(self, now: int) -> int:
        self._beat += 1
        self._beats[self._beat] = now
        self._beat_at = now + self._beat_every
        return self._beat

    def _confirm(self, beat: int) -> None:
        sent_at = self._beats.get(beat)
        if sent_at is None:  # confirmed before, or never sent
            return
        self._beats = {n: at for n, at in self._beats.items() if n > beat}
        self._confirmed_at = sent_at
        self._deadline = sent_at + self._term

    def _let_go(self, now: int, out: list[Instruction]) -> None:
        self._deadline, self._confirmed_at = NEVER, None
        self._work.let_go(now, out)
        self._beat_at = now  # say at once what is left

    # ---- what happens

    def _on_connected(self, now: int, _: Connected, out: list[Instruction]) -> None:
        self._connected, self._welcomed = True, False
        self._specs.clear()
        self._secrets.clear()
        self._said = self._offer
        hello = Hello(PROTOCOL, self._boot, self._offer, self._next_beat(now), self.holds)
        out.append(Send(hello))

    def _on_disconnected(self, _now: int, _: Disconnected, _out: list[Instruction]) -> None:
        self._connected = self._welcomed = False

    def _on_ticked(self, now: int, _: Ticked, out: list[Instruction]) -> None:
        self._work.tick(now, out)
        if self._welcomed and now >= self._beat_at:
            readings = self._gathering.take()
            tasks = by_task(readings, self._work.on_gpus()) if readings else ()
            out.append(Send(Beat(self._next_beat(now), self.holds, readings, tasks)))

    def _on_readings_taken(self, _now: int, event: ReadingsTaken, _out: list[Instruction]) -> None:
        if self._welcomed:  # what nobody can be told is not kept
            self._gathering.add(event.readings)

    def _on_offer_detected(self, _now: int, event: OfferDetected, out: list[Instruction]) -> None:
        """Said at once, or with the next hello; one that comes between hello and welcome, after the welcome."""
        self._offer = event.offer
        self._say_offer(out)

    def _say_offer(self, out: list[Instruction]) -> None:
        if self._welcomed and self._offer != self._said:
            self._said = self._offer
            out.append(Send(OfferChanged(self._offer)))

    def _on_shutdown_asked(self, now: int, _: ShutdownAsked, out: list[Instruction]) -> None:
        if self._exit_by == NEVER:
            self._work.shut_down(now, out)
            self._exit_by = now + (SAVING_SHUTDOWN_US if self._work.is_saving else SHUTDOWN_US)

    def _on_reclaim_asked(self, now: int, event: ReclaimAsked, out: list[Instruction]) -> None:
        self._work.reclaim(now, event.gpus, event.why, out)

    def _on_runs_limited(self, _now: int, event: RunsLimited, _out: list[Instruction]) -> None:
        self._work.limit_runs(NEVER if event.longest_us is None else event.longest_us)

    def _exit_when_done(self, now: int, out: list[Instruction]) -> None:
        said = not self._welcomed or not self._outbox
        if now >= self._exit_by or (self._work.is_idle and said):
            self._exited = True
            out.append(Exit())

    def _on_frame(self, now: int, event: FrameArrived, out: list[Instruction]) -> None:
        frame = event.frame
        match frame:
            case Grants():
                self._on_grants(now, frame, out)
            case Recorded():
                self._outbox.recorded(frame.sequence)
                self._drop(now, frame.refused, out)
            case BeatSeen():
                self._confirm(frame.number)
                self._drop(now, frame.drop, out)
            case Stop(reason=StopReason.PREEMPTED):
                self._work.preempt(now, frame.holds, PREEMPTED_WHY, out)
            case Stop(reason=StopReason.RECLAIMED):
                self._work.preempt(now, frame.holds, RECLAIMED_WHY, out, RECLAIM_GRACE_US)
            case Stop():
                self._work.stop(now, frame.holds, out)
            case Welcome():
                self._on_welcome(now, frame, out)
            case Refused():
                pass  # the channel closes; the daemon decides whether to dial again

    def _drop(self, now: int, holds: tuple[Hold, ...], out: list[Instruction]) -> None:
        if holds:
            self._work.drop(now, [(hold.task, hold.epoch) for hold in holds], out)

    def _on_welcome(self, now: int, frame: Welcome, out: list[Instruction]) -> None:
        if not self._connected:
            return
        self._term = max(1, frame.ttl_us - frame.margin_us)
        self._beat_every = frame.beat_every_us
        if self._confirmed_at is not None:
            self._deadline = self._confirmed_at + self._term
        self._confirm(frame.beat)
        self._drop(now, frame.drop, out)
        if not self._welcomed:
            self._welcomed = True
            self._beat_at = min(self._beat_at, now + self._beat_every)
            self._outbox.begin_again(now)
            self._say_offer(out)

    def _on_grants(self, now: int, frame: Grants, out: list[Instruction]) -> None:
        self._confirm(frame.beat)
        self._specs.update(frame.specs)
        for secret in frame.secrets:
            told = self._secrets.get(secret.spec, ())
            self._secrets[secret.spec] = (*told, (secret.name, secret.value))
        in_time = self._confirmed_at is not None and now < self._deadline
        if in_time and self._exit_by == NEVER and not self._offer.closed:
            closed = {gpu.index for gpu in self._offer.gpus if gpu.closed}
            lines = [line for line in frame.lines if not _stands_on(line, closed)]
            if len(lines) < len(frame.lines):
                self._work.decline(now, [one for one in frame.lines if _stands_on(one, closed)])
            self._work.take(now, lines, self._specs, out, self._secrets)
        else:
            self._work.decline(now, frame.lines)


def _stands_on(line: Line, gpus: Collection[int]) -> bool:
    return any(part.gpu_index in gpus for part in line.allocation.slices)

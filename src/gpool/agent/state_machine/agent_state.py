"""The agent's state machine: events in, instructions out. Pure; `now` is an argument of every event.

Handles the connection, heartbeats, the offer and the agent's end; leases are `lease_control` (orders of server and
owner) and `sandbox_events` (reports of sandboxes).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from gpool.agent.state_machine.dispatch import Dispatch
from gpool.agent.state_machine.gpu_readings import ReadingAverages, by_task, simulated_readings
from gpool.agent.state_machine.instructions import (
    NEVER,
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
    ExitDaemon,
    FrameArrived,
    Instruction,
    OfferDetected,
    ProgressReported,
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
from gpool.agent.state_machine.lease_control import RECLAIM_GRACE_US, LeaseControl
from gpool.agent.state_machine.lease_queues import LeaseQueue, Variables, invariant_violations
from gpool.agent.state_machine.leases import Leases, LeaseTimer
from gpool.agent.state_machine.outbox import Outbox
from gpool.agent.state_machine.sandbox_events import SandboxEvents
from gpool.agent.state_machine.transitions import LeaseTransition
from gpool.agent.state_machine.work_signatures import WorkSigner
from gpool.core.model import Offer, Slice, TaskSpec
from gpool.wire.frames import (
    OLDEST_PROTOCOL,
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
"""Longest time a stopping agent waits for sandboxes to end and reports to be recorded ..."""
SAVING_SHUTDOWN_US = 12_000_000
"""... and the same where a checkpoint is to be saved. A supervisor must wait longer than this before it kills."""
PREEMPTED_WHY = "stopped to make room for another task"
RECLAIMED_WHY = "its owner took the GPU back"
STOPPED_WHY = "its agent was stopped"


class ServerConnection:
    __slots__ = ("connected", "secrets", "sent_offer", "specs", "welcomed")

    def __init__(self, offer: Offer) -> None:
        self.connected = False
        self.welcomed = False
        self.sent_offer = offer
        self.specs: dict[int, TaskSpec] = {}
        self.secrets: dict[int, Variables] = {}

    def open(self, offer: Offer) -> None:
        self.connected, self.welcomed = True, False
        self.sent_offer = offer
        self.specs.clear()
        self.secrets.clear()

    def close(self) -> None:
        self.connected = self.welcomed = False

    def learn(self, grants: Grants) -> None:
        self.specs.update(grants.specs)
        for secret in grants.secrets:
            known = self.secrets.get(secret.spec, ())
            self.secrets[secret.spec] = (*known, (secret.name, secret.value))


class AgentState:
    def __init__(self, node_boot: str, offer: Offer, signer: WorkSigner | None = None) -> None:
        """`signer`: signs the work of priced leases; None: their ends are reported unsigned."""
        self._boot = node_boot
        self._offer = offer
        self._signer = signer
        if signer is not None:
            signer.learn(offer)
        self._outbox = Outbox() if signer is None else Outbox(signer.signed)
        self._leases = Leases(self._outbox, signer)
        self._dispatch = Dispatch(self._leases)
        self._control = LeaseControl(self._outbox, self._leases, self._dispatch)
        self._timer = LeaseTimer()
        self._connection = ServerConnection(offer)
        self._readings = ReadingAverages()
        self._exit_by = NEVER  # set once the owner stops the agent
        self._farewell = 0  # heartbeat after which no new lease is on its way; 0: none awaited
        self._exited = False
        events = SandboxEvents(self._leases, self._dispatch)
        self._handlers: dict[type, Callable[[int, Any, list[Instruction]], None]] = {
            Connected: self._on_connected,
            Disconnected: self._on_disconnected,
            FrameArrived: self._on_frame,
            Ticked: self._on_ticked,
            OfferDetected: self._on_offer_detected,
            ReadingsTaken: self._on_readings_taken,
            ShutdownAsked: self._on_shutdown_asked,
            ReclaimAsked: self._on_reclaim_asked,
            RunsLimited: self._on_runs_limited,
            CommandReached: events.on_command_reached,
            ProgressReported: events.on_progress,
            CommandCheckpointed: events.on_command_checkpointed,
            CommandStarted: events.on_command_started,
            CommandPrinted: events.on_printed,
            CommandEnded: events.on_command_ended,
            RunnerReached: events.on_runner_reached,
            RunnerReady: events.on_runner_ready,
            CallsAnswered: events.on_calls_answered,
            CallPrinted: events.on_printed,
            RunnerEnded: events.on_runner_ended,
        }

    def handle(self, now: int, event: Event) -> list[Instruction]:
        out: list[Instruction] = []
        if now >= self._timer.deadline:
            self._expire(now, out)
        self._handlers[type(event)](now, event, out)
        if self._connection.welcomed:
            if now >= self._outbox.progress.due_at:
                self._leases.report_progress(now)
            out.extend([Send(frame) for frame in self._outbox.flush(now)])
        if self._exit_by != NEVER and not self._exited:
            self._exit_when_done(now, out)
        return out

    @property
    def wakes_at(self) -> int | None:
        """Latest time at which `Ticked` must come; None: never."""
        at = self._dispatch.next_at
        if self._leases.held:
            at = min(at, self._timer.deadline)
        if self._connection.welcomed:
            at = min(at, self._timer.heartbeat_at, self._outbox.flush_at)
            at = min(at, self._outbox.progress.due_at)
        if not self._exited:
            at = min(at, self._exit_by)
        return None if at >= NEVER else at

    @property
    def holds(self) -> tuple[Hold, ...]:
        leases = self._leases.ids()
        leases += sorted(self._outbox.ended_leases().difference(leases))
        return tuple([Hold(task, epoch) for task, epoch in leases])

    def story(self, task: int) -> list[LeaseTransition]:
        lease = self._leases.held.get(task)
        return [] if lease is None else lease.story()

    def violations(self) -> list[str]:
        return invariant_violations(
            self._leases.held, self._dispatch.queues, self._dispatch.runners
        )

    # ---- events of the connection

    def _on_connected(self, now: int, _: Connected, out: list[Instruction]) -> None:
        self._connection.open(self._offer)
        heartbeat = self._timer.next_heartbeat(now)
        hello = Hello(PROTOCOL, self._boot, self._offer, heartbeat, self.holds, OLDEST_PROTOCOL)
        out.append(Send(hello))

    def _on_disconnected(self, _now: int, _: Disconnected, _out: list[Instruction]) -> None:
        self._connection.close()

    def _on_frame(self, now: int, event: FrameArrived, out: list[Instruction]) -> None:
        frame = event.frame
        match frame:
            case Grants():
                self._on_grants(now, frame, out)
            case Recorded():
                self._outbox.recorded(frame.sequence)
                self._drop(now, frame.refused, out)
            case BeatSeen():
                self._timer.confirm(frame.number)
                self._drop(now, frame.drop, out)
                if frame.number >= self._farewell:
                    self._farewell = 0
            case Stop(reason=StopReason.PREEMPTED):
                self._control.preempt(now, frame.holds, PREEMPTED_WHY, out)
            case Stop(reason=StopReason.RECLAIMED):
                self._control.preempt(now, frame.holds, RECLAIMED_WHY, out, RECLAIM_GRACE_US)
            case Stop():
                self._control.stop(now, frame.holds, out)
            case Welcome():
                self._on_welcome(now, frame, out)
            case Refused():
                pass  # the channel closes; the daemon decides whether to reconnect

    def _drop(self, now: int, holds: tuple[Hold, ...], out: list[Instruction]) -> None:
        if holds:
            self._control.drop(now, [(hold.task, hold.epoch) for hold in holds], out)

    def _on_welcome(self, now: int, frame: Welcome, out: list[Instruction]) -> None:
        if not self._connection.connected:
            return
        timer = self._timer
        timer.configure(frame.ttl_us, frame.margin_us, frame.beat_every_us)
        timer.confirm(frame.beat)
        self._drop(now, frame.drop, out)
        if not self._connection.welcomed:
            self._connection.welcomed = True
            if self._signer is not None:
                self._signer.sign_jointly(allowed=frame.joint_signatures)
            timer.heartbeat_at = min(timer.heartbeat_at, now + timer.heartbeat_every)
            self._outbox.resend(now)
            self._send_offer(out)

    def _on_grants(self, now: int, frame: Grants, out: list[Instruction]) -> None:
        self._timer.confirm(frame.beat)
        connection = self._connection
        connection.learn(frame)
        if self._timer.is_valid(now) and self._exit_by == NEVER and not self._offer.closed:
            closed = {gpu.index for gpu in self._offer.gpus if gpu.closed}
            open_ = [grant for grant in frame.lines if not _uses(grant, closed)]
            if len(open_) < len(frame.lines):
                self._control.decline(now, [one for one in frame.lines if _uses(one, closed)])
            self._control.take(now, open_, connection.specs, connection.secrets, out)
        else:
            self._control.decline(now, frame.lines)

    # ---- time

    def _expire(self, now: int, out: list[Instruction]) -> None:
        self._timer.expire(now)
        self._control.expire(now, out)

    def _on_ticked(self, now: int, _: Ticked, out: list[Instruction]) -> None:
        self._dispatch.tick(now, out)
        if self._connection.welcomed and now >= self._timer.heartbeat_at:
            running = _running_on_gpus(self._dispatch.queues.values())
            simulated = simulated_readings(self._offer.gpus, running, now)
            readings = (*self._readings.take(), *simulated)
            tasks = by_task(readings, running) if readings else ()
            number = self._timer.next_heartbeat(now)
            out.append(Send(Beat(number, self.holds, readings, tasks)))

    # ---- the machine and its owner

    def _on_readings_taken(self, _now: int, event: ReadingsTaken, _out: list[Instruction]) -> None:
        if self._connection.welcomed:
            self._readings.add(event.readings)

    def _on_offer_detected(self, _now: int, event: OfferDetected, out: list[Instruction]) -> None:
        """Send the offer at once, or with the next hello; between hello and welcome, after the welcome."""
        if self._exit_by == NEVER:
            self._offer = event.offer
            if self._signer is not None:
                self._signer.learn(event.offer)
            self._send_offer(out)

    def _send_offer(self, out: list[Instruction]) -> None:
        if self._connection.welcomed and self._offer != self._connection.sent_offer:
            self._connection.sent_offer = self._offer
            out.append(Send(OfferChanged(self._offer)))

    def _on_reclaim_asked(self, now: int, event: ReclaimAsked, out: list[Instruction]) -> None:
        self._control.reclaim(now, event.gpus, event.why, out)

    def _on_runs_limited(self, _now: int, event: RunsLimited, _out: list[Instruction]) -> None:
        self._dispatch.limit_runs(NEVER if event.longest_us is None else event.longest_us)

    def _on_shutdown_asked(self, now: int, _: ShutdownAsked, out: list[Instruction]) -> None:
        if self._exit_by == NEVER:
            if self._connection.welcomed:
                self._leave(now, out)
            self._control.shut_down(now, out)
            saving = any(
                queue.command is not None and queue.command.terms.spec.checkpoint
                for queue in self._dispatch.queues.values()
            )
            self._exit_by = now + (SAVING_SHUTDOWN_US if saving else SHUTDOWN_US)

    def _leave(self, now: int, out: list[Instruction]) -> None:
        """Withdraw the offer before the leases are returned: the server would grant the freed slots to this node again.

        The heartbeat behind it is confirmed after every lease that was granted before.
        """
        self._offer = replace(self._offer, closed=STOPPED_WHY)
        self._connection.sent_offer = self._offer
        self._farewell = self._timer.next_heartbeat(now)
        out.append(Send(OfferChanged(self._offer, leaving=True)))
        out.append(Send(Beat(self._farewell, self.holds)))

    def _exit_when_done(self, now: int, out: list[Instruction]) -> None:
        reported = not self._connection.welcomed or not (self._outbox or self._farewell)
        if now >= self._exit_by or (self._dispatch.is_idle and reported):
            self._exited = True
            out.append(ExitDaemon())


def _uses(grant: Line, gpus: Collection[int]) -> bool:
    return any(part.gpu_index in gpus for part in grant.allocation.slices)


def _running_on_gpus(
    queues: Iterable[LeaseQueue],
) -> dict[tuple[int, int], tuple[Slice, ...]]:
    found = {}
    for queue in queues:
        lease = queue.current
        if lease is not None and lease.terms.allocation.slices:
            found[lease.task, lease.epoch] = lease.terms.allocation.slices
    return found

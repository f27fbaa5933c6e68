"""Leases an agent holds, their end reports, and lease time: heartbeats and the deadline by which it ends its sandboxes.

Invariant 3 of DESIGN: the agent ends a lease before the server may grant it to another node; else one task could run
twice at once. docs/leases.md describes both sides. They count the same `ttl` without comparing clocks:

- The server extends a node's leases to `ttl` after it *received* the node's last heartbeat, and never reassigns sooner.
- The agent records the boot-clock time at which it *sends* each heartbeat. When the server confirms heartbeat n
  (`Welcome.beat`, `BeatSeen.number`, `Grants.beat`), the agent's deadline becomes sending time of n + ttl - margin. A
  confirmation of an older heartbeat changes nothing.

A heartbeat is sent before it is received, so agent deadline = sent + ttl - margin < received + ttl = server deadline:
the agent is earlier by at least `margin`, whatever the network delays or loses. The margin covers the rest: ending
sandboxes (a SIGKILL and the wait for it) and clocks that run at different rates.

Example with ttl 30 s, margin 5 s, a heartbeat every 8 s. The network fails at 20 s, after heartbeat 3 was confirmed:

    agent     send 1    send 2    send 3    send 4    (send 5)                deadline: end sandboxes
              0         8         16        24        32                      41 = 16 + 30 - 5
    ----------|---------|---------|----x----|---------|-----------------------|------------|---------> s
                                       20 network fails                                     47
    server     0.5       8.5       17                                                       17 + 30: reassign

Heartbeat 4 is lost, so the deadline stays at 41 s. The server counts from 17 s, when heartbeat 3 arrived, and reassigns
at 47 s. Had the agent counted from the receipt of the confirmation, a slow answer (sent 16 s, confirmed 29 s) would put
its deadline to 54 s, seven seconds too late: the flaw `LEASE_COUNTED_FROM_RECEIPT` of the simulated pool.

`AgentState.handle` compares the deadline first, so the first event after a suspended machine wakes up ends everything
held; the boot clock counts during suspension. Results already in the outbox are still reported. Expired leases are
reported lost once nothing of them runs, because if only confirmations get lost, the server itself sees no reason to end
them. If the server has reassigned a lease meanwhile, the store refuses the late report by its epoch.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpool.agent.runtime.protocol import SandboxExit
from gpool.agent.state_machine.instructions import NEVER, CallAnswered, CommandEnded, RunnerEnded
from gpool.agent.state_machine.lease_queues import AgentLease, EndedLeases
from gpool.agent.state_machine.outbox import LogBuffer, Outbox
from gpool.agent.state_machine.transitions import LeaseMove, LeaseState
from gpool.agent.state_machine.work_signatures import WorkSigner
from gpool.core.model import EndReason, Fault, OutputFile, Phase, TaskSpec
from gpool.wire.frames import Checkpointed, Finished, HandedBack, Progressed, Released

MAX_ERROR_TEXT = 32 * 1024
RAISED, RETURNED = EndReason.RAISED, EndReason.RETURNED  # for each call: slow to look up
AGENT_STOPPED = "the owner stopped the agent"
ACTIVITY = {
    Phase.FETCH: "its inputs were fetched",
    Phase.BUILD: "its environment was built",
    Phase.START: "its sandbox was started",
    Phase.COLLECT: "its outputs were collected",
}


def of_command(event: CommandEnded) -> Finished:
    return Finished(
        event.task,
        event.epoch,
        event.reason,
        event.exit_code,
        error_text=event.error_text[:MAX_ERROR_TEXT],
        duration_us=event.duration_us,
        outputs=event.outputs,
        fault=event.fault,
    )


def of_call(answer: CallAnswered) -> Finished:
    reason = RAISED if answer.raised else RETURNED
    return Finished(
        answer.task,
        answer.epoch,
        answer.reason or reason,
        answer.exit_code,
        answer.value,
        answer.value_sha256,
        answer.error_text[:MAX_ERROR_TEXT],
        answer.duration_us,
        fault=answer.fault,
    )


def timed_out_in(phase: Phase, spec: TaskSpec) -> str:
    limit = spec.timeout / 1_000_000
    if phase is Phase.RUN:
        return f"it ran past its time-out of {limit:g} s"
    return f"its time-out of {limit:g} s passed while {ACTIVITY[phase]}"


def timed_out(lease: AgentLease, text: str) -> Finished:
    return _end(lease, EndReason.TIMED_OUT, text)


def preempted(lease: AgentLease, text: str) -> Finished:
    return _end(lease, EndReason.PREEMPTED, text)


def lost(lease: AgentLease) -> Finished:
    text = "the node lost contact with the server, and its lease expired"
    return _end(lease, EndReason.LOST, text)


def not_started(lease: AgentLease, event: RunnerEnded) -> Finished:
    text = f"the sandbox did not start: {event.detail}"
    if event.reason is EndReason.BAD_INPUT:
        return _end(lease, EndReason.BAD_INPUT, text, event.exit_code)
    end = _end(lease, EndReason.SANDBOX_FAILED, text, event.exit_code)
    return msgspec.structs.replace(end, fault=event.fault or Fault.UNCLEAR)


def died(lease: AgentLease, event: RunnerEnded) -> Finished:
    """The runner ended during this call. A function that exits has failed, even with exit code 0."""
    ended = SandboxExit(event.exit_code, event.reason, event.detail)
    reason, text = why_it_died(ended)
    return _end(lease, reason, text, event.exit_code or 1)


def why_it_died(ended: SandboxExit) -> tuple[EndReason, str]:
    match ended.reason:
        case EndReason.OUT_OF_MEMORY:
            text = f"the function ran out of memory: {ended.detail}".rstrip(": ")
            return EndReason.OUT_OF_MEMORY, text
        case EndReason.SANDBOX_FAILED:
            return EndReason.SANDBOX_FAILED, f"the sandbox failed: {ended.detail}".rstrip(": ")
    text = f"the function's process ended with exit code {ended.exit_code} before it returned"
    return EndReason.EXITED, text


def _end(lease: AgentLease, reason: EndReason, text: str, code: int | None = None) -> Finished:
    return Finished(lease.task, lease.epoch, reason, code, error_text=text[:MAX_ERROR_TEXT])


FINISHED = LeaseMove.FINISHED  # for each call: a member of an enum is slow to look up
OUTPUT_BYTES = 100  # of an output in a report, without its name


class Leases:
    def __init__(self, outbox: Outbox, signer: WorkSigner | None = None) -> None:
        """`signer`: signs the ends of priced leases; None in a simulation without receipts."""
        self._outbox, self._signer = outbox, signer
        self.held: dict[int, AgentLease] = {}  # by task
        self.outlived: dict[int, AgentLease] = {}  # dropped ones whose sandbox is still being ended
        self.ended = EndedLeases()

    def ids(self) -> list[tuple[int, int]]:
        return [(lease.task, lease.epoch) for lease in self.held.values()]

    def get(self, task: int, epoch: int) -> AgentLease | None:
        lease = self.held.get(task)
        return lease if lease is not None and lease.epoch == epoch else None

    # ---- progress

    def announce(self, now: int, lease: AgentLease) -> None:
        self._outbox.add_started(now, lease.task, lease.epoch)

    def reached(self, now: int, lease: AgentLease, phase: Phase) -> None:
        self._outbox.add_reached(now, lease.task, lease.epoch, phase)

    def checkpointed(self, now: int, lease: AgentLease, files: tuple[OutputFile, ...]) -> None:
        self._outbox.add(now, Checkpointed(lease.task, lease.epoch, files), _names_bytes(files))

    def progressed(self, now: int, lease: AgentLease, millionths: int, text: str) -> None:
        self._outbox.progress.add(now, Progressed(lease.task, lease.epoch, millionths, text))

    def report_progress(self, now: int) -> None:
        """Report the progress that is due; that of ended leases is dropped."""
        for item in self._outbox.progress.take(now):
            if self.get(item.task, item.epoch) is not None:
                self._outbox.add(now, item, len(item.text))

    def print(self, now: int, lease: AgentLease, stream: int, data: bytes) -> None:
        if lease.log is None:
            lease.log = LogBuffer(lease.task, lease.epoch)
        lease.log.append(now, stream, data)

    def flush_log(self, now: int, lease: AgentLease, *, ends: bool = False) -> None:
        if lease.log is not None:
            for chunk in lease.log.take(now, ends=ends):
                self._outbox.add(now, chunk, len(chunk.data))

    # ---- ends

    def finish(self, now: int, lease: AgentLease, finished: Finished) -> None:
        if lease.log is not None:
            self.flush_log(now, lease, ends=True)
        lease.move(now, FINISHED, finished.reason)
        self._remove(lease)
        work = None
        if lease.terms.receipts and self._signer is not None:
            work = self._signer.work(lease, finished)
        data = len(finished.value) + len(finished.error_text.encode("utf-8", "replace"))
        if finished.outputs:
            data += _names_bytes(finished.outputs)
        self._outbox.add(now, finished, data, work)

    def release(self, now: int, lease: AgentLease) -> None:
        has_begun = lease.state is not LeaseState.QUEUED
        lease.move(now, LeaseMove.RELEASED)
        self._remove(lease)
        work = None
        if has_begun and lease.terms.receipts and self._signer is not None:
            work = self._signer.work(lease, None)
        self._outbox.add(now, Released(lease.task, lease.epoch), work=work)

    def return_unstarted(self, now: int, leases: Iterable[AgentLease], why: str = "") -> None:
        for lease in leases:
            lease.move(now, LeaseMove.RETURNED, why)
            self._remove(lease)
            self._outbox.add(now, HandedBack(lease.task, lease.epoch))

    def drop(self, now: int, lease: AgentLease) -> None:
        """A lease in a sandbox stays in `outlived` until that is gone."""
        lease.move(now, LeaseMove.DROPPED)
        if lease.state is LeaseState.DROPPED:
            self.outlived[lease.task] = lease
        self._remove(lease)

    def conclude(self, now: int, lease: AgentLease) -> None:
        match lease.state:
            case LeaseState.STOPPING:
                self.release(now, lease)
            case LeaseState.TIMING_OUT:
                self.finish(now, lease, timed_out(lease, lease.reason))
            case LeaseState.SHUTTING_DOWN | LeaseState.PREEMPTING:
                self.finish(now, lease, preempted(lease, lease.reason))
            case LeaseState.EXPIRED:
                lease.log = None
                self.finish(now, lease, lost(lease))
            case _:
                if self.outlived.get(lease.task) is lease:
                    del self.outlived[lease.task]
                lease.move(now, LeaseMove.CLEARED)

    def _remove(self, lease: AgentLease) -> None:
        del self.held[lease.task]
        self.ended.add(lease.task, lease.epoch)


def _names_bytes(files: tuple[OutputFile, ...]) -> int:
    return sum(len(file.path.encode()) + OUTPUT_BYTES for file in files)


class LeaseTimer:
    __slots__ = (
        "_number",
        "_unconfirmed",
        "confirmed_at",
        "deadline",
        "heartbeat_at",
        "heartbeat_every",
        "term",
    )

    def __init__(self) -> None:
        self._number = 0
        self._unconfirmed: dict[int, int] = {}  # number -> when it was sent
        self.heartbeat_every = NEVER
        self.heartbeat_at = NEVER  # when the next one is due
        self.term = NEVER  # ttl - margin
        self.confirmed_at: int | None = None  # when the last confirmed heartbeat was *sent*
        self.deadline = NEVER

    def next_heartbeat(self, now: int) -> int:
        self._number += 1
        self._unconfirmed[self._number] = now
        self.heartbeat_at = now + self.heartbeat_every
        return self._number

    def configure(self, ttl_us: int, margin_us: int, heartbeat_every_us: int) -> None:
        self.term = max(1, ttl_us - margin_us)
        self.heartbeat_every = heartbeat_every_us
        if self.confirmed_at is not None:
            self.deadline = self.confirmed_at + self.term

    def confirm(self, number: int) -> None:
        sent_at = self._unconfirmed.get(number)
        if sent_at is None:  # confirmed before, or never sent
            return
        self._unconfirmed = {n: at for n, at in self._unconfirmed.items() if n > number}
        self.confirmed_at = sent_at
        self.deadline = sent_at + self.term

    def expire(self, now: int) -> None:
        """Forget the passed deadline; the next heartbeat is due at once, to state the remaining leases."""
        self.deadline, self.confirmed_at = NEVER, None
        self.heartbeat_at = now

    def is_valid(self, now: int) -> bool:
        return self.confirmed_at is not None and now < self.deadline

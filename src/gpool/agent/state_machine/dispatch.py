"""Dispatch of leases to sandboxes: runners and commands. Pure.

The leases of an allocation wait in one lease queue; one runs. A command runs alone in a fresh sandbox. Calls go to a
runner in a window worth about `WINDOW_US` of work. A call in a runner may begin at any moment and cannot be recalled:
calls behind a long one are not returned to the server (they could run twice at once), and a call that is stopped or
dropped there only changes its state. When it would be next to run, the runner is ended and the remaining calls go to a
fresh one.
"""

from __future__ import annotations

from gpool.agent.state_machine.instructions import (
    NEVER,
    EndCommand,
    EndRunner,
    Instruction,
    RunnerCall,
    SendCalls,
    StartCommand,
    StartRunner,
)
from gpool.agent.state_machine.lease_queues import (
    AgentLease,
    Ending,
    GrantTerms,
    LeaseQueue,
    RunnerRecord,
    RunnerState,
)
from gpool.agent.state_machine.leases import Leases, timed_out, timed_out_in
from gpool.agent.state_machine.transitions import LeaseMove
from gpool.core.model import EndReason, Phase

MAX_WINDOW = 128
FIRST_WINDOW = 8  # until the duration of a call is known
WINDOW_US = 50_000
ANNOUNCE_AFTER_US = 10_000  # of a shorter attempt only the end is reported
RETURN_AFTER_US = 2_000_000  # waiting leases are returned when the one before them runs this long
PHASE_AFTER_US = 200_000  # shorter phases are not reported
IDLE_RUNNER_US = 60_000_000
MAX_IDLE_RUNNERS = 8
# Looked up for each call: access to a member through its enum is slow.
SENT, READY = LeaseMove.SENT, RunnerState.READY


class Dispatch:
    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self.queues: dict[int, LeaseQueue] = {}
        self.runners: dict[int, RunnerRecord] = {}
        self.idle: dict[int, RunnerRecord] = {}
        self.blocked: set[int] = set()  # queues that wait for the end of another sandbox
        self._last_runner = 0
        self._longest_us = NEVER  # the owner's limit for any run

    @property
    def next_at(self) -> int:
        return min((queue.next_at for queue in self.queues.values()), default=NEVER)

    @property
    def is_idle(self) -> bool:
        return not self.runners and all(queue.command is None for queue in self.queues.values())

    def limit_runs(self, longest_us: int) -> None:
        self._longest_us = longest_us
        for queue in list(self.queues.values()):
            self.settle(queue)

    def advance(self, now: int, queue: LeaseQueue, out: list[Instruction]) -> None:
        runner = queue.runner
        if runner is not None and runner.sent and runner.sent[0].is_ending:
            self.end_runner(runner, out)
        if queue.waiting and queue.command is None:
            terms = queue.waiting[0].terms
            if runner is None:
                self._start(now, queue, out)
                runner = queue.runner
            elif not runner.sent and not (terms.is_function and runner.key == terms.key):
                self.end_runner(runner, out)
            if runner is not None and runner.state is READY:
                self._fill(now, queue, runner, out)
        elif runner is not None and runner.state is READY and not runner.sent:
            self._idle(now, runner, out)
        self.settle(queue)

    def _start(self, now: int, queue: LeaseQueue, out: list[Instruction]) -> None:
        lease = queue.waiting[0]
        terms = lease.terms
        if lease.task in self._leases.outlived or self._is_blocked(terms, queue, out):
            self.blocked.add(queue.number)
            return
        if not terms.is_function:
            queue.waiting.popleft()
            lease.move(now, LeaseMove.STARTED)
            queue.command, queue.command_ending, queue.announced = lease, Ending.NO, False
            queue.command_begun, queue.command_since = now, NEVER
            queue.reach(now, Phase.START)
            out.append(
                StartCommand(
                    lease.task,
                    lease.epoch,
                    terms.spec,
                    terms.allocation,
                    terms.owner,
                    terms.secrets,
                    lease.checkpoint,
                    terms.user,
                    terms.gang,
                )
            )
            return
        for runner in self.idle.values():
            if runner.key == terms.key and runner.state is RunnerState.READY:
                former = runner.queue
                former.runner, runner.queue, queue.runner = None, queue, runner
                self.settle(former)
                return
        self._last_runner += 1
        runner = RunnerRecord(self._last_runner, terms.key, queue)
        self.runners[runner.number] = queue.runner = runner
        runner.head_begun = now
        queue.reach(now, Phase.START)
        out.append(
            StartRunner(
                runner.number,
                terms.user,
                terms.owner,
                terms.spec,
                terms.allocation,
                terms.secrets,
            )
        )

    def _is_blocked(self, terms: GrantTerms, queue: LeaseQueue, out: list[Instruction]) -> bool:
        """Ends idle runners on these GPUs."""
        gpus = {part.gpu_index for part in terms.allocation.slices}
        if not gpus:
            return False
        found = False
        for runner in self.runners.values():
            if runner.queue is queue or not gpus & {s.gpu_index for s in runner.key.slices}:
                continue
            taken_over = runner.number in self.idle and runner.serves(terms)
            if not runner.is_wanted and not taken_over:
                self.end_runner(runner, out)
            found = found or runner.state is RunnerState.ENDING
        for other in self.queues.values():
            if other is not queue and other.command is not None and other.command_ending:
                slices = other.command.terms.allocation.slices
                found = found or bool(gpus & {s.gpu_index for s in slices})
        return found

    def _fill(
        self, now: int, queue: LeaseQueue, runner: RunnerRecord, out: list[Instruction]
    ) -> None:
        sent, waiting, mean = runner.sent, queue.waiting, runner.mean_us
        window = FIRST_WINDOW if mean < 0 else min(MAX_WINDOW, max(1, WINDOW_US // (mean + 1)))
        room = window - len(sent)
        if room <= 0 or len(sent) > window // 2:
            return
        key, last, outlived = runner.key, None, self._leases.outlived
        calls: list[RunnerCall] = []
        was_empty = not sent
        while waiting and room:
            lease = waiting[0]
            terms = lease.terms
            if terms is not last:
                if not terms.is_function or terms.key != key:
                    break
                last = terms
            if outlived and lease.task in outlived:
                self.blocked.add(queue.number)
                break
            waiting.popleft()
            lease.move(now, SENT)
            sent.append(lease)
            room -= 1
            calls.append(
                RunnerCall(
                    lease.task,
                    lease.epoch,
                    terms.spec.function_sha256,
                    lease.payload,
                    lease.payload_sha256,
                    terms.spec.trace,
                )
            )
        if calls:
            if was_empty:
                runner.head_since, runner.announced = now, False
                if runner.mean_us >= 0 or runner.idle_since != NEVER:
                    runner.head_begun = now  # it was not started for this one
                self.idle.pop(runner.number, None)
                runner.idle_since = NEVER
            out.append(SendCalls(runner.number, tuple(calls)))

    def _idle(self, now: int, runner: RunnerRecord, out: list[Instruction]) -> None:
        if runner.number in self.idle:
            return
        runner.idle_since = now
        self.idle[runner.number] = runner
        while len(self.idle) > MAX_IDLE_RUNNERS:
            self.end_runner(next(iter(self.idle.values())), out)

    def end_runner(self, runner: RunnerRecord, out: list[Instruction]) -> None:
        if runner.state is not RunnerState.ENDING:
            runner.state = RunnerState.ENDING
            runner.idle_since = NEVER
            self.idle.pop(runner.number, None)
            out.append(EndRunner(runner.number))

    def end_command(
        self, queue: LeaseQueue, reason: EndReason, out: list[Instruction], grace_us: int = 0
    ) -> None:
        lease = queue.command
        saves = reason is EndReason.PREEMPTED or reason is EndReason.TIMED_OUT
        how = Ending.SAVING if saves else Ending.AT_ONCE
        if lease is not None and queue.command_ending < how:
            queue.command_ending = how
            out.append(EndCommand(lease.task, lease.epoch, reason, grace_us))

    def settle(self, queue: LeaseQueue) -> None:
        if queue.is_spent:
            self.queues.pop(queue.number, None)
            self.blocked.discard(queue.number)
            return
        at = NEVER
        runner, lease = queue.runner, queue.command
        if lease is not None:
            at = self._command_at(queue, lease)
        elif runner is not None:
            if runner.state is RunnerState.READY:
                if runner.sent:
                    at = self._call_at(queue, runner, runner.sent[0])
                elif runner.idle_since != NEVER:
                    at = runner.idle_since + IDLE_RUNNER_US
            elif runner.state is RunnerState.STARTING and queue.waiting:
                at = runner.head_begun + queue.waiting[0].terms.spec.timeout
                if not queue.phase_reported:
                    at = min(at, queue.phase_since + PHASE_AFTER_US)
                if len(queue.waiting) > 1:
                    at = min(at, max(runner.head_begun, queue.granted_at) + RETURN_AFTER_US)
        queue.next_at = at

    def _command_at(self, queue: LeaseQueue, lease: AgentLease) -> int:
        at = NEVER if lease.log is None or lease.log.due_at is None else lease.log.due_at
        if queue.command_ending is not Ending.NO:
            return at if queue.command_ending is Ending.SAVING else NEVER
        at = min(at, queue.command_begun + lease.terms.spec.timeout)
        if queue.command_since != NEVER:
            at = min(at, queue.command_since + self._longest_us)
            if not queue.announced:
                at = min(at, queue.command_since + ANNOUNCE_AFTER_US)
        if not queue.phase_reported:
            at = min(at, queue.phase_since + PHASE_AFTER_US)
        if queue.waiting:
            at = min(at, max(queue.command_begun, queue.granted_at) + RETURN_AFTER_US)
        return at

    def _call_at(self, queue: LeaseQueue, runner: RunnerRecord, lease: AgentLease) -> int:
        since = runner.head_since
        if runner.announced:
            at = runner.head_begun + lease.terms.spec.timeout
            if self._longest_us != NEVER:
                at = min(at, since + self._longest_us)
        else:
            at = min(runner.head_begun + lease.terms.spec.timeout, since + ANNOUNCE_AFTER_US)
        if lease.log is not None and lease.log.due_at is not None:
            at = min(at, lease.log.due_at)
        if queue.waiting:
            at = min(at, max(since, queue.granted_at) + RETURN_AFTER_US)
        return at

    def tick(self, now: int, out: list[Instruction]) -> None:
        for queue in list(self.queues.values()):
            if queue.next_at <= now:
                self._tick(now, queue, out)

    def _tick(self, now: int, queue: LeaseQueue, out: list[Instruction]) -> None:
        runner = queue.runner
        if queue.command is not None:
            self._tick_command(now, queue, queue.command, out)
        elif runner is not None and runner.sent:
            self._tick_call(now, queue, runner, runner.sent[0])
        elif runner is not None and runner.state is RunnerState.STARTING and queue.waiting:
            self._tick_start(now, queue, runner, out)
        elif runner is not None and now >= runner.idle_since + IDLE_RUNNER_US:
            self.end_runner(runner, out)
        self.advance(now, queue, out)

    def _tick_command(
        self, now: int, queue: LeaseQueue, lease: AgentLease, out: list[Instruction]
    ) -> None:
        if lease.log is not None and lease.log.due_at is not None and now >= lease.log.due_at:
            self._leases.flush_log(now, lease)
        if lease.is_ending:
            return
        since = queue.command_since
        if since != NEVER and not queue.announced and now >= since + ANNOUNCE_AFTER_US:
            self._leases.announce(now, lease)
            queue.announced = True
        if not queue.phase_reported and now >= queue.phase_since + PHASE_AFTER_US:
            self._report_phase(now, queue, lease)
        spec = lease.terms.spec
        if now >= queue.command_begun + spec.timeout:
            text = timed_out_in(queue.phase, spec)
            lease.move(now, LeaseMove.TIMED_OUT, text)
            self.end_command(queue, EndReason.TIMED_OUT, out)
        elif since != NEVER and now >= since + self._longest_us:
            lease.move(now, LeaseMove.PREEMPTED, self._too_long())
            self.end_command(queue, EndReason.PREEMPTED, out, spec.grace)
        if now >= max(queue.command_begun, queue.granted_at) + RETURN_AFTER_US:
            self._return_waiting(now, queue)

    def _tick_call(
        self, now: int, queue: LeaseQueue, runner: RunnerRecord, lease: AgentLease
    ) -> None:
        if lease.is_ending:
            return
        since = runner.head_since
        if not runner.announced and now >= since + ANNOUNCE_AFTER_US:
            self._leases.announce(now, lease)
            runner.announced = True
        if lease.log is not None and lease.log.due_at is not None and now >= lease.log.due_at:
            self._leases.flush_log(now, lease)
        spec = lease.terms.spec
        if now >= runner.head_begun + spec.timeout:
            lease.move(now, LeaseMove.TIMED_OUT, timed_out_in(Phase.RUN, spec))
        elif now >= since + self._longest_us:
            lease.move(now, LeaseMove.PREEMPTED, self._too_long())
        if now >= max(since, queue.granted_at) + RETURN_AFTER_US:
            self._return_waiting(now, queue)

    def _tick_start(
        self, now: int, queue: LeaseQueue, runner: RunnerRecord, out: list[Instruction]
    ) -> None:
        head = queue.waiting[0]
        if not queue.phase_reported and now >= queue.phase_since + PHASE_AFTER_US:
            self._report_phase(now, queue, head)
        if len(queue.waiting) > 1 and (
            now >= max(runner.head_begun, queue.granted_at) + RETURN_AFTER_US
        ):
            queue.waiting.popleft()
            self._return_waiting(now, queue)
            queue.waiting.append(head)
        if now >= runner.head_begun + head.terms.spec.timeout:
            queue.waiting.popleft()
            text = timed_out_in(queue.phase, head.terms.spec)
            self._leases.finish(now, head, timed_out(head, text))
            runner.head_begun = now  # the next lease has its own time-out
            queue.phase_reported = False
            if not queue.waiting:
                self.end_runner(runner, out)

    def _report_phase(self, now: int, queue: LeaseQueue, lease: AgentLease) -> None:
        queue.phase_reported = True
        self._leases.reached(now, lease, queue.phase)

    def _too_long(self) -> str:
        return f"this node's owner lets nothing run past {self._longest_us / 1_000_000:g} s"

    def _return_waiting(self, now: int, queue: LeaseQueue) -> None:
        self._leases.return_unstarted(now, list(queue.waiting))
        queue.waiting.clear()

    def unblock(self, now: int, out: list[Instruction]) -> None:
        blocked, self.blocked = self.blocked, set()
        for number in sorted(blocked):
            if (queue := self.queues.get(number)) is not None:
                self.advance(now, queue, out)

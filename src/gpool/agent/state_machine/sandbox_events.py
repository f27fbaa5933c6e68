"""Handlers of the events that commands and runners report. Pure."""

from __future__ import annotations

from gpool.agent.state_machine.dispatch import Dispatch
from gpool.agent.state_machine.instructions import (
    NEVER,
    CallPrinted,
    CallsAnswered,
    CommandCheckpointed,
    CommandEnded,
    CommandPrinted,
    CommandReached,
    CommandStarted,
    Instruction,
    ProgressReported,
    RunnerEnded,
    RunnerReached,
    RunnerReady,
)
from gpool.agent.state_machine.lease_queues import AgentLease, LeaseQueue, RunnerState
from gpool.agent.state_machine.leases import Leases, died, not_started, of_call, of_command
from gpool.agent.state_machine.transitions import OWN_END_COUNTS, LeaseMove, LeaseState
from gpool.core.model import EndReason, Fault, Phase

MAX_START_FAILURES = 3
KNOWN_FAULTS = frozenset({Fault.NODE, Fault.PART})
"""Faults that another try on this node would not change."""
REQUESTED_ENDS = frozenset(
    {EndReason.TIMED_OUT, EndReason.CANCELLED, EndReason.LOST, EndReason.PREEMPTED}
)
"""Ends of a command that the agent asked for; any other is the command's own."""
RETURNABLE = frozenset({LeaseState.SHUTTING_DOWN, LeaseState.PREEMPTING})
"""States in which a call that had not begun is returned instead of reported as ended."""


class SandboxEvents:
    def __init__(self, leases: Leases, dispatch: Dispatch) -> None:
        self._leases = leases
        self._dispatch = dispatch

    # ---- commands

    def _queue_of(self, task: int, epoch: int) -> LeaseQueue | None:
        lease = self._leases.get(task, epoch)
        if lease is not None and lease.queue.command is lease:
            return lease.queue
        for queue in self._dispatch.queues.values():  # dropped leases are known by their queue only
            if (c := queue.command) is not None and c.task == task and c.epoch == epoch:
                return queue
        return None

    def _in_sandbox(self, task: int, epoch: int) -> AgentLease | None:
        lease = self._leases.get(task, epoch)
        return None if lease is None or lease.state is LeaseState.QUEUED else lease

    def on_command_started(self, now: int, event: CommandStarted, _: list[Instruction]) -> None:
        queue = self._queue_of(event.task, event.epoch)
        if queue is not None and queue.command_since == NEVER:
            queue.command_since = now
            queue.reach(now, Phase.RUN)
            self._dispatch.settle(queue)

    def on_command_reached(self, now: int, event: CommandReached, _: list[Instruction]) -> None:
        queue = self._queue_of(event.task, event.epoch)
        if queue is not None:
            queue.reach(now, event.phase)
            self._dispatch.settle(queue)

    def on_command_checkpointed(
        self, now: int, event: CommandCheckpointed, _: list[Instruction]
    ) -> None:
        lease = self._in_sandbox(event.task, event.epoch)
        if lease is not None:
            self._leases.checkpointed(now, lease, event.files)

    def on_command_ended(self, now: int, event: CommandEnded, out: list[Instruction]) -> None:
        queue = self._queue_of(event.task, event.epoch)
        if queue is None or queue.command is None:
            return
        lease, queue.command = queue.command, None
        own_end = event.reason not in REQUESTED_ENDS
        if lease.is_ending and not (lease.state in OWN_END_COUNTS and own_end):
            self._leases.conclude(now, lease)
        else:
            self._leases.finish(now, lease, of_command(event))
        self._dispatch.advance(now, queue, out)
        self._dispatch.unblock(now, out)

    def on_printed(
        self, now: int, event: CommandPrinted | CallPrinted, _: list[Instruction]
    ) -> None:
        lease = self._in_sandbox(event.task, event.epoch)
        if lease is not None:
            self._leases.print(now, lease, event.stream, event.data)
            self._dispatch.settle(lease.queue)

    def on_progress(self, now: int, event: ProgressReported, _: list[Instruction]) -> None:
        lease = self._in_sandbox(event.task, event.epoch)
        if lease is not None:
            self._leases.progressed(now, lease, event.millionths, event.text)

    # ---- runners

    def on_runner_reached(self, now: int, event: RunnerReached, _: list[Instruction]) -> None:
        runner = self._dispatch.runners.get(event.runner)
        if runner is not None and runner.state is RunnerState.STARTING:
            runner.queue.reach(now, event.phase)
            self._dispatch.settle(runner.queue)

    def on_runner_ready(self, now: int, event: RunnerReady, out: list[Instruction]) -> None:
        runner = self._dispatch.runners.get(event.runner)
        if runner is not None and runner.state is RunnerState.STARTING:
            runner.state = RunnerState.READY
            runner.queue.failures = 0
            self._dispatch.advance(now, runner.queue, out)

    def on_calls_answered(self, now: int, event: CallsAnswered, out: list[Instruction]) -> None:
        runner = self._dispatch.runners.get(event.runner)
        if runner is None:
            return
        sent = runner.sent
        count = total_us = 0
        for answer in event.answers:
            if sent and sent[0].task == answer.task and sent[0].epoch == answer.epoch:
                lease = sent.popleft()
            else:  # a call whose inputs are missing is answered out of order
                for lease in sent:
                    if lease.task == answer.task and lease.epoch == answer.epoch:
                        break
                else:
                    continue
                sent.remove(lease)
            count += 1
            total_us += answer.duration_us
            if lease.is_ending and lease.state not in OWN_END_COUNTS:
                self._leases.conclude(now, lease)
                continue
            for stream, data in answer.output:
                self._leases.print(now, lease, stream, data)
            self._leases.finish(now, lease, of_call(answer))
        if count:
            mean = total_us // count
            runner.mean_us = mean if runner.mean_us < 0 else (runner.mean_us + mean) // 2
            runner.head_since = runner.head_begun = now
            runner.announced = False
            self._dispatch.advance(now, runner.queue, out)
            if self._dispatch.blocked:
                self._dispatch.unblock(now, out)

    def on_runner_ended(self, now: int, event: RunnerEnded, out: list[Instruction]) -> None:
        runner = self._dispatch.runners.pop(event.runner, None)
        if runner is None:
            return
        self._dispatch.idle.pop(runner.number, None)
        queue = runner.queue
        queue.runner = None
        if runner.state is RunnerState.STARTING:
            queue.failures += 1
            is_certain = event.fault in KNOWN_FAULTS or event.reason is EndReason.BAD_INPUT
            if (is_certain or queue.failures >= MAX_START_FAILURES) and queue.waiting:
                queue.failures = 0
                head = queue.waiting.popleft()
                self._leases.finish(now, head, not_started(head, event))
                self._leases.return_unstarted(now, list(queue.waiting), "no runner started")
                queue.waiting.clear()
        elif runner.state is RunnerState.READY and runner.sent and not event.retired:
            head = runner.sent.popleft()  # the runner ended by itself: the call that ran caused it
            self._leases.finish(now, head, died(head, event))
        requeued: list[AgentLease] = []
        for position, lease in enumerate(runner.sent):
            if position > 0 and lease.state in RETURNABLE:
                self._leases.return_unstarted(now, (lease,), lease.reason)
            elif lease.is_ending:
                self._leases.conclude(now, lease)
            else:
                lease.move(now, LeaseMove.REQUEUED, "its runner ended before the call began")
                requeued.append(lease)
        queue.waiting.extendleft(reversed(requeued))
        self._dispatch.advance(now, queue, out)
        self._dispatch.unblock(now, out)

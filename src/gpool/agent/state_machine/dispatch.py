"""Gives each line's allocation something to do: starts, fills, rests and ends runners, starts and ends commands.

The leases of an allocation stand in one line; one of them runs. A command runs alone in a fresh sandbox. Calls are
handed to a runner in a window worth about `WINDOW_US` of work. A call cannot be taken back out of a runner: it may begin
there at any moment. So what waits behind a long call in a runner is not handed back, it would run here and elsewhere at
once; and one that is stopped or dropped while it waits there is only marked: when it would be the next to run, the runner
is ended and the unmarked rest goes to a fresh one.
"""

from __future__ import annotations

from gpool.agent.state_machine import ends
from gpool.agent.state_machine.instructions import (
    EndCommand,
    EndRunner,
    Instruction,
    RunnerCall,
    SendCalls,
    StartCommand,
    StartRunner,
)
from gpool.agent.state_machine.lease_queues import (
    NEVER,
    Ending,
    Fate,
    Held,
    Line,
    Order,
    Place,
    Runner,
    RunnerState,
)
from gpool.agent.state_machine.leases import Leases
from gpool.core.model import EndReason, Phase

MAX_WINDOW = 128
FIRST_WINDOW = 8  # while nothing is known of how long a call takes
WINDOW_US = 50_000
ANNOUNCE_AFTER_US = 10_000  # what ends sooner is reported by its end alone
HAND_BACK_AFTER_US = 2_000_000
REACHED_AFTER_US = 200_000  # a phase that is over sooner is not told
IDLE_RUNNER_US = 60_000_000
MAX_IDLE_RUNNERS = 8


class Dispatch:
    """Every line and runner of one agent. Instructions are appended to `out`."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self.lines: dict[int, Line] = {}
        self.runners: dict[int, Runner] = {}
        self.idle: dict[int, Runner] = {}
        self.blocked: set[int] = set()  # lines that wait for somebody else's sandbox to be gone
        self._last_runner = 0
        self.longest_us = NEVER  # what the owner lets anything run for

    def advance(self, now: int, line: Line, out: list[Instruction]) -> None:
        """Give the line's allocation something to do, if it can be."""
        runner = line.runner
        if runner is not None and runner.sent and runner.sent[0].fate:
            self.end_runner(runner, out)
        if line.waiting and line.command is None:
            order = line.waiting[0].order
            if runner is None:
                self._start(now, line, out)
                runner = line.runner
            elif not runner.sent and not (order.is_function and runner.key == order.key):
                self.end_runner(runner, out)
            if runner is not None and runner.state is RunnerState.READY:
                self._fill(now, line, runner, out)
        elif runner is not None and runner.state is RunnerState.READY and not runner.sent:
            self._rest(now, runner, out)
        self.settle(line)

    def _start(self, now: int, line: Line, out: list[Instruction]) -> None:
        """Nothing runs here: start what the first in line needs, unless another sandbox is in its way."""
        held = line.waiting[0]
        order = held.order
        if held.task in self._leases.outlived or self._is_in_the_way(order, line, out):
            self.blocked.add(line.number)
            return
        if not order.is_function:
            line.waiting.popleft()
            held.place = Place.COMMAND
            line.command, line.command_ending, line.announced = held, Ending.NO, False
            line.command_begun, line.command_since = now, NEVER
            line.reach(now, Phase.START)
            out.append(
                StartCommand(
                    held.task,
                    held.epoch,
                    order.spec,
                    order.allocation,
                    order.owner,
                    order.secrets,
                    held.checkpoint,
                    order.user,
                    order.gang,
                )
            )
            return
        for runner in self.idle.values():
            if runner.key == order.key and runner.state is RunnerState.READY:
                former = runner.line
                former.runner, runner.line, line.runner = None, line, runner
                self.settle(former)
                return
        self._last_runner += 1
        runner = Runner(self._last_runner, order.key, line)
        self.runners[runner.number] = line.runner = runner
        runner.head_begun = now
        line.reach(now, Phase.START)
        out.append(
            StartRunner(
                runner.number,
                order.user,
                order.owner,
                order.spec,
                order.allocation,
                order.secrets,
            )
        )

    def _is_in_the_way(self, order: Order, line: Line, out: list[Instruction]) -> bool:
        """Whether a sandbox without a live lease still sits on one of the GPUs; idle ones are ended."""
        gpus = {part.gpu_index for part in order.allocation.slices}
        if not gpus:
            return False
        found = False
        for runner in self.runners.values():
            if runner.line is line or not gpus & {s.gpu_index for s in runner.key.slices}:
                continue
            taken_over = runner.number in self.idle and runner.serves(order)
            if not runner.is_wanted and not taken_over:
                self.end_runner(runner, out)
            found = found or runner.state is RunnerState.ENDING
        for other in self.lines.values():
            if other is not line and other.command is not None and other.command_ending:
                slices = other.command.order.allocation.slices
                found = found or bool(gpus & {s.gpu_index for s in slices})
        return found

    def _fill(self, now: int, line: Line, runner: Runner, out: list[Instruction]) -> None:
        """Hand calls to the runner up to its window, but in portions: half of it must have run dry."""
        sent, waiting, mean = runner.sent, line.waiting, runner.mean_us
        window = FIRST_WINDOW if mean < 0 else min(MAX_WINDOW, max(1, WINDOW_US // (mean + 1)))
        room = window - len(sent)
        if room <= 0 or len(sent) > window // 2:
            return
        key, last, outlived = runner.key, None, self._leases.outlived
        calls: list[RunnerCall] = []
        was_empty = not sent
        while waiting and room:
            held = waiting[0]
            order = held.order
            if order is not last:
                if not order.is_function or order.key != key:
                    break
                last = order
            if outlived and held.task in outlived:
                self.blocked.add(line.number)
                break
            waiting.popleft()
            held.place = Place.SENT
            sent.append(held)
            room -= 1
            calls.append(
                RunnerCall(
                    held.task,
                    held.epoch,
                    order.spec.function_sha256,
                    held.payload,
                    held.payload_sha256,
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

    def _rest(self, now: int, runner: Runner, out: list[Instruction]) -> None:
        if runner.number in self.idle:
            return
        runner.idle_since = now
        self.idle[runner.number] = runner
        while len(self.idle) > MAX_IDLE_RUNNERS:
            self.end_runner(next(iter(self.idle.values())), out)

    def end_runner(self, runner: Runner, out: list[Instruction]) -> None:
        if runner.state is not RunnerState.ENDING:
            runner.state = RunnerState.ENDING
            runner.idle_since = NEVER
            self.idle.pop(runner.number, None)
            out.append(EndRunner(runner.number))

    def end_command(
        self, line: Line, reason: EndReason, out: list[Instruction], grace_us: int = 0
    ) -> None:
        held = line.command
        saves = reason is EndReason.PREEMPTED or reason is EndReason.TIMED_OUT
        how = Ending.SAVING if saves else Ending.AT_ONCE
        if held is not None and line.command_ending < how:
            line.command_ending = how
            out.append(EndCommand(held.task, held.epoch, reason, grace_us))

    def settle(self, line: Line) -> None:
        """Note when the line wants its next tick; a line with nothing left is dropped."""
        if line.is_spent:
            self.lines.pop(line.number, None)
            self.blocked.discard(line.number)
            return
        at = NEVER
        runner, held = line.runner, line.command
        if held is not None:
            at = self._command_at(line, held)
        elif runner is not None:
            if runner.state is RunnerState.READY:
                if runner.sent:
                    at = self._call_at(line, runner, runner.sent[0])
                elif runner.idle_since != NEVER:
                    at = runner.idle_since + IDLE_RUNNER_US
            elif runner.state is RunnerState.STARTING and line.waiting:
                at = runner.head_begun + line.waiting[0].order.spec.timeout
                if not line.phase_told:
                    at = min(at, line.phase_since + REACHED_AFTER_US)
                if len(line.waiting) > 1:
                    at = min(at, max(runner.head_begun, line.granted_at) + HAND_BACK_AFTER_US)
        line.next_at = at

    def _command_at(self, line: Line, held: Held) -> int:
        at = NEVER if held.log is None or held.log.due_at is None else held.log.due_at
        if line.command_ending is not Ending.NO:
            return at if line.command_ending is Ending.SAVING else NEVER
        at = min(at, line.command_begun + held.order.spec.timeout)
        if line.command_since != NEVER:
            at = min(at, line.command_since + self.longest_us)
            if not line.announced:
                at = min(at, line.command_since + ANNOUNCE_AFTER_US)
        if not line.phase_told:
            at = min(at, line.phase_since + REACHED_AFTER_US)
        if line.waiting:
            at = min(at, max(line.command_begun, line.granted_at) + HAND_BACK_AFTER_US)
        return at

    def _call_at(self, line: Line, runner: Runner, held: Held) -> int:
        since = runner.head_since
        if runner.announced:
            at = runner.head_begun + held.order.spec.timeout
            if self.longest_us != NEVER:
                at = min(at, since + self.longest_us)
        else:
            at = min(runner.head_begun + held.order.spec.timeout, since + ANNOUNCE_AFTER_US)
        if held.log is not None and held.log.due_at is not None:
            at = min(at, held.log.due_at)
        if line.waiting:
            at = min(at, max(since, line.granted_at) + HAND_BACK_AFTER_US)
        return at

    def tick(self, now: int, out: list[Instruction]) -> None:
        for line in list(self.lines.values()):
            if line.next_at <= now:
                self._tick(now, line, out)

    def _tick(self, now: int, line: Line, out: list[Instruction]) -> None:
        runner = line.runner
        if line.command is not None:
            self._tick_command(now, line, line.command, out)
        elif runner is not None and runner.sent:
            self._tick_call(now, line, runner, runner.sent[0])
        elif runner is not None and runner.state is RunnerState.STARTING and line.waiting:
            self._tick_start(now, line, runner, out)
        elif runner is not None and now >= runner.idle_since + IDLE_RUNNER_US:
            self.end_runner(runner, out)
        self.advance(now, line, out)

    def _tick_command(self, now: int, line: Line, held: Held, out: list[Instruction]) -> None:
        if held.log is not None and held.log.due_at is not None and now >= held.log.due_at:
            self._leases.flush_log(now, held)
        if held.fate:
            return
        since = line.command_since
        if since != NEVER and not line.announced and now >= since + ANNOUNCE_AFTER_US:
            self._leases.announce(now, held)
            line.announced = True
        if not line.phase_told and now >= line.phase_since + REACHED_AFTER_US:
            self._tell_phase(now, line, held)
        spec = held.order.spec
        if now >= line.command_begun + spec.timeout:
            self._leases.condemn(held, Fate.TIMED_OUT, ends.timed_out_in(line.phase, spec))
            self.end_command(line, EndReason.TIMED_OUT, out)
        elif since != NEVER and now >= since + self.longest_us:
            self._leases.condemn(held, Fate.PREEMPTED, self._too_long())
            self.end_command(line, EndReason.PREEMPTED, out, spec.grace)
        if now >= max(line.command_begun, line.granted_at) + HAND_BACK_AFTER_US:
            self._hand_back(now, line)

    def _tick_call(self, now: int, line: Line, runner: Runner, held: Held) -> None:
        if held.fate:
            return
        since = runner.head_since
        if not runner.announced and now >= since + ANNOUNCE_AFTER_US:
            self._leases.announce(now, held)
            runner.announced = True
        if held.log is not None and held.log.due_at is not None and now >= held.log.due_at:
            self._leases.flush_log(now, held)
        spec = held.order.spec
        if now >= runner.head_begun + spec.timeout:
            self._leases.condemn(held, Fate.TIMED_OUT, ends.timed_out_in(Phase.RUN, spec))
        elif now >= since + self.longest_us:
            self._leases.condemn(held, Fate.PREEMPTED, self._too_long())
        if now >= max(since, line.granted_at) + HAND_BACK_AFTER_US:
            self._hand_back(now, line)

    def _tick_start(self, now: int, line: Line, runner: Runner, out: list[Instruction]) -> None:
        """The first in line waits for a runner that starts: that is part of its time."""
        head = line.waiting[0]
        if not line.phase_told and now >= line.phase_since + REACHED_AFTER_US:
            self._tell_phase(now, line, head)
        if len(line.waiting) > 1 and (
            now >= max(runner.head_begun, line.granted_at) + HAND_BACK_AFTER_US
        ):
            line.waiting.popleft()
            self._hand_back(now, line)
            line.waiting.append(head)
        if now >= runner.head_begun + head.order.spec.timeout:
            line.waiting.popleft()
            text = ends.timed_out_in(line.phase, head.order.spec)
            self._leases.finish(now, head, ends.timed_out(head, text))
            runner.head_begun = now  # whoever is next has its own time
            line.phase_told = False
            if not line.waiting:
                self.end_runner(runner, out)

    def _tell_phase(self, now: int, line: Line, held: Held) -> None:
        line.phase_told = True
        self._leases.reached(now, held, line.phase)

    def _too_long(self) -> str:
        return f"this node's owner lets nothing run past {self.longest_us / 1_000_000:g} s"

    def _hand_back(self, now: int, line: Line) -> None:
        self._leases.hand_back(now, list(line.waiting))
        line.waiting.clear()

    def unblock(self, now: int, out: list[Instruction]) -> None:
        blocked, self.blocked = self.blocked, set()
        for number in sorted(blocked):
            if (line := self.lines.get(number)) is not None:
                self.advance(now, line, out)

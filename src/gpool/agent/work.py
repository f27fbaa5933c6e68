"""The agent's lines at work: leases in, sandboxes started and ended, reports into the outbox.

The pure half of the session that does not know the server: `gpool.agent.session` tells it what was granted, stopped,
dropped and let go. Nothing here reads a clock or starts anything; instructions are appended to `out`.

The leases of an allocation stand in one line; one of them runs. A command runs alone in a fresh sandbox. Calls are
handed to a runner in a window worth about `WINDOW_US` of work. A call cannot be taken back out of a runner: it may begin
there at any moment. So what waits behind a long call in a runner is not handed back, it would run here and elsewhere at
once; and one that is stopped or dropped while it waits there is only marked: when it would be the next to run, the runner
is ended and the unmarked rest goes to a fresh one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpool.agent import ends
from gpool.agent.instructions import (
    CallPrinted,
    CallsAnswered,
    CommandEnded,
    CommandPrinted,
    CommandStarted,
    EndCommand,
    EndRunner,
    Instruction,
    RunnerCall,
    RunnerEnded,
    RunnerReady,
    SendCalls,
    StartCommand,
    StartRunner,
)
from gpool.agent.lines import (
    NEVER,
    Fate,
    Held,
    Line,
    Order,
    Past,
    Place,
    Runner,
    RunnerState,
    wrongs,
)
from gpool.agent.logs import LogBuffer
from gpool.agent.outbox import Outbox
from gpool.core.model import EndReason, TaskSpec
from gpool.wire.frames import Finished, HandedBack, Hold, Released
from gpool.wire.frames import Line as GrantedLine

MAX_WINDOW = 128
FIRST_WINDOW = 8  # while nothing is known of how long a call takes
WINDOW_US = 50_000
ANNOUNCE_AFTER_US = 10_000  # what ends sooner is reported by its end alone
HAND_BACK_AFTER_US = 2_000_000
IDLE_RUNNER_US = 60_000_000
MAX_IDLE_RUNNERS = 8
MAX_START_FAILURES = 3
MAX_QUIET_DEATHS = 2
RETIRED = (0, 137)


class Work:
    """Every lease, line and runner of one agent."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._held: dict[int, Held] = {}
        self._lines: dict[int, Line] = {}
        self._runners: dict[int, Runner] = {}
        self._idle: dict[int, Runner] = {}
        self._blocked: set[int] = set()  # lines that wait for somebody else's sandbox to be gone
        self._outlived: dict[int, Held] = {}  # forgotten leases whose sandbox is still being ended
        self._past = Past()
        self._last_runner = 0

    @property
    def leases(self) -> list[tuple[int, int]]:
        """(task, epoch) of everything running or in line."""
        return [(held.task, held.epoch) for held in self._held.values()]

    @property
    def has_leases(self) -> bool:
        return bool(self._held)

    @property
    def is_idle(self) -> bool:
        """No sandbox is left."""
        return not self._runners and all(line.command is None for line in self._lines.values())

    @property
    def next_at(self) -> int:
        return min((line.next_at for line in self._lines.values()), default=NEVER)

    def violations(self) -> list[str]:
        return wrongs(self._held, self._lines, self._runners)

    # ---- leases come and go

    def take(
        self,
        now: int,
        granted: Iterable[GrantedLine],
        specs: Mapping[int, TaskSpec],
        out: list[Instruction],
    ) -> None:
        """Let leases join their lines; those already known are skipped, those without a spec handed back."""
        touched: dict[int, Line] = {}
        for joining in granted:
            spec = specs.get(joining.spec)
            if spec is None:
                self.decline(now, (joining,))
                continue
            number = joining.allocation.number
            line = touched.get(number) or self._lines.get(number) or Line(number)
            touched[number] = line
            order = Order(joining.allocation, joining.user, joining.owner, spec)
            for lease in joining.leases:
                task, epoch = lease.task, lease.epoch
                older = self._held.get(task)
                if older is not None and older.epoch >= epoch:
                    continue
                if self._past.covers(task, epoch):
                    continue
                if older is not None:  # a newer lease of the same task: the older ends first
                    self.drop(now, ((task, older.epoch),), out)
                held = Held(task, epoch, order, line, lease.payload, lease.payload_sha256)
                self._held[task] = held
                line.waiting.append(held)
            line.granted_at = now
        for number, line in touched.items():
            self._lines[number] = line
            self._advance(now, line, out)

    def decline(self, now: int, granted: Iterable[GrantedLine]) -> None:
        """Give leases back at once: too late for them, or they cannot be understood."""
        for joining in granted:
            for lease in joining.leases:
                if lease.task in self._held or self._past.covers(lease.task, lease.epoch):
                    continue
                self._past.add(lease.task, lease.epoch)
                self._outbox.add(now, HandedBack(lease.task, lease.epoch))

    def stop(self, now: int, holds: Iterable[Hold], out: list[Instruction]) -> None:
        """The server takes leases back: `Released` once nothing of them runs."""
        touched: dict[int, Line] = {}
        for hold in holds:
            held = self._held.get(hold.task)
            if held is not None and held.epoch == hold.epoch:
                touched[held.line.number] = held.line
                if held.place is Place.WAITING:
                    self._forget(held)
                    self._outbox.add(now, Released(hold.task, hold.epoch))
                else:
                    held.fate = Fate.STOPPED
            elif not self._past.covers(hold.task, hold.epoch):
                # The stop overtook its grant, or the grant was lost: it must not start later.
                self._past.add(hold.task, hold.epoch)
                self._outbox.add(now, Released(hold.task, hold.epoch))
        self._enforce(now, touched.values(), EndReason.CANCELLED, out)

    def drop(self, now: int, leases: Iterable[tuple[int, int]], out: list[Instruction]) -> None:
        """Leases that are not ours any more: end and forget them, report nothing."""
        touched: dict[int, Line] = {}
        gone = set(leases)
        for task, epoch in gone:
            held = self._held.get(task)
            if held is not None and held.epoch == epoch:
                touched[held.line.number] = held.line
                self._forget(held)
            else:
                self._past.add(task, epoch)
        if gone:
            self._outbox.forget(gone)
        self._enforce(now, touched.values(), EndReason.LOST, out)

    def _enforce(
        self, now: int, lines: Iterable[Line], reason: EndReason, out: list[Instruction]
    ) -> None:
        """Carry out the fates just given: leave the line, end what runs."""
        for line in list(lines):
            if any(held.fate for held in line.waiting):
                kept = [held for held in line.waiting if not held.fate]
                line.waiting.clear()
                line.waiting.extend(kept)
            if line.command is not None and line.command.fate:
                self._end_command(line, reason, out)
            self._advance(now, line, out)

    def _forget(self, held: Held) -> None:
        held.fate = Fate.FORGOTTEN
        if held.place is not Place.WAITING:
            self._outlived[held.task] = held
        self._leave(held)

    def _leave(self, held: Held) -> None:
        del self._held[held.task]
        self._past.add(held.task, held.epoch)

    def let_go(self, now: int, out: list[Instruction]) -> None:
        """End everything. What waits is given back, what runs is reported lost once nothing of it runs.

        It has to be said: while beats arrive and only their answers do not, the server knows of no end to the lease.
        """
        self._outbox.forget(set(self.leases))
        for line in list(self._lines.values()):
            self._hand_back(now, list(line.waiting))
            line.waiting.clear()
            running = [line.command] if line.command is not None else []
            if line.runner is not None:
                running += line.runner.sent
                self._end_runner(line.runner, out)
            for held in running:
                if held.fate in (Fate.NONE, Fate.TIMED_OUT):
                    held.fate = Fate.LET_GO
            self._end_command(line, EndReason.LOST, out)
            self._settle(line)

    def shut_down(self, now: int, out: list[Instruction]) -> None:
        """Hand back what waits, end what runs."""
        for line in list(self._lines.values()):
            self._hand_back(now, list(line.waiting))
            line.waiting.clear()
            running = [line.command] if line.command is not None else []
            if line.runner is not None:
                running += line.runner.sent
                self._end_runner(line.runner, out)
            for held in running:
                held.fate = held.fate or Fate.SHUTDOWN
            self._end_command(line, EndReason.PREEMPTED, out)
            self._settle(line)

    # ---- lines

    def _advance(self, now: int, line: Line, out: list[Instruction]) -> None:
        """Give the line's allocation something to do, if it can be."""
        runner = line.runner
        if runner is not None and runner.sent and runner.sent[0].fate:
            self._end_runner(runner, out)
        if line.waiting and line.command is None:
            order = line.waiting[0].order
            if runner is None:
                self._start(line, out)
                runner = line.runner
            elif not runner.sent and not (order.is_function and runner.key == order.key):
                self._end_runner(runner, out)
            if runner is not None and runner.state is RunnerState.READY:
                self._fill(now, line, runner, out)
        elif runner is not None and runner.state is RunnerState.READY and not runner.sent:
            self._rest(now, runner, out)
        self._settle(line)

    def _start(self, line: Line, out: list[Instruction]) -> None:
        """Nothing runs here: start what the first in line needs, unless another sandbox is in its way."""
        held = line.waiting[0]
        order = held.order
        if held.task in self._outlived or self._is_in_the_way(order, line, out):
            self._blocked.add(line.number)
            return
        if not order.is_function:
            line.waiting.popleft()
            held.place = Place.COMMAND
            line.command, line.command_ending, line.announced = held, False, False
            line.command_since = NEVER
            out.append(
                StartCommand(held.task, held.epoch, order.spec, order.allocation, order.owner)
            )
            return
        for runner in self._idle.values():
            if runner.key == order.key and runner.state is RunnerState.READY:
                former = runner.line
                former.runner, runner.line, line.runner = None, line, runner
                self._settle(former)
                return
        self._last_runner += 1
        runner = Runner(self._last_runner, order.key, line)
        self._runners[runner.number] = line.runner = runner
        out.append(
            StartRunner(runner.number, order.user, order.owner, order.spec, order.allocation)
        )

    def _is_in_the_way(self, order: Order, line: Line, out: list[Instruction]) -> bool:
        """Whether a sandbox without a live lease still sits on one of the GPUs; idle ones are ended."""
        gpus = {part.gpu_index for part in order.allocation.slices}
        if not gpus:
            return False
        found = False
        for runner in self._runners.values():
            if runner.line is line or not gpus & {s.gpu_index for s in runner.key.slices}:
                continue
            if runner.number in self._idle and not (order.is_function and runner.key == order.key):
                self._end_runner(runner, out)
            found = found or runner.state is RunnerState.ENDING
        for other in self._lines.values():
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
        key, last, outlived = runner.key, None, self._outlived
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
                self._blocked.add(line.number)
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
                self._idle.pop(runner.number, None)
                runner.idle_since = NEVER
            out.append(SendCalls(runner.number, tuple(calls)))

    def _rest(self, now: int, runner: Runner, out: list[Instruction]) -> None:
        if runner.number in self._idle:
            return
        runner.idle_since = now
        self._idle[runner.number] = runner
        while len(self._idle) > MAX_IDLE_RUNNERS:
            self._end_runner(next(iter(self._idle.values())), out)

    def _end_runner(self, runner: Runner, out: list[Instruction]) -> None:
        if runner.state is not RunnerState.ENDING:
            runner.state = RunnerState.ENDING
            runner.idle_since = NEVER
            self._idle.pop(runner.number, None)
            out.append(EndRunner(runner.number))

    def _end_command(self, line: Line, reason: EndReason, out: list[Instruction]) -> None:
        held = line.command
        if held is not None and not line.command_ending:
            line.command_ending = True
            out.append(EndCommand(held.task, held.epoch, reason))

    def _settle(self, line: Line) -> None:
        """Note when the line wants its next tick; a line with nothing left is dropped."""
        if line.is_spent:
            self._lines.pop(line.number, None)
            self._blocked.discard(line.number)
            return
        at = NEVER
        runner, held = line.runner, line.command
        if held is not None:
            if line.command_since != NEVER and not line.command_ending:
                at = self._running_until(line.command_since, held, line.announced)
                if line.waiting:
                    at = min(at, max(line.command_since, line.granted_at) + HAND_BACK_AFTER_US)
        elif runner is not None:
            if runner.sent and runner.state is RunnerState.READY:
                at = self._running_until(runner.head_since, runner.sent[0], runner.announced)
                if line.waiting:
                    at = min(at, max(runner.head_since, line.granted_at) + HAND_BACK_AFTER_US)
            elif runner.idle_since != NEVER:
                at = runner.idle_since + IDLE_RUNNER_US
        line.next_at = at

    @staticmethod
    def _running_until(since: int, held: Held, announced: bool) -> int:
        at = since + held.order.spec.timeout
        if not announced:
            at = min(at, since + ANNOUNCE_AFTER_US)
        if held.log is not None and held.log.due_at is not None:
            at = min(at, held.log.due_at)
        return at

    def tick(self, now: int, out: list[Instruction]) -> None:
        for line in list(self._lines.values()):
            if line.next_at <= now:
                self._tick(now, line, out)

    def _tick(self, now: int, line: Line, out: list[Instruction]) -> None:
        runner, held = line.runner, line.command
        if held is not None:
            since, announced = line.command_since, line.announced
        elif runner is not None and runner.sent:
            held, since, announced = runner.sent[0], runner.head_since, runner.announced
        else:
            if runner is not None and now >= runner.idle_since + IDLE_RUNNER_US:
                self._end_runner(runner, out)
            self._advance(now, line, out)
            return
        if not held.fate:
            if not announced and now >= since + ANNOUNCE_AFTER_US:
                self._outbox.add_started(now, held.task, held.epoch)
                line.announced = True
                if runner is not None:
                    runner.announced = True
            if held.log is not None and held.log.due_at is not None and now >= held.log.due_at:
                self._flush_log(now, held)
            if now >= since + held.order.spec.timeout:
                held.fate = Fate.TIMED_OUT
                self._end_command(line, EndReason.TIMED_OUT, out)
            if now >= max(since, line.granted_at) + HAND_BACK_AFTER_US:
                self._hand_back(now, list(line.waiting))
                line.waiting.clear()
        self._advance(now, line, out)

    def _hand_back(self, now: int, leases: Iterable[Held]) -> None:
        for held in leases:
            self._forget(held)
            self._outbox.add(now, HandedBack(held.task, held.epoch))

    def _unblock(self, now: int, out: list[Instruction]) -> None:
        blocked, self._blocked = self._blocked, set()
        for number in sorted(blocked):
            if (line := self._lines.get(number)) is not None:
                self._advance(now, line, out)

    # ---- ends

    def _finish(self, now: int, held: Held, finished: Finished) -> None:
        """The attempt is over: its log, then its end."""
        if held.log is not None:
            self._flush_log(now, held)
        self._leave(held)
        data = len(finished.value) + len(finished.error_text) + 200 * len(finished.outputs)
        self._outbox.add(now, finished, data)

    def _conclude(self, now: int, held: Held) -> None:
        """The run of a lease with a fate is over."""
        if self._outlived.get(held.task) is held:
            del self._outlived[held.task]
        if held.fate is Fate.STOPPED:
            self._leave(held)
            self._outbox.add(now, Released(held.task, held.epoch))
        elif held.fate is Fate.TIMED_OUT:
            self._finish(now, held, ends.timed_out(held))
        elif held.fate is Fate.SHUTDOWN:
            self._finish(now, held, ends.preempted(held))
        elif held.fate is Fate.LET_GO:
            held.log = None
            self._finish(now, held, ends.lost(held))

    def _print(self, now: int, held: Held, stream: int, data: bytes) -> None:
        if held.log is None:
            held.log = LogBuffer(held.task, held.epoch)
        held.log.append(now, stream, data)

    def _flush_log(self, now: int, held: Held) -> None:
        if held.log is not None:
            for chunk in held.log.take():
                self._outbox.add(now, chunk, len(chunk.data))

    # ---- commands

    def _running_command(self, task: int, epoch: int) -> Line | None:
        held = self._held.get(task)
        if held is not None and held.epoch == epoch and held.line.command is held:
            return held.line
        for line in self._lines.values():  # forgotten ones are only known by their line
            if (c := line.command) is not None and c.task == task and c.epoch == epoch:
                return line
        return None

    def on_command_started(self, now: int, event: CommandStarted, _: list[Instruction]) -> None:
        line = self._running_command(event.task, event.epoch)
        if line is not None and line.command_since == NEVER:
            line.command_since = now
            self._settle(line)

    def on_command_printed(self, now: int, event: CommandPrinted, _: list[Instruction]) -> None:
        held = self._held.get(event.task)
        if held is not None and held.epoch == event.epoch and held.place is Place.COMMAND:
            self._print(now, held, event.stream, event.data)
            self._settle(held.line)

    def on_command_ended(self, now: int, event: CommandEnded, out: list[Instruction]) -> None:
        line = self._running_command(event.task, event.epoch)
        if line is None or line.command is None:
            return
        held, line.command = line.command, None
        by_itself = event.reason is not EndReason.TIMED_OUT
        if held.fate and not (held.fate is Fate.TIMED_OUT and by_itself):
            self._conclude(now, held)
        else:
            self._finish(now, held, ends.of_command(event))
        self._advance(now, line, out)
        self._unblock(now, out)

    # ---- runners

    def on_runner_ready(self, now: int, event: RunnerReady, out: list[Instruction]) -> None:
        runner = self._runners.get(event.runner)
        if runner is not None and runner.state is RunnerState.STARTING:
            runner.state = RunnerState.READY
            runner.line.failures = 0
            self._advance(now, runner.line, out)

    def on_calls_answered(self, now: int, event: CallsAnswered, out: list[Instruction]) -> None:
        runner = self._runners.get(event.runner)
        if runner is None:
            return
        sent = runner.sent
        count = total_us = 0
        for answer in event.answers:
            if sent and sent[0].task == answer.task and sent[0].epoch == answer.epoch:
                held = sent.popleft()
            else:  # one that could not be handed over is answered out of turn
                for held in sent:
                    if held.task == answer.task and held.epoch == answer.epoch:
                        break
                else:
                    continue
                sent.remove(held)
            count += 1
            total_us += answer.duration_us
            if held.fate and held.fate is not Fate.TIMED_OUT:
                self._conclude(now, held)
                continue
            for stream, data in answer.output:
                self._print(now, held, stream, data)
            self._finish(now, held, ends.of_call(answer))
        if count:
            mean = total_us // count
            runner.mean_us = mean if runner.mean_us < 0 else (runner.mean_us + mean) // 2
            runner.head_since, runner.announced = now, False
            self._advance(now, runner.line, out)
            if self._blocked:
                self._unblock(now, out)

    def on_call_printed(self, now: int, event: CallPrinted, _: list[Instruction]) -> None:
        held = self._held.get(event.task)
        if held is not None and held.epoch == event.epoch and held.place is Place.SENT:
            self._print(now, held, event.stream, event.data)
            self._settle(held.line)

    def on_runner_ended(self, now: int, event: RunnerEnded, out: list[Instruction]) -> None:
        runner = self._runners.pop(event.runner, None)
        if runner is None:
            return
        self._idle.pop(runner.number, None)
        line = runner.line
        line.runner = None
        if runner.state is RunnerState.STARTING:
            line.failures += 1
            if line.failures >= MAX_START_FAILURES and line.waiting:
                line.failures = 0
                head = line.waiting.popleft()
                self._finish(now, head, ends.not_started(head, event))
                self._hand_back(now, list(line.waiting))
                line.waiting.clear()
        elif runner.state is RunnerState.READY and runner.sent:
            self._charge(now, runner, event)
        rest: list[Held] = []
        for place, held in enumerate(runner.sent):
            if held.fate is Fate.SHUTDOWN and place > 0:
                held.place = Place.WAITING
                self._hand_back(now, (held,))
            elif held.fate:
                self._conclude(now, held)
            else:
                held.place = Place.WAITING
                rest.append(held)
        line.waiting.extendleft(reversed(rest))
        self._advance(now, line, out)
        self._unblock(now, out)

    def _charge(self, now: int, runner: Runner, event: RunnerEnded) -> None:
        """A runner went away by itself: the call that ran answers for it.

        A runner may also retire between two calls: it exits with 0, or is killed after it said so. The call that would
        have been next is tried again once.
        """
        head = runner.sent[0]
        head.deaths += 1
        quiet = event.reason is EndReason.EXITED and event.exit_code in RETIRED
        if not quiet or head.deaths >= MAX_QUIET_DEATHS:
            runner.sent.popleft()
            self._finish(now, head, ends.died(head, event))

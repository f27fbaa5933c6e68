"""The agent's lines at work: leases in, sandboxes started and ended, reports into the outbox.

The pure half of the session that does not know the server: `gpool.agent.state_machine.session` tells it what was granted, stopped,
dropped and let go. Nothing here reads a clock or starts anything; instructions are appended to `out`. Which
allocation runs what is `gpool.agent.state_machine.dispatch`, what is said of a lease `gpool.agent.state_machine.leases`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpool.agent.state_machine import ends
from gpool.agent.state_machine.dispatch import Dispatch
from gpool.agent.state_machine.instructions import (
    CallPrinted,
    CallsAnswered,
    CommandCheckpointed,
    CommandEnded,
    CommandPrinted,
    CommandReached,
    CommandStarted,
    Instruction,
    RunnerEnded,
    RunnerReached,
    RunnerReady,
)
from gpool.agent.state_machine.lease_queues import (
    NEVER,
    Fate,
    Held,
    Line,
    Order,
    Place,
    RunnerState,
    Variables,
    wrongs,
)
from gpool.agent.state_machine.leases import Leases
from gpool.agent.state_machine.outbox import Outbox
from gpool.core.model import EndReason, Fault, Phase, Slice, TaskSpec
from gpool.wire.frames import HandedBack, Hold, Released
from gpool.wire.frames import Line as GrantedLine

NO_SECRETS: Mapping[int, Variables] = {}

MAX_START_FAILURES = 3
KNOWN = frozenset({Fault.NODE, Fault.PART})
"""Faults that another try here would not mend."""
SHUTDOWN_GRACE_US = 5_000_000  # between a stopping agent's warning and the kill
RECLAIM_GRACE_US = 2_000_000  # for a task without a checkpoint: its owner waits for the GPU
OURS = frozenset({EndReason.TIMED_OUT, EndReason.CANCELLED, EndReason.LOST, EndReason.PREEMPTED})
"""Ends of a command that we asked for; any other came by itself."""
GIVEN_UP = frozenset({Fate.SHUTDOWN, Fate.PREEMPTED})
"""Fates that a gang's member keeps when the server stops it: that this node gave it up is why the others failed."""
YIELDS = frozenset({Fate.TIMED_OUT, Fate.SHUTDOWN, Fate.PREEMPTED})
"""Fates that an end of its own overrides: the work is done, whatever was to become of it."""


class Work:
    """Every lease, line and runner of one agent."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._leases = Leases(outbox)
        self._dispatch = Dispatch(self._leases)

    @property
    def leases(self) -> list[tuple[int, int]]:
        """(task, epoch) of everything running or in line."""
        return [(held.task, held.epoch) for held in self._leases.held.values()]

    @property
    def has_leases(self) -> bool:
        return bool(self._leases.held)

    @property
    def is_idle(self) -> bool:
        """No sandbox is left."""
        return not self._dispatch.runners and all(
            line.command is None for line in self._dispatch.lines.values()
        )

    @property
    def is_saving(self) -> bool:
        """A command that may be saving its checkpoint is being ended."""
        return any(
            line.command is not None and line.command.order.spec.checkpoint
            for line in self._dispatch.lines.values()
        )

    def on_gpus(self) -> dict[tuple[int, int], tuple[Slice, ...]]:
        """(task, epoch) of what runs on GPUs now, and on which."""
        found = {}
        for line in self._dispatch.lines.values():
            held = line.command
            if held is None and line.runner is not None and line.runner.sent:
                held = line.runner.sent[0]
            if held is not None and held.order.allocation.slices:
                found[held.task, held.epoch] = held.order.allocation.slices
        return found

    def limit_runs(self, longest_us: int) -> None:
        """What the owner lets anything run for; what runs longer is preempted."""
        self._dispatch.longest_us = longest_us
        for line in list(self._dispatch.lines.values()):
            self._dispatch.settle(line)

    @property
    def next_at(self) -> int:
        return min((line.next_at for line in self._dispatch.lines.values()), default=NEVER)

    def tick(self, now: int, out: list[Instruction]) -> None:
        """Time passed: announce, flush, time out, hand back, end what idles."""
        self._dispatch.tick(now, out)

    def violations(self) -> list[str]:
        return wrongs(self._leases.held, self._dispatch.lines, self._dispatch.runners)

    # ---- leases come and go

    def take(
        self,
        now: int,
        granted: Iterable[GrantedLine],
        specs: Mapping[int, TaskSpec],
        out: list[Instruction],
        secrets: Mapping[int, Variables] = NO_SECRETS,
    ) -> None:
        """Let leases join their lines; those already known are skipped, those without a spec handed back."""
        touched: dict[int, Line] = {}
        for joining in granted:
            spec = specs.get(joining.spec)
            if spec is None:
                self.decline(now, (joining,))
                continue
            number = joining.allocation.number
            line = touched.get(number) or self._dispatch.lines.get(number) or Line(number)
            touched[number] = line
            told = secrets.get(joining.spec, ())
            alone = spec.requirements.nodes > 1 and joining.gang is None
            if alone or len(told) < len(spec.secrets):  # never run it without them
                self.decline(now, (joining,))
                continue
            order = Order(joining.allocation, joining.user, joining.owner, spec, told, joining.gang)
            for lease in joining.leases:
                task, epoch = lease.task, lease.epoch
                older = self._leases.held.get(task)
                if older is not None and older.epoch >= epoch:
                    continue
                if self._leases.past.covers(task, epoch):
                    continue
                if older is not None:  # a newer lease of the same task: the older ends first
                    self.drop(now, ((task, older.epoch),), out)
                held = Held(
                    task,
                    epoch,
                    order,
                    line,
                    lease.payload,
                    lease.payload_sha256,
                    lease.checkpoint,
                )
                self._leases.held[task] = held
                line.waiting.append(held)
            line.granted_at = now
        for number, line in touched.items():
            self._dispatch.lines[number] = line
            self._dispatch.advance(now, line, out)

    def decline(self, now: int, granted: Iterable[GrantedLine]) -> None:
        """Give leases back at once: too late for them, or they cannot be understood."""
        for joining in granted:
            for lease in joining.leases:
                if lease.task in self._leases.held or self._leases.past.covers(
                    lease.task, lease.epoch
                ):
                    continue
                self._leases.past.add(lease.task, lease.epoch)
                self._outbox.add(now, HandedBack(lease.task, lease.epoch))

    def stop(self, now: int, holds: Iterable[Hold], out: list[Instruction]) -> None:
        """The server takes leases back: `Released` once nothing of them runs."""
        touched: dict[int, Line] = {}
        for hold in holds:
            held = self._leases.held.get(hold.task)
            if held is not None and held.epoch == hold.epoch:
                touched[held.line.number] = held.line
                if held.place is Place.WAITING:
                    self._leases.forget(held)
                    self._outbox.add(now, Released(hold.task, hold.epoch))
                elif held.order.gang is None or held.fate not in GIVEN_UP:
                    held.fate = Fate.STOPPED
            elif not self._leases.past.covers(hold.task, hold.epoch):
                # The stop overtook its grant, or the grant was lost: it must not start later.
                self._leases.past.add(hold.task, hold.epoch)
                self._outbox.add(now, Released(hold.task, hold.epoch))
        self._enforce(now, touched.values(), EndReason.CANCELLED, out)

    def preempt(
        self,
        now: int,
        holds: Iterable[Hold],
        why: str,
        out: list[Instruction],
        most_grace_us: int = NEVER,
    ) -> None:
        """The server wants the place for others: what runs is warned, saved and ended, what waits handed back."""
        lines: list[Line] = []
        for hold in holds:
            held = self._leases.held.get(hold.task)
            if held is not None and held.epoch == hold.epoch:
                lines.append(held.line)
                self._condemn_or_hand_back(now, held, why)
            elif not self._leases.past.covers(hold.task, hold.epoch):
                self._leases.past.add(hold.task, hold.epoch)
                self._outbox.add(now, HandedBack(hold.task, hold.epoch))
        self._enforce(now, lines, EndReason.PREEMPTED, out, most_grace_us)

    def reclaim(
        self, now: int, gpus: frozenset[int] | None, why: str, out: list[Instruction]
    ) -> None:
        """The owner wants these GPUs back, or (None) the whole machine."""
        lines = [line for line in self._dispatch.lines.values() if _stands_on(line, gpus)]
        for line in lines:
            for held in (*line.waiting, *([line.command] if line.command else [])):
                self._condemn_or_hand_back(now, held, why)
            if line.runner is not None:
                for held in line.runner.sent:
                    self._condemn_or_hand_back(now, held, why)
                self._dispatch.end_runner(line.runner, out)
        self._enforce(now, lines, EndReason.PREEMPTED, out, RECLAIM_GRACE_US)

    def _condemn_or_hand_back(self, now: int, held: Held, why: str) -> None:
        if held.place is Place.WAITING:
            self._leases.hand_back(now, (held,))
        elif not held.fate:
            self._leases.condemn(held, Fate.PREEMPTED, why)

    def drop(self, now: int, leases: Iterable[tuple[int, int]], out: list[Instruction]) -> None:
        """Leases that are not ours any more: end and forget them, report nothing."""
        touched: dict[int, Line] = {}
        gone = set(leases)
        for task, epoch in gone:
            held = self._leases.held.get(task)
            if held is not None and held.epoch == epoch:
                touched[held.line.number] = held.line
                self._leases.forget(held)
            else:
                self._leases.past.add(task, epoch)
        if gone:
            self._outbox.forget(gone)
        self._enforce(now, touched.values(), EndReason.LOST, out)

    def _enforce(
        self,
        now: int,
        lines: Iterable[Line],
        reason: EndReason,
        out: list[Instruction],
        most_grace_us: int = NEVER,
    ) -> None:
        """Carry out the fates just given: leave the line, end what runs. `most_grace_us` is for what saves nothing."""
        for line in list(lines):
            if any(held.fate for held in line.waiting):
                kept = [held for held in line.waiting if not held.fate]
                line.waiting.clear()
                line.waiting.extend(kept)
            command = line.command
            if command is not None and command.fate:
                spec = command.order.spec
                grace_us = spec.grace if reason is EndReason.PREEMPTED else 0
                if not spec.checkpoint:
                    grace_us = min(grace_us, most_grace_us)
                self._dispatch.end_command(line, reason, out, grace_us)
            self._dispatch.advance(now, line, out)

    def let_go(self, now: int, out: list[Instruction]) -> None:
        """End everything. What waits is given back, what runs is reported lost once nothing of it runs.

        It has to be said: while beats arrive and only their answers do not, the server knows of no end to the lease.
        """
        self._outbox.forget(set(self.leases))
        self._end_all(
            now, {Fate.NONE: Fate.LET_GO, Fate.TIMED_OUT: Fate.LET_GO}, EndReason.LOST, out
        )

    def shut_down(self, now: int, out: list[Instruction]) -> None:
        """Hand back what waits, end what runs; what has a checkpoint is given a little time for it."""
        self._end_all(now, {Fate.NONE: Fate.SHUTDOWN}, EndReason.PREEMPTED, out)

    def _end_all(
        self, now: int, fates: Mapping[Fate, Fate], reason: EndReason, out: list[Instruction]
    ) -> None:
        """`fates`: what becomes of what runs, by what was to become of it so far."""
        for line in list(self._dispatch.lines.values()):
            self._leases.hand_back(now, list(line.waiting))
            line.waiting.clear()
            running = [line.command] if line.command is not None else []
            if line.runner is not None:
                running += line.runner.sent
                self._dispatch.end_runner(line.runner, out)
            for held in running:
                if held.fate in fates:
                    self._leases.condemn(held, fates[held.fate], ends.AGENT_STOPPED)
            grace_us = 0
            if line.command is not None and reason is EndReason.PREEMPTED:
                spec = line.command.order.spec
                grace_us = min(spec.grace, SHUTDOWN_GRACE_US) if spec.checkpoint else 0
            self._dispatch.end_command(line, reason, out, grace_us)
            self._dispatch.settle(line)

    # ---- commands

    def _running_command(self, task: int, epoch: int) -> Line | None:
        held = self._leases.held.get(task)
        if held is not None and held.epoch == epoch and held.line.command is held:
            return held.line
        for line in self._dispatch.lines.values():  # forgotten ones are only known by their line
            if (c := line.command) is not None and c.task == task and c.epoch == epoch:
                return line
        return None

    def on_command_started(self, now: int, event: CommandStarted, _: list[Instruction]) -> None:
        line = self._running_command(event.task, event.epoch)
        if line is not None and line.command_since == NEVER:
            line.command_since = now
            line.reach(now, Phase.RUN)
            self._dispatch.settle(line)

    def on_command_reached(self, now: int, event: CommandReached, _: list[Instruction]) -> None:
        line = self._running_command(event.task, event.epoch)
        if line is not None:
            line.reach(now, event.phase)
            self._dispatch.settle(line)

    def on_command_checkpointed(
        self, now: int, event: CommandCheckpointed, _: list[Instruction]
    ) -> None:
        held = self._leases.held.get(event.task)
        if held is not None and held.epoch == event.epoch and held.place is Place.COMMAND:
            self._leases.checkpointed(now, held, event.files)

    def on_command_printed(self, now: int, event: CommandPrinted, _: list[Instruction]) -> None:
        held = self._leases.held.get(event.task)
        if held is not None and held.epoch == event.epoch and held.place is Place.COMMAND:
            self._leases.note(now, held, event.stream, event.data)
            self._dispatch.settle(held.line)

    def on_command_ended(self, now: int, event: CommandEnded, out: list[Instruction]) -> None:
        line = self._running_command(event.task, event.epoch)
        if line is None or line.command is None:
            return
        held, line.command = line.command, None
        by_itself = event.reason not in OURS
        if held.fate and not (held.fate in YIELDS and by_itself):
            self._leases.conclude(now, held)
        else:
            self._leases.finish(now, held, ends.of_command(event))
        self._dispatch.advance(now, line, out)
        self._dispatch.unblock(now, out)

    # ---- runners

    def on_runner_reached(self, now: int, event: RunnerReached, _: list[Instruction]) -> None:
        runner = self._dispatch.runners.get(event.runner)
        if runner is not None and runner.state is RunnerState.STARTING:
            runner.line.reach(now, event.phase)
            self._dispatch.settle(runner.line)

    def on_runner_ready(self, now: int, event: RunnerReady, out: list[Instruction]) -> None:
        runner = self._dispatch.runners.get(event.runner)
        if runner is not None and runner.state is RunnerState.STARTING:
            runner.state = RunnerState.READY
            runner.line.failures = 0
            self._dispatch.advance(now, runner.line, out)

    def on_calls_answered(self, now: int, event: CallsAnswered, out: list[Instruction]) -> None:
        runner = self._dispatch.runners.get(event.runner)
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
            if held.fate and held.fate not in YIELDS:
                self._leases.conclude(now, held)
                continue
            for stream, data in answer.output:
                self._leases.note(now, held, stream, data)
            self._leases.finish(now, held, ends.of_call(answer))
        if count:
            mean = total_us // count
            runner.mean_us = mean if runner.mean_us < 0 else (runner.mean_us + mean) // 2
            runner.head_since = runner.head_begun = now
            runner.announced = False
            self._dispatch.advance(now, runner.line, out)
            if self._dispatch.blocked:
                self._dispatch.unblock(now, out)

    def on_call_printed(self, now: int, event: CallPrinted, _: list[Instruction]) -> None:
        held = self._leases.held.get(event.task)
        if held is not None and held.epoch == event.epoch and held.place is Place.SENT:
            self._leases.note(now, held, event.stream, event.data)
            self._dispatch.settle(held.line)

    def on_runner_ended(self, now: int, event: RunnerEnded, out: list[Instruction]) -> None:
        runner = self._dispatch.runners.pop(event.runner, None)
        if runner is None:
            return
        self._dispatch.idle.pop(runner.number, None)
        line = runner.line
        line.runner = None
        if runner.state is RunnerState.STARTING:
            line.failures += 1
            is_sure = event.fault in KNOWN or event.reason is EndReason.BAD_INPUT
            if (is_sure or line.failures >= MAX_START_FAILURES) and line.waiting:
                line.failures = 0
                head = line.waiting.popleft()
                self._leases.finish(now, head, ends.not_started(head, event))
                self._leases.hand_back(now, list(line.waiting))
                line.waiting.clear()
        elif runner.state is RunnerState.READY and runner.sent and not event.retired:
            head = runner.sent.popleft()  # it went away by itself: the call that ran answers for it
            self._leases.finish(now, head, ends.died(head, event))
        rest: list[Held] = []
        for place, held in enumerate(runner.sent):
            if place > 0 and held.fate in (Fate.SHUTDOWN, Fate.PREEMPTED):
                held.place = Place.WAITING
                self._leases.hand_back(now, (held,))
            elif held.fate:
                self._leases.conclude(now, held)
            else:
                held.place = Place.WAITING
                rest.append(held)
        line.waiting.extendleft(reversed(rest))
        self._dispatch.advance(now, line, out)
        self._dispatch.unblock(now, out)


def _stands_on(line: Line, gpus: frozenset[int] | None) -> bool:
    if gpus is None:
        return True
    held = line.command or next(iter(line.waiting), None)
    slices = held.order.allocation.slices if held is not None else ()
    if line.runner is not None:
        slices = line.runner.key.slices
    return any(part.gpu_index in gpus for part in slices)

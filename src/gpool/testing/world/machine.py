"""A provider's machine: sandboxes that take time to start, run, fail, hang, run out of memory and die when killed.

Reports to the oracle what runs, to the agent what an agent observes. It knows no leases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from gpool.agent.state_machine import instructions as say
from gpool.core.model import Allocation, EndReason, OutputFile, Phase, TaskSpec
from gpool.testing.simulation import Dice, VirtualLoop
from gpool.testing.world.oracle import Oracle

MS = 1_000
KILL_US = (2 * MS, 250 * MS)
"""Time a sandbox takes to die; the lease's margin has to cover it."""
AT_ONCE = frozenset({EndReason.CANCELLED, EndReason.LOST})
"""Ends without a grace period."""


class AttemptFate(StrEnum):
    WELL = "well"
    FAILS = "fails"
    HANGS = "hangs"  # until it is ended
    DIES = "dies"  # out of memory: its sandbox ends too
    NEVER_STARTS = "never_starts"


COMMAND_FATES = (
    [AttemptFate.WELL] * 30
    + [AttemptFate.FAILS] * 4
    + [AttemptFate.HANGS] * 2
    + [AttemptFate.DIES] * 2
    + [AttemptFate.NEVER_STARTS]
)
CALL_FATES = (
    [AttemptFate.WELL] * 40
    + [AttemptFate.FAILS] * 5
    + [AttemptFate.HANGS] * 1
    + [AttemptFate.DIES] * 2
)

CALL_US = ((1 * MS, 10 * MS), (1 * MS, 80 * MS), (1 * MS, 80 * MS), (100 * MS, 2500 * MS))


def tag(task: int, epoch: int, node: str, boot: int) -> str:
    return f"{task}.{epoch}.{node}.{boot}"


@dataclass(slots=True)
class _Command:
    task: int
    epoch: int
    allocation: Allocation
    began_us: int
    spec: TaskSpec
    over: bool = False
    dead: bool = False  # nothing runs any more; a checkpoint may still be uploading
    ending: EndReason | None = None
    ran_from_us: int = -1
    restored: int = 0  # progress at the start
    saved: int = 0  # progress of the last reported checkpoint
    saving: bool = False

    def progress(self, now_us: int) -> int:
        return self.restored + (
            max(0, now_us - self.ran_from_us) // MS if self.ran_from_us >= 0 else 0
        )


@dataclass(slots=True)
class _Runner:
    number: int
    allocation: Allocation
    ready: bool = False
    over: bool = False
    ending: bool = False
    line: deque[say.RunnerCall] = field(default_factory=deque)
    current: say.RunnerCall | None = None
    began_us: int = 0


Upload = Callable[[int, int, str, Callable[[bool], None]], None]
"""Uploads an artifact: (task, epoch, hash, callback told whether it arrived)."""


class SimulatedMachine:
    """One process of its agent; inert after `crash`."""

    def __init__(
        self,
        loop: VirtualLoop,
        dice: Dice,
        oracle: Oracle,
        node: str,
        boot: int,
        emit: Callable[[say.Event], None],
        upload: Upload,
    ) -> None:
        self._loop, self._dice, self._oracle = loop, dice, oracle
        self._node, self._boot, self._emit, self._upload = node, boot, emit, upload
        self._commands: dict[tuple[int, int], _Command] = {}
        self._runners: dict[int, _Runner] = {}
        self._backlog: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self._frozen = False
        self._off = False

    # ---- time on this machine

    def _later(self, delay_us: int, step: Callable[..., None], *args: object) -> None:
        self._loop.after_us(delay_us, self._due, step, args)

    def _due(self, step: Callable[..., None], args: tuple[object, ...]) -> None:
        if self._off:
            return
        if self._frozen:
            self._backlog.append((step, args))
        else:
            step(*args)

    def freeze(self) -> None:
        self._frozen = True

    def thaw(self) -> None:
        self._frozen = False
        backlog, self._backlog = self._backlog, []
        for step, args in backlog:
            self._due(step, args)

    def crash(self) -> int:
        """Return the time until the last sandbox is dead, in microseconds."""
        self._off = True
        last = 0
        for command in self._commands.values():
            if not command.dead:
                last = max(last, self._die(command.task, command.epoch))
        for runner in self._runners.values():
            if not runner.over and runner.current is not None:
                last = max(last, self._die(runner.current.task, runner.current.epoch))
        for runner in self._runners.values():
            if not runner.over:
                self._oracle.sandbox_closed(self._node, self._sandbox(runner))
        return last

    def _die(self, task: int, epoch: int) -> int:
        delay = self._dice.between(*KILL_US)
        self._loop.after_us(delay, self._oracle.attempt_ended, self._node, task, epoch)
        return delay

    @property
    def busy(self) -> bool:
        return any(not c.over for c in self._commands.values()) or any(
            not r.over and r.current is not None for r in self._runners.values()
        )

    # ---- commands

    def start_command(self, order: say.StartCommand) -> None:
        command = _Command(order.task, order.epoch, order.allocation, self._loop.us, order.spec)
        self._commands[order.task, order.epoch] = command
        self._oracle.attempt_began(self._node, order.task, order.epoch, order.allocation)
        if order.spec.checkpoint:
            restored = int(order.checkpoint[0].sha256, 16) if order.checkpoint else 0
            command.restored = command.saved = restored
            self._oracle.resumed_from(order.task, order.epoch, restored)
        dice = self._dice.branch(f"{order.task}.{order.epoch}")
        fate = dice.pick(COMMAND_FATES)
        start_us = dice.between(5 * MS, 60 * MS)
        if dice.chance(0.1):
            start_us += dice.between(200 * MS, 900 * MS)  # a slow input
            self._emit(say.CommandReached(order.task, order.epoch, Phase.FETCH))
        if fate is AttemptFate.NEVER_STARTS:
            self._later(
                start_us, self._command_ends, command, EndReason.SANDBOX_FAILED, None, "no sandbox"
            )
            return
        self._later(start_us, self._command_starts, command, fate, dice)

    def _command_starts(self, command: _Command, fate: AttemptFate, dice: Dice) -> None:
        if command.over or command.ending is not None:
            return
        self._emit(say.CommandStarted(command.task, command.epoch))
        command.ran_from_us = self._loop.us
        run_us = duration_us(command.spec, dice)
        if command.spec.checkpoint:
            total = int(command.spec.command[1])
            run_us = (total - command.restored) * MS if fate is AttemptFate.WELL else run_us
            self._later(command.spec.checkpoint_every, self._save_periodically, command)
        if dice.chance(0.4):
            self._later(run_us // 2, self._command_prints, command)
        mark = tag(command.task, command.epoch, self._node, self._boot)
        if fate is AttemptFate.WELL:
            self._later(max(run_us, MS), self._command_ends, command, EndReason.EXITED, 0, mark)
        elif fate is AttemptFate.FAILS:
            self._later(
                run_us, self._command_ends, command, EndReason.EXITED, dice.between(1, 9), mark
            )
        elif fate is AttemptFate.DIES:
            self._later(run_us, self._command_ends, command, EndReason.OUT_OF_MEMORY, 137, mark)

    def _command_prints(self, command: _Command) -> None:
        if not command.over:
            data = f"{command.task}.{command.epoch}\n".encode()
            self._emit(say.CommandPrinted(command.task, command.epoch, 1, data))

    def _save_periodically(self, command: _Command) -> None:
        if not command.dead:
            if not command.saving:
                self._save(command, lambda: None)
            self._later(command.spec.checkpoint_every, self._save_periodically, command)

    def _save(self, command: _Command, then: Callable[[], None]) -> None:
        """Upload a checkpoint, report it, call `then`; without new progress only call `then`."""
        progress = command.progress(self._loop.us)
        if progress <= command.saved:
            then()
            return
        command.saving = True
        sha256 = f"{progress:064x}"

        def uploaded(arrived: bool) -> None:
            command.saving = False
            if command.over:
                return
            if arrived and progress > command.saved:
                command.saved = progress
                files = (OutputFile(f"{command.spec.checkpoint}n", sha256, 1),)
                self._emit(say.CommandCheckpointed(command.task, command.epoch, files))
            then()

        self._upload(
            command.task,
            command.epoch,
            sha256,
            lambda arrived: self._due(uploaded, (arrived,)),
        )

    def _command_ends(
        self, command: _Command, reason: EndReason, exit_code: int | None, text: str
    ) -> None:
        """A failed or preempted command is saved before its end is reported."""
        if command.dead:
            return
        command.dead = True
        frozen_us = self._loop.us
        self._oracle.attempt_ended(self._node, command.task, command.epoch)
        if reason is EndReason.PREEMPTED:
            self._oracle.attempt_preempted(self._node, command.task, command.epoch)
        took = frozen_us - command.began_us

        def tell() -> None:
            if not command.over:
                command.over = True
                why = command.ending if command.ending in AT_ONCE else reason
                self._emit(
                    say.CommandEnded(
                        command.task, command.epoch, why or reason, exit_code, text, took
                    )
                )

        saves = command.spec.checkpoint and command.ran_from_us >= 0 and reason not in AT_ONCE
        if saves and not (reason is EndReason.EXITED and exit_code == 0):
            self._save(command, tell)
        else:
            tell()

    def end_command(self, order: say.EndCommand) -> None:
        command = self._commands.get((order.task, order.epoch))
        if command is None or command.over:
            return
        if command.ending is not None and (
            command.ending in AT_ONCE or order.reason not in AT_ONCE
        ):
            return
        if command.dead:
            if order.reason in AT_ONCE or order.reason is EndReason.TIMED_OUT:
                command.over = True  # the upload is abandoned
                self._emit(say.CommandEnded(command.task, command.epoch, order.reason, None, "", 0))
            return
        command.ending = order.reason
        delay_us = self._dice.between(*KILL_US)
        if order.grace_us and command.ran_from_us >= 0:
            heeds = self._dice.chance(0.5)
            delay_us += self._dice.between(0, order.grace_us) if heeds else order.grace_us
        mark = tag(command.task, command.epoch, self._node, self._boot)
        self._later(delay_us, self._command_ends, command, order.reason, None, mark)

    # ---- runners

    def start_runner(self, order: say.StartRunner) -> None:
        runner = _Runner(order.runner, order.allocation)
        self._runners[order.runner] = runner
        self._oracle.sandbox_opened(self._node, self._sandbox(runner), order.allocation)
        if self._dice.chance(0.03):
            self._later(20 * MS, self._runner_ends, runner, EndReason.SANDBOX_FAILED, 1)
        else:
            self._later(self._dice.between(10 * MS, 120 * MS), self._runner_ready, runner)

    def _runner_ready(self, runner: _Runner) -> None:
        if not runner.over:
            runner.ready = True
            self._emit(say.RunnerReady(runner.number))
            self._next_call(runner)

    def send_calls(self, order: say.SendCalls) -> None:
        runner = self._runners.get(order.runner)
        if runner is None or runner.over:
            return
        runner.line.extend(order.calls)
        self._next_call(runner)

    def _sandbox(self, runner: _Runner) -> tuple[int, int]:
        return self._boot, runner.number

    def _next_call(self, runner: _Runner) -> None:
        if not runner.ready or runner.over or runner.current is not None or not runner.line:
            return
        call = runner.current = runner.line.popleft()
        runner.began_us = self._loop.us
        self._oracle.attempt_began(
            self._node, call.task, call.epoch, runner.allocation, self._sandbox(runner)
        )
        dice = self._dice.branch(f"{call.task}.{call.epoch}")
        fate = dice.pick(CALL_FATES)
        run_us = dice.between(*dice.pick(CALL_US))
        if fate is AttemptFate.DIES:
            self._later(run_us, self._runner_ends, runner, EndReason.OUT_OF_MEMORY, 137)
        elif fate is not AttemptFate.HANGS:
            self._later(run_us, self._call_answers, runner, call, fate)

    def _call_answers(self, runner: _Runner, call: say.RunnerCall, fate: AttemptFate) -> None:
        if runner.over or runner.current is not call:
            return
        runner.current = None
        self._oracle.attempt_ended(self._node, call.task, call.epoch)
        mark = tag(call.task, call.epoch, self._node, self._boot)
        raised = fate is AttemptFate.FAILS
        answer = say.CallAnswered(
            call.task,
            call.epoch,
            raised,
            mark.encode(),
            "",
            mark if raised else "",
            self._loop.us - runner.began_us,
            ((1, f"{call.task}.{call.epoch}\n".encode()),) if raised else (),
        )
        self._emit(say.CallsAnswered(runner.number, (answer,)))
        self._next_call(runner)

    def end_runner(self, order: say.EndRunner) -> None:
        runner = self._runners.get(order.runner)
        if runner is None or runner.over or runner.ending:
            return
        runner.ending = True
        self._later(self._dice.between(*KILL_US), self._runner_ends, runner, EndReason.EXITED, 137)

    def _runner_ends(self, runner: _Runner, reason: EndReason, exit_code: int) -> None:
        if runner.over:
            return
        runner.over = True
        if runner.current is not None:
            self._oracle.attempt_ended(self._node, runner.current.task, runner.current.epoch)
            runner.current = None
        self._oracle.sandbox_closed(self._node, self._sandbox(runner))
        self._emit(say.RunnerEnded(runner.number, reason, exit_code, "it died"))


def duration_us(spec: TaskSpec, dice: Dice) -> int:
    """The first argument of a command is its maximum in milliseconds."""
    longest = int(spec.command[1]) if len(spec.command) > 1 else 500
    return dice.between(10 * MS, longest * MS)

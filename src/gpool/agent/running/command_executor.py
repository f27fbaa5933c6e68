"""A command at work: from its inputs to its outputs, and its checkpoint on the way. Obeys the session and tells it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

from gpool.agent.running import gangs
from gpool.agent.running.checkpoints import Saver, unhurried
from gpool.agent.running.sandboxes import KILLED, Equipment, fault_of, image_of, limits_of, started
from gpool.agent.runtime.protocol import (
    BadOutput,
    CommandJob,
    CommandSandbox,
    Runtime,
    SandboxExit,
    SandboxFailed,
    StagedInput,
)
from gpool.agent.state_machine.instructions import (
    CommandCheckpointed,
    CommandEnded,
    CommandPrinted,
    CommandReached,
    CommandStarted,
    StartCommand,
)
from gpool.core.errors import GpoolError, Unreachable
from gpool.core.model import EndReason, Fault, InputFile, OutputFile, Phase
from gpool.transfer.artifacts import LeaseRef

SAVING = frozenset({EndReason.PREEMPTED, EndReason.TIMED_OUT})
LAST_SAVE_S = 600.0
"""How long the last save of a checkpoint may take; its sandbox is dead by then."""
SOONER = 10
"""A save that did not come about is tried again after this part of the interval."""

Outcome = tuple[SandboxExit, tuple[OutputFile, ...]]


class CommandKeeper:
    """One command, from its inputs to its outputs."""

    def __init__(self, equipment: Equipment, start: StartCommand) -> None:
        self._with = equipment
        self._start = start
        self._lease = LeaseRef(start.task, start.epoch)
        self._outcome = SandboxExit(KILLED, EndReason.LOST)
        self._outputs: tuple[OutputFile, ...] = ()
        self._began = equipment.clock()
        self._sandbox: CommandSandbox | None = None  # while the command runs
        self._has_begun = False  # ... or has run
        self._runtime: Runtime | None = None  # once it is chosen
        self._exited = False  # by itself
        self._left: EndReason | None = None  # why it was asked to go
        self._parting: asyncio.Task[None] | None = None
        self._saver: Saver | None = None
        self._keeps = start.gang is None or start.gang.rank == 0
        """Whether outputs and checkpoint are this one's: of a gang, they are the first member's."""
        if start.spec.checkpoint and self._keeps:
            self._saver = Saver(
                equipment.uploader,
                equipment.scratch,
                self._lease,
                start.spec.checkpoint,
                start.checkpoint,
                self._checkpointed,
                lambda why: self._note(f"the checkpoint was not saved: {why}"),
            )
        self.task = asyncio.create_task(self._keep())
        self.task.add_done_callback(self._report)

    def end(self, reason: EndReason, grace_us: int = 0) -> None:
        """With a farewell where one is due and something runs; else at once."""
        if reason in SAVING and self._left is not None:
            return
        if reason in SAVING and self._sandbox is not None:
            self._left = reason
            self._parting = asyncio.create_task(self._part(self._sandbox, grace_us))
            return
        if reason is EndReason.PREEMPTED and self._exited:
            return  # it has ended by itself: its outputs are on their way
        self._outcome = SandboxExit(KILLED, reason)
        self.task.cancel()

    async def _part(self, sandbox: CommandSandbox, grace_us: int) -> None:
        """Warn, wait, kill; what the main task does then, it does by itself. It is killed whatever happens."""
        try:
            if grace_us:
                with contextlib.suppress(TimeoutError, SandboxFailed, OSError):
                    async with asyncio.timeout(grace_us / 1_000_000):
                        await sandbox.warn()
                        await sandbox.ended()
        finally:
            await sandbox.kill()

    def _report(self, task: asyncio.Task[None]) -> None:
        """However it came to an end, even before its first step."""
        ended = fault_of(task) or self._outcome
        start = self._start
        took = self._with.clock() - self._began
        self._with.feed(
            CommandEnded(
                start.task,
                start.epoch,
                ended.reason,
                ended.exit_code,
                ended.detail,
                took,
                self._outputs,
                ended.fault,
            )
        )

    def _reach(self, phase: Phase) -> None:
        self._with.feed(CommandReached(self._start.task, self._start.epoch, phase))

    def _checkpointed(self, files: tuple[OutputFile, ...]) -> None:
        self._with.feed(CommandCheckpointed(self._start.task, self._start.epoch, files))

    def _note(self, text: str) -> None:
        """A word of ours among what the task prints."""
        data = f"[gpool: {text}]\n".encode()
        self._with.feed(CommandPrinted(self._start.task, self._start.epoch, 2, data))

    async def _keep(self) -> None:
        await self._carry_out()
        self._outcome = await self._with.told(self._outcome, self._runtime)

    async def _carry_out(self) -> None:
        try:
            self._outcome, self._outputs = await self._run()
        except SandboxFailed as error:
            fault = None if self._has_begun else error.fault
            self._outcome = SandboxExit(125, error.reason, str(error), fault=fault)
        except BadOutput as error:
            self._outcome = SandboxExit(125, EndReason.BAD_OUTPUT, str(error))
        except (GpoolError, OSError) as error:
            detail = f"{type(error).__name__}: {error}"
            fault = None if self._has_begun else Fault.UNCLEAR
            self._outcome = SandboxExit(125, EndReason.SANDBOX_FAILED, detail, fault=fault)

    async def _run(self) -> Outcome:
        start, spec = self._start, self._start.spec
        runtime = self._runtime = self._with.runtime_for(spec, start.owner)
        async with contextlib.AsyncExitStack() as stack:
            staged = await self._fetch(stack)
            if isinstance(staged, SandboxExit):
                return staged, ()
            gang = start.gang
            lane_wanted = None if gang is None else gangs.lane_of(spec, gang)
            place = self._with.place_for(spec, self._reach, self._note, lane_wanted)
            environment, lane = await stack.enter_async_context(place)
            sitting = self._with.seat_for(runtime, start.user, start.allocation.slices)
            seat = await stack.enter_async_context(sitting)
            command, told = spec.command, spec.env
            if gang is not None:
                command = gangs.command_of(spec, gang, start.allocation)
                told = (*gangs.variables_of(spec, gang), *told)
            job = CommandJob(
                command,
                (*told, *start.secrets),
                staged,
                start.allocation.slices,
                limits_of(spec, start.allocation),
                environment,
                lane,
                image_of(spec),
                self._note,
                seat,
            )
            sandbox = await started(runtime, runtime.start_command(job))
            self._began = self._with.clock()
            try:
                return await self._watch(sandbox)
            finally:
                if self._parting is not None:
                    self._parting.cancel()
                await self._with.clear_away(sandbox)

    async def _fetch(
        self, stack: contextlib.AsyncExitStack
    ) -> tuple[StagedInput, ...] | SandboxExit:
        """The inputs, and over them what an earlier attempt saved; or why they cannot be had."""
        spec, checkpoint = self._start.spec, self._start.checkpoint
        if spec.inputs or checkpoint:
            self._reach(Phase.FETCH)
        staged: dict[str, StagedInput] = {}
        named: list[tuple[str, InputFile]] = [("input", file) for file in spec.inputs]
        named += [("checkpoint", file) for file in checkpoint]
        for what, wanted in named:
            try:
                held = self._with.cache.held(wanted.sha256, self._lease)
                source = await stack.enter_async_context(held)
            except Unreachable:
                raise
            except GpoolError as error:
                return SandboxExit(
                    125, EndReason.BAD_INPUT, f"{what} {wanted.path}: {error.detail}"
                )
            staged[wanted.path] = StagedInput(wanted.path, source, wanted.executable)
        return tuple(staged.values())

    async def _watch(self, sandbox: CommandSandbox) -> Outcome:
        """While it runs, and what becomes of it."""
        start = self._start
        self._sandbox = sandbox
        self._has_begun = True
        self._with.feed(CommandStarted(start.task, start.epoch))
        saving = None
        if self._saver is not None:
            saving = asyncio.create_task(self._save_now_and_then(sandbox, self._saver))
        try:
            async for stream, data in sandbox.output():
                self._with.feed(CommandPrinted(start.task, start.epoch, stream, data))
            ended = await sandbox.ended()
        finally:
            self._sandbox = None
            if saving is not None or self._wanted:
                await sandbox.kill()  # first: nothing may run, or change what is collected
            if saving is not None:
                saving.cancel()
                await asyncio.wait([saving])
        if self._left is not None:
            ended = SandboxExit(KILLED, self._left)
        else:
            self._exited = True
        if self._saver is not None and (ended.reason is not EndReason.EXITED or ended.exit_code):
            await self._save_at_last(sandbox, self._saver)
        if not self._wanted or ended.reason is not EndReason.EXITED:
            return ended, ()
        self._reach(Phase.COLLECT)
        return await self._collect(sandbox, ended)

    # ---- checkpoints

    async def _save_now_and_then(self, sandbox: CommandSandbox, saver: Saver) -> None:
        every_s = max(self._start.spec.checkpoint_every, 1) / 1_000_000
        saved = True
        while True:
            await asyncio.sleep(every_s if saved else every_s / SOONER)
            saved = await saver.save(sandbox, running=True)

    async def _save_at_last(self, sandbox: CommandSandbox, saver: Saver) -> None:
        self._reach(Phase.COLLECT)
        try:
            async with asyncio.timeout(LAST_SAVE_S):
                await saver.save(sandbox, running=False)
        except TimeoutError:
            self._note(f"the checkpoint was not saved within {LAST_SAVE_S:g} s")

    # ---- outputs

    @property
    def _wanted(self) -> tuple[str, ...]:
        return self._start.spec.outputs if self._keeps else ()

    async def _collect(self, sandbox: CommandSandbox, ended: SandboxExit) -> Outcome:
        """Outputs of a command that failed are fetched as far as they are there."""
        with tempfile.TemporaryDirectory(dir=self._with.scratch) as folder:
            into = Path(folder)
            found: list[OutputFile] = []
            for wanted in self._wanted:
                try:
                    found += await unhurried(sandbox.collect([wanted], into))
                except BadOutput:
                    if ended.exit_code == 0:
                        raise
            sent: set[str] = set()
            for output in found:
                if output.sha256 not in sent:
                    sent.add(output.sha256)
                    file = into / output.sha256
                    await self._with.uploader.upload(
                        file, output.sha256, output.size_bytes, self._lease
                    )
        return ended, tuple(found)

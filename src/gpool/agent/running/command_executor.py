"""The executor of one command. Decides nothing about leases."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import structlog

from gpool.agent.network.policy import Gang
from gpool.agent.runner import gang as starter
from gpool.agent.running.attempt_spans import attempt_span
from gpool.agent.running.checkpoints import CheckpointSaver, uninterrupted
from gpool.agent.running.output_upload import RoomWait, upload_output
from gpool.agent.running.progress_file import watch_progress
from gpool.agent.running.sandboxes import (
    KILLED,
    ExecutorContext,
    executor_failure,
    image_of,
    limits_of,
    start_sandbox,
)
from gpool.agent.runtime.protocol import (
    BadOutput,
    CommandJob,
    CommandSandbox,
    Runtime,
    SandboxExit,
    SandboxFailed,
    SandboxNetwork,
    StagedInput,
)
from gpool.agent.state_machine.instructions import (
    CommandCheckpointed,
    CommandEnded,
    CommandPrinted,
    CommandReached,
    CommandStarted,
    ProgressReported,
    StartCommand,
)
from gpool.core.errors import GpoolError, StorageFull, Unreachable
from gpool.core.gangs import GATE_PORT, GangLink, address_of, engine_words, ray_address
from gpool.core.gangs import variables as gang_variables
from gpool.core.model import (
    Allocation,
    EndReason,
    Engine,
    Fault,
    InputFile,
    Network,
    OutputFile,
    Phase,
    TaskSpec,
)
from gpool.observability.context import begin_part, current_trace
from gpool.observability.trace_context import TraceContext
from gpool.observability.tracing import SpanRole
from gpool.transfer.requests import LeaseRef
from gpool.wire.frames import Rendezvous

log = structlog.get_logger(__name__)

INTERPRETER = (
    "python=$(command -v python || command -v python3) || { echo \"gpool: engine $1 needs a Python in the task's "
    'environment, and there is none; choose another --image" >&2; exit 127; }; shift; exec "$python" -c "$0" "$@"'
)
"""Shell script that finds a Python in an image: `$0` is the starter's text, `$1` the engine."""


@cache
def starter_text() -> str:
    return Path(starter.__file__).read_text("utf-8")


def network_of(spec: TaskSpec, member: Rendezvous) -> Gang:
    egress = spec.requirements.network is Network.EGRESS
    return Gang(member.rank, member.peers, member.secret, egress, member.link or GangLink.RELAY)


def command_of(spec: TaskSpec, member: Rendezvous, part: Allocation) -> tuple[str, ...]:
    if spec.engine is Engine.NONE:
        return spec.command
    nodes = len(member.peers)
    plan = {
        "engine": spec.engine.value,
        "rank": member.rank,
        "nodes": nodes,
        "head": str(address_of(0)),
        "gate": GATE_PORT,
        "ray": ray_address(),
        "words": engine_words(spec.engine, member.rank, nodes, part),
    }
    engine, text = spec.engine.value, json.dumps(plan)
    return ("/bin/sh", "-c", INTERPRETER, starter_text(), engine, text, *spec.command)


def variables_of(
    spec: TaskSpec, member: Rendezvous, network: SandboxNetwork | None = None
) -> tuple[tuple[str, str], ...]:
    """The task's own variables override the member's."""
    rdma = network is not None and bool(network.devices)
    own = gang_variables(member.rank, len(member.peers), rdma=rdma)
    return (*own, *QUIET.get(spec.engine, ()))


QUIET = {Engine.RAY: (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_DISABLE_IMPORT_WARNING", "1"))}
"""Switch off the engines' own traffic to the internet."""


def failure_of(ended: SandboxExit) -> str:
    """Text for a span's status; empty after exit code 0."""
    is_success = ended.reason is EndReason.EXITED and ended.exit_code == 0
    return "" if is_success else f"{ended.reason.value} {ended.exit_code}"


SAVING = frozenset({EndReason.PREEMPTED, EndReason.TIMED_OUT})
LAST_SAVE_S = 600.0
"""Longest time of the last checkpoint; its sandbox is dead by then."""
SOONER = 10
"""A failed save is tried again after this fraction of the interval."""

Outcome = tuple[SandboxExit, tuple[OutputFile, ...]]


class CommandExecutor:
    def __init__(self, context: ExecutorContext, start: StartCommand) -> None:
        self._context = context
        self._start = start
        self._lease = LeaseRef(start.task, start.epoch)
        self._outcome = SandboxExit(KILLED, EndReason.LOST)
        self._outputs: tuple[OutputFile, ...] = ()
        self._began = context.clock()
        self._sandbox: CommandSandbox | None = None  # while the command runs
        self._has_begun = False  # ... or has run
        self._runtime: Runtime | None = None  # once it is chosen
        self._exited = False  # by itself
        self._end_asked: EndReason | None = None  # set while it ends with SIGTERM and grace
        self._ending: asyncio.Task[None] | None = None
        self._saver: CheckpointSaver | None = None
        # Outputs and checkpoint of a gang are the first member's.
        self._collects = start.gang is None or start.gang.rank == 0
        if start.spec.checkpoint and self._collects:
            self._saver = CheckpointSaver(
                context.uploader,
                context.scratch,
                self._lease,
                start.spec.checkpoint,
                start.checkpoint,
                self._checkpointed,
                lambda why: self._note(f"the checkpoint was not saved: {why}"),
            )
        self.task = asyncio.create_task(self._execute())
        self.task.add_done_callback(self._report)

    def end(self, reason: EndReason, grace_us: int = 0) -> None:
        """SIGTERM, grace and checkpoint if the reason asks for it and the command runs, else at once."""
        if reason in SAVING and self._end_asked is not None:
            return
        if reason in SAVING and self._sandbox is not None:
            self._end_asked = reason
            self._ending = asyncio.create_task(self._terminate(self._sandbox, grace_us))
            return
        if reason is EndReason.PREEMPTED and self._exited:
            return  # it exited by itself: its outputs are being uploaded
        self._outcome = SandboxExit(KILLED, reason)
        self.task.cancel()

    async def _terminate(self, sandbox: CommandSandbox, grace_us: int) -> None:
        try:
            if grace_us:
                with contextlib.suppress(TimeoutError, SandboxFailed, OSError):
                    async with asyncio.timeout(grace_us / 1_000_000):
                        await sandbox.warn()
                        await sandbox.ended()
        finally:
            await sandbox.kill()

    def _report(self, task: asyncio.Task[None]) -> None:
        ended = executor_failure(task) or self._outcome
        start = self._start
        took = self._context.clock() - self._began
        self._context.feed(
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
        self._context.feed(CommandReached(self._start.task, self._start.epoch, phase))

    def _checkpointed(self, files: tuple[OutputFile, ...]) -> None:
        self._context.feed(CommandCheckpointed(self._start.task, self._start.epoch, files))

    def _progressed(self, millionths: int, text: str) -> None:
        lease = self._start.task, self._start.epoch
        self._context.feed(ProgressReported(*lease, millionths, text))

    def _note(self, text: str) -> None:
        data = f"[gpool: {text}]\n".encode()
        self._context.feed(CommandPrinted(self._start.task, self._start.epoch, 2, data))

    async def _execute(self) -> None:
        start, sent = self._start, TraceContext.parse(self._start.spec.trace)
        begin_part(task=start.task, epoch=start.epoch)
        tracing = self._context.tracing
        with attempt_span(tracing, "gpool.task", SpanRole.CONSUMER, sent) as span:
            begin_part(span.context)
            log.debug("task_begins", user=start.user)
            await self._run_and_catch()
            self._outcome = await self._context.with_fault(self._outcome, self._runtime)
            ended = self._outcome
            span.failure = failure_of(ended)
            log.debug("task_ended", why=ended.reason.value, code=ended.exit_code)

    async def _run_and_catch(self) -> None:
        try:
            self._outcome, self._outputs = await self._run()
        except SandboxFailed as error:
            fault = None if self._has_begun else error.fault
            self._outcome = SandboxExit(125, error.reason, str(error), fault=fault)
        except (BadOutput, StorageFull) as error:
            self._outcome = SandboxExit(125, EndReason.BAD_OUTPUT, str(error))
        except (GpoolError, OSError) as error:
            detail = f"{type(error).__name__}: {error}"
            fault = None if self._has_begun else Fault.UNCLEAR
            self._outcome = SandboxExit(125, EndReason.SANDBOX_FAILED, detail, fault=fault)

    async def _run(self) -> Outcome:
        start, spec = self._start, self._start.spec
        runtime = self._runtime = self._context.runtime_for(spec, start.owner)
        async with contextlib.AsyncExitStack() as stack:
            staged = await self._fetch(stack)
            if isinstance(staged, SandboxExit):
                return staged, ()
            gang = start.gang
            gang_network = None if gang is None else network_of(spec, gang)
            limits = limits_of(spec, start.allocation)
            prepared = self._context.prepare(spec, self._reach, self._note, limits, gang_network)
            environment, network = await stack.enter_async_context(prepared)
            shares = self._context.gpu_share_for(runtime, start.user, start.allocation.slices)
            share = await stack.enter_async_context(shares)
            span = stack.enter_context(
                attempt_span(
                    self._context.tracing, "gpool.sandbox", SpanRole.INTERNAL, current_trace()
                )
            )
            command, variables = spec.command, (*span.variables, *spec.env)
            if gang is not None:
                command = command_of(spec, gang, start.allocation)
                variables = (*variables_of(spec, gang, network), *variables)
            job = CommandJob(
                command,
                (*variables, *start.secrets),
                staged,
                start.allocation.slices,
                limits,
                environment,
                network,
                image_of(spec),
                self._note,
                share,
            )
            sandbox = await start_sandbox(runtime, runtime.start_command(job))
            self._began = self._context.clock()
            try:
                outcome = await self._watch(sandbox)
                span.failure = failure_of(outcome[0])
                return outcome
            finally:
                if self._ending is not None:
                    self._ending.cancel()
                await self._context.remove_sandbox(sandbox)

    async def _fetch(
        self, stack: contextlib.AsyncExitStack
    ) -> tuple[StagedInput, ...] | SandboxExit:
        spec, checkpoint = self._start.spec, self._start.checkpoint
        if spec.inputs or checkpoint:
            self._reach(Phase.FETCH)
        staged: dict[str, StagedInput] = {}
        named: list[tuple[str, InputFile]] = [("input", file) for file in spec.inputs]
        named += [("checkpoint", file) for file in checkpoint]
        for what, wanted in named:
            try:
                held = self._context.cache.held(wanted.sha256, self._lease)
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
        start = self._start
        self._sandbox = sandbox
        self._has_begun = True
        self._context.feed(CommandStarted(start.task, start.epoch))
        watching = None
        if self._collects:
            watching = asyncio.create_task(watch_progress(sandbox, self._progressed))
        saving = None
        if self._saver is not None:
            saving = asyncio.create_task(self._save_periodically(sandbox, self._saver))
        try:
            async for stream, data in sandbox.output():
                self._context.feed(CommandPrinted(start.task, start.epoch, stream, data))
            ended = await sandbox.ended()
        finally:
            self._sandbox = None
            if watching is not None:
                watching.cancel()
                await asyncio.wait([watching])
            if saving is not None or self._wanted:
                await sandbox.kill()  # first: no process may change what is collected
            if saving is not None:
                saving.cancel()
                await asyncio.wait([saving])
        if self._end_asked is not None:
            ended = SandboxExit(KILLED, self._end_asked)
        else:
            self._exited = True
        if self._saver is not None and (ended.reason is not EndReason.EXITED or ended.exit_code):
            await self._save_last(sandbox, self._saver)
        if not self._wanted or ended.reason is not EndReason.EXITED:
            return ended, ()
        self._reach(Phase.COLLECT)
        return await self._collect(sandbox, ended)

    # ---- checkpoints

    async def _save_periodically(self, sandbox: CommandSandbox, saver: CheckpointSaver) -> None:
        every_s = max(self._start.spec.checkpoint_every, 1) / 1_000_000
        saved = True
        while True:
            await asyncio.sleep(every_s if saved else every_s / SOONER)
            saved = await saver.save(sandbox, running=True)

    async def _save_last(self, sandbox: CommandSandbox, saver: CheckpointSaver) -> None:
        self._reach(Phase.COLLECT)
        try:
            async with asyncio.timeout(LAST_SAVE_S):
                await saver.save(sandbox, running=False)
        except TimeoutError:
            self._note(f"the checkpoint was not saved within {LAST_SAVE_S:g} s")

    # ---- outputs

    @property
    def _wanted(self) -> tuple[str, ...]:
        return self._start.spec.outputs if self._collects else ()

    async def _collect(self, sandbox: CommandSandbox, ended: SandboxExit) -> Outcome:
        with tempfile.TemporaryDirectory(dir=self._context.scratch) as folder:
            into = Path(folder)
            found: list[OutputFile] = []
            for wanted in self._wanted:
                try:
                    found += await uninterrupted(sandbox.collect([wanted], into))
                except BadOutput:
                    if ended.exit_code == 0:
                        raise
                _check_sizes(found, limits_of(self._start.spec, self._start.allocation).disk_bytes)
            sent: set[str] = set()
            for output in found:
                if output.sha256 not in sent:
                    sent.add(output.sha256)
                    file = into / output.sha256
                    sending = (file, output.sha256, output.size_bytes)
                    await upload_output(
                        self._context.uploader, sending, self._lease, self._note, RoomWait()
                    )
        return ended, tuple(found)


def _check_sizes(found: Sequence[OutputFile], most_bytes: int) -> None:
    """Compare apparent sizes: a sparse file takes little of the node's disk and all of the server's."""
    total = sum(output.size_bytes for output in found)
    if total > most_bytes:
        raise BadOutput(
            f"the outputs are {total} bytes, holes included, over the disk limit of {most_bytes}; "
            "ask for more with --disk, or write less"
        )

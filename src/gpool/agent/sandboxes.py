"""Commands and runners at work: one task each, obeying the session's instructions and telling it what became of them.

Everything between the artifact cache, the runtime's door and the server's artifact routes happens here; decisions do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from gpool.agent.cache import ArtifactCache
from gpool.agent.instructions import (
    CallAnswered,
    CallPrinted,
    CallsAnswered,
    CommandEnded,
    CommandPrinted,
    CommandStarted,
    Event,
    RunnerCall,
    RunnerEnded,
    RunnerReady,
    StartCommand,
    StartRunner,
)
from gpool.agent.runtime.calls import PYTHON
from gpool.agent.runtime.protocol import (
    Answer,
    BadOutput,
    Call,
    CommandJob,
    CommandSandbox,
    Ended,
    Limits,
    Output,
    RunnerJob,
    RunnerSandbox,
    Runtime,
    SandboxFailed,
    Staged,
)
from gpool.core.errors import GpoolError, StaleLease, Unreachable
from gpool.core.model import Allocation, EndReason, OutputFile, TaskSpec, Tier
from gpool.transfer.artifacts import LeaseRef, hash_of

S = TypeVar("S", CommandSandbox, RunnerSandbox)
KILLED = 137

log = structlog.get_logger(__name__)


class Uploader(Protocol):
    async def upload(
        self, file: Path, sha256: str, size: int, lease: LeaseRef | None = None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Equipment:
    """What every sandbox's keeper needs."""

    runtimes: Mapping[Tier, Runtime]
    cache: ArtifactCache
    uploader: Uploader
    scratch: Path
    feed: Callable[[Event], None]
    clock: Callable[[], int]
    cleaning: set[asyncio.Task[None]] = field(default_factory=set)

    async def clear_away(self, sandbox: CommandSandbox | RunnerSandbox) -> None:
        """Returns once nothing of it runs; its files go while the next one starts."""
        await sandbox.kill()
        cleaner = asyncio.create_task(sandbox.remove())
        self.cleaning.add(cleaner)
        cleaner.add_done_callback(self._cleared)

    def _cleared(self, cleaner: asyncio.Task[None]) -> None:
        self.cleaning.discard(cleaner)
        if not cleaner.cancelled() and (error := cleaner.exception()) is not None:
            log.error("sandbox_not_removed", exc_info=error)

    def runtime_for(self, spec: TaskSpec, owner: bool) -> Runtime:
        """The weakest runtime here that is strong enough; without isolation only for the owner, who must ask for it.

        The scheduler sees to that as well; a node does not take its word for it.
        """
        floor = spec.requirements.tier
        if floor is Tier.NONE and not owner:
            raise SandboxFailed(
                "tier 'none' runs without isolation: only tasks of this node's owner may"
            )
        fitting = [tier for tier in self.runtimes if tier.strength >= floor.strength]
        if not fitting or (floor is Tier.NONE and Tier.NONE not in fitting):
            raise SandboxFailed(f"this node has no runtime of tier {floor.value!r}")
        return self.runtimes[min(fitting, key=lambda tier: tier.strength)]


def limits_of(spec: TaskSpec, allocation: Allocation) -> Limits:
    limits = Limits(allocation.cpu_milli, allocation.memory_bytes)
    disk = spec.requirements.disk_bytes
    return limits if disk is None else replace(limits, disk_bytes=disk)


async def _started(start: Awaitable[S]) -> S:
    """A start that is called off half-way is awaited and undone: no sandbox is left without a keeper."""
    starting = asyncio.ensure_future(start)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(SandboxFailed):
            sandbox = await starting
            await sandbox.kill()
            await sandbox.remove()
        raise


def _fault(task: asyncio.Task[None]) -> Ended | None:
    """A bug of ours must not leave the session waiting for an end."""
    if task.cancelled() or (error := task.exception()) is None:
        return None
    log.error("keeper_failed", exc_info=error)
    return Ended(125, EndReason.SANDBOX_FAILED, f"a fault in the agent: {error!r}")


class CommandKeeper:
    """One command, from its inputs to its outputs."""

    def __init__(self, equipment: Equipment, start: StartCommand) -> None:
        self._with = equipment
        self._start = start
        self._lease = LeaseRef(start.task, start.epoch)
        self._outcome = Ended(KILLED, EndReason.LOST)
        self._outputs: tuple[OutputFile, ...] = ()
        self._began = equipment.clock()
        self.task = asyncio.create_task(self._keep())
        self.task.add_done_callback(self._report)

    def end(self, reason: EndReason) -> None:
        self._outcome = Ended(KILLED, reason)
        self.task.cancel()

    def _report(self, task: asyncio.Task[None]) -> None:
        """However it came to an end, even before its first step."""
        ended = _fault(task) or self._outcome
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
            )
        )

    async def _keep(self) -> None:
        try:
            self._outcome, self._outputs = await self._run()
        except SandboxFailed as error:
            self._outcome = Ended(125, EndReason.SANDBOX_FAILED, str(error))
        except BadOutput as error:
            self._outcome = Ended(125, EndReason.BAD_OUTPUT, str(error))
        except (GpoolError, OSError) as error:
            detail = f"{type(error).__name__}: {error}"
            self._outcome = Ended(125, EndReason.SANDBOX_FAILED, detail)

    async def _run(self) -> tuple[Ended, tuple[OutputFile, ...]]:
        start, spec = self._start, self._start.spec
        runtime = self._with.runtime_for(spec, start.owner)
        async with contextlib.AsyncExitStack() as stack:
            staged = []
            try:
                for wanted in spec.inputs:
                    held = self._with.cache.held(wanted.sha256, self._lease)
                    source = await stack.enter_async_context(held)
                    staged.append(Staged(wanted.path, source, wanted.executable))
            except Unreachable:
                raise
            except GpoolError as error:
                return Ended(125, EndReason.BAD_INPUT, f"input {wanted.path}: {error.detail}"), ()
            limits = limits_of(spec, start.allocation)
            job = CommandJob(
                spec.command,
                (*spec.env, *start.secrets),
                tuple(staged),
                start.allocation.slices,
                limits,
            )
            sandbox = await _started(runtime.start_command(job))
            self._began = self._with.clock()
            try:
                self._with.feed(CommandStarted(start.task, start.epoch))
                async for stream, data in sandbox.output():
                    self._with.feed(CommandPrinted(start.task, start.epoch, stream, data))
                ended = await sandbox.ended()
                if not spec.outputs or ended.reason is not EndReason.EXITED:
                    return ended, ()
                return await self._collect(sandbox, ended)
            finally:
                await self._with.clear_away(sandbox)

    async def _collect(
        self, sandbox: CommandSandbox, ended: Ended
    ) -> tuple[Ended, tuple[OutputFile, ...]]:
        """Outputs of a command that failed are fetched as far as they are there."""
        with tempfile.TemporaryDirectory(dir=self._with.scratch) as folder:
            into = Path(folder)
            found: list[OutputFile] = []
            for wanted in self._start.spec.outputs:
                try:
                    found += await sandbox.collect([wanted], into)
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


class RunnerKeeper:
    """One runner: hands over calls, passes on answers."""

    def __init__(self, equipment: Equipment, start: StartRunner) -> None:
        self._with = equipment
        self._start = start
        self._queue: deque[RunnerCall] = deque()
        self._wake = asyncio.Event()
        self._leases: dict[int, tuple[int, int]] = {}  # number of a call -> (task, epoch)
        self._number = 0
        self._defined: set[str] = set()
        self._files: dict[int, contextlib.AsyncExitStack] = {}  # large arguments in use
        self._outcome = Ended(KILLED, EndReason.EXITED, "ended by the agent")
        self.task = asyncio.create_task(self._keep())
        self.task.add_done_callback(self._report)

    def end(self) -> None:
        self.task.cancel()

    def send(self, calls: tuple[RunnerCall, ...]) -> None:
        self._queue.extend(calls)
        self._wake.set()

    def _report(self, task: asyncio.Task[None]) -> None:
        """However it came to an end, even before its first step."""
        ended = _fault(task) or self._outcome
        number = self._start.runner
        self._with.feed(
            RunnerEnded(number, ended.reason, ended.exit_code, ended.detail, ended.retired)
        )

    async def _keep(self) -> None:
        try:
            self._outcome = await self._run()
        except (SandboxFailed, GpoolError, OSError) as error:
            self._outcome = Ended(125, EndReason.SANDBOX_FAILED, f"{error}")

    async def _run(self) -> Ended:
        start = self._start
        runtime = self._with.runtime_for(start.spec, start.owner)
        python = start.spec.requirements.python or PYTHON
        limits = limits_of(start.spec, start.allocation)
        variables = (*start.spec.env, *start.secrets)
        job = RunnerJob(python, variables, start.allocation.slices, limits)
        sandbox = await _started(runtime.start_runner(job))
        writer = asyncio.create_task(self._write(sandbox))
        try:
            self._with.feed(RunnerReady(start.runner))
            async for batch in sandbox.events():
                await self._pass_on(batch)
            return await sandbox.ended()
        finally:
            writer.cancel()
            await asyncio.wait([writer])
            await self._with.clear_away(sandbox)
            for stack in self._files.values():
                await stack.aclose()

    # ---- calls in

    async def _write(self, sandbox: RunnerSandbox) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._queue:
                    await self._hand_over(sandbox)
        except (OSError, SandboxFailed):
            return  # the sandbox is gone; its events end and say so

    async def _hand_over(self, sandbox: RunnerSandbox) -> None:
        """All that wait, in order; functions and large arguments are fetched on the way."""
        ready: list[Call] = []
        while self._queue:
            call = self._queue.popleft()
            sha256, payload = call.function_sha256, call.payload_sha256
            file: Path | None = None
            if sha256 not in self._defined or payload:
                if ready:
                    await sandbox.send(ready)
                    ready = []
                lease = LeaseRef(call.task, call.epoch)
                try:
                    if sha256 not in self._defined:
                        pickled = await self._with.cache.read(sha256, lease)
                        await sandbox.define(sha256, pickled)
                        self._defined.add(sha256)
                    if payload:
                        stack = contextlib.AsyncExitStack()
                        held = self._with.cache.held(payload, lease)
                        file = await stack.enter_async_context(held)
                        self._files[self._number + 1] = stack
                except GpoolError as error:
                    self._give_up(call, error)
                    continue
            self._number += 1
            self._leases[self._number] = (call.task, call.epoch)
            ready.append(Call(self._number, sha256, call.payload, file))
        if ready:
            await sandbox.send(ready)

    def _give_up(self, call: RunnerCall, error: GpoolError) -> None:
        reason = EndReason.SANDBOX_FAILED if isinstance(error, Unreachable) else EndReason.BAD_INPUT
        text = f"the function or its arguments could not be fetched: {error.detail}"
        failed = CallAnswered(call.task, call.epoch, True, b"", "", text, 0, (), reason)
        self._with.feed(CallsAnswered(self._start.runner, (failed,)))

    # ---- answers out

    async def _pass_on(self, batch: Sequence[Answer | Output]) -> None:
        runner = self._start.runner
        answers: list[CallAnswered] = []
        leases = self._leases
        for event in batch:
            if type(event) is Answer:
                lease = leases.pop(event.number, None)
                if lease is None:
                    continue
                if self._files and (stack := self._files.pop(event.number, None)) is not None:
                    await stack.aclose()
                if event.value_file is not None:
                    answers.append(await self._large(lease, event, event.value_file))
                    continue
                answers.append(
                    CallAnswered(
                        lease[0],
                        lease[1],
                        event.raised,
                        event.value,
                        "",
                        event.error_text,
                        event.duration_us,
                        event.output,
                    )
                )
            elif isinstance(event, Output) and (running := leases.get(event.number)):
                if answers:
                    self._with.feed(CallsAnswered(runner, tuple(answers)))
                    answers = []
                self._with.feed(CallPrinted(runner, *running, event.stream, event.data))
        if answers:
            self._with.feed(CallsAnswered(runner, tuple(answers)))

    async def _large(self, lease: tuple[int, int], answer: Answer, file: Path) -> CallAnswered:
        """A value too large for a frame travels as an artifact, under its lease."""
        answered = CallAnswered(
            *lease,
            answer.raised,
            b"",
            "",
            answer.error_text,
            answer.duration_us,
            answer.output,
        )
        try:
            sha256, size = await asyncio.to_thread(hash_of, file)
            await self._with.uploader.upload(file, sha256, size, LeaseRef(*lease))
            return replace(answered, value_sha256=sha256)
        except StaleLease as error:
            log.info("value_refused", task=lease[0], epoch=lease[1], error=error.detail)
            return replace(answered, reason=EndReason.SANDBOX_FAILED, error_text=error.detail)
        except (GpoolError, OSError) as error:
            text = f"the value could not be kept: {error}"
            return replace(answered, reason=EndReason.SANDBOX_FAILED, error_text=text)
        finally:
            await asyncio.to_thread(file.unlink, missing_ok=True)

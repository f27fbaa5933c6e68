"""The executor of one runner. Decides nothing about leases."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from gpool.agent.running.attempt_spans import begin_span
from gpool.agent.running.output_upload import VALUE_WAIT_S, RoomWait, upload_output
from gpool.agent.running.sandboxes import (
    KILLED,
    ExecutorContext,
    WarmedSandbox,
    executor_failure,
    image_of,
    limits_of,
    start_sandbox,
    warm_key_of,
)
from gpool.agent.runtime.protocol import (
    CallAnswer,
    CallEvent,
    CallOutput,
    CallProgress,
    FunctionCall,
    GpuShare,
    PreparedEnvironment,
    RunnerJob,
    RunnerSandbox,
    Runtime,
    SandboxExit,
    SandboxFailed,
    SandboxNetwork,
)
from gpool.agent.runtime.runner_calls import PYTHON
from gpool.agent.state_machine.instructions import (
    CallAnswered,
    CallPrinted,
    CallsAnswered,
    ProgressReported,
    RunnerCall,
    RunnerEnded,
    RunnerReached,
    RunnerReady,
    StartRunner,
)
from gpool.agent.state_machine.leases import why_it_died
from gpool.core.errors import GpoolError, StaleLease, StorageFull, Unreachable
from gpool.core.model import EndReason, Fault, Phase
from gpool.observability.context import begin_part
from gpool.observability.trace_context import TraceContext
from gpool.observability.tracing import OpenSpan, SpanRole
from gpool.transfer.requests import LeaseRef, hash_of

log = structlog.get_logger(__name__)


class RunnerExecutor:
    def __init__(self, context: ExecutorContext, start: StartRunner) -> None:
        self._context = context
        self._start = start
        self._queue: deque[RunnerCall] = deque()
        self._wake = asyncio.Event()
        self._leases: dict[int, tuple[int, int]] = {}  # number of a call -> (task, epoch)
        self._number = 0
        self._defined: set[str] = set()
        self._files: dict[int, contextlib.AsyncExitStack] = {}  # large arguments in use
        self._spans: dict[int, OpenSpan] = {}  # of traced calls in use
        self._outcome = SandboxExit(KILLED, EndReason.EXITED, "ended by the agent")
        self._runtime: Runtime | None = None  # once it is chosen
        self._has_begun = False  # it accepted calls
        self._count_memory()
        self.task = asyncio.create_task(self._execute())
        self.task.add_done_callback(self._report)

    def end(self) -> None:
        self.task.cancel()

    def _count_memory(self) -> None:
        if self._context.warm is not None:
            self._context.warm.lease_began(self, self._start.allocation.memory_bytes)

    def _release_memory(self) -> None:
        if self._context.warm is not None:
            self._context.warm.lease_ended(self)

    def send(self, calls: tuple[RunnerCall, ...]) -> None:
        if not self._leases and not self._queue:
            self._count_memory()
        self._queue.extend(calls)
        self._wake.set()

    def _report(self, task: asyncio.Task[None]) -> None:
        self._release_memory()
        ended = executor_failure(task) or self._outcome
        number = self._start.runner
        self._context.feed(
            RunnerEnded(
                number, ended.reason, ended.exit_code, ended.detail, ended.retired, ended.fault
            )
        )

    async def _execute(self) -> None:
        begin_part(runner=self._start.runner)
        log.debug("runner_begins", user=self._start.user)
        try:
            self._outcome = await self._run()
        except SandboxFailed as error:
            fault = None if self._has_begun else error.fault
            self._outcome = SandboxExit(125, error.reason, f"{error}", fault=fault)
        except (GpoolError, OSError) as error:
            fault = None if self._has_begun else Fault.UNCLEAR
            self._outcome = SandboxExit(125, EndReason.SANDBOX_FAILED, f"{error}", fault=fault)
        self._outcome = await self._context.with_fault(self._outcome, self._runtime)

    async def _run(self) -> SandboxExit:
        start = self._start
        runtime = self._runtime = self._context.runtime_for(start.spec, start.owner)
        async with self._context.gpu_share_for(
            runtime, start.user, start.allocation.slices
        ) as share:
            warmed = await self._take_warm(runtime, share)
            if warmed is not None:
                async with warmed.resources:
                    return await self._serve(warmed.sandbox)
            limits = limits_of(start.spec, start.allocation)
            prepared = self._context.prepare(start.spec, self._reach, self._log_progress, limits)
            async with prepared as (environment, network):
                job = self._job(environment, network, share)
                return await self._serve(await start_sandbox(runtime, runtime.start_runner(job)))

    async def _take_warm(self, runtime: Runtime, share: GpuShare | None) -> WarmedSandbox | None:
        start = self._start
        key = warm_key_of(runtime, start.spec, start.allocation)
        if key is None or self._context.warm is None:
            return None
        if share is not None and share.binds:
            return None  # its mounts must be there from the start of the sandbox
        warmed = self._context.warm.take(key)
        if warmed is None:
            return None
        given = share.variables if share is not None else ()
        try:
            await warmed.sandbox.assign((*start.spec.env, *start.secrets, *given))
        except SandboxFailed:
            await warmed.remove()
            return None
        except BaseException:
            await warmed.remove()
            raise
        return warmed

    def _reach(self, phase: Phase) -> None:
        self._context.feed(RunnerReached(self._start.runner, phase))

    def _log_progress(self, line: str) -> None:
        log.info("sandbox", runner=self._start.runner, line=line)

    def _job(
        self,
        environment: PreparedEnvironment | None,
        network: SandboxNetwork | None,
        share: GpuShare | None,
    ) -> RunnerJob:
        start, spec = self._start, self._start.spec
        return RunnerJob(
            spec.requirements.python or PYTHON,
            (*spec.env, *start.secrets),
            start.allocation.slices,
            limits_of(spec, start.allocation),
            environment,
            network,
            image_of(spec),
            spec.preload,
            self._log_progress,
            share,
        )

    async def _serve(self, sandbox: RunnerSandbox) -> SandboxExit:
        writer = asyncio.create_task(self._write(sandbox))
        try:
            self._has_begun = True
            self._context.feed(RunnerReady(self._start.runner))
            async for batch in sandbox.events():
                await self._feed_batch(batch)
            return await sandbox.ended()
        finally:
            writer.cancel()
            await asyncio.wait([writer])
            await self._context.remove_sandbox(sandbox)
            for stack in self._files.values():
                await stack.aclose()
            for span in self._spans.values():
                span.end("the runner ended")

    # ---- calls in

    async def _write(self, sandbox: RunnerSandbox) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._queue:
                    await self._send_queued(sandbox)
        except (OSError, SandboxFailed):
            return  # the sandbox is gone; its event stream ends too

    async def _send_queued(self, sandbox: RunnerSandbox) -> None:
        ready: list[FunctionCall] = []
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
                        pickled = await self._context.cache.read(sha256, lease)
                        await sandbox.define(sha256, pickled)
                        self._defined.add(sha256)
                    if payload:
                        stack = contextlib.AsyncExitStack()
                        held = self._context.cache.held(payload, lease)
                        file = await stack.enter_async_context(held)
                        self._files[self._number + 1] = stack
                except GpoolError as error:
                    self._fail(call, error)
                    continue
            self._number += 1
            self._leases[self._number] = (call.task, call.epoch)
            trace = self._traced(call) if call.trace else ""
            ready.append(FunctionCall(self._number, sha256, call.payload, file, trace))
        if ready:
            await sandbox.send(ready)

    def _traced(self, call: RunnerCall) -> str:
        """Begin the span of a traced call, until its answer; return the context for the sandbox."""
        parent = TraceContext.parse(call.trace)
        lease = {"task": call.task, "epoch": call.epoch}
        span = begin_span(self._context.tracing, "gpool.call", SpanRole.CONSUMER, parent, **lease)
        if span is None:
            return call.trace
        self._spans[self._number] = span
        return span.context.header

    def _fail(self, call: RunnerCall, error: GpoolError) -> None:
        reason = EndReason.SANDBOX_FAILED if isinstance(error, Unreachable) else EndReason.BAD_INPUT
        text = f"the function or its arguments could not be fetched: {error.detail}"
        fault = Fault.UNCLEAR if reason is EndReason.SANDBOX_FAILED else None
        failed = CallAnswered(
            call.task, call.epoch, True, b"", "", text, 0, (), reason, fault=fault
        )
        self._context.feed(CallsAnswered(self._start.runner, (failed,)))

    # ---- answers out

    async def _feed_batch(self, batch: Sequence[CallEvent]) -> None:
        runner = self._start.runner
        answers: list[CallAnswered] = []
        leases = self._leases
        for event in batch:
            if type(event) is CallAnswer:
                lease = leases.pop(event.number, None)
                if lease is None:
                    continue
                if self._files and (stack := self._files.pop(event.number, None)) is not None:
                    await stack.aclose()
                if self._spans and (span := self._spans.pop(event.number, None)) is not None:
                    span.end("raised" if event.raised or event.ended is not None else "")
                if event.value_file is not None:
                    answers.append(await self._large(lease, event, event.value_file))
                    continue
                if event.ended is not None:
                    answers.append(_died(lease, event, event.ended))
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
            elif isinstance(event, CallOutput) and (running := leases.get(event.number)):
                if answers:
                    self._context.feed(CallsAnswered(runner, tuple(answers)))
                    answers = []
                self._context.feed(CallPrinted(runner, *running, event.stream, event.data))
            elif isinstance(event, CallProgress) and (running := leases.get(event.number)):
                self._context.feed(ProgressReported(*running, event.millionths, event.text))
        if answers:
            self._context.feed(CallsAnswered(runner, tuple(answers)))
            if not leases and not self._queue:
                self._release_memory()

    async def _large(self, lease: tuple[int, int], answer: CallAnswer, file: Path) -> CallAnswered:
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
            note = partial(self._note_wait, lease)
            wait = RoomWait(VALUE_WAIT_S)
            sending = (file, sha256, size)
            await upload_output(self._context.uploader, sending, LeaseRef(*lease), note, wait)
            return replace(answered, value_sha256=sha256)
        except StaleLease as error:
            log.info("value_refused", task=lease[0], epoch=lease[1], error=error.detail)
            return replace(answered, reason=EndReason.SANDBOX_FAILED, error_text=error.detail)
        except StorageFull as error:
            return replace(answered, reason=EndReason.BAD_OUTPUT, error_text=error.detail)
        except (GpoolError, OSError) as error:
            text = f"the value could not be uploaded: {error}"
            return replace(answered, reason=EndReason.SANDBOX_FAILED, error_text=text)
        finally:
            await asyncio.to_thread(file.unlink, missing_ok=True)

    def _note_wait(self, lease: tuple[int, int], text: str) -> None:
        data = f"[gpool: {text}]\n".encode()
        self._context.feed(CallPrinted(self._start.runner, *lease, 2, data))


def _died(lease: tuple[int, int], answer: CallAnswer, ended: SandboxExit) -> CallAnswered:
    reason, text = why_it_died(ended)
    code = ended.exit_code or 1
    took, output = answer.duration_us, answer.output
    return CallAnswered(*lease, True, b"", "", text, took, output, reason, code)

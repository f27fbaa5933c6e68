"""Runtime without processes, for tests: a table defines commands, functions run in this process. No isolation."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import pickle
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpool.agent.runner import encoding
from gpool.agent.runner.serve import RESULTS_AS_DATA
from gpool.agent.runtime.protocol import (
    BadOutput,
    CallAnswer,
    CallEvent,
    CommandJob,
    CommandSandbox,
    FunctionCall,
    PlainRuntime,
    RunnerJob,
    RunnerSandbox,
    RuntimeAbility,
    SandboxExit,
    SandboxFailed,
    SandboxLimits,
    WarmRunner,
)
from gpool.core.model import INLINE_LIMIT_BYTES, Gpu, Network, OutputFile, Tier

FAKE_BYTES = 1 << 20  # memory of a waiting runner


@dataclass(frozen=True, slots=True)
class FakeRun:
    """`waits`: the command prints and then runs until it is killed."""

    output: tuple[tuple[int, bytes], ...] = ()
    exit_code: int = 0
    files: Mapping[str, bytes] = field(default_factory=dict)
    waits: bool = False
    heeds: bool = True  # SIGTERM ends it
    warned: Mapping[str, bytes] = field(default_factory=dict)  # files written on SIGTERM
    changing: tuple[str, ...] = ()  # files that differ at every read
    ended: SandboxExit | None = None  # instead of a plain exit


class FakeCommand:
    def __init__(self, run: FakeRun, inputs: Mapping[str, bytes], runtime: FakeRuntime) -> None:
        self._run = run
        self._files = {**inputs, **run.files}
        self._over: asyncio.Future[SandboxExit] = asyncio.get_running_loop().create_future()
        self._runtime = runtime
        if not run.waits:
            self._over.set_result(run.ended or SandboxExit(run.exit_code))

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        for stream, data in self._run.output:
            yield stream, data
        await asyncio.shield(self._over)

    async def ended(self) -> SandboxExit:
        return await asyncio.shield(self._over)

    async def kill(self) -> None:
        if not self._over.done():
            self._over.set_result(SandboxExit(137))

    async def warn(self) -> None:
        if self._run.heeds and not self._over.done():
            self._files |= self._run.warned
            self._over.set_result(SandboxExit(143))

    async def collect(self, wanted: Sequence[str], into: Path) -> list[OutputFile]:
        found = []
        for path in wanted:
            names = [
                name
                for name in sorted(self._files)
                if name == path or (path.endswith("/") and name.startswith(path))
            ]
            if not names:
                raise BadOutput(f"output '{path}' was not written")
            for name in names:
                data = self._files[name]
                if name in self._run.changing and not self._over.done():
                    data = self._files[name] = data + b"."
                sha256 = hashlib.sha256(data).hexdigest()
                (into / sha256).write_bytes(data)
                found.append(OutputFile(name, sha256, len(data)))
        return found

    async def read_end(self, name: str, most_bytes: int) -> bytes:
        return self._files.get(name, b"")[-most_bytes:]

    async def remove(self) -> None:
        await self.kill()
        self._runtime.live.discard(self)


class FakeRunner:
    forks = True

    def __init__(self, runtime: FakeRuntime) -> None:
        self._runtime = runtime
        self._functions: dict[str, bytes] = {}
        self._calls: list[FunctionCall] = []
        self._wake = asyncio.Event()
        self._over: asyncio.Future[SandboxExit] = asyncio.get_running_loop().create_future()
        self.variables: Sequence[tuple[str, str]] | None = None

    async def assign(self, variables: Sequence[tuple[str, str]]) -> None:
        if self.variables is not None:
            raise SandboxFailed("a sandbox serves one user: this one is assigned already")
        if self._over.done():
            raise SandboxFailed("the sandbox ended before it was needed")
        self.variables = variables

    def memory_used(self) -> int:
        return FAKE_BYTES

    async def define(self, function: str, pickled: bytes) -> None:
        self._functions[function] = pickled

    async def send(self, calls: Sequence[FunctionCall]) -> None:
        self._calls.extend(calls)
        self._wake.set()

    async def events(self) -> AsyncIterator[Sequence[CallEvent]]:
        while not self._over.done():
            await self._wake.wait()
            self._wake.clear()
            calls, self._calls = self._calls, []
            if calls and not self._over.done():
                yield [self._answer(call) for call in calls]

    def _answer(self, call: FunctionCall) -> CallAnswer:
        printed, complained = io.StringIO(), io.StringIO()
        raised, text = False, ""
        as_data = self._functions[call.function].endswith(RESULTS_AS_DATA)
        arguments = call.arguments
        if call.arguments_file is not None:
            arguments = call.arguments_file.read_bytes()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complained):
            try:
                args, kwargs = pickle.loads(arguments)
                result = pickle.loads(self._functions[call.function])(*args, **kwargs)
                value = encoding.encode(result, pickle.dumps) if as_data else pickle.dumps(result)
            except Exception as failure:  # noqa: BLE001 - the answer of the call
                raised, text = True, traceback.format_exc()
                value = encoding.encode_exception(failure) if as_data else pickle.dumps(failure)
        streams = ((1, printed.getvalue().encode()), (2, complained.getvalue().encode()))
        output = tuple((number, data) for number, data in streams if data)
        if len(value) <= INLINE_LIMIT_BYTES:
            return CallAnswer(call.number, raised, value, text, 1, output)
        path = self._runtime.values / f"{id(self)}-{call.number}"
        path.write_bytes(value)
        return CallAnswer(call.number, raised, b"", text, 1, output, path)

    async def ended(self) -> SandboxExit:
        return await asyncio.shield(self._over)

    async def kill(self) -> None:
        if not self._over.done():
            self._over.set_result(SandboxExit(137))
        self._wake.set()

    async def remove(self) -> None:
        await self.kill()
        self._runtime.live.discard(self)


class FakeRuntime(PlainRuntime):
    """`runs` defines each command line; an unknown one exits with 127."""

    name = "fake"
    networks = frozenset({Network.NONE})
    abilities = frozenset({RuntimeAbility.GPUS, RuntimeAbility.WARM_RUNNERS})

    def __init__(
        self,
        values: Path,
        runs: Mapping[tuple[str, ...], FakeRun] | None = None,
        tier: Tier = Tier.CONTAINER,
    ) -> None:
        self.values = values
        self.tier = tier
        self.live: set[FakeCommand | FakeRunner] = set()
        self.warmed: list[FakeRunner] = []  # all that were started
        self._runs = dict(runs or {})

    def use_gpus(self, gpus: Sequence[Gpu]) -> None:
        del gpus

    async def start_command(self, job: CommandJob) -> CommandSandbox:
        inputs = {staged.path: staged.source.read_bytes() for staged in job.inputs}
        missing = FakeRun(((2, f"{job.argv[0]}: not found\n".encode()),), exit_code=127)
        command = FakeCommand(self._runs.get(job.argv, missing), inputs, self)
        self.live.add(command)
        return command

    async def start_runner(self, job: RunnerJob) -> RunnerSandbox:
        runner = FakeRunner(self)
        await runner.assign(job.env)
        self.live.add(runner)
        return runner

    async def warm_runner(self, job: RunnerJob, meanwhile: SandboxLimits) -> WarmRunner:
        assert not job.env, "a warm runner has no user yet"
        assert meanwhile.memory_bytes <= job.limits.memory_bytes
        runner = FakeRunner(self)
        self.live.add(runner)
        self.warmed.append(runner)
        return runner

    async def sweep(self) -> None:
        for name in os.listdir(self.values):
            (self.values / name).unlink()

    async def close(self) -> None:
        for each in list(self.live):
            await each.remove()

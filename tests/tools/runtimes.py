"""What the runtime tests share: a pool of runtimes to run a contract over, and short ways to use them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime, wheels_bwrap
from gpool.agent.runtime.docker.containers import Gvisor
from gpool.agent.runtime.docker.runtime import DockerRuntime
from gpool.agent.runtime.microvm.runtime import MicrovmRuntime
from gpool.agent.runtime.process import ProcessRuntime
from gpool.agent.runtime.protocol import (
    CallAnswer,
    CallOutput,
    CommandJob,
    FunctionCall,
    RunnerJob,
    RunnerSandbox,
    SandboxExit,
    SandboxLimits,
    StagedInput,
)
from gpool.agent.runtime.runner_calls import PYTHON
from gpool.client.values import RESULTS_AS_DATA
from gpool.testing.fake_runtime import FakeRun, FakeRuntime
from tests.tools import engines

LIMITS = SandboxLimits(cpu_milli=2000, memory_bytes=512 << 20, disk_bytes=256 << 20)
PATIENCE_S = 600
"""For what only has to come about: so that a test ends, however busy the machine is."""
T = TypeVar("T")

RUNS: dict[tuple[str, ...], FakeRun] = {
    ("sh", "-c", "echo hello; echo oops >&2; exit 7"): FakeRun(
        ((1, b"hello\n"), (2, b"oops\n")), exit_code=7
    ),
    ("sh", "-c", "kill -TERM $$"): FakeRun(exit_code=143),
    ("sh", "-c", "echo up; exec sleep 1000"): FakeRun(((1, b"up\n"),), waits=True),
    ("sh", "-c", "cat in/a.txt > b.txt; mkdir -p m/n; echo 1 > m/x; echo 2 > m/n/y"): FakeRun(
        files={"b.txt": b"given", "m/x": b"1\n", "m/n/y": b"2\n"}
    ),
}


ENGINES = {"docker": "docker", "podman": "podman", "gvisor": "docker"}


def start_engine(kind: str) -> None:
    """Before a child process makes a runtime of this kind: the engine is then ours, and does not end with the child."""
    if kind in ENGINES:
        engines.shared_engine(ENGINES[kind])


def _contained(kind: str, gvisor: Gvisor) -> Callable[[Path], DockerRuntime]:
    """Containers of this process's own engine, from an image with this Python."""
    return lambda data: DockerRuntime(
        data,
        engine=engines.shared_engine(kind).address,
        default_image=engines.IMAGE,
        gvisor=gvisor,
        registries=("localhost:1",),  # where nobody listens
    )


def microvm_disks() -> Path:
    """Where tests keep guests' disks from one run to the next: they take half a minute to build."""
    folder = Path(tempfile.gettempdir()) / f"gpool-tests-microvm-{os.geteuid()}"
    folder.mkdir(mode=0o711, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to somebody else; remove it")
    return folder


MAKERS: dict[str, Callable[[Path], Any]] = {
    "bubblewrap": BubblewrapRuntime,
    "bubblewrap's wheel": lambda data: BubblewrapRuntime(data, bwrap=str(wheels_bwrap())),
    "process": ProcessRuntime,
    "docker": _contained("docker", Gvisor.NEVER),
    "podman": _contained("podman", Gvisor.NEVER),
    "gvisor": _contained("docker", Gvisor.ALWAYS),
    "microvm": lambda data: MicrovmRuntime(data, disks=microvm_disks()),
    "fake": lambda data: FakeRuntime(data, RUNS),
}

NEEDS = {"docker": "docker", "podman": "podman", "gvisor": "gvisor", "microvm": "qemu"}
"""The component that a runtime of this name needs here; see `tests.tools.components`."""

PATIENCE_FOR_S: dict[str, float] = {"microvm": 900}
"""A guest's disks are built first, and an emulated machine boots slowly beside other tests."""


def within(work: Awaitable[T], patience_s: float = PATIENCE_S) -> T:
    async def patient() -> T:
        async with asyncio.timeout(patience_s):
            return await work

    return asyncio.run(patient())


def using(kind: str, data: Path, work: Callable[[Any], Awaitable[T]]) -> T:
    """Make the runtime, use it, close it, and see that nothing of it is left."""
    start_engine(kind)  # before the patience begins: what it takes is the engine's own matter

    async def whole() -> T:
        runtime = MAKERS[kind](data)
        await runtime.sweep()
        try:
            result = await work(runtime)
        finally:
            await runtime.close()
        assert left_over(data) == []
        return result

    return within(whole(), PATIENCE_FOR_S.get(kind, PATIENCE_S))


def left_over(data: Path) -> list[Path]:
    folders = (
        "sandboxes",
        "values",
        "processes",
        "process-values",
        "containers",
        "container-values",
        "microvms",
        "microvm-values",
    )
    return [path for name in folders for path in (data / name).glob("*")]


@dataclass(slots=True)
class Ran:
    ended: SandboxExit
    out: bytes
    err: bytes
    outputs: dict[str, bytes] = field(default_factory=dict)


async def command(
    runtime: Any,
    *argv: str,
    env: Sequence[tuple[str, str]] = (),
    inputs: Sequence[StagedInput] = (),
    wanted: Sequence[str] = (),
    into: Path | None = None,
    limits: SandboxLimits = LIMITS,
) -> Ran:
    sandbox = await runtime.start_command(CommandJob(argv, tuple(env), tuple(inputs), (), limits))
    try:
        streams = {1: bytearray(), 2: bytearray()}
        async for stream, data in sandbox.output():
            streams[stream] += data
        ran = Ran(await sandbox.ended(), bytes(streams[1]), bytes(streams[2]))
        if into is not None:
            for found in await sandbox.collect(wanted, into):
                data = (into / found.sha256).read_bytes()
                assert hashlib.sha256(data).hexdigest() == found.sha256
                assert len(data) == found.size_bytes
                ran.outputs[found.path] = data
        return ran
    finally:
        await sandbox.remove()
        await sandbox.remove()


class Caller:
    """A runner with short words: define once, call, gather answers."""

    def __init__(self, runner: RunnerSandbox) -> None:
        self.runner = runner
        self.as_data = False  # ask for values as data, not pickled
        self.printed: list[CallOutput] = []
        self._number = 0

    async def send(self, function: Callable[..., object], *calls: tuple[object, ...]) -> list[int]:
        pickled = cloudpickle.dumps(function) + (RESULTS_AS_DATA if self.as_data else b"")
        name = hashlib.sha256(pickled).hexdigest()
        await self.runner.define(name, pickled)
        numbers = range(self._number + 1, self._number + 1 + len(calls))
        self._number += len(calls)
        await self.runner.send(
            [
                FunctionCall(number, name, pickle.dumps((args, {})))
                for number, args in zip(numbers, calls, strict=True)
            ]
        )
        return list(numbers)

    async def answers(self, count: int) -> list[CallAnswer]:
        found: list[CallAnswer] = []
        if count:
            async for batch in self.runner.events():
                found += [event for event in batch if isinstance(event, CallAnswer)]
                self.printed += [event for event in batch if isinstance(event, CallOutput)]
                if len(found) >= count:
                    break
        return found

    def said(self, answer: CallAnswer) -> tuple[tuple[int, bytes], ...]:
        """All that a call printed: what it was slow to finish was sent ahead."""
        ahead = [(each.stream, each.data) for each in self.printed if each.number == answer.number]
        joined: list[tuple[int, bytes]] = []
        for stream, data in [*ahead, *answer.output]:
            if joined and joined[-1][0] == stream:
                data = joined.pop()[1] + data
            joined.append((stream, data))
        return tuple(joined)

    async def call(self, function: Callable[..., object], *args: object) -> CallAnswer:
        await self.send(function, args)
        return (await self.answers(1))[0]


async def caller(
    runtime: Any,
    limits: SandboxLimits = LIMITS,
    *,
    preload: Sequence[str] = (),
    env: Sequence[tuple[str, str]] = (),
) -> Caller:
    job = RunnerJob(PYTHON, tuple(env), (), limits, preload=tuple(preload))
    return Caller(await runtime.start_runner(job))


@contextlib.contextmanager
def agent_of(code: str, **words: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process that plays an agent, once it has said that something of it is up; it never outlives the block."""
    with subprocess.Popen(
        [sys.executable, "-c", code.format(**words)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as agent:
        try:
            assert agent.stdout is not None
            assert agent.stdout.readline() in (b"up\n", b"asked\n")
            yield agent
        finally:
            agent.kill()


def processes_with(word: str) -> list[int]:
    """Ids of processes whose command line holds the word, ours left out."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if word.encode() in line:
                found.append(int(name))
    return found

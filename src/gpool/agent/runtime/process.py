"""No isolation at all: for tasks of the node's own owner, when the owner asks for it. It promises only a clean end.

The launcher puts a guardian above each command: whatever the command starts, however it detaches itself, dies with
the command, with the guardian's order to stop, and with the agent.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import gpool
from gpool.agent.runtime.bubblewrap.launcher_client import (
    LAUNCHER_DIED,
    Launcher,
    LaunchOrder,
    ProcessExit,
    StartedProcess,
)
from gpool.agent.runtime.devices import visible_devices
from gpool.agent.runtime.protocol import (
    CommandJob,
    CommandSandbox,
    RunnerJob,
    RunnerSandbox,
    SandboxExit,
    SandboxFailed,
    SandboxLimits,
)
from gpool.agent.runtime.runner_calls import RunnerHooks, must_have, open_runner
from gpool.agent.runtime.running_command import RunningCommand, command_pipes
from gpool.agent.runtime.work_directory import WorkDirectory, clear
from gpool.core.model import EndReason, Gpu, Network, Tier

RUNNER = Path(__file__).parents[1] / "runner" / "serve.py"


class ProcessRuntime:
    """A `Runtime`. Make it once, in the agent's main thread; it starts its launcher at the first command."""

    name = "process"
    tier = Tier.NONE
    networks = frozenset({Network.NONE})
    images = False
    gives_up = False

    def __init__(self, data_dir: Path, *, gpus: Sequence[Gpu] = ()) -> None:
        self.use_gpus(gpus)
        self._places = data_dir.resolve() / "processes"
        self._values = data_dir.resolve() / "process-values"
        for path in (self._places, self._values):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._launcher = Launcher(place="", binds=(), seccomp=b"")
        self._made = 0

    def use_gpus(self, gpus: Sequence[Gpu]) -> None:
        """What the machine has now; sandboxes that run keep what they were given."""
        self._gpus = {gpu.index: gpu for gpu in gpus}

    async def start_command(self, job: CommandJob) -> CommandSandbox:
        _must_be_plain(job)
        place = self._make(with_values=False)
        ours: tuple[int, ...] = ()
        try:
            if job.inputs:
                await asyncio.to_thread(place.stage, job.inputs)
            pipes, ours = command_pipes()
            started = await self._start(place, job.argv, job, pipes)
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            place.remove()
            raise
        return RunningCommand(
            started,
            (ours[0], ours[1]),
            place,
            disk_bytes=job.limits.disk_bytes,
            judge=_judge,
            release=lambda: None,
        )

    async def start_runner(self, job: RunnerJob) -> RunnerSandbox:
        _must_be_plain(job)
        must_have(job.python)
        place = self._make(with_values=True)

        async def start(descriptors: Sequence[int], numbers: Sequence[int]) -> StartedProcess:
            words = [str(number) for number in numbers]
            argv = [sys.executable, "-B", str(RUNNER), "guarded", *words]
            return await self._start(place, argv, job, descriptors)

        keeping = RunnerHooks(place, self._values, job.limits.disk_bytes, _judge, lambda: None)
        return await open_runner(start, keeping, job.preload)

    async def sweep(self) -> None:
        await asyncio.to_thread(clear, self._places, self._values)

    async def close(self) -> None:
        """End every command and the launcher; the runtime is of no use afterwards."""
        await self._launcher.close()

    def _make(self, *, with_values: bool) -> WorkDirectory:
        self._made += 1
        place = WorkDirectory(self._places / f"{os.getpid()}-{self._made}", os.geteuid())
        place.make(with_values=with_values)
        (place.root / "tmp").mkdir(mode=0o700)
        return place

    async def _start(
        self,
        place: WorkDirectory,
        argv: Sequence[str],
        job: CommandJob | RunnerJob,
        descriptors: Sequence[int],
    ) -> StartedProcess:
        variables = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(place.work),
            "LANG": "C.UTF-8",
            "TMPDIR": str(place.root / "tmp"),
            "PYTHONPATH": _source(),
            "CUDA_VISIBLE_DEVICES": visible_devices(self._gpus, job.slices),
        }
        return await self._launcher.start(
            LaunchOrder(
                mode="process",
                argv=argv,
                descriptors=descriptors,
                limits=_rlimits(job.limits),
                env=variables | dict(job.env),
                cwd=str(place.work),
            )
        )


def _must_be_plain(job: CommandJob | RunnerJob) -> None:
    """Environments lie at a path of their own and lanes wall a network off: neither goes without namespaces."""
    if job.environment is not None or job.network is not None:
        raise SandboxFailed("without isolation there is only the agent's own Python and network")


def _source() -> str:
    """Where gpool itself lies, when it is not installed among the packages."""
    source = Path(gpool.__file__).resolve().parents[1]
    return "" if source == Path(sysconfig.get_path("purelib")).resolve() else str(source)


def _rlimits(limits: SandboxLimits) -> list[tuple[int, int]]:
    return [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_FSIZE, limits.disk_bytes),
        (resource.RLIMIT_DATA, limits.memory_bytes),
    ]


def _judge(exit: ProcessExit, head: bytes) -> SandboxExit:  # noqa: ARG001 - the same shape as bubblewrap's
    if exit.lost:
        return SandboxExit(exit.code, EndReason.SANDBOX_FAILED, LAUNCHER_DIED)
    return SandboxExit(exit.code)

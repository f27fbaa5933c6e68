"""The process runtime: no isolation, for tasks of the node's owner, if the owner allows it.

A supervisor above each command ends every descendant, however detached, with the command, on order, and with the agent.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import gpool
from gpool.agent.machine.numa import NumaNode, numa_nodes, pinned_cpus
from gpool.agent.runtime import cgroups
from gpool.agent.runtime.bubblewrap.launcher_client import (
    LAUNCHER_DIED,
    LaunchedProcess,
    Launcher,
    LaunchOrder,
    ProcessExit,
    StartedProcess,
)
from gpool.agent.runtime.descriptors import close_all, command_pipes
from gpool.agent.runtime.devices import visible_variables
from gpool.agent.runtime.protocol import (
    PROGRESS_FILE,
    PROGRESS_VARIABLE,
    TASK_VARIABLES,
    CommandJob,
    CommandSandbox,
    PlainRuntime,
    RunnerJob,
    RunnerSandbox,
    RuntimeAbility,
    SandboxExit,
    SandboxFailed,
    SandboxLimits,
    thread_variables,
)
from gpool.agent.runtime.runner_calls import RunnerHooks, must_have, open_runner
from gpool.agent.runtime.running_command import RunningCommand
from gpool.agent.runtime.slots import SandboxSlot, SlotPool, own_uids
from gpool.agent.runtime.work_directory import WorkDirectory
from gpool.core.model import EndReason, Gpu, Network, Tier

RUNNER = Path(__file__).parents[1] / "runner" / "serve.py"


class ProcessRuntime(PlainRuntime):
    """Make it in the main thread."""

    name = "process"
    tier = Tier.NONE
    networks = frozenset({Network.NONE})
    abilities = frozenset({RuntimeAbility.GPUS})

    def __init__(
        self,
        data_dir: Path,
        *,
        gpus: Sequence[Gpu] = (),
        numa: Sequence[NumaNode] | None = None,
    ) -> None:
        self._numa = numa_nodes() if numa is None else numa
        self.use_gpus(gpus)
        data = data_dir.resolve()
        self._slots = SlotPool(
            data / "processes", data / "process-values", uid_of=own_uids(None), mode=0o700
        )
        self._launcher = Launcher(place="", binds=(), seccomp=b"")

    def use_gpus(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = {gpu.index: gpu for gpu in gpus}

    async def start_command(self, job: CommandJob) -> CommandSandbox:
        _must_be_plain(job)
        slot, place = self._take(with_values=False)
        ours: tuple[int, ...] = ()
        try:
            if job.inputs:
                await asyncio.to_thread(place.stage, job.inputs)
            pipes, ours = command_pipes()
            started = await self._start(place, job.argv, job, pipes)
        except BaseException:
            close_all(ours)
            self._slots.discard(slot, place)
            raise
        return RunningCommand(
            started,
            (ours[0], ours[1]),
            place,
            disk_bytes=job.limits.disk_bytes,
            judge=_judge,
            release=lambda: self._slots.release(slot),
        )

    async def start_runner(self, job: RunnerJob) -> RunnerSandbox:
        _must_be_plain(job)
        must_have(job.python)
        slot, place = self._take(with_values=True)

        async def start(descriptors: Sequence[int], numbers: Sequence[int]) -> StartedProcess:
            words = [str(number) for number in numbers]
            argv = [sys.executable, "-B", str(RUNNER), "guarded", *words]
            return await self._start(place, argv, job, descriptors)

        hooks = RunnerHooks(
            place,
            self._slots.values,
            job.limits.disk_bytes,
            _judge,
            lambda: self._slots.release(slot),
        )
        return await open_runner(start, hooks, job.preload)

    async def sweep(self) -> None:
        await asyncio.to_thread(self._slots.sweep)

    async def close(self) -> None:
        await self._launcher.close()

    def _take(self, *, with_values: bool) -> tuple[SandboxSlot, WorkDirectory]:
        slot, place = self._slots.take(with_values=with_values)
        (place.root / "tmp").mkdir(mode=0o700)
        return slot, place

    async def _start(
        self,
        place: WorkDirectory,
        argv: Sequence[str],
        job: CommandJob | RunnerJob,
        descriptors: Sequence[int],
    ) -> LaunchedProcess:
        variables = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(place.work),
            **dict(TASK_VARIABLES),
            PROGRESS_VARIABLE: str(place.work / PROGRESS_FILE),
            **dict(thread_variables(job.limits, job.slices)),
            "TMPDIR": str(place.root / "tmp"),
            "PYTHONPATH": _source(),
            **visible_variables(self._gpus, job.slices),
        }
        return await self._launcher.start(
            LaunchOrder(
                mode="process",
                argv=argv,
                descriptors=descriptors,
                limits=_rlimits(job.limits),
                env=variables | dict(job.env),
                cwd=str(place.work),
                cpus=pinned_cpus(self._gpus, job.slices, job.limits.cpu_milli, self._numa),
            )
        )


def _must_be_plain(job: CommandJob | RunnerJob) -> None:
    if job.environment is not None or job.network is not None:
        raise SandboxFailed(
            "the process runtime has only the agent's own Python and network; ask for tier container"
        )


def _source() -> str:
    source = Path(gpool.__file__).resolve().parents[1]
    return "" if source == Path(sysconfig.get_path("purelib")).resolve() else str(source)


def _rlimits(limits: SandboxLimits) -> list[tuple[int, int]]:
    return [*cgroups.rlimits(limits), (resource.RLIMIT_DATA, limits.memory_bytes)]


def _judge(exit: ProcessExit, head: bytes) -> SandboxExit:  # noqa: ARG001 - the signature of all judges
    if exit.lost:
        return SandboxExit(exit.code, EndReason.SANDBOX_FAILED, LAUNCHER_DIED)
    return SandboxExit(exit.code)

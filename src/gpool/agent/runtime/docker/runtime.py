"""Sandboxes by Docker, Podman or gVisor under either: for tasks that name an image. Refuses environments.

Who sees what. The engine makes a container from an image whose root is read-only; of the host it sees its own work
directory, for functions our runner, and the GPUs of the lease. It runs under a uid that nothing else on the host uses
(a root agent), or as the agent's own (any other). The engine itself, which is root's, is told the task's variables:
that cannot be avoided with an engine, and is the reason why bubblewrap is the default. A guard beside the agent
removes its containers when it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import resource
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import structlog

from gpool.agent import runner as runner_package
from gpool.agent.network.policy import is_refused
from gpool.agent.runtime import cgroups
from gpool.agent.runtime.bubblewrap.launcher_client import Exit, Started
from gpool.agent.runtime.bubblewrap.runtime import NOT_EXECUTABLE, NOT_FOUND, UIDS_A_BLOCK, Uids
from gpool.agent.runtime.devices import visible_devices
from gpool.agent.runtime.disk_watchdog import DiskWatch, Watched
from gpool.agent.runtime.docker.confinement import (
    JOINS,
    VALUES_AT,
    WORK_AT,
    Box,
    profile_text,
    request,
)
from gpool.agent.runtime.docker.containers import Contained, undivided
from gpool.agent.runtime.docker.engine import Engine, usual_socket
from gpool.agent.runtime.docker.gpu_devices import DRIVER_AT, graphics
from gpool.agent.runtime.docker.guard_client import Guarding
from gpool.agent.runtime.docker.images import Image, Pull, registry_of
from gpool.agent.runtime.docker.network import CANNOT, Holders, names_in, path_of, why_never
from gpool.agent.runtime.docker.probe_cache import Probe
from gpool.agent.runtime.docker.streams import pour, relay
from gpool.agent.runtime.protocol import (
    CommandJob,
    CommandSandbox,
    Ended,
    GpuSeat,
    RunnerJob,
    RunnerSandbox,
    Said,
    SandboxFailed,
)
from gpool.agent.runtime.runner_calls import Keeping, open_runner
from gpool.agent.runtime.running_command import Command, command_pipes
from gpool.agent.runtime.work_directory import Workplace, clear
from gpool.core.model import EndReason, Fault, Gpu, Network, Tier

BRIDGE = Path(__file__).with_name("bridge.py")
RUNNER = Path(str(runner_package.__file__)).parent
CLOUDPICKLE = Path(str(cloudpickle.__file__)).parent
HOME = "/opt/gpool"  # inside
AGENT_LABEL, BOOT_LABEL = "pool.gpool.agent", "pool.gpool.boot"
REMAPPED_UID = 1000  # inside, where the engine has a user namespace: the first of ours
THREADS = 16
PULLS = 4  # at once; in threads of their own, so that a slow registry holds up nothing but pulls
RESOLVE_WITHIN_S = 10.0
ENGINE_WENT = "the container engine on that node went away, and the sandbox with it"
CATATONIT, NOT_STARTED = "ERROR (catatonit:", "failed to exec pid1"
CHECK = (
    "import sys; needs, bridge = sys.argv[1:3]; has = '%d.%d' % sys.version_info[:2]\n"
    "if has != needs: sys.exit('the image has Python ' + has + ', the function needs ' + needs)\n"
    "del sys.argv[:2]\n"
    "with open(bridge, 'rb') as text: code = compile(text.read(), bridge, 'exec')\n"
    "exec(code)"
)
"""Runs under any Python 3, so that a wrong one is named instead of failing in a strange way."""


T = TypeVar("T")
log = structlog.get_logger(__name__)


class Gvisor(StrEnum):
    """Whether containers run under gVisor: where it works, always, or never."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class _Slot:
    number: int
    uid: int  # on the host
    inside: int  # in the container


@dataclass(slots=True)
class _Pulling:
    """One pull, and who hears of it."""

    work: asyncio.Future[Image]
    heard: list[Said]
    layers: int = -1  # done, as they were last told


class BadImage(SandboxFailed):
    """No node like this one will ever have it."""

    reason = EndReason.BAD_INPUT


class DockerRuntime:
    """A `Runtime`. Make it once, in the agent's main thread; it starts its guard at the first container."""

    name = "docker"
    tier = Tier.CONTAINER
    images = True
    gives_up = True

    def __init__(
        self,
        data_dir: Path,
        *,
        gpus: Sequence[Gpu] = (),
        engine: str = "",
        default_image: str = "",
        gvisor: Gvisor = Gvisor.AUTO,
        told: Callable[[Pull], None] | None = None,
        registries: Sequence[str] = (),
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`told` hears of pulls, on the loop's thread. `default_image`: for tasks that name none.

        `registries` may be pulled from though they lie on private addresses; a consumer's word for one is not enough:
        the engine would dial whatever it names, in the owner's own network.
        """
        self._registries = frozenset(registries)
        self._engine = Engine(engine or usual_socket(environ))
        self._default_image = default_image
        self._gvisor = gvisor
        runsc = [name for name in self._engine.facts.runtimes if name.startswith("runsc")]
        if gvisor is Gvisor.ALWAYS and not runsc:
            raise SandboxFailed("the engine has no runtime runsc: install gVisor and name it there")
        self._runsc = runsc if gvisor is not Gvisor.NEVER else []
        self._told = told
        self.use_gpus(gpus)
        self._root = os.geteuid() == 0 and not self._engine.facts.rootless
        remapped = self._engine.facts.first_uid
        self._uids = Uids() if self._root and not remapped else None
        self._places = data_dir.resolve() / "containers"
        self._values = data_dir.resolve() / "container-values"
        for path, mode in ((self._places, 0o711), (self._values, 0o700)):
            path.mkdir(mode=mode, parents=True, exist_ok=True)
            path.chmod(mode)
        self._podman = self._engine.facts.kind == "podman"
        self._seccomp = profile_text()
        self._seccomp_of_gangs = profile_text(interfaces=True)
        if self._podman:
            plain, gangs = (data_dir.resolve() / f"seccomp{of}.json" for of in ("", "-of-gangs"))
            plain.write_text(self._seccomp)
            gangs.write_text(self._seccomp_of_gangs)
            self._seccomp, self._seccomp_of_gangs = str(plain), str(gangs)
        most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        self._most_processes = most if self._podman and most != resource.RLIM_INFINITY else 0
        self._tag = hashlib.sha256(bytes(self._places)).hexdigest()[:24]
        self._boot = secrets.token_hex(12)
        self._guard = Guarding(self._engine.socket, f"{BOOT_LABEL}={self._boot}")
        ours, boot = (AGENT_LABEL, self._tag), (BOOT_LABEL, self._boot)
        self._holders = Holders(self._engine, ours, boot, self._guard.stand)
        self._disk = disk_device(self._places)
        self._watch = DiskWatch(self._places)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="engine")
        self._prober = ThreadPoolExecutor(1, thread_name_prefix="probe")
        self._lanes = Probe(self._why_no_lanes, self._prober.submit, clock)
        self._pullers = ThreadPoolExecutor(PULLS, thread_name_prefix="pull")
        self._pulls: dict[str, _Pulling] = {}
        self._running: set[Contained] = set()
        self._free: list[_Slot] = []
        self._slots = self._made = 0

    @property
    def networks(self) -> frozenset[Network]:
        """Whether lanes are entered; with Docker that is tried when first asked, which takes a second, and now and then anew."""
        given = {Network.NONE} if self._lanes.why_not() else {Network.NONE, Network.EGRESS}
        return frozenset(given)

    def _why_no_lanes(self) -> str:
        facts, always = self._engine.facts, self._gvisor is Gvisor.ALWAYS
        why = why_never(facts, root=self._root, gvisor=always)
        if not why and not self._podman:
            why = self._holders.why_not()
        if why:
            log.info("no_lanes_for_images", why=why)
        return why

    @property
    def containers(self) -> tuple[str, ...]:
        """The ids of those that run now; from any thread."""
        return tuple(one.container for one in tuple(self._running))

    def use_gpus(self, gpus: Sequence[Gpu]) -> None:
        """What the machine has now; sandboxes that run keep what they were given."""
        self._gpus = {gpu.index: gpu for gpu in gpus}

    # ---- the door

    async def start_command(self, job: CommandJob) -> CommandSandbox:
        image = await self._image(job)
        slot, place = self._take(with_values=False)
        watched = Watched(place.root, job.limits.disk_bytes)
        ours: tuple[int, ...] = ()
        theirs: tuple[int, ...] = ()
        try:
            if job.inputs:
                staging = partial(place.stage, job.inputs)
                await undivided(self._threads, staging, lambda _: None)
            theirs, ours = command_pipes()
            box = self._box(slot, place, job, image, job.argv)
            container, channel = await self._start(box)
            os.close(theirs[0])
            streams = pour(channel, {1: theirs[1], 2: theirs[2]}, partial(_explain, job.argv[0]))
            started = self._follow(container, streams, watched, job.seat)
        except BaseException:
            for descriptor in (*theirs, *ours):
                os.close(descriptor)
            self._give_back(slot, place)
            raise
        return Command(
            started,
            (ours[0], ours[1]),
            place,
            disk_bytes=job.limits.disk_bytes,
            judge=partial(_judge, started, watched, job.seat),
            release=lambda: self._release(slot, watched),
        )

    async def start_runner(self, job: RunnerJob) -> RunnerSandbox:
        image = await self._image(job)
        slot, place = self._take(with_values=True)
        watched = Watched(place.root, job.limits.disk_bytes)
        made: list[Contained] = []

        async def start(descriptors: Sequence[int], numbers: Sequence[int]) -> Started:  # noqa: ARG001 - the bridge makes its own
            argv = ["python3", "-B", "-c", CHECK, job.python, f"{HOME}/bridge.py"]
            argv += [f"{HOME}/runner/serve.py", f"{HOME}/packages"]
            box = self._box(slot, place, job, image, argv)
            box = replace(
                box,
                has_init=False,
                takes_input=True,
                binds=(
                    *box.binds,
                    (str(place.values), VALUES_AT, True),
                    (str(BRIDGE), f"{HOME}/bridge.py", False),
                    (str(RUNNER), f"{HOME}/runner", False),
                    (str(CLOUDPICKLE), f"{HOME}/packages/cloudpickle", False),
                ),
            )
            try:
                container, channel = await self._start(box)
            except BaseException as failure:
                for descriptor in descriptors:
                    os.close(descriptor)
                if isinstance(failure, SandboxFailed) and _says_missing(str(failure)):
                    raise SandboxFailed(_no_python(job)) from failure
                raise
            streams = relay(channel, descriptors)
            started = self._follow(container, streams, watched, job.seat)
            made.append(started)
            return started

        keeping = Keeping(
            place,
            self._values,
            job.limits.disk_bytes,
            lambda exit, head: _judge(made[0], watched, job.seat, exit, head),
            lambda: self._release(slot, watched),
        )
        return await open_runner(start, keeping, job.preload)

    async def sweep(self) -> None:
        """Containers first: what lies in their work directories is still in use until then."""
        await self._call(self._sweep)

    async def wrong(self) -> str:
        """Whether the engine answers: more would need an image, and those are the tasks' own."""
        try:
            await self._call(self._engine.ping)
        except SandboxFailed as silent:
            return str(silent)
        return ""

    async def close(self) -> None:
        """End every sandbox and the guard; the runtime is of no use afterwards."""
        await self._watch.close()
        running = list(self._running)
        await asyncio.gather(*(started.kill() for started in running))
        await asyncio.to_thread(self._prober.shutdown, cancel_futures=True)  # it may use the image
        with contextlib.suppress(SandboxFailed):  # no engine: the next agent's sweep does it
            await self._call(self._holders.close)
        await asyncio.to_thread(self._guard.dismiss)
        self._threads.shutdown()
        self._pullers.shutdown(wait=False, cancel_futures=True)  # the engine goes on or not
        self._engine.close()
        if self._uids is not None:
            self._uids.close()
            self._uids = None

    async def stored(self) -> list[Image]:
        """The images that lie on this node, with their sizes; the engine decides what it keeps."""
        return await self._call(self._engine.images)

    # ---- how

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _sweep(self) -> None:
        for container in self._engine.labelled(f"{AGENT_LABEL}={self._tag}"):
            self._engine.remove(container)
        self._holders.sweep()
        clear(self._places, self._values)

    async def _image(self, job: CommandJob | RunnerJob) -> Image:
        """On the node, pulled when it is not; two tasks that want the same one wait for one pull."""
        if job.environment is not None:
            raise SandboxFailed("the Docker runtime runs images, not environments: name an image")
        if job.lane is not None:
            given = await undivided(self._threads, lambda: self.networks, lambda _: None)
            if Network.EGRESS not in given or len(job.lane.namespaces) != 1:
                raise SandboxFailed(f"{CANNOT}: no network here")
        reference = job.image or self._default_image
        if not reference:
            raise SandboxFailed("the Docker runtime needs an image: name one with image=")
        found = await self._call(partial(self._engine.find, reference))
        if found is not None:
            return found
        await self._must_be_public(registry_of(reference))
        pulling = self._pulls.get(reference)
        if pulling is None:
            loop = asyncio.get_running_loop()

            def told(pull: Pull) -> None:
                with contextlib.suppress(RuntimeError):  # nobody waits any more: the loop has ended
                    loop.call_soon_threadsafe(self._hear, pull)

            work = loop.run_in_executor(self._pullers, self._engine.pull, reference, told)
            pulling = self._pulls[reference] = _Pulling(work, [])
            work.add_done_callback(lambda done: self._pulled(reference, done))
        pulling.heard.append(job.said)
        try:
            return await asyncio.shield(pulling.work)
        finally:
            pulling.heard.remove(job.said)

    async def _must_be_public(self, registry: str) -> None:
        if not registry or registry in self._registries:
            return
        host, _, port = registry.partition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(RESOLVE_WITHIN_S):
                found = await loop.getaddrinfo(host, port or 443, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as unknown:
            raise SandboxFailed(
                f"the registry {registry} has no address on this node: {unknown}"
            ) from unknown
        if any(is_refused(ip_address(one[4][0])) for one in found):
            raise BadImage(
                f"the registry {registry} lies on a private address; nodes pull from public ones, "
                "and from those their owner names in the policy's [images]"
            )

    def _hear(self, pull: Pull) -> None:
        """Everything for whoever made us; for tasks a line for each layer."""
        if self._told is not None:
            self._told(pull)
        pulling = self._pulls.get(pull.image)
        if pulling is not None and len(pull.done) != pulling.layers and not pull.failed:
            pulling.layers = len(pull.done)
            for said in tuple(pulling.heard):
                said(pull.text)

    def _pulled(self, reference: str, done: asyncio.Future[Image]) -> None:
        del self._pulls[reference]
        if not done.cancelled():
            done.exception()  # whoever waited has it

    def _take(self, *, with_values: bool) -> tuple[_Slot, Workplace]:
        if self._free:
            slot = self._free.pop()
        else:
            number, self._slots = self._slots, self._slots + 1
            if number >= UIDS_A_BLOCK:
                raise SandboxFailed(f"more than {UIDS_A_BLOCK} containers at once")
            remapped = self._engine.facts.first_uid
            if self._uids is not None:
                uid = inside = self._uids.first + number
            elif remapped and self._root:
                inside = REMAPPED_UID + number
                uid = remapped + inside
            else:
                uid = inside = os.geteuid()
            slot = _Slot(number, uid, inside)
        self._made += 1
        place = Workplace(self._places / f"{slot.number}-{os.getpid()}-{self._made}", slot.uid)
        place.make(with_values=with_values)
        return slot, place

    def _release(self, slot: _Slot, watched: Watched) -> None:
        self._watch.end(watched)
        self._free.append(slot)

    def _give_back(self, slot: _Slot, place: Workplace) -> None:
        place.remove()
        self._free.append(slot)

    def _box(
        self,
        slot: _Slot,
        place: Workplace,
        job: CommandJob | RunnerJob,
        image: Image,
        argv: Sequence[str],
    ) -> Box:
        facts = self._engine.facts
        gpus = graphics(self._gpus, job.slices, facts.cdi_folders, job.seat)
        variables = {
            "HOME": WORK_AT,
            "LANG": "C.UTF-8",
            "TMPDIR": "/tmp",
            "CUDA_VISIBLE_DEVICES": visible_devices(self._gpus, job.slices),
        }
        seat = dict(job.seat.variables) if job.seat is not None else {}
        if gpus.binds:
            before = dict(image.env).get("LD_LIBRARY_PATH", "")
            variables["LD_LIBRARY_PATH"] = f"{DRIVER_AT}:{before}" if before else DRIVER_AT
        return Box(
            image=image.id,
            argv=argv,
            env=tuple((variables | dict(job.env) | seat).items()),
            user=slot.inside,
            limits=job.limits,
            binds=((str(place.work), WORK_AT, True), *gpus.binds, *names_in(place, job.lane)),
            labels={AGENT_LABEL: self._tag, BOOT_LABEL: self._boot},
            volumes=image.volumes,
            devices=gpus.nodes,
            cdi=gpus.cdi,
            # a uid of its own: counted alone. Podman would otherwise ask for more than the host may allow.
            user_processes=job.limits.processes if self._uids is not None else self._most_processes,
            keep_id=facts.rootless and self._podman,
            disk_device=self._disk,
            lane=job.lane,
        )

    async def _start(self, box: Box) -> tuple[str, socket.socket]:
        await asyncio.to_thread(self._guard.stand)
        # gVisor lets no GPU through, and no lane: it has its own network.
        beyond = bool(box.devices or box.cdi or box.lane is not None)
        under = [] if beyond and self._gvisor is Gvisor.AUTO else self._runsc
        for name in under:
            tried = replace(box, oci_runtime=name)
            try:
                return await undivided(self._threads, partial(self._begin, tried), self._undo)
            except SandboxFailed:
                if self._gvisor is Gvisor.ALWAYS and name == under[-1]:
                    raise
                # Whether it works is seen by starting something (its platform is the owner's choice), of our own:
                # what a consumer sends may start nowhere.
                works = partial(self._holders.start_under, name)
                if not await undivided(self._threads, works, lambda _: None):
                    log.warning("gvisor_given_up", runtime=name)
                    self._runsc = [one for one in self._runsc if one != name]
        return await undivided(self._threads, partial(self._begin, box), self._undo)

    def _begin(self, box: Box) -> tuple[str, socket.socket]:
        """In a thread: the container runs and its streams are open, or there is none."""
        lane = box.lane
        filter_ = self._seccomp_of_gangs if lane is not None and lane.gang else self._seccomp
        with contextlib.ExitStack() as held:
            if lane is not None:
                given = f"ns:{path_of(lane)}"
                if not self._podman:
                    given = JOINS + held.enter_context(self._holders.holding(lane))
                box = replace(box, network=given)
            container = self._engine.create(request(box, filter_, podman=self._podman))
            channel: socket.socket | None = None
            try:
                channel = self._engine.attach(container, with_input=box.takes_input)
                self._engine.start(container)
                if lane is not None:
                    self._holders.check(container, lane, may_be_over=True)
            except BaseException:
                if channel is not None:
                    channel.close()
                self._engine.remove(container)
                raise
        return container, channel

    def _undo(self, begun: tuple[str, socket.socket]) -> None:
        container, channel = begun
        channel.close()
        self._engine.remove(container)

    def _follow(
        self,
        container: str,
        streams: Coroutine[Any, Any, None],
        watched: Watched,
        seat: GpuSeat | None,
    ) -> Contained:
        started = Contained(self._engine, container, self._threads, streams)
        self._running.add(started)
        started.when_over(self._running.discard)
        self._watch.begin(watched, started.kill)
        if seat is not None:
            seat.watch(lambda pid: cgroups.is_in(pid, container), started.kill)
        return started


def disk_device(path: Path) -> str:
    """The whole disk that holds the path, as a device node; "" where it is not one disk."""
    number = os.stat(path).st_dev
    found = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not found.exists():
        return ""
    real = found.resolve()
    if (real / "partition").exists():
        real = real.parent
    node = Path("/dev") / real.name
    return str(node) if node.is_block_device() else ""


def _explain(program: str, head: bytes) -> bytes:
    """Podman's reaper does not name the program it did not find."""
    text = head.decode("utf-8", "replace").strip()
    if text.startswith(CATATONIT) and NOT_STARTED in text:
        return f"gpool: {program}: {text.rpartition(': ')[2]}\n".encode()
    return b""


def _says_missing(text: str) -> bool:
    return "python3" in text and ("not found" in text or "no such file" in text.lower())


def _no_python(job: RunnerJob) -> str:
    image = job.image or "the default image"
    return f"{image} has no python3: a function needs an image with Python {job.python}"


def _judge(
    started: Contained, watched: Watched, seat: GpuSeat | None, exit: Exit, head: bytes
) -> Ended:
    gone = started.gone
    if seat is not None and seat.exceeded:
        return Ended(137, EndReason.OUT_OF_MEMORY, seat.exceeded)
    if watched.exceeded:
        limit = f"it wrote more than its disk limit of {watched.limit_bytes} bytes"
        return Ended(137, EndReason.BAD_OUTPUT, limit)
    if exit.lost or gone is None:
        return Ended(exit.code, EndReason.SANDBOX_FAILED, ENGINE_WENT)
    if gone.out_of_memory and exit.code != 0:
        return Ended(exit.code, EndReason.OUT_OF_MEMORY, "it used more memory than asked for")
    if not exit.ran and not exit.killed:
        said = gone.detail or "it did not start"
        return Ended(exit.code, EndReason.SANDBOX_FAILED, said, fault=Fault.UNCLEAR)
    text = head.decode("utf-8", "replace")
    if exit.code == 1 and text.startswith(CATATONIT) and NOT_STARTED in text:
        return Ended(NOT_FOUND if "No such file" in text else NOT_EXECUTABLE)
    return Ended(exit.code)

"""Containers of one agent. Knows nothing of jobs or work directories."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import structlog

from gpool.agent.network.policy import is_refused
from gpool.agent.runtime.bubblewrap.launcher_client import ProcessExit
from gpool.agent.runtime.docker.confinement import (
    COUNTERS,
    JOINS,
    ContainerSpec,
    profile_text,
    request,
)
from gpool.agent.runtime.docker.engine import ContainerExit, EngineClient
from gpool.agent.runtime.docker.images import ContainerImage, ImagePull, registry_of
from gpool.agent.runtime.docker.network import NamespaceHolders, path_of
from gpool.agent.runtime.protocol import SandboxFailed, StartProgress
from gpool.core.model import EndReason

PULLS = 4  # at once; in their own threads, so that a slow registry delays pulls only
RESOLVE_WITHIN_S = 10.0


class BadImage(SandboxFailed):
    reason = EndReason.BAD_INPUT


@dataclass(slots=True)
class _Pulling:
    work: asyncio.Future[ContainerImage]
    waiting: list[StartProgress]
    layers: int = -1  # finished, as last reported


class ImagePulls:
    """A private address is used only if the owner lists the registry (`registries`): the engine would connect to any host a
    consumer names, in the owner's network.
    """

    def __init__(
        self,
        engine: EngineClient,
        threads: Executor,
        registries: Sequence[str],
    ) -> None:
        self._engine = engine
        self._threads = threads
        self._registries = frozenset(registries)
        self._pullers = ThreadPoolExecutor(PULLS, thread_name_prefix="pull")
        self._pulls: dict[str, _Pulling] = {}

    async def image(self, reference: str, progress: StartProgress) -> ContainerImage:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, self._engine.find, reference)
        if found is not None:
            return found
        await self._must_be_public(registry_of(reference))
        pulling = self._pulls.get(reference)
        if pulling is None:
            step = partial(self._from_thread, loop)
            work = loop.run_in_executor(self._pullers, self._engine.pull, reference, step)
            pulling = self._pulls[reference] = _Pulling(work, [])
            work.add_done_callback(lambda done: self._finished(reference, done))
        pulling.waiting.append(progress)
        try:
            return await asyncio.shield(pulling.work)
        finally:
            pulling.waiting.remove(progress)

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

    def _from_thread(self, loop: asyncio.AbstractEventLoop, pull: ImagePull) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: no task waits any more
            loop.call_soon_threadsafe(self._step, pull)

    def _step(self, pull: ImagePull) -> None:
        pulling = self._pulls.get(pull.image)
        if pulling is not None and len(pull.done) != pulling.layers and not pull.failed:
            pulling.layers = len(pull.done)
            for progress in tuple(pulling.waiting):
                progress(pull.text)

    def _finished(self, reference: str, done: asyncio.Future[ContainerImage]) -> None:
        del self._pulls[reference]
        if not done.cancelled():
            done.exception()  # the waiting tasks have it

    def close(self) -> None:
        self._pullers.shutdown(wait=False, cancel_futures=True)  # the engine may finish a pull


T = TypeVar("T")
GUARD = Path(__file__).with_name("guard.py")
AGENT_LABEL, BOOT_LABEL = "pool.gpool.agent", "pool.gpool.boot"
THREADS = 16
LAST_OUTPUT_S = 0.25
KILLED = 137
log = structlog.get_logger(__name__)


class Gvisor(StrEnum):
    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class ContainerGuard:
    """Keeps `guard.py` running, which removes containers after the agent's death. Blocks; thread-safe."""

    def __init__(self, socket: str, label: str) -> None:
        # -I -S: the standard library only
        self._words = [sys.executable, "-I", "-S", "-B", str(GUARD), socket, label]
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def ensure(self) -> None:
        """Call before a container is made; `SandboxFailed` if it cannot start."""
        with self._lock:
            if self.process is not None and self.process.poll() is None:
                return
            if self.process is not None:
                self.process.communicate()  # it died: only its pipes are left
            self.process = guard = subprocess.Popen(
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={},
                cwd="/",
                start_new_session=True,
            )
            assert guard.stdout is not None
            if guard.stdout.readline() != b"ready\n":
                raise SandboxFailed("the process that removes containers did not start (guard.py)")

    def dismiss(self) -> None:
        with self._lock:
            if self.process is not None:
                self.process.communicate(b"done")
                self.process = None


class RunningContainer:
    """Removed before its end is reported. Make it on the loop, after the start."""

    def __init__(
        self,
        engine: EngineClient,
        container: str,
        threads: Executor,
        streams: Coroutine[Any, Any, None],
    ) -> None:
        self.container = container
        self.exit: ContainerExit | None = None
        self._engine = engine
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[ProcessExit] = self._loop.create_future()
        self._killed = False
        self._streams = self._loop.create_task(streams)
        threading.Thread(target=self._wait, name=f"wait-{container[:12]}", daemon=True).start()

    @property
    def is_over(self) -> bool:
        return self._over.done()

    def when_over(self, tell: Callable[[RunningContainer], None]) -> None:
        self._over.add_done_callback(lambda _: tell(self))

    async def exited(self) -> ProcessExit:
        return await asyncio.shield(self._over)

    async def kill(self) -> None:
        if not self._over.done():
            self._killed = True
            await self._signal("SIGKILL")
        await asyncio.shield(self._over)

    async def warn(self) -> None:
        if not self._over.done():
            await self._signal("SIGTERM")

    async def _signal(self, name: str) -> None:
        with contextlib.suppress(SandboxFailed):  # no engine: `_wait` reports it
            await self._loop.run_in_executor(
                self._threads, self._engine.signal, self.container, name
            )

    def _wait(self) -> None:
        exit: ContainerExit | None = None
        try:
            exit = self._engine.wait(self.container)
            if exit.code == KILLED and not exit.out_of_memory and not self._killed:
                exceeded = self._engine.exceeded_memory(self.container)
                exit = replace(exit, out_of_memory=exceeded)
        except SandboxFailed as lost:
            log.warning("container_lost", container=self.container, error=str(lost))
        try:
            self._engine.remove(self.container)
        except SandboxFailed as refused:
            log.warning("container_not_removed", container=self.container, error=str(refused))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._ended, exit)

    def _ended(self, exit: ContainerExit | None) -> None:
        self._reporting = self._loop.create_task(self._report(exit))

    async def _report(self, exit: ContainerExit | None) -> None:
        """Wait until the last output is in the pipes, unless they are full and not read."""
        await asyncio.wait([self._streams], timeout=LAST_OUTPUT_S)
        self.exit = exit
        if exit is None:
            self._over.set_result(ProcessExit(KILLED, ran=True, killed=self._killed, lost=True))
        else:
            self._over.set_result(ProcessExit(exit.code, ran=exit.ran, killed=self._killed))


def seccomp_profile(data_dir: Path, *, podman: bool) -> str:
    """Text of the profile for Docker, path of a file with it for Podman."""
    if not podman:
        return profile_text()
    path = data_dir / "seccomp.json"
    path.write_text(profile_text())
    return str(path)


class ContainerStarter:
    def __init__(
        self,
        engine: EngineClient,
        labels: dict[str, str],
        profile: str,
        gvisor: Gvisor,
    ) -> None:
        self._engine = engine
        self._profile = profile
        self.gvisor = gvisor
        self.podman = engine.facts.kind == "podman"
        runsc = [name for name in engine.facts.runtimes if name.startswith("runsc")]
        if gvisor is Gvisor.ALWAYS and not runsc:
            raise SandboxFailed("the engine has no runtime runsc: install gVisor and name it there")
        self._runsc = runsc if gvisor is not Gvisor.NEVER else []
        self.guard = ContainerGuard(engine.socket, f"{BOOT_LABEL}={labels[BOOT_LABEL]}")
        agent, boot = ((name, labels[name]) for name in (AGENT_LABEL, BOOT_LABEL))
        self.holders = NamespaceHolders(engine, agent, boot, self.guard.ensure)
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="engine")
        self.running: set[RunningContainer] = set()

    async def start(self, spec: ContainerSpec) -> tuple[str, socket.socket]:
        """A container that does not start is removed."""
        await asyncio.to_thread(self.guard.ensure)
        # gVisor passes no GPU through and has its own network stack.
        beyond = bool(spec.devices or spec.cdi or spec.sandbox_network is not None)
        under = [] if beyond and self.gvisor is Gvisor.AUTO else self._runsc
        for name in under:
            # its /proc is its own: nothing of the host is in it
            binds = [bind for bind in spec.binds if bind[1] != COUNTERS]
            tried = replace(spec, oci_runtime=name, binds=binds)
            try:
                return await undivided(self.threads, partial(self._begin, tried), self._undo)
            except SandboxFailed:
                if self.gvisor is Gvisor.ALWAYS and name == under[-1]:
                    raise
                # Whether this gVisor works at all is tested with a container of the agent's own:
                # a consumer's may start nowhere.
                works = partial(self.holders.start_under, name)
                if not await undivided(self.threads, works, lambda _: None):
                    log.warning("gvisor_disabled", runtime=name)
                    self._runsc = [one for one in self._runsc if one != name]
        return await undivided(self.threads, partial(self._begin, spec), self._undo)

    def _begin(self, spec: ContainerSpec) -> tuple[str, socket.socket]:
        network = spec.sandbox_network
        with contextlib.ExitStack() as held:
            if network is not None:
                given = f"ns:{path_of(network)}"
                if not self.podman:
                    given = JOINS + held.enter_context(self.holders.holding(network))
                spec = replace(spec, network=given)
            container = self._engine.create(request(spec, self._profile, podman=self.podman))
            channel: socket.socket | None = None
            try:
                channel = self._engine.attach(container, with_input=spec.takes_input)
                self._engine.start(container)
                if network is not None:
                    self.holders.check(container, network, may_be_over=True)
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

    def follow(self, container: str, streams: Coroutine[Any, Any, None]) -> RunningContainer:
        started = RunningContainer(self._engine, container, self.threads, streams)
        self.running.add(started)
        started.when_over(self.running.discard)
        return started

    async def kill_all(self) -> None:
        await asyncio.gather(*(started.kill() for started in list(self.running)))

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(SandboxFailed):  # no engine: the next agent's sweep does it
            await loop.run_in_executor(self.threads, self.holders.close)
        await asyncio.to_thread(self.guard.dismiss)
        self.threads.shutdown()


async def undivided(threads: Executor, work: Callable[[], T], undo: Callable[[T], object]) -> T:
    """On cancellation wait for `work` and undo its result: a thread cannot be cancelled."""
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(threads, work)

    async def undone() -> None:
        with contextlib.suppress(SandboxFailed):
            made = await future
            await loop.run_in_executor(threads, undo, made)

    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.shield(loop.create_task(undone()))
        raise

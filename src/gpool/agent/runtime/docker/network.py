"""Sandbox networks for Docker containers, entered by way of a namespace holder. Every step is verified.

Docker accepts no network from outside, but a container may join that of another, which Docker finds through its first
process. So a namespace holder starts first: a container from an empty image, whose only program (the host's nsenter)
moves into the sandbox network and waits. The task's container joins it, so it is in the sandbox network before any
process of the task runs, and never has another. Then the holder is removed. It has one capability, to enter
namespaces, and runs host programs only.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from gpool.agent.runtime.bubblewrap.layout import (
    ETC_TEXTS,
    LOOPBACK_HOSTS,
    processor_counters,
)
from gpool.agent.runtime.docker.confinement import COUNTERS, JOINS, SANDBOX_NAME
from gpool.agent.runtime.docker.engine import EngineClient, EngineFacts
from gpool.agent.runtime.protocol import SandboxFailed, SandboxNetwork
from gpool.agent.runtime.work_directory import WorkDirectory

Json = dict[str, Any]

NETWORK_AT = "/network"  # inside a holder
SYSTEM = ("bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr")
INSIDE = b"inside\n"
WAIT = "echo inside; exec cat"
"""Waits until its input ends, which it does with the agent."""
HOLDER_BYTES = 64 << 20
HOLDER_PROCESSES = 8
KERNEL_BYTES, KERNEL_THREADS = 512 << 20, 512  # of an OCI runtime with its own kernel
WITHIN_S = 60.0
RENEW_AFTER_S = 600.0
RENEW_FAILED_AFTER_S = 60.0  # sooner: the owner may be repairing it
log = structlog.get_logger(__name__)
CANNOT = "this node's container engine cannot enter a sandbox network"


@dataclass(frozen=True, slots=True)
class HostSystem:
    folders: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


def system_of(root: Path = Path("/")) -> HostSystem:
    folders = [name for name in SYSTEM if (root / name).is_dir() and not (root / name).is_symlink()]
    links = [(name, os.readlink(root / name)) for name in SYSTEM if (root / name).is_symlink()]
    return HostSystem(tuple(folders), tuple(links))


def empty_image(system: HostSystem) -> bytes:
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w") as tar:
        for name, target in system.links:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
    return text.getvalue()


def holder_request(
    image: str,
    argv: Sequence[str],
    labels: Mapping[str, str],
    system: HostSystem,
    *,
    network: str = "",
    joins: str = "",
) -> Json:
    """A holder enters `network` (host path of a namespace), or `joins` another container without any capability."""
    shown = [(f"/{name}", f"/{name}") for name in system.folders]
    shown += [(network, NETWORK_AT)] if network else []
    host: Json = {
        "AutoRemove": False,
        "CapAdd": ["SYS_ADMIN"] if network else [],  # required by `setns`
        "CapDrop": ["ALL"],
        "CgroupnsMode": "private",
        "Dns": [] if joins else ["127.0.0.1"],
        "Init": False,
        "IpcMode": "private",
        "LogConfig": {"Type": "none", "Config": {}},
        "Memory": HOLDER_BYTES,
        "MemorySwap": HOLDER_BYTES,
        "Mounts": [
            {
                "Type": "bind",
                "Source": source,
                "Target": inside,
                "ReadOnly": True,
                "BindOptions": {"Propagation": "rprivate"},
            }
            for source, inside in shown
        ],
        "NetworkMode": JOINS + joins if joins else "none",
        "PidsLimit": HOLDER_PROCESSES,
        "Privileged": False,
        "ReadonlyRootfs": True,
        "RestartPolicy": {"Name": "no"},
        "SecurityOpt": ["no-new-privileges"],
    }
    return {
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Cmd": list(argv[1:]),
        "Entrypoint": list(argv[:1]),
        "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],
        "HostConfig": host,
        "Hostname": "" if joins else SANDBOX_NAME,  # a joining container shares it
        "Image": image,
        "Labels": dict(labels),
        "OpenStdin": True,
        "StdinOnce": True,
        "Tty": False,
        "User": "0:0",
        "WorkingDir": "/",
    }


def why_never(facts: EngineFacts, *, root: bool, gvisor: bool) -> str:
    if not root:
        return "containers enter sandbox networks only if both the agent and its engine run as root"
    if gvisor or facts.default_runtime.startswith("runsc"):
        return "gVisor has a network stack of its own, which cannot be a sandbox network"
    if facts.kind != "podman" and facts.first_uid:
        return "containers of an engine with userns-remap cannot enter sandbox networks"
    return ""


def own_files(place: WorkDirectory, network: SandboxNetwork | None) -> list[tuple[str, str, bool]]:
    """Return mounts of the files that the engine would write otherwise: (host path, inside, writable)."""
    members = "" if network is None else network.hosts
    place.write_aside("hosts", LOOPBACK_HOSTS + members if members else ETC_TEXTS["hosts"])
    place.write_aside("stat", processor_counters(Path("/proc/stat").read_text()))
    files = {"hosts": "/etc/hosts", "stat": COUNTERS}
    if network is not None:
        place.write_aside("resolv.conf", f"nameserver {network.resolver}\n")
        files["resolv.conf"] = "/etc/resolv.conf"
    return [(str(place.root / name), inside, False) for name, inside in files.items()]


def path_of(network: SandboxNetwork) -> str:
    """Valid while the agent lives."""
    return f"/proc/{os.getpid()}/fd/{network.namespaces[0]}"


def is_in(pid: int, network: SandboxNetwork) -> bool | None:
    """None: the process is gone."""
    try:
        there = os.stat(f"/proc/{pid}/ns/net")
    except OSError:
        return None
    own = os.fstat(network.namespaces[0])
    return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)


class ProbeCache:
    """Result of a slow test, renewed in another thread by `begin`, which may refuse with `RuntimeError`."""

    def __init__(
        self,
        test: Callable[[], str],
        begin: Callable[[Callable[[], None]], object],
        clock: Callable[[], float],
    ) -> None:
        self._test, self._begin, self._clock = test, begin, clock
        self._lock = threading.Lock()
        self._found: tuple[float, str] | None = None
        self._renewing = False

    def why_not(self) -> str:
        """Slow at the first call only."""
        with self._lock:
            if self._found is None:
                self._found = (self._clock(), self._test())
                return self._found[1]
            at, why = self._found
            is_old = self._clock() >= at + (RENEW_FAILED_AFTER_S if why else RENEW_AFTER_S)
            if not is_old or self._renewing:
                return why
            self._renewing = True
        try:
            self._begin(self._renew)
        except RuntimeError:  # the executor is shut down: the runtime is closing
            self._renewing = False
        return why

    def _renew(self) -> None:
        try:
            why = self._test()
            self._found = (self._clock(), why)
        finally:
            self._renewing = False


class NamespaceHolders:
    """Holds sandbox networks for containers to join. Every method blocks; thread-safe."""

    def __init__(
        self,
        engine: EngineClient,
        label: tuple[str, str],
        boot: tuple[str, str],
        guarded: Callable[[], None] = lambda: None,
    ) -> None:
        """`label` marks objects for the next agent's sweep, `boot` for the guard that `guarded` starts."""
        self._engine = engine
        self._label = label
        self._guarded = guarded
        self._labels = dict((label, boot))
        self._image = ""
        self._making = threading.Lock()

    def why_not(self) -> str:
        """Test with two holders: "" if the second joined the agent's network by way of the first."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            network = SandboxNetwork((own,), "")
            with self.holding(network) as first, self._joined(first) as second:
                self.check(second, network)
        except SandboxFailed as failure:
            return str(failure)
        finally:
            os.close(own)
        return ""

    def start_under(self, runtime: str) -> bool:
        system = system_of()
        try:
            body = holder_request(
                self._empty(system), ("/bin/sh", "-c", WAIT), self._labels, system
            )
            wide = {"Memory": KERNEL_BYTES, "MemorySwap": KERNEL_BYTES, "PidsLimit": KERNEL_THREADS}
            body["HostConfig"] |= {"Runtime": runtime, **wide}
            with self._running(body):
                return True
        except SandboxFailed:
            return False

    @contextlib.contextmanager
    def holding(self, network: SandboxNetwork) -> Iterator[str]:
        """Container to join during the block. Raises `SandboxFailed`."""
        program = shutil.which("nsenter")
        if program is None:
            raise SandboxFailed(f"{CANNOT}: there is no nsenter here (Debian: util-linux)")
        system = system_of()
        argv = (program, f"--net={NETWORK_AT}", "/bin/sh", "-c", WAIT)
        image = self._empty(system)
        body = holder_request(image, argv, self._labels, system, network=path_of(network))
        with self._running(body) as container:
            self.check(container, network)
            yield container

    def check(self, container: str, network: SandboxNetwork, *, may_be_over: bool = False) -> None:
        pid = self._engine.pid_of(container)
        found = is_in(pid, network) if pid else None
        if found is False:
            raise SandboxFailed(f"{CANNOT}: a container got another network")
        if found is None and not may_be_over:
            raise SandboxFailed(f"{CANNOT}: its holder ended")

    def close(self) -> None:
        with self._making:
            if self._image:
                self._engine.remove_image(self._image)
                self._image = ""

    def sweep(self) -> None:
        for image in self._engine.unnamed_images("=".join(self._label)):
            if image != self._image:
                self._engine.remove_image(image)

    @contextlib.contextmanager
    def _running(self, body: Mapping[str, Any]) -> Iterator[str]:
        container = self._engine.create(body)
        try:
            with self._engine.attach(container, with_input=True) as channel:
                try:
                    self._engine.start(container)
                except SandboxFailed as failure:
                    raise SandboxFailed(f"{CANNOT}: {failure}") from failure
                _wait_inside(channel)
                yield container
        finally:
            try:
                self._engine.remove(container)
            except SandboxFailed as refused:  # it has ended; a container that joined it may run
                log.warning("holder_not_removed", container=container, error=str(refused))

    @contextlib.contextmanager
    def _joined(self, holder: str) -> Iterator[str]:
        system = system_of()
        argv = ("/bin/sh", "-c", WAIT)
        body = holder_request(self._empty(system), argv, self._labels, system, joins=holder)
        with self._running(body) as container:
            yield container

    def _empty(self, system: HostSystem) -> str:
        with self._making:
            if not self._image or self._engine.find(self._image) is None:
                self._guarded()
                self._image = self._engine.import_image(empty_image(system), self._labels)
            return self._image


def _wait_inside(channel: socket.socket) -> None:
    channel.settimeout(WITHIN_S)
    output = b""
    with contextlib.suppress(OSError):  # timeout, or the engine went away
        while INSIDE not in output:
            data = channel.recv(4096)
            if not data:
                break
            output += data
    if INSIDE not in output:
        words = bytes(letter for letter in output if 32 <= letter < 127).decode()
        raise SandboxFailed(f"{CANNOT}: {words or 'its holder did not start'}")

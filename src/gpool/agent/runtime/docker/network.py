"""How a container of Docker's gets a lane for its network: by a holder. Refuses to guess: every step is looked at.

Docker makes a container's network itself and can't be given one; but it lets a container join the network of another,
and takes for that wherever the first process of the other one is. So a holder goes first: a container of our own, from
an image with nothing in it, whose only program (the host's) moves into the lane and waits. The task's container joins
it and is in the lane before anything of the task runs; it never has another network. Then the holder is removed. While
it lives it holds one right, to enter namespaces, and runs nothing but what root on the host installed.
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

from gpool.agent.runtime.bubblewrap.layout import ETC_TEXTS
from gpool.agent.runtime.docker.confinement import JOINS, SANDBOX_NAME
from gpool.agent.runtime.docker.engine import EngineClient, EngineFacts
from gpool.agent.runtime.protocol import SandboxFailed, SandboxNetwork
from gpool.agent.runtime.work_directory import WorkDirectory

Json = dict[str, Any]

LANE_AT = "/lane"  # inside a holder
SYSTEM = ("bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr")
INSIDE = b"inside\n"
WAIT = "echo inside; exec cat"
"""Until its input ends, which it does with the agent."""
HOLDER_BYTES = 64 << 20
HOLDER_PROCESSES = 8
KERNEL_BYTES, KERNEL_THREADS = 512 << 20, 512  # of one that brings a kernel of its own
WITHIN_S = 60.0
log = structlog.get_logger(__name__)
CANNOT = "this node's container engine cannot enter a lane"


@dataclass(frozen=True, slots=True)
class HostSystem:
    """Where the host's programs are: directories to show, and links beside them."""

    folders: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


def system_of(root: Path = Path("/")) -> HostSystem:
    folders = [name for name in SYSTEM if (root / name).is_dir() and not (root / name).is_symlink()]
    links = [(name, os.readlink(root / name)) for name in SYSTEM if (root / name).is_symlink()]
    return HostSystem(tuple(folders), tuple(links))


def empty_image(system: HostSystem) -> bytes:
    """A tar with nothing in it but those links."""
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
    lane: str = "",
    joins: str = "",
) -> Json:
    """The body of the engine's `create` for a holder of the `lane`, a namespace's path on the host; or for one that
    `joins` another and can do nothing."""
    shown = [(f"/{name}", f"/{name}") for name in system.folders]
    shown += [(lane, LANE_AT)] if lane else []
    host: Json = {
        "AutoRemove": False,
        "CapAdd": ["SYS_ADMIN"] if lane else [],  # what `setns` asks for
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
        "Hostname": "" if joins else SANDBOX_NAME,  # whoever joins has it too
        "Image": image,
        "Labels": dict(labels),
        "OpenStdin": True,
        "StdinOnce": True,
        "Tty": False,
        "User": "0:0",
        "WorkingDir": "/",
    }


def why_never(facts: EngineFacts, *, root: bool, gvisor: bool) -> str:
    """Why containers of such an engine enter no lanes, whatever is tried; "": they may."""
    if not root:
        return "containers enter lanes only where both the agent and its engine are root's"
    if gvisor or facts.default_runtime.startswith("runsc"):
        return "gVisor has a network of its own, which cannot be a lane"
    if facts.kind != "podman" and facts.first_uid:
        return "an engine with a user namespace of its own cannot have its containers enter lanes"
    return ""


def names_in(place: WorkDirectory, lane: SandboxNetwork | None) -> list[tuple[str, str, bool]]:
    """What is shown to a container in the lane: whom to ask for names, and those it needs not ask for."""
    if lane is None:
        return []
    place.write_aside("resolv.conf", f"nameserver {lane.resolver}\n")
    place.write_aside("hosts", ETC_TEXTS["hosts"] + lane.hosts)
    return [(str(place.root / name), f"/etc/{name}", False) for name in ("resolv.conf", "hosts")]


def path_of(lane: SandboxNetwork) -> str:
    """Of its namespace, as every process of this host's root finds it while we live."""
    return f"/proc/{os.getpid()}/fd/{lane.namespaces[0]}"


def is_in(pid: int, lane: SandboxNetwork) -> bool | None:
    """Whether a process of the host is in the lane; None: it is gone."""
    try:
        there = os.stat(f"/proc/{pid}/ns/net")
    except OSError:
        return None
    own = os.fstat(lane.namespaces[0])
    return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)


class NamespaceHolders:
    """Holds lanes for one engine's containers to join. Every method blocks; from any thread."""

    def __init__(
        self,
        engine: EngineClient,
        label: tuple[str, str],
        boot: tuple[str, str],
        guarded: Callable[[], None] = lambda: None,
    ) -> None:
        """`label` is on all it makes, for the next agent's sweep; `boot` too, for the guard, which `guarded` has stand."""
        self._engine = engine
        self._label = label
        self._guarded = guarded
        self._labels = dict((label, boot))
        self._image = ""
        self._making = threading.Lock()

    def why_not(self) -> str:
        """Tries it on the network we are in ourselves, with two holders; "" when the second got there by the first."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            lane = SandboxNetwork((own,), "")
            with self.holding(lane) as first, self._joined(first) as second:
                self.check(second, lane)
        except SandboxFailed as failure:
            return str(failure)
        finally:
            os.close(own)
        return ""

    def start_under(self, runtime: str) -> bool:
        """Whether a container of ours, without a network, starts under this OCI runtime."""
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
    def holding(self, lane: SandboxNetwork) -> Iterator[str]:
        """A container in the lane, for others to join while the block lasts. Raises `SandboxFailed`."""
        program = shutil.which("nsenter")
        if program is None:
            raise SandboxFailed(f"{CANNOT}: there is no nsenter here (Debian: util-linux)")
        system = system_of()
        argv = (program, f"--net={LANE_AT}", "/bin/sh", "-c", WAIT)
        image = self._empty(system)
        body = holder_request(image, argv, self._labels, system, lane=path_of(lane))
        with self._running(body) as container:
            self.check(container, lane)
            yield container

    def check(self, container: str, lane: SandboxNetwork, *, may_be_over: bool = False) -> None:
        """Raises `SandboxFailed` unless it is in the lane."""
        pid = self._engine.pid_of(container)
        found = is_in(pid, lane) if pid else None
        if found is False:
            raise SandboxFailed(f"{CANNOT}: a container got another network")
        if found is None and not may_be_over:
            raise SandboxFailed(f"{CANNOT}: its holder ended")

    def close(self) -> None:
        """The image, which is nobody else's."""
        with self._making:
            if self._image:
                self._engine.remove_image(self._image)
                self._image = ""

    def sweep(self) -> None:
        """Images that an earlier agent left."""
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
                _until_inside(channel)
                yield container
        finally:
            try:
                self._engine.remove(container)
            except SandboxFailed as refused:  # it has ended; whoever joined it may run
                log.warning("holder_left", container=container, error=str(refused))

    @contextlib.contextmanager
    def _joined(self, holder: str) -> Iterator[str]:
        """A container as the task's would be, as far as its network goes."""
        system = system_of()
        argv = ("/bin/sh", "-c", WAIT)
        body = holder_request(self._empty(system), argv, self._labels, system, joins=holder)
        with self._running(body) as container:
            yield container

    def _empty(self, system: HostSystem) -> str:
        """Made again where the owner has cleared away what no container uses."""
        with self._making:
            if not self._image or self._engine.find(self._image) is None:
                self._guarded()
                self._image = self._engine.import_image(empty_image(system), self._labels)
            return self._image


def _until_inside(channel: socket.socket) -> None:
    channel.settimeout(WITHIN_S)
    said = b""
    with contextlib.suppress(OSError):  # too late, or the engine went away
        while INSIDE not in said:
            data = channel.recv(4096)
            if not data:
                break
            said += data
    if INSIDE not in said:
        words = bytes(letter for letter in said if 32 <= letter < 127).decode()
        raise SandboxFailed(f"{CANNOT}: {words or 'its holder did not start'}")

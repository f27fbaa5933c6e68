"""The agent's end of the launcher process: sends orders, receives ends. Knows nothing of tasks."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import structlog

from gpool.agent.runtime.descriptors import memory_file, writable
from gpool.agent.runtime.protocol import SandboxFailed

log = structlog.get_logger(__name__)

SCRIPT = Path(__file__).with_name("launcher.py")
ENCLOSE_PAST_BYTES = 64 * 1024
READY_WITHIN_S = 120.0  # an overloaded machine may stall for a while


@dataclass(frozen=True, slots=True)
class Bind:
    source: Path
    name: str
    writable: bool = False


@dataclass(frozen=True, slots=True)
class RootTree:
    folders: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()  # (path inside, target)
    binds: tuple[tuple[str, str], ...] = ()  # (path inside, source as the launcher sees it)


@dataclass(frozen=True, slots=True)
class SandboxSetup:
    """Properties of every sandbox that the launcher makes ahead."""

    hostname: str
    inside_uid: int
    masked: Sequence[str]  # names in /proc
    stat: str  # text of /proc/stat
    overlays: Sequence[tuple[str, str]]  # (source, target) in the launcher's namespace
    probe_uid: int  # of a sandbox that shows whether the kernel allows this


@dataclass(frozen=True, slots=True)
class PreparedOrder:
    trees: Sequence[tuple[str, str]]  # (source in the launcher's namespace, writable path inside)
    tmpfs_bytes: int
    variables_at: int  # number of the descriptor with NAME=VALUE texts
    landlock: tuple[int, int, int, Sequence[tuple[str, int]]] | None


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """`descriptors` become 0, 1, 2 … and are closed here once sent."""

    mode: str  # "bubblewrap", "process", or "prepared": a sandbox that the launcher makes itself, if it `prepares`
    argv: Sequence[str]
    descriptors: Sequence[int]
    uid: int = 0  # 0: keep the agent's
    gids: Sequence[int] = ()  # further groups of a dropped uid: those of its device nodes
    groups: Sequence[str] = ()
    limits: Sequence[tuple[int, int]] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    namespaces: Sequence[int] = ()  # entered first, in this order; the caller closes them
    binds: Sequence[Bind] = ()  # beyond those of every sandbox
    overlays: Sequence[tuple[str, str]] = ()  # (source, target) in the launcher's namespace
    cpus: Sequence[int] = ()  # to run on; empty: all of the agent's
    prepared: PreparedOrder | None = None  # with mode "prepared"


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """`ran` is false if the command never started."""

    code: int  # 128+n for a signal n
    ran: bool
    killed: bool
    lost: bool = False  # it died with its launcher or engine


def _bind(bind: Bind) -> dict[str, object]:
    return {"source": str(bind.source), "name": bind.name, "writable": bind.writable}


LAUNCHER_DIED = "gpool's launcher on that node died, and the sandbox with it"


class StartedProcess(Protocol):
    @property
    def is_over(self) -> bool: ...

    async def exited(self) -> ProcessExit: ...

    async def kill(self) -> None: ...

    async def warn(self) -> None: ...


class LaunchedProcess:
    def __init__(self, launcher: Launcher, number: int, exit: asyncio.Future[ProcessExit]) -> None:
        self._launcher = launcher
        self._number = number
        self._exit = exit
        self.before_kill: Callable[[], None] | None = None

    @property
    def is_over(self) -> bool:
        return self._exit.done()

    async def exited(self) -> ProcessExit:
        return await asyncio.shield(self._exit)

    async def kill(self) -> None:
        if not self._exit.done():
            if self.before_kill is not None:
                self.before_kill()
            await self._launcher.send({"kill": self._number}, ())
        await asyncio.shield(self._exit)

    async def warn(self) -> None:
        if not self._exit.done():
            await self._launcher.send({"warn": self._number}, ())


class Launcher:
    """Starts the launcher process at the first order, and after its death."""

    def __init__(
        self,
        *,
        place: str,
        binds: Sequence[Bind],
        seccomp: bytes,
        tree: RootTree | None = None,
        setup: SandboxSetup | None = None,
    ) -> None:
        tree = tree or RootTree()
        self._settings = {
            "place": place,
            "binds": [_bind(bind) for bind in binds],
            "seccomp": seccomp.hex(),
            "tree": {"folders": tree.folders, "links": tree.links, "binds": tree.binds},
            "setup": asdict(setup) if setup is not None else None,
        }
        self._channel: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._running: dict[int, asyncio.Future[ProcessExit]] = {}
        self._ready: asyncio.Future[None] | None = None
        self._sending = asyncio.Lock()
        self._last = 0
        self._prepares = False

    async def prepares(self) -> bool:
        """Start the launcher; return whether it makes sandboxes ahead."""
        await self._ensure_running()
        return self._prepares

    async def start(self, order: LaunchOrder) -> LaunchedProcess:
        try:
            await self._ensure_running()
            self._last += 1
            number = self._last
            exit: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
            self._running[number] = exit
            document: dict[str, object] = {
                "start": number,
                "mode": order.mode,
                "argv": list(order.argv),
                "uid": order.uid,
                "gids": list(order.gids),
                "groups": list(order.groups),
                "limits": list(order.limits),
                "env": dict(order.env),
                "cwd": order.cwd,
                "namespaces": len(order.namespaces),
                "binds": [_bind(bind) for bind in order.binds],
                "overlays": list(order.overlays),
                "cpus": list(order.cpus),
                "trees": [],
            }
            if order.prepared is not None:
                document |= asdict(order.prepared)
            await self.send(document, (*order.descriptors, *order.namespaces))
        finally:
            for descriptor in order.descriptors:
                os.close(descriptor)
        return LaunchedProcess(self, number, exit)

    async def send(self, document: Mapping[str, object], descriptors: Sequence[int]) -> None:
        channel = self._channel
        if channel is None:
            return  # it died: the end of everything it ran is known
        data = json.dumps(document).encode()
        enclosed = -1
        if len(data) > ENCLOSE_PAST_BYTES:
            enclosed = memory_file("order", data)
            data, descriptors = b'{"enclosed": true}', (*descriptors, enclosed)
        beside = []
        if descriptors:
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            async with self._sending:
                while True:
                    try:
                        channel.sendmsg([data], beside)
                        return
                    except BlockingIOError:
                        await writable(channel.fileno())
        except OSError as gone:
            raise SandboxFailed(f"the launcher is gone: {gone}") from gone
        finally:
            if enclosed >= 0:
                os.close(enclosed)

    async def close(self) -> None:
        waiting = list(self._running.values())
        self._forget()
        for exit in waiting:
            await exit

    async def _ensure_running(self) -> None:
        if self._ready is None:
            loop = asyncio.get_running_loop()
            self._ready = loop.create_future()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            with theirs:
                # -I -S: the standard library only, so that its forks are small
                self._child = subprocess.Popen(  # noqa: ASYNC220 - a vfork, once
                    [sys.executable, "-I", "-S", "-B", str(SCRIPT)],
                    stdin=theirs.fileno(),
                    env={},
                    cwd="/",
                    start_new_session=True,
                )
            ours.send(json.dumps(self._settings).encode())
            self._channel = ours
            loop.add_reader(ours.fileno(), self._receive)
        try:
            async with asyncio.timeout(READY_WITHIN_S):
                await asyncio.shield(self._ready)
        except TimeoutError as silent:
            raise SandboxFailed(
                f"the launcher did not start within {READY_WITHIN_S:g} s"
            ) from silent

    def _receive(self) -> None:
        channel = self._channel
        if channel is None:
            return
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data = channel.recv(65536)
                except ConnectionResetError:
                    data = b""
                if not data:
                    self._forget(lost=True)
                    return
                message = json.loads(data)
                if "ended" in message:
                    exit = self._running.pop(message["ended"], None)
                    if exit is not None and not exit.done():
                        status = message["status"]
                        code = os.waitstatus_to_exitcode(status)
                        exit.set_result(
                            ProcessExit(
                                code if code >= 0 else 128 - code, message["ran"], message["killed"]
                            )
                        )
                elif self._ready is not None and not self._ready.done():
                    if message["ready"]:
                        _report_shared(message["shared"])
                        self._prepares = message["prepares"]
                        self._ready.set_result(None)
                    else:
                        self._ready.set_exception(SandboxFailed(message["detail"]))

    def _forget(self, *, lost: bool = False) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
        if self._child is not None:
            self._child.wait()  # it ends as soon as the channel does
        self._channel = self._child = None
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(SandboxFailed("the launcher ended while it started"))
        self._ready = None
        for exit in self._running.values():
            if not exit.done():
                exit.set_result(ProcessExit(137, ran=True, killed=not lost, lost=lost))
        self._running.clear()


def _report_shared(folders: Sequence[str]) -> None:
    """Warn of read-only folders that sandboxes get as bind mounts, because no overlay of them can be mounted."""
    if folders:
        effect = "locks and file watches of tasks reach the host's files in these folders"
        log.warning("no_overlay", folders=list(folders), effect=effect)

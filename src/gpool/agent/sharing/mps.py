"""MPS daemon of one user on one GPU. Daemon and server run as an unused uid.

Clients reach only the socket `control`. The daemon sets the limits and obeys only the user that started it, which no
task is. In its own user namespace it is root, so it serves sandboxes of several uids.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import structlog

from gpool.agent.runtime.bubblewrap.launcher_client import Launcher, LaunchOrder, StartedProcess
from gpool.agent.runtime.protocol import SandboxFailed
from gpool.agent.sharing.plan import MpsLimits
from gpool.core.model import MIB

PROGRAM = "nvidia-cuda-mps-control"
PLACES = "/usr/bin:/usr/local/nvidia/bin:/usr/local/bin:/bin"
INSIDE = "/tmp/nvidia-mps"
SOCKET = "control"
READY_WITHIN_S = 60.0
ANSWER_WITHIN_S = 30.0
GLANCE_S = 0.02

log = structlog.get_logger(__name__)


def find_program(name: str = PROGRAM) -> str:
    return shutil.which(name, path=PLACES) or ""


@dataclass(frozen=True, slots=True)
class MpsPrograms:
    """Programs and folder that daemons are started with."""

    program: str
    unshare: str  # creates the user namespace; unused if no uid is dropped
    launcher: Launcher
    folder: Path  # for pipes and logs; traversable by any uid


class MpsDaemon:
    """`uid`: its user on the host; None: the agent's."""

    def __init__(self, means: MpsPrograms, gpu: str, uid: int | None) -> None:
        self._means = means
        self._gpu = gpu
        self._uid = uid
        self._folder = Path()
        self._started: StartedProcess | None = None

    @property
    def socket(self) -> Path:
        return self._folder / "pipe" / SOCKET

    async def start(self) -> None:
        """Raises `SandboxFailed` and then leaves nothing behind."""
        self._means.folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(dir=self._means.folder))
        self._folder.chmod(0o711)
        for name, mode in (("pipe", 0o711), ("log", 0o700)):
            (self._folder / name).mkdir(mode=mode)
            (self._folder / name).chmod(mode)
            if self._uid is not None:
                os.chown(self._folder / name, self._uid, self._uid)
        nothing = os.open(os.devnull, os.O_RDWR)
        descriptors = [nothing, os.dup(nothing), os.dup(nothing)]
        try:
            self._started = await self._means.launcher.start(
                LaunchOrder(
                    mode="process",
                    argv=[*self._lead(), self._means.program, "-f", *self._options()],
                    descriptors=descriptors,
                    uid=self._uid or 0,
                    env=self._env(),
                )
            )
            await self._ready(self._started)
        except BaseException:
            await self.stop()
            raise

    async def _ready(self, started: StartedProcess) -> None:
        async def appeared() -> None:
            while not _is_socket(self.socket):
                if started.is_over:
                    raise SandboxFailed(f"the MPS daemon exited at once: {self._last_words()}")
                await asyncio.sleep(GLANCE_S)

        try:
            async with asyncio.timeout(READY_WITHIN_S):
                await appeared()
        except TimeoutError as silent:
            raise SandboxFailed(
                f"the MPS daemon did not start within {READY_WITHIN_S:g} s: {self._last_words()}"
            ) from silent

    async def limit(self, limits: MpsLimits) -> None:
        memory = f"{max(1, limits.memory_bytes // MIB)}M"
        await self._tell(
            f"set_default_device_pinned_mem_limit 0 {memory}",
            f"set_default_active_thread_percentage {limits.percentage}",
        )
        for server in (await self._tell("get_server_list")).split():
            if server.isdecimal():
                await self._tell(
                    f"set_device_pinned_mem_limit {server} 0 {memory}",
                    f"set_active_thread_percentage {server} {limits.percentage}",
                )

    async def stop(self) -> None:
        started, self._started = self._started, None
        if started is not None:
            if not started.is_over:
                try:
                    await self._tell("quit -t 1")
                except SandboxFailed as error:
                    log.warning("mps_did_not_quit", gpu=self._gpu, error=str(error))
            await started.kill()
        if self._folder != Path():
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _tell(self, *orders: str) -> str:
        text = "".join(f"{order}\n" for order in orders)
        done = await asyncio.to_thread(self._ask, text)
        if done is None:
            raise SandboxFailed(f"the MPS daemon did not answer {orders[0]!r}")
        answer = done.stdout.decode("utf-8", "replace")
        if done.returncode != 0 or "privilege" in answer:
            raise SandboxFailed(f"the MPS daemon refused {orders[0]!r}: {answer.strip()}")
        return answer

    def _ask(self, text: str) -> subprocess.CompletedProcess[bytes] | None:
        """Send commands in a thread (uvloop cannot change a child's uid). None: no answer in time."""
        try:
            return subprocess.run(
                [*self._lead(), self._means.program],
                input=text.encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=ANSWER_WITHIN_S,
                env=self._env(),
                cwd="/",
                user=self._uid,
                group=self._uid,
                extra_groups=None if self._uid is None else (),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None

    def _lead(self) -> list[str]:
        """Command prefix: root in a user namespace only, in the host's PID namespace to identify clients."""
        return [] if self._uid is None else [self._means.unshare, "--map-root-user", "--"]

    def _options(self) -> list[str]:
        return [] if self._uid is None else ["--multiuser-server"]

    def _env(self) -> dict[str, str]:
        return {
            "PATH": PLACES,
            "CUDA_MPS_PIPE_DIRECTORY": str(self._folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self._folder / "log"),
            "CUDA_VISIBLE_DEVICES": self._gpu,
        }

    def _last_words(self) -> str:
        try:
            return (self._folder / "log" / "control.log").read_text()[-400:].strip()
        except OSError:
            return "it left no log"


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False

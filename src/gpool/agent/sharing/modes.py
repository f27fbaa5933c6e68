"""Sharing modes of a GPU: MPS daemon, MIG instances, and the record that restores a card's settings. Blocks as long as
the driver does.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from gpool.agent.machine.nvml import MigInstance, Nvml, NvmlError
from gpool.agent.runtime.bubblewrap.launcher_client import Launcher, LaunchOrder, StartedProcess
from gpool.agent.runtime.protocol import SandboxFailed
from gpool.agent.sharing.plan import MpsLimits, Tenancy
from gpool.core.model import MIB

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CardSettings:
    """Settings that a task or the agent might change. None: not reported."""

    mig: bool | None
    instances: tuple[str, ...]  # uuids of the owner's MIG instances
    compute_mode: str
    power_limit_mw: int | None
    clocks: tuple[int, int] | None


def record(nvml: Nvml, uuid: str) -> CardSettings:
    card = nvml.card(uuid)
    return CardSettings(
        card.mig,
        tuple(one.uuid for one in nvml.mig_instances(uuid)),
        nvml.compute_mode(uuid),
        card.power_limit_mw,
        nvml.application_clocks(uuid),
    )


def restore(nvml: Nvml, uuid: str, wanted: CardSettings) -> tuple[str, ...]:
    """Return the restored settings; raises `NvmlError` if the card refuses."""
    now, changed = record(nvml, uuid), []
    for instance in nvml.mig_instances(uuid):
        if instance.uuid not in wanted.instances:
            nvml.unmake_mig(uuid, instance.id)
            changed.append("instances")
    if wanted.mig is not None and now.mig != wanted.mig:
        nvml.set_mig(uuid, wanted.mig)
        changed.append("mig")
    if now.compute_mode != wanted.compute_mode:
        nvml.set_compute_mode(uuid, wanted.compute_mode)
        changed.append("compute mode")
    if wanted.clocks is not None and now.clocks != wanted.clocks:
        nvml.set_application_clocks(uuid, wanted.clocks)
        changed.append("clocks")
    if wanted.power_limit_mw is not None and now.power_limit_mw != wanted.power_limit_mw:
        nvml.set_power_limit(uuid, wanted.power_limit_mw)
        changed.append("power limit")
    return tuple(dict.fromkeys(changed))


class Records:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, uuid: str, settings: CardSettings) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        half = self._folder / f"{uuid}.part"
        half.write_bytes(msgspec.json.encode(settings))
        half.rename(self._folder / f"{uuid}.json")

    def drop(self, uuid: str) -> None:
        (self._folder / f"{uuid}.json").unlink(missing_ok=True)

    def left(self) -> Iterator[tuple[str, CardSettings]]:
        for file in sorted(self._folder.glob("*.json")):
            try:
                yield file.stem, msgspec.json.decode(file.read_bytes(), type=CardSettings)
            except msgspec.DecodeError as error:
                log.warning("card_record_unreadable", file=file.name, error=str(error))
                file.unlink()


def recover(nvml: Nvml, records: Records) -> None:
    """A refusal is retried at the next start."""
    for uuid, settings in list(records.left()):
        try:
            changed = restore(nvml, uuid, settings)
        except NvmlError as error:
            log.warning("card_not_restored", gpu=uuid, error=str(error))
        else:
            records.drop(uuid)
            log.info("card_restored", gpu=uuid, changed=changed)


@dataclass(frozen=True, slots=True)
class Instance:
    made: MigInstance
    nodes: tuple[str, ...]  # /dev/nvidia-caps


NodesOf = Callable[[int, int, int], tuple[str, ...]]
"""Device nodes of (card's minor, GPU instance, compute instance)."""


def make(nvml: Nvml, wanted: Tenancy, nodes_of: NodesOf) -> Instance:
    """Enables MIG if needed. Raises `NvmlError` if it does not fit or the profile is unknown."""
    card = nvml.card(wanted.gpu)
    if not card.mig:
        nvml.set_mig(wanted.gpu, True)
    profile = next(
        (one for one in nvml.mig_profiles(wanted.gpu) if one.name == wanted.profile), None
    )
    if profile is None:
        raise NvmlError(f"the GPU has no MIG profile {wanted.profile!r}")
    made = nvml.make_mig(wanted.gpu, profile.id, wanted.start)
    minor = card.minor if card.minor is not None else card.index
    try:
        return Instance(made, nodes_of(minor, made.id, made.compute))
    except OSError as error:
        nvml.unmake_mig(wanted.gpu, made.id)
        raise NvmlError(f"no device nodes for the MIG instance: {error}") from error


PROGRAM = "nvidia-cuda-mps-control"
PLACES = "/usr/bin:/usr/local/nvidia/bin:/usr/local/bin:/bin"
INSIDE = "/tmp/nvidia-mps"
SOCKET = "control"
READY_WITHIN_S = 60.0
ANSWER_WITHIN_S = 30.0
GLANCE_S = 0.02


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

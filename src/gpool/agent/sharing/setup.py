"""Wiring of GPU sharing on this machine."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from gpool.agent.machine.detection.nvml import NoDriver, Nvml, NvmlError
from gpool.agent.machine.detection.real_nvml import RealNvml
from gpool.agent.runtime.bubblewrap.launcher_client import Launcher
from gpool.agent.runtime.protocol import BuildRuntime
from gpool.agent.runtime.slots import RUN
from gpool.agent.sharing import mps, plan
from gpool.agent.sharing.settings_restore import Records
from gpool.agent.sharing.shares import GpuShares
from gpool.core.model import Gpu, Sharing

LONGEST_PATH = 60  # socket paths have at most 108 characters

log = structlog.get_logger(__name__)


class GpuSharing:
    def __init__(
        self,
        nvml: Nvml,
        seats: GpuShares,
        can: plan.Abilities,
        modes: Sequence[Sharing] | None,
    ) -> None:
        self._nvml = nvml
        self._can = can
        self._modes = modes
        self.seats = seats

    def describe(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        described = tuple(self._described(gpu) for gpu in gpus)
        self.seats.use_gpus(described)
        return described

    def _described(self, gpu: Gpu) -> Gpu:
        if gpu.simulated:
            return gpu
        if gpu.vendor != "nvidia":
            return replace(gpu, sharing=Sharing.EXCLUSIVE)
        try:
            card = self._nvml.card(gpu.uuid)
            profiles = plan.profiles_of(self._nvml.mig_profiles(gpu.uuid))
        except NvmlError as error:
            log.warning("gpu_not_shared", gpu=gpu.uuid, error=str(error))
            return replace(gpu, sharing=Sharing.EXCLUSIVE)
        before = self.seats.settings_before(gpu.uuid)
        if before is not None:
            card = replace(card, mig=before.mig)
        mode = plan.choose(card, profiles, self._can, self._modes)
        closed = gpu.closed or self.seats.unclean.get(gpu.uuid, "")
        lent = profiles if mode is Sharing.MIG else ()
        return replace(gpu, sharing=mode, profiles=lent, closed=closed)


def sharing_for(
    data_dir: Path, sandboxes: BuildRuntime, modes: Sequence[Sharing] | None
) -> GpuSharing | None:
    """None without an NVIDIA driver."""
    nvml = RealNvml()
    try:
        nvml.open()
    except NoDriver:
        return None
    root = os.geteuid() == 0
    program, unshare = mps.find_program(), mps.find_program("unshare")
    means = None
    if program and (unshare or not root):
        launcher = Launcher(place="", binds=(), seccomp=b"")
        means = mps.MpsPrograms(program, unshare, launcher, _pipes(data_dir, root))
    can = plan.Abilities(root, means is not None, sandboxes.tells_apart)
    seats = GpuShares(
        nvml,
        sandboxes,
        Records(data_dir / "cards"),
        mps=means,
        shared_uid=sandboxes.shared_uid,
    )
    return GpuSharing(nvml, seats, can, modes)


def _pipes(data_dir: Path, root: bool) -> Path:
    if root:
        return RUN / f"mps-{hashlib.sha256(bytes(data_dir.resolve())).hexdigest()[:12]}"
    near = data_dir.resolve() / "mps"
    return near if len(str(near)) <= LONGEST_PATH else Path(tempfile.mkdtemp(prefix="gpool-mps-"))

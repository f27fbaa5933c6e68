"""The GPU monitor: samples each GPU every second and keeps its condition. `core.gpu_health` judges; closes nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from gpool.agent.machine.drm import DRM_VENDORS, DrmCards
from gpool.agent.machine.gpus import symptoms_of
from gpool.agent.machine.host import PROC, AgentProcesses, has_card_open, is_dying, name_of
from gpool.agent.machine.nvml import GpuLost, GpuProcess, NoDriver, Nvml, NvmlError, Vitals
from gpool.core.gpu_health import Condition, Health, examine
from gpool.core.model import Gpu
from gpool.wire.frames import GpuReading

UNREAD = Vitals()
HEALTHY = Condition()

log = structlog.get_logger(__name__)

VITALS_EVERY_US = 1_900_000
"""Processes are read in every sample, sensors in every second one: some take a millisecond each."""
CARD_EVERY_US = 5_000_000
"""Interval of the check whether a card was reconfigured: shorter than that of heartbeats."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    gpu: Gpu
    vitals: Vitals = UNREAD
    ours: tuple[GpuProcess, ...] = ()
    strangers: tuple[str, ...] = ()  # names of foreign programs that use it
    condition: Condition = HEALTHY

    @property
    def reading(self) -> GpuReading | None:
        vitals = self.vitals
        if vitals == UNREAD:
            return None
        return GpuReading(
            self.gpu.index,
            vitals.utilisation_percent,
            vitals.memory_used_bytes,
            vitals.power_mw,
            vitals.temperature_c,
        )


class GpuMonitor:
    def __init__(
        self,
        nvml: Nvml,
        own: AgentProcesses | None = None,
        proc: Path = PROC,
        drm: DrmCards | None = None,
    ) -> None:
        self._nvml = nvml
        self._drm = drm if drm is not None else DrmCards()
        self._own = own if own is not None else AgentProcesses(os.getpid(), proc)
        self._proc = proc
        self._vitals: dict[str, Vitals] = {}
        self._vitals_at: int | None = None
        self._cards: dict[str, tuple[object, ...]] = {}
        self._cards_at: int | None = None
        self._ours: dict[int, bool] = {}
        self._unread: set[str] = set()  # logged once
        self._killed: dict[int, int] = {}  # pid: when it was first found dying
        self._conditions: dict[str, Condition] = {}
        self._held: dict[str, tuple[GpuProcess, ...]] = {}  # AMD's and Intel's, of this sample
        self.changed = False  # a card was lost, found or reconfigured: a survey is due

    def sample(self, gpus: Sequence[Gpu], now: int) -> tuple[GpuSample, ...]:
        """`now` is boot time. Unsupported values are None."""
        self.changed = False
        real = [gpu for gpu in gpus if not gpu.simulated and not gpu.guest]
        cards = [gpu for gpu in real if gpu.vendor == "nvidia"]
        others = [gpu for gpu in real if gpu.vendor in DRM_VENDORS]
        self._held = self._drm.all_processes(others) if others else {}
        # A card that never had a render node is closed for that, not lost.
        others = [gpu for gpu in others if gpu.uuid in self._held or gpu.uuid in self._vitals]
        read = [*cards, *others]
        if not read:
            return tuple(GpuSample(gpu) for gpu in gpus)
        xids = self._xids() if cards else {}
        fresh = self._vitals_at is None or now >= self._vitals_at + VITALS_EVERY_US
        if fresh:
            self._vitals_at = now
        found = {gpu.uuid: self._sample(gpu, xids.get(gpu.uuid, ()), fresh, now) for gpu in read}
        if cards:
            self._detect_changes(cards, now)
        alive = {process.pid for one in found.values() for process in one.ours}
        self._ours = dict.fromkeys(alive, True)  # the kernel reuses process ids
        self._killed = {pid: at for pid, at in self._killed.items() if pid in alive}
        return tuple(found.get(gpu.uuid, GpuSample(gpu)) for gpu in gpus)

    def _sample(self, gpu: Gpu, xids: tuple[int, ...], fresh: bool, now: int) -> GpuSample:
        uuid, lost = gpu.uuid, False
        processes: tuple[GpuProcess, ...] = ()
        vitals = self._vitals.get(uuid, UNREAD)
        try:
            processes = self._processes(gpu)
            if fresh:
                vitals = self._vitals[uuid] = self._read_vitals(gpu, now)
        except (GpuLost, NoDriver):
            lost, vitals = True, UNREAD
        except NvmlError as error:
            if uuid not in self._unread:
                log.warning("gpu_not_read", gpu=uuid, error=str(error))
            self._unread.add(uuid)
        else:
            self._unread.discard(uuid)
        ours = tuple(process for process in processes if self._is_ours(process.pid))
        others = [process.pid for process in processes if process not in ours]
        # A process id that has no GPU open here may be a task of ours in another process namespace.
        there = [pid for pid in others if self._has_open(gpu, pid)]
        strangers = tuple(sorted({name_of(pid, self._proc) or f"process {pid}" for pid in there}))
        symptoms = symptoms_of(gpu, vitals, xids, self._hung_us(ours, now), lost)
        before = self._conditions.get(uuid, HEALTHY)
        condition = self._conditions[uuid] = examine(symptoms, before, now)
        if condition.health is not before.health:
            write = log.info if condition.health is Health.HEALTHY else log.warning
            write("gpu_health", gpu=uuid, health=condition.health.value, why=condition.reason)
        return GpuSample(gpu, vitals, ours, strangers, condition)

    def _processes(self, gpu: Gpu) -> tuple[GpuProcess, ...]:
        if gpu.vendor not in DRM_VENDORS:
            return self._nvml.processes(gpu.uuid)
        if gpu.uuid not in self._held:
            raise GpuLost(f"{gpu.uuid} has no render node any more")
        return self._held[gpu.uuid]

    def _read_vitals(self, gpu: Gpu, now: int) -> Vitals:
        if gpu.vendor in DRM_VENDORS:
            return self._drm.vitals(gpu, now, self._held[gpu.uuid])
        return self._nvml.vitals(gpu.uuid)

    def _has_open(self, gpu: Gpu, pid: int) -> bool:
        if gpu.vendor in DRM_VENDORS:  # found by its descriptors, or a remnant of an ended process
            return self._drm.is_running(pid)
        return has_card_open(pid, self._proc)

    def _is_ours(self, pid: int) -> bool:
        known = self._ours.get(pid)
        if known is None:
            known = self._ours[pid] = self._own.has(pid)
        return known

    def _hung_us(self, ours: Sequence[GpuProcess], now: int) -> int:
        longest = 0
        for process in ours:
            if is_dying(process.pid, self._proc):
                longest = max(longest, now - self._killed.setdefault(process.pid, now))
            else:
                self._killed.pop(process.pid, None)
        return longest

    def _xids(self) -> dict[str, tuple[int, ...]]:
        try:
            events = self._nvml.xids()
        except NvmlError:
            return {}
        found: dict[str, tuple[int, ...]] = {}
        for event in events:
            found[event.uuid] = (*found.get(event.uuid, ()), event.code)
        return found

    def _detect_changes(self, cards: Sequence[Gpu], now: int) -> None:
        if self._cards_at is not None and now < self._cards_at + CARD_EVERY_US:
            return
        self._cards_at = now
        seen: dict[str, tuple[object, ...]] = {}
        try:
            for uuid in self._nvml.uuids():
                made = tuple(one.uuid for one in self._nvml.mig_instances(uuid))
                seen[uuid] = (self._nvml.lost(), made)
        except NvmlError:
            self.changed = True
            return
        known = {
            gpu.uuid for gpu in cards if gpu.health is not Health.QUARANTINED or gpu.uuid in seen
        }
        self.changed = (bool(self._cards) and seen != self._cards) or not known <= seen.keys()
        self._cards = seen


def with_health(gpu: Gpu, condition: Condition) -> Gpu:
    if condition.health is Health.HEALTHY:
        return gpu
    ails = condition.reason[:200]
    closed = gpu.closed
    if condition.health is Health.QUARANTINED:
        closed = f"in quarantine: {ails}"
    return replace(gpu, closed=closed, health=condition.health, ails=ails)

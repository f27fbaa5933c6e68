"""Looks at the GPUs every second: how they are, who uses them, what ails them. Ends and closes nothing: it tells.

What it sees of a card becomes `core.health` symptoms; the conditions it keeps are one agent's memory of its cards.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from gpool.agent.machine.detection.nvml import (
    GpuLost,
    GpuProcess,
    NoDriver,
    Nvml,
    NvmlError,
    Vitals,
)
from gpool.agent.machine.detection.processes import PROC, Kin, has_card_open, is_dying, name_of
from gpool.agent.machine.detection.symptoms import symptoms_of
from gpool.core.model import Gpu
from gpool.core.trust.gpu_health import Condition, Health, examine
from gpool.wire.frames import GpuReading

UNSEEN = Vitals()
WELL = Condition()

log = structlog.get_logger(__name__)

VITALS_EVERY_US = 1_900_000
"""Who uses a card is asked at every look, how it is at every second one: some sensors take a millisecond each."""
CARD_EVERY_US = 5_000_000
"""How often it is asked whether somebody reconfigured a card: within a beat."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """One GPU at one look."""

    gpu: Gpu
    vitals: Vitals = UNSEEN
    ours: tuple[GpuProcess, ...] = ()
    strangers: tuple[str, ...] = ()  # names of others' programs on it
    condition: Condition = WELL

    @property
    def reading(self) -> GpuReading | None:
        """None where the card said nothing."""
        seen = self.vitals
        if seen == UNSEEN:
            return None
        return GpuReading(
            self.gpu.index,
            seen.utilisation_percent,
            seen.memory_used_bytes,
            seen.power_mw,
            seen.temperature_c,
        )


class Watch:
    """`look` at the GPUs of a survey. Only NVIDIA's real cards say anything; of others nothing is known."""

    def __init__(
        self,
        nvml: Nvml,
        kin: Kin | None = None,
        proc: Path = PROC,
    ) -> None:
        self._nvml = nvml
        self._kin = kin if kin is not None else Kin(os.getpid(), proc)
        self._proc = proc
        self._vitals: dict[str, Vitals] = {}
        self._vitals_at: int | None = None
        self._cards: dict[str, tuple[object, ...]] = {}
        self._cards_at: int | None = None
        self._ours: dict[int, bool] = {}
        self._unread: set[str] = set()  # said once
        self._killed: dict[int, int] = {}  # pid: when it was first seen dying
        self._conditions: dict[str, Condition] = {}
        self.changed = False  # a card was lost, found or reconfigured: survey again

    def look(self, gpus: Sequence[Gpu], now: int) -> tuple[Sighting, ...]:
        """`now` is the boot clock's. What a card does not answer is not there."""
        self.changed = False
        cards = [gpu for gpu in gpus if gpu.vendor == "nvidia" and not gpu.simulated]
        if not cards:
            return tuple(Sighting(gpu) for gpu in gpus)
        told = self._xids()
        fresh = self._vitals_at is None or now >= self._vitals_at + VITALS_EVERY_US
        if fresh:
            self._vitals_at = now
        found = {gpu.uuid: self._see(gpu, told.get(gpu.uuid, ()), fresh, now) for gpu in cards}
        self._notice_changes(cards, now)
        alive = {process.pid for one in found.values() for process in one.ours}
        self._ours = dict.fromkeys(alive, True)  # a number may come back as another's
        self._killed = {pid: at for pid, at in self._killed.items() if pid in alive}
        return tuple(found.get(gpu.uuid, Sighting(gpu)) for gpu in gpus)

    def _see(self, gpu: Gpu, xids: tuple[int, ...], fresh: bool, now: int) -> Sighting:
        uuid, lost = gpu.uuid, False
        processes: tuple[GpuProcess, ...] = ()
        vitals = self._vitals.get(uuid, UNSEEN)
        try:
            processes = self._nvml.processes(uuid)
            if fresh:
                vitals = self._vitals[uuid] = self._nvml.vitals(uuid)
        except (GpuLost, NoDriver):
            lost, vitals = True, UNSEEN
        except NvmlError as error:
            if uuid not in self._unread:
                log.warning("gpu_not_read", gpu=uuid, error=str(error))
            self._unread.add(uuid)
        else:
            self._unread.discard(uuid)
        ours = tuple(process for process in processes if self._is_ours(process.pid))
        others = [process.pid for process in processes if process not in ours]
        # One that is not where the driver says may be a task of ours, seen from another process namespace.
        there = [pid for pid in others if has_card_open(pid, self._proc)]
        strangers = tuple(sorted({name_of(pid, self._proc) or f"process {pid}" for pid in there}))
        symptoms = symptoms_of(gpu, vitals, xids, self._hung_us(ours, now), lost)
        before = self._conditions.get(uuid, WELL)
        condition = self._conditions[uuid] = examine(symptoms, before, now)
        if condition.health is not before.health:
            say = log.info if condition.health is Health.HEALTHY else log.warning
            say("gpu_health", gpu=uuid, health=condition.health.value, why=condition.reason)
        return Sighting(gpu, vitals, ours, strangers, condition)

    def _is_ours(self, pid: int) -> bool:
        known = self._ours.get(pid)
        if known is None:
            known = self._ours[pid] = self._kin.has(pid)
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
            told = self._nvml.xids()
        except NvmlError:
            return {}
        found: dict[str, tuple[int, ...]] = {}
        for one in told:
            found[one.uuid] = (*found.get(one.uuid, ()), one.code)
        return found

    def _notice_changes(self, cards: Sequence[Gpu], now: int) -> None:
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


def marked(gpu: Gpu, condition: Condition) -> Gpu:
    """The GPU with its health put in; one in quarantine takes nothing new."""
    if condition.health is Health.HEALTHY:
        return gpu
    ails = condition.reason[:200]
    closed = gpu.closed
    if condition.health is Health.QUARANTINED:
        closed = f"in quarantine: {ails}"
    return replace(gpu, closed=closed, health=condition.health, ails=ails)

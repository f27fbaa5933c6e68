"""Detection of GPUs: NVIDIA's by NVML, others by their vendors' tools, or simulated ones."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gpool.agent.machine.detection import tools
from gpool.agent.machine.detection.nvml import Card, GpuLost, NoDriver, Nvml, NvmlError, Vitals
from gpool.agent.machine.detection.real_nvml import RealNvml
from gpool.agent.machine.detection.vendors import ParsedGpus, normalised
from gpool.core.errors import Invalid
from gpool.core.model import GIB, Gpu, GpuDetails
from gpool.core.trust.gpu_health import Health, Symptoms

__all__ = ["MEMORY_GIB", "Detector", "Survey", "detect", "normalised", "symptoms_of"]

# Memory of cards that can be simulated, by the name a user would ask for.
MEMORY_GIB = {
    "A10": 24,
    "A100": 80,
    "A10040GB": 40,
    "A10080GB": 80,
    "A10G": 24,
    "A40": 48,
    "B200": 180,
    "GB200": 186,
    "GTX1080TI": 11,
    "H100": 80,
    "H200": 141,
    "L4": 24,
    "L40": 48,
    "L40S": 48,
    "P100": 16,
    "RTX2080TI": 11,
    "RTX3060": 12,
    "RTX3070": 8,
    "RTX3080": 10,
    "RTX3090": 24,
    "RTX4060": 8,
    "RTX4070": 12,
    "RTX4080": 16,
    "RTX4090": 24,
    "RTX5070": 12,
    "RTX5080": 16,
    "RTX5090": 32,
    "RTXA4000": 16,
    "RTXA5000": 24,
    "RTXA6000": 48,
    "T4": 16,
    "V100": 16,
    "V10032GB": 32,
}
MOST_SIMULATED = 64
OTHERS_EVERY = 30
"""Surveys between two runs of other vendors' tools: some take a second."""
LOST = "it fell off the bus: it does not answer"


@dataclass(frozen=True, slots=True)
class Survey:
    gpus: tuple[Gpu, ...] = ()
    complaints: tuple[str, ...] = ()


class Detector:
    """A card that stops answering stays listed, closed, until its driver forgets it."""

    def __init__(
        self,
        simulate: str | None = None,
        nvml: Nvml | None = None,
        others: Callable[[], ParsedGpus] = tools.others,
    ) -> None:
        self._simulated = _simulated(simulate) if simulate else None
        self.nvml: Nvml = nvml if nvml is not None else RealNvml()
        self._others = others
        self._asked = 0
        self._parsed = ParsedGpus()
        self._known: dict[str, Gpu] = {}

    def survey(self) -> Survey:
        if self._simulated is not None:
            return Survey(self._simulated)
        gpus, complaints = self._nvidia()
        if self._asked % OTHERS_EVERY == 0:
            self._parsed = self._others()
        self._asked += 1
        first = 1 + max((gpu.index for gpu in gpus), default=-1)
        placed = [replace(gpu, index=first + at) for at, gpu in enumerate(self._parsed.gpus)]
        return Survey((*gpus, *placed), (*complaints, *self._parsed.complaints))

    def close(self) -> None:
        self.nvml.close()

    def _nvidia(self) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
        nvml, complaints = self.nvml, []
        try:
            nvml.open()
            uuids, lost, driver = nvml.uuids(), nvml.lost(), nvml.driver()
        except NoDriver:
            nvml.close()  # NVML must be initialised again after a driver was reloaded
            return tuple(map(_gone, self._known.values())), ()
        except NvmlError as error:
            return tuple(map(_gone, self._known.values())), (f"NVML: {error}",)
        cards: list[tuple[Card, tuple[str, ...], tuple[str, ...]]] = []
        for uuid in uuids:
            try:
                card = nvml.card(uuid)
                names = {one.id: one.name for one in nvml.mig_profiles(uuid)}
                made = [names.get(one.profile, "?") for one in nvml.mig_instances(uuid)]
                cards.append((card, tuple(names.values()), tuple(made)))
            except GpuLost:
                lost += 1
            except NvmlError as error:
                complaints.append(f"NVML, {uuid}: {error}")
        found = {gpu.uuid: gpu for gpu in _described(cards, driver)}
        missing = [gpu for uuid, gpu in self._known.items() if uuid not in found]
        if lost:
            if len(missing) < lost:
                complaints.append(f"NVML: {lost - len(missing)} GPUs do not answer; see dmesg")
            taken = {gpu.index for gpu in found.values()}
            for gpu in missing:
                if gpu.index not in taken:
                    found[gpu.uuid] = _gone(gpu)
        self._known = found
        return tuple(sorted(found.values(), key=lambda gpu: gpu.index)), tuple(complaints)


def _gone(gpu: Gpu) -> Gpu:
    return replace(gpu, closed=LOST, health=Health.QUARANTINED, ails=LOST)


def _described(
    cards: Iterable[tuple[Card, tuple[str, ...], tuple[str, ...]]], driver: str
) -> list[Gpu]:
    known = list(cards)
    index_of = {card.bus: card.index for card, _, _ in known if card.bus}
    found = []
    for card, profiles, instances in known:
        peers = [index_of[bus] for bus in card.nvlinks if bus in index_of]
        details = GpuDetails(
            source="nvml",
            driver=driver,
            capability=card.capability,
            bus=card.bus,
            pcie=card.pcie,
            power_limit_mw=card.power_limit_mw or 0,
            clock_mhz=card.clocks_mhz[0] if card.clocks_mhz else 0,
            links=tuple((peer, peers.count(peer)) for peer in sorted(set(peers))),
            mig=card.mig,
            mig_profiles=profiles,
            mig_instances=instances,
        )
        name = normalised(card.name)
        found.append(Gpu(card.index, card.uuid, name, "nvidia", card.memory_bytes, details=details))
    return found


def symptoms_of(
    gpu: Gpu, vitals: Vitals, xids: tuple[int, ...] = (), hung_us: int = 0, lost: bool = False
) -> Symptoms:
    return Symptoms(
        vitals.temperature_c,
        vitals.slowdown_c,
        vitals.shutdown_c,
        vitals.power_mw,
        gpu.details.power_limit_mw if gpu.details is not None else None,
        vitals.throttled,
        vitals.ecc_uncorrected,
        vitals.remap_pending,
        vitals.remap_failed,
        xids,
        hung_us,
        lost,
    )


def detect(simulate: str | None = None) -> tuple[Gpu, ...]:
    detector = Detector(simulate)
    try:
        return detector.survey().gpus
    finally:
        detector.close()


def _simulated(text: str) -> tuple[Gpu, ...]:
    found: list[Gpu] = []
    for part in text.split(","):
        name, _, count = part.strip().partition(":")
        model = re.sub(r"[^A-Z0-9]", "", name.upper())
        memory = MEMORY_GIB.get(model)
        if memory is None:
            raise Invalid(
                f"cannot simulate a {name!r}; known cards are {', '.join(sorted(MEMORY_GIB))}"
            )
        if count and not (count.isdecimal() and 1 <= int(count) <= MOST_SIMULATED):
            raise Invalid(
                f"{part.strip()!r}: the number after the colon must be 1 to {MOST_SIMULATED}"
            )
        for _ in range(int(count or "1")):
            index = len(found)
            uuid = "SIM-" + hashlib.sha256(f"{model}/{index}".encode()).hexdigest()[:32]
            found.append(Gpu(index, uuid, normalised(name), "nvidia", memory * GIB, simulated=True))
    return tuple(found)

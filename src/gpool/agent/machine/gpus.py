"""Detection of GPUs: NVIDIA's by NVML, others by their vendors' tools and the kernel, or simulated ones. Changes
nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpool.agent.machine import vendors
from gpool.agent.machine.drm import DrmCards
from gpool.agent.machine.numa import PCI, with_topology
from gpool.agent.machine.nvml import NVSWITCH, Card, GpuLost, NoDriver, Nvml, NvmlError, Vitals
from gpool.agent.machine.real_nvml import RealNvml
from gpool.agent.machine.vendors import ParsedGpus, normalised
from gpool.core.errors import Invalid
from gpool.core.gpu_health import Health, Symptoms
from gpool.core.model import GIB, Gpu, GpuDetails

DRM = Path("/sys/class/drm")
ASK_S = 10.0
MOST_BYTES = 4 * 1024**2
MOST_DEVICES = 64
ROCM = [
    "--showproductname",
    "--showmeminfo",
    "vram",
    "--showuniqueid",
    "--showbus",
    "--showdriverversion",
    "--json",
]

Ask = Callable[[list[str]], str | None]
"""Run a program and return its output; None if it is not installed."""


def ask(argv: list[str]) -> str | None:
    found = shutil.which(argv[0])
    if found is None:
        return None
    try:
        done = subprocess.run(
            [found, *argv[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=ASK_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{argv[0]}: {error}"  # not the tool's format: the parser reports this text
    return done.stdout[:MOST_BYTES].decode("utf-8", "replace")


def others(ask: Ask = ask, root: Path = DRM) -> ParsedGpus:
    """From the kernel where a vendor's tool is missing or lists none."""
    found = [_amd(ask), _intel(ask), _apple(ask)]
    known = {gpu.vendor for parsed in found for gpu in parsed.gpus}
    kernel = vendors.drm(_cards(root))
    found.append(
        ParsedGpus(tuple(gpu for gpu in kernel.gpus if gpu.vendor not in known), kernel.complaints)
    )
    return ParsedGpus(
        tuple(gpu for parsed in found for gpu in parsed.gpus),
        tuple(text for parsed in found for text in parsed.complaints),
    )


def _amd(ask: Ask) -> ParsedGpus:
    static = ask(["amd-smi", "static", "--json"])
    if static is not None:
        parsed = vendors.amd_smi(static, ask(["amd-smi", "list", "--json"]) or "")
        if parsed.gpus:
            return parsed
    older = ask(["rocm-smi", *ROCM])
    if older is not None:
        return vendors.rocm_smi(older)
    return parsed if static is not None else ParsedGpus()


def _intel(ask: Ask) -> ParsedGpus:
    listing = ask(["xpu-smi", "discovery", "-j"])
    if listing is None:
        return ParsedGpus()
    ids = vendors.xpu_ids(listing)[:MOST_DEVICES]
    details = {one: ask(["xpu-smi", "discovery", "-d", one, "-j"]) or "" for one in ids}
    return vendors.xpu_smi(listing, details)


def _apple(ask: Ask) -> ParsedGpus:
    kinds = ["SPDisplaysDataType", "SPHardwareDataType"]
    text = ask(["system_profiler", "-json", *kinds])
    return ParsedGpus() if text is None else vendors.apple(text)


def _cards(root: Path) -> Mapping[str, Mapping[str, str]]:
    cards = {}
    for card in sorted(root.glob("card[0-9]*")) if root.is_dir() else ():
        device = card / "device"
        if "-" in card.name or not device.is_dir():  # card0-HDMI-A-1 is a connector
            continue
        files = {
            "vendor": _word(device / "vendor"),
            "device": _word(device / "device"),
            "unique_id": _word(device / "unique_id"),
            "name": _word(device / "product_name"),
            "bus": os.path.basename(os.path.realpath(device)),
            "vram": _word(device / "mem_info_vram_total") or _word(card / "lmem_total_bytes"),
        }
        cards[card.name] = {name: text for name, text in files.items() if text}
    return cards


def _word(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()[:200]
    return ""


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
        others: Callable[[], ParsedGpus] = others,
        drm: DrmCards | None = None,
        pci: Path = PCI,
        guests: Callable[[int], Sequence[Gpu]] = lambda _first: (),
    ) -> None:
        """`guests` lists the GPUs dedicated to guests, numbered from its argument: no driver here holds them."""
        self._pci = pci
        self._guests = guests
        self._simulated = _simulated(simulate) if simulate else None
        self.nvml: Nvml = nvml if nvml is not None else RealNvml()
        self._others = others
        self.drm = drm if drm is not None else DrmCards()
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
        found = (*gpus, *self.drm.described(placed))
        every = with_topology((*found, *self._guests(first + len(placed))), self._pci)
        return Survey(every, (*complaints, *self._parsed.complaints))

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
    switched = {card.index: card.nvlinks.count(NVSWITCH) for card, _, _ in known}
    for card, profiles, instances in known:
        peers = [index_of[bus] for bus in card.nvlinks if bus in index_of]
        for other, count in switched.items():
            if other != card.index:
                peers += [other] * min(count, switched[card.index])
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

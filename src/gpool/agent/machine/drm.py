"""Cards of the kernel's DRM drivers (amdgpu, i915, xe): device nodes, readings and processes. Reads sysfs and procfs only.

Never run on a real card: the formats follow the kernel's documentation (`tests/agent/detect/recorded/drm`).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpool.agent.machine.nvml import GpuLost, GpuProcess, Vitals
from gpool.core.model import KIB, MIB, Gpu

AMD, INTEL = "amd", "intel"
DRM_VENDORS = frozenset({AMD, INTEL})
VENDOR_IDS = {"0x1002": AMD, "0x8086": INTEL}
KFD = "kfd"
_UNITS = {"": 1, "KiB": KIB, "MiB": MIB}
_MEMORY_KEY = re.compile(r"drm-(resident|memory|total)-(\S+)")
_AMOUNT = re.compile(r"(\d+)\s*(KiB|MiB)?")
_ON_CARD = ("vram", "local")
_PREFERENCE = ("total", "memory", "resident")  # the last one found counts
_THERMAL, _POWER = ("thermal", "prochot", "ratl"), ("pl1", "pl2", "pl4", "vr_tdc")


@dataclass(frozen=True, slots=True)
class DrmRoots:
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    proc: Path = Path("/proc")


@dataclass(frozen=True, slots=True)
class DrmCard:
    bus: str  # "0000:c1:00.0"
    vendor: str
    minor: int  # of the render node
    device: Path  # the PCI device in sysfs
    cards: tuple[str, ...]  # names of its primary nodes, "card0"


@dataclass(slots=True)
class _Usage:
    """Memory of one process on one card."""

    card_bytes: int = 0
    host_bytes: int = 0
    is_known: bool = False


class DrmCards:
    """Readings and processes by bus address. Calls block for milliseconds: use a thread."""

    def __init__(self, roots: DrmRoots = DrmRoots()) -> None:  # noqa: B008 - frozen
        self._roots = roots
        self._energy: dict[str, tuple[int, int]] = {}  # bus: microjoules and microseconds

    def found(self) -> dict[str, DrmCard]:
        """Cards with a render node, by bus address."""
        cards: dict[str, DrmCard] = {}
        folder = self._roots.sys / "class" / "drm"
        for entry in sorted(folder.glob("renderD*")) if folder.is_dir() else ():
            device, number = entry / "device", entry.name.removeprefix("renderD")
            vendor = VENDOR_IDS.get(_text(device / "vendor").lower())
            if vendor is None or not number.isdecimal():
                continue
            real = Path(os.path.realpath(device))
            names = tuple(sorted(each.name for each in (real / "drm").glob("card[0-9]*")))
            cards[real.name.lower()] = DrmCard(real.name.lower(), vendor, int(number), real, names)
        return cards

    def node(self, card: DrmCard) -> Path:
        return self._roots.dev / "dri" / f"renderD{card.minor}"

    def nodes(self, card: DrmCard) -> tuple[str, ...]:
        """Device nodes of a sandbox that has this card. `/dev/kfd` is one for all AMD cards; it opens none by itself."""
        kfd = (str(self._roots.dev / KFD),) if card.vendor == AMD else ()
        return (*kfd, str(self.node(card)))

    def described(self, gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
        """The GPUs; cards without a usable device node are closed, with the reason."""
        cards = self.found()
        return tuple(
            replace(gpu, closed=gpu.closed or self._problem(cards.get(bus_of(gpu))))
            if gpu.vendor in DRM_VENDORS and not gpu.simulated
            else gpu
            for gpu in gpus
        )

    def _problem(self, card: DrmCard | None) -> str:
        if card is None:
            return "the kernel has no render node for it: load its driver (amdgpu, xe or i915)"
        for node in self.nodes(card):
            why = node_problem(Path(node))
            if why:
                return why
        return ""

    # ---- readings

    def vitals(self, gpu: Gpu, now: int, processes: Sequence[GpuProcess] = ()) -> Vitals:
        """`now` in microseconds; `processes`: the card's, whose memory counts where the driver reports no sum. Raises
        `GpuLost` if the kernel has no such card any more.
        """
        card = self.found().get(bus_of(gpu))
        if card is None:
            raise GpuLost(f"{gpu.uuid}: no render node for {bus_of(gpu)}")
        device, sensors = card.device, _sensors(card.device)
        used = _number(device / "mem_info_vram_used")
        if used is None:
            held = [one.memory_bytes for one in processes]
            known = [bytes_ for bytes_ in held if bytes_ is not None]
            used = sum(known) if len(known) == len(held) else None
        pending, failed = _bad_pages(_text(device / "ras" / "gpu_vram_bad_pages"))
        return Vitals(
            utilisation_percent=_number(device / "gpu_busy_percent"),
            memory_used_bytes=used,
            power_mw=self._power(card.bus, sensors, now),
            temperature_c=sensors.temperature_c,
            slowdown_c=sensors.slowdown_c,
            shutdown_c=sensors.shutdown_c,
            throttled=_throttled(card),
            ecc_uncorrected=_uncorrected(device / "ras"),
            remap_pending=pending,
            remap_failed=failed,
        )

    def _power(self, bus: str, sensors: _Sensors, now: int) -> int | None:
        if sensors.power_mw is not None:
            return sensors.power_mw
        if sensors.energy_uj is None:
            return None
        before, self._energy[bus] = self._energy.get(bus), (sensors.energy_uj, now)
        if before is None or now <= before[1] or sensors.energy_uj < before[0]:
            return None
        return (sensors.energy_uj - before[0]) * 1000 // (now - before[1])

    # ---- processes

    def processes(self, gpu: Gpu) -> tuple[GpuProcess, ...]:
        """Processes that have the card open, with their memory on the card and, for it, in the host."""
        found = self.all_processes([gpu])
        if gpu.uuid not in found:
            raise GpuLost(f"{gpu.uuid}: no render node for {bus_of(gpu)}")
        return found[gpu.uuid]

    def all_processes(self, gpus: Sequence[Gpu]) -> dict[str, tuple[GpuProcess, ...]]:
        """`processes` of each card that is there, by uuid, in one walk over all processes of the host."""
        cards = self.found()
        usage: dict[str, dict[int, _Usage]] = {}
        nodes: dict[str, str] = {}  # how a descriptor of the card is named: its bus address
        for gpu in gpus:
            card = cards.get(bus_of(gpu))
            if card is not None:
                usage[card.bus] = {}
                names = (f"renderD{card.minor}", *card.cards)
                nodes |= {f"/dri/{name}": card.bus for name in names}
        clients: set[str] = set()  # a client open in several processes counts once
        for pid in _pids(self._roots.proc) if nodes else ():
            self._add_descriptors(pid, nodes, usage, clients)
        for bus, held in usage.items():
            self._add_kfd(cards[bus], held)
        return {
            gpu.uuid: tuple(
                GpuProcess(pid, one.card_bytes if one.is_known else None, host_bytes=one.host_bytes)
                for pid, one in sorted(usage[bus_of(gpu)].items())
            )
            for gpu in gpus
            if bus_of(gpu) in usage
        }

    def _add_descriptors(
        self,
        pid: int,
        nodes: Mapping[str, str],
        usage: Mapping[str, dict[int, _Usage]],
        clients: set[str],
    ) -> None:
        """By the end of a link's path: a sandbox has its own /dev."""
        here = self._roots.proc / str(pid)
        with contextlib.suppress(OSError):
            for name in os.listdir(here / "fd"):
                try:
                    target = os.readlink(here / "fd" / name)
                except OSError:
                    continue
                folder, _, last = target.rpartition("/")
                bus = nodes.get(f"/dri/{last}") if folder.endswith("/dri") else None
                if bus is None:
                    continue
                found = usage[bus].setdefault(pid, _Usage())
                facts = fdinfo(_text(here / "fdinfo" / name))
                client = facts.get("drm-client-id", f"{pid}/{name}")
                if f"{bus} {client}" in clients:
                    continue
                clients.add(f"{bus} {client}")
                on_card, in_host, is_known = memory_of(facts)
                found.card_bytes += on_card
                found.host_bytes += in_host
                found.is_known |= is_known

    def _add_kfd(self, card: DrmCard, usage: dict[int, _Usage]) -> None:
        """ROCm's memory as the compute driver counts it; older kernels omit it in fdinfo."""
        kfd = self._roots.sys / "class" / "kfd" / "kfd"
        gpu_id = self._gpu_id(kfd, card) if card.vendor == AMD else ""
        if not gpu_id or not (kfd / "proc").is_dir():
            return
        for entry in (kfd / "proc").iterdir():
            held = _number(entry / f"vram_{gpu_id}") if entry.name.isdecimal() else None
            if held:
                one = usage.setdefault(int(entry.name), _Usage())
                one.card_bytes, one.is_known = max(one.card_bytes, held), True

    def _gpu_id(self, kfd: Path, card: DrmCard) -> str:
        for node in (kfd / "topology" / "nodes").glob("[0-9]*"):
            lines = _text(node / "properties").splitlines()
            properties = dict(line.split(" ", 1) for line in lines if " " in line)
            if properties.get("drm_render_minor", "").strip() == str(card.minor):
                return _text(node / "gpu_id")
        return ""

    def is_running(self, pid: int) -> bool:
        return (self._roots.proc / str(pid)).exists()


def bus_of(gpu: Gpu) -> str:
    return gpu.details.bus.lower() if gpu.details is not None else ""


def node_problem(node: Path) -> str:
    """Why sandboxes could not open a device node; empty if they can."""
    try:
        facts = node.stat()
    except OSError:
        return f"{node} is missing: load the card's driver"
    if not stat.S_ISCHR(facts.st_mode):
        return f"{node} is no device node"
    if facts.st_mode & 0o006 == 0o006:
        return ""
    if facts.st_mode & 0o060 != 0o060:
        return f"{node} is closed to its group: chmod 660 {node}"
    if os.geteuid() == 0:
        return "" if facts.st_gid else f"{node} belongs to the group root: chgrp render {node}"
    if facts.st_gid in (os.getegid(), *os.getgroups()):
        return ""
    return f"{node} is closed to the agent: add it to the group {facts.st_gid} (usermod -aG)"


def node_groups(nodes: Iterable[str]) -> tuple[int, ...]:
    """Groups that a sandbox needs for device nodes that are not open to all. Never the group root."""
    found = []
    for node in nodes:
        with contextlib.suppress(OSError):
            facts = os.stat(node)
            if facts.st_mode & 0o006 != 0o006 and facts.st_mode & 0o060 == 0o060 and facts.st_gid:
                found.append(facts.st_gid)
    return tuple(dict.fromkeys(found))


# ---- parsing


@dataclass(frozen=True, slots=True)
class _Sensors:
    temperature_c: int | None = None
    slowdown_c: int | None = None
    shutdown_c: int | None = None
    power_mw: int | None = None
    energy_uj: int | None = None


def _sensors(device: Path) -> _Sensors:
    """Of the temperatures, the one nearest to its critical value."""
    heats: list[tuple[int, int, int | None, int | None]] = []
    power = energy = None
    for monitor in sorted((device / "hwmon").glob("hwmon*")):
        for file in sorted(monitor.glob("temp*_input")):
            heat = _number(file)
            if heat is None:
                continue
            stem = file.name.removesuffix("_input")
            critical, emergency = (
                _number(monitor / f"{stem}_{word}") for word in ("crit", "emergency")
            )
            margin = (critical if critical is not None else 1 << 30) - heat
            heats.append((margin, heat, critical, emergency))
        for name in ("power1_average", "power1_input"):
            watts = _number(monitor / name)
            power = power if power is not None or watts is None else watts // 1000
        joules = _number(monitor / "energy1_input")
        energy = energy if joules is None else joules
    if not heats:
        return _Sensors(power_mw=power, energy_uj=energy)
    _, heat, critical, emergency = min(heats, key=lambda one: one[0])
    return _Sensors(
        heat // 1000,
        None if critical is None else critical // 1000,
        None if emergency is None else emergency // 1000,
        power,
        energy,
    )


def _throttled(card: DrmCard) -> frozenset[str]:
    """Intel: files `throttle_reason_*` (i915) and `throttle/reason_*` (xe) that read 1."""
    found = set()
    files = [
        *card.device.glob("drm/card[0-9]*/gt/gt*/throttle_reason_*"),
        *card.device.glob("tile*/gt*/freq*/throttle/reason_*"),
    ]
    for file in files:
        word = file.name.partition("reason_")[2]
        if _text(file) == "1":
            found |= {"thermal"} if word in _THERMAL else {"power"} if word in _POWER else set()
    return frozenset(found)


def _uncorrected(ras: Path) -> int | None:
    counts = []
    for file in sorted(ras.glob("*_err_count")) if ras.is_dir() else ():
        facts = dict(line.split(":", 1) for line in _text(file).splitlines() if ":" in line)
        if facts.get("ue", "").strip().isdecimal():
            counts.append(int(facts["ue"]))
    return sum(counts) if counts else None


def _bad_pages(text: str) -> tuple[bool, bool]:
    """(replaced at the next reset, cannot be replaced), of lines like `0x1234 : 0x1000 : P`."""
    states = {line.rpartition(":")[2].strip() for line in text.splitlines() if ":" in line}
    return "P" in states, "F" in states


def fdinfo(text: str) -> dict[str, str]:
    found = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.startswith("drm-"):
            found[key.strip()] = value.strip()
    return found


def memory_of(facts: Mapping[str, str]) -> tuple[int, int, bool]:
    """(bytes on the card, bytes in the host, whether any was reported) of one client."""
    regions: dict[str, dict[str, int]] = {}
    for key, value in facts.items():
        named, amount = _MEMORY_KEY.fullmatch(key), _AMOUNT.fullmatch(value)
        if named is not None and amount is not None:
            regions.setdefault(named[2], {})[named[1]] = int(amount[1]) * _UNITS[amount[2] or ""]
    on_card = in_host = 0
    for region, kinds in regions.items():
        held = next(kinds[kind] for kind in reversed(_PREFERENCE) if kind in kinds)
        if region.startswith(_ON_CARD):
            on_card += held
        elif not region.startswith("stolen"):
            in_host += held
    return on_card, in_host, bool(regions)


def _pids(proc: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield from sorted(int(name) for name in os.listdir(proc) if name.isdecimal())


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()[: 1 << 16].strip()
    return ""

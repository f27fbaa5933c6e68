"""GPUs that the owner dedicates to guests (`GPOOL_AGENT_VFIO`): bound to vfio-pci while the agent runs (decision 0030).

Reads and writes sysfs beneath `root` only; `write` is the one way it changes the kernel. Not run on real hardware yet.
A card is bound before NVML opens any, so nothing is unbound while tasks run, and returned to its driver at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from gpool.agent.machine.gpus import Ask, ask
from gpool.agent.machine.vendors import normalised
from gpool.core.errors import Invalid
from gpool.core.model import MIB, Gpu, GpuDetails, Sharing
from gpool.core.specs import gpu as gpuspec

SYSFS, DEVICES, PROC = Path("/sys"), Path("/dev"), Path("/proc")
MACHINE_ID = Path("/etc/machine-id")
DRIVER = "vfio-pci"
VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
DISPLAY, BRIDGE = "0x03", "0x0604"  # first digits of a PCI class
ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits")
RECORD = "vfio.json"

Write = Callable[[Path, str], None]
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DedicatedCard:
    """One entry of the setting; `model` and `memory_bytes` are the owner's word, empty and 0 if not given."""

    address: str
    model: str = ""
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BoundCard:
    address: str
    vendor: str
    uuid: str
    model: str
    memory_bytes: int
    drivers: tuple[tuple[str, str], ...]  # function of the slot -> its driver before; "" for none


def parse_dedicated(text: str) -> tuple[DedicatedCard, ...]:
    """`0000:41:00.0`, or `0000:41:00.0=H100:80GB` for a card whose driver cannot be asked. Raises `Invalid`."""
    found = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        address, equals, described = word.partition("=")
        if not ADDRESS.fullmatch(address.lower()):
            raise Invalid(f"{address!r} is no PCI address; write it as lspci -D does: 0000:41:00.0")
        model, colon, memory = described.partition(":")
        if equals and not (model and colon and memory):
            raise Invalid(f"{word!r}: after '=' model and memory are needed, like H100:80GB")
        size = gpuspec.parse_bytes(memory) if memory else 0
        found.append(DedicatedCard(address.lower(), normalised(model) if model else "", size))
    twice = [card.address for card in found if [c.address for c in found].count(card.address) > 1]
    if twice:
        raise Invalid(f"{twice[0]} is named twice")
    return tuple(found)


def write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)


class PciTree:
    """The kernel's view of PCI devices and IOMMU groups."""

    def __init__(self, root: Path = SYSFS, write: Write = write_text) -> None:
        self.root = root
        self.write = write

    def device(self, address: str) -> Path:
        return self.root / "bus/pci/devices" / address

    def word(self, address: str, name: str) -> str:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (self.device(address) / name).read_text().strip("\n\0 ")
        return ""

    def driver(self, address: str) -> str:
        link = self.device(address) / "driver"
        return os.path.basename(os.readlink(link)) if link.is_symlink() else ""

    def group(self, address: str) -> str:
        """Number of its IOMMU group; empty without an IOMMU."""
        link = self.device(address) / "iommu_group"
        return os.path.basename(os.readlink(link)) if link.is_symlink() else ""

    def members(self, address: str) -> list[str]:
        group = self.root / "kernel/iommu_groups" / self.group(address) / "devices"
        return sorted(path.name for path in group.iterdir()) if group.is_dir() else []

    def functions(self, address: str) -> list[str]:
        """Functions of the card's slot in its IOMMU group, such as its audio device: all must leave their drivers."""
        slot = address.rpartition(".")[0]
        return [one for one in self.members(address) if one.rpartition(".")[0] == slot]

    def gpus(self) -> list[str]:
        folder = self.root / "bus/pci/devices"
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        return [
            address
            for address in found
            if self.word(address, "class").startswith(DISPLAY)
            and self.word(address, "vendor") in VENDORS
        ]


def unfit_card(tree: PciTree, address: str) -> str:
    """Why a card cannot be given to a guest; empty if it can."""
    if not tree.device(address).exists():
        return "there is no such PCI device (lspci -D lists them)"
    kind, vendor = tree.word(address, "class"), tree.word(address, "vendor")
    if not kind.startswith(DISPLAY) or vendor not in VENDORS:
        return f"it is no GPU of NVIDIA, AMD or Intel (class {kind}, vendor {vendor})"
    if not tree.group(address):
        return "it has no IOMMU group: switch on VT-d or AMD-Vi in the firmware, and intel_iommu=on"
    if tree.word(address, "boot_vga") == "1":
        return "it is the display the machine boots with"
    slot = address.rpartition(".")[0]
    others = [
        other
        for other in tree.members(address)
        if other.rpartition(".")[0] != slot and not tree.word(other, "class").startswith(BRIDGE)
    ]
    if others:
        return f"its IOMMU group holds other devices ({', '.join(others)}); another slot may not"
    if tree.word(address, "sriov_numvfs") not in ("", "0"):
        return "it has virtual functions: write 0 to its sriov_numvfs"
    if not (tree.device(address) / "reset").exists():
        return "the kernel knows no way to reset it, so it could not be lent twice"
    return ""


def holders_of(tree: PciTree, address: str, proc: Path = PROC) -> list[int]:
    """Processes that hold the card open: its driver would wait for their end for ever, in the kernel."""
    nodes = {f"/dev/dri/{one.name}" for one in (tree.device(address) / "drm").glob("[cr]*")}
    with contextlib.suppress(OSError):
        text = (proc / "driver/nvidia/gpus" / address / "information").read_text()
        minor = next(line for line in text.splitlines() if line.startswith("Device Minor"))
        nodes.add(f"/dev/nvidia{minor.partition(':')[2].strip()}")
    found = []
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if nodes & {os.readlink(one) for one in (process / "fd").iterdir()}:
                found.append(int(process.name))
    return sorted(found)


class DedicatedCards:
    """Binds, resets and returns the cards. Blocks; `reset` may take seconds."""

    def __init__(
        self,
        data_dir: Path,
        wanted: Sequence[DedicatedCard] = (),
        *,
        untested: bool = True,
        tree: PciTree | None = None,
        ask: Ask = ask,
        proc: Path = PROC,
        devices: Path = DEVICES,
    ) -> None:
        self._record = data_dir / RECORD
        self._wanted = tuple(wanted)
        self._untested = untested  # lent to the owner and the owner's teams only
        self._tree = tree if tree is not None else PciTree()
        self._ask = ask
        self._proc = proc
        self._devices = devices
        self._bound: dict[str, BoundCard] = {}
        self.unclean: dict[str, str] = {}
        """By address: why a card could not be reset. It takes no guest until the agent starts again."""

    def bind(self) -> None:
        """Raises `Invalid` for a card that does not qualify; then none is bound."""
        before = self._recorded()
        for address, card in before.items():
            if address not in {one.address for one in self._wanted}:
                self._give_back(card)  # an earlier agent ended before it could
        try:
            for one in self._wanted:
                self._bind(one, before.get(one.address))
        except (Invalid, OSError) as failure:
            self.release()
            if isinstance(failure, Invalid):
                raise
            raise Invalid(f"GPOOL_AGENT_VFIO: the kernel refused: {failure}") from failure

    def release(self) -> None:
        """Return every card to the driver it had. A card that cannot be reset stays with vfio-pci."""
        for address, card in list(self._bound.items()):
            if not self.reset(address):
                self._give_back(card)
            del self._bound[address]

    def gpus(self, first: int) -> tuple[Gpu, ...]:
        """The cards as GPUs of tier vm, numbered from `first`."""
        return tuple(
            Gpu(
                first + at,
                card.uuid,
                card.model,
                card.vendor,
                card.memory_bytes,
                closed=self.unclean.get(card.address, ""),
                details=GpuDetails(source="vfio", driver=DRIVER, bus=card.address),
                sharing=Sharing.EXCLUSIVE,
                untested=self._untested,
                guest=True,
            )
            for at, card in enumerate(self._bound.values())
        )

    def reset(self, address: str) -> str:
        """Return why it failed; empty if the card is clean. Called before a card is lent again, and before its return."""
        try:
            self._tree.write(self._tree.device(address) / "reset", "1")
        except OSError as refused:
            why = f"it could not be reset: {refused.strerror or refused}"
            log.warning("gpu_unclean", gpu=address, why=why)
            self.unclean[address] = why
        return self.unclean.get(address, "")

    def node_of(self, address: str) -> Path:
        return self._devices / "vfio" / self._tree.group(address)

    @contextlib.contextmanager
    def opened(self, addresses: Sequence[str], uid: int) -> Iterator[tuple[str, ...]]:
        """Let a monitor's uid open the groups of these cards; yields the device nodes it needs."""
        nodes = [self.node_of(address) for address in addresses]
        try:
            for node in nodes:
                os.chown(node, uid, uid)
            yield (str(self._devices / "vfio/vfio"), *map(str, nodes))
        finally:
            for node in nodes:
                with contextlib.suppress(OSError):
                    if node.stat().st_uid == uid:  # else the next guest has it already
                        os.chown(node, 0, 0)

    def _bind(self, wanted: DedicatedCard, before: BoundCard | None) -> None:
        tree, address = self._tree, wanted.address
        why = unfit_card(tree, address)
        if not why and tree.driver(address) != DRIVER:
            holding = holders_of(tree, address, self._proc)
            why = f"process {holding[0]} has it open" if holding else self._no_driver()
        if why:
            raise Invalid(f"GPOOL_AGENT_VFIO: {address} cannot be given to guests: {why}")
        card = self._described(wanted, before)
        self._bound[address] = card
        self._keep()  # first: whatever happens, the drivers of before are known
        for function, _ in card.drivers:
            self._move(function, DRIVER)
        log.info("gpu_dedicated", gpu=address, model=card.model, functions=len(card.drivers))

    def _no_driver(self) -> str:
        if not (self._tree.root / "bus/pci/drivers" / DRIVER).exists():
            subprocess.run(["modprobe", DRIVER], capture_output=True, check=False)
        missing = not (self._tree.root / "bus/pci/drivers" / DRIVER).exists()
        return f"the kernel has no driver {DRIVER}: modprobe {DRIVER}" if missing else ""

    def _described(self, wanted: DedicatedCard, before: BoundCard | None) -> BoundCard:
        """From the owner, the card's driver or an earlier agent's record, in this order."""
        tree, address = self._tree, wanted.address
        vendor = VENDORS[tree.word(address, "vendor")]
        functions = tree.functions(address)
        drivers = tuple((one, tree.driver(one)) for one in functions)
        if before is not None:
            known = dict(before.drivers)
            drivers = tuple((one, known.get(one, was)) for one, was in drivers)
        uuid, model, memory = self._asked(address, vendor)
        if before is not None and not memory:
            uuid, model, memory = before.uuid, before.model, before.memory_bytes
        model, memory = wanted.model or model, wanted.memory_bytes or memory
        if not model or not memory:
            raise Invalid(
                f"GPOOL_AGENT_VFIO: model and memory of {address} are unknown, as no driver holds it: "
                f"write {address}=H100:80GB"
            )
        return BoundCard(address, vendor, uuid or self._own_uuid(address), model, memory, drivers)

    def _asked(self, address: str, vendor: str) -> tuple[str, str, int]:
        if vendor == "nvidia" and self._tree.driver(address) == "nvidia":
            line = (self._ask([*NVIDIA_SMI, "-i", address]) or "").strip()
            words = [word.strip() for word in line.split(",")]
            if len(words) == 3 and words[2].isdecimal():
                return words[0], normalised(words[1]), int(words[2]) * MIB
        memory = self._tree.word(address, "mem_info_vram_total")
        name = self._tree.word(address, "product_name")
        return "", normalised(name) if name else "", int(memory) if memory.isdecimal() else 0

    def _own_uuid(self, address: str) -> str:
        host = MACHINE_ID.read_text().strip() if MACHINE_ID.exists() else ""
        return "VFIO-" + hashlib.sha256(f"{host}/{address}".encode()).hexdigest()[:32]

    def _move(self, function: str, driver: str) -> None:
        """To `driver`, or ("") to the one that the kernel finds for it."""
        tree = self._tree
        now = tree.driver(function)
        if now == driver and driver:
            return
        device = tree.device(function)
        tree.write(device / "driver_override", f"{driver}\n")
        if now:
            tree.write(device / "driver/unbind", function)
        tree.write(tree.root / "bus/pci/drivers_probe", function)
        if driver and tree.driver(function) != driver:
            raise OSError(
                f"{function} is with {tree.driver(function) or 'no driver'}, not {driver}"
            )

    def _give_back(self, card: BoundCard) -> None:
        for function, driver in card.drivers:
            if driver == DRIVER:
                continue  # the owner had bound it at boot
            try:
                self._move(function, "")
            except OSError as refused:
                log.warning("gpu_not_returned", gpu=function, why=str(refused))
        log.info("gpu_returned", gpu=card.address)
        self._keep(without=card.address)

    def _recorded(self) -> dict[str, BoundCard]:
        with contextlib.suppress(OSError, ValueError, TypeError):
            rows = json.loads(self._record.read_text())
            cards = [BoundCard(**row) for row in rows]
            return {
                card.address: replace(
                    card, drivers=tuple((name, was) for name, was in card.drivers)
                )
                for card in cards
            }
        return {}

    def _keep(self, without: str = "") -> None:
        kept = {**self._recorded(), **self._bound}
        kept.pop(without, None)
        rows = [
            {name: getattr(card, name) for name in BoundCard.__slots__} for card in kept.values()
        ]
        self._record.write_text(json.dumps(rows))

"""Fake of `gpool.agent.machine.nvml.Nvml`; a test sets the cards and their faults."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gpool.agent.machine.nvml import (
    DEFAULT_COMPUTE,
    Card,
    GpuLost,
    GpuProcess,
    MigInstance,
    MigProfile,
    NoDriver,
    NotPermitted,
    NvmlError,
    Vitals,
    Xid,
)
from gpool.core.model import GIB, MIB

IDLE = Vitals(0, 0, 76_000, 31, 87, 92, frozenset(), 0)
H200_PROFILES = (
    MigProfile(19, "1g.18gb", 16_384 * MIB, 1, 7, 1, (0, 1, 2, 3, 4, 5, 6)),
    MigProfile(20, "1g.18gb+me", 16_384 * MIB, 1, 1, 1, (0, 1, 2, 3, 4, 5, 6)),
    MigProfile(15, "1g.35gb", 33_280 * MIB, 1, 4, 2, (0, 2, 4, 6)),
    MigProfile(14, "2g.35gb", 33_280 * MIB, 2, 3, 2, (0, 2, 4)),
    MigProfile(9, "3g.71gb", 71_424 * MIB, 3, 2, 4, (0, 4)),
    MigProfile(5, "4g.71gb", 71_424 * MIB, 4, 1, 4, (0,)),
    MigProfile(0, "7g.141gb", 143_360 * MIB, 7, 1, 8, (0,)),
)
"""As driver 580.159 lists them."""


def h200(index: int = 0) -> Card:
    return Card(
        index,
        f"GPU-00000000-0000-0000-0000-{index:012d}",
        "NVIDIA H200",
        140 * GIB,
        "9.0",
        f"0000:{0x19 + index:02x}:00.0",
        index,
        "gen5 x16",
        700_000,
        (200_000, 700_000),
        (1980, 3201),
        mig=False,
    )


@dataclass(slots=True)
class FakeCard:
    card: Card
    vitals: Vitals = IDLE
    processes: tuple[GpuProcess, ...] = ()
    compute_mode: str = DEFAULT_COMPUTE
    clocks: tuple[int, int] | None = (3201, 1980)
    profiles: tuple[MigProfile, ...] = H200_PROFILES
    instances: dict[int, MigInstance] = field(default_factory=dict)
    lost: bool = False


class FakeNvml:
    """`cards` may change at any time; `root`: may change settings of cards."""

    def __init__(self, *cards: Card, root: bool = True, driver: str = "580.95.05") -> None:
        self.cards = {card.uuid: FakeCard(card) for card in cards}
        self.root = root
        self.told: list[Xid] = []
        self.calls = 0
        self._driver = driver
        self._open = False
        self._made = 0

    def open(self) -> None:
        if not self._driver:
            raise NoDriver("Driver Not Loaded")
        self._open = True

    def close(self) -> None:
        self._open = False

    def driver(self) -> str:
        self._check()
        return self._driver

    def uuids(self) -> tuple[str, ...]:
        self._check()
        return tuple(uuid for uuid, one in self.cards.items() if not one.lost)

    def lost(self) -> int:
        self._check()
        return sum(one.lost for one in self.cards.values())

    def card(self, uuid: str) -> Card:
        return self._card(uuid).card

    def vitals(self, uuid: str) -> Vitals:
        return self._card(uuid).vitals

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        return self._card(uuid).processes

    def xids(self) -> tuple[Xid, ...]:
        self._check()
        told, self.told = tuple(self.told), []
        return told

    # ---- changing a card

    def set_power_limit(self, uuid: str, milliwatts: int) -> None:
        one = self._changed(uuid)
        least, most = one.card.power_limits_mw or (0, 0)
        if not least <= milliwatts <= most:
            raise NvmlError("Invalid Argument")
        one.card = replace(one.card, power_limit_mw=milliwatts)

    def compute_mode(self, uuid: str) -> str:
        return self._card(uuid).compute_mode

    def set_compute_mode(self, uuid: str, mode: str) -> None:
        self._changed(uuid).compute_mode = mode

    def reset_clocks(self, uuid: str) -> None:
        one = self._changed(uuid)
        if one.card.power_limits_mw is not None:
            one.card = replace(one.card, power_limit_mw=one.card.power_limits_mw[1])

    def application_clocks(self, uuid: str) -> tuple[int, int] | None:
        return self._card(uuid).clocks

    def set_application_clocks(self, uuid: str, clocks: tuple[int, int]) -> None:
        one = self._changed(uuid)
        if one.clocks is None:
            raise NvmlError("Not Supported")
        one.clocks = clocks

    def set_mig(self, uuid: str, on: bool) -> None:
        one = self._changed(uuid)
        if one.card.mig is None:
            raise NvmlError("Not Supported")
        if one.card.mig == on:
            return
        if one.processes or one.instances:
            raise NvmlError("In use by another client")
        one.card = replace(one.card, mig=on)

    def mig_profiles(self, uuid: str) -> tuple[MigProfile, ...]:
        one = self._card(uuid)
        return () if one.card.mig is None else one.profiles

    def mig_instances(self, uuid: str) -> tuple[MigInstance, ...]:
        return tuple(self._card(uuid).instances.values())

    def make_mig(self, uuid: str, profile: int, start: int | None = None) -> MigInstance:
        one = self._changed(uuid)
        by_id = {each.id: each for each in one.profiles}
        wanted = by_id.get(profile)
        if wanted is None or not one.card.mig:
            raise NvmlError("Invalid Argument")
        taken = {
            place
            for made in one.instances.values()
            for place in range(made.start, made.start + by_id[made.profile].size)
        }
        free = [at for at in wanted.starts if taken.isdisjoint(range(at, at + wanted.size))]
        if not free or (start is not None and start not in free):
            raise NvmlError("Insufficient Resources")
        self._made += 1
        name = f"MIG-00000000-0000-0000-0000-{self._made:012d}"
        at = free[-1] if start is None else start
        made = MigInstance(self._made, name, profile, wanted.memory_bytes, 0, at)
        one.instances[made.id] = made
        return made

    def unmake_mig(self, uuid: str, instance: int) -> None:
        one = self._changed(uuid)
        if instance not in one.instances:
            raise GpuLost("Not Found")
        if any(process.instance == instance for process in one.processes):
            raise NvmlError("In use by another client")
        del one.instances[instance]

    def _check(self) -> None:
        self.calls += 1
        if not self._open:
            raise NoDriver("Uninitialized")

    def _card(self, uuid: str) -> FakeCard:
        self._check()
        one = self.cards.get(uuid)
        if one is None or one.lost:
            raise GpuLost("GPU is lost")
        return one

    def _changed(self, uuid: str) -> FakeCard:
        one = self._card(uuid)
        if not self.root:
            raise NotPermitted("Insufficient Permissions")
        return one

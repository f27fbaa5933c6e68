"""Choice of a GPU's sharing mode and tenancy, and conflicting tenancies. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gpool.agent.machine.nvml import Card, GpuProcess, MigProfile
from gpool.core.errors import Invalid
from gpool.core.model import MIB, Gpu, Sharing, Slice, SliceProfile

SOFT = frozenset({Sharing.MPS, Sharing.TIMESLICE})
"""Modes in which a watchdog enforces memory limits."""
FIRST_WITH_MPS = (7, 0)
"""First compute capability on which MPS isolates and limits its clients' memory."""

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Abilities:
    root: bool  # may change card settings
    mps: bool  # the MPS daemon is installed
    tells_apart: bool  # can map a process to its sandbox


def parse_modes(text: str) -> tuple[Sharing, ...] | None:
    """First choice first: "mig,mps"; empty: None, the card's setting decides."""
    if not text.strip():
        return None
    words = [word.strip() for word in text.split(",")]
    known = {mode.value for mode in Sharing}
    for word in words:
        if word not in known:
            raise Invalid(f"sharing {word!r} is not known; known modes: {', '.join(sorted(known))}")
    return tuple(Sharing(word) for word in words)


def choose(
    card: Card, profiles: Sequence[SliceProfile], can: Abilities, modes: Sequence[Sharing] | None
) -> Sharing:
    """First mode that owner, card and agent allow. MIG needs the owner's setting or a card in MIG mode."""
    if modes is None:
        modes = (Sharing.MIG,) if card.mig else (Sharing.MPS, Sharing.TIMESLICE)
    for mode in modes:
        if _can(mode, card, profiles, can):
            return mode
    return Sharing.EXCLUSIVE


def _can(mode: Sharing, card: Card, profiles: Sequence[SliceProfile], can: Abilities) -> bool:
    match mode:
        case Sharing.MIG:
            return card.mig is not None and can.root and bool(profiles)
        case Sharing.MPS:
            able = _version(card.capability) >= FIRST_WITH_MPS
            return able and can.mps and can.tells_apart and (not card.mig or can.root)
        case Sharing.TIMESLICE:
            return can.tells_apart and (not card.mig or can.root)
        case Sharing.EXCLUSIVE:
            return True


def _version(capability: str) -> tuple[int, ...]:
    numbers = capability.split(".")
    return tuple(int(n) for n in numbers) if all(n.isdecimal() for n in numbers) else ()


def profiles_of(listed: Iterable[MigProfile]) -> tuple[SliceProfile, ...]:
    """Plain slice profiles, smallest first; profiles with media engines are not lent."""
    plain = [
        SliceProfile(one.name, one.memory_bytes, one.compute_slices, one.size, one.starts)
        for one in listed
        if "+" not in one.name and one.starts
    ]
    return tuple(sorted(plain, key=lambda one: (one.memory_bytes, one.compute)))


def mode_of(gpu: Gpu, part: Slice) -> Sharing:
    if part.profile:
        return Sharing.MIG
    if part.memory_bytes >= gpu.memory_bytes and part.share_milli >= 1000:
        return Sharing.EXCLUSIVE
    return gpu.sharing if gpu.sharing in SOFT else Sharing.EXCLUSIVE


@dataclass(frozen=True, slots=True)
class Tenancy:
    gpu: str  # its uuid
    mode: Sharing
    user: int
    profile: str = ""
    start: int = 0
    size: int = 0  # memory slices from `start` on


def tenancy_of(gpu: Gpu, part: Slice, user: int) -> Tenancy:
    size = next((one.size for one in gpu.profiles if one.name == part.profile), 1)
    mode = mode_of(gpu, part)
    if mode is Sharing.MIG:
        return Tenancy(gpu.uuid, mode, user, part.profile, part.start, size)
    return Tenancy(gpu.uuid, mode, user)


def conflicts(there: Collection[Tenancy], wanted: Tenancy) -> list[Tenancy]:
    """All on the GPU of `wanted` except itself and other MIG instances."""
    return [
        one for one in there if one.gpu == wanted.gpu and one != wanted and not _beside(one, wanted)
    ]


def _beside(one: Tenancy, other: Tenancy) -> bool:
    if one.mode is not Sharing.MIG or other.mode is not Sharing.MIG:
        return False
    return one.start + one.size <= other.start or other.start + other.size <= one.start


# ---- limits


@dataclass(frozen=True, slots=True)
class MpsLimits:
    """Limits of the largest slice; smaller slices get their own besides."""

    memory_bytes: int
    percentage: int


def mps_limits(slices: Collection[Slice]) -> MpsLimits:
    memory = max(part.memory_bytes for part in slices)
    return MpsLimits(memory // MIB * MIB, max(percentage(part) for part in slices))


def percentage(part: Slice) -> int:
    return max(1, min(100, -(-part.share_milli // 10)))


def overdrawn(
    processes: Iterable[GpuProcess], owner_of: Mapping[int, S], limits: Mapping[S, int]
) -> dict[S, int]:
    """Bytes over the slice; all processes of a sandbox count together."""
    used: dict[S, int] = {}
    for process in processes:
        owner = owner_of.get(process.pid)
        if owner is not None and process.memory_bytes is not None:
            used[owner] = used.get(owner, 0) + process.memory_bytes
    return {owner: held for owner, held in used.items() if held > limits[owner]}

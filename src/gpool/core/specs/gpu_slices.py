"""Where hardware slices fit on a GPU. Pure geometry: it knows neither users nor drivers.

A GPU has a row of memory slices; a profile takes `size` of them from one of its `starts`, and so many of the compute
slices. NVIDIA's profiles form a chain: wherever a larger one fits, every smaller one does. Hence what is free of a GPU
is said by one profile, the largest that can still be made, and amounts can be compared as on any other GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpool.core.model import Gpu, Slice, SliceProfile

Held = Iterable[tuple[int, int]]
"""(start, size) of the slices that are taken."""


def smallest(gpu: Gpu, memory_bytes: int, share_milli: int) -> SliceProfile | None:
    """The smallest profile that has as much memory and as large a share."""
    fitting = [
        profile
        for profile in gpu.profiles
        if profile.memory_bytes >= memory_bytes and share_of(gpu, profile) >= share_milli
    ]
    return min(fitting, key=lambda each: (each.memory_bytes, each.compute), default=None)


def share_of(gpu: Gpu, profile: SliceProfile) -> int:
    """In thousandths of the GPU's compute slices."""
    return 1000 * profile.compute // max(each.compute for each in gpu.profiles)


def named(gpu: Gpu, name: str) -> SliceProfile | None:
    if not name:  # not a hardware slice
        return None
    return next((each for each in gpu.profiles if each.name == name), None)


def slice_by(gpu: Gpu, profile: SliceProfile) -> Slice:
    """Not yet anywhere; see `start_for`."""
    return Slice(gpu.index, profile.memory_bytes, share_of(gpu, profile), profile.name)


def free_starts(profile: SliceProfile, held: Held) -> tuple[int, ...]:
    taken = {place for start, size in held for place in range(start, start + size)}
    return tuple(
        start for start in profile.starts if taken.isdisjoint(range(start, start + profile.size))
    )


def largest(gpu: Gpu, held: Held) -> SliceProfile | None:
    """The largest slice that can still be made."""
    held = tuple(held)
    fitting = [profile for profile in gpu.profiles if free_starts(profile, held)]
    return max(fitting, key=lambda each: (each.memory_bytes, each.compute), default=None)


def start_for(gpu: Gpu, profile: SliceProfile, held: Held) -> int | None:
    """Where to make it so that the largest slice, then the most slices, can be made beside it; None: nowhere."""
    held = tuple(held)

    def worth(start: int) -> tuple[int, int, int, int]:
        after = (*held, (start, profile.size))
        left = largest(gpu, after)
        room = sum(len(free_starts(each, after)) for each in gpu.profiles)
        return (left.memory_bytes, left.compute, room, start) if left else (0, 0, room, start)

    return max(free_starts(profile, held), key=worth, default=None)

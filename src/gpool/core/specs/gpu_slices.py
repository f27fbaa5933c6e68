"""Placement of MIG slices on a GPU. Pure geometry.

A profile takes `size` memory slices from one of its `starts`, and some compute slices. NVIDIA's profiles form a chain
(where a larger one fits, every smaller one does), so the largest profile that fits describes the free capacity.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpool.core.model import Gpu, Slice, SliceProfile

Held = Iterable[tuple[int, int]]
"""(start, size) of the slices in use."""


def smallest(gpu: Gpu, memory_bytes: int, share_milli: int) -> SliceProfile | None:
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
    """Without a start; see `start_for`."""
    return Slice(gpu.index, profile.memory_bytes, share_of(gpu, profile), profile.name)


def free_starts(profile: SliceProfile, held: Held) -> tuple[int, ...]:
    taken = {place for start, size in held for place in range(start, start + size)}
    return tuple(
        start for start in profile.starts if taken.isdisjoint(range(start, start + profile.size))
    )


def largest(gpu: Gpu, held: Held) -> SliceProfile | None:
    held = tuple(held)
    fitting = [profile for profile in gpu.profiles if free_starts(profile, held)]
    return max(fitting, key=lambda each: (each.memory_bytes, each.compute), default=None)


def start_for(gpu: Gpu, profile: SliceProfile, held: Held) -> int | None:
    """The start that leaves the largest slice, then the most slices; None: no room."""
    held = tuple(held)

    def worth(start: int) -> tuple[int, int, int, int]:
        after = (*held, (start, profile.size))
        left = largest(gpu, after)
        room = sum(len(free_starts(each, after)) for each in gpu.profiles)
        return (left.memory_bytes, left.compute, room, start) if left else (0, 0, room, start)

    return max(free_starts(profile, held), key=worth, default=None)

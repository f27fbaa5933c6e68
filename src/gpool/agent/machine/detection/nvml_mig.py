"""MIG over nvidia-ml-py. Raises pynvml's errors untranslated."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml  # type: ignore[import-untyped]

from gpool.agent.machine.detection.nvml import MigInstance, MigProfile, NvmlError
from gpool.core.model import MIB

T = TypeVar("T")
MOST_LISTED = 64  # no card has as many instances of one profile
_UNSUPPORTED = (
    pynvml.NVMLError_NotSupported,
    pynvml.NVMLError_FunctionNotFound,
    pynvml.NVMLError_InvalidArgument,
    pynvml.NVMLError_NotFound,
    pynvml.NVMLError_NoPermission,
    pynvml.NVMLError_Unknown,
)


def if_supported(call: Callable[..., T], *arguments: Any) -> T | None:
    """None if unsupported."""
    try:
        return call(*arguments)
    except _UNSUPPORTED:
        return None


def text_of(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def switch(h: Any, on: bool) -> None:
    status = pynvml.nvmlDeviceSetMigMode(h, int(on))
    if status != pynvml.NVML_SUCCESS:
        raise NvmlError(f"MIG was not switched: {pynvml.nvmlErrorString(status)}")


def profiles(h: Any) -> tuple[MigProfile, ...]:
    found = []
    for number in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        info = if_supported(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, h, number)
        if info is not None:
            places = _placements(h, info.id)
            found.append(
                MigProfile(
                    info.id,
                    text_of(info.name).removeprefix("MIG "),
                    int(info.memorySizeMB) * MIB,
                    info.sliceCount,
                    info.instanceCount,
                    places[0][1] if places else 1,
                    tuple(start for start, _ in places),
                )
            )
    return tuple(found)


def instances(h: Any) -> tuple[MigInstance, ...]:
    if not (if_supported(pynvml.nvmlDeviceGetMigMode, h) or (0,))[0]:
        return ()
    devices = {}
    for index in range(if_supported(pynvml.nvmlDeviceGetMaxMigDeviceCount, h) or 0):
        device = if_supported(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, h, index)
        if device is not None:
            devices[pynvml.nvmlDeviceGetGpuInstanceId(device)] = device
    found = []
    for profile in profiles(h):
        kind = pynvml.c_nvmlGpuInstance_t
        for instance in _listed(pynvml.nvmlDeviceGetGpuInstances, h, profile.id, kind):
            info = pynvml.nvmlGpuInstanceGetInfo(instance)
            found.append(_instance(info, devices.get(info.id), profile))
    return tuple(sorted(found, key=lambda one: one.id))


def create(h: Any, profile: int, start: int | None) -> MigInstance:
    """Create a GPU instance filled by one compute instance; undo the first if the second fails."""
    places = [(at, size) for at, size in _placements(h, profile) if at == start]
    if start is None:
        made = pynvml.nvmlDeviceCreateGpuInstance(h, profile)
    elif places:
        place = pynvml.c_nvmlGpuInstancePlacement_t(*places[0])
        make = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement
        made = make(h, profile, ctypes.byref(place))
    else:
        raise NvmlError(f"no instance of profile {profile} begins at {start}")
    try:
        whole = _whole_compute_profile(made)
        pynvml.nvmlGpuInstanceCreateComputeInstance(made, whole)
        id_ = pynvml.nvmlGpuInstanceGetInfo(made).id
        return next(one for one in instances(h) if one.id == id_)
    except BaseException:
        destroy(made)
        raise


def destroy(instance: Any) -> None:
    for number in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        ask = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo
        info = if_supported(ask, instance, number, 0)
        if info is None:
            continue
        listing, kind = pynvml.nvmlGpuInstanceGetComputeInstances, pynvml.c_nvmlComputeInstance_t
        for part in _listed(listing, instance, info.id, kind):
            pynvml.nvmlComputeInstanceDestroy(part)
    pynvml.nvmlGpuInstanceDestroy(instance)


def _listed(ask: Callable[..., Any], whose: Any, profile: int, kind: Any) -> list[Any]:
    count, found = ctypes.c_uint(MOST_LISTED), (kind * MOST_LISTED)()
    if if_supported(ask, whose, profile, found, ctypes.byref(count)) is None:
        return []
    return list(found[: count.value])


def _placements(h: Any, profile: int) -> list[tuple[int, int]]:
    count = ctypes.c_uint()
    ask = pynvml.nvmlDeviceGetGpuInstancePossiblePlacements
    if if_supported(ask, h, profile, None, ctypes.byref(count)) is None:
        return []
    places = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    if not count.value or if_supported(ask, h, profile, places, ctypes.byref(count)) is None:
        return []
    return sorted((int(place.start), int(place.size)) for place in places[: count.value])


def _instance(info: Any, device: Any, profile: MigProfile) -> MigInstance:
    uuid = "" if device is None else text_of(pynvml.nvmlDeviceGetUUID(device))
    compute = 0 if device is None else int(pynvml.nvmlDeviceGetComputeInstanceId(device))
    memory = profile.memory_bytes
    if device is not None:
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(device).total)
    return MigInstance(info.id, uuid, profile.id, memory, compute, int(info.placement.start))


def _whole_compute_profile(instance: Any) -> int:
    best: tuple[int, int] | None = None
    for number in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        ask = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo
        info = if_supported(ask, instance, number, 0)
        if info is not None and (best is None or info.sliceCount > best[0]):
            best = info.sliceCount, info.id
    if best is None:
        raise NvmlError("the GPU instance has no compute profile")
    return best[1]

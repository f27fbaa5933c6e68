"""The interface to NVIDIA's management library, with MIG.

Cards are named by uuid: indexes change when a card falls off the bus. An unsupported value is None or empty, never an
error; a lost card raises `GpuLost`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import pynvml  # type: ignore[import-untyped]

from gpool.core.model import MIB

DEFAULT_COMPUTE = "default"
NVSWITCH = "nvswitch"
"""Peer of a link to an NVSwitch, which connects all GPUs that have such links."""


class NvmlError(Exception):
    pass


class NoDriver(NvmlError):
    pass


class GpuLost(NvmlError): ...


class NotPermitted(NvmlError):
    pass


@dataclass(frozen=True, slots=True)
class Card:
    index: int
    uuid: str
    name: str
    memory_bytes: int
    capability: str = ""  # "9.0"
    bus: str = ""  # "0000:19:00.0"
    minor: int | None = None  # of /dev/nvidiaN
    pcie: str = ""  # "gen5 x16", the most it supports
    power_limit_mw: int | None = None  # set now
    power_limits_mw: tuple[int, int] | None = None  # lowest and highest allowed
    clocks_mhz: tuple[int, int] | None = None  # highest: SM, memory
    nvlinks: tuple[str, ...] = ()  # bus of each peer, or `NVSWITCH`, once for each active link
    mig: bool | None = None  # None: not supported


@dataclass(frozen=True, slots=True)
class Vitals:
    utilisation_percent: int | None = None
    memory_used_bytes: int | None = None
    power_mw: int | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None  # at which the hardware throttles
    shutdown_c: int | None = None  # at which it switches off
    throttled: frozenset[str] = frozenset()  # "thermal", "power", "brake"
    ecc_uncorrected: int | None = None  # since the driver was loaded
    remap_pending: bool = False
    remap_failed: bool = False


@dataclass(frozen=True, slots=True)
class GpuProcess:
    pid: int
    memory_bytes: int | None = None
    instance: int | None = None  # MIG instance
    computes: bool = True  # False: graphics only
    host_bytes: int = 0  # of the host's memory, held for the GPU


@dataclass(frozen=True, slots=True)
class MigProfile:
    id: int
    name: str  # "1g.18gb"
    memory_bytes: int
    compute_slices: int
    most: int  # number that fits on an empty card
    size: int = 1  # in memory slices
    starts: tuple[int, ...] = ()  # first memory slices it may be placed at


@dataclass(frozen=True, slots=True)
class MigInstance:
    id: int  # of the GPU instance
    uuid: str  # "MIG-…", for CUDA_VISIBLE_DEVICES
    profile: int
    memory_bytes: int
    compute: int = 0  # id of the compute instance, for /dev/nvidia-caps
    start: int = 0  # its first memory slice


@dataclass(frozen=True, slots=True)
class Xid:
    uuid: str
    code: int


class Nvml(Protocol):
    """Calls block for milliseconds: use a thread. `open` and `close` are idempotent."""

    def open(self) -> None:
        """Raises `NoDriver`."""
        ...

    def close(self) -> None: ...

    def driver(self) -> str: ...

    def uuids(self) -> tuple[str, ...]: ...

    def lost(self) -> int:
        """Cards counted by the driver that do not answer."""
        ...

    def card(self, uuid: str) -> Card: ...

    def vitals(self, uuid: str) -> Vitals: ...

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]: ...

    def xids(self) -> tuple[Xid, ...]:
        """Errors since the last call; does not wait."""
        ...

    # ---- changes of a card, as root

    def set_power_limit(self, uuid: str, milliwatts: int) -> None: ...

    def compute_mode(self, uuid: str) -> str: ...

    def set_compute_mode(self, uuid: str, mode: str) -> None: ...

    def reset_clocks(self, uuid: str) -> None: ...

    def application_clocks(self, uuid: str) -> tuple[int, int] | None: ...

    def set_application_clocks(self, uuid: str, clocks: tuple[int, int]) -> None: ...

    def set_mig(self, uuid: str, on: bool) -> None:
        """Raises `NvmlError` while the card is in use."""
        ...

    def mig_profiles(self, uuid: str) -> tuple[MigProfile, ...]: ...

    def mig_instances(self, uuid: str) -> tuple[MigInstance, ...]: ...

    def make_mig(self, uuid: str, profile: int, start: int | None = None) -> MigInstance:
        """`start`: memory slice; None: the driver chooses."""
        ...

    def unmake_mig(self, uuid: str, instance: int) -> None: ...


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

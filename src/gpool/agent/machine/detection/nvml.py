"""The door to NVIDIA's management library: what a card is, how it is, who uses it, and its MIG instances.

`Nvml` is what the agent calls; `RealNvml` keeps its promises over nvidia-ml-py, `gpool.testing.fake_nvml` without a card,
and one contract suite holds both. A card is named by its uuid: indexes move when one falls off the bus. What a card does
not support is None or empty, never an error; a card that is gone raises `GpuLost`. It decides nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import pynvml  # type: ignore[import-untyped]

from gpool.core.model import MIB

T = TypeVar("T")
DEFAULT_COMPUTE = "default"


class NvmlError(Exception):
    """The library refused; the text is its own."""


class NoDriver(NvmlError):
    """There is no NVIDIA driver to talk to."""


class GpuLost(NvmlError):
    """The card does not answer: it fell off the bus, or was taken away."""


class NotPermitted(NvmlError):
    """Only root may."""


@dataclass(frozen=True, slots=True)
class Card:
    """What a card is; changes only when somebody reconfigures it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    capability: str = ""  # "9.0"
    bus: str = ""  # "0000:19:00.0"
    minor: int | None = None  # of /dev/nvidiaN
    pcie: str = ""  # "gen5 x16", what it can do
    power_limit_mw: int | None = None  # that is set now ...
    power_limits_mw: tuple[int, int] | None = None  # ... and what may be
    clocks_mhz: tuple[int, int] | None = None  # the most: SM, memory
    nvlinks: tuple[str, ...] = ()  # bus of each peer, once for each active link
    mig: bool | None = None  # None: it has no such mode


@dataclass(frozen=True, slots=True)
class Vitals:
    """How a card is just now. None: it does not say."""

    utilisation_percent: int | None = None
    memory_used_bytes: int | None = None
    power_mw: int | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None  # where the hardware slows itself down ...
    shutdown_c: int | None = None  # ... and where it goes off
    throttled: frozenset[str] = frozenset()  # "thermal", "power", "brake"
    ecc_uncorrected: int | None = None  # since the driver was loaded
    remap_pending: bool = False
    remap_failed: bool = False


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A program on a card, by its process id as the driver sees it."""

    pid: int
    memory_bytes: int | None = None
    instance: int | None = None  # of MIG


@dataclass(frozen=True, slots=True)
class MigProfile:
    """A size in which instances can be made; `id` is the driver's."""

    id: int
    name: str  # "1g.18gb"
    memory_bytes: int
    compute_slices: int
    most: int  # how many fit on an empty card
    size: int = 1  # memory slices it takes ...
    starts: tuple[int, ...] = ()  # ... from one of these on


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A GPU instance with one compute instance that takes all of it."""

    id: int  # of the GPU instance
    uuid: str  # "MIG-…", what CUDA_VISIBLE_DEVICES takes
    profile: int
    memory_bytes: int
    compute: int = 0  # id of the compute instance, for /dev/nvidia-caps
    start: int = 0  # the first of its memory slices


@dataclass(frozen=True, slots=True)
class Xid:
    """An error the driver told of."""

    uuid: str
    code: int


class Nvml(Protocol):
    """Calls block for milliseconds; ask from a thread. `open` before, `close` after; both are idempotent."""

    def open(self) -> None:
        """Raises `NoDriver`."""
        ...

    def close(self) -> None: ...

    def driver(self) -> str: ...

    def uuids(self) -> tuple[str, ...]:
        """Of the cards that answer, by index."""
        ...

    def lost(self) -> int:
        """How many the driver counts that do not answer."""
        ...

    def card(self, uuid: str) -> Card: ...

    def vitals(self, uuid: str) -> Vitals: ...

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]: ...

    def xids(self) -> tuple[Xid, ...]:
        """What the driver told of since the last call; does not wait."""
        ...

    # ---- changing a card: for root

    def set_power_limit(self, uuid: str, milliwatts: int) -> None: ...

    def compute_mode(self, uuid: str) -> str:
        """ "default", "exclusive_process" or "prohibited"."""
        ...

    def set_compute_mode(self, uuid: str, mode: str) -> None: ...

    def reset_clocks(self, uuid: str) -> None:
        """Nothing locked, the default power limit."""
        ...

    def application_clocks(self, uuid: str) -> tuple[int, int] | None:
        """Memory and graphics, in MHz, that programs run at."""
        ...

    def set_application_clocks(self, uuid: str, clocks: tuple[int, int]) -> None: ...

    def set_mig(self, uuid: str, on: bool) -> None:
        """Raises `NvmlError` while anybody uses the card."""
        ...

    def mig_profiles(self, uuid: str) -> tuple[MigProfile, ...]: ...

    def mig_instances(self, uuid: str) -> tuple[MigInstance, ...]: ...

    def make_mig(self, uuid: str, profile: int, start: int | None = None) -> MigInstance:
        """Begins at `start`; None: the driver chooses."""
        ...

    def unmake_mig(self, uuid: str, instance: int) -> None:
        """Nothing may run in it any more."""
        ...


_MODES = {
    DEFAULT_COMPUTE: pynvml.NVML_COMPUTEMODE_DEFAULT,
    "exclusive_process": pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
    "prohibited": pynvml.NVML_COMPUTEMODE_PROHIBITED,
}
_THROTTLES: Mapping[str, int] = {
    "thermal": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
    "power": pynvml.nvmlClocksThrottleReasonSwPowerCap,
    "brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
}
_UNSAID = (
    pynvml.NVMLError_NotSupported,
    pynvml.NVMLError_FunctionNotFound,
    pynvml.NVMLError_InvalidArgument,
    pynvml.NVMLError_NotFound,
)


class RealNvml:
    """Over nvidia-ml-py. Handles are remembered; one lost is looked for again at the next call."""

    def __init__(self) -> None:
        self._open = False
        self._handles: dict[str, Any] = {}
        self._limits: dict[str, tuple[int | None, int | None]] = {}  # of temperature; they stay
        self._events: Any = None
        self._listening: set[str] = set()
        self._lock = threading.RLock()

    def open(self) -> None:
        with self._lock:
            if self._open:
                return
            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                raise NoDriver(str(error)) from error
            self._open = True

    def close(self) -> None:
        with self._lock:
            if not self._open:
                return
            self._open = False
            self._handles.clear()
            self._listening.clear()
            with contextlib.suppress(pynvml.NVMLError):
                if self._events is not None:
                    pynvml.nvmlEventSetFree(self._events)
            self._events = None
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def driver(self) -> str:
        return _text(self._ask(pynvml.nvmlSystemGetDriverVersion))

    def uuids(self) -> tuple[str, ...]:
        return tuple(uuid for uuid in self._all() if uuid)

    def lost(self) -> int:
        return sum(not uuid for uuid in self._all())

    def _all(self) -> list[str]:
        """By index; empty for a card that does not answer."""
        found = []
        for index in range(self._ask(pynvml.nvmlDeviceGetCount)):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
                self._handles[uuid] = handle
            except pynvml.NVMLError:
                uuid = ""
            found.append(uuid)
        return found

    def card(self, uuid: str) -> Card:
        with self._card(uuid) as h:
            major_minor = _maybe(pynvml.nvmlDeviceGetCudaComputeCapability, h)
            gen = _maybe(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, h)
            width = _maybe(pynvml.nvmlDeviceGetMaxPcieLinkWidth, h)
            limits = _maybe(pynvml.nvmlDeviceGetPowerManagementLimitConstraints, h)
            sm = _maybe(pynvml.nvmlDeviceGetMaxClockInfo, h, pynvml.NVML_CLOCK_SM)
            memory = _maybe(pynvml.nvmlDeviceGetMaxClockInfo, h, pynvml.NVML_CLOCK_MEM)
            mig = _maybe(pynvml.nvmlDeviceGetMigMode, h)
            return Card(
                index=pynvml.nvmlDeviceGetIndex(h),
                uuid=uuid,
                name=_text(pynvml.nvmlDeviceGetName(h)),
                memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(h).total),
                capability="" if major_minor is None else f"{major_minor[0]}.{major_minor[1]}",
                bus=_bus(_maybe(pynvml.nvmlDeviceGetPciInfo, h)),
                minor=_maybe(pynvml.nvmlDeviceGetMinorNumber, h),
                pcie=f"gen{gen} x{width}" if gen and width else "",
                power_limit_mw=_maybe(pynvml.nvmlDeviceGetPowerManagementLimit, h),
                power_limits_mw=None if limits is None else (int(limits[0]), int(limits[1])),
                clocks_mhz=None if sm is None or memory is None else (int(sm), int(memory)),
                nvlinks=tuple(_links(h)),
                mig=None if mig is None else bool(mig[0]),
            )

    def vitals(self, uuid: str) -> Vitals:
        with self._card(uuid) as h:
            rates = _maybe(pynvml.nvmlDeviceGetUtilizationRates, h)
            memory = _maybe(pynvml.nvmlDeviceGetMemoryInfo, h)
            rows = _maybe(pynvml.nvmlDeviceGetRemappedRows, h)
            reasons = int(_maybe(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, h) or 0)
            slowdown, shutdown = self._heat_limits(uuid, h)
            return Vitals(
                None if rates is None else int(rates.gpu),
                None if memory is None else int(memory.used),
                _maybe(pynvml.nvmlDeviceGetPowerUsage, h),
                _maybe(pynvml.nvmlDeviceGetTemperature, h, pynvml.NVML_TEMPERATURE_GPU),
                slowdown,
                shutdown,
                frozenset(word for word, bits in _THROTTLES.items() if reasons & bits),
                _maybe(
                    pynvml.nvmlDeviceGetTotalEccErrors,
                    h,
                    pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                    pynvml.NVML_VOLATILE_ECC,
                ),
                rows is not None and bool(rows[2]),
                rows is not None and bool(rows[3]),
            )

    def _heat_limits(self, uuid: str, h: Any) -> tuple[int | None, int | None]:
        if uuid not in self._limits:
            ask = pynvml.nvmlDeviceGetTemperatureThreshold
            self._limits[uuid] = (
                _maybe(ask, h, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
                _maybe(ask, h, pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
            )
        return self._limits[uuid]

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        with self._card(uuid) as h:
            found: dict[int, GpuProcess] = {}
            for ask in (
                pynvml.nvmlDeviceGetComputeRunningProcesses,
                pynvml.nvmlDeviceGetGraphicsRunningProcesses,
            ):
                for one in _maybe(ask, h) or ():
                    instance = getattr(one, "gpuInstanceId", None)
                    part = instance if instance is not None and instance < 0xFFFFFFFF else None
                    used = one.usedGpuMemory
                    found[one.pid] = GpuProcess(one.pid, None if used is None else int(used), part)
            return tuple(found.values())

    def xids(self) -> tuple[Xid, ...]:
        with self._lock, _translated():
            found = []
            for uuid in self._listened():
                event = self._next_event()
                if event is None:
                    break
                found.append(Xid(self._uuid_of(event.device) or uuid, int(event.eventData)))
            return tuple(found)

    def _listened(self) -> Iterator[str]:
        """Registers for what is not listened to yet; then as many turns as a call may take."""
        if self._events is None:
            self._events = self._ask(pynvml.nvmlEventSetCreate)
        for uuid, handle in list(self._handles.items()):
            if uuid not in self._listening:
                self._listening.add(uuid)
                kind = pynvml.nvmlEventTypeXidCriticalError
                _maybe(pynvml.nvmlDeviceRegisterEvents, handle, kind, self._events)
        for _ in range(64):
            yield ""

    def _next_event(self) -> Any:
        try:
            return pynvml.nvmlEventSetWait_v2(self._events, 0)
        except pynvml.NVMLError:  # NVML_ERROR_TIMEOUT: nothing was told
            return None

    def _uuid_of(self, handle: Any) -> str:
        try:
            return _text(pynvml.nvmlDeviceGetUUID(handle))
        except pynvml.NVMLError:
            return ""

    # ---- changing a card

    def set_power_limit(self, uuid: str, milliwatts: int) -> None:
        with self._card(uuid) as h:
            pynvml.nvmlDeviceSetPowerManagementLimit(h, milliwatts)

    def compute_mode(self, uuid: str) -> str:
        with self._card(uuid) as h:
            mode = _maybe(pynvml.nvmlDeviceGetComputeMode, h)
            return next((word for word, number in _MODES.items() if number == mode), "default")

    def set_compute_mode(self, uuid: str, mode: str) -> None:
        with self._card(uuid) as h:
            pynvml.nvmlDeviceSetComputeMode(h, _MODES[mode])

    def reset_clocks(self, uuid: str) -> None:
        with self._card(uuid) as h:
            for ask in (
                pynvml.nvmlDeviceResetGpuLockedClocks,
                pynvml.nvmlDeviceResetMemoryLockedClocks,
                pynvml.nvmlDeviceResetApplicationsClocks,
            ):
                _maybe(ask, h)
            usual = _maybe(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, h)
            if usual is not None and usual != _maybe(pynvml.nvmlDeviceGetPowerManagementLimit, h):
                pynvml.nvmlDeviceSetPowerManagementLimit(h, usual)

    def application_clocks(self, uuid: str) -> tuple[int, int] | None:
        with self._card(uuid) as h:
            ask = pynvml.nvmlDeviceGetApplicationsClock
            memory = _maybe(ask, h, pynvml.NVML_CLOCK_MEM)
            graphics = _maybe(ask, h, pynvml.NVML_CLOCK_GRAPHICS)
            return None if memory is None or graphics is None else (int(memory), int(graphics))

    def set_application_clocks(self, uuid: str, clocks: tuple[int, int]) -> None:
        with self._card(uuid) as h:
            pynvml.nvmlDeviceSetApplicationsClocks(h, *clocks)

    def set_mig(self, uuid: str, on: bool) -> None:
        with self._card(uuid) as h:
            status = pynvml.nvmlDeviceSetMigMode(h, int(on))
            if status != pynvml.NVML_SUCCESS:
                raise NvmlError(f"MIG was not switched: {pynvml.nvmlErrorString(status)}")

    def mig_profiles(self, uuid: str) -> tuple[MigProfile, ...]:
        with self._card(uuid) as h:
            found = []
            for number in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
                told = _maybe(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, h, number)
                if told is not None:
                    name = _text(told.name).removeprefix("MIG ")
                    size = int(told.memorySizeMB) * MIB
                    places = _placements(h, told.id)
                    found.append(
                        MigProfile(
                            told.id,
                            name,
                            size,
                            told.sliceCount,
                            told.instanceCount,
                            places[0][1] if places else 1,
                            tuple(start for start, _ in places),
                        )
                    )
            return tuple(found)

    def mig_instances(self, uuid: str) -> tuple[MigInstance, ...]:
        with self._card(uuid) as h:
            if not (_maybe(pynvml.nvmlDeviceGetMigMode, h) or (0,))[0]:
                return ()
            devices = {}
            for index in range(_maybe(pynvml.nvmlDeviceGetMaxMigDeviceCount, h) or 0):
                device = _maybe(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, h, index)
                if device is not None:
                    devices[pynvml.nvmlDeviceGetGpuInstanceId(device)] = device
            found = []
            for profile in self.mig_profiles(uuid):
                made = pynvml.c_nvmlGpuInstance_t
                for instance in _listed(pynvml.nvmlDeviceGetGpuInstances, h, profile.id, made):
                    told = pynvml.nvmlGpuInstanceGetInfo(instance)
                    device = devices.get(told.id)
                    found.append(_instance(told, device, profile))
            return tuple(sorted(found, key=lambda one: one.id))

    def make_mig(self, uuid: str, profile: int, start: int | None = None) -> MigInstance:
        with self._card(uuid) as h:
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
                return next(one for one in self.mig_instances(uuid) if one.id == id_)
            except BaseException:
                _unmake(made)
                raise

    def unmake_mig(self, uuid: str, instance: int) -> None:
        with self._card(uuid) as h:
            _unmake(pynvml.nvmlDeviceGetGpuInstanceById(h, instance))

    # ---- within

    @contextlib.contextmanager
    def _card(self, uuid: str) -> Iterator[Any]:
        with self._lock, _translated():
            handle = self._handles.get(uuid)
            if handle is None:
                handle = self._handles[uuid] = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            try:
                yield handle
            except pynvml.NVMLError as error:
                if isinstance(error, pynvml.NVMLError_GpuIsLost):
                    self._handles.pop(uuid, None)
                    self._listening.discard(uuid)
                raise

    def _ask(self, call: Callable[[], Any]) -> Any:
        with self._lock, _translated():
            return call()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_NotFound) as error:
        raise GpuLost(str(error)) from error
    except pynvml.NVMLError_NoPermission as error:
        raise NotPermitted(str(error)) from error
    except (pynvml.NVMLError_Uninitialized, pynvml.NVMLError_DriverNotLoaded) as error:
        raise NoDriver(str(error)) from error
    except pynvml.NVMLError as error:
        raise NvmlError(str(error)) from error


def _maybe(call: Callable[..., T], *arguments: Any) -> T | None:
    """None for what this card, or this driver, does not have."""
    try:
        return call(*arguments)
    except _UNSAID:
        return None
    except (pynvml.NVMLError_NoPermission, pynvml.NVMLError_Unknown):
        return None


def _links(h: Any) -> Iterator[str]:
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        state = _maybe(pynvml.nvmlDeviceGetNvLinkState, h, link)
        if state is None:
            return  # it has no more
        if state:
            yield _bus(_maybe(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, h, link))


MOST_LISTED = 64  # no card has as many instances of one profile


def _listed(ask: Callable[..., Any], whose: Any, profile: int, kind: Any) -> list[Any]:
    """What a call writes into an array it is given."""
    count, found = ctypes.c_uint(MOST_LISTED), (kind * MOST_LISTED)()
    if _maybe(ask, whose, profile, found, ctypes.byref(count)) is None:
        return []
    return list(found[: count.value])


def _placements(h: Any, profile: int) -> list[tuple[int, int]]:
    """(start, size), whether taken or not."""
    count = ctypes.c_uint()
    ask = pynvml.nvmlDeviceGetGpuInstancePossiblePlacements
    if _maybe(ask, h, profile, None, ctypes.byref(count)) is None:
        return []
    places = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    if not count.value or _maybe(ask, h, profile, places, ctypes.byref(count)) is None:
        return []
    return sorted((int(place.start), int(place.size)) for place in places[: count.value])


def _instance(told: Any, device: Any, profile: MigProfile) -> MigInstance:
    uuid = "" if device is None else _text(pynvml.nvmlDeviceGetUUID(device))
    compute = 0 if device is None else int(pynvml.nvmlDeviceGetComputeInstanceId(device))
    memory = profile.memory_bytes
    if device is not None:
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(device).total)
    return MigInstance(told.id, uuid, profile.id, memory, compute, int(told.placement.start))


def _whole_compute_profile(instance: Any) -> int:
    """The largest compute profile of a GPU instance: the driver's id of it."""
    best: tuple[int, int] | None = None
    for number in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        told = _maybe(pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo, instance, number, 0)
        if told is not None and (best is None or told.sliceCount > best[0]):
            best = told.sliceCount, told.id
    if best is None:
        raise NvmlError("the GPU instance has no compute profile")
    return best[1]


def _unmake(instance: Any) -> None:
    for number in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        told = _maybe(pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo, instance, number, 0)
        if told is None:
            continue
        ask, made = pynvml.nvmlGpuInstanceGetComputeInstances, pynvml.c_nvmlComputeInstance_t
        for part in _listed(ask, instance, told.id, made):
            pynvml.nvmlComputeInstanceDestroy(part)
    pynvml.nvmlGpuInstanceDestroy(instance)


def _bus(info: Any) -> str:
    """`00000000:19:00.0` is 0000:19:00.0, as the kernel writes it."""
    if info is None:
        return ""
    domain, _, rest = _text(info.busId).lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else ""


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)

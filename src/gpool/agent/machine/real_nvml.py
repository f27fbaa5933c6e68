"""NVML over nvidia-ml-py: device handles, error translation, Xid events, card values."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import pynvml  # type: ignore[import-untyped]

from gpool.agent.machine import nvml
from gpool.agent.machine.nvml import (
    DEFAULT_COMPUTE,
    NVSWITCH,
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
    if_supported,
    text_of,
)

T = TypeVar("T")
MOST_XIDS = 64  # per call
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


class NvmlLibrary:
    """A lost device is looked up again at the next use."""

    def __init__(self) -> None:
        self._open = False
        self.handles: dict[str, Any] = {}
        self._events: Any = None
        self._registered: set[str] = set()  # for Xid events
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
            self.handles.clear()
            self._registered.clear()
            with contextlib.suppress(pynvml.NVMLError):
                if self._events is not None:
                    pynvml.nvmlEventSetFree(self._events)
            self._events = None
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def call(self, function: Callable[[], T]) -> T:
        with self._lock, _translated():
            return function()

    @contextlib.contextmanager
    def device(self, uuid: str) -> Iterator[Any]:
        with self._lock, _translated():
            handle = self.handles.get(uuid)
            if handle is None:
                handle = self.handles[uuid] = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            try:
                yield handle
            except pynvml.NVMLError as error:
                if isinstance(error, pynvml.NVMLError_GpuIsLost):
                    self.handles.pop(uuid, None)
                    self._registered.discard(uuid)
                raise

    def uuids(self) -> list[str]:
        found = []
        for index in range(self.call(pynvml.nvmlDeviceGetCount)):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                uuid = text_of(pynvml.nvmlDeviceGetUUID(handle))
                self.handles[uuid] = handle
            except pynvml.NVMLError:
                uuid = ""
            found.append(uuid)
        return found

    def xids(self) -> Iterator[Xid]:
        """Register new cards, then yield at most `MOST_XIDS` pending events."""
        with self._lock, _translated():
            if self._events is None:
                self._events = self.call(pynvml.nvmlEventSetCreate)
            for uuid, handle in list(self.handles.items()):
                if uuid not in self._registered:
                    self._registered.add(uuid)
                    kind = pynvml.nvmlEventTypeXidCriticalError
                    if_supported(pynvml.nvmlDeviceRegisterEvents, handle, kind, self._events)
            for _ in range(MOST_XIDS):
                try:
                    event = pynvml.nvmlEventSetWait_v2(self._events, 0)
                except pynvml.NVMLError:  # NVML_ERROR_TIMEOUT: no more events
                    return
                yield Xid(_uuid_of(event.device), int(event.eventData))


class RealNvml:
    def __init__(self) -> None:
        self._library = NvmlLibrary()
        self._heat_limits: dict[str, tuple[int | None, int | None]] = {}  # they never change

    def open(self) -> None:
        self._library.open()

    def close(self) -> None:
        self._library.close()

    def driver(self) -> str:
        return text_of(self._library.call(pynvml.nvmlSystemGetDriverVersion))

    def uuids(self) -> tuple[str, ...]:
        return tuple(uuid for uuid in self._library.uuids() if uuid)

    def lost(self) -> int:
        return sum(not uuid for uuid in self._library.uuids())

    def xids(self) -> tuple[Xid, ...]:
        return tuple(self._library.xids())

    def card(self, uuid: str) -> Card:
        with self._library.device(uuid) as h:
            major_minor = if_supported(pynvml.nvmlDeviceGetCudaComputeCapability, h)
            gen = if_supported(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, h)
            width = if_supported(pynvml.nvmlDeviceGetMaxPcieLinkWidth, h)
            limits = if_supported(pynvml.nvmlDeviceGetPowerManagementLimitConstraints, h)
            sm = if_supported(pynvml.nvmlDeviceGetMaxClockInfo, h, pynvml.NVML_CLOCK_SM)
            memory = if_supported(pynvml.nvmlDeviceGetMaxClockInfo, h, pynvml.NVML_CLOCK_MEM)
            mig = if_supported(pynvml.nvmlDeviceGetMigMode, h)
            return Card(
                index=pynvml.nvmlDeviceGetIndex(h),
                uuid=uuid,
                name=text_of(pynvml.nvmlDeviceGetName(h)),
                memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(h).total),
                capability="" if major_minor is None else f"{major_minor[0]}.{major_minor[1]}",
                bus=_bus(if_supported(pynvml.nvmlDeviceGetPciInfo, h)),
                minor=if_supported(pynvml.nvmlDeviceGetMinorNumber, h),
                pcie=f"gen{gen} x{width}" if gen and width else "",
                power_limit_mw=if_supported(pynvml.nvmlDeviceGetPowerManagementLimit, h),
                power_limits_mw=None if limits is None else (int(limits[0]), int(limits[1])),
                clocks_mhz=None if sm is None or memory is None else (int(sm), int(memory)),
                nvlinks=tuple(_links(h)),
                mig=None if mig is None else bool(mig[0]),
            )

    def vitals(self, uuid: str) -> Vitals:
        with self._library.device(uuid) as h:
            rates = if_supported(pynvml.nvmlDeviceGetUtilizationRates, h)
            memory = if_supported(pynvml.nvmlDeviceGetMemoryInfo, h)
            rows = if_supported(pynvml.nvmlDeviceGetRemappedRows, h)
            reasons = int(if_supported(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, h) or 0)
            if uuid not in self._heat_limits:
                ask = pynvml.nvmlDeviceGetTemperatureThreshold
                self._heat_limits[uuid] = (
                    if_supported(ask, h, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
                    if_supported(ask, h, pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
                )
            slowdown, shutdown = self._heat_limits[uuid]
            return Vitals(
                None if rates is None else int(rates.gpu),
                None if memory is None else int(memory.used),
                if_supported(pynvml.nvmlDeviceGetPowerUsage, h),
                if_supported(pynvml.nvmlDeviceGetTemperature, h, pynvml.NVML_TEMPERATURE_GPU),
                slowdown,
                shutdown,
                frozenset(word for word, bits in _THROTTLES.items() if reasons & bits),
                if_supported(
                    pynvml.nvmlDeviceGetTotalEccErrors,
                    h,
                    pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                    pynvml.NVML_VOLATILE_ECC,
                ),
                rows is not None and bool(rows[2]),
                rows is not None and bool(rows[3]),
            )

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        with self._library.device(uuid) as h:
            found: dict[int, GpuProcess] = {}
            for ask in (
                pynvml.nvmlDeviceGetComputeRunningProcesses,
                pynvml.nvmlDeviceGetGraphicsRunningProcesses,
            ):
                for one in if_supported(ask, h) or ():
                    instance = getattr(one, "gpuInstanceId", None)
                    part = instance if instance is not None and instance < 0xFFFFFFFF else None
                    used = None if one.usedGpuMemory is None else int(one.usedGpuMemory)
                    computes = ask is not pynvml.nvmlDeviceGetGraphicsRunningProcesses
                    computes = computes or one.pid in found  # listed as both
                    found[one.pid] = GpuProcess(one.pid, used, part, computes)
            return tuple(found.values())

    # ---- changes of a card

    def set_power_limit(self, uuid: str, milliwatts: int) -> None:
        with self._library.device(uuid) as h:
            pynvml.nvmlDeviceSetPowerManagementLimit(h, milliwatts)

    def compute_mode(self, uuid: str) -> str:
        with self._library.device(uuid) as h:
            mode = if_supported(pynvml.nvmlDeviceGetComputeMode, h)
            return next((word for word, number in _MODES.items() if number == mode), "default")

    def set_compute_mode(self, uuid: str, mode: str) -> None:
        with self._library.device(uuid) as h:
            pynvml.nvmlDeviceSetComputeMode(h, _MODES[mode])

    def reset_clocks(self, uuid: str) -> None:
        with self._library.device(uuid) as h:
            for ask in (
                pynvml.nvmlDeviceResetGpuLockedClocks,
                pynvml.nvmlDeviceResetMemoryLockedClocks,
                pynvml.nvmlDeviceResetApplicationsClocks,
            ):
                if_supported(ask, h)
            usual = if_supported(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, h)
            now = if_supported(pynvml.nvmlDeviceGetPowerManagementLimit, h)
            if usual is not None and usual != now:
                pynvml.nvmlDeviceSetPowerManagementLimit(h, usual)

    def application_clocks(self, uuid: str) -> tuple[int, int] | None:
        with self._library.device(uuid) as h:
            ask = pynvml.nvmlDeviceGetApplicationsClock
            memory = if_supported(ask, h, pynvml.NVML_CLOCK_MEM)
            graphics = if_supported(ask, h, pynvml.NVML_CLOCK_GRAPHICS)
            return None if memory is None or graphics is None else (int(memory), int(graphics))

    def set_application_clocks(self, uuid: str, clocks: tuple[int, int]) -> None:
        with self._library.device(uuid) as h:
            pynvml.nvmlDeviceSetApplicationsClocks(h, *clocks)

    # ---- MIG

    def set_mig(self, uuid: str, on: bool) -> None:
        with self._library.device(uuid) as h:
            nvml.switch(h, on)

    def mig_profiles(self, uuid: str) -> tuple[MigProfile, ...]:
        with self._library.device(uuid) as h:
            return nvml.profiles(h)

    def mig_instances(self, uuid: str) -> tuple[MigInstance, ...]:
        with self._library.device(uuid) as h:
            return nvml.instances(h)

    def make_mig(self, uuid: str, profile: int, start: int | None = None) -> MigInstance:
        with self._library.device(uuid) as h:
            return nvml.create(h, profile, start)

    def unmake_mig(self, uuid: str, instance: int) -> None:
        with self._library.device(uuid) as h:
            nvml.destroy(pynvml.nvmlDeviceGetGpuInstanceById(h, instance))


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


def _uuid_of(handle: Any) -> str:
    try:
        return text_of(pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError:
        return ""


def _links(h: Any) -> Iterator[str]:
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        state = if_supported(pynvml.nvmlDeviceGetNvLinkState, h, link)
        if state is None:
            return  # it has no more
        kind = if_supported(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, h, link) if state else None
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            yield NVSWITCH
        elif state:
            yield _bus(if_supported(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, h, link))


def _bus(info: Any) -> str:
    if info is None:
        return ""
    domain, _, rest = text_of(info.busId).lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else ""

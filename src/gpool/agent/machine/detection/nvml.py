"""The interface to NVIDIA's management library.

Cards are named by uuid: indexes change when a card falls off the bus. An unsupported value is None or empty, never an
error; a lost card raises `GpuLost`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

DEFAULT_COMPUTE = "default"


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
    nvlinks: tuple[str, ...] = ()  # bus of each peer, once for each active link
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

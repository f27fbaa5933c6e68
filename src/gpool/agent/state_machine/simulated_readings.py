"""Readings of simulated GPUs, computed from the leases that run on them. Pure: the same leases and the same boot time
give the same readings. Real GPUs are read by `agent.machine.gpu_monitor`.

A lease uses between 60 and 90 % of its slice's memory and computes between 55 and 95 % of the time, drawn from its id
and epoch; its utilisation follows a triangle of `PERIOD_US`, so that charts have a shape. A GPU without a lease idles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpool.core.model import Gpu, Slice
from gpool.wire.frames import GpuReading

PERIOD_US = 120_000_000
SWING_PERCENT = 12
"""Difference between highest and lowest utilisation of one lease."""

IDLE_MW, IDLE_C = 55_000, 31
BUSY_MW, BUSY_C = 345_000, 44
"""Added to the idle values at full utilisation."""


def simulated_readings(
    gpus: Iterable[Gpu], running: Mapping[tuple[int, int], tuple[Slice, ...]], now: int
) -> tuple[GpuReading, ...]:
    """Readings of the simulated GPUs among `gpus`. `running`: slices by (task, epoch); `now`: boot time in us."""
    return tuple(_reading(gpu, running, now) for gpu in gpus if gpu.simulated)


def _reading(
    gpu: Gpu, running: Mapping[tuple[int, int], tuple[Slice, ...]], now: int
) -> GpuReading:
    percent = memory = 0
    for (task, epoch), slices in running.items():
        for part in slices:
            if part.gpu_index == gpu.index:
                drawn = (task * 31 + epoch * 7 + part.gpu_index) % 31
                memory += part.memory_bytes * (60 + drawn) // 100
                percent += (55 + drawn + _swing(now + task * 7_000_000)) * part.share_milli // 1000
    percent = min(percent, 100)
    power, heat = IDLE_MW + BUSY_MW * percent // 100, IDLE_C + BUSY_C * percent // 100
    return GpuReading(gpu.index, percent, min(memory, gpu.memory_bytes), power, heat)


def _swing(now: int) -> int:
    half = PERIOD_US // 2
    return SWING_PERCENT * abs(now % PERIOD_US - half) // half

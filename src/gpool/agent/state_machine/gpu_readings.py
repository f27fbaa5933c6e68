"""GPU readings: averages between heartbeats, shares of running tasks, and readings of simulated GPUs.

Real GPUs are read by `agent.machine.gpu_monitor`. Readings of simulated ones are computed from the leases that run on
them, the same for the same leases and boot time. A lease uses between 60 and 90 % of its slice's memory and computes between 55 and 95 % of the time, drawn from its id
and epoch; its utilisation follows a triangle of `PERIOD_US`, so that charts have a shape. A GPU without a lease idles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpool.core.model import Gpu, Slice
from gpool.wire.frames import GpuReading, TaskReading

PERIOD_US = 120_000_000
SWING_PERCENT = 12
"""Difference between highest and lowest utilisation of one lease."""

IDLE_MW, IDLE_C = 55_000, 31
BUSY_MW, BUSY_C = 345_000, 44
"""Added to the idle values at full utilisation."""


class ReadingAverages:
    def __init__(self) -> None:
        self._readings: dict[int, list[GpuReading]] = {}

    def add(self, readings: Iterable[GpuReading]) -> None:
        for reading in readings:
            self._readings.setdefault(reading.gpu, []).append(reading)

    def take(self) -> tuple[GpuReading, ...]:
        """Return per GPU: mean utilisation and power, highest memory and temperature."""
        readings, self._readings = self._readings, {}
        return tuple(
            GpuReading(
                gpu,
                _mean([one.utilisation_percent for one in many]),
                _most([one.memory_bytes for one in many]),
                _mean([one.power_mw for one in many]),
                _most([one.temperature_c for one in many]),
            )
            for gpu, many in sorted(readings.items())
        )


def by_task(
    readings: Sequence[GpuReading], running: Mapping[tuple[int, int], tuple[Slice, ...]]
) -> tuple[TaskReading, ...]:
    """Reading for each running (task, epoch) on exclusive GPUs; shared ones have none."""
    by_gpu = {reading.gpu: reading for reading in readings}
    users: dict[int, int] = {}
    for slices in running.values():
        for part in slices:
            users[part.gpu_index] = users.get(part.gpu_index, 0) + 1
    found = []
    for (task, epoch), slices in running.items():
        mine = [by_gpu[part.gpu_index] for part in slices if part.gpu_index in by_gpu]
        if len(mine) < len(slices) or any(users[part.gpu_index] > 1 for part in slices) or not mine:
            continue
        found.append(
            TaskReading(
                task,
                epoch,
                _mean([one.utilisation_percent for one in mine]),
                _sum([one.memory_bytes for one in mine]),
                _sum([one.power_mw for one in mine]),
                _most([one.temperature_c for one in mine]),
            )
        )
    return tuple(found)


def _known(values: Sequence[int | None]) -> list[int]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[int | None]) -> int | None:
    known = _known(values)
    return round(sum(known) / len(known)) if known else None


def _sum(values: Sequence[int | None]) -> int | None:
    known = _known(values)
    return sum(known) if known else None


def _most(values: Sequence[int | None]) -> int | None:
    return max(_known(values), default=None)


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

"""Aggregation of GPU readings between heartbeats, by GPU and by task. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpool.core.model import Slice
from gpool.wire.frames import GpuReading, TaskReading


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

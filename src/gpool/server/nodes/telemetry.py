"""Recent utilisation of GPUs and tasks, in memory: a short ring of readings for each.

Readings of GPUs the node does not lend, of tasks it does not hold, or outside plausible ranges are dropped. Replicas
exchange accepted readings (`replicas.readings`).
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import SECOND, Instant
from gpool.wire.frames import GpuReading, TaskReading

KEPT = 120
"""Readings in a ring: a quarter of an hour of heartbeats."""
MAX_RINGS = 20_000
MAX_UNSENT = 20_000
STALE = 60 * SECOND
"""Age past which a reading is not current."""
_POINT = struct.Struct("<qhqih")
_NO_VALUE = -1


class Point(NamedTuple):
    at: Instant
    utilisation_percent: int | None
    memory_bytes: int | None
    power_mw: int | None
    temperature_c: int | None


@dataclass(frozen=True, slots=True)
class GpuKey:
    node: NodeId
    index: int


class _Rings:
    def __init__(self) -> None:
        self._rings: OrderedDict[GpuKey | TaskId, deque[bytes]] = OrderedDict()

    def add(self, key: GpuKey | TaskId, at: Instant, reading: GpuReading | TaskReading) -> None:
        ring = self._rings.get(key)
        if ring is None:
            ring = self._rings[key] = deque(maxlen=KEPT)
            if len(self._rings) > MAX_RINGS:
                self._rings.popitem(last=False)
        self._rings.move_to_end(key)
        ring.append(_packed(at, reading))

    def history(self, key: GpuKey | TaskId) -> tuple[Point, ...]:
        return tuple(_point(packed) for packed in self._rings.get(key, ()))

    def latest(self, key: GpuKey | TaskId, now: Instant) -> Point | None:
        ring = self._rings.get(key)
        last = _point(ring[-1]) if ring else None
        return last if last is not None and now - last.at <= STALE else None


class NodeReadings(msgspec.Struct, frozen=True, array_like=True):
    """Accepted readings of one heartbeat, as replicas exchange them."""

    node: int
    at: int
    gpus: tuple[GpuReading, ...]
    tasks: tuple[TaskReading, ...]


class Telemetry:
    """`is_shared`: keep accepted readings for other replicas, at most `MAX_UNSENT` heartbeats."""

    def __init__(self, *, is_shared: bool = False) -> None:
        self._gpus = _Rings()
        self._tasks = _Rings()
        self._unsent: deque[NodeReadings] = deque(maxlen=MAX_UNSENT if is_shared else 0)

    def add(
        self,
        node: NodeId,
        indexes: Collection[int],
        held: Collection[TaskId],
        readings: tuple[GpuReading, ...],
        tasks: tuple[TaskReading, ...],
        at: Instant,
    ) -> None:
        of_gpus = [
            each for each in readings[: len(indexes)] if each.gpu in indexes and _is_plausible(each)
        ]
        of_tasks = [
            each for each in tasks[: len(held)] if each.task in held and _is_plausible(each)
        ]
        accepted = NodeReadings(node, at, tuple(of_gpus), tuple(of_tasks))
        self._unsent.append(accepted)
        self.merge(accepted)

    def merge(self, accepted: NodeReadings) -> None:
        at = Instant(accepted.at)
        for reading in accepted.gpus:
            self._gpus.add(GpuKey(NodeId(accepted.node), reading.gpu), at, reading)
        for told in accepted.tasks:
            self._tasks.add(TaskId(told.task), at, told)

    def take_unsent(self) -> list[NodeReadings]:
        taken = list(self._unsent)
        self._unsent.clear()
        return taken

    def gpu(self, node: NodeId, index: int) -> tuple[Point, ...]:
        return self._gpus.history(GpuKey(node, index))

    def task(self, task: TaskId) -> tuple[Point, ...]:
        return self._tasks.history(task)

    def now_of(self, node: NodeId, index: int, now: Instant) -> Point | None:
        return self._gpus.latest(GpuKey(node, index), now)


def _is_plausible(reading: GpuReading | TaskReading) -> bool:
    return (
        _within(reading.utilisation_percent, 100)
        and _within(reading.memory_bytes, 1 << 50)
        and _within(reading.power_mw, 1 << 30)
        and _within(reading.temperature_c, 500)
    )


def _within(value: int | None, most: int) -> bool:
    return value is None or 0 <= value <= most


def _packed(at: Instant, told: GpuReading | TaskReading) -> bytes:
    values = (told.utilisation_percent, told.memory_bytes, told.power_mw, told.temperature_c)
    return _POINT.pack(at, *(_NO_VALUE if value is None else value for value in values))


def _point(packed: bytes) -> Point:
    at, *values = _POINT.unpack(packed)
    said = [None if value == _NO_VALUE else value for value in values]
    return Point(Instant(at), said[0], said[1], said[2], said[3])

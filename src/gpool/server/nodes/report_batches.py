"""Batches reports and heartbeats of many nodes into one write each; folds the commit before it answers any node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gpool.core.ids import NodeId
from gpool.core.model import KIB, Instant
from gpool.server.store.batching import WriteBatcher
from gpool.server.store.operation import brief
from gpool.server.store.operations.leases import leases
from gpool.server.store.protocol import Operation
from gpool.server.store.values import Recording
from gpool.wire.frames import Checkpointed, Finished, Hold, LogChunk, ReportItem

T = TypeVar("T")
GATHERED_BYTES = 256 * KIB
"""Size of a frame up to which it is batched: PostgreSQL accepts no statement over a gigabyte."""
FILE_BYTES = 256  # of one file in a checkpoint's manifest


class Write(Protocol):
    def __call__(self, operation: Operation[T], /) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True)
class _ReportFrame:
    node: NodeId
    items: Sequence[ReportItem]
    at: Instant


class ReportBatches:
    def __init__(self, write: Write, absorb: Callable[[Recording], None]) -> None:
        self._write, self._absorb = write, absorb
        self._frames = WriteBatcher(self._record, self._fold)
        self._beats = WriteBatcher(self._beat, lambda _, drops: drops)

    async def beat(self, node: NodeId, holds: Sequence[Hold], now: Instant) -> tuple[Hold, ...]:
        return await self._beats.take((node, holds, now))

    async def _beat(self, group: Sequence[leases.Heartbeat]) -> list[tuple[Hold, ...]]:
        return await self._write(leases.record_heartbeats(group))

    async def record(
        self, node: NodeId, items: Sequence[ReportItem], now: Instant
    ) -> tuple[Hold, ...]:
        frame = _ReportFrame(node, items, now)
        take = self._frames.take if _is_light(items) else self._frames.take_alone
        return await take(frame)

    async def _record(self, group: Sequence[_ReportFrame]) -> Recording:
        frames = [(each.node, each.items) for each in group]
        rows = sum(len(each.items) for each in group)
        return await self._write(brief(leases.record(frames, group[-1].at), rows))

    def _fold(self, group: Sequence[_ReportFrame], recording: Recording) -> list[tuple[Hold, ...]]:
        self._absorb(recording)
        return [_refused(frame, recording) for frame in group]


def _refused(frame: _ReportFrame, recording: Recording) -> tuple[Hold, ...]:
    if not recording.refused:
        return ()
    items = {(item.task, item.epoch) for item in frame.items}
    return tuple(
        hold
        for node, hold in recording.refused
        if node == frame.node and (hold.task, hold.epoch) in items
    )


def _is_light(items: Sequence[ReportItem]) -> bool:
    return sum(map(_size, items)) <= GATHERED_BYTES


def _size(item: ReportItem) -> int:
    """Approximate bytes in a statement, of the items that can be large."""
    match item:
        case Finished():
            return len(item.value) + len(item.error_text)
        case LogChunk():
            return len(item.data)
        case Checkpointed():
            return FILE_BYTES * len(item.files)
        case _:
            return 0

"""Batches reports and heartbeats of many nodes into one write each; folds the commit before it answers any node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gpool.core.ids import NodeId
from gpool.core.model import KIB, Instant
from gpool.server.store.batching import Gathering
from gpool.server.store.operation import brief
from gpool.server.store.operations.leases import heartbeats, leases
from gpool.server.store.protocol import Operation
from gpool.server.store.values import Recording
from gpool.wire.frames import Finished, Hold, ReportItem

T = TypeVar("T")
GATHERED_BYTES = 256 * KIB
"""Results in a frame up to which it is batched: PostgreSQL accepts no statement over a gigabyte."""
_Recorded = tuple[Recording, dict[int, Recording]]
"""The recording of a whole group, and those of frames recorded separately, by position."""


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
        self._frames = Gathering(self._record, self._record_together, self._absorb_all)
        self._beats = Gathering(self._beat, self._beat_together, lambda _, drops: drops)

    async def beat(self, node: NodeId, holds: Sequence[Hold], now: Instant) -> tuple[Hold, ...]:
        """Commit a heartbeat; return the stated leases that the node does not hold."""
        return await self._beats.take((node, holds, now))

    async def _beat(self, one: heartbeats.Beaten) -> tuple[Hold, ...]:
        (drop,) = await self._beat_together([one])
        return drop

    async def _beat_together(self, group: Sequence[heartbeats.Beaten]) -> list[tuple[Hold, ...]]:
        return await self._write(heartbeats.beat(group))

    async def record(
        self, node: NodeId, items: Sequence[ReportItem], now: Instant
    ) -> tuple[Hold, ...]:
        """Commit and fold reports; return those under an old lease."""
        frame = _ReportFrame(node, items, now)
        return await (self._frames.take(frame) if _is_light(items) else self._record(frame))

    async def _record(self, frame: _ReportFrame) -> tuple[Hold, ...]:
        writing = leases.record(frame.node, frame.items, frame.at)
        recording = await self._write(brief(writing, len(frame.items)))
        self._absorb(recording)
        return recording.refused

    async def _record_together(self, group: Sequence[_ReportFrame]) -> _Recorded:
        frames = [(each.node, each.items) for each in group]
        rows = sum(len(each.items) for each in group)
        return await self._write(brief(leases.record_together(frames, group[-1].at), rows))

    def _absorb_all(
        self, group: Sequence[_ReportFrame], recorded: _Recorded
    ) -> list[tuple[Hold, ...]]:
        together, others = recorded
        self._absorb(together)
        for recording in others.values():
            self._absorb(recording)
        places = range(len(group))
        return [others[place].refused if place in others else () for place in places]


def _is_light(items: Sequence[ReportItem]) -> bool:
    ends = [item for item in items if isinstance(item, Finished)]
    return sum(len(each.value) + len(each.error_text) for each in ends) <= GATHERED_BYTES

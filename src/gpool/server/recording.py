"""Gathers the reports of many nodes: while one write is under way the next frames wait, and are then written together.

A frame that meets nobody is written at once and by itself, as if there were no gathering. Every frame is answered after
the commit that covers it, and what was committed is folded before anybody is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gpool.core.errors import Unreachable
from gpool.core.ids import NodeId
from gpool.core.model import Instant
from gpool.server.store.operation import brief
from gpool.server.store.operations import leases
from gpool.server.store.protocol import Operation
from gpool.server.store.values import Recording
from gpool.wire.frames import Hold, ReportItem

T = TypeVar("T")
MOST_TOGETHER = 1000
"""Frames in one write: bounds how long the first of them waits."""


class Write(Protocol):
    def __call__(self, operation: Operation[T], /) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    node: NodeId
    items: Sequence[ReportItem]
    at: Instant
    refused: asyncio.Future[tuple[Hold, ...]]


class Recorder:
    def __init__(self, write: Write, absorb: Callable[[Recording], None]) -> None:
        self._write, self._absorb = write, absorb
        self._is_writing = False
        self._waiting: list[_Waiting] = []
        self._gathering: asyncio.Task[None] | None = None

    async def record(
        self, node: NodeId, items: Sequence[ReportItem], now: Instant
    ) -> tuple[Hold, ...]:
        """Commits and folds what a node reports; what of it was under an old lease."""
        if self._is_writing:
            refused = asyncio.get_running_loop().create_future()
            self._waiting.append(_Waiting(node, items, now, refused))
            found: tuple[Hold, ...] = await refused
            return found
        self._is_writing = True
        try:
            recording = await self._write(brief(leases.record(node, items, now), len(items)))
            self._absorb(recording)
            return recording.refused
        finally:
            self._go_on()

    def _go_on(self) -> None:
        self._is_writing = bool(self._waiting)
        if self._waiting:
            self._gathering = asyncio.create_task(self._write_waiting(), name="gpool-recording")

    async def _write_waiting(self) -> None:
        group, self._waiting = self._waiting[:MOST_TOGETHER], self._waiting[MOST_TOGETHER:]
        try:
            await self._write_group(group)
        finally:
            for each in group:
                each.refused.cancel()  # done already, unless we are being stopped
            self._go_on()

    async def _write_group(self, group: Sequence[_Waiting]) -> None:
        frames = [(each.node, each.items) for each in group]
        at, rows = group[-1].at, sum(len(each.items) for each in group)
        try:
            together, others = await self._write(brief(leases.record_together(frames, at), rows))
        except Exception as error:  # noqa: BLE001 - raised where the frame came from; nothing of the group was written
            if len(group) == 1 or isinstance(error, Unreachable):
                for each in group:
                    if not each.refused.done():
                        each.refused.set_exception(error)
                return
            middle = len(group) // 2  # one of them is to blame, and the others must not suffer
            await self._write_group(group[:middle])
            await self._write_group(group[middle:])
            return
        self._absorb(together)
        for recording in others.values():
            self._absorb(recording)
        for place, each in enumerate(group):
            if not each.refused.done():
                alone = others.get(place)
                each.refused.set_result(() if alone is None else alone.refused)

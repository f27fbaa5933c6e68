"""Batching of small writes: items that arrive during a write wait and are then written together.

Each server batches submissions, reports and heartbeats, each kind by itself. Group commit (`drivers.group_commit`)
saves waits for the disk; batching saves statements as well.

    time 0 ms    item a arrives and is written alone
    time 1-4 ms  items b to k arrive while a is committed
    time 4 ms    a is answered; b to k are written with one set of statements
    time 9 ms    b to k are answered                          2 writes instead of 11

An item is answered after its commit. If a write of several items fails, its halves are written again, until the
faulty item fails alone. An item whose caller is cancelled before its write begins is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Generic, TypeVar

from gpool.core.errors import Unreachable

I = TypeVar("I")  # noqa: E741 - an item
W = TypeVar("W")
A = TypeVar("A")
MOST_TOGETHER = 1000
"""Items in one write; bounds how long the first of them waits."""


class WriteBatcher(Generic[I, W, A]):
    """`write` commits one or many items; `settle` then applies the result and returns an answer for each.

    `settle` is not called again for the same items, whatever it raises.
    """

    def __init__(
        self,
        write: Callable[[Sequence[I]], Awaitable[W]],
        settle: Callable[[Sequence[I], W], Sequence[A]],
    ) -> None:
        self._write, self._settle = write, settle
        self._is_writing = False
        self._waiting: list[tuple[I, asyncio.Future[A]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def take(self, item: I) -> A:
        if self._is_writing:
            answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
            self._waiting.append((item, answer))
            return await answer
        self._is_writing = True
        try:
            return await self.take_alone(item)
        finally:
            self._go_on()

    async def take_alone(self, item: I) -> A:
        """Write an item that is too large to wait for others, or for others to wait for."""
        [answer] = self._settle([item], await self._write([item]))
        return answer

    def _go_on(self) -> None:
        self._is_writing = bool(self._waiting)
        if self._waiting:
            self._writing = asyncio.create_task(
                self._write_waiting(),
                name="gpool-batching",
                context=Context(),  # not that of one request: the group belongs to many
            )

    async def _write_waiting(self) -> None:
        there = [each for each in self._waiting if not each[1].done()]
        group, self._waiting = there[:MOST_TOGETHER], there[MOST_TOGETHER:]
        try:
            if group:
                await self._write_group(group)
        finally:
            for _, answer in group:
                answer.cancel()  # no effect on an answer that is set; else this task is being cancelled
            self._go_on()

    async def _write_group(self, group: Sequence[tuple[I, asyncio.Future[A]]]) -> None:
        items = [item for item, _ in group]
        try:
            written = await self._write(items)
        except Exception as error:  # noqa: BLE001 - raised in the callers of `take`; nothing of the group was written
            if len(group) == 1 or isinstance(error, Unreachable):
                _fail(group, error)
                return
            middle = len(group) // 2
            await self._write_group(group[:middle])
            await self._write_group(group[middle:])
            return
        try:
            answers = self._settle(items, written)
        except Exception as error:  # noqa: BLE001 - raised in the callers of `take`; the waiting items are still written
            _fail(group, error)
            return
        for (_, answer), found in zip(group, answers, strict=True):
            if not answer.done():
                answer.set_result(found)


def _fail(group: Sequence[tuple[I, asyncio.Future[A]]], error: Exception) -> None:
    for _, answer in group:
        if not answer.done():
            answer.set_exception(error)

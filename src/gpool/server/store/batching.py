"""Gathers what many ask to be written: while one write is under way the next wait, and are then written together.

What meets nobody is written at once and by itself, as if there were no gathering. Nobody is answered before the commit that
covers them. One among many that fails is found by halves, so that it fails alone. Whoever goes away before the writing of
theirs begins has asked for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from gpool.core.errors import Unreachable

I = TypeVar("I")  # noqa: E741 - an item
W = TypeVar("W")
A = TypeVar("A")
MOST_TOGETHER = 1000
"""Items in one write: bounds how long the first of them waits."""


class Gathering(Generic[I, W, A]):
    """`alone` writes one, folds it and answers. `together` writes many, and then `settle` folds what that gave and answers
    each in its place: it is not asked again, whatever it raises."""

    def __init__(
        self,
        alone: Callable[[I], Awaitable[A]],
        together: Callable[[Sequence[I]], Awaitable[W]],
        settle: Callable[[Sequence[I], W], Sequence[A]],
    ) -> None:
        self._alone, self._together, self._settle = alone, together, settle
        self._is_writing = False
        self._waiting: list[tuple[I, asyncio.Future[A]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def take(self, item: I) -> A:
        """The answer to this one, once it is committed."""
        if self._is_writing:
            answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
            self._waiting.append((item, answer))
            return await answer
        self._is_writing = True
        try:
            return await self._alone(item)
        finally:
            self._go_on()

    def _go_on(self) -> None:
        self._is_writing = bool(self._waiting)
        if self._waiting:
            self._writing = asyncio.create_task(self._write_waiting(), name="gpool-gathering")

    async def _write_waiting(self) -> None:
        there = [each for each in self._waiting if not each[1].done()]
        group, self._waiting = there[:MOST_TOGETHER], there[MOST_TOGETHER:]
        try:
            if group:
                await self._write(group)
        finally:
            for _, answer in group:
                answer.cancel()  # done already, unless we are being stopped
            self._go_on()

    async def _write(self, group: Sequence[tuple[I, asyncio.Future[A]]]) -> None:
        items = [item for item, _ in group]
        try:
            written = await self._together(items)
        except Exception as error:  # noqa: BLE001 - raised where it was asked for; nothing of the group was written
            if len(group) == 1 or isinstance(error, Unreachable):
                _fail(group, error)
                return
            middle = len(group) // 2  # one of them is to blame, and the others must not suffer
            await self._write(group[:middle])
            await self._write(group[middle:])
            return
        try:
            answers = self._settle(items, written)
        except Exception as error:  # noqa: BLE001 - raised where it was asked for; the rest of the group is still to be written
            _fail(group, error)
            return
        for (_, answer), found in zip(group, answers, strict=True):
            if not answer.done():
                answer.set_result(found)


def _fail(group: Sequence[tuple[I, asyncio.Future[A]]], error: Exception) -> None:
    for _, answer in group:
        if not answer.done():
            answer.set_exception(error)

"""The server's disk: the real store, driven inline, whose commits take time and can be interrupted by a crash.

A group of operations is one transaction; callers are answered after its commit, in order. A crash before it discards
the group; a crash after it leaves effects that no caller knows of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from gpool.core.errors import GpoolError
from gpool.server.store import InlineStore
from gpool.server.store.protocol import Operation
from gpool.testing.dice import Dice
from gpool.testing.loop import VirtualLoop

T = TypeVar("T")
MS = 1_000
MAX_GROUP = 256


@dataclass(slots=True)
class PendingOperation:
    operation: Operation[Any]
    future: asyncio.Future[Any]
    value: Any = None
    error: BaseException | None = None

    def answer(self) -> None:
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(self.error)


@dataclass(slots=True)
class DiskSpeed:
    commit_us: tuple[int, int] = (100, 3 * MS)
    answer_us: tuple[int, int] = (10, 500)
    stuck_until_us: int = 0

    def stall_until(self, at_us: int) -> None:
        self.stuck_until_us = at_us


class SimulatedDisk:
    def __init__(
        self,
        loop: VirtualLoop,
        dice: Dice,
        file: InlineStore,
        pace: DiskSpeed,
        committed: Callable[[], None],
        broken: Callable[[str], None],
    ) -> None:
        self._loop, self._dice, self._file, self._pace = loop, dice, file, pace
        self._committed, self._broken = committed, broken
        self._waiting: list[PendingOperation] = []
        self._group: list[PendingOperation] = []
        self._open = False  # whether a transaction is open
        self._dead = False
        self.unanswered = 0
        self.commits = 0
        self.last_answer_us = -1

    # ---- the store's interface

    async def write(self, operation: Operation[T]) -> T:
        asked = self._ask(operation)
        self._waiting.append(asked)
        if not self._open and len(self._waiting) == 1:
            self._loop.call_soon(self._begin)
        answer: T = await asked.future
        return answer

    async def read(self, operation: Operation[T]) -> T:
        asked = self._ask(operation)
        self._loop.after_us(self._dice.between(10, 300), self._look, asked)
        answer: T = await asked.future
        return answer

    async def close(self) -> None: ...

    # ---- execution

    def _ask(self, operation: Operation[T]) -> PendingOperation:
        if self._dead:
            raise asyncio.CancelledError  # the process is gone: nothing of it reaches the disk
        self.unanswered += 1
        return PendingOperation(operation, self._loop.create_future())

    def _look(self, asked: PendingOperation) -> None:
        if self._dead:
            return
        self._run(asked, self._file.read_now)
        self._loop.after_us(self._dice.between(10, 300), self._answer, [asked])

    def _begin(self) -> None:
        if self._dead or self._open or not self._waiting:
            return
        self._group, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
        self._open = True
        self._file.begin_group()
        for asked in self._group:
            self._run(asked, self._file.write_now)
        self.executed(self._group)
        delay = self._dice.between(*self._pace.commit_us)
        delay = max(delay, self._pace.stuck_until_us - self._loop.us)
        self._loop.after_us(delay, self._commit)

    def executed(self, group: list[PendingOperation]) -> None:
        """A group has run and is not durable yet. Flaws answer here, too early."""

    def _run(self, asked: PendingOperation, run: Callable[[Operation[Any]], Any]) -> None:
        try:
            asked.value = run(asked.operation)
        except GpoolError as refusal:
            asked.error = refusal
        except Exception as error:  # noqa: BLE001 - any error of the store is a violation
            asked.error = error
            self._broken(f"the store raised {error!r}")

    def _commit(self) -> None:
        if self._dead:
            return
        self._file.commit_group()
        self._open = False
        self.commits += 1
        self._committed()
        group, self._group = self._group, []
        self._loop.after_us(self._dice.between(*self._pace.answer_us), self._answer_group, group)

    def _answer_group(self, group: list[PendingOperation]) -> None:
        if not self._dead:
            self._answer(group)
            self._begin()

    def _answer(self, group: list[PendingOperation]) -> None:
        if self._dead:
            return
        self.last_answer_us = self._loop.us
        self.unanswered -= len(group)
        for asked in group:
            asked.answer()

    @property
    def is_quiet(self) -> bool:
        return not self.unanswered and self.last_answer_us < self._loop.us

    def crash(self) -> bool:
        """Return whether an open group was discarded."""
        lost = self._open
        if self._open:
            self._file.abandon_group()
            self._open = False
        self._dead = True
        return lost

"""SQLite store: one writer with group commit, some reader threads; no other process may write the database.

The writer is a thread; brief writes on a fast disk are committed in the event loop's thread, because passing three of
them to a thread and back is most of a short task's latency. Every commit is synced before it is answered.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any, TypeVar

from gpool.core.errors import GpoolError, Unreachable
from gpool.server.store.drivers.shared import MAX_GROUP, Waiting, answer_all
from gpool.server.store.drivers.sqlite_connection import Connection
from gpool.server.store.protocol import Operation, is_brief
from gpool.server.store.sealing import KeyHolder

T = TypeVar("T")

QUICK_COMMIT_S = 0.001
"""While the average commit of brief writes takes longer, the writer thread commits them."""

SLOW_DECAY = 0.98
"""Factor on that average after each group of the thread, so that the event loop tries again."""


class SqliteStore:
    def __init__(
        self,
        path: Path,
        loop: asyncio.AbstractEventLoop,
        readers: int,
        keys: KeyHolder | None = None,
    ) -> None:
        self._loop = loop
        self._closed = False
        self._near: list[
            Waiting
        ] = []  # brief writes, committed together in the loop's next iteration
        self._handed = (
            0  # writes queued for the thread; while there are any, it owns the connection
        )
        self._pace_s = 0.0  # moving average of the duration of a commit of brief writes
        self._writes: SimpleQueue[Waiting | None] = SimpleQueue()
        self._reads: SimpleQueue[Waiting | None] = SimpleQueue()
        writer = self._writer = Connection(str(path), writes=True, keys=keys)
        self._reader = Connection(str(path), writes=False, keys=keys)
        reading = [Connection(str(path), writes=False, keys=keys) for _ in range(readers)]
        self._threads = [
            Thread(target=self._write_all, args=(writer,), name="store-writer", daemon=True)
        ]
        self._threads += [
            Thread(
                target=self._read_all, args=(reader,), name=f"store-reader-{number}", daemon=True
            )
            for number, reader in enumerate(reading)
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    async def open(cls, path: Path, readers: int = 2, keys: KeyHolder | None = None) -> SqliteStore:
        return cls(path, asyncio.get_running_loop(), readers, keys)

    @staticmethod
    def inline(path: Path | str, *, synchronous: str = "FULL") -> InlineStore:
        return InlineStore(Path(path), synchronous)

    async def write(self, operation: Operation[T]) -> T:
        """Commit brief writes in this thread, one commit per loop iteration, while the disk is fast.

        Other writes, and any write while the thread is busy, go to the thread in call order.
        """
        waiting = self._waiting(operation)
        if is_brief(operation) and not self._handed and self._pace_s < QUICK_COMMIT_S:
            self._near.append(waiting)
            if len(self._near) == 1:
                self._loop.call_soon(self._write_near)
        else:
            self._hand_over([*self._near, waiting])
            self._near.clear()
        value: T = await waiting.future
        return value

    async def read(self, operation: Operation[T]) -> T:
        waiting = self._waiting(operation)
        if is_brief(operation):
            return self._reader.alone(operation)
        self._reads.put(waiting)
        value: T = await waiting.future
        return value

    def _waiting(self, operation: Operation[T]) -> Waiting:
        if self._closed:
            raise Unreachable("the server is shutting down; try again in a moment")
        return Waiting(operation, self._loop.create_future())

    def _hand_over(self, group: list[Waiting]) -> None:
        self._handed += len(group)
        for waiting in group:
            self._writes.put(waiting)

    def _write_near(self) -> None:
        group, self._near = self._near, []
        if not group:
            return  # passed to the thread meanwhile
        began = perf_counter()
        try:
            begun = self._writer.begins()
        except sqlite3.Error:  # the thread gets the same error and answers with it
            begun = False
        if not begun:
            self._hand_over(group)
            return
        self._writer.group(group, begun=True)
        self._pace_s += (perf_counter() - began - self._pace_s) / 8
        answer_all(group)

    def _written(self, group: list[Waiting]) -> None:
        self._handed -= len(group)
        self._pace_s *= SLOW_DECAY
        answer_all(group)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._hand_over(self._near)
        self._near = []
        self._writes.put(None)
        for _ in self._threads[1:]:
            self._reads.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._reader.close()

    # ---- in the threads

    def _write_all(self, connection: Connection) -> None:
        going = True
        while going:
            taken = [self._writes.get()]
            try:
                while len(taken) < MAX_GROUP and taken[-1] is not None:
                    taken.append(self._writes.get_nowait())
            except Empty:
                pass
            going = taken[-1] is not None
            group = [waiting for waiting in taken if waiting is not None]
            if group:
                connection.group(group)
                going = self._tell(self._written, group) and going
        connection.close()

    def _read_all(self, connection: Connection) -> None:
        while (waiting := self._reads.get()) is not None:
            try:
                waiting.value = connection.alone(waiting.operation)
            except Exception as exc:  # noqa: BLE001 - raised in the caller of `read`
                waiting.fail(exc)
            if not self._tell(answer_all, [waiting]):
                break
        connection.close()

    def _tell(self, call: Callable[[list[Waiting]], None], answered: list[Waiting]) -> bool:
        """Wake the event loop once for all of them. False: the loop is closed, and so are all callers."""
        try:
            self._loop.call_soon_threadsafe(call, answered)
        except RuntimeError:
            return False
        return True


class InlineStore:
    """For the World and tools: nothing runs between two calls."""

    def __init__(self, path: Path, synchronous: str) -> None:
        self._writer = Connection(str(path), synchronous=synchronous, writes=True)
        self._reader = Connection(str(path), synchronous=synchronous, writes=False)
        self._grouping = False

    def write_now(self, operation: Operation[T]) -> T:
        return (self._writer.drive if self._grouping else self._writer.alone)(operation)

    def read_now(self, operation: Operation[T]) -> T:
        return self._reader.alone(operation)

    def begin_group(self) -> None:
        self._writer.begin()
        self._grouping = True

    def commit_group(self) -> None:
        self._writer.commit()
        self._grouping = False

    def abandon_group(self) -> None:
        self._writer.rollback()
        self._grouping = False

    def group_now(self, operations: Iterable[Operation[Any]]) -> list[Any]:
        """Run all in one commit; a refusal (`GpoolError`) is returned in place of its operation's value."""
        self.begin_group()
        answers: list[Any] = []
        try:
            for operation in operations:
                try:
                    answers.append(self._writer.drive(operation))
                except GpoolError as exc:
                    answers.append(exc)
            self.commit_group()
        except BaseException:
            self.abandon_group()
            raise
        return answers

    def close(self) -> None:
        self._writer.close()
        self._reader.close()
        self._grouping = False

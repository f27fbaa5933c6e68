"""SQLite behind the store's door: one writer that commits in groups, a few reader threads, no other process.

The writer is a thread, except for brief writes on a quick disk: those are committed in the loop's own thread, because
handing three of them over and back is most of what a single short task would wait for. Each commit is synced (`synchronous=FULL`) before anybody is answered. It refuses to be shared over a network disk.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any, TypeVar

import msgspec

from gpool.core.errors import GpoolError, InternalFault, Unreachable
from gpool.server.store.drivers.pending import MAX_GROUP, RefusedLate, Waiting, answer_all, writes
from gpool.server.store.operation import again, is_brief
from gpool.server.store.protocol import Operation, Relation, Row, Statement

T = TypeVar("T")
Columns = tuple[tuple[str, str], ...]

READERS = 2
BUSY_TIMEOUT_S = 30.0
LOCKED_S = 0.02
"""How long SQLite itself waits for somebody else's lock; the threads ask again until `BUSY_TIMEOUT_S`, the loop does not."""

QUICK_COMMIT_S = 0.001
"""Commits that take longer on the average are the thread's."""

SLOW_FORGIVEN = 0.98
"""Each group of the thread makes the loop forget a little of how slow its own commits were, so that it tries again."""

WRITER_CACHE_KIB, READER_CACHE_KIB = 32 * 1024, 8 * 1024
_encode = msgspec.json.Encoder().encode


def _has_blob(columns: Columns) -> bool:
    return any(kind == "blob" for _, kind in columns)


def _table(name: str, columns: Columns) -> str:
    return f"relation_{name}_" + "_".join(f"{column}_{kind[0]}" for column, kind in columns)


@lru_cache(maxsize=512)
def compiled(sql: str, relations: tuple[tuple[str, Columns], ...]) -> str:
    """The statement with each relation as a subquery over one JSON parameter, or as a temporary table if it has blobs."""
    for name, columns in relations:
        if _has_blob(columns):
            source = f"temp.{_table(name, columns)}"
        else:
            picked = ", ".join(
                f"json_extract(value, '$[{i}]') AS {column}"
                for i, (column, _) in enumerate(columns)
            )
            source = f"(SELECT {picked} FROM json_each(:relation_{name}))"  # noqa: S608 - names are ours
        sql = sql.replace("{" + name + "}", source)
    return sql


class Connection:
    """One SQLite connection that runs statements. Belongs to one thread at a time."""

    def __init__(
        self,
        path: str,
        *,
        synchronous: str = "FULL",
        writes: bool,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
    ) -> None:
        self._raw = sqlite3.connect(
            path,
            timeout=LOCKED_S,
            isolation_level=None,  # we say BEGIN ourselves; sqlite3 would not before a SELECT
            check_same_thread=False,
            cached_statements=512,
        )
        for pragma in (
            "journal_mode=WAL",
            f"synchronous={synchronous}",
            "temp_store=MEMORY",
            "secure_delete=OFF",
            f"cache_size=-{WRITER_CACHE_KIB if writes else READER_CACHE_KIB}",
            "journal_size_limit=67108864",
            f"query_only={'OFF' if writes else 'ON'}",
        ):
            self._raw.execute(f"PRAGMA {pragma}")
        self._busy_timeout_s = busy_timeout_s
        self._temporary: set[str] = set()
        self._begin = "BEGIN IMMEDIATE" if writes else "BEGIN"

    def begin(self) -> None:
        ends = perf_counter() + self._busy_timeout_s
        while not self.begins():
            if perf_counter() > ends:
                raise Unreachable(
                    "another program keeps the database locked; nothing was written, try again later"
                )

    def begins(self) -> bool:
        """False when somebody else, a backup say, has the database locked."""
        try:
            self._raw.execute(self._begin)
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            return False
        return True

    def commit(self) -> None:
        self._raw.execute("COMMIT")

    def rollback(self) -> None:
        self._temporary.clear()  # temporary tables made in the transaction go with it
        if self._raw.in_transaction:
            self._raw.execute("ROLLBACK")

    def close(self) -> None:
        self.rollback()
        self._raw.close()

    def execute(self, statement: Statement) -> list[Row]:
        if not statement.relations:
            return self._raw.execute(statement.sql, statement.parameters).fetchall()
        signature = tuple(
            (name, relation.columns) for name, relation in statement.relations.items()
        )
        parameters = dict(statement.parameters)
        filled = []
        for name, relation in statement.relations.items():
            if _has_blob(relation.columns):
                filled.append(self._fill(name, relation))
            else:
                parameters[f"relation_{name}"] = _encode(relation.rows).decode()
        rows = self._raw.execute(compiled(statement.sql, signature), parameters).fetchall()
        for table in filled:
            self._raw.execute(f"DELETE FROM temp.{table}")  # noqa: S608 - the name is ours
        return rows

    def _fill(self, name: str, relation: Relation) -> str:
        table = _table(name, relation.columns)
        if table not in self._temporary:
            columns = ", ".join(
                f"{column} {'INTEGER' if kind == 'int' else kind.upper()}"
                for column, kind in relation.columns
            )
            self._raw.execute(f"CREATE TEMP TABLE IF NOT EXISTS {table} ({columns})")
            self._temporary.add(table)
        places = ", ".join("?" * len(relation.columns))
        self._raw.executemany(f"INSERT INTO temp.{table} VALUES ({places})", relation.rows)  # noqa: S608 - the name is ours
        return table

    def drive(self, operation: Operation[T]) -> T:
        """Runs the operation to its end inside the transaction that is open."""
        steps = again(operation)
        send, execute = steps.send, self.execute
        wrote = False
        try:
            statement = next(steps)
            while True:
                wrote = wrote or writes(statement)
                statement = send(execute(statement))
        except StopIteration as stop:
            value: T = stop.value
            return value
        except GpoolError as refusal:
            if wrote:
                raise RefusedLate(refusal) from refusal
            raise

    def alone(self, operation: Operation[T]) -> T:
        """Runs the operation in a transaction of its own."""
        try:
            self.begin()
            value = self.drive(operation)
            self.commit()
        except sqlite3.Error as exc:
            self.rollback()
            raise _told(exc) from exc
        except RefusedLate as late:
            self.rollback()
            raise late.refusal from None
        except BaseException:
            self.rollback()
            raise
        return value

    def group(self, members: Iterable[Waiting], *, begun: bool = False) -> None:
        """Runs all of them in one transaction and commits. A refused one fails alone.

        Any other exception rolls everything back; then each has its own transaction, so only the culprit fails.
        When none can begin, because somebody else holds the database, all fail at once: none is to blame.
        """
        try:
            if not begun:
                self.begin()
        except (sqlite3.Error, Unreachable) as exc:
            for waiting in members:
                waiting.fail(_told(exc))
            return
        try:
            for waiting in members:
                try:
                    waiting.value = self.drive(waiting.operation)
                except GpoolError as exc:
                    waiting.fail(exc)
            self.commit()
        except Exception:  # noqa: BLE001 - whatever it is, the others must not suffer; `alone` raises it again
            self.rollback()
            for waiting in members:
                waiting.error = None
                try:
                    waiting.value = self.alone(waiting.operation)
                except Exception as exc:  # noqa: BLE001 - raised where the operation was asked for
                    waiting.fail(exc)


def _told(error: sqlite3.Error | Unreachable) -> GpoolError:
    """What passes (a full disk, a lock) may be tried again; the rest is a fault of ours. Nothing was written."""
    if isinstance(error, Unreachable):
        return error
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
        return Unreachable("the server's disk is full; nothing was written, try again later")
    return InternalFault(f"the database refused: {error}")


class SqliteStore:
    """`await SqliteStore.open(path)` for a server; `SqliteStore.inline(path)` to drive it in the caller's thread."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._closed = False
        self._near: list[Waiting] = []  # brief writes, committed together in the loop's next turn
        self._handed = (
            0  # writes in the thread's hands; while there are any, the connection is the thread's
        )
        self._pace_s = 0.0  # what a commit of brief writes takes, smoothed
        self._writes: SimpleQueue[Waiting | None] = SimpleQueue()
        self._reads: SimpleQueue[Waiting | None] = SimpleQueue()
        writer = self._writer = Connection(str(path), writes=True)
        self._reader = Connection(str(path), writes=False)
        readers = [Connection(str(path), writes=False) for _ in range(READERS)]
        self._threads = [
            Thread(target=self._write_all, args=(writer,), name="store-writer", daemon=True)
        ]
        self._threads += [
            Thread(
                target=self._read_all, args=(reader,), name=f"store-reader-{number}", daemon=True
            )
            for number, reader in enumerate(readers)
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    async def open(cls, path: Path) -> SqliteStore:
        """The schema must be there: `open_store` migrates first."""
        return cls(path, asyncio.get_running_loop())

    @staticmethod
    def inline(path: Path | str, *, synchronous: str = "FULL") -> InlineStore:
        return InlineStore(Path(path), synchronous)

    async def write(self, operation: Operation[T]) -> T:
        """Brief ones are committed here, one commit a turn of the loop, as long as the disk is quick.

        The rest, and whatever comes while the thread is at work, is the thread's: in the order of the calls.
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
            raise Unreachable("the server is going down; try again in a moment")
        return Waiting(operation, self._loop.create_future())

    def _hand_over(self, group: list[Waiting]) -> None:
        self._handed += len(group)
        for waiting in group:
            self._writes.put(waiting)

    def _write_near(self) -> None:
        group, self._near = self._near, []
        if not group:
            return  # they were handed over meanwhile
        began = perf_counter()
        try:
            begun = self._writer.begins()
        except sqlite3.Error:  # the thread meets it again, and says so to those who wait
            begun = False
        if not begun:
            self._hand_over(group)
            return
        self._writer.group(group, begun=True)
        self._pace_s += (perf_counter() - began - self._pace_s) / 8
        answer_all(group)

    def _written(self, group: list[Waiting]) -> None:
        """The thread is done with these."""
        self._handed -= len(group)
        self._pace_s *= SLOW_FORGIVEN
        answer_all(group)

    async def close(self) -> None:
        """What waits is still written and answered."""
        if self._closed:
            return
        self._closed = True
        self._hand_over(self._near)
        self._near = []
        self._writes.put(None)
        for _ in range(READERS):
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
            except Exception as exc:  # noqa: BLE001 - raised where the operation was asked for
                waiting.fail(exc)
            if not self._tell(answer_all, [waiting]):
                break
        connection.close()

    def _tell(self, how: Callable[[list[Waiting]], None], answered: list[Waiting]) -> bool:
        """One wake-up of the loop for all of them. False: the loop is gone, and with it everybody who asked."""
        try:
            self._loop.call_soon_threadsafe(how, answered)
        except RuntimeError:
            return False
        return True


class InlineStore:
    """The same operations, in the caller's thread: for the World and for tools. Nothing runs between two calls."""

    def __init__(self, path: Path, synchronous: str) -> None:
        self._writer = Connection(str(path), synchronous=synchronous, writes=True)
        self._reader = Connection(str(path), synchronous=synchronous, writes=False)
        self._grouping = False

    def write_now(self, operation: Operation[T]) -> T:
        """In the group that is open, else in a commit of its own."""
        return (self._writer.drive if self._grouping else self._writer.alone)(operation)

    def read_now(self, operation: Operation[T]) -> T:
        """Sees what was committed, not the open group."""
        return self._reader.alone(operation)

    def begin_group(self) -> None:
        self._writer.begin()
        self._grouping = True

    def commit_group(self) -> None:
        self._writer.commit()
        self._grouping = False

    def abandon_group(self) -> None:
        """As if the process had died before the commit."""
        self._writer.rollback()
        self._grouping = False

    def group_now(self, operations: Iterable[Operation[Any]]) -> list[Any]:
        """All in one commit; a refusal (`GpoolError`) stands in its operation's place."""
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

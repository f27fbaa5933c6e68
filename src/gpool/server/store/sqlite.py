"""SQLite behind the store's door: one writer thread that commits in groups, a few reader threads, no other process.

Each commit is synced (`synchronous=FULL`) before anybody is answered. It refuses to be shared over a network disk.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import msgspec

from gpool.core.errors import GpoolError, InternalFault, Unreachable
from gpool.server.store.driving import MAX_GROUP, Waiting, answer_all
from gpool.server.store.operation import again
from gpool.server.store.protocol import Operation, Relation, Row, Statement

T = TypeVar("T")
Columns = tuple[tuple[str, str], ...]

READERS = 2
BUSY_TIMEOUT_S = 30.0
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

    def __init__(self, path: str, *, synchronous: str = "FULL", writes: bool) -> None:
        self._raw = sqlite3.connect(
            path,
            timeout=BUSY_TIMEOUT_S,
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
        self._temporary: set[str] = set()
        self._begin = "BEGIN IMMEDIATE" if writes else "BEGIN"

    def begin(self) -> None:
        self._raw.execute(self._begin)

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
        try:
            statement = next(steps)
            while True:
                statement = send(execute(statement))
        except StopIteration as stop:
            value: T = stop.value
            return value

    def alone(self, operation: Operation[T]) -> T:
        """Runs the operation in a transaction of its own."""
        self.begin()
        try:
            value = self.drive(operation)
            self.commit()
        except sqlite3.Error as exc:
            self.rollback()
            raise InternalFault(f"the database refused: {exc}") from exc
        except BaseException:
            self.rollback()
            raise
        return value

    def group(self, members: Iterable[Waiting]) -> None:
        """Runs all of them in one transaction and commits. A refused one fails alone.

        Any other exception rolls everything back; then each has its own transaction, so only the culprit fails.
        """
        try:
            self.begin()
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


class SqliteStore:
    """`await SqliteStore.open(path)` for a server; `SqliteStore.inline(path)` to drive it in the caller's thread."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._closed = False
        self._writes: SimpleQueue[Waiting | None] = SimpleQueue()
        self._reads: SimpleQueue[Waiting | None] = SimpleQueue()
        writer = Connection(str(path), writes=True)
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
        return await self._put(self._writes, operation)

    async def read(self, operation: Operation[T]) -> T:
        return await self._put(self._reads, operation)

    async def _put(self, queue: SimpleQueue[Waiting | None], operation: Operation[T]) -> T:
        if self._closed:
            raise Unreachable("the server is going down; try again in a moment")
        future: asyncio.Future[T] = self._loop.create_future()
        queue.put(Waiting(operation, future))
        return await future

    async def close(self) -> None:
        """What waits is still written and answered."""
        if self._closed:
            return
        self._closed = True
        self._writes.put(None)
        for _ in range(READERS):
            self._reads.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

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
                going = self._tell(group) and going
        connection.close()

    def _read_all(self, connection: Connection) -> None:
        while (waiting := self._reads.get()) is not None:
            try:
                waiting.value = connection.alone(waiting.operation)
            except Exception as exc:  # noqa: BLE001 - raised where the operation was asked for
                waiting.fail(exc)
            if not self._tell([waiting]):
                break
        connection.close()

    def _tell(self, answered: list[Waiting]) -> bool:
        """One wake-up of the loop for all of them. False: the loop is gone, and with it everybody who asked."""
        try:
            self._loop.call_soon_threadsafe(answer_all, answered)
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

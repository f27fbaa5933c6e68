"""One SQLite connection that runs statements and operations of the SQLite store."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from time import perf_counter
from typing import Any, TypeVar

import msgspec

from gpool.core.errors import GpoolError, InternalFault, Unreachable
from gpool.server.store.drivers.shared import RefusedLate, Waiting, writes
from gpool.server.store.protocol import Operation, Relation, Relations, Row, Statement, again
from gpool.server.store.sealing import CIPHER, KeyHolder, NoKeys

T = TypeVar("T")
Columns = tuple[tuple[str, str], ...]

BUSY_TIMEOUT_S = 30.0
LOCKED_S = 0.02
"""How long SQLite itself waits for a lock; the threads retry until `BUSY_TIMEOUT_S`, the event loop does not."""

WRITER_CACHE_KIB, READER_CACHE_KIB = 32 * 1024, 8 * 1024
_encode = msgspec.json.Encoder().encode


TABLE_COLUMNS = 6
"""A row in JSON costs its number of columns squared; with 11 columns a temporary table takes a third of the time."""


def in_tables(relations: Relations, *, wide: bool) -> frozenset[str]:
    """Names of the relations that become temporary tables: those with blobs, and those with many columns if `wide`."""
    return frozenset(
        [
            name
            for name, relation in relations.items()
            if (wide and len(relation.columns) >= TABLE_COLUMNS)
            or any(kind == "blob" for _, kind in relation.columns)
        ]
    )


def _table(name: str, columns: Columns) -> str:
    return f"relation_{name}_" + "_".join(f"{column}_{kind[0]}" for column, kind in columns)


@lru_cache(maxsize=512)
def compiled_for_one(sql: str, relations: tuple[tuple[str, Columns], ...]) -> str:
    """SQL with each relation as a subquery of one row whose values are parameters."""
    for name, columns in relations:
        picked = ", ".join(
            f":{parameter} AS {column}"
            for (column, _), parameter in zip(columns, _parameters(name, columns), strict=True)
        )
        sql = sql.replace("{" + name + "}", f"(SELECT {picked})")
    return sql


@lru_cache(maxsize=512)
def _parameters(name: str, columns: Columns) -> tuple[str, ...]:
    return tuple([f"row_{name}_{column}" for column, _ in columns])


@lru_cache(maxsize=512)
def compiled(sql: str, relations: tuple[tuple[str, Columns], ...], tables: frozenset[str]) -> str:
    """SQL with each relation as a subquery over one JSON parameter, or as a temporary table if named in `tables`."""
    for name, columns in relations:
        if name in tables:
            source = f"temp.{_table(name, columns)}"
        else:
            picked = ", ".join(
                f"json_extract(value, '$[{i}]') AS {column}"
                for i, (column, _) in enumerate(columns)
            )
            source = f"(SELECT {picked} FROM json_each(:relation_{name}))"  # noqa: S608 - the names are constants
        sql = sql.replace("{" + name + "}", source)
    return sql


class Connection:
    def __init__(
        self,
        path: str,
        *,
        synchronous: str = "FULL",
        writes: bool,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        keys: KeyHolder | None = None,
    ) -> None:
        self._raw = sqlite3.connect(
            path,
            timeout=LOCKED_S,
            isolation_level=None,  # BEGIN is explicit here; sqlite3 sends none before a SELECT
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
        self._keys = keys or NoKeys()
        self._temporary: set[str] = set()
        self._writes = writes
        self._begin = "BEGIN IMMEDIATE" if writes else "BEGIN"

    def begin(self) -> None:
        ends = perf_counter() + self._busy_timeout_s
        while not self.begins():
            if perf_counter() > ends:
                raise Unreachable(
                    "another program keeps the database locked; nothing was written, try again later"
                )

    def begins(self) -> bool:
        """Begin a transaction; False when another process, such as a backup, has locked the database."""
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
        self._temporary.clear()  # temporary tables created in the transaction are rolled back with it
        if self._raw.in_transaction:
            self._raw.execute("ROLLBACK")

    def close(self) -> None:
        self.rollback()
        self._raw.close()

    def execute(self, statement: Statement) -> list[Row] | KeyHolder:
        if not statement.relations:
            if statement is CIPHER:
                return self._keys
            return self._raw.execute(statement.sql, statement.parameters).fetchall()
        relations = statement.relations
        if statement.plain_insert:
            [relation] = relations.values()
            self._raw.executemany(statement.plain_insert, relation.rows)
            return []
        signature = tuple([(name, relation.columns) for name, relation in relations.items()])
        parameters = dict(statement.parameters)
        if all(len(relation.rows) == 1 for relation in relations.values()):
            with suppress(OverflowError):  # an integer past 64 bits equals no column's, as JSON
                return self._execute_for_one(statement, signature, parameters)
            parameters = dict(statement.parameters)
        if self._writes and (tables := in_tables(relations, wide=True)):
            with suppress(OverflowError):
                return self._execute_for_many(statement, signature, parameters, tables)
            parameters = dict(statement.parameters)
        tables = in_tables(relations, wide=False)
        return self._execute_for_many(statement, signature, parameters, tables)

    def _execute_for_many(
        self,
        statement: Statement,
        signature: tuple[tuple[str, Columns], ...],
        parameters: dict[str, Any],
        tables: frozenset[str],
    ) -> list[Row]:
        """Bind the relations named in `tables` as temporary tables, others as JSON."""
        filled: dict[str, str] = {}
        try:
            for name, relation in statement.relations.items():
                if name in tables:
                    filled[name] = self._table_for(name, relation)
                    self._fill(filled[name], relation)
                else:
                    parameters[f"relation_{name}"] = _encode(relation.rows).decode()
        except OverflowError:  # the transaction goes on
            self._empty(filled.values())
            raise
        sql = compiled(statement.sql, signature, tables)
        rows = self._raw.execute(sql, parameters).fetchall()
        self._empty(filled.values())
        return rows

    def _empty(self, tables: Iterable[str]) -> None:
        for table in tables:
            self._raw.execute(f"DELETE FROM temp.{table}")  # noqa: S608 - the name is a constant

    def pages(self, sql: str, size: int) -> Iterator[list[Row]]:
        """Rows of a query in pages, within the present transaction."""
        found = self._raw.execute(sql)
        while page := found.fetchmany(size):
            yield page

    def _execute_for_one(
        self,
        statement: Statement,
        signature: tuple[tuple[str, Columns], ...],
        parameters: dict[str, Any],
    ) -> list[Row]:
        """Run a statement whose relations have one row each: neither JSON nor a temporary table is needed."""
        for name, relation in statement.relations.items():
            parameters.update(
                zip(_parameters(name, relation.columns), relation.rows[0], strict=True)
            )
        sql = compiled_for_one(statement.sql, signature)
        return self._raw.execute(sql, parameters).fetchall()

    def _table_for(self, name: str, relation: Relation) -> str:
        table = _table(name, relation.columns)
        if table not in self._temporary:
            columns = ", ".join(
                f"{column} {'INTEGER' if kind == 'int' else kind.upper()}"
                for column, kind in relation.columns
            )
            self._raw.execute(f"CREATE TEMP TABLE IF NOT EXISTS {table} ({columns})")
            self._temporary.add(table)
        return table

    def _fill(self, table: str, relation: Relation) -> None:
        places = ", ".join("?" * len(relation.columns))
        self._raw.executemany(f"INSERT INTO temp.{table} VALUES ({places})", relation.rows)  # noqa: S608 - the name is a constant

    def drive(self, operation: Operation[T]) -> T:
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
        try:
            self.begin()
            value = self.drive(operation)
            self.commit()
        except sqlite3.Error as exc:
            self.rollback()
            raise _translated(exc) from exc
        except RefusedLate as late:
            self.rollback()
            raise late.refusal from None
        except BaseException:
            self.rollback()
            raise
        return value

    def group(self, members: Iterable[Waiting], *, begun: bool = False) -> None:
        """Run the operations as `group_commit` describes. If no transaction can begin, all fail at once."""
        try:
            if not begun:
                self.begin()
        except (sqlite3.Error, Unreachable) as exc:
            for waiting in members:
                waiting.fail(_translated(exc))
            return
        try:
            for waiting in members:
                try:
                    waiting.value = self.drive(waiting.operation)
                except GpoolError as exc:
                    waiting.fail(exc)
            self.commit()
        except Exception:  # noqa: BLE001 - the others must not fail with it; `alone` raises it again
            self.rollback()
            for waiting in members:
                waiting.error = None
                try:
                    waiting.value = self.alone(waiting.operation)
                except Exception as exc:  # noqa: BLE001 - raised in the caller of `write`
                    waiting.fail(exc)


def _translated(error: sqlite3.Error | Unreachable) -> GpoolError:
    """A full disk or a lock is `Unreachable`, which callers may retry; all else is a server fault. Nothing was written."""
    if isinstance(error, Unreachable):
        return error
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
        return Unreachable("the server's disk is full; nothing was written, try again later")
    return InternalFault(f"the database refused: {error}")

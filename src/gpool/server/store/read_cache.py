"""Rows of earlier reads, reused until a write touches them. Depends on statements alone; opens no connection.

A cached read is observed: its statements name the tables it depends on. So is every write of this server: its
statements name the tables, and as a rule the ids of the rows that it changes, in parameters and relations.

- An entry without ids is dropped by any write to one of its tables.
- An entry with ids (of the task, its batch, account, node …) is dropped by a write to one of its `ROW_TABLES` that binds
  one of these ids, or that binds no id at all; and by any write to another one of its tables.
- A write of unknown outcome (cancelled, or the connection was lost) suspends all entries for `UNKNOWN_S`.

Reads under way collect what is touched meanwhile, and are kept only if it does not concern them. Writes of other
replicas are reported by the change feed (`touch`); entries are used only up to `confirmed_s`, the time until which the
feed was followed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Hashable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from time import monotonic
from typing import Any, TypeVar

from gpool.server.store.protocol import Operation, Replayable, Statement, Store, again, is_brief

T = TypeVar("T")

ROW_TABLES = frozenset(
    {"tasks", "attempt_notes", "members", "gangs", "checkpoints", "nodes", "specs"}
)
"""Tables whose rows are changed by statements that bind their ids."""
ID_NAMES = frozenset({"id", "task", "batch", "node", "user", "team", "spec"})
EVERYTHING = "*"
"""Stands for the tables of a statement that is not understood."""
UNFOLLOWED_S = 1.0
"""Age up to which rows of tables outside the change feed are used, with other replicas."""
UNKNOWN_S = 60.0
MOST_ROWS = 20_000
"""Weight of all entries together, in rows."""

_WRITTEN = re.compile(r"\b(?:INTO|UPDATE|DELETE FROM)\s+([a-z_]+)", re.IGNORECASE)
_READ = re.compile(r"\b(?:FROM|JOIN)\s+([a-z_]+)", re.IGNORECASE)
_HEARTBEAT = re.compile(r"UPDATE nodes SET last_beat_at = [^,]* FROM ")
"""Heartbeats change no row that is cached: pages of nodes are not."""


_CREATION = re.compile(r"INSERT INTO (?:tasks|specs) (?!.*DO UPDATE)", re.DOTALL)
"""New tasks and specs, which no earlier row depends on. The ids that they bind are negated: lists of an account's tasks
depend on the negated id of the account.
"""


@lru_cache(maxsize=1024)
def written_tables(sql: str) -> frozenset[str]:
    """Tables that a statement writes."""
    if sql.startswith("SELECT") or _HEARTBEAT.match(sql):
        return frozenset()
    return frozenset(map(str.lower, _WRITTEN.findall(sql))) or frozenset({EVERYTHING})


@lru_cache(maxsize=1024)
def read_tables(sql: str) -> frozenset[str]:
    return frozenset(map(str.lower, _READ.findall(sql)))


@dataclass(slots=True)
class Touch:
    """Tables written, ids bound by the statements, and tables of which rows were written that no id names."""

    tables: set[str] = field(default_factory=set)
    ids: set[int] = field(default_factory=set)
    unnamed: set[str] = field(default_factory=set)
    is_coarse: bool = False  # collect no ids: nothing is cached that they could spare

    def add(self, statement: Statement) -> None:
        tables = written_tables(statement.sql)
        if not tables:
            return
        self.tables |= tables
        if not tables & ROW_TABLES:
            return
        parameters, relations = statement.parameters, statement.relations
        if self.is_coarse or not (relations or ID_NAMES.intersection(parameters)):
            self.unnamed |= tables
            return
        bound = {value for value in parameters.values() if type(value) is int}
        for relation in relations.values():
            for place, (_, kind) in enumerate(relation.columns):
                if kind == "int":
                    bound.update([row[place] for row in relation.rows])
        bound.discard(None)
        self.ids |= {-id_ for id_ in bound} if _CREATION.match(statement.sql) else bound


def observed(operation: Operation[T], note: Callable[[Statement], None]) -> Operation[T]:
    """The operation, whose statements are noted before they run."""
    made = Replayable(lambda: _noting(again(operation), note))
    made.is_brief = is_brief(operation)
    return made


def _noting(
    steps: Operation[T], note: Callable[[Statement], None]
) -> Generator[Statement, object, T]:
    try:
        statement = next(steps)
        while True:
            note(statement)
            statement = steps.send((yield statement))
    except StopIteration as stop:
        value: T = stop.value
        return value


@dataclass(slots=True)
class _CachedRows:
    value: Any
    tables: dict[str, int]  # versions of the tables of which it depends as a whole
    unnamed: dict[str, int]  # versions of the tables of which it depends by ids
    ids: frozenset[int]
    rows: int
    ends_s: float


class ReadCache:
    """`most_rows` 0: nothing is kept, for servers that do not report their writes. Not thread-safe."""

    def __init__(self, most_rows: int = 0) -> None:
        self._most_rows, self._rows = most_rows, 0
        self._entries: dict[Hashable, _CachedRows] = {}  # the one used longest ago first
        self._by_id: dict[int, set[Hashable]] = {}
        self._versions: dict[str, int] = {}
        self._unnamed: dict[str, int] = {}
        self._reading: dict[object, Touch] = {}  # reads under way
        self._suspended_s = -inf
        self._clearings = 0
        self.confirmed_s = inf
        """Time up to which entries contain the writes of other replicas; without any: for ever."""

    def __len__(self) -> int:
        return len(self._entries)

    def touching(self) -> Touch:
        """To be filled by a write that begins now."""
        return Touch(is_coarse=not (self._by_id or self._reading))

    async def read(
        self,
        store: Store,
        key: Hashable,
        operation: Operation[T],
        *,
        ids: Callable[[T], Iterable[int] | None] = lambda _: None,
        rows: Callable[[T], int] = lambda _: 1,
        max_age_s: float = inf,
    ) -> T:
        """Value of the entry, else of the operation, which is then kept.

        `ids`: ids on which the value depends; None: on whole tables. `rows`: its weight; 0: it is not kept.
        `max_age_s`: for values that depend on tables outside the change feed, with other replicas.
        """
        now_s = monotonic()
        entry = self._entries.pop(key, None)
        if entry is not None:
            if self._is_valid(entry, now_s):
                self._entries[key] = entry
                value: T = entry.value
                return value
            self._forget(key, entry)
        if not self._most_rows or now_s < self._suspended_s:
            return await store.read(operation)
        token, tables = object(), set[str]()
        versions, unnamed, clearings = dict(self._versions), dict(self._unnamed), self._clearings
        meanwhile = self._reading[token] = Touch()
        try:
            found = await store.read(
                observed(operation, lambda each: tables.update(read_tables(each.sql)))
            )
        finally:
            del self._reading[token]
        weight, named = rows(found), ids(found)
        by_id = frozenset[int]() if named is None else frozenset(named)
        whole = tables if named is None else tables - ROW_TABLES
        is_touched = meanwhile.tables & whole or meanwhile.unnamed & tables or meanwhile.ids & by_id
        if weight and not is_touched and clearings == self._clearings:
            ends_s = inf if self.confirmed_s == inf else now_s + max_age_s
            entry = _CachedRows(
                found,
                {table: versions.get(table, 0) for table in whole},
                {table: unnamed.get(table, 0) for table in tables - whole},
                by_id,
                weight,
                ends_s,
            )
            self._keep(key, entry)
        return found

    def touch(self, touched: Touch) -> None:
        """Drop what a committed write concerns."""
        if EVERYTHING in touched.tables:
            self.clear()
        for table in touched.tables:
            self._versions[table] = self._versions.get(table, 0) + 1
        for table in touched.unnamed:
            self._unnamed[table] = self._unnamed.get(table, 0) + 1
        for meanwhile in self._reading.values():
            meanwhile.tables |= touched.tables
            meanwhile.ids |= touched.ids
            meanwhile.unnamed |= touched.unnamed
        for id_ in self._by_id.keys() & touched.ids:
            for key in tuple(self._by_id.get(id_, ())):
                self._forget(key, self._entries.pop(key))

    def suspend(self) -> None:
        """Use and keep nothing for a while: a write whose outcome is unknown may still be committed."""
        self._suspended_s = monotonic() + UNKNOWN_S
        self.clear()

    def clear(self) -> None:
        """Drop everything, also what is being read."""
        self._entries.clear()
        self._by_id.clear()
        self._rows = 0
        self._clearings += 1

    def _is_valid(self, entry: _CachedRows, now_s: float) -> bool:
        versions, unnamed = self._versions, self._unnamed
        return (
            now_s < min(entry.ends_s, self.confirmed_s)
            and now_s >= self._suspended_s
            and all(versions.get(table, 0) == seen for table, seen in entry.tables.items())
            and all(unnamed.get(table, 0) == seen for table, seen in entry.unnamed.items())
        )

    def _keep(self, key: Hashable, entry: _CachedRows) -> None:
        earlier = self._entries.pop(key, None)
        if earlier is not None:
            self._forget(key, earlier)
        self._entries[key] = entry
        self._rows += entry.rows
        for id_ in entry.ids:
            self._by_id.setdefault(id_, set()).add(key)
        while self._rows > self._most_rows:
            oldest = next(iter(self._entries))
            self._forget(oldest, self._entries.pop(oldest))

    def _forget(self, key: Hashable, entry: _CachedRows) -> None:
        """Remove the traces of an entry that is no longer in `_entries`."""
        self._rows -= entry.rows
        for id_ in entry.ids:
            keys = self._by_id[id_]
            keys.discard(key)
            if not keys:
                del self._by_id[id_]
